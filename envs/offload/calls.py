"""Calls that leave the event loop: hedged, counted, and kept for each loop.

  Calls.call -> a place -> first call ----------+--> the first answer
                             | slow             |    the other is cancelled
                             +-> a place -> second call

A `Caller` is a setting, and so a value: its connections and processes are those
of a `Client`, one for each event loop.
"""

import abc
import asyncio
import collections
import dataclasses
import math
import statistics
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from envs import call_clock

_T = TypeVar("_T")

_KNOWN_CALLS = 20
_RECENT_CALLS = 200
_KEPT: weakref.WeakKeyDictionary[
  asyncio.AbstractEventLoop, "list[tuple[Caller, Client]]"
] = weakref.WeakKeyDictionary()


class CallError(OSError):
  """A call failed on the other side, or on the way."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hedge:
  """A second call where the first is slow; the first answer wins.

  Attributes:
    percentile: of the seconds of recent calls, above which one is slow.
    min_s: no call is slow before.
    first_s: above which one is slow while fewer than 20 have been answered.

  Source: Dean and Barroso, The Tail at Scale, 2013.
  """

  percentile: float = 95.0
  min_s: float = 0.1
  first_s: float = 5.0

  def __post_init__(self) -> None:
    if not 0 < self.percentile < 100:
      raise ValueError(f"percentile={self.percentile} must be in (0, 100)")
    for name in ("min_s", "first_s"):
      if not 0 <= getattr(self, name) < math.inf:
        raise ValueError(f"{name}={getattr(self, name)} must be finite, >= 0")

  def after_s(self, recent: Sequence[float]) -> float:
    """Returns the seconds after which a call is slow, given recent ones."""
    if len(recent) < _KNOWN_CALLS:
      return self.first_s
    cuts = statistics.quantiles(recent, n=1000, method="inclusive")
    return max(self.min_s, cuts[max(0, round(self.percentile * 10) - 1)])


@dataclasses.dataclass(slots=True)
class CallCounts:
  """Costs of calls since they began.

  Attributes:
    offloaded_calls: sent, hedges included.
    hedges: second calls; `hedges_won` of them were answered first.
    cold_starts: calls for which something had to be started.
    billed_s: sum of their seconds, from sent to answered or given up.
    workers: busy or waiting for work, now.
  """

  offloaded_calls: int = 0
  hedges: int = 0
  hedges_won: int = 0
  cold_starts: int = 0
  billed_s: float = 0.0
  workers: int = 0

  def as_dict(self) -> Mapping[str, float]:
    """Returns the counts by name."""
    return {k: float(v) for k, v in dataclasses.asdict(self).items()}


class Calls:
  """Calls of one setting; used from one event loop.

  Args:
    max_calls: under way; others wait, first come, first served.
  """

  def __init__(self, hedge: Hedge | None, max_calls: int):
    self.counts = CallCounts()
    self._hedge = hedge
    self._places = asyncio.Semaphore(max_calls)
    self._recent: collections.deque[float] = collections.deque(
      maxlen=_RECENT_CALLS
    )

  async def call(self, once: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    """Returns the first answer of one call, or two.

    Args:
      once: sends a call. It is cancelled when its answer is not needed, and
        waited for, so it must end soon then.

    Raises:
      Exception: what the first call raised, if none was answered.
    """
    async with call_clock.place(self._places):
      time = asyncio.get_running_loop().time
      began = time()
      tasks = [asyncio.create_task(self._billed(once))]
      try:
        if self._hedge is not None:
          await asyncio.wait(tasks, timeout=self._hedge.after_s(self._recent))
          if not tasks[0].done():
            tasks.append(asyncio.create_task(self._again(once)))
        answered = await _first(tasks)
        result = answered.result()
        self._recent.append(time() - began)
        self.counts.hedges_won += answered is not tasks[0]
        return result
      finally:
        for task in tasks:
          task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

  async def _again(self, once: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    async with self._places:
      self.counts.hedges += 1
      return await self._billed(once)

  async def _billed(self, once: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    time = asyncio.get_running_loop().time
    began = time()
    self.counts.offloaded_calls += 1
    try:
      return await once()
    finally:
      self.counts.billed_s += time() - began


async def _first(tasks: Sequence[asyncio.Task[_T]]) -> asyncio.Task[_T]:
  """Returns the first task that does not fail, or else the first of all."""
  waiting = set(tasks)
  while waiting:
    done, waiting = await asyncio.wait(
      waiting, return_when=asyncio.FIRST_COMPLETED
    )
    for task in tasks:
      if task in done and not task.cancelled() and task.exception() is None:
        return task
  return tasks[0]


class Client(abc.ABC):
  """The connections or processes of one setting; used on one event loop.

  Attributes:
    calls: hedges and counts what it sends.
  """

  def __init__(self, hedge: Hedge | None, max_calls: int):
    self.calls = Calls(hedge, max_calls)

  @abc.abstractmethod
  async def open(self) -> None:
    """Checks that the other side can be used; see `base.Offloaded`."""

  @abc.abstractmethod
  async def send(self, request: bytes) -> Any:
    """Returns the answer to a request; see `Calls.call`."""

  @abc.abstractmethod
  async def close(self) -> None:
    """Ends the connections or processes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Caller(abc.ABC):
  """A setting by which calls leave the event loop, as a `base.Offloaded`.

  Attributes:
    hedge: a second call for a slow one; None: a call has one attempt.
  """

  hedge: Hedge | None = None

  @abc.abstractmethod
  def client(self) -> Client:
    """Returns a new client, which has sent nothing yet."""

  async def open(self) -> None:
    """Checks that the other side can be used.

    Raises:
      OSError: it cannot, with the way out.
    """
    await self._client.open()

  async def call(self, request: bytes) -> Any:
    """Returns the answer to a request, hedged."""
    client = self._client
    return await client.calls.call(lambda: client.send(request))

  async def close(self) -> None:
    """Ends connections and processes."""
    if (kept := self._kept()) is not None:
      _KEPT[asyncio.get_running_loop()].remove(kept)
      await kept[1].close()

  def counts(self) -> Mapping[str, float]:
    """Returns the costs since the first call."""
    kept = self._kept()
    return {} if kept is None else kept[1].calls.counts.as_dict()

  @property
  def _client(self) -> Client:
    if (kept := self._kept()) is None:
      kept = self, self.client()
      _KEPT.setdefault(asyncio.get_running_loop(), []).append(kept)
    return kept[1]

  def _kept(self) -> "tuple[Caller, Client] | None":
    """Returns the client of this loop with its setting, if there is one."""
    # Equal settings share one. They need no hash: fields may be mappings.
    for kept in _KEPT.get(asyncio.get_running_loop(), ()):
      if kept[0] is self or (type(kept[0]) is type(self) and kept[0] == self):
        return kept
    return None
