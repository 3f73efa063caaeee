"""The real coordinator in virtual time: all that it waits for only waits.

Gate, buffer, producer, player and router are those of a run. Engines answer
from a list; the learner and the transfer of weights take virtual seconds, or
are the real trainer and publisher over programs that do nothing.
"""

import asyncio
import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from envs import base
from envs.rewards import rewards
from rl.algorithms import advantages, group_filters, presets
from rl.audit import checker, event_log, token_ledger
from rl.data import trajectory
from rl.loop import coordinator
from rl.loop import progress as progress_lib
from rl.pools import membership, router, weight_publisher, weight_transfer
from rl.pools import recovery as recovery_lib
from rl.rollout import grading, group_rollout, prompts
from rl.runtime import mesh_thread, trace, virtual_clock
from rl.runtime import watchdog as watchdog_lib
from rl.schedule import overlap
from rl.simulation import learner as simulated_learner
from rl.testing import fakes
from rl.train import learner as learner_lib
from rl.train import trainer as trainer_lib
from tests.helpers import players_under_test as players

SCHEDULES = {
  "sync": overlap.sync(4, 2, 2),
  "strict pipeline": overlap.strict_pipeline(4, 1),
  "rollout pipe": overlap.rollout_pipe(4, 2, 1),
  "hard frontier": overlap.rollout_pipe(4, 2, 1, hard=True),
  "as completed": dataclasses.replace(
    overlap.strict_pipeline(4, 1),
    consume="ready",
    redundancy=overlap.Redundancy(extra_groups=2, extra_members=1),
  ),
  "by tokens": dataclasses.replace(
    overlap.rollout_pipe(4, 1),
    groups_per_microbatch=None,
    tokens_per_microbatch=30,
  ),
  "one step off": overlap.one_step_off(4, 2),
  "bounded": overlap.bounded(4, 2, 2),
  "in flight, 1": overlap.in_flight(4, 1, 2),
  "in flight, 3": overlap.in_flight(4, 3, 1),
  "in flight, updates": overlap.in_flight(4, 2, 1, updates_per_round=2),
  "keep kv": overlap.in_flight(4, 2, 2, on_publish="keep_kv"),
  "drop": dataclasses.replace(overlap.in_flight(4, 1, 2), consume="drop"),
  "recycle": dataclasses.replace(
    overlap.in_flight(4, 1, 2),
    consume="recycle",
    redundancy=overlap.Redundancy(extra_members=1),
  ),
}
"""One of each kind, four groups a round."""


@dataclasses.dataclass(frozen=True)
class Watched:
  """A source that keeps the environments that it built, by task.

  Attributes:
    close_s: seconds that closing one takes, by member: those of a task are
      numbered as they are built.
  """

  source: Any
  close_s: Callable[[int], float] = lambda member: 0.0
  built: dict[str, list[Any]] = dataclasses.field(
    default_factory=lambda: collections.defaultdict(list), compare=False
  )

  @property
  def name(self) -> str:
    return self.source.name

  @property
  def words(self) -> Sequence[str]:
    return self.source.words

  def task(self, index: int, split: base.Split) -> base.Task:
    return self.source.task(index, split)

  def __call__(self, task: base.Task) -> base.Environment:
    close_s = self.close_s(len(self.built[task.id]))
    environment = _Closing(self.source(task), close_s)
    self.built[task.id].append(environment)
    return environment

  def oracle(self, task: base.Task, messages: Sequence[base.Message]) -> str:
    return self.source.oracle(task, messages)

  def explore(
    self, task: base.Task, messages: Sequence[base.Message], seed: int
  ) -> str:
    return self.source.explore(task, messages, seed)


@dataclasses.dataclass(eq=False)
class _Closing:
  """An environment that takes its time to close."""

  environment: Any
  close_s: float
  closed: bool = False

  async def start(self) -> Sequence[base.Message]:
    return await self.environment.start()

  async def step(self, answer: base.Message) -> base.Step:
    return await self.environment.step(answer)

  async def close(self) -> None:
    await asyncio.sleep(self.close_s)
    await self.environment.close()
    self.closed = True


@dataclasses.dataclass(eq=False)
class Observer(progress_lib.RunObserver):
  """Keeps the groups of each round and the versions; both may take time.

  Attributes:
    evaluate: awaited with every version that was published.
  """

  evaluate: Callable[[int], Any] | None = None
  rounds: list[list[trajectory.Group]] = dataclasses.field(default_factory=list)
  metrics: list[Mapping[str, float]] = dataclasses.field(default_factory=list)
  published: list[int] = dataclasses.field(default_factory=list)
  last: progress_lib.Progress | None = None

  async def on_round(self, trained):
    self.rounds.append(list(trained.groups))
    self.metrics.append(trained.metrics)

  async def on_published(self, version):
    if self.evaluate is not None:
      await self.evaluate(version)
    self.published.append(version)

  async def on_boundary(self, progress):
    self.last = progress


class InlineThread(mesh_thread.MeshThread):
  """Runs programs on the loop, each in five virtual milliseconds."""

  def __init__(self):
    pass

  async def run(self, name, function, *args):
    return await self.submit(name, function, *args)

  def submit(self, name, function, *args):
    async def job():
      await asyncio.sleep(0.005)  # A program in no time would overlap nothing.
      return function(*args)

    return asyncio.ensure_future(job())


class Placing(fakes.FakeLearner):
  """Programs that do nothing, and keep every batch that they are given."""

  def __init__(self):
    super().__init__()
    self.batches = []

  def place(self, batch):
    self.batches.append(batch)
    return batch


@dataclasses.dataclass(eq=False)
class Run:
  """A coordinator in virtual time, and everything that it touched.

  Attributes:
    delay_s: seconds of an answer, by (group, index) if requests have that
      priority.
    build: makes an engine; by default a fake one of these delays.
    recovery: of lost engines; None leaves them lost.
    build_again: makes an engine in the place of a lost one, or one that joins;
      by default as the first ones. It is the last of `engines`.
    pool: how many tasks there are.
    max_graders: calls of the reward at once.
    seconds, sampled_by_engines: how long it took, and tokens, when it is over.
    disturb: runs beside the coordinator and is given this.
    programs: of the real trainer and publisher; None simulates both.
    estimator, packing: of the real trainer, and changes of its settings.
    state: of the trainer, after the last round.
  """

  schedule: overlap.Overlap
  rounds: int = 4
  source: Any = dataclasses.field(default_factory=fakes.Counting)
  reward: base.Reward = dataclasses.field(default_factory=rewards.Outcome)
  retries: grading.Retries = dataclasses.field(default_factory=grading.Retries)
  dynamic_sampling: group_filters.DynamicSampling | None = None
  delay_s: Callable[[tuple[int, ...]], float] = lambda priority: 1.0
  learner: simulated_learner.LearnerSpeed = dataclasses.field(
    default_factory=lambda: simulated_learner.LearnerSpeed(token_s=0.0)
  )
  answers: tuple[int, ...] = (players.YES, players.NO)
  transfer_s: float = 0.0
  update_s: float = 0.0
  num_engines: int = 1
  group_size: int = 2
  step_s: float = 60.0
  progress_timeout_s: float = 1e5
  seed: int = 0
  observer: Observer = dataclasses.field(default_factory=Observer)
  build: Callable[[], Any] | None = None
  recovery: recovery_lib.Recovery | None = None
  build_again: Callable[[], Any] | None = None
  pool: int | None = None
  settle_every: int = 0
  max_graders: int = 256
  disturb: Callable[["Run"], Any] | None = None
  listeners: tuple[Callable[[event_log.Event], None], ...] = ()
  programs: learner_lib.Learner | None = None
  estimator: advantages.Estimator = dataclasses.field(
    default_factory=advantages.Reinforce
  )
  packing: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def start(self, progress: progress_lib.Progress | None = None) -> "Run":
    """Runs to the last round, from there if it is given; returns itself.

    Raises:
      virtual.Deadlock: everything waits for something else.
    """
    virtual_clock.run(self.play(progress))
    return self

  async def play(self, progress: progress_lib.Progress | None = None) -> None:
    """As `start`, on the running loop."""
    clock = asyncio.get_running_loop().time
    self.log = event_log.EventLog(clock=clock)
    self.log.listeners.extend(self.listeners)
    self.spans = trace.Trace(None, clock=asyncio.get_running_loop().time)
    self.tasks = prompts.Prompts(self.source, self.seed, pool=self.pool)
    version = progress.trained if progress else 0
    self.engines = [self.engine(version) for _ in range(self.num_engines)]
    self.router = router.Router(self.engines, log=self.log)
    self.publisher = self._publisher()
    self.loop = self._coordinator()
    first = self.programs.abstract if self.programs else 0
    begin = progress or progress_lib.beginning(first, self.tasks.cursor)
    self.publisher.begin(version, begin.state)
    self.restarts = self.recovery and recovery_lib.Restarts(
      self.recovery, self.router, self.publisher, self.build_more, self.log
    )
    self.members = membership.Membership(
      self.router,
      self.publisher,
      start_s=20.0,
      on_lost=self.restarts.lost if self.restarts else self.router.give_up,
    )
    self.tasks.seek(begin.cursor)
    beside = asyncio.create_task(self.disturb(self)) if self.disturb else None
    try:
      self.state = await self.loop.run(begin)
    finally:
      self.seconds = clock()
      counts = [engine.stats().sampled_tokens for engine in self.engines]
      self.sampled_by_engines = sum(counts)
      await self.members.close()
      if self.restarts:
        await self.restarts.close()
      if beside is not None:
        beside.cancel()
        await asyncio.wait([beside])
    if beside is not None and not beside.cancelled():
      await beside  # Raises what was wrong there.

  def engine(self, version: int) -> Any:
    """Returns a fresh engine; one that the run did not build has a version."""
    if self.build is not None:
      return self.build()
    engine = players.engine(self.answers, self.delay_s, update_s=self.update_s)
    engine.version = version
    return engine

  def build_more(self, number: int) -> Any:
    """Returns an engine in the place of a lost one, or one that joins."""
    del number
    self.engines.append((self.build_again or (lambda: self.engine(0)))())
    return self.engines[-1]

  def _trainer(self) -> trainer_lib.Trainer:
    if self.programs is None:
      return simulated_learner.SimulatedTrainer(self.learner, self.spans)
    settings = trainer_lib.TrainerSettings(
      rows=8,
      length=32,
      share_prompts=False,
      probe_rows=8,
      max_staleness=self.schedule.max_staleness,
      old_logprob=self.schedule.old_logprob,
    )
    return trainer_lib.MeshTrainer(
      dataclasses.replace(settings, **self.packing),
      self.programs,
      InlineThread(),
      estimator=self.estimator,
      objective=presets.Grpo(),
    )

  def _publisher(self) -> weight_publisher.WeightPublisher:
    if self.programs is None:
      transfer = simulated_learner.SimulatedTransfer(self.transfer_s)
    else:
      transfer = weight_transfer.MeshTransfer(
        [None] * self.num_engines, InlineThread(), InlineThread()
      )
    return weight_publisher.WeightPublisher(
      self.router, transfer, self.log, self.spans
    )

  def _coordinator(self) -> coordinator.Coordinator:
    return coordinator.Coordinator(
      coordinator.LoopSettings(
        schedule=self.schedule,
        rounds=self.rounds,
        seed=self.seed,
        progress_timeout_s=self.progress_timeout_s,
        success=1.0,
        num_engines=len(self.engines),
        group_filter=group_filters.group_filter(
          self.dynamic_sampling, advantages.Grpo()
        ),
        settle_every=self.settle_every,
      ),
      trainer=self._trainer(),
      publisher=self.publisher,
      player=self.player(),
      tasks=self.tasks,
      log=self.log,
      spans=self.spans,
      watchdog=watchdog_lib.Watchdog(),
      observer=self.observer,
    )

  def player(self) -> group_rollout.Player:
    """Returns what plays the groups of this run."""
    return group_rollout.Player(
      source=self.source,
      router=self.router,
      chat=players.CHAT,
      graders=grading.Graders(self.reward, self.retries, self.max_graders),
      limits=group_rollout.Rollout(
        group_size=self.group_size, step_s=self.step_s
      ),
      log=self.log,
      priority=overlap.priority(self.schedule),
      extra_members=self.schedule.redundancy.extra_members,
    )

  @property
  def groups(self) -> list[trajectory.Group]:
    """Returns all groups that were trained, in order."""
    return [group for round_ in self.observer.rounds for group in round_]

  def violations(self) -> list[str]:
    """Returns every way in which the run broke its promises."""
    return checker.violations(self.log.events, self.schedule, self.group_size)

  @property
  def ledger(self) -> token_ledger.Ledger:
    """Returns where every sampled token went."""
    return token_ledger.of(self.log.events)

  def kinds(self, *kinds: str) -> list[tuple[str, int | None]]:
    """Returns (kind, version) of the events of some kinds."""
    return [
      (event["kind"], event.get("version"))
      for event in self.log.events
      if event["kind"] in kinds
    ]

  def of(self, kind: str, **fields: Any) -> list[event_log.Event]:
    """Returns the events of a kind with these values, in order."""
    return [
      event
      for event in event_log.of_kind(self.log.events, kind)
      if all(event[name] == value for name, value in fields.items())
    ]

  def environments(self, event: event_log.Event) -> list[Any]:
    """Returns what a `Watched` source built for the attempt of an event."""
    group, attempt = event["group"], event["attempt"]
    (begun,) = self.of("submitted", group=group, attempt=attempt)
    tries = self.of("submitted", group=group, task=begun["task"])
    before = sum(one["attempt"] < attempt for one in tries)
    size = self.group_size + self.schedule.redundancy.extra_members
    return self.source.built[begun["task"]][before * size :][:size]
