"""What an update is of: epochs, groups that teach nothing, bad numbers."""

import asyncio
import dataclasses
import math

import jax.numpy as jnp
import pytest

from rl.algorithms import presets
from rl.data import segment_index
from rl.runtime import mesh_thread, trace
from rl.train import skipped_updates
from rl.train import trainer as trainer_lib
from tests.helpers.counting_trainer import (
  GRPO,
  SETTINGS,
  Programs,
  group,
  trained,
)


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_updates_that_are_not_finite_are_skipped_and_too_many_end_the_run(norm):
  programs, skipped = Programs(grad_norm=norm), []

  async def scenario(trainer):
    await trainer.begin_round(5)
    for _ in range(3):
      await trainer.accumulate([group(1.0, 0.0)])
      skipped.append((await trainer.update())["skipped"])

  message = (
    f"round 6: .* not finite: 3, and max_skipped=2 allows .* norm {norm}; "
    "nobody kept .* Lower optimizer.learning_rate or .* launch.replay"
  )
  with pytest.raises(FloatingPointError, match=message):
    trained(scenario, programs, max_skipped=2)
  assert skipped == [1.0, 1.0]
  assert programs.weights == [0, 0, 0]


def test_what_is_skipped_lies_under_its_round_and_its_place_there(tmp_path):
  built = Programs(grad_norm=math.nan)
  thread = mesh_thread.MeshThread("learner", trace.Trace(None))
  trainer = trainer_lib.Training(
    dataclasses.replace(SETTINGS, max_skipped=2),
    built,
    thread,
    estimator=GRPO.advantage,
    objective=GRPO,
    kept=skipped_updates.Quarantine(tmp_path, most=9),
  )

  async def scenario():
    # What is put away lies on a device.
    trainer.restore(built.abstract._replace(params={"updates": jnp.int32(0)}))
    for version, count in ((5, 2), (6, 1)):
      await trainer.begin_round(version)
      for _ in range(count):
        await trainer.accumulate([group(1.0, 0.0)])
        await trainer.update()

  # Version 5 is trained in round 6, as in metrics.jsonl.
  ends = ("6_update_0", "6_update_1", "7_update_0")
  names = [f"round_00000{end}" for end in ends]
  try:
    with pytest.raises(FloatingPointError, match=names[-1]):
      asyncio.run(scenario())
  finally:
    thread.close()
  assert sorted(x.name for x in tmp_path.iterdir()) == names
  # Both members of the group, in the order in which they were packed.
  found = segment_index.read(tmp_path / names[-1] / "owners.json")
  assert [x[3:] for x in found] == [("t", 0, 0), ("t", 0, 1)]


def test_skipped_updates_count_only_in_a_row():
  programs = Programs()

  async def scenario(trainer):
    await trainer.begin_round(0)
    for norm in (math.nan, 1.0, math.nan, 1.0):
      programs.grad_norm = norm
      await trainer.accumulate([group(1.0, 0.0)])
      await trainer.update()
    return trainer.state.updates

  assert trained(scenario, programs, max_skipped=1) == 2


class Later(Programs):
  """Programs of which every second step is not finite."""

  steps = 0

  def update(self, state, total, zero_variance_count=0.0):
    self.steps += 1
    self.grad_norm = 1.0 if self.steps % 2 else math.nan
    return super().update(state, total, zero_variance_count)


def test_a_later_epoch_that_is_not_finite_ends_an_update_that_counts():
  programs = Later()

  async def scenario(trainer):
    await trainer.begin_round(0)
    await trainer.accumulate([group(1.0, 0.0)])
    return await trainer.update(), trainer.state.updates

  sums, updates = trained(scenario, programs, epochs=3)
  # One step of two; the third epoch is not even tried.
  assert (programs.steps, updates, sums["skipped"]) == (2, 1, 0.5)
  assert sums["tokens"] == 4.0


def test_updates_whose_later_epochs_are_not_finite_count_in_a_row():
  programs, skipped = Later(), []

  async def scenario(trainer):
    await trainer.begin_round(0)
    for _ in range(6):
      await trainer.accumulate([group(1.0, 0.0)])
      skipped.append((await trainer.update())["skipped"])

  with pytest.raises(FloatingPointError, match=r"not finite: 3, .* norm nan"):
    trained(scenario, programs, epochs=2, max_skipped=2)
  assert skipped == [0.5, 0.5]


def test_every_epoch_is_a_step_on_the_same_groups_and_the_same_old_policy():
  programs = Programs()

  async def scenario(trainer):
    await trainer.begin_round(0)
    for _ in range(2):
      await trainer.accumulate([group(1.0, 0.0)] * 4)
    sums = await trainer.update()
    return trainer.state.updates, sums["tokens"]

  found = trained(scenario, programs, epochs=3, old_logprob="recompute")
  # Two full batches three times; tokens are those of one epoch.
  assert found == (3, 32.0)
  assert programs.weights == [0, 0, 1, 1, 2, 2]
  assert programs.compared_with == [-0.5] * 6


def test_a_group_that_teaches_nothing_is_masked_and_stays_in_the_divisor():
  programs = Programs()

  async def scenario(trainer):
    await trainer.begin_round(0)
    used = await trainer.accumulate(
      [group(1.0, 0.0), group(1.0, 1.0, None), group(1.0, None)]
    )
    return used, await trainer.update()

  used, sums = trained(scenario, programs)
  assert [one.trained.any() for one in used] == [True, False, False]
  assert (sums["zero_variance_groups"], sums["singleton_groups"]) == (1, 1)
  # Two trajectories; those of a fault, or alone, are nowhere.
  assert programs.masked == [2.0]
  assert sum(packed.sampled.sum() for packed in programs.batches) == 4


def test_groups_that_are_not_computed_stay_in_the_divisor_of_every_epoch():
  programs = Programs()

  async def scenario(trainer):
    await trainer.begin_round(0)
    for _ in range(2):
      await trainer.accumulate([group(1.0, 0.0), group(1.0, 1.0)])
      await trainer.update()

  trained(scenario, programs, epochs=3)
  # Two trajectories of a zero-variance group, and no more in the next update.
  assert programs.masked == [2.0] * 6


def test_a_group_without_an_advantage_is_trained_where_entropy_counts():
  programs = Programs()

  async def scenario(trainer):
    await trainer.begin_round(0)
    used = await trainer.accumulate([group(1.0, 1.0)])
    return used, await trainer.update()

  (used,), sums = trained(
    scenario, programs, objective=presets.Grpo(entropy_bonus=0.01)
  )
  assert used.trained.all()
  assert not used.advantages.any()
  assert (sums["zero_variance_groups"], programs.masked) == (1, [0.0])


@pytest.mark.parametrize("weight", ["balance_weight", "z_weight"])
def test_a_group_without_an_advantage_is_trained_where_routers_are_balanced(
  weight,
):
  none = presets.Grpo(balance_weight=0.0, z_weight=0.0)
  objective = dataclasses.replace(none, **{weight: 0.1})

  async def scenario(trainer):
    await trainer.begin_round(0)
    (used,) = await trainer.accumulate([group(1.0, 1.0)])
    await trainer.update()
    return used.trained.all()

  for value, has_routers, is_trained in (
    (objective, True, True),
    (objective, False, False),
    (none, True, False),
  ):
    found = trained(scenario, objective=value, has_routers=has_routers)
    assert found == is_trained
