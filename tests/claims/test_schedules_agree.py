"""The modes with the real engine and learner: equal where they must be equal.

Everything is float32 on one device a mesh. Noise is a function of the episode,
so runs with the same weights sample the same tokens; but the last bit of a
log-probability that the engine records depends on what shares a dispatch, and
so on the clock. Runs that must be equal bit for bit therefore take none of it:
with a bound of 0 the ratio is against the learner's own snapshot, and one step
off the loss has no ratio.
"""

import asyncio
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

from envs.rewards import rewards
from models import config as model_config
from rl import assemble
from rl import experiment as experiment_lib
from rl.algorithms import loss_aggregation, losses, presets
from rl.audit import checker, event_log
from rl.data import trajectory
from rl.engine.builtin import settings as engine_settings
from rl.loop import progress
from rl.rollout import group_rollout
from rl.schedule import overlap
from rl.testing import fakes
from rl.train import learner, optimizers, train_state
from tests.helpers import counting_runs

pytestmark = pytest.mark.compiled

R, GROUP, ROUNDS = 4, 4, 3
SYNC = dataclasses.replace(overlap.sync(R), old_logprob="snapshot")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score(losses.Reinforce):
  """The score function alone: what was sampled counts, not how probably.

  Of late tokens it is biased, so a run refuses it: it claims to know better.
  """

  has_ratio = True


def experiment(schedule: overlap.Overlap, rounds: int = ROUNDS):
  score = Score(aggregate=loss_aggregation.TokenMean())
  loss = score if schedule.max_staleness else losses.ClippedSurrogate()
  return experiment_lib.Experiment(
    # With lags the order in which groups finish is not that of submission.
    environment=fakes.Counting(
      turns=2, delay_s=lambda index, step: 0.004 * (index % 5)
    ),
    reward=rewards.Outcome(),
    model=model_config.tiny(
      vocab_size=8,
      num_layers=1,
      d_model=16,
      num_heads=2,
      num_kv_heads=1,
      head_dim=8,
      d_ff=16,
      max_length=16,
    ),
    algorithm=presets.Grpo(loss=loss),
    optimizer=optimizers.AdamW(learning_rate=0.02),
    rollout=group_rollout.Rollout(group_size=GROUP, max_tokens=16),
    engine=engine_settings.EngineSettings(
      slots=32,
      row_buckets=(32,),
      chunk_buckets=(4,),
      steps_per_dispatch=1,
    ),
    overlap=schedule,
    batch=experiment_lib.BatchShape(rows=8, length=16, tail_rows=None),
    rounds=rounds,
    seed=3,
  )


@dataclasses.dataclass(eq=False)
class Seen(progress.RunObserver):
  """An observer of a run that keeps its groups and what is published.

  Attributes:
    gradients: sums of each update, before they were applied.
    params: the weights of each version.
  """

  rounds: list[Sequence[trajectory.Group]] = dataclasses.field(
    default_factory=list
  )
  gradients: list[learner.Accumulator] = dataclasses.field(default_factory=list)
  params: list[Any] = dataclasses.field(default_factory=list)
  log: list[event_log.Event] = dataclasses.field(default_factory=list)
  last: Any = None

  async def on_round(self, trained):
    self.rounds.append(trained.groups)

  def record(self, programs: learner.Learner) -> learner.Learner:
    """Returns the programs, which now keep what `update` is given."""
    update = programs.update

    def recorded(state, total, left_out_divisor=0.0):
      self.params.append(jax.device_get(state.params))
      self.gradients.append(jax.device_get(total))
      return update(state, total, left_out_divisor)

    programs.update = recorded
    return programs


def run(schedule: overlap.Overlap, first: Any = None, rounds: int = ROUNDS):
  """Runs an experiment to its end; `first` may take the coordinator's place."""

  async def all_of_it():
    seen = Seen()
    async with counting_runs.built(experiment(schedule, rounds)) as built:
      recording = assemble.trainer(
        built.experiment,
        built.learner_layout,
        seen.record(built.programs),
        built.learner_thread,
        kept=None,
      )
      parts = dataclasses.replace(built, trainer=recording)
      start = await counting_runs.begun(parts)
      if first is None:
        seen.last = await assemble.coordinate(parts, seen).run(start)
      else:
        seen.last = await first(parts, start.state, seen)
    seen.log = parts.log.events
    return seen

  return asyncio.run(all_of_it())


def trainer(parts: assemble.Parts, state: train_state.TrainState):
  """Returns the trainer that a coordinator would have, at this state."""
  parts.trainer.restore(state)
  return parts.trainer


def bits(tree: Any) -> dict[str, bytes]:
  return {
    jax.tree_util.keystr(path): np.asarray(leaf).tobytes()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


def sampled(groups: Sequence[trajectory.Group]) -> list[list[list[int]]]:
  """Returns all ids, in the order of submission."""
  ordered = sorted(groups, key=lambda group: group.group_id)
  return [[t.ids.tolist() for t in group.trajectories] for group in ordered]


def relative(one: Any, other: Any) -> list[float]:
  """Returns the largest difference of each leaf, by its largest entry."""
  return [
    float(np.abs(a - b).max() / np.abs(b).max())
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    if np.asarray(b).any()
  ]


@functools.cache
def synchronous() -> Seen:
  return run(SYNC)


@functools.cache
def pipelined() -> Seen:
  return run(
    dataclasses.replace(overlap.strict_pipeline(R, 1), old_logprob="snapshot")
  )


@functools.cache
def one_step_off() -> Seen:
  return run(overlap.one_step_off(R, 2), rounds=5)


# Strict pipelined is synchronous.


def test_members_of_a_group_differ_and_some_groups_teach():
  groups = [group for round_ in synchronous().rounds for group in round_]
  for group in groups:
    assert len({tuple(t.ids.tolist()) for t in group.trajectories}) > 1
  rewards_of = [{t.reward for t in group.trajectories} for group in groups]
  assert sum(len(values) > 1 for values in rewards_of) > len(groups) // 3


def test_the_batch_of_a_strict_pipeline_replayed_gives_its_gradient():
  """In order of reduction only: float32, 1e-5 of the largest of each leaf."""
  seen = pipelined()

  async def replay(parts, state, replayed):
    training = trainer(parts, state)
    for version, groups in enumerate(seen.rounds):
      await training.begin_round(version)
      await training.accumulate(groups)
      await training.update()
    return training.state

  replayed = run(SYNC, replay)
  assert len(seen.gradients) == len(replayed.gradients) == ROUNDS
  # Of the first round: the weights are those of the run, to the bit.
  assert bits(seen.params[0]) == bits(replayed.params[0])
  errors = relative(seen.gradients[0], replayed.gradients[0])
  assert errors
  assert max(errors) < 1e-5
  assert max(relative(seen.params[0], replayed.params[0])) == 0.0
  # Adam divides by its own size what is next to nothing: weights drift more.
  for one, other in zip(seen.params, replayed.params, strict=True):
    assert max(relative(one, other)) < 1e-3


def test_a_strict_pipeline_samples_the_tokens_of_a_synchronous_run():
  # Those of the first round; later weights differ in their last bits.
  assert sampled(pipelined().rounds[0]) == sampled(synchronous().rounds[0])
  errors = relative(pipelined().gradients[0], synchronous().gradients[0])
  assert max(errors) < 1e-5


def test_a_gradient_is_accumulated_while_the_tail_still_plays():
  log = pipelined().log
  order = [
    (e["kind"], e["group"]) for e in log if e["kind"] in ("dequeued", "ready")
  ]
  early = [
    round_
    for round_ in range(ROUNDS)
    if order.index(("dequeued", R * round_))
    < max(order.index(("ready", R * round_ + i)) for i in range(R))
  ]
  assert early


# A bound of 0 is synchronous.


def test_a_bound_of_0_equals_the_synchronous_run_bit_for_bit():
  """The round is one micro-batch, so that sums are taken in the same order."""
  zero = overlap.Overlap(
    groups_per_round=R,
    groups_per_microbatch=R,
    max_staleness=0,
    on_publish="recompute",
    admission="fifo",
    old_logprob="snapshot",
  )
  assert not zero.wait_for_round
  seen = run(zero)
  for one, other in zip(seen.rounds, synchronous().rounds, strict=True):
    assert sampled(one) == sampled(other)
  # All that trains; how far the engine's record is off is no part of that.
  for one, other in zip(seen.gradients, synchronous().gradients, strict=True):
    assert bits(one.grads) == bits(other.grads)
    assert bits(one.sums.loss) == bits(other.sums.loss)
  assert bits(seen.last) == bits(synchronous().last)


def test_a_synchronous_run_repeats_bit_for_bit():
  again = run(SYNC)
  assert bits(again.last) == bits(synchronous().last)
  assert bits(again.last.params) != bits(again.params[0])


# A bound of 1 that drains is one step off.


def test_one_step_off_is_a_bound_of_1_that_drains():
  drained = dataclasses.replace(
    overlap.in_flight(R, max_staleness=1), on_publish="drain"
  )
  assert drained == overlap.one_step_off(R)
  assert overlap.bounded(R, 1) == overlap.one_step_off(R)


def test_one_step_off_lags_by_1_and_publishes_into_no_session():
  seen = one_step_off()
  lags = [
    (e["version"], e["version"] - e["first_version"])
    for e in event_log.of_kind(seen.log, "trained")
  ]
  assert lags == [(v, min(v, 1)) for v in range(5) for _ in range(R)]
  live = set()
  for event in seen.log:
    where = tuple(event.get(name) for name in ("group", "attempt", "index"))
    if event["kind"] == "admitted":
      live.add(where)
    elif event["kind"] in ("ended", "aborted"):
      live.discard(where)
    elif event["kind"] == "published":
      # The weights are in: nothing has begun since they were let in.
      assert not live
  schedule = overlap.one_step_off(R, 2)
  assert checker.violations(seen.log, schedule, GROUP) == []


def test_one_step_off_equals_a_loop_that_is_written_by_hand():
  """Batch k + 1 is generated with weights k, then batch k is trained."""

  async def loop(parts, state, seen):
    training = trainer(parts, state)
    tasks = [parts.tasks.next() for _ in range(5 * R)]

    async def generate(batch, version):
      plays = [
        group_rollout.GroupRollout(
          parts.player,
          tasks[i],
          group_id=i,
          seed=parts.experiment.seed,
          admitted=version,
        )
        for i in range(batch * R, batch * R + R)
      ]
      return await asyncio.gather(*(play.run() for play in plays))

    following = await generate(0, 0)
    for k in range(5):
      batch = following
      if k < 4:
        # The engine has the weights of k rounds; batch k is not yet trained.
        following = await generate(k + 1, k)
      await training.begin_round(k)
      for i in range(0, R, 2):
        await training.accumulate(batch[i : i + 2])
      await training.update()
      seen.rounds.append(batch)
      version = k + 1
      await parts.publisher.publish(version, training.params, "drain")
    return training.state

  by_hand = run(overlap.one_step_off(R, 2), loop, rounds=5)
  for one, other in zip(by_hand.rounds, one_step_off().rounds, strict=True):
    assert sampled(one) == sampled(other)
  assert bits(by_hand.last) == bits(one_step_off().last)
