"""An event loop on which the order of events follows from the program alone.

  a thread is given work -> promise(due_s) ..... the thread works, in real time
  nothing is ready -> _Clock.select: the earliest of timers and promises
    timer:   the clock jumps there
    promise: waits until it is kept, in real time; then the clock jumps there

Threads work side by side as ever, and their results arrive in the order of the
times that they were promised for, however long each has taken. So two runs of
one program see the same order of events, on machines of any speed. A promise
that is due too early costs the time for which the loop waits, and nothing else.

Sockets, pipes and processes answer when they please, so they are refused.
"""

import asyncio
import contextvars
import heapq
import itertools
import math
import selectors
import time
from collections.abc import Callable
from typing import Any, NoReturn

_RESOLUTION_S = 1e-7  # Timers this close fall together.
_PATIENCE_S = 1800.0
"""Real time after which work that was promised counts as hung."""


class NotRepeatable(RuntimeError):
  """Something was used whose answers no clock can order."""


class Hung(RuntimeError):
  """A thread has not ended its work."""


class _Promise:
  """A result that will arrive at `due_s`; `keep` may be called by a thread.

  Attributes:
    is_awaited: the loop sleeps, or is about to, until it is kept.
  """

  def __init__(self, due_s: float, number: int, loop: "LogicalEventLoop"):
    self.order = due_s, number
    self.callback: Callable[[], object] | None = None
    self.is_awaited = False
    self._loop = loop

  def __lt__(self, other: "_Promise") -> bool:
    return self.order < other.order

  def keep(self, callback: Callable[..., object], *args: Any) -> None:
    """Has the callback run on the loop when it is due."""
    self.callback = lambda: callback(*args)
    if self.is_awaited:
      self._loop.call_soon_threadsafe(lambda: None)  # Wakes `_Clock.select`.


class _Clock(selectors.DefaultSelector):
  """Advances the time where the loop would sleep."""

  def __init__(self):
    super().__init__()
    self.now_s = 0.0
    self.promises: list[_Promise] = []
    self.loop: LogicalEventLoop | None = None

  def select(
    self, timeout: float | None = None
  ) -> list[tuple[selectors.SelectorKey, int]]:
    # Signals, and what threads have to say, at any time.
    events = super().select(0)
    if events or timeout == 0:
      return events
    due_s = self.promises[0].order[0] if self.promises else math.inf
    timer_s = math.inf if timeout is None else self.now_s + timeout
    if timer_s < due_s:
      self.now_s = timer_s
      return []
    if not self.promises:
      return super().select(None)  # A signal may come.
    return self._await(self.promises[0])

  def _await(
    self, promise: _Promise
  ) -> list[tuple[selectors.SelectorKey, int]]:
    """Waits until it is kept, or until something else is to be looked at."""
    promise.is_awaited = True  # First: a thread looks at it after keeping it.
    if promise.callback is None:
      since_s = time.monotonic()
      events = super().select(_PATIENCE_S)
      if time.monotonic() - since_s >= _PATIENCE_S:
        raise Hung(f"a thread has worked for more than {_PATIENCE_S:g} s")
      return events
    heapq.heappop(self.promises)
    self.now_s = max(self.now_s, promise.order[0])
    assert self.loop is not None
    self.loop.call_soon(promise.callback)
    return []


class _Timer(asyncio.TimerHandle):
  """A timer that comes before later ones of the same time.

  asyncio's come in an order that depends on all other timers.
  """

  __slots__ = ("number",)
  number: int

  def __lt__(self, other: Any) -> bool:
    return (self.when(), self.number) < (other.when(), other.number)


class LogicalEventLoop(asyncio.SelectorEventLoop):
  """An event loop with such a clock, which begins at time 0."""

  def __init__(self):
    self._clock = _Clock()
    self._numbers = itertools.count()
    super().__init__(self._clock)
    self._clock.loop = self
    self._clock_resolution = _RESOLUTION_S

  def time(self) -> float:
    """Returns logical seconds since the loop was made."""
    return self._clock.now_s

  def call_at(
    self,
    when: float,
    callback: Callable[..., object],
    *args: Any,
    context: contextvars.Context | None = None,
  ) -> asyncio.TimerHandle:
    """Returns the timer of a callback; see `asyncio.AbstractEventLoop`."""
    loop: Any = self
    timer: Any = _Timer(when, callback, args, self, context)
    timer.number, timer._scheduled = next(self._numbers), True
    heapq.heappush(loop._scheduled, timer)
    return timer

  def set_time(self, time_s: float) -> None:
    """Sets the clock, which has come within rounding of this time.

    Raises:
      RuntimeError: it has not.
    """
    if abs(self._clock.now_s - time_s) > _RESOLUTION_S * max(1.0, time_s):
      raise RuntimeError(f"the time is {self._clock.now_s}, not {time_s}")
    self._clock.now_s = time_s

  def promise(self, due_s: float) -> Callable[..., object]:
    """Returns a function that has a callback run at a time of this clock.

    It is called once, by any thread, and until then the time stays before
    `due_s`. Called on the loop.
    """
    made = _Promise(due_s, next(self._numbers), self)
    heapq.heappush(self._clock.promises, made)
    return made.keep

  def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
    raise NotRepeatable(
      "a repeatable run cannot wait for a process or a connection, whose "
      "answers come at any time; use repeatable=false"
    )

  async def _refuse_later(self, *args: Any, **kwargs: Any) -> NoReturn:
    self._refuse()

  create_connection = create_server = create_unix_connection = _refuse_later
  create_unix_server = create_datagram_endpoint = sock_connect = _refuse_later
  subprocess_exec = subprocess_shell = getaddrinfo = _refuse_later
  connect_read_pipe = connect_write_pipe = _refuse_later
  run_in_executor: Any = _refuse


async def advance(time_s: float) -> None:
  """Moves the clock of an idle loop on; another clock is left alone.

  Sums of times are then those of any other run at this point, to the last bit.
  """
  loop = asyncio.get_running_loop()
  if isinstance(loop, LogicalEventLoop):
    await asyncio.sleep(time_s - loop.time())
    loop.set_time(time_s)


def promise(
  loop: asyncio.AbstractEventLoop, seconds: float, after_s: float = 0.0
) -> tuple[Callable[..., object], float]:
  """Returns a function for a thread to hand a callback to a loop, and its time.

  On a loop with another clock it is `call_soon_threadsafe`.

  Args:
    seconds: that the work takes on the loop's clock, if it is a logical one.
    after_s: time of the work before it in the same thread.
  """
  if not isinstance(loop, LogicalEventLoop):
    return loop.call_soon_threadsafe, 0.0
  due_s = max(loop.time(), after_s) + seconds
  return loop.promise(due_s), due_s
