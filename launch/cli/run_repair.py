"""Moves damaged parts of a run directory aside, so that the run goes on.

A pipe, a link to itself or a directory in the place of a file is damage, too.

What is moved keeps its content under another name, NAME.damaged.
"""

import json
import os
import pathlib
import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def mend(
  directory: pathlib.Path,
  *,
  trees: Iterable[str],
  files: Iterable[str],
  rows: Mapping[str, str],
) -> Iterator[str]:
  """Moves what is damaged aside; yields a sentence about each.

  Args:
    trees, files: names that must be directories and files, where they exist.
    rows: names of files of JSON lines, with the number that each line has.
  """
  for name in trees:
    path = directory / name
    if os.path.lexists(path) and not path.is_dir():
      yield f"{path} is no directory, and is now {_aside(path)}"
  for name in files:
    path = directory / name
    if os.path.lexists(path) and not path.is_file():
      yield f"{path} is no file, and is now {_aside(path)}"
  for name, key in rows.items():
    path = directory / name
    if path.is_file():
      yield from _mend_rows(path, key)


def write(path: pathlib.Path, content: str | Iterable[bytes]) -> None:
  """Writes a file that appears when it is whole.

  What is in its place, and is no file, is moved aside. Of several processes
  that write it at once, the last one counts.

  Args:
    content: a text, or parts that are asked for one after the other.

  Raises:
    OSError: it cannot be written; then the file is as before.
  """
  # Each has a name of its own, so that no other one ends in it.
  partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
  if os.path.lexists(path) and not path.is_file():
    _aside(path)
  try:
    with partial.open("xb") as file:
      parts = [content.encode()] if isinstance(content, str) else content
      file.writelines(parts)
    os.replace(partial, path)
  finally:
    partial.unlink(missing_ok=True)


def number(line: bytes, key: str) -> int | None:
  """Returns the number of this name in a row; None if the line is no row.

  A row is a JSON object with such a number. A kill may cut the last one short.
  """
  try:
    row: Any = json.loads(line)
  except (ValueError, RecursionError):
    return None
  found = row.get(key) if isinstance(row, dict) else None
  return found if type(found) is int else None


def numbered(
  path: pathlib.Path, key: str
) -> Iterator[tuple[bytes, int | None]]:
  """Yields the lines of a file with their numbers, one in memory at a time."""
  with path.open("rb") as file:
    for line in file:
      yield line, number(line, key)


def _mend_rows(path: pathlib.Path, key: str) -> Iterator[str]:
  bad, count = list[int](), 0
  for count, (_, found) in enumerate(numbered(path, key), 1):
    if found is None:
      bad.append(count)
  if bad and bad[-1] == count:  # A kill may have cut it.
    bad.pop()
  if not bad:
    return
  aside = _aside(path)
  write(
    path, (line for line, found in numbered(aside, key) if found is not None)
  )
  yield (
    f"{path} has {len(bad)} lines without a {key}, first line {bad[0]}, and "
    f"goes on without them; the whole is now {aside}"
  )


def _aside(path: pathlib.Path) -> pathlib.Path:
  target, count = path.with_name(f"{path.name}.damaged"), 1
  while os.path.lexists(target):
    count += 1
    target = path.with_name(f"{path.name}.damaged{count}")
  path.rename(target)
  return target
