"""Files of lines that grow as long as a run: segments, all but one compressed.

  events.jsonl                 the newest lines, appended to
  events/000003.jsonl          is about to be compressed
  events/000002.jsonl.gz       older ones; zcat prints them
  events/000001.deleted        up to this one they were deleted

Once the file has a size it is renamed, begun anew, and compressed by a thread.
A kill leaves every line in one place: a segment is removed when its compressed
copy is on disk, and one without such a copy is read as it is. `lines` reads
all of it, also while it is written. The oldest ones are deleted by `delete`
alone, whose mark may hold what a reader needs to begin behind them; a segment
that is gone without a mark is missing.
"""

import contextlib
import gzip
import io
import os
import pathlib
import re
import shutil
import threading
import zlib
from collections.abc import Iterable, Iterator
from typing import TextIO

from models import untrusted_files
from rl.runtime import line_file

MAX_BYTES = 64 << 20
_NAME = re.compile(r"([0-9]{6,})\.jsonl(\.gz)?")
_MARK = re.compile(r"([0-9]{6,})\.deleted")
# Level 6 takes a third longer, and 5% less room.
_LEVEL = 4


class Damaged(ValueError):
  """A segment is missing, or cannot be decompressed or looked for."""


class Unlisted(PermissionError, Damaged):
  """Segments may not be looked for; a run that writes them stops, too."""

  def __str__(self) -> str:
    out = "allow it to this user"
    return f"{self.filename} cannot be read: {self.strerror}; {out}"


class SegmentedFile(line_file.LineFile):
  """Appends lines to a file, and begins it anew once it is long.

  Args:
    max_bytes: of the file; it is closed as a segment by the call that reaches
      them, so a segment ends with a line.
  """

  def __init__(self, path: pathlib.Path, max_bytes: int = MAX_BYTES):
    self._max_bytes = max_bytes
    self._compressing = threading.Lock()
    self._number = max(_numbers(path), default=deleted(path)) + 1
    super().__init__(path)
    _clean(path)  # A kill came in the midst of `delete`.
    if any(file.suffix != ".gz" for file in closed(path)):
      self._compress_later()  # A kill came before.

  def append(self, lines: Iterable[str]) -> None:
    """As `LineFile.append`; what it has written may close a segment."""
    super().append(lines)
    # The lines are on disk. Where a segment cannot be closed, the file grows
    # on, and the next call tries again.
    with contextlib.suppress(OSError):
      if self._path.stat().st_size >= self._max_bytes:
        self._close_segment()

  def _close_segment(self) -> None:
    segment = _segment(self._path, self._number)
    segment.parent.mkdir(exist_ok=True)
    self._path.rename(segment)
    self._number += 1
    self._path.touch()
    self._compress_later()

  def _compress_later(self) -> None:
    # zlib works without the interpreter's lock, so nobody waits for it. The
    # end of the process does not either: what is left is compressed next time.
    threading.Thread(
      target=self._compress, name="segments", daemon=True
    ).start()

  def _compress(self) -> None:
    with self._compressing:
      for segment in closed(self._path):
        if segment.suffix != ".gz":
          with contextlib.suppress(OSError):  # It stays as it is.
            _compress(segment)


def _compress(segment: pathlib.Path) -> None:
  """Replaces a segment by its compressed copy."""
  partial = segment.with_name(f"{segment.name}.gz.partial")
  try:
    with (
      segment.open("rb") as source,
      partial.open("wb") as target,
      gzip.GzipFile("", "wb", _LEVEL, target, mtime=0) as packed,
    ):
      shutil.copyfileobj(source, packed, 1 << 20)
      packed.close()
      target.flush()
      os.fsync(target.fileno())
    partial.rename(segment.with_name(f"{segment.name}.gz"))
    segment.unlink()
  finally:
    partial.unlink(missing_ok=True)


def exists(path: pathlib.Path) -> bool:
  """Returns whether a file, or a segment of it, is or was there."""
  # Path.is_file() raises where the directory may not be looked into.
  return os.path.isfile(path) or bool(closed(path)) or deleted(path) > 0


def closed(path: pathlib.Path) -> list[pathlib.Path]:
  """Returns the closed segments of a file, the oldest first."""
  return [_existing(path, number) for number in _numbers(path)]


def number_of(segment: pathlib.Path) -> int:
  """Returns the number of a closed segment; they count from 1."""
  return int(segment.name.partition(".")[0])


def deleted(path: pathlib.Path) -> int:
  """Returns the number of the last segment that `delete` took; 0 is none."""
  return max(_matching(path, _MARK), default=0)


def mark(path: pathlib.Path, number: int) -> pathlib.Path:
  """Returns the file that stands for deleted segments up to a number."""
  return path.with_suffix("") / f"{number:06}.deleted"


def delete(path: pathlib.Path, number: int, state: str = "") -> None:
  """Deletes the closed segments up to a number.

  A kill leaves either all of them, or a mark with the state.

  Args:
    state: kept in the mark.

  Raises:
    OSError: the mark cannot be written, and nothing is deleted; or something
      cannot be deleted, which is left out when read.
  """
  target = mark(path, number)
  partial = target.with_name(f"{target.name}.partial")
  try:
    with partial.open("w", encoding="utf-8") as file:
      file.write(state)
      file.flush()
      os.fsync(file.fileno())
    partial.rename(target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
      os.fsync(folder)
    finally:
      os.close(folder)
  finally:
    partial.unlink(missing_ok=True)
  _clean(path)


def _clean(path: pathlib.Path) -> None:
  """Removes what a mark stands for, and older marks."""
  if not (last := deleted(path)):
    return
  for file in path.with_suffix("").iterdir():
    found = re.match(r"([0-9]{6,})\.", file.name)
    if found and int(found[1]) <= last and file != mark(path, last):
      file.unlink(missing_ok=True)


def num_bytes(path: pathlib.Path) -> int:
  """Returns the bytes that a file, its segments and its mark take on disk."""
  sizes = 0
  for file in (path, *closed(path), mark(path, deleted(path))):
    with contextlib.suppress(FileNotFoundError):  # Compressed meanwhile.
      sizes += file.stat().st_size
  return sizes


def lines(
  path: pathlib.Path,
  newest: int | None = None,
  first: int = 1,
  last: int | None = None,
) -> Iterator[str]:
  """Yields the lines of a file and its segments, one in memory at a time.

  Args:
    newest: only so many closed segments, and the file; None is all that were
      not deleted.
    first: number of the segment to begin with, if it was not deleted.
    last: number of the closed segment to end with; None goes on to the file.

  Raises:
    Damaged: a segment is missing, or cannot be read to its end.
    FileNotFoundError: there is neither a file nor a segment.
  """
  first = max(first, deleted(path) + 1)
  if newest is not None:
    first = max(first, max(_numbers(path), default=0) + 1 - newest)
  for file in _opened(path, first, last):
    name = f"{path.stem}/{pathlib.Path(file.name).name}"
    with file:
      # gzip takes an empty file for nothing, and no segment is.
      if name.endswith(".gz") and not os.fstat(file.fileno()).st_size:
        raise Damaged(f"{name} is empty; put a copy of it back")
      try:
        yield from file
      except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise Damaged(
          f"{name} cannot be read: {error}; put a copy of it back"
        ) from error


def _opened(
  path: pathlib.Path, first: int, end: int | None
) -> Iterator[TextIO]:
  """Yields the segments from a number on, and then the file, opened.

  Args:
    end: number of the last; None goes on to the file.
  """
  number = first
  while end is None or number <= end:
    # The file before the segment: if it is renamed in between, it is that.
    last = _open(path)
    segment = _open_segment(path, number)
    if segment is not None:
      if last is not None:
        last.close()
      yield segment
      number += 1
      continue
    later = [found for found in _numbers(path) if found >= number]
    if number in later:  # Closed a moment ago.
      continue
    if later:
      raise Damaged(
        f"{path.stem}/{_segment(path, number).name}.gz is missing, but "
        f"{_existing(path, later[0]).name} is there; put it back"
      )
    if last is not None:
      yield last
    elif number == 1:
      raise FileNotFoundError(f"{path} does not exist")
    return


def _open_segment(path: pathlib.Path, number: int) -> TextIO | None:
  plain = _segment(path, number)
  packed = plain.with_name(f"{plain.name}.gz")
  # Twice: it may be compressed in between.
  return _open(packed) or _open(plain) or _open(packed)


def _open(path: pathlib.Path) -> TextIO | None:
  """Opens a text, compressed or not; None if it does not exist.

  Raises:
    Damaged: something else has its name, such as a pipe.
  """
  try:
    opened = untrusted_files.open_regular(path)
    if path.suffix != ".gz":
      return io.TextIOWrapper(opened, "utf-8", "replace")
    opened.close()  # Text of gzip closes only what it has opened.
    return gzip.open(path, "rt", encoding="utf-8", errors="replace")
  except untrusted_files.BadFile as error:
    if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
      return None
    raise Damaged(str(error)) from error
  except FileNotFoundError:  # Removed in between.
    return None


def _numbers(path: pathlib.Path) -> list[int]:
  """Returns the numbers of the closed segments, those deleted left out."""
  gone = deleted(path)
  return sorted(n for n in _matching(path, _NAME) if n > gone)


def _matching(path: pathlib.Path, name: re.Pattern[str]) -> set[int]:
  folder = path.with_suffix("")
  try:
    names = os.listdir(folder) if os.path.isdir(folder) else []
  except PermissionError as error:
    raise Unlisted(error.errno, error.strerror, str(folder)) from error
  return {int(m[1]) for each in names if (m := name.fullmatch(each))}


def _segment(path: pathlib.Path, number: int) -> pathlib.Path:
  return path.with_suffix("") / f"{number:06}.jsonl"


def _existing(path: pathlib.Path, number: int) -> pathlib.Path:
  """Returns the file of a segment: its compressed copy, once that is whole."""
  plain = _segment(path, number)
  packed = plain.with_name(f"{plain.name}.gz")
  return packed if packed.exists() else plain
