"""What an optimizer step rests on: whose weights, which members, which sums."""

import asyncio
import dataclasses
import math

import jax
import numpy as np
import pytest

from rl.algorithms import advantages, corrections, presets, token_advantages
from rl.pools import placement
from rl.runtime import mesh_thread, trace
from rl.schedule import overlap
from rl.testing import fakes
from rl.train import learner, optimizers
from rl.train import trainer as trainer_lib
from tests.helpers.counting_trainer import (
  GRPO,
  NOTHING,
  SETTINGS,
  Programs,
  group,
  trained,
)

CORRECTED = presets.Grpo(correction=corrections.TokenTruncated())


@pytest.mark.parametrize(
  ("old_logprob", "updates"),
  [
    ("decode", [0, 0, 0]),
    # Two rounds, of two updates and of one: each from where its round began,
    # or from the weights that are trained.
    ("snapshot", [0, 0, 2]),
    ("recompute", [0, 1, 2]),
  ],
)
def test_the_ratio_compares_with_the_weights_that_were_asked_for(
  old_logprob: overlap.OldLogprob, updates
):
  programs = Programs()

  async def scenario(trainer):
    for version, count in enumerate((2, 1)):
      await trainer.begin_round(version)
      for _ in range(count):
        await trainer.accumulate([group(1.0, 0.0)])
        await trainer.update()

  trained(scenario, programs, old_logprob=old_logprob)
  assert programs.weights == [0, 1, 2]
  assert programs.compared_with == [-0.5 - n / 4 for n in updates]


def test_a_snapshot_outlives_the_updates_of_its_round_only():
  programs = Programs()

  async def scenario(trainer):
    await trainer.begin_round(7)
    for _ in range(4):
      await trainer.accumulate([group(1.0, 0.0)])
      await trainer.update()
    return trainer.params, trainer.state.updates

  params, updates = trained(scenario, programs, old_logprob="snapshot")
  assert params == {"updates": 4}
  assert updates == 4
  assert programs.compared_with == [-0.5] * 4


def test_an_estimator_of_the_batch_compares_all_groups_of_an_update():
  programs = Programs()
  groups = [group(1.0, 0.0), group(2.0, 0.0)]

  async def scenario(trainer):
    await trainer.begin_round(0)
    used = await trainer.accumulate(groups)
    await trainer.update()
    return used

  used = trained(
    scenario,
    programs,
    token_advantages.ReinforcePlusPlus(baseline="group", over="members"),
  )
  # Less their means: 0.5, -0.5 and 1, -1, of mean 0 and variance 2.5 / 4;
  # alone the first group would have had 1 and -1.
  std = math.sqrt(2.5) / 2
  values = [one.advantages.tolist() for one in used]
  assert values[0] == pytest.approx([0.5 / std, -0.5 / std])
  assert values[1] == pytest.approx([1 / std, -1 / std])
  assert all(one.trained.all() for one in used)
  (packed,) = programs.batches
  trained_with = np.unique(packed.advantages[packed.sampled])
  assert trained_with == pytest.approx(np.array([-1, -0.5, 0.5, 1]) / std)


def test_the_critic_of_a_rounds_start_says_the_values_of_all_its_updates():
  programs = Programs()

  async def scenario(trainer):
    for version in range(2):
      await trainer.begin_round(version)
      for _ in range(2):
        await trainer.accumulate([group(1.0, 0.0)])
        await trainer.update()

  algorithm = presets.Ppo()
  trained(scenario, programs, algorithm.advantage, objective=algorithm)
  said = [set(b.values[b.sampled].tolist()) for b in programs.batches]
  # By the number of updates of the weights that said it.
  assert said == [{0.0}, {0.0}, {2.0}, {2.0}]


def test_members_with_a_fault_are_not_trained():
  programs = Programs()

  async def scenario(trainer):
    await trainer.begin_round(0)
    used = await trainer.accumulate([group(1.0, None, 0.0)])
    return used, await trainer.update()

  (used,), sums = trained(scenario, programs)
  assert used.trained.tolist() == [True, False, True]
  assert used.advantages[1] == 0
  # Two members of two tokens each.
  (packed,) = programs.batches
  assert packed.sampled.sum() == sums["tokens"] == 4


def test_an_update_sums_what_was_accumulated_since_the_last():
  async def scenario(trainer):
    await trainer.begin_round(0)
    tokens = []
    for calls in (1, 3, 2):
      for _ in range(calls):
        await trainer.accumulate([group(1.0, 0.0)])
      tokens.append((await trainer.update())["tokens"])
    return tokens

  assert trained(scenario) == [4.0, 12.0, 8.0]


def test_what_does_not_fit_one_batch_is_accumulated_in_several():
  programs = Programs()

  async def scenario(trainer):
    await trainer.begin_round(0)
    # 4 ids each: two fit a row of 8, so the four rows hold 8 of 10.
    await trainer.accumulate([group(1.0, 0.0)] * 5)
    return await trainer.update()

  sums = trained(scenario, programs)
  assert len(programs.batches) == 2
  assert sums["tokens"] == 20
  assert programs.weights == [0, 0]


@pytest.mark.parametrize(
  "groups", [[], [group(None, None)], [group(1.0, None), group(None, 0.0)]]
)
def test_an_update_of_nothing_takes_no_step(groups):
  programs = Programs()

  async def scenario(trainer):
    await trainer.begin_round(0)
    before = trainer.state
    used = await trainer.accumulate(groups)
    sums = await trainer.update()
    same = trainer.state is before
    await trainer.accumulate([group(1.0, 0.0)])
    return used, sums, same, (await trainer.update())["tokens"]

  used, sums, same, later = trained(scenario, programs)
  assert same
  assert {name: sums[name] for name in learner.METRICS} == NOTHING
  assert not any(one.trained.any() for one in used)
  # The next one is whole, and nothing of this is in it.
  assert (len(programs.batches), later) == (1, 4.0)


def test_an_update_before_anything_was_accumulated_takes_no_step():
  async def scenario(trainer):
    await trainer.begin_round(0)
    sums = await trainer.update()
    return trainer.state.updates, sums

  updates, sums = trained(scenario)
  assert updates == 0
  assert {name: sums[name] for name in learner.METRICS} == NOTHING


def test_engine_and_learner_are_compared_under_weights_that_are_kept():
  async def scenario(trainer):
    gaps = []
    for version in range(3):
      await trainer.begin_round(version)
      # Of each version one token a member, and one of the version before.
      versions = (max(version - 1, 0), version)
      await trainer.accumulate([group(1.0, 0.0, versions=versions)])
      await trainer.update()
      gaps.append(await trainer.describe())
    return gaps

  def compared(max_staleness):
    gaps = trained(scenario, max_staleness=max_staleness)
    return [(g["logprob_gap_max"], g["logprob_gap_tokens"]) for g in gaps]

  # The weights of version v are v / 4 nats off. Those of the version before
  # are gone when nothing may be so old, and its tokens are left out.
  assert compared(1) == [(0.0, 4.0), (0.25, 4.0), (0.5, 4.0)]
  assert compared(0) == [(0.0, 4.0), (0.25, 2.0), (0.5, 2.0)]


def test_a_round_of_nothing_compares_nothing():
  async def scenario(trainer):
    await trainer.begin_round(0)
    await trainer.accumulate([group(1.0, 0.0)])
    await trainer.update()
    first = await trainer.describe()
    await trainer.begin_round(1)
    return first, await trainer.describe()

  first, second = trained(scenario)
  assert first["logprob_gap_tokens"] == 4.0
  assert second["logprob_gap_tokens"] == 0.0
  assert math.isnan(second["logprob_gap_max"])


def test_a_trainer_without_a_state_says_what_it_needs():
  thread = mesh_thread.MeshThread("learner", trace.Trace(None))
  programs = fakes.FakeLearner()
  trainer = trainer_lib.Training(
    SETTINGS, programs, thread, estimator=advantages.Grpo(), objective=GRPO
  )
  with pytest.raises(RuntimeError, match="call `restore` first"):
    _ = trainer.params
  thread.close()


@pytest.fixture(scope="module")
def meshed(dense_config):
  """The real programs, over two devices."""
  spec = placement.MeshSpec(data=2)
  layout, _ = placement.Placement(learner=spec, colocated=True).layouts()
  return learner.Learner(
    dense_config, layout, CORRECTED, optimizers.AdamW(learning_rate=0.1)()
  )


@pytest.mark.parametrize(
  ("old_logprob", "changes"),
  [("decode", False), ("snapshot", False), ("recompute", True)],
)
def test_a_mesh_compares_with_its_own_weights(
  meshed, old_logprob: overlap.OldLogprob, changes
):
  """The weights old / behaviour say which policy was scored."""
  settings = dataclasses.replace(
    SETTINGS, share_prompts=True, old_logprob=old_logprob
  )
  thread = mesh_thread.MeshThread("learner", trace.Trace(None))
  trainer = trainer_lib.Training(
    settings,
    meshed,
    thread,
    estimator=advantages.Grpo(),
    objective=CORRECTED,
  )

  async def scenario():
    trainer.restore(meshed.init(jax.random.key(0)))
    await trainer.begin_round(0)
    found = []
    for _ in range(2):
      await trainer.accumulate([group(1.0, 0.0)])
      found.append(await trainer.update())
    return found

  first, second = asyncio.run(scenario())
  thread.close()
  weight, again = first["correction/weight"], second["correction/weight"]
  if old_logprob == "decode":
    assert (weight, again) == (1.0, 1.0)
    return
  # Of one version: log(old / -0.5 nats) is what the policy was off by.
  assert weight < 0.5
  assert math.isclose(weight, again, rel_tol=1e-5) != changes
