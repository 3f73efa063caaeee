"""Moves damaged parts of a run directory aside, so that the run goes on.

What is moved keeps its content under another name, NAME.damaged.
"""

import json
import pathlib
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
    if path.exists() and not path.is_dir():
      yield f"{path} is no directory, and is now {_aside(path)}"
  for name in files:
    path = directory / name
    if path.exists() and not path.is_file():
      yield f"{path} is no file, and is now {_aside(path)}"
  for name, key in rows.items():
    path = directory / name
    if path.is_file():
      yield from _mend_rows(path, key)


def is_row(line: bytes, key: str) -> bool:
  """Returns whether a line is a JSON object with a number of this name."""
  try:
    row: Any = json.loads(line)
  except (ValueError, RecursionError):
    return False
  return isinstance(row, dict) and type(row.get(key)) is int


def _mend_rows(path: pathlib.Path, key: str) -> Iterator[str]:
  lines = path.read_bytes().splitlines(keepends=True)
  # A kill may cut the last line short.
  bad = [i + 1 for i, x in enumerate(lines[:-1]) if not is_row(x, key)]
  if not bad:
    return
  kept = b"".join(line for line in lines if is_row(line, key))
  aside = _aside(path)
  path.write_bytes(kept)
  yield (
    f"{path} has {len(bad)} lines without a {key}, first line {bad[0]}, and "
    f"goes on without them; the whole is now {aside}"
  )


def _aside(path: pathlib.Path) -> pathlib.Path:
  target, count = path.with_name(f"{path.name}.damaged"), 1
  while target.exists():
    count += 1
    target = path.with_name(f"{path.name}.damaged{count}")
  path.rename(target)
  return target
