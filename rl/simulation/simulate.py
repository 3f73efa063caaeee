"""Simulates a run: the real coordinator, in virtual time.

  World (tasks, environments, rewards) --> Player --> Router --> engines
                                             |                      ^
               Coordinator (gate, buffer) <--+                      |
                    |                                               |
                    +--> SimulatedTrainer --> WeightPublisher ------+

Coordinator, gate, buffer, player, router and publisher are those of a real run,
on an event loop whose clock jumps; engines, learner, environments, rewards and
the transfer of weights only wait.
"""

import asyncio
import dataclasses
import gc
import math
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl.algorithms import group_filters
from rl.audit import checker, event_log, token_ledger
from rl.loop import coordinator
from rl.loop import progress as progress_lib
from rl.pools import affinity, placement, router, weight_publisher
from rl.rollout import grading, group_rollout, prompts, starting
from rl.runtime import trace, virtual_clock
from rl.runtime import watchdog as watchdog_lib
from rl.schedule import overlap as overlap_lib
from rl.settings import checks
from rl.simulation import (
  dispatched_engine,
  host_thread,
  prefill_pool,
  resources,
  workload,
)
from rl.simulation import engine as simulated_engine
from rl.simulation import hosts as hosts_lib
from rl.simulation import learner as simulated_learner
from rl.simulation import processes as processes_lib
from rl.simulation import processor as simulated_processor
from rl.simulation import world as world_lib

_POOL_TASKS = 1 << 30
_Place = tuple[int, int, int]  # Group, attempt and index of a member.


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnginePool:
  """A number of equal engines.

  Attributes:
    engines: count.
    accelerators: of each engine.
    cost: of an hour of one of its engines, in any unit.
    prefill: engines that encode contexts for these; None: they do it
      themselves, `Speed.prefill_per_s` a second.
    dispatches: of built-in engines, one by one, in the place of `speed`, which
      then only says the most that they decode; None: requests share an engine.
    processes: of each engine, as of `placement.DecodePool`: 0 is the one of the
      run, 1 a process of its own; see `Cluster.processes`.
  """

  name: str = "decode"
  engines: int = 4
  speed: simulated_processor.Speed = simulated_processor.Speed()
  kind: placement.Kind = "any"
  cost: float = 1.0
  accelerators: int = 1
  prefill: prefill_pool.PrefillPool | None = None
  dispatches: dispatched_engine.Dispatches | None = None
  processes: int = 0

  @property
  def ids_per_s(self) -> float:
    """Ids of context encoded a second by all engines that do."""
    if self.prefill is not None:
      return self.prefill.engines * self.prefill.ids_per_s
    return self.engines * self.speed.prefill_per_s

  @property
  def id_s(self) -> float:
    """Seconds that an id of context takes at least."""
    if self.prefill is not None:
      return self.prefill.id_s
    return 1.0 / self.speed.prefill_per_s

  def validate(self, where: str) -> None:
    """Raises ValueError on a pool that cannot decode."""
    if self.prefill is not None:
      self.prefill.validate(f"{where}.prefill")
    if self.dispatches is not None:
      self.dispatches.validate(f"{where}.dispatches")
    checks.at_least(self, 1, "engines", "accelerators", where=where)
    checks.above(self, 0, "cost", where=where)
    checks.one_of(self, (0, 1), "processes", where=where)
    self.speed.validate(f"{where}.speed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
  """All hardware of a simulated run.

  Attributes:
    transfer_s: seconds in which new weights travel while decoding goes on,
      before it stands still for `Speed.update_s`.
    weights: their way to the engines, in the place of `transfer_s`; None: they
      take so many seconds.
    host: the work of its one thread that runs the event loop.
    processes: the costs of those of engines, and of a learner of several.
  """

  learner: simulated_learner.LearnerSpeed = simulated_learner.LearnerSpeed()
  pools: tuple[EnginePool, ...] = (EnginePool(),)
  transfer_s: float = 3.0
  weights: resources.WeightPath | None = None
  host: host_thread.HostWork = host_thread.HostWork()
  processes: processes_lib.ProcessCosts = processes_lib.ProcessCosts()

  @property
  def sent_s(self) -> float:
    """Seconds in which new weights leave the run's process."""
    sent_s = self.weights.seconds if self.weights else self.transfer_s
    return sent_s + self.processes.copy_s * bool(self._num_remote)

  @property
  def hidden_s(self) -> float:
    """Seconds in which new weights travel while decoding goes on."""
    costs = self.processes
    fetch_s = costs.fetch_s(self.learner.processes)
    return fetch_s + self.sent_s + costs.stage_s * self._num_remote

  @property
  def _num_remote(self) -> int:
    return sum(pool.engines * pool.processes for pool in self.pools)

  @property
  def accelerators(self) -> int:
    """Number of accelerators of the learner and all engines."""
    prefills = [pool.prefill for pool in self.pools if pool.prefill]
    engines = [*self.pools, *prefills]
    decode = sum(pool.engines * pool.accelerators for pool in engines)
    return self.learner.accelerators + decode

  @property
  def engine_pools(self) -> list[EnginePool]:
    """The pool of each engine."""
    return [pool for pool in self.pools for _ in range(pool.engines)]

  @property
  def tokens_per_s(self) -> float:
    """Tokens sampled a second when every slot of every engine is in use."""
    return sum(p.engines * p.speed.tokens_per_s for p in self.pools)

  @property
  def publish_s(self) -> float:
    """Seconds of a publish on its own."""
    return self.hidden_s + max(
      pool.speed.update_s + self.processes.call_s * pool.processes
      for pool in self.pools
    )

  @property
  def blocked_s(self) -> float:
    """Seconds of full decoding that one publish costs."""
    lost = (
      p.engines * p.speed.tokens_per_s * p.speed.update_s for p in self.pools
    )
    return sum(lost) / self.tokens_per_s

  def validate(self) -> None:
    """Raises ValueError on hardware that cannot run."""
    if not self.pools:
      raise ValueError("cluster.pools=(): nothing decodes; give one or more")
    for number, pool in enumerate(self.pools):
      pool.validate(f"cluster.pools.{number}")
    checks.unique("cluster.pools", [pool.name for pool in self.pools])
    checks.finite_at_least(self, 0, "transfer_s", where="cluster")


_ROLLOUT = group_rollout.Rollout(
  group_size=8, max_turns=1, turn_tokens=16384, max_tokens=32768, step_s=600.0
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Simulation:
  """The settings of a simulated run.

  Attributes:
    workloads: sources of tasks, with different names.
    rollout: limits of an episode; longer answers are cut, slower steps fault.
    rewards: seats at which they are computed; None: each only takes its time.
    hosts: of environments; None: there is room for all, and none goes down.
    rounds: simulated in all. With a bound of eta, eta + 1 rounds may take
      turns, so let a multiple of that be measured.
    warmup: first rounds that are not measured, besides eta at either end.
    progress_timeout_s: virtual seconds without progress that end it.
  """

  cluster: Cluster = Cluster()
  workloads: tuple[workload.Workload, ...] = (workload.Workload(),)
  overlap: overlap_lib.Overlap = overlap_lib.Overlap()
  rollout: group_rollout.Rollout = _ROLLOUT
  routing: affinity.Routing = affinity.Routing()
  rewards: resources.Seats | None = None
  hosts: hosts_lib.Hosts | None = None
  rounds: int = 11
  warmup: int = 1
  seed: int = 0
  progress_timeout_s: float = 1e6

  @property
  def counted(self) -> range:
    """Rounds measured: without the first and last eta, warm-up and drain."""
    eta = self.overlap.max_staleness
    return range(self.warmup + eta, self.rounds - eta)

  @property
  def even_rounds(self) -> int:
    """These rounds, or the next that measure four or more in whole turns."""
    cycle = self.overlap.max_staleness + 1
    ahead = max(self.warmup, 0) + 2 * (cycle - 1)
    count = max(self.rounds - ahead, 4)
    return ahead + cycle * math.ceil(count / cycle)

  def validate(self) -> None:
    """Raises ValueError, with the bound and the way out."""
    checks.validate_parts(self)
    pools = self.cluster.pools
    self.routing.validate_pools({pool.name: pool.kind for pool in pools})
    checks.above(self, 0, "progress_timeout_s", where="")
    checks.within(self, 0, workload.MAX_SEED, "seed", where="")
    names = [one.name for one in self.workloads]
    checks.unique("workloads", names)
    self.routing.validate_domains(names)
    if self.hosts is not None:
      self.hosts.validate_sources(names)
    if self.warmup < 0 or not self.counted:
      ahead = 2 * self.overlap.max_staleness
      raise ValueError(
        f"warmup={self.warmup} of rounds={self.rounds} leaves none to measure: "
        f"overlap.max_staleness={self.overlap.max_staleness} takes {ahead} "
        f"more; use rounds={self.even_rounds}"
      )
    speeds = [pool.speed for pool in pools]
    simulated_processor.check_room(self.rollout.max_tokens, speeds)


# No repr: asyncio makes that of the result of a task, here of a million events.
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RunRecord:
  """The record of a simulated run, in virtual seconds.

  Attributes:
    events: all but turns, unless they are kept. With a directory events and
      spans lie there, and neither they nor `states` and `served` are here.
    num_events, num_turns: in all.
    ledger, violations: of all events, as they came.
    states: of every engine, (second, state) of each change.
    served: tokens that each engine had sampled when a version's training
      ended, answers under way included.
    virtual_s, real_s: duration on the virtual clock, and in real time.
    jumps: of the virtual clock.
    rewards: costs of the seats of rewards; None if there are none.
    hosts: use of the hosts of environments; None if there are none.
    prefill_use: share of time in which the engines of each pool of
      `EnginePool.prefill` encode, by the name of the decode pool.
  """

  settings: Simulation
  events: Sequence[event_log.Event]
  num_events: int
  num_turns: int
  ledger: token_ledger.Ledger
  violations: Sequence[str]
  spans: Sequence[trace.Span]
  states: Sequence[Sequence[tuple[float, simulated_processor.EngineActivity]]]
  served: Mapping[int, Sequence[float]]
  routes: Mapping[str, float]
  virtual_s: float
  real_s: float
  jumps: int
  rewards: resources.SeatCosts | None = None
  hosts: hosts_lib.HostUse | None = None
  prefill_use: Mapping[str, float] = dataclasses.field(default_factory=dict)


def simulate(
  settings: Simulation,
  world: world_lib.World | None = None,
  listener: Callable[[event_log.Event], None] | None = None,
  keep_turns: bool = True,
  run_dir: pathlib.Path | None = None,
  observer: progress_lib.RunObserver | None = None,
) -> RunRecord:
  """Simulates a run, from the first task to the last publish.

  Args:
    world: its tasks; None: those of the workloads.
    listener: called with each event when it is emitted.
    keep_turns: in the record, where they are most of the events.
    run_dir: where events and spans are written, so that memory is flat however
      long the run; None keeps them in the record.
    observer: called between rounds.

  Raises:
    ValueError: see `Simulation.validate`.
    virtual_clock.Deadlock: every task waits for another, or the virtual clock
      stands still.
  """
  settings.validate()
  before = gc.get_threshold()
  # A log of a million events stays alive, and so do modules: scanning them
  # takes a third of the time. There is next to no cyclic garbage.
  gc.set_threshold(500_000, 50, 100)
  gc.freeze()
  try:
    return virtual_clock.run(
      play(settings, world, listener, keep_turns, run_dir, observer)
    )
  finally:
    gc.unfreeze()
    gc.set_threshold(*before)


async def play(
  settings: Simulation,
  world: world_lib.World | None = None,
  listener: Callable[[event_log.Event], None] | None = None,
  keep_turns: bool = True,
  run_dir: pathlib.Path | None = None,
  observer: progress_lib.RunObserver | None = None,
) -> RunRecord:
  """Plays a run on the virtual loop on which it is called; see `simulate`.

  Several at once may share the seats and hosts of their worlds.
  """
  if world is None:
    seats = settings.rewards and resources.SeatPool(settings.rewards)
    hosts = settings.hosts and hosts_lib.HostPool(settings.hosts)
    thread = host_thread.HostThread(settings.cluster.host)
    world = world_lib.World(
      settings.workloads, settings.seed, seats, hosts, thread
    )
  loop = asyncio.get_running_loop()
  assert isinstance(loop, virtual_clock.EventLoop)
  start_s = time.perf_counter()
  run = _Run(settings, world, keep_turns, run_dir, observer)
  if listener is not None:
    run.log.listeners.append(listener)
  await run.start()
  await run.coordinator.run(progress_lib.beginning(0, run.tasks.cursor))
  run.log.flush()
  run.spans.flush()
  return RunRecord(
    settings=settings,
    events=run.log.events,
    num_events=run.num_events,
    num_turns=run.num_turns,
    ledger=run.ledger.ledger(),
    violations=run.checker.finish(),
    spans=run.spans.spans,
    states=[engine.states for engine in run.engines],
    served=run.served,
    routes=run.router.describe(),
    virtual_s=loop.time(),
    real_s=time.perf_counter() - start_s,
    jumps=loop.jumps,
    rewards=world.seats.costs() if world.seats else None,
    hosts=world.hosts.use() if world.hosts else None,
    prefill_use=run.prefill_use(),
  )


class _Run:
  """The parts of one simulated run, wired as those of a real one."""

  def __init__(
    self,
    settings: Simulation,
    world: world_lib.World,
    keep_turns: bool,
    run_dir: pathlib.Path | None,
    observer: progress_lib.RunObserver | None,
  ):
    clock = asyncio.get_running_loop().time
    self._settings = settings
    self._is_kept = run_dir is None
    self._observer = observer or progress_lib.RunObserver()
    self._homes: dict[_Place, int] = {}
    self._graded: set[_Place] = set()
    self.log = event_log.EventLog(
      run_dir and run_dir / "events.jsonl",
      clock=clock,
      left_out=() if keep_turns else ("turn",),
    )
    self.num_events = self.num_turns = 0
    self.ledger = token_ledger.LedgerBuilder()
    self.checker = checker.Checker(
      settings.overlap, settings.rollout.group_size, self.ledger
    )
    self.log.listeners += [self._listen, self.checker.observe]
    self.spans = trace.Trace(run_dir and run_dir / "spans.jsonl", clock=clock)
    self.world = world
    self.tasks = prompts.Prompts(self.world, settings.seed, pool=_POOL_TASKS)
    pools = settings.cluster.engine_pools
    self._prefill = {
      pool.name: prefill_pool.PrefillQueue(pool.prefill)
      for pool in settings.cluster.pools
      if pool.prefill is not None
    }
    self.engines = [self._engine(pool) for pool in pools]
    costs = settings.cluster.processes
    self.router = router.Router(
      [
        processes_lib.called(engine, costs) if pool.processes else engine
        for engine, pool in zip(self.engines, pools, strict=True)
      ],
      infos=[placement.EngineInfo(pool.name, pool.kind) for pool in pools],
      # Simulated engines have no prompt of one session for another.
      routing=dataclasses.replace(settings.routing, share_prompts=False),
      log=self.log,
    )
    self.served: dict[int, list[float]] = {}
    self.coordinator = self._coordinator(watchdog_lib.Watchdog(clock=clock))

  def _engine(
    self, pool: EnginePool
  ) -> simulated_engine.SimulatedEngine | dispatched_engine.DispatchedEngine:
    if pool.dispatches is not None:
      return dispatched_engine.DispatchedEngine(
        pool.dispatches, self.world.ids, self.world.thread
      )
    return simulated_engine.SimulatedEngine(
      pool.speed, self.world.answer_tokens, self._prefill.get(pool.name)
    )

  async def start(self) -> None:
    """Has all engines serve the first version."""
    weights: Any = 0
    for engine in self.engines:
      if isinstance(engine, dispatched_engine.DispatchedEngine):
        await engine.start(weights, 0)

  def _coordinator(
    self, watchdog: watchdog_lib.Watchdog
  ) -> coordinator.Coordinator:
    settings, schedule = self._settings, self._settings.overlap
    cluster = settings.cluster
    gang = None
    if (count := cluster.learner.processes) > 1:
      gang = processes_lib.SimulatedGang(cluster.processes, count)
    graders = grading.Graders(
      world_lib.SimulatedReward(self.world),
      settings.rollout.grading,
      max_concurrent=1 << 20,
    )
    player = group_rollout.Player(
      source=self.world,
      router=self.router,
      chat=self.world,
      graders=graders,
      limits=settings.rollout,
      log=self.log,
      priority=overlap_lib.priority(schedule),
      extra_members=schedule.redundancy.extra_members,
      starts=starting.Starts(settings.rollout.starting),
    )
    return coordinator.Coordinator(
      coordinator.LoopSettings(
        schedule=schedule,
        rounds=settings.rounds,
        seed=settings.seed,
        progress_timeout_s=settings.progress_timeout_s,
        success=1.0,
        num_engines=len(self.router.engines),
        group_filter=group_filters.keep_all,
      ),
      trainer=simulated_learner.SimulatedTrainer(
        cluster.learner, self.spans, self.world.thread, gang
      ),
      publisher=weight_publisher.WeightPublisher(
        self.router,
        simulated_learner.SimulatedTransfer(cluster.sent_s, gang),
        self.log,
        self.spans,
      ),
      player=player,
      tasks=self.tasks,
      log=self.log,
      spans=self.spans,
      watchdog=watchdog,
      observer=self._observer,
    )

  def prefill_use(self) -> dict[str, float]:
    """Returns the share of time in which each prefill pool has encoded."""
    passed_s = asyncio.get_running_loop().time()
    return {
      pool.name: self._prefill[pool.name].busy_s
      / (pool.prefill.engines * passed_s)
      for pool in self._settings.cluster.pools
      if pool.prefill is not None
    }

  def _listen(self, event: event_log.Event) -> None:
    """Counts events and, for the causes of idle time, sessions of engines."""
    kind = event["kind"]
    self.num_events += 1
    if kind == "turn":
      self.num_turns += 1
    elif kind == "update" and self._is_kept:
      self.served[event["version"]] = [e.served for e in self.engines]
    elif kind == "update":
      for engine in self.engines:
        engine.forget_states()
    elif kind == "admitted":
      self._homes[event_log.member(event)] = event["engine"]
      self.engines[event["engine"]].expect(sessions=1)
    elif kind in ("ended", "aborted"):
      if (place := event_log.member(event)) in self._homes:
        self.engines[self._homes[place]].expect(sessions=-1)
        if kind == "aborted":
          del self._homes[place]
    elif kind == "grading":
      self._graded.add(place := event_log.member(event))
      self.engines[self._homes[place]].expect(graded=1)
    elif kind in ("reward", "fault"):
      home = self._homes.pop(place := event_log.member(event), None)
      if place in self._graded and home is not None:
        self._graded.remove(place)
        self.engines[home].expect(graded=-1)
