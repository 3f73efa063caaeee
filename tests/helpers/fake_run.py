"""The real coordinator over a fake engine, learner and environment."""

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

from envs import base, rewards
from models.chat import word_chat
from rl.algorithms import advantages, group_filters, presets
from rl.audit import checker, event_log, token_ledger
from rl.data import trajectory
from rl.loop import coordinator
from rl.loop import progress as progress_lib
from rl.pools import router, weight_publisher
from rl.rollout import grading, group_rollout, prompts
from rl.runtime import mesh_thread, trace
from rl.runtime import watchdog as watchdog_lib
from rl.schedule import overlap
from rl.testing import fake_engine, fakes
from rl.train import trainer

GROUP = 2
CHAT = word_chat.WordChat(("go", "on", "yes", "no"))

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
  "one step off": overlap.one_step_off(4, 2),
  "bounded": overlap.bounded(4, 2, 2),
  "in flight, 1": overlap.in_flight(4, 1, 2),
  "in flight, 3": overlap.in_flight(4, 3, 1),
  "keep kv": overlap.in_flight(4, 2, 2, on_publish="keep_kv"),
  "drop": dataclasses.replace(overlap.in_flight(4, 1, 2), consume="drop"),
  "recycle": dataclasses.replace(
    overlap.in_flight(4, 1, 2),
    consume="recycle",
    redundancy=overlap.Redundancy(extra_members=1),
  ),
}
"""One of each kind, four groups a round."""


@dataclasses.dataclass(eq=False)
class Recorder(progress_lib.RunObserver):
  """An observer that keeps what it sees, and may stop the run."""

  stop_at: int = -1
  loop: Any = None
  rounds: list = dataclasses.field(default_factory=list)
  published: list = dataclasses.field(default_factory=list)
  last: Any = None
  groups: list = dataclasses.field(default_factory=list)

  async def on_round(self, trained):
    self.rounds.append(trained.metrics)
    self.groups += [group.group_id for group in trained.groups]
    if trained.metrics["round"] == self.stop_at:
      self.loop.stop()

  async def on_published(self, version):
    self.published.append(int(version))

  async def on_boundary(self, progress):
    self.last = progress


class _Placing(fakes.FakeLearner):
  """A learner that keeps every batch that it is given, to train or score."""

  def __init__(self, step_s, batches):
    super().__init__(step_s)
    self.batches = batches

  def place(self, batch):
    self.batches.append(batch)
    return batch


@dataclasses.dataclass(eq=False)
class Run:
  """A coordinator over fakes, and everything that it touched.

  `start` runs it to its end; `log`, `spans` and `engines` are of the last one.
  """

  schedule: overlap.Overlap
  rounds: int = 4
  source: base.Source = dataclasses.field(default_factory=fakes.Counting)
  reward: base.Reward = dataclasses.field(default_factory=rewards.Outcome)
  retries: grading.Retries = dataclasses.field(default_factory=grading.Retries)
  dynamic_sampling: group_filters.DynamicSampling | None = None
  decode_s: Callable[[tuple[int, ...]], float] = lambda priority: 0.0
  learner_s: float = 0.0
  update_s: float = 0.0
  progress_timeout_s: float = 20.0
  step_s: float = 5.0
  num_engines: int = 1
  group_size: int = GROUP
  share_prompts: bool = False
  estimator: advantages.Estimator = dataclasses.field(
    default_factory=advantages.Reinforce
  )
  observer: Recorder = dataclasses.field(default_factory=Recorder)

  def start(self, progress=None):
    """Returns the state after the last round."""
    return asyncio.run(self.play(progress))

  async def play(self, progress=None):
    """As `start`, on the running event loop."""
    clock = asyncio.get_running_loop().time
    self.log = event_log.EventLog(clock=clock)
    self.spans = trace.Trace(None)
    self.tasks = prompts.Prompts(self.source, 0)
    if progress is not None:
      self.tasks.seek(progress.cursor)
    version = trajectory.PolicyVersion(progress.trained if progress else 0)
    self.engines = [
      fake_engine.FakeEngine(
        (5, 6), word_chat.END, self.decode_s, update_s=self.update_s
      )
      for _ in range(self.num_engines)
    ]
    for engine in self.engines:
      engine.version = version
    thread = mesh_thread.MeshThread("learner", self.spans)
    self.batches: list[Any] = []
    programs = _Placing(self.learner_s, self.batches)
    begin = progress or progress_lib.beginning(
      programs.abstract, self.tasks.cursor
    )
    loop = self._coordinator(thread, programs)
    self.observer.loop = loop
    try:
      return await loop.run(begin)
    finally:
      thread.close()

  def _coordinator(self, thread, programs):
    self.router = router.Router(self.engines, log=self.log)
    return coordinator.Coordinator(
      coordinator.LoopSettings(
        schedule=self.schedule,
        rounds=self.rounds,
        seed=0,
        progress_timeout_s=self.progress_timeout_s,
        success=1.0,
        group_filter=group_filters.group_filter(
          self.dynamic_sampling, advantages.Grpo()
        ),
      ),
      trainer=self._training(thread, programs),
      publisher=weight_publisher.WeightPublisher(
        self.router,
        [None] * len(self.engines),
        thread,
        self.log,
        self.spans,
      ),
      player=group_rollout.Player(
        source=self.source,
        router=self.router,
        chat=CHAT,
        graders=grading.Graders(self.reward, self.retries),
        limits=group_rollout.Rollout(
          group_size=self.group_size, step_s=self.step_s
        ),
        log=self.log,
        priority=overlap.priority(self.schedule),
        extra_members=self.schedule.redundancy.extra_members,
      ),
      tasks=self.tasks,
      log=self.log,
      spans=self.spans,
      watchdog=watchdog_lib.Watchdog(None),
      observer=self.observer,
    )

  def _training(self, thread, programs):
    return trainer.Training(
      trainer.TrainerSettings(
        rows=8,
        length=32,
        share_prompts=self.share_prompts,
        probe_rows=8,
        max_staleness=self.schedule.max_staleness,
        old_logprob=self.schedule.old_logprob,
      ),
      programs,
      thread,
      estimator=self.estimator,
      objective=presets.Grpo(),
    )

  def violations(self):
    """Returns every way in which the run broke its promises."""
    return violations(self.log.events, self.schedule, self.group_size)

  @property
  def ledger(self):
    """Returns where every sampled token went."""
    return token_ledger.of(self.log.events)

  def kinds(self, *wanted):
    """Returns (kind, version) of the events of some kinds."""
    return [
      (e["kind"], e.get("version"))
      for e in self.log.events
      if e["kind"] in wanted
    ]


def violations(log, schedule, group_size=GROUP):
  """Returns every way in which a log breaks the promises of its schedule."""
  return checker.violations(event_log.surviving(log), schedule, group_size)
