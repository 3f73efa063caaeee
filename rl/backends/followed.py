"""Programs on other hosts, each followed by a thread of this process."""

import abc
import queue
import signal
import threading
import time

from rl.backends import contract

_END_S = 20.0
_ENDING = (signal.SIGINT, signal.SIGTERM)


class NotPlaced(Exception):
  """A program for which there is no place, or that a backend has lost."""


class Followed(abc.ABC):
  """A program that a thread starts and follows; see `contract.Started`.

  Attributes:
    program: that is run.
    reason, place: see `contract.Started`.
  """

  def __init__(self, program: contract.Program):
    self.program = program
    self.reason = self.place = ""
    self._code: int | None = None
    self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()
    self._killed = threading.Event()
    self._begun = threading.Event()
    self._thread = threading.Thread(
      target=self._run, name=program.name, daemon=True
    )
    program.log.parent.mkdir(parents=True, exist_ok=True)
    program.log.touch()

  def begin(self) -> None:
    """Starts the thread; its launcher calls it once."""
    self._thread.start()

  @abc.abstractmethod
  def _follow(self) -> int:
    """Starts the program and returns its code, in the thread.

    It sets `_begun` once the program runs, ends soon after `_killed` was set,
    and passes on the signals of `_taken`.

    Raises:
      NotPlaced: it could not be started, or was lost.
    """

  def _run(self) -> None:
    try:
      code = self._follow()
    except NotPlaced as error:
      self.reason, code = str(error), contract.NEVER_RAN
    # Whoever waits for the program learns of any end.
    except Exception as error:
      self.reason, code = repr(error), contract.NEVER_RAN
    self._code = code

  def _taken(self) -> list[int]:
    """Returns the signals that were sent since the last call."""
    return [self._signals.get() for _ in range(self._signals.qsize())]

  def _write(self, output: bytes) -> None:
    """Appends to the log of the program."""
    if output:
      with self.program.log.open("ab") as log:
        log.write(output)

  def code(self) -> int | None:
    """Returns its exit code; see `contract.Started`."""
    return self._code

  def signal(self, number: int) -> None:
    """Sends a signal, unless it has ended."""
    if number in _ENDING and not self._begun.is_set():
      # What has no place yet waits for none any more.
      self._killed.set()
    self._signals.put(number)

  def kill(self) -> None:
    """Ends it at once, or before it starts."""
    self._killed.set()
    self.signal(signal.SIGKILL)

  def close(self) -> None:
    """Ends it and waits for that."""
    self.kill()
    self._thread.join(_END_S)

  def has_time_left(self, begin_s: float, place_s: float) -> bool:
    """Waits a little for a place; returns whether there is time for more.

    Args:
      begin_s: when the place was asked for.

    Raises:
      NotPlaced: it is to end.
    """
    if self._killed.wait(0.2):
      raise NotPlaced("it was ended before it had a place")
    return time.monotonic() <= begin_s + place_s


class FollowingLauncher(abc.ABC):
  """Starts programs that threads follow; see `contract.Launcher`."""

  def __init__(self):
    self._processes: list[Followed] = []

  @abc.abstractmethod
  def _make(self, program: contract.Program) -> Followed:
    """Returns a program, not begun."""

  def start(self, program: contract.Program) -> Followed:
    """Starts a program; does not wait for its place."""
    process = self._make(program)
    process.begin()
    self._processes = [x for x in self._processes if x.code() is None]
    self._processes.append(process)
    return process

  def close(self) -> None:
    """Ends every process that is left."""
    for process in self._processes:
      process.kill()
    for process in self._processes:
      process.close()
    self._processes.clear()
