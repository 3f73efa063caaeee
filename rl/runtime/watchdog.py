"""Every wait has a deadline, an owner and a name."""

import asyncio
import contextlib
import dataclasses
import math
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, TypeVar

_T = TypeVar("_T")


class Stalled(TimeoutError):
  """A wait passed its deadline; the message holds everyone who waited."""


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Wait:
  """One wait in progress.

  Attributes:
    owner: who waits: "learner".
    what: what for: "groups 12..19".
    since_s: when it began or last got on, on the clock of the loop.
    deadline_s: seconds it may take.
  """

  owner: str
  what: str
  since_s: float
  deadline_s: float


def table(waits: Iterable[Wait], now_s: float) -> str:
  """Returns one aligned line for each wait, the longest first."""
  rows = [("owner", "what", "waited", "deadline")]
  for wait in sorted(waits, key=lambda wait: wait.since_s):
    waited = f"{now_s - wait.since_s:.1f} s"
    rows.append((wait.owner, wait.what, waited, f"{wait.deadline_s:.1f} s"))
  if len(rows) == 1:
    return "nobody waits"
  a, b, c, d = (max(map(len, column)) for column in zip(*rows, strict=True))
  return "\n".join(
    f"{w:{a}}  {x:{b}}  {y:>{c}}  {z:>{d}}" for w, x, y, z in rows
  )


class _Noted:
  """Lists a wait while its body runs; several a turn, so no generator."""

  __slots__ = ("_wait", "_waits")

  def __init__(self, waits: set[Wait], wait: Wait):
    self._waits = waits
    self._wait = wait

  def __enter__(self) -> None:
    self._waits.add(self._wait)

  def __exit__(self, *error: object) -> None:
    self._waits.discard(self._wait)


class _Deadline:
  """Of one wait; entered, it cancels what it holds when it has passed.

  Attributes:
    stalled: how things stood when it passed.
  """

  def __init__(self, wait: Wait, describe: Callable[[Wait], str]):
    self.wait = wait
    self.stalled: str | None = None
    self._describe = describe
    self._timeout = asyncio.timeout(None)

  async def __aenter__(self) -> None:
    await self._timeout.__aenter__()
    self._begin()

  async def __aexit__(self, *error: Any) -> bool | None:
    self._timer.cancel()
    return await self._timeout.__aexit__(*error)

  @property
  def expired(self) -> bool:
    """Whether it was this that ended the body."""
    return self._timeout.expired()

  def renew(self, now_s: float) -> None:
    """Begins anew, unless it has passed."""
    if self.stalled is None:
      self.wait.since_s = now_s
      self._timer.cancel()
      self._begin()

  def _begin(self) -> None:
    loop = asyncio.get_running_loop()
    self._timer = loop.call_later(self.wait.deadline_s, self._pass)

  def _pass(self) -> None:
    # Before anything is cancelled: what hangs is still in the table.
    self.stalled = self._describe(self.wait)
    self._timeout.reschedule(-math.inf)


class Watchdog:
  """The waits of one event loop.

  `wait`, `got_on` and `guard` are called on the loop; `dump` anywhere, in a
  signal handler or another thread too.
  """

  def __init__(
    self,
    report: Callable[[str], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Starts with no waits.

    Args:
      report: gets the text of every stall, besides the one who raises it. It
        may be called from another thread.
      clock: of the loop, in seconds, also when its time is virtual. `guard`
        keeps to real time.
    """
    self._clock = clock
    self._report = report or (lambda text: None)
    self._waits: set[Wait] = set()
    self._in_steps: set[_Deadline] = set()

  async def wait(
    self,
    awaitable: Awaitable[_T],
    *,
    owner: str,
    what: str,
    deadline_s: float,
    in_steps: bool = False,
  ) -> _T:
    """Returns the result of `awaitable`, which is cancelled on overrun.

    Args:
      in_steps: each call of `got_on` meanwhile is a step, and the deadline is
        that of one step.

    Raises:
      Stalled: it took longer than `deadline_s`.
    """
    since_s = self._clock()
    wait = Wait(owner=owner, what=what, since_s=since_s, deadline_s=deadline_s)
    deadline = _Deadline(wait, self._stalled)
    self._waits.add(wait)
    try:
      async with deadline:
        if in_steps:
          self._in_steps.add(deadline)
        return await awaitable
    except TimeoutError as error:
      # Another TimeoutError is a result of the awaitable, like any exception.
      if deadline.stalled is None or not deadline.expired:
        raise
      self._report(deadline.stalled)
      raise Stalled(deadline.stalled) from error
    finally:
      self._waits.discard(wait)
      self._in_steps.discard(deadline)

  def got_on(self) -> None:
    """Begins the deadlines of all waits in steps anew."""
    for deadline in self._in_steps:
      deadline.renew(self._clock())

  def noted(
    self, *, owner: str, what: str, deadline_s: float
  ) -> contextlib.AbstractContextManager[None]:
    """Lists the body of a `with` in `dump`, and enforces nothing.

    For the many waits that another, guarded wait depends on.
    """
    since_s = self._clock()
    wait = Wait(owner=owner, what=what, since_s=since_s, deadline_s=deadline_s)
    return _Noted(self._waits, wait)

  def dump(self) -> str:
    """Returns a table of everyone who waits now."""
    # set.copy() is one step of the interpreter, so safe in another thread.
    return table(self._waits.copy(), self._clock())

  @contextlib.contextmanager
  def guard(self, *, loop_lag_s: float) -> Iterator[None]:
    """Reports, from a thread, when the running loop itself is blocked.

    A blocked loop cannot notice its own deadlines. Each blockage is reported
    once, with the stack of the loop's thread.

    Args:
      loop_lag_s: longest time the loop may stay in one callback.
    """
    loop = asyncio.get_running_loop()
    loop_thread, stop = threading.get_ident(), threading.Event()
    threading.Thread(
      target=self._watch,
      args=(loop, loop_thread, loop_lag_s, stop),
      name="watchdog",
      daemon=True,
    ).start()
    try:
      yield
    finally:
      # Not joined: the thread waits for a beat of the loop that we are on.
      stop.set()

  def _watch(
    self,
    loop: asyncio.AbstractEventLoop,
    loop_thread: int,
    loop_lag_s: float,
    stop: threading.Event,
  ) -> None:
    """Asks the loop for a beat, over and over; runs in a thread of its own."""
    while not stop.wait(loop_lag_s):
      beat = threading.Event()
      try:
        loop.call_soon_threadsafe(beat.set)
      except RuntimeError:  # The loop is closed.
        return
      reported = False
      while not beat.wait(loop_lag_s) and not stop.is_set():
        if not reported:
          self._report(self._blocked(loop_thread, loop_lag_s))
        reported = True

  def _blocked(self, loop_thread: int, loop_lag_s: float) -> str:
    frame = sys._current_frames().get(loop_thread)
    stack = "".join(traceback.format_stack(frame)) if frame else "unknown\n"
    return (
      f"the event loop is blocked for more than {loop_lag_s:.1f} s in:\n"
      f"{stack}waiting meanwhile:\n{self.dump()}"
    )

  def _stalled(self, wait: Wait) -> str:
    return (
      f"{wait.owner} waited {self._clock() - wait.since_s:.1f} s for"
      f" {wait.what} (deadline {wait.deadline_s:.1f} s); waiting now:\n"
      f"{self.dump()}"
    )
