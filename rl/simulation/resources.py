"""Resources of a simulated run beside engines and learner: seats and links.

  World.grade --> SeatPool.seat: free, begun cold, or waited for --> graded

  learner --push--> store --pull--> hosts of the engines --> engines
          (bucket by bucket, while decoding goes on)    (`Speed.update_s`)

A plain run declares none: its rewards only take time, and its weights travel
for `Cluster.transfer_s`.
"""

import asyncio
import collections
import contextlib
import dataclasses
import math
from collections.abc import AsyncGenerator

from rl.settings import checks

# Rewards.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seats:
  """Seats at which rewards are computed, one at a time each.

  Attributes:
    count: at most so many; more calls wait, first come, first served.
    elastic: a seat begins for a call that finds none free, and ends when it was
      free for `idle_s`, as on a serverless platform. Else all of them stand
      from the beginning to the end.
    cold_s: from the beginning of an elastic seat to its first call.
    cost: of an hour of one, in the unit of `EnginePool.cost`.
  """

  count: int = 16
  elastic: bool = False
  cold_s: float = 0.0
  idle_s: float = 1.0
  cost: float = 0.0

  def validate(self) -> None:
    """Raises ValueError on seats at which nothing can be graded."""
    checks.at_least(self, 1, "count", where="rewards")
    times = ("cold_s", "idle_s", "cost")
    checks.finite_at_least(self, 0, *times, where="rewards")
    if self.cold_s and not self.elastic:
      why = "seats that stand are never cold"
      checks.refuse(self, "cold_s", "elastic", why=why, where="rewards")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeatCosts:
  """The use of seats in a run, and its price.

  Attributes:
    calls: that got a seat.
    cold_starts: seats that calls began.
    scaled_to_zero: times at which the last seat ended.
    busy_s, alive_s: of all seats, at work, and from beginning to end.
    mean_wait_s, max_wait_s: of a call for its seat, cold starts included, or
      until it gave up.
    cost: of `alive_s`.
  """

  calls: int
  cold_starts: int
  scaled_to_zero: int
  busy_s: float
  alive_s: float
  mean_wait_s: float
  max_wait_s: float
  cost: float

  @property
  def use(self) -> float:
    """Share of the seats' time in which they grade."""
    return self.busy_s / self.alive_s if self.alive_s else 0.0


@dataclasses.dataclass(slots=True, eq=False)
class _Seat:
  begun_s: float
  free_s: float = 0.0  # Since when it is free, if it is.


class SeatPool:
  """The seats of one run, or of several on one event loop.

  Rewards hold a `seat`; the end of a run asks for the `costs`.
  """

  def __init__(self, seats: Seats):
    self._seats = seats
    standing = 0 if seats.elastic else seats.count
    self._num = standing
    # The last to become free comes last, and is taken first: others may end.
    self._free = [_Seat(0.0) for _ in range(standing)]
    self._waiting: collections.deque[asyncio.Future[_Seat]] = (
      collections.deque()
    )
    self._busy: set[_Seat] = set()
    self._asked = self._calls = self._cold_starts = self._scaled_to_zero = 0
    self._busy_s = self._ended_s = self._wait_s = self._max_wait_s = 0.0

  @contextlib.asynccontextmanager
  async def seat(self) -> AsyncGenerator[None]:
    """Waits for a seat and holds it in the body of an `async with`."""
    asked_s = now_s()
    try:
      seat = await self._take()
    finally:
      begun_s = now_s()
      self._asked += 1
      self._wait_s += begun_s - asked_s
      self._max_wait_s = max(self._max_wait_s, begun_s - asked_s)
    self._calls += 1
    try:
      yield
    finally:
      self._busy_s += now_s() - begun_s
      self._give(seat)

  def costs(self) -> SeatCosts:
    """Returns the costs until now."""
    self._end_idle()
    alive = (*self._free, *self._busy)
    alive_s = self._ended_s + sum(now_s() - seat.begun_s for seat in alive)
    return SeatCosts(
      calls=self._calls,
      cold_starts=self._cold_starts,
      scaled_to_zero=self._scaled_to_zero,
      busy_s=self._busy_s,
      alive_s=alive_s,
      mean_wait_s=self._wait_s / max(self._asked, 1),
      max_wait_s=self._max_wait_s,
      cost=alive_s / 3600.0 * self._seats.cost,
    )

  async def _take(self) -> _Seat:
    self._end_idle()
    if self._free:
      seat = self._free.pop()
      self._busy.add(seat)
      return seat
    if self._num < self._seats.count:
      return await self._begin()
    waiter: asyncio.Future[_Seat] = asyncio.get_running_loop().create_future()
    self._waiting.append(waiter)
    return await self._given(waiter)

  async def _begin(self) -> _Seat:
    """Begins a seat, which goes on to be warm if its call gives up."""
    self._num += 1
    self._cold_starts += 1
    seat = _Seat(now_s())
    self._busy.add(seat)
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[_Seat] = loop.create_future()
    loop.call_later(self._seats.cold_s, self._warm, seat, waiter)
    return await self._given(waiter)

  def _warm(self, seat: _Seat, waiter: asyncio.Future[_Seat]) -> None:
    """Hands a seat to the call that began it, or to the next."""
    if waiter.done():
      self._give(seat)
    else:
      waiter.set_result(seat)

  async def _given(self, waiter: asyncio.Future[_Seat]) -> _Seat:
    """Returns the seat that a call is given; one that gives up returns it."""
    try:
      return await waiter
    except asyncio.CancelledError:
      if waiter.done() and not waiter.cancelled():
        self._give(waiter.result())
      raise

  def _give(self, seat: _Seat) -> None:
    """Hands a seat to the next call that waits, or leaves it free."""
    while self._waiting:
      waiter = self._waiting.popleft()
      if not waiter.done():
        waiter.set_result(seat)
        return
    self._busy.discard(seat)
    seat.free_s = now_s()
    self._free.append(seat)

  def _end_idle(self) -> None:
    """Ends the elastic seats that were free for too long."""
    idle_s = self._seats.idle_s
    while self._seats.elastic and self._free:
      end_s = self._free[0].free_s + idle_s
      if end_s >= now_s():
        return
      self._ended_s += end_s - self._free.pop(0).begun_s
      self._num -= 1
      self._scaled_to_zero += not self._num


def now_s() -> float:
  """Returns the time of the running loop."""
  return asyncio.get_running_loop().time()


# Weights.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
  """A link that buckets of weights travel over, one after another.

  Attributes:
    bytes_per_s: of all that share it.
    latency_s: of a bucket.
    shared_by: transfers that it carries at the same time.
  """

  bytes_per_s: float
  latency_s: float = 0.0
  shared_by: int = 1

  def __post_init__(self) -> None:
    checks.above(self, 0, "bytes_per_s", where="link")
    checks.finite_at_least(self, 0, "latency_s", where="link")
    checks.at_least(self, 1, "shared_by", where="link")

  def seconds(self, size_bytes: float) -> float:
    """Returns the seconds of one bucket."""
    return self.latency_s + size_bytes * self.shared_by / self.bytes_per_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightPath:
  """The way of new weights: buckets over links, each when it has arrived.

  Attributes:
    links: from the learner to the hosts of the engines.
  """

  size_bytes: float
  links: tuple[Link, ...]
  bucket_bytes: float = 1e9

  def __post_init__(self) -> None:
    checks.finite_above(self, 0, "size_bytes", "bucket_bytes", where="weights")
    if not self.links:
      raise ValueError("weights.links=(): they go nowhere; give one or more")

  @property
  def seconds(self) -> float:
    """Seconds from the first byte sent to the last one received.

    A link sends a bucket when it has arrived whole, and the one before it is
    sent: so the slowest link is always busy, and the others once.
    """
    number = math.ceil(self.size_bytes / self.bucket_bytes)
    each = [link.seconds(self.size_bytes / number) for link in self.links]
    return sum(each) + (number - 1) * max(each)
