"""The rows of a growing JSON lines file: each look reads only what is new."""

import os
import pathlib
from typing import Any

from launch.report import run_files

_MAX_LINE_BYTES = 8 << 20
_BLOCK = 1 << 20


class FollowedRows:
  """Rows of a file by number; call `look` for those of now.

  A file that was replaced, as a resumed run does, or cut is read anew. The
  newest line of a number counts. A line without its end is left for later, and
  one that is no row is left out.

  Args:
    key: field of the number of a row.

  Attributes:
    changes: grows with every look that found something new.
    names: of fields that some row has, as anything but a text.
  """

  def __init__(self, path: pathlib.Path, key: str = "round"):
    self.changes = 0
    self.names: dict[str, None] = {}
    self._path = path
    self._key = key
    self._rows: dict[int, dict[str, Any]] = {}
    self._inode: int | None = None
    self._offset = 0

  def look(self) -> dict[int, dict[str, Any]]:
    """Returns the rows by their numbers; the caller leaves them as they are."""
    try:
      # Opening a pipe would wait for somebody who writes to it.
      if not self._path.is_file():
        raise FileNotFoundError
      with self._path.open("rb") as file:
        self._read(file)
    except OSError:
      self._forget(None)
    return self._rows

  def _read(self, file: Any) -> None:
    found = os.fstat(file.fileno())
    if found.st_ino != self._inode or found.st_size < self._offset:
      self._forget(found.st_ino)
    if found.st_size == self._offset:
      return
    file.seek(self._offset)
    rest = b""
    while block := file.read(_BLOCK):
      *lines, rest = (rest + block).split(b"\n")
      for line in lines:
        self._offset += len(line) + 1
        self._add(line)
      if len(rest) > _MAX_LINE_BYTES:
        # Its rest will be a line that is no row.
        self._offset += len(rest)
        rest = b""

  def _add(self, line: bytes) -> None:
    try:
      row = run_files.decode(line.decode())
      number = row[self._key]
    except (ValueError, TypeError, LookupError, RecursionError):
      return
    if isinstance(number, int) and isinstance(row, dict):
      self._rows[number] = row
      self.names |= {x: None for x in row if not isinstance(row[x], str)}
      self.changes += 1

  def _forget(self, inode: int | None) -> None:
    if self._rows:
      self._rows, self.names = {}, {}
      self.changes += 1
    self._inode, self._offset = inode, 0
