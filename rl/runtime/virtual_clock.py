"""An event loop with a virtual clock: waits cost no time, order is the same.

  ready callbacks -> run them -> nothing is ready -> time() = next timer -> ...

All of asyncio works on it unchanged, as long as every wait ends by a timer or
by another task. Threads and sockets have no place in virtual time: the loop
does not wait for them.
"""

import asyncio
import selectors
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

_T = TypeVar("_T")

_NUM_NAMED = 8
# Timers this close fall together, in seconds. It must stay above the rounding
# of time(): 1e-7 lasts for 25 years.
_RESOLUTION_S = 1e-7


class Deadlock(RuntimeError):
  """Tasks wait for each other, and no timer will ever wake them."""


class _Clock(selectors.SelectSelector):
  """A selector that advances the clock where the loop would sleep."""

  def __init__(self):
    super().__init__()
    self.now_s = 0.0
    self.jumps = 0
    self.loop: asyncio.AbstractEventLoop | None = None

  def select(
    self, timeout: int | float | None = None
  ) -> list[tuple[selectors.SelectorKey, int]]:
    if timeout is None:
      raise Deadlock(_describe(self.loop))
    if timeout > 0:
      self.now_s += timeout
      self.jumps += 1
    return []


class EventLoop(asyncio.SelectorEventLoop):
  """An event loop that begins at time 0 and never sleeps.

  Raises:
    Deadlock: out of `run_forever` and all that calls it, when nothing is ready
      and nothing is scheduled.
  """

  def __init__(self):
    self._clock = _Clock()
    super().__init__(self._clock)
    self._clock.loop = self
    self._clock_resolution = _RESOLUTION_S

  def time(self) -> float:
    """Returns virtual seconds since the loop was made."""
    return self._clock.now_s

  @property
  def jumps(self) -> int:
    """Number of times that the clock has jumped."""
    return self._clock.jumps


def run(main: Coroutine[Any, Any, _T]) -> _T:
  """Returns the result of `main`, run from time 0 of a fresh virtual loop.

  Raises:
    Deadlock: names the tasks that wait for each other.
  """
  with asyncio.Runner(loop_factory=EventLoop) as runner:
    return runner.run(main)


def _describe(loop: asyncio.AbstractEventLoop | None) -> str:
  """Returns the waiting tasks, each with its line."""
  tasks = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
  lines = [f"  {task.get_name()}: {_place(task)}" for task in tasks]
  more = len(lines) - _NUM_NAMED
  tail = [f"  and {more} more"] if more > 0 else []
  return "\n".join(
    [
      f"{len(tasks)} tasks wait and no timer is left to wake them:",
      *lines[:_NUM_NAMED],
      *tail,
    ]
  )


def _place(task: asyncio.Task[Any]) -> str:
  """Returns the function and line in which a task is suspended."""
  frames: Sequence[Any] = task.get_stack()
  if not frames:
    return "nowhere"
  frame = frames[-1]
  return f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
