"""Tests of the schedules with a fake engine, learner and environment."""

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from envs import rewards
from models import chat as chat_lib
from rl import (
  advantages,
  coordinator,
  dispatch,
  events,
  overlap,
  prompts,
  rollout,
  testing,
  trace,
  trajectory,
  watchdog,
  weights,
)
from rl import progress as progress_lib

GROUP = 2
CHAT = chat_lib.WordChat(("go", "on", "yes", "no"))


@dataclasses.dataclass(eq=False)
class Recorder:
  """An observer that keeps what it sees, and may stop the run."""

  stop_at: int = -1
  loop: Any = None
  rounds: list = dataclasses.field(default_factory=list)
  published: list = dataclasses.field(default_factory=list)
  last: Any = None
  groups: list = dataclasses.field(default_factory=list)

  async def on_round(self, metrics, groups, values):
    self.rounds.append(metrics)
    self.groups += [group.group_id for group in groups]
    if metrics["round"] == self.stop_at:
      self.loop.stop()

  async def on_published(self, version):
    self.published.append(int(version))

  async def on_boundary(self, progress):
    self.last = progress


@dataclasses.dataclass(eq=False)
class Run:
  """A coordinator over fakes, and everything that it touched."""

  schedule: overlap.Overlap
  rounds: int = 4
  source: testing.Counting = dataclasses.field(default_factory=testing.Counting)
  decode_s: Callable[[tuple[int, ...]], float] = lambda priority: 0.0
  learner_s: float = 0.0
  stall_s: float = 20.0
  step_s: float = 5.0
  share_prompts: bool = False
  observer: Recorder = dataclasses.field(default_factory=Recorder)

  def _place(self, packed):
    self.batches.append(packed)
    return packed

  def start(self, progress=None):
    self.log, self.spans = events.EventLog(), trace.Trace(None)
    self.tasks = prompts.Prompts(self.source, 0)
    if progress is not None:
      self.tasks.seek(progress.cursor)
    return asyncio.run(self._run(progress))

  async def _run(self, progress):
    thread = dispatch.MeshThread("learner", self.spans)
    engine = testing.FakeEngine((5, 6), chat_lib.END, self.decode_s)
    engine.version = trajectory.PolicyVersion(
      progress.trained if progress else 0
    )
    programs = testing.fake_learner(self.learner_s)
    self.batches: list[Any] = []
    programs = dataclasses.replace(programs, place=self._place)
    loop = coordinator.Coordinator(
      coordinator.Settings(
        schedule=self.schedule,
        rounds=self.rounds,
        seed=0,
        stall_s=self.stall_s,
        rows=8,
        length=32,
        share_prompts=self.share_prompts,
        probe_rows=8,
        success=1.0,
      ),
      programs=programs,
      thread=thread,
      publisher=weights.WeightPublisher(
        [(engine, None)], thread, self.log, self.spans
      ),
      player=rollout.Player(
        source=self.source,
        engine=engine,
        chat=CHAT,
        reward=rewards.Outcome(),
        limits=rollout.Rollout(group_size=GROUP, step_s=self.step_s),
        log=self.log,
      ),
      tasks=self.tasks,
      estimator=advantages.Grpo(),
      log=self.log,
      spans=self.spans,
      dog=watchdog.Watchdog(None),
      observer=self.observer,
    )
    self.observer.loop = loop
    begin = progress or progress_lib.beginning(
      programs.abstract, self.tasks.cursor
    )
    try:
      return await loop.run(begin)
    finally:
      thread.close()

  def kinds(self, *wanted):
    return [
      (e["kind"], e.get("version"))
      for e in self.log.events
      if e["kind"] in wanted
    ]


SCHEDULES = {
  "sync": overlap.sync(4, 2, 2),
  "round pipelined": overlap.round_pipelined(4, 2, 1),
  "in flight, 1": overlap.in_flight(4, 1, 2),
  "in flight, 3": overlap.in_flight(4, 3, 1),
}


def uneven(priority):
  """Some members take ten times as long as others."""
  return 0.02 if sum(priority) % 5 == 0 else 0.002


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_trains_each_group_once_and_in_order(name):
  run = Run(SCHEDULES[name], decode_s=uneven, learner_s=0.005)
  state = run.start()
  assert run.observer.groups == list(range(16))
  assert state.updates == 4 * SCHEDULES[name].updates_per_round
  assert run.observer.published == [1, 2, 3, 4]
  assert events.violations(run.log.events, SCHEDULES[name], GROUP) == []
  assert events.ledger(run.log.events).error == 0


@pytest.mark.parametrize("eta", [1, 2, 3])
def test_staleness_reaches_the_bound_and_never_passes_it(eta):
  schedule = overlap.in_flight(4, eta, 1)
  # The learner is far slower than rollout, so the window is always full.
  run = Run(schedule, rounds=8, learner_s=0.03)
  run.start()
  lags = events.staleness(run.log.events)
  assert max(lags) == eta
  assert min(lags) >= 0


def test_synchronous_rollout_and_training_never_overlap():
  run = Run(overlap.sync(4, 1, 2), decode_s=uneven, learner_s=0.01)
  run.start()
  for round_ in range(4):
    ready = [
      e["t"]
      for e in run.log.events
      if e["kind"] == "ready" and e["group"] // 4 == round_
    ]
    taken = [
      e["t"]
      for e in run.log.events
      if e["kind"] == "dequeued" and e["group"] // 4 == round_
    ]
    assert max(ready) <= min(taken)


def test_a_pipelined_round_trains_while_its_tail_decodes():
  def slow_last(priority):
    return 0.2 if priority[0] % 4 == 3 else 0.0

  run = Run(overlap.round_pipelined(4, 1, 1), rounds=1, decode_s=slow_last)
  run.start()
  order = [
    (e["kind"], e["group"])
    for e in run.log.events
    if e["kind"] in ("dequeued", "ready")
  ]
  assert order.index(("dequeued", 0)) < order.index(("ready", 3))


def test_weights_go_out_as_soon_as_a_round_is_trained():
  run = Run(overlap.in_flight(4, 1, 4), learner_s=0.01)
  run.start()
  kinds = [
    e["kind"]
    for e in run.log.events
    if e["kind"] in ("dequeued", "publish_start", "published", "trained")
  ]
  round_ = [*["dequeued"] * 4, *["trained"] * 4, "publish_start", "published"]
  assert kinds == round_ * 4


def test_the_gate_opens_only_after_the_weights_are_served():
  run = Run(overlap.sync(4, 1, 2))
  run.start()
  for event in events.of_kind(run.log.events, "submitted"):
    assert event["version"] == event["group"] // 4
  order = run.kinds("submitted", "published")
  for i in range(1, 4):
    assert order.index(("submitted", i)) > order.index(("published", i))


def test_members_of_a_group_share_their_prompt_when_they_are_asked_to():
  packed = []
  for share in (False, True):
    run = Run(overlap.sync(4, 1, 4), rounds=1, share_prompts=share)
    run.start()
    packed.append(run.batches[0])
  own, shared = packed
  assert own.prefix is None
  assert shared.prefix is not None
  assert own.sampled.sum() == shared.sampled.sum()
  # Four groups of two begin with "go" and <agent>: each saves these 2 ids once.
  assert (own.segments > 0).sum() - (shared.segments > 0).sum() == 4 * 2


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_stopped_run_goes_on_without_losing_or_repeating_a_group(name):
  first = Run(SCHEDULES[name], decode_s=uneven, observer=Recorder(stop_at=2))
  with pytest.raises(coordinator.Stopped):
    first.start()
  saved = first.observer.last
  assert saved.trained in (2, 3)
  again = Run(SCHEDULES[name], decode_s=uneven)
  state = again.start(saved)
  assert state.updates == 4 * SCHEDULES[name].updates_per_round
  assert first.observer.groups + again.observer.groups == list(range(16))
  assert events.violations(again.log.events, SCHEDULES[name], GROUP) == []


def test_a_resumed_run_plays_the_same_tasks_as_one_that_never_stopped():
  def tasks(run):
    return {
      e["group"]: e["tokens"] for e in run.log.events if e["kind"] == "trained"
    }

  whole = Run(overlap.sync(4, 1, 2))
  whole.start()
  cut = Run(overlap.sync(4, 1, 2), observer=Recorder(stop_at=2))
  with pytest.raises(coordinator.Stopped):
    cut.start()
  rest = Run(overlap.sync(4, 1, 2))
  rest.start(cut.observer.last)
  assert {**tasks(cut), **tasks(rest)} == tasks(whole)
  assert rest.tasks.cursor == whole.tasks.cursor


@pytest.mark.parametrize("fault", ["start", "step", "nan", "text", "hang"])
def test_faulty_environments_cost_their_tokens_and_nothing_else(fault):
  source = testing.Counting(fault=fault, faulty=lambda index: index % 3 == 0)
  run = Run(overlap.in_flight(4, 1, 2), source=source, step_s=0.1)
  run.start()
  assert len(run.observer.rounds) == 4
  faults = sum(m["faults/env_fault"] for m in run.observer.rounds)
  broken = {e["group"] for e in run.log.events if e["kind"] == "fault"}
  assert faults == GROUP * len(broken) > 0
  book = events.ledger(run.log.events)
  assert book.error == 0
  assert (book.masked > 0) == (fault != "start")
  assert events.violations(run.log.events, run.schedule, GROUP) == []


def test_groups_that_are_all_faults_do_not_stop_the_run():
  run = Run(overlap.sync(2, 1, 1), source=testing.Counting(fault="step"))
  run.start()
  assert [m["trained_tokens"] for m in run.observer.rounds] == [0.0] * 4


def test_a_dead_wait_is_named():
  def forever(priority):
    return 60.0 if priority[0] == 1 else 0.0

  run = Run(overlap.sync(4, 1, 2), decode_s=forever, stall_s=0.3)
  with pytest.raises(watchdog.Stalled, match=r"learner.*1 groups.*them 1"):
    run.start()


def test_an_engine_that_dies_ends_the_run_with_its_reason():
  def die(priority):
    raise RuntimeError("device lost")

  run = Run(overlap.sync(4, 1, 2), decode_s=die)
  with pytest.raises(RuntimeError, match="device lost"):
    run.start()


def test_the_log_probability_gap_is_reported_every_round():
  run = Run(overlap.in_flight(4, 1, 2))
  run.start()
  # The fake learner scores what the engine reported: a gap of exactly 0.
  assert [m["logprob_gap_max"] for m in run.observer.rounds] == [0.0] * 4
