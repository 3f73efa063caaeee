"""Files of a run to which lines are appended: whole lines, or an error."""

import contextlib
import os
import pathlib
from collections.abc import Callable, Iterable


class LineFile:
  """Appends lines to a file: all that a call is given, or none of them.

  A disk that fills up in the middle of a line would leave half of it, in front
  of what is written once there is room again. Each call opens the file, so that
  a directory that is gone is an error. One thread calls at a time.

  Attributes:
    on_unwritable: called with the first error of `try_append`; None raises it.
    check: called before each write; raises OSError where none may be made.
  """

  def __init__(self, path: pathlib.Path):
    """Creates the file, or ends the last line that a crash has cut."""
    self._path = path
    self._failed = False
    self.on_unwritable: Callable[[OSError], None] | None = None
    self.check: Callable[[], None] | None = None
    path.touch()
    with path.open("rb") as file:
      if file.seek(0, os.SEEK_END):
        file.seek(-1, os.SEEK_END)
        if file.read() != b"\n":
          self.append([""])

  def append(self, lines: Iterable[str]) -> None:
    """Adds an end to each line and writes them; returns once the system has.

    Raises:
      OSError: the file is as before.
    """
    if self.check is not None:
      self.check()
    rest = memoryview("".join(f"{line}\n" for line in lines).encode())
    with self._path.open("ab", buffering=0) as file:
      before = file.tell()
      try:
        while rest:
          rest = rest[file.write(rest) :]
      except OSError:
        with contextlib.suppress(OSError):
          file.truncate(before)
        raise

  def try_append(self, lines: Iterable[str]) -> bool:
    """Appends in the midst of other work, which its error should not hit.

    Returns:
      Whether the lines are on disk; after an error none are tried.
    """
    if self._failed:
      return False
    try:
      self.append(lines)
    except OSError as error:
      if self.on_unwritable is None:
        raise
      self._failed = True
      self.on_unwritable(error)
    return not self._failed
