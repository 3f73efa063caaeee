"""The watchdog: gives every wait a deadline, an owner and a name."""

import asyncio
import collections
import contextlib
import dataclasses
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, TypeVar

_T = TypeVar("_T")
Listed = contextlib.AbstractContextManager[None]
_DEPTH = 8
"""Innermost calls of a stack that are told."""
# Where threads of a pool, or of a mesh, stand while they have nothing to do.
_IDLE = {
  ("mesh_thread.py", "_work"),
  ("threads.py", "_work"),
  ("thread.py", "_worker"),
}
# Threads that serve the loop, and always wait.
_SERVANTS = {"watchdog", "status"}


class Stalled(TimeoutError):
  """A wait passed its deadline; the message lists all waits."""


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Wait:
  """One wait in progress.

  Attributes:
    owner: the waiter, such as "learner".
    what: the thing waited for, such as "groups 12..19".
    since_s: time of its begin or last heartbeat, on the clock of the loop.
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
    has_one = math.isfinite(wait.deadline_s)
    deadline = f"{wait.deadline_s:.1f} s" if has_one else "-"
    rows.append((wait.owner, wait.what, waited, deadline))
  if len(rows) == 1:
    return "nobody waits"
  a, b, c, d = (max(map(len, column)) for column in zip(*rows, strict=True))
  return "\n".join(
    f"{w:{a}}  {x:{b}}  {y:>{c}}  {z:>{d}}" for w, x, y, z in rows
  )


class _Deadline:
  """The deadline of one wait; cancels the body of its `with` when it passes.

  Attributes:
    stalled: description of all waits when it passed.
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
    """True if this deadline ended the body."""
    return self._timeout.expired()

  def renew(self, now_s: float) -> None:
    """Restarts the deadline, unless it has passed."""
    if self.stalled is None:
      self.wait.since_s = now_s
      self._timer.cancel()
      self._begin()

  def _begin(self) -> None:
    loop = asyncio.get_running_loop()
    self._timer = loop.call_later(self.wait.deadline_s, self._pass)

  def _pass(self) -> None:
    # Before anything is cancelled: hanging waits are still in the table.
    self.stalled = self._describe(self.wait)
    self._timeout.reschedule(-math.inf)


def stack(thread: int) -> str:
  """Returns the place where a thread is now, by its number."""
  frame = sys._current_frames().get(thread)
  return "".join(traceback.format_stack(frame)) if frame else "unknown\n"


def suspended(task: asyncio.Future[Any]) -> str:
  """Returns the places where a task waits, the innermost last; "" of none."""
  coroutine = task.get_coro() if isinstance(task, asyncio.Task) else None
  frames = []
  while (frame := getattr(coroutine, "cr_frame", None)) is not None:
    frames.append((frame, frame.f_lineno))
    coroutine = getattr(coroutine, "cr_await", None)
  return "".join(traceback.StackSummary.extract(frames[-_DEPTH:]).format())


def busy_threads(besides: int | None = None) -> str:
  """Returns where the other threads are that have something to do, or "".

  These run device programs, environments, rewards, tokenizers and files; one
  that hangs is the reason of what waits for it.

  Args:
    besides: the number of a thread that is told already.
  """
  frames, told = sys._current_frames(), collections.Counter[tuple[str, str]]()
  for thread in threading.enumerate():
    frame = frames.get(thread.ident or 0)
    is_other = thread is not threading.current_thread()
    is_told = thread.ident == besides or thread.name in _SERVANTS
    if frame is None or not is_other or is_told:
      continue
    code = frame.f_code
    if (os.path.basename(code.co_filename), code.co_name) not in _IDLE:
      calls = "".join(traceback.format_stack(frame)[-_DEPTH:])
      told[thread.name, calls] += 1
  return "".join(
    f"thread {name} is in:\n{calls}"
    if count == 1
    else f"{count} threads {name} are in:\n{calls}"
    for (name, calls), count in told.items()
  )


class Watchdog:
  """The waits of one event loop.

  `wait`, `track`, `heartbeat` and `guard` are called on the loop; `dump`
  anywhere, also in a signal handler or another thread.

  Args:
    report: gets the text of every stall, in addition to the exception. It
      may be called from another thread.
    clock: of the loop, in seconds, real or virtual. `guard` always uses real
      time.
  """

  def __init__(
    self,
    report: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._clock = clock
    self._report = report
    self._waits: set[Wait] = set()
    self._renewable: set[_Deadline] = set()
    self._late: set[str] = set()

  async def wait(
    self,
    awaitable: Awaitable[_T],
    *,
    owner: str,
    what: str,
    deadline_s: float,
    renew_on_heartbeat: bool = False,
  ) -> _T:
    """Returns the result of `awaitable`, which is cancelled on overrun.

    Args:
      renew_on_heartbeat: every `heartbeat` meanwhile restarts the deadline.

    Raises:
      Stalled: it took longer than `deadline_s`.
    """
    since_s = self._clock()
    wait = Wait(owner=owner, what=what, since_s=since_s, deadline_s=deadline_s)
    deadline = _Deadline(wait, self._stalled)
    self._waits.add(wait)
    try:
      async with deadline:
        if renew_on_heartbeat:
          self._renewable.add(deadline)
        return await awaitable
    except TimeoutError as error:
      # Another TimeoutError is a result of the awaitable, like any exception.
      if deadline.stalled is None or not deadline.expired:
        raise
      self._report(deadline.stalled)
      raise Stalled(deadline.stalled) from error
    finally:
      self._waits.discard(wait)
      self._renewable.discard(deadline)

  def heartbeat(self) -> None:
    """Restarts the deadlines of all waits that renew on a heartbeat."""
    for deadline in self._renewable:
      deadline.renew(self._clock())

  @contextlib.contextmanager
  def track(
    self, *, owner: str, what: str, deadline_s: float
  ) -> Iterator[None]:
    """Lists the body of a `with` in `dump`, and enforces nothing.

    For the many waits on which a guarded wait depends.
    """
    since_s = self._clock()
    wait = Wait(owner=owner, what=what, since_s=since_s, deadline_s=deadline_s)
    self._waits.add(wait)
    try:
      yield
    finally:
      self._waits.discard(wait)

  def late(
    self, owner: str, what: str, deadline_s: float, work: asyncio.Future[Any]
  ) -> None:
    """Reports where a call of foreign code stands that is left behind.

    Of each `what` the first one: a hang is seldom alone.
    """
    if what in self._late:
      return
    self._late.add(what)
    self._report(
      f"{owner}: {what} took over {deadline_s:g} s, in:\n{suspended(work)}"
      f"{busy_threads()}".rstrip()
    )

  def waits(self) -> list[tuple[str, str, float, float]]:
    """Returns (owner, what, seconds waited, deadline in seconds) of each wait.

    Called anywhere, as `dump`.
    """
    now_s = self._clock()
    # set.copy() is one step of the interpreter, so safe in another thread.
    return [
      (wait.owner, wait.what, now_s - wait.since_s, wait.deadline_s)
      for wait in self._waits.copy()
    ]

  def dump(self) -> str:
    """Returns a table of all current waits."""
    return table(self._waits.copy(), self._clock())

  @contextlib.contextmanager
  def guard(
    self,
    *,
    loop_lag_s: float,
    end_s: float = math.inf,
    end: Callable[[], None] = lambda: None,
  ) -> Iterator[None]:
    """Reports, from a thread, a blocked event loop.

    A blocked loop cannot notice its own deadlines. Each blockage is reported
    once, with the stack of the loop's thread.

    Args:
      loop_lag_s: longest time the loop may stay in one callback.
      end_s: time after which `end` is called as well, in that thread.
    """
    loop = asyncio.get_running_loop()
    loop_thread, stop = threading.get_ident(), threading.Event()
    threading.Thread(
      target=self._watch,
      args=(loop, loop_thread, loop_lag_s, stop, end_s, end),
      name="watchdog",
      daemon=True,
    ).start()
    try:
      yield
    finally:
      # Not joined: the thread waits for a beat of this very loop.
      stop.set()

  def _watch(
    self,
    loop: asyncio.AbstractEventLoop,
    loop_thread: int,
    loop_lag_s: float,
    stop: threading.Event,
    end_s: float,
    end: Callable[[], None],
  ) -> None:
    """Asks the loop for a beat, over and over; runs in a thread of its own."""
    while not stop.wait(loop_lag_s):
      beat = threading.Event()
      try:
        loop.call_soon_threadsafe(beat.set)
      except RuntimeError:  # The loop is closed.
        return
      reported, asked_s = False, time.monotonic()
      while not beat.wait(loop_lag_s) and not stop.is_set():
        if not reported:
          self._report(self._blocked(loop_thread, loop_lag_s))
        reported = True
        if time.monotonic() - asked_s >= end_s:
          end()
          return

  def _blocked(self, loop_thread: int, loop_lag_s: float) -> str:
    return (
      f"the event loop is blocked for more than {loop_lag_s:.1f} s in:\n"
      f"{stack(loop_thread)}waiting meanwhile:\n{self.dump()}\n"
      f"{busy_threads(besides=loop_thread)}".rstrip()
    )

  def _stalled(self, wait: Wait) -> str:
    return (
      f"{wait.owner} waited {self._clock() - wait.since_s:.1f} s for"
      f" {wait.what} (deadline {wait.deadline_s:.1f} s); waiting now:\n"
      f"{self.dump()}\n{busy_threads()}".rstrip()
    )


UNHEARD = Watchdog()
"""Lists waits that nobody asks for."""
