"""Files of others, read with bounds: kind, size, depth and duplicate names.

A checkpoint, a tokenizer or a run directory may come from anybody. Whatever
lies there, reading it ends soon, in a value or in one `BadFile`.
"""

import json
import os
import stat
from typing import IO, Any

MIB = 1 << 20
MAX_TOKENIZER_BYTES = 128 * MIB
"""Of a tokenizer.json. A vocabulary of 262,144 needs some 33 MB."""
MAX_DEPTH = 64
"""Objects and lists in each other. Published files have less than 10."""


class BadFile(ValueError):
  """A file that cannot be used: its path, the reason and the way out."""


def read_bytes(
  path: str | os.PathLike[str],
  max_bytes: int,
  count: int | None = None,
  start: int = 0,
) -> bytes:
  """Returns the content of a regular file, or a part of it.

  Args:
    max_bytes: of the whole file, or of the part.
    count: bytes of the part, of which there may be fewer; None reads to the
      end.
    start: of the part.

  Raises:
    BadFile: it is missing, no regular file, too large, or cannot be read.
  """
  try:
    with open_regular(path) as file:
      size = os.fstat(file.fileno()).st_size - start if count is None else count
      if size > max_bytes:
        raise BadFile(
          f"{path}: {size:,} bytes are more than the {max_bytes:,} that are "
          "read here; use another file"
        )
      file.seek(start)
      # A file may grow meanwhile.
      return file.read(max_bytes if count is None else count)
  except OSError as error:
    raise _unreadable(path, error) from error


def open_regular(path: str | os.PathLike[str]) -> IO[bytes]:
  """Opens a regular file, to be read; closing it is the caller's.

  Raises:
    BadFile: it is missing, no regular file, or cannot be read.
  """
  try:
    # Without it, opening a pipe would wait for somebody who writes to it.
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
  except OSError as error:
    raise _unreadable(path, error) from error
  mode = os.fstat(number).st_mode
  if not stat.S_ISREG(mode):
    os.close(number)
    raise BadFile(f"{path} is {_kind(mode)}; put a file there")
  # Not os.fdopen, as a file should know its name.
  return open(path, "rb", opener=lambda *_: number)


def _unreadable(path: str | os.PathLike[str], error: OSError) -> BadFile:
  return BadFile(
    f"{path} cannot be read: {error.strerror or error}; put it there, or name "
    "another directory"
  )


def read_text(path: str | os.PathLike[str], max_bytes: int = MIB) -> str:
  """Returns the text of a file in UTF-8; raises BadFile."""
  try:
    return read_bytes(path, max_bytes).decode("utf-8")
  except UnicodeDecodeError as error:
    raise BadFile(
      f"{path} is not UTF-8: byte {error.object[error.start]:#x} at "
      f"{error.start:,}; copy it again"
    ) from error


def read_json(path: str | os.PathLike[str], max_bytes: int = MIB) -> Any:
  """Returns the value of a JSON file; raises BadFile."""
  return parse_json(read_text(path, max_bytes), str(path))


def read_object(
  path: str | os.PathLike[str], max_bytes: int = MIB
) -> dict[str, Any]:
  """Returns the object of a JSON file; raises BadFile, also for a list."""
  data = read_json(path, max_bytes)
  if not isinstance(data, dict):
    raise BadFile(
      f"{path} must hold an object, not {type(data).__name__}; copy it again"
    )
  return data


def parse_json(text: str | bytes, place: str) -> Any:
  """Returns the value of JSON text.

  Args:
    place: names the text in errors.

  Raises:
    BadFile: it is not JSON, nested too deeply, or names a field twice: readers
      of a file must not see different ones.
  """
  try:
    value = json.loads(text, object_pairs_hook=_object)
  except RecursionError as error:
    raise _too_deep(place) from error
  except ValueError as error:
    raise BadFile(
      f"{place} is not valid JSON: {error}; copy it again"
    ) from error
  _check_depth(value, place)
  return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  found = dict(pairs)
  if len(found) < len(pairs):
    seen: set[str] = set()
    twice = next(k for k, _ in pairs if k in seen or seen.add(k))
    raise ValueError(f"{twice[:80]!r} is there twice")
  return found


def _check_depth(value: Any, place: str) -> None:
  level = [value]
  for _ in range(MAX_DEPTH + 1):
    level = [
      item
      for node in level
      if isinstance(node, dict | list)
      for item in (node.values() if isinstance(node, dict) else node)
      if isinstance(item, dict | list)
    ]
    if not level:
      return
  raise _too_deep(place)


def _too_deep(place: str) -> BadFile:
  return BadFile(
    f"{place} is nested deeper than {MAX_DEPTH} levels; no file that is used "
    "here is, so use another"
  )


def _kind(mode: int) -> str:
  if stat.S_ISDIR(mode):
    return "a directory"
  return "a pipe" if stat.S_ISFIFO(mode) else "not a regular file"
