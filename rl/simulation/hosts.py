"""Hosts of environments: slots, a queue, and outages that take whole hosts.

  admit: first come, first served --> Place --> run: a start, a step --> release
                  ^                               |
                  +--- free again --- outage of the host: OSError, and later too

Outages are declared, not events: a place knows when it will be lost. What runs
there then fails, and whatever is asked of it afterwards.
"""

import asyncio
import collections
import dataclasses
import math
from collections.abc import Iterator

from rl.settings import checks
from rl.simulation import resources, workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outage:
  """A time in which a host is down; it comes back empty.

  Attributes:
    start_s: on the clock of the run.
    host: its number; None: all hosts, as when what they share is down.
    starts_only: environments that have started go on, as when only their images
      cannot be fetched.
  """

  start_s: float
  down_s: float
  host: int | None = None
  starts_only: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hosts:
  """A pool of equal hosts.

  Attributes:
    count: of hosts, each with `slots` for environments.
    outages: see `random_outages`.
    sources: names of the workloads whose environments need a slot; empty: all.
    cost: of an hour of one host, in the unit of `EnginePool.cost`.
  """

  count: int = 8
  slots: int = 16
  outages: tuple[Outage, ...] = ()
  sources: tuple[str, ...] = ()
  cost: float = 0.0

  def validate(self) -> None:
    """Raises ValueError on hosts that cannot hold an environment."""
    checks.at_least(self, 1, "count", "slots", where="hosts")
    checks.finite_at_least(self, 0, "cost", where="hosts")
    for number, outage in enumerate(self.outages):
      where = f"hosts.outages.{number}"
      checks.finite_at_least(outage, 0, "start_s", where=where)
      out = "a host that is never down needs no outage"
      checks.finite_above(outage, 0, "down_s", where=where, out=out)
      if outage.host is not None and not 0 <= outage.host < self.count:
        raise ValueError(
          f"{where}.host={outage.host} is none of hosts.count={self.count}; "
          f"use 0 to {self.count - 1}, or None for all"
        )

  def validate_sources(self, names: list[str]) -> None:
    """Raises ValueError if a source is not one of these workloads."""
    for name in self.sources:
      checks.known_name("hosts.sources", name, names)


def random_outages(
  *, count: int, every_s: float, down_s: float, until_s: float, seed: int = 0
) -> tuple[Outage, ...]:
  """Returns the outages of hosts that fail independently, at random.

  Args:
    count: of hosts.
    every_s: mean from the return of a host to its next failure.
  """

  def of_host(host: int) -> Iterator[Outage]:
    start_s = 0.0
    for number in range(1 << 20):
      gap = -math.log(workload.uniform(seed, host, number))
      start_s += every_s * gap
      if start_s >= until_s:
        return
      yield Outage(start_s=start_s, down_s=down_s, host=host)
      start_s += down_s

  return tuple(outage for host in range(count) for outage in of_host(host))


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostUse:
  """The use of hosts in a run, and its price.

  Attributes:
    environments: that got a slot; `lost` of them failed with their host.
    use: share of the time of all slots in which one was taken.
    mean_wait_s, max_wait_s: of an environment for its slot.
    cost: of all hosts.
  """

  environments: int
  lost: int
  use: float
  mean_wait_s: float
  max_wait_s: float
  cost: float


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Place:
  """A slot of a host, taken at `begun_s`.

  Attributes:
    lost_s: time at which the next outage takes it.
    stuck_s: time at which the next outage of any kind fails its start.
  """

  host: int
  begun_s: float
  lost_s: float
  stuck_s: float


class HostPool:
  """The hosts of one run, or of several on one event loop.

  An environment calls `admit`, then `run` for all that takes time, then
  `release`; the end of a run asks for the `use`.
  """

  def __init__(self, hosts: Hosts):
    self._hosts = hosts
    self._outages = [
      [one for one in hosts.outages if one.host in (None, host)]
      for host in range(hosts.count)
    ]
    self._taken: list[set[Place]] = [set() for _ in range(hosts.count)]
    self._waiting: collections.deque[asyncio.Future[Place]] = (
      collections.deque()
    )
    self._timer: asyncio.TimerHandle | None = None
    self._begun = self._lost = 0
    self._busy_s = self._wait_s = self._max_wait_s = 0.0

  def serves(self, source: str) -> bool:
    """True when environments of a workload need a slot here."""
    return not self._hosts.sources or source in self._hosts.sources

  async def admit(self) -> Place:
    """Returns a place on the host with the fewest, once there is one."""
    asked_s = resources.now_s()
    place = None if self._waiting else self._take()
    if place is None:
      waiter: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
      self._waiting.append(waiter)
      self._arm()
      try:
        place = await waiter
      except asyncio.CancelledError:
        if waiter.done() and not waiter.cancelled():
          self.release(waiter.result())
        raise
    waited_s = resources.now_s() - asked_s
    self._begun += 1
    self._wait_s += waited_s
    self._max_wait_s = max(self._max_wait_s, waited_s)
    return place

  async def run(
    self, place: Place, seconds: float, starts: bool = False
  ) -> None:
    """Waits for something that takes so long on a place.

    Args:
      starts: it is the start of the environment.

    Raises:
      OSError: its host is down or fails meanwhile.
    """
    fails_s = place.stuck_s if starts else place.lost_s
    left_s = fails_s - resources.now_s()
    if left_s > seconds:
      await asyncio.sleep(seconds)
      return
    if left_s > 0:
      await asyncio.sleep(left_s)
    self._lost += 1
    raise OSError(f"host {place.host} went down at {fails_s:g} s")

  def release(self, place: Place) -> None:
    """Frees a place, unless its host has done so by failing."""
    self._busy_s += min(resources.now_s(), place.lost_s) - place.begun_s
    self._taken[place.host].discard(place)
    self._admit_waiting()

  def use(self) -> HostUse:
    """Returns the use until now, of the places that were released."""
    hosts, passed_s = self._hosts, resources.now_s()
    slots_s = hosts.count * hosts.slots * passed_s
    return HostUse(
      environments=self._begun,
      lost=self._lost,
      use=self._busy_s / slots_s if slots_s else 0.0,
      mean_wait_s=self._wait_s / max(self._begun, 1),
      max_wait_s=self._max_wait_s,
      cost=hosts.count * passed_s / 3600.0 * hosts.cost,
    )

  def _take(self) -> Place | None:
    now_s, best = resources.now_s(), None
    for host, taken in enumerate(self._taken):
      for place in [one for one in taken if one.lost_s <= now_s]:
        taken.discard(place)
      is_up = not any(
        one.start_s <= now_s < one.start_s + one.down_s
        for one in self._outages[host]
      )
      least = self._hosts.slots if best is None else len(self._taken[best])
      if is_up and len(taken) < least:
        best = host
    if best is None:
      return None
    later = [one for one in self._outages[best] if one.start_s > now_s]
    lost_s = [one.start_s for one in later if not one.starts_only]
    place = Place(
      best,
      now_s,
      lost_s=min(lost_s, default=math.inf),
      stuck_s=min((one.start_s for one in later), default=math.inf),
    )
    self._taken[best].add(place)
    return place

  def _admit_waiting(self) -> None:
    while self._waiting:
      if self._waiting[0].done():  # Given up.
        self._waiting.popleft()
      elif place := self._take():
        self._waiting.popleft().set_result(place)
      else:
        self._arm()
        return

  def _arm(self) -> None:
    """Looks again when the next host comes back."""
    now_s = resources.now_s()
    ends = (one.start_s + one.down_s for one in self._hosts.outages)
    back_s = min((end for end in ends if end > now_s), default=math.inf)
    if self._timer is None and back_s < math.inf:
      loop = asyncio.get_running_loop()
      self._timer = loop.call_at(back_s, self._look)

  def _look(self) -> None:
    self._timer = None
    self._admit_waiting()
