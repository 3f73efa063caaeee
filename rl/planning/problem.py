"""The planning problem: fleet, tasks, goal, and the choices to search.

Planning (fleet, tasks, goal, space) --choices--> FleetChoice --simulated--> run
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import get_args

from rl.engine import contract
from rl.planning import fleet
from rl.pools import affinity, placement
from rl.rollout import group_rollout
from rl.schedule import overlap as overlap_lib
from rl.settings import checks
from rl.simulation import hosts as hosts_lib
from rl.simulation import prefill_pool, resources, simulate, workload
from rl.simulation import processor as simulated_processor

SCHEDULES = (
  "sync",
  "strict_pipeline",
  "rollout_pipe",
  "one_step_off",
  "bounded",
  "in_flight",
)
"""The presets of `rl.schedule.overlap`."""

_ON_POLICY = {"sync", "strict_pipeline", "rollout_pipe"}

OBJECTIVES = ("step_s", "cost", "cost_per_token")
"""Quantities to minimise: seconds or cost of a step, cost of a trained token.

Both costs are those of the devices in use."""

# Groups of one simulated run: it takes minutes, and there are many.
_MAX_GROUPS = 20_000
_FIRST_POOL = "decode"  # As `placement.Placement` calls it.
_Engines = tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Goal:
  """The goal of a plan.

  Attributes:
    minimise: one of `OBJECTIVES`.
    max_step_s, max_cost: of a step.
    max_lag: rounds between the first token of a group and its training; a
      promise of the schedule, not only an observation. None: unbounded.
    max_mean_lag: of these rounds as a mean over the trained groups; what it
      costs to learn from late samples is in docs/learning.md.
    max_faults: share of the episodes that end with a fault, such as those whose
      rewards have waited for a seat until their deadline.
  """

  minimise: str = "step_s"
  max_step_s: float = math.inf
  max_cost: float = math.inf
  max_lag: int | None = None
  max_mean_lag: float = math.inf
  max_faults: float = 1.0

  def key(
    self,
    step_s: float,
    cost: float,
    tokens: float,
    lag: float = 0.0,
    faults: float = 0.0,
  ) -> tuple[float, ...]:
    """Returns (excess over the bounds, objective): less is better.

    Neither falls when `step_s`, `lag` or `faults` rises, so the key of a lower
    bound is a lower bound of the key.

    Args:
      cost: of a second.
      tokens: trained in a step; 0 if every group is lost.
      lag: mean of the trained groups.
      faults: share of the episodes.
    """
    above = max(
      step_s / self.max_step_s - 1.0,
      cost * step_s / self.max_cost - 1.0,
      lag - self.max_mean_lag,
      faults - self.max_faults,
      0.0,
    )
    if self.minimise == "step_s":
      return above, step_s
    if self.minimise == "cost":
      return above, cost * step_s
    return above, cost * step_s / tokens if tokens else math.inf

  def validate(self) -> None:
    """Raises ValueError on bounds that no run could keep."""
    checks.known_name("goal.minimise", self.minimise, OBJECTIVES)
    checks.above(self, 0, "max_step_s", "max_cost", where="goal")
    checks.in_unit(self, "max_faults", where="goal")
    lags = ("max_lag", "max_mean_lag")
    checks.at_least(self, 0, *lags, where="goal", out="0 is on-policy")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Space:
  """The schedules and resources to choose from.

  Attributes:
    schedules: of `SCHEDULES`.
    max_staleness: largest bound of "bounded" and "in_flight".
    consume: orders of training to try with such a bound.
    on_publish: of "in_flight": "recompute" or "keep_kv", or both.
    updates_per_round: of "rollout_pipe"; it must divide the groups of a round.
    extra_groups, extra_members: all pairs; extra groups only with a bound of
      0.
    points: numbers of engines of a kind to try, evenly spread; an upper bound.
    prefill_points: as `points`, of engines that only encode, for those of one
      kind that decode; 0: every engine does both.
    reward_seats, hosts: counts to try; empty: as many as the fleet states.
    bucket_bytes: sizes of the buckets of weights; the quickest is taken.
  """

  schedules: tuple[str, ...] = SCHEDULES
  max_staleness: int = 4
  consume: tuple[overlap_lib.Consume, ...] = ("submit",)
  on_publish: tuple[contract.InFlight, ...] = ("recompute",)
  updates_per_round: int = 4
  extra_groups: tuple[int, ...] = (0,)
  extra_members: tuple[int, ...] = (0,)
  points: int = 8
  prefill_points: int = 0
  reward_seats: tuple[int, ...] = ()
  hosts: tuple[int, ...] = ()
  bucket_bytes: tuple[float, ...] = ()

  def overlaps(
    self, groups_per_round: int
  ) -> Iterator[tuple[str, overlap_lib.Overlap]]:
    """Yields (name, schedule) of all schedules, redundancy included."""
    for groups, members in itertools.product(
      self.extra_groups, self.extra_members
    ):
      more = overlap_lib.Redundancy(extra_groups=groups, extra_members=members)
      for name, plain in self._presets(groups_per_round):
        if groups and plain.max_staleness:
          continue
        consume = "ready" if groups else plain.consume
        yield (
          name
          + f" +{groups} groups" * bool(groups)
          + f" +{members} members" * bool(members),
          dataclasses.replace(plain, redundancy=more, consume=consume),
        )

  def _presets(self, count: int) -> Iterator[tuple[str, overlap_lib.Overlap]]:
    for name in self.schedules:
      make = getattr(overlap_lib, name)
      if name in ("bounded", "in_flight"):
        # A bound of 1 without in-flight updates is one step off.
        is_known = name == "bounded" and "one_step_off" in self.schedules
        known = overlap_lib.one_step_off(count) if is_known else None
        for eta in range(1, self.max_staleness + 1):
          for variant in self._variants(f"{name}({eta})", make(count, eta)):
            if variant[1] != known:
              yield variant
      elif name == "rollout_pipe":
        yield name, make(count, self.updates_per_round)
      else:
        yield name, make(count)

  def _variants(
    self, name: str, plain: overlap_lib.Overlap
  ) -> Iterator[tuple[str, overlap_lib.Overlap]]:
    """Yields a schedule in every order of training and kind of publish."""
    kinds = ("drain",) if plain.drains else self.on_publish
    for consume, kind in itertools.product(self.consume, kinds):
      yield (
        name
        + f" {consume}" * (consume != plain.consume)
        + f" {kind}" * (kind != plain.on_publish),
        dataclasses.replace(plain, consume=consume, on_publish=kind),
      )

  def validate(self) -> None:
    """Raises ValueError on a space that is empty or unknown."""
    for name in self.schedules:
      checks.known_name("space.schedules", name, SCHEDULES)
    checks.at_least(self, 1, "points", where="space")
    out = "leave schedules out instead"
    checks.within(self, 1, 1000, "max_staleness", where="space", out=out)
    checks.at_least(self, 0, "prefill_points", where="space")
    for name in ("reward_seats", "hosts", "bucket_bytes"):
      if getattr(self, name):
        checks.all_at_least(self, 1, name, where="space")
    if 0 not in self.extra_groups and not _ON_POLICY & {*self.schedules}:
      why = "extra groups need a bound of 0"
      out = f"add 0 to extra_groups, or one of {', '.join(sorted(_ON_POLICY))}"
      checks.refuse(
        self, "schedules", "extra_groups", why=why, out=out, where="space"
      )
    for name in (
      "schedules",
      "consume",
      "on_publish",
      "extra_groups",
      "extra_members",
    ):
      if not getattr(self, name):
        raise ValueError(f"space.{name}=(): nothing to choose from; give one")


@dataclasses.dataclass(frozen=True)
class FleetChoice:
  """One way to use a fleet.

  Attributes:
    learner, devices: the kind that trains, and the number of its devices.
    engines: (kind, count) of all engines.
    schedule: the name of `overlap`.
    prefill: (kind, count) of engines that only encode; None: there are none.
    reward_seats, hosts: counts; None: as the fleet states.
    bucket_bytes: of weights; None: as the fleet states.
  """

  learner: str
  devices: int
  engines: tuple[tuple[str, int], ...]
  schedule: str
  overlap: overlap_lib.Overlap
  prefill: tuple[str, int] | None = None
  reward_seats: int | None = None
  hosts: int | None = None
  bucket_bytes: float | None = None

  @property
  def split(self) -> str:
    """As in "4 h100 | 3 h100 + 2 h20": devices, then engines, then the rest."""
    engines = " + ".join(f"{count} {name}" for name, count in self.engines)
    if self.prefill:
      engines += f", {self.prefill[1]} {self.prefill[0]} encode"
    if self.reward_seats:
      engines += f", {self.reward_seats} seats"
    if self.hosts:
      engines += f", {self.hosts} hosts"
    return f"{self.devices} {self.learner} | {engines}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planning:
  """A planning problem.

  Attributes:
    workloads, rollout, groups_per_round: the work of a round.
    rounds: that count in each simulated run; all choices see the same tasks.
    tolerance: the plan is at most this share worse than the best choice.
    max_simulations: after so many the search ends with the best so far, and
      the plan says so.
    max_choices: more of them are refused, since each is bounded.
  """

  fleet: fleet.Fleet
  workloads: tuple[workload.Workload, ...]
  groups_per_round: int
  rollout: group_rollout.Rollout
  goal: Goal = Goal()
  space: Space = Space()
  routing: affinity.Routing = affinity.Routing()
  rounds: int = 8
  tolerance: float = 0.01
  max_simulations: int = 200
  max_choices: int = 20_000
  seed: int = 0

  @property
  def window(self) -> range:
    """The rounds that count, the same for every choice."""
    overlaps = self.space.overlaps(self.groups_per_round)
    start = 1 + max(schedule.max_staleness for _, schedule in overlaps)
    return range(start, start + self.rounds)

  def validate(self) -> None:
    """Raises ValueError, with the bound and the way out."""
    checks.validate_parts(self)
    counts = ("groups_per_round", "rounds", "max_simulations", "max_choices")
    checks.at_least(self, 1, *counts, where="")
    checks.below(self, 1, "tolerance", where="")
    checks.within(self, 0, workload.MAX_SEED, "seed", where="")
    for _, schedule in self.space.overlaps(self.groups_per_round):
      checks.validate(schedule, "space")
    if (groups := self.window.stop * self.groups_per_round) > _MAX_GROUPS:
      raise ValueError(
        f"rounds={self.rounds} behind space.max_staleness="
        f"{self.space.max_staleness} are {groups} groups in every simulated "
        f"run, more than {_MAX_GROUPS}; lower one of them, or groups_per_round"
      )
    for name, needs in (
      ("reward_seats", "rewards"),
      ("hosts", "hosts"),
      ("bucket_bytes", "weights"),
      ("prefill_points", "handover"),
    ):
      value = getattr(self.space, name)
      if value and getattr(self.fleet, needs) is None:
        raise ValueError(
          f"space.{name}={value} without fleet.{needs}: give one, of which "
          "this is varied"
        )
    names = [one.name for one in self.workloads]
    self.routing.validate_domains(names)
    if self.fleet.hosts is not None:
      self.fleet.hosts.validate_sources(names)
    kinds = get_args(placement.Kind)
    for domain, kind in self.routing.prefer.items():
      checks.known_name(f"routing.prefer.{domain}", kind, kinds)
    speeds = [kind.speed for kind in self.fleet.kinds]
    simulated_processor.check_room(self.rollout.max_tokens, speeds)

  def choices(self) -> list[FleetChoice]:
    """Returns all choices.

    Raises:
      ValueError: no schedule keeps `goal.max_lag`, or they are too many.
    """
    max_lag = self.goal.max_lag
    overlaps = list(self.space.overlaps(self.groups_per_round))
    allowed = [
      pair
      for pair in overlaps
      if max_lag is None or pair[1].max_staleness <= max_lag
    ]
    if not allowed:
      least = min(schedule.max_staleness for _, schedule in overlaps)
      raise ValueError(
        f"goal.max_lag={max_lag} is below what every schedule of "
        f"space.schedules={self.space.schedules} allows; the nearest is "
        f"max_lag={least}"
      )
    space, bucket_bytes = self.space, self._bucket_bytes()
    splits = [*((*split, None) for split in self._splits()), *self._handovers()]
    seats, hosts = space.reward_seats or (None,), space.hosts or (None,)
    number = len(splits) * len(allowed) * len(seats) * len(hosts)
    if number > self.max_choices:
      raise ValueError(
        f"{number} choices are more than max_choices={self.max_choices}; lower "
        "space.points, or give space fewer schedules, reward_seats or hosts"
      )
    products = itertools.product(splits, allowed, seats, hosts)
    return [
      FleetChoice(
        learner=learner,
        devices=devices,
        engines=engines,
        schedule=name,
        overlap=overlap,
        prefill=prefill,
        reward_seats=num_seats,
        hosts=num_hosts,
        bucket_bytes=bucket_bytes,
      )
      for (
        (learner, devices, engines, prefill),
        (name, overlap),
        num_seats,
        num_hosts,
      ) in products
    ]

  def _bucket_bytes(self) -> float | None:
    """Returns the size of buckets with which weights arrive first."""
    path, sizes = self.fleet.weights, self.space.bucket_bytes
    if path is None or not sizes:
      return None
    paths = [dataclasses.replace(path, bucket_bytes=size) for size in sizes]
    return min(paths, key=lambda one: one.seconds).bucket_bytes

  def _handovers(self) -> Iterator[tuple[str, int, _Engines, tuple[str, int]]]:
    """Yields splits in which engines of one kind encode, and of one decode."""
    points, kinds = self.space.prefill_points, self.fleet.kinds
    for learner in kinds if points else ():
      for devices, encodes, decodes in itertools.product(
        learner.learner_devices, kinds, kinds
      ):
        if math.isinf(encodes.speed.prefill_per_s):
          continue  # Encoding takes no time anywhere.
        taken = devices * (encodes is learner)
        # At least one is left to decode.
        most = encodes.engines(taken) - (decodes is encodes)
        for number in _spread(most, points)[1:]:
          taken = devices * (decodes is learner)
          taken += number * encodes.engine_devices * (decodes is encodes)
          for count in _spread(decodes.engines(taken), self.space.points)[1:]:
            engines = ((decodes.name, count),)
            yield learner.name, devices, engines, (encodes.name, number)

  def _splits(self) -> Iterator[tuple[str, int, _Engines]]:
    kinds = self.fleet.kinds
    for learner in kinds:
      for devices in learner.learner_devices:
        counts = [
          _spread(
            kind.engines(devices if kind is learner else 0), self.space.points
          )
          for kind in kinds
        ]
        for numbers in itertools.product(*counts):
          pairs = zip(kinds, numbers, strict=True)
          engines = tuple((kind.name, n) for kind, n in pairs if n)
          if engines:
            yield learner.name, devices, engines

  def cost(self, choice: FleetChoice, seats: float = 0.0) -> float:
    """Returns the cost of a second on the devices and hosts in use.

    Args:
      seats: of rewards that are alive, on average, if they are elastic.
    """
    kinds = self.fleet.by_name
    rewards, hosts = self.rewards(choice), self.hosts(choice)
    cost = choice.devices * kinds[choice.learner].cost
    for name, count in (*choice.engines, *filter(None, [choice.prefill])):
      cost += count * kinds[name].engine_devices * kinds[name].cost
    if rewards:
      cost += rewards.cost * (seats if rewards.elastic else rewards.count)
    return cost + (hosts.count * hosts.cost if hosts else 0.0)

  def rewards(self, choice: FleetChoice) -> resources.Seats | None:
    """Returns the seats of rewards of a choice."""
    seats, count = self.fleet.rewards, choice.reward_seats
    if seats is None or count is None:
      return seats
    return dataclasses.replace(seats, count=count)

  def hosts(self, choice: FleetChoice) -> hosts_lib.Hosts | None:
    """Returns the hosts of environments of a choice."""
    hosts, count = self.fleet.hosts, choice.hosts
    if hosts is None or count is None:
      return hosts
    outages = tuple(one for one in hosts.outages if (one.host or 0) < count)
    return dataclasses.replace(hosts, count=count, outages=outages)

  @property
  def draws_vary(self) -> bool:
    """True when starts that are tried again depend on the choice.

    A start that is tried again is another play, with other draws. It failed, or
    was later than `rollout.step_s`.
    """
    hosts = self.fleet.hosts
    return bool(hosts and hosts.outages) or any(
      one.restarts
      and (
        one.start_fault
        or one.start_s.quantile(workload.MAX_DRAW) >= self.rollout.step_s
      )
      for one in self.workloads
    )

  def cluster(self, choice: FleetChoice) -> simulate.Cluster:
    """Returns the hardware of a choice."""
    kinds = self.fleet.by_name
    pools = tuple(
      simulate.EnginePool(
        name=name if number else _FIRST_POOL,
        engines=count,
        speed=kinds[name].speed,
        kind=kinds[name].kind,
        cost=kinds[name].cost * kinds[name].engine_devices,
        accelerators=kinds[name].engine_devices,
        prefill=self._prefill(choice),
      )
      for number, (name, count) in enumerate(choice.engines)
    )
    weights = self.fleet.weights
    if weights is not None and choice.bucket_bytes is not None:
      weights = dataclasses.replace(weights, bucket_bytes=choice.bucket_bytes)
    return simulate.Cluster(
      learner=kinds[choice.learner].learner(choice.devices),
      pools=pools,
      transfer_s=self.fleet.transfer_s,
      weights=weights,
    )

  def _prefill(self, choice: FleetChoice) -> prefill_pool.PrefillPool | None:
    if choice.prefill is None:
      return None
    name, count = choice.prefill
    kind, link = self.fleet.by_name[name], self.fleet.handover
    assert link is not None
    return prefill_pool.PrefillPool(
      link=link,
      engines=count,
      ids_per_s=kind.speed.prefill_per_s,
      kv_bytes=self.fleet.kv_bytes,
      accelerators=kind.engine_devices,
      cost=kind.cost * kind.engine_devices,
    )

  def simulated(self, choice: FleetChoice) -> simulate.Simulation:
    """Returns the simulated run of a choice."""
    window, eta = self.window, choice.overlap.max_staleness
    return simulate.Simulation(
      cluster=self.cluster(choice),
      workloads=self.workloads,
      overlap=choice.overlap,
      rollout=self.rollout,
      routing=self.routing,
      rewards=self.rewards(choice),
      hosts=self.hosts(choice),
      rounds=window.stop + eta,
      warmup=window.start - eta,
      seed=self.seed,
    )


def _spread(most: int, points: int) -> Sequence[int]:
  """Returns 0 and up to `points` numbers up to `most`, evenly spread."""
  steps = min(points, most)
  return sorted({0, *(round(most * i / steps) for i in range(1, steps + 1))})
