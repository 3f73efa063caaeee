"""Ctrl-C and SIGTERM: the first asks a run to stop, the second ends it."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


class Signals:
  """Signal handlers of one process, which act on its event loop.

  Attributes:
    number: of the first signal; 0 before it.
  """

  def __init__(self, stop: Callable[[], object], log: Callable[[str], None]):
    """Installs the handlers.

    Args:
      stop: called by the first signal.
      log: gets a line that says what the signal does.
    """
    self.number = 0
    self._stop = stop
    self._log = log
    self._loop = asyncio.get_running_loop()
    self._has_received = False
    for number in _NUMBERS:
      signal.signal(number, self._receive)

  def _receive(self, number: int, frame: object) -> None:
    """Called between two steps of Python, also where a call blocks the loop."""
    del frame
    if self._has_received or self._loop.is_closed():  # The user insists.
      signal.signal(number, signal.SIG_DFL)
      os.kill(os.getpid(), number)
      return
    self._has_received = True
    self._loop.call_soon_threadsafe(self._on_signal, number)

  def _on_signal(self, number: int) -> None:
    self.number = number
    self._stop()
    # Last: nobody may read it, and then it may raise.
    self._log("stopping at the next safe point; again to end at once")

  @contextlib.contextmanager
  def calling(self, stop: Callable[[], object]) -> Iterator[None]:
    """Replaces `stop` in the body of a `with`."""
    before, self._stop = self._stop, stop
    try:
      yield
    finally:
      self._stop = before

  def interrupt(self) -> None:
    """Makes a signal raise KeyboardInterrupt, for code that does not await."""
    for number in _NUMBERS:
      signal.signal(number, self._raise)

  def _raise(self, number: int, frame: object) -> None:
    del frame
    signal.signal(number, signal.SIG_DFL)
    self.number = number
    raise KeyboardInterrupt
