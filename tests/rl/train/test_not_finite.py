"""A bad batch changes not one bit of what is trained, and a run outlives it.

The real jit, and what a run books; for how the trainer counts see
`test_training_updates`.
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import numpy as np
import pytest

from models import config as model_config
from rl.algorithms import advantages, losses, objective, presets
from rl.audit import token_ledger
from rl.data import batch
from rl.pools import placement
from rl.schedule import overlap
from rl.testing import fakes
from rl.train import learner, optimizers, trainer
from tests.helpers import counting_trainer, fake_run, scored_episodes
from tests.helpers import tiny_engine as tiny

CONFIG = tiny.DENSE
Dtype = Literal["float32", "bfloat16"]
# Master copies and the critic are what a state may have on top.
KINDS = [
  pytest.param("float32", False, id="float32"),
  pytest.param("bfloat16", True, id="bfloat16-critic"),
]


@functools.cache
def build(dtype: Dtype, critic: bool) -> learner.Learner:
  layout, _ = placement.Placement(
    learner=placement.MeshSpec(data=2), colocated=True
  ).layouts()
  return learner.Learner(
    dataclasses.replace(CONFIG, compute=model_config.Compute(dtype=dtype)),
    layout,
    objective.Objective(loss=losses.ClippedSurrogate()),
    optimizers.AdamW(learning_rate=0.02)(),
    critic=critic,
  )


@functools.cache
def good() -> batch.Batch:
  episodes = scored_episodes.draw(2)
  (packed,) = scored_episodes.pack(episodes, rows=8, length=32).batches
  return packed


def with_nan() -> batch.Batch:
  """One token in all whose advantage is not known."""
  values = good().advantages.copy()
  values[tuple(np.argwhere(good().sampled)[5])] = np.nan
  return good()._replace(advantages=values)


def lost() -> batch.Batch:
  """One token whose log-probability is not known."""
  values = np.array(good().old)
  values[tuple(np.argwhere(good().sampled)[7])] = np.nan
  return good()._replace(old=values)


def impossible() -> batch.Batch:
  """One token that no engine could have sampled."""
  values = np.array(good().old)
  values[
    tuple(np.argwhere(good().sampled & (good().advantages < 0))[0])
  ] = -np.inf
  return good()._replace(old=values)


def steep() -> batch.Batch:
  """Squares of gradients overflow, of a loss that does not."""
  return good()._replace(advantages=np.float32(1e25) * good().advantages)


def boundless() -> batch.Batch:
  """Every token is clipped, so it has no gradient, and the loss overflows."""
  # A policy that knows nothing gives each of 24 ids -3.2 nats: ratios of e and
  # more, which times 1e38 just fit, but no two of them together.
  huge = np.where(good().sampled, np.float32(1e38), np.float32(0))
  far = np.where(good().sampled, np.float32(-4.2), np.float32(0))
  return good()._replace(advantages=huge, old=far)


def step(
  programs: learner.Learner, state: Any, data: batch.Batch
) -> tuple[Any, dict[str, float]]:
  total = programs.accumulate(
    state.params, programs.zero(), programs.place(data), state.critic
  )
  state, metrics = programs.update(state, total)
  return state, {k: float(x) for k, x in jax.device_get(metrics).items()}


def assert_same_bits(found: Any, expected: Any) -> None:
  jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize(
  ("bad", "loss_is_finite", "norm_is_finite"),
  [
    (with_nan, False, False),
    (lost, False, False),
    (steep, True, False),
    (boundless, False, True),
  ],
)
@pytest.mark.parametrize(("dtype", "critic"), KINDS)
def test_a_bad_batch_changes_not_one_bit_and_the_next_one_trains(
  dtype: Dtype, critic, bad, loss_is_finite, norm_is_finite
):
  programs = build(dtype, critic)
  # After a step moments are not 0, and master copies no rounded numbers.
  state, _ = step(programs, programs.init(jax.random.key(0)), good())
  before = jax.device_get(state)
  state, metrics = step(programs, state, bad())
  assert metrics["skipped"] == 1
  assert np.isfinite(metrics["loss"]) == loss_is_finite
  assert np.isfinite(metrics["grad_norm"]) == norm_is_finite
  assert_same_bits(jax.device_get(state), before)
  state, metrics = step(programs, state, good())
  assert metrics["skipped"] == 0
  after = jax.device_get(state)
  assert (before.updates, after.updates) == (1, 2)
  assert (after.master is None) == (dtype == "float32")
  assert (after.critic is None) != critic
  moved = jax.tree.map(lambda a, b: (a != b).any(), after, before)
  assert all(jax.tree.leaves(moved))


@pytest.mark.parametrize(("dtype", "critic"), KINDS)
def test_a_run_goes_on_as_if_there_had_been_no_bad_batch(dtype: Dtype, critic):
  programs = build(dtype, critic)

  def trained(batches):
    state = programs.init(jax.random.key(0))
    for data in batches:
      state, _ = step(programs, state, data)
    return jax.device_get(state)

  with_bad = trained([with_nan(), good(), steep(), good(), lost()])
  assert_same_bits(with_bad, trained([good(), good()]))


@pytest.mark.parametrize(("dtype", "critic"), KINDS)
def test_one_bad_micro_batch_of_several_is_enough(dtype: Dtype, critic):
  programs = build(dtype, critic)
  state = programs.init(jax.random.key(0))
  before, total = jax.device_get(state), programs.zero()
  for data in (good(), with_nan(), good()):
    total = programs.accumulate(
      state.params, total, programs.place(data), state.critic
    )
  state, metrics = programs.update(state, total)
  assert metrics["skipped"] == 1
  assert_same_bits(jax.device_get(state), before)


def test_a_log_probability_of_minus_infinity_is_a_bounded_ratio():
  """Its token is clipped or pushes no further; the others are trained."""
  programs = build("float32", False)
  state = programs.init(jax.random.key(0))
  state, metrics = step(programs, state, impossible())
  assert metrics["skipped"] == 0
  assert np.isfinite(metrics["grad_norm"])
  assert metrics["grad_norm"] > 0
  for leaf in jax.tree.leaves(jax.device_get(state)):
    assert np.isfinite(leaf).all()


class Skipping(fakes.FakeLearner):
  """A learner of which some updates are not finite.

  Attributes:
    bad: which of each two.
  """

  def __init__(self, bad):
    super().__init__()
    self.bad, self.taken = bad, 0

  def update(self, state, total, zero_variance_count=0.0):
    after, sums = super().update(state, total, zero_variance_count)
    bad = self.taken % 2 in self.bad
    self.taken += 1
    return (state, {**sums, "skipped": 1.0}) if bad else (after, sums)


@dataclasses.dataclass(eq=False)
class Run(fake_run.Run):
  """Two epochs an update, of which some are not finite.

  Attributes:
    bad: which of the two.
  """

  bad: tuple[int, ...] = ()

  def _training(self, thread, programs):
    return trainer.Training(
      dataclasses.replace(
        counting_trainer.SETTINGS, rows=8, length=32, probe_rows=8, epochs=2
      ),
      Skipping(self.bad),
      thread,
      estimator=advantages.Reinforce(),
      objective=presets.Grpo(),
    )


@pytest.mark.parametrize(
  ("bad", "updates", "share"),
  [((), 2, 0.0), ((1,), 1, 0.5), ((0,), 0, 1.0)],
  ids=["none", "second", "first"],
)
def test_tokens_of_which_one_step_was_taken_are_booked_as_trained(
  bad, updates, share
):
  run = Run(overlap.sync(4), rounds=1, bad=bad)
  state = run.start()
  assert state.updates == updates
  assert [m["skipped_updates"] for m in run.observer.rounds] == [share]
  ledger = token_ledger.of(run.log.events)
  assert ledger.error == 0
  # Four groups of two, whose members say a word and its end in each of two
  # turns: all of it was trained, or none.
  counts = (ledger.trained, ledger.masked)
  assert counts == ((0, 32) if share == 1 else (32, 0))
  assert dict(ledger.causes) == ({"not finite": 32} if share == 1 else {})
