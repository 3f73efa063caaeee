"""Standard streams of a command: closed ones, and those that lose a reader."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

from rl.runtime import log_line


class _Dropping:
  """A stream that takes all that is written: from an error on, to nowhere."""

  def __init__(self, stream: TextIO, name: str):
    self._stream, self._name = stream, name

  def __getattr__(self, name: str) -> Any:
    return getattr(self._stream, name)

  def write(self, text: str) -> int:
    try:
      return self._stream.write(text)
    except OSError as error:
      self._drop(error)
      return len(text)

  def flush(self) -> None:
    try:
      self._stream.flush()
    except OSError as error:
      self._drop(error)

  def _drop(self, error: OSError) -> None:
    drop(self._stream)
    # On stderr, which may be this stream: then it goes nowhere, too.
    log_line.tell(f"warning: {self._name} takes no more: {error.strerror}")


def open_missing() -> None:
  """Opens those that were closed when the process began on /dev/null."""
  # In this order, to take their numbers: no other file may get these.
  for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
    if getattr(sys, name) is None:
      nowhere = os.open(os.devnull, os.O_RDWR)
      setattr(sys, name, os.fdopen(nowhere, mode))


@contextlib.contextmanager
def dropping() -> Iterator[None]:
  """Goes on where stdout or stderr takes no more, and drops what follows.

  For work that outlives its reader, as in `launch.train .. | tee log`.
  """
  out = cast(TextIO, _Dropping(sys.stdout, "stdout"))
  err = cast(TextIO, _Dropping(sys.stderr, "stderr"))
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    yield


def drop(stream: TextIO) -> None:
  """Sends to nowhere what a stream still holds, and all that follows."""
  nowhere = os.open(os.devnull, os.O_WRONLY)
  os.dup2(nowhere, stream.fileno())
  os.close(nowhere)
