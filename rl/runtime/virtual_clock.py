"""An event loop with a virtual clock: waits cost no time, order is the same.

  ready callbacks -> run them -> nothing is ready -> time() = next timer -> ...

All of asyncio works on it unchanged, as long as every wait ends by a timer or
by another task. Threads and sockets have no place in virtual time: the loop
does not wait for them.
"""

import asyncio
import collections
import contextvars
import heapq
from collections.abc import Callable, Coroutine, Sequence
from concurrent import futures
from typing import Any, TypeVar

_T = TypeVar("_T")
_Entry = tuple[float, asyncio.TimerHandle]

_NUM_NAMED = 8
_FEW_CANCELLED = 50
# Timers this close fall together, in seconds. It must stay above the rounding
# of time(): 1e-7 lasts for 25 years.
_RESOLUTION_S = 1e-7
# Timers that may follow one another at one time; more of them never end.
_MAX_AT_ONCE = 1_000_000


class Deadlock(RuntimeError):
  """The clock stands still: no timer is left, or new ones are due at once."""


class EventLoop(asyncio.SelectorEventLoop):
  """An event loop that begins at time 0 and never sleeps.

  Attributes:
    jumps: number of times that the clock has jumped.

  Raises:
    Deadlock: out of `run_forever` and all that calls it, when nothing is ready
      and nothing is scheduled, or when timers fire again and again at one time.
  """

  def __init__(self):
    super().__init__()
    self._now_s = 0.0
    self.jumps = self._num_at_once = 0
    # Timers with their times first, which compare without running Python: a
    # heap and, sorted, those that were later than all before them. Such are
    # deadlines, which are many, and mostly cancelled.
    self._timers: list[_Entry] = []
    self._last_timers: collections.deque[_Entry] = collections.deque()
    self._timer_cancelled_count = 0

  def time(self) -> float:
    """Returns virtual seconds since the loop was made."""
    return self._now_s

  def call_at(
    self,
    when: float,
    callback: Callable[..., object],
    *args: Any,
    context: contextvars.Context | None = None,
  ) -> asyncio.TimerHandle:
    """Returns the timer of a callback; see `asyncio.AbstractEventLoop`."""
    timer = asyncio.TimerHandle(when, callback, args, self, context)
    timer._scheduled = True
    last = self._last_timers
    if not last or when >= last[-1][0]:
      last.append((when, timer))
    else:
      heapq.heappush(self._timers, (when, timer))
    return timer

  def _run_once(self) -> None:
    """Runs what is ready, or what the next timer makes ready, until stopped.

    In the place of asyncio's own, whose clock and selector take a sixth of a
    simulation's time. Of CPython's internals it uses those that
    `isolation.TESTED_PYTHONS` stands for.
    """
    loop: Any = self
    timers, last, ready = self._timers, self._last_timers, loop._ready
    while True:
      if not ready and not loop._stopping:
        self._jump()
      due_s = self._now_s + _RESOLUTION_S
      while timers and timers[0][0] < due_s:
        _, timer = heapq.heappop(timers)
        timer._scheduled = False
        ready.append(timer)
      while last and last[0][0] < due_s:
        _, timer = last.popleft()
        timer._scheduled = False
        ready.append(timer)
      # No more than these: callbacks that they add come after the next timers.
      for _ in range(len(ready)):
        handle = ready.popleft()
        if not handle._cancelled:
          handle._run()
      if loop._stopping:
        return

  def _jump(self) -> None:
    """Sets the clock to the next timer."""
    timers, last = self._timers, self._last_timers
    cancelled = self._timer_cancelled_count
    if cancelled > _FEW_CANCELLED and cancelled > 0.5 * (
      len(timers) + len(last)
    ):
      self._forget_cancelled()
    while timers and timers[0][1]._cancelled:
      self._timer_cancelled_count -= 1
      heapq.heappop(timers)[1]._scheduled = False
    while last and last[0][1]._cancelled:
      self._timer_cancelled_count -= 1
      last.popleft()[1]._scheduled = False
    if not timers and not last:
      raise Deadlock(_describe(self))
    when_s = timers[0][0] if timers else last[0][0]
    if last and last[0][0] < when_s:
      when_s = last[0][0]
    if when_s > self._now_s:
      self._now_s += when_s - self._now_s
      self.jumps += 1
      self._num_at_once = 0
      return
    self._num_at_once += 1
    if self._num_at_once > _MAX_AT_ONCE:
      raise Deadlock(
        f"{_MAX_AT_ONCE:,} timers followed one another at {self._now_s:g} s: "
        "each is due at once\n" + _waiting(self)
      )

  def _forget_cancelled(self) -> None:
    """Drops cancelled timers, which are the most."""
    for timers in (self._timers, self._last_timers):
      kept = []
      for entry in timers:
        if entry[1]._cancelled:
          entry[1]._scheduled = False
        else:
          kept.append(entry)
      timers.clear()
      timers.extend(kept)
    heapq.heapify(self._timers)
    self._timer_cancelled_count = 0


def run(main: Coroutine[Any, Any, _T]) -> _T:
  """Returns the result of `main`, run from time 0 of a fresh virtual loop.

  Where a loop runs already, as in a cell of a notebook, a thread of its own
  has the virtual one.

  Raises:
    Deadlock: names the tasks that wait.
  """
  try:
    asyncio.get_running_loop()
  except RuntimeError:
    return _run(main)
  with futures.ThreadPoolExecutor(1, "virtual-clock") as thread:
    return thread.submit(_run, main).result()


def _run(main: Coroutine[Any, Any, _T]) -> _T:
  with asyncio.Runner(loop_factory=EventLoop) as runner:
    return runner.run(main)


def _describe(loop: asyncio.AbstractEventLoop | None) -> str:
  """Returns the number of waiting tasks, and each with its line."""
  number = len(asyncio.all_tasks(loop))
  head = f"{number} tasks wait and no timer is left to wake them:"
  return f"{head}\n{_waiting(loop)}"


def _waiting(loop: asyncio.AbstractEventLoop | None) -> str:
  """Returns the waiting tasks, each with its line."""
  tasks = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
  lines = [f"  {task.get_name()}: {_place(task)}" for task in tasks]
  more = len(lines) - _NUM_NAMED
  tail = [f"  and {more} more"] if more > 0 else []
  return "\n".join([*lines[:_NUM_NAMED], *tail])


def _place(task: asyncio.Task[Any]) -> str:
  """Returns the function and line in which a task is suspended."""
  frames: Sequence[Any] = task.get_stack()
  if not frames:
    return "nowhere"
  frame = frames[-1]
  return f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
