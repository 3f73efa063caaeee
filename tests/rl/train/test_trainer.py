"""The basis of an optimizer step: weights, members, sums, and its batches."""

import asyncio
import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl.algorithms import (
  advantages,
  corrections,
  presets,
  token_advantages,
)
from rl.data import batch, segment_index, trajectory
from rl.pools import placement
from rl.runtime import mesh_thread, trace
from rl.schedule import overlap
from rl.testing import fakes
from rl.train import learner, optimizers, scoring, skipped_updates
from rl.train import trainer as trainer_lib
from tests.helpers import scored_episodes
from tests.helpers.counting_trainer import (
  GRPO,
  NOTHING,
  SETTINGS,
  Programs,
  build,
  group,
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
async def test_the_ratio_compares_with_the_weights_that_were_asked_for(
  thread, old_logprob: overlap.OldLogprob, updates
):
  programs = Programs()

  trainer = build(thread, programs, old_logprob=old_logprob)
  for version, count in enumerate((2, 1)):
    await trainer.begin_round(version)
    for _ in range(count):
      await trainer.accumulate([group(1.0, 0.0)])
      await trainer.update()
  assert programs.weights == [0, 1, 2]
  assert programs.compared_with == [-0.5 - n / 4 for n in updates]


async def test_the_policy_becomes_the_reference_every_so_many_rounds(thread):
  referred = []

  class Referring(Programs):
    def refer(self, state):
      referred.append(state.params["updates"])
      return state

  trainer = build(thread, Referring(), refresh_reference=2)
  for version in range(5):
    await trainer.begin_round(version)
    await trainer.accumulate([group(1.0, 0.0)])
    await trainer.update()
  assert referred == [2, 4]


async def test_an_estimator_of_the_batch_compares_all_groups_of_an_update(
  thread,
):
  programs = Programs()
  groups = [group(1.0, 0.0), group(2.0, 0.0)]

  trainer = build(
    thread,
    programs,
    token_advantages.ReinforcePlusPlus(baseline="group", over="members"),
  )
  await trainer.begin_round(0)
  used = await trainer.accumulate(groups)
  await trainer.update()
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


async def test_the_critic_of_a_rounds_start_says_the_values_of_all_its_updates(
  thread,
):
  programs = Programs()

  algorithm = presets.Ppo()
  trainer = build(thread, programs, algorithm.advantage, objective=algorithm)
  for version in range(2):
    await trainer.begin_round(version)
    for _ in range(2):
      await trainer.accumulate([group(1.0, 0.0)])
      await trainer.update()
  said = [set(b.values[b.sampled].tolist()) for b in programs.batches]
  # By the number of updates of the weights that said it.
  assert said == [{0.0}, {0.0}, {2.0}, {2.0}]


async def test_members_that_a_limit_cut_are_compared_but_not_trained(thread):
  programs = Programs()
  mixed, equal = group(1.0, 0.0, 0.0), group(1.0, 1.0, 1.0)
  mixed.trajectories[1].turns[-1].stop = "length"
  equal.trajectories[0].turns[-1].stop = "length"
  ended = dataclasses.replace(
    equal.trajectories[1], status=trajectory.Status.TRUNCATED
  )
  members = [equal.trajectories[0], ended, equal.trajectories[2]]
  equal = dataclasses.replace(equal, trajectories=members)

  trainer = build(thread, programs, mask_truncated=True)
  await trainer.begin_round(0)
  used, _ = await trainer.accumulate([mixed, equal])
  sums = await trainer.update()
  assert used.trained.tolist() == [True, False, True]
  assert used.cut.tolist() == [False, True, False]
  # Of 1, 0, 0: less 1/3 over 0.57735. Of 1 and 0 they were +-0.70711.
  np.testing.assert_allclose(used.advantages, [1.1547, 0, -0.57735], atol=5e-5)
  assert used.by_token[1] is None
  (packed,) = programs.batches
  assert packed.sampled.sum() == sums["tokens"] == 4
  # The one whole member of the group without variance is in the divisor.
  assert programs.masked == [1.0]


@pytest.mark.parametrize(
  ("objective", "expected"),
  [
    # The reward less the mean of the two members; of the samples it were 0.75.
    (presets.DrGrpo(), [-0.5, 0.5, 0.5, 0.5]),
    # The values are 0: the first tokens are 6, 4 and 2 before the reward.
    (presets.Ppo(), [0.0, 0.95**5, 0.95**3, 0.95]),
  ],
  ids=["group", "critic"],
)
async def test_conversations_are_samples_of_one_member(
  thread, objective, expected
):
  programs = Programs()
  one, other = group(1.0, 0.0).trajectories
  turns = [dataclasses.replace(one.turns[0], opens=True) for _ in range(3)]
  led = dataclasses.replace(one, turns=turns)
  both = dataclasses.replace(group(1.0, 0.0), trajectories=[led, other])

  trainer = build(thread, programs, objective.advantage, objective=objective)
  await trainer.begin_round(0)
  await trainer.accumulate([both])
  sums = await trainer.update()
  assert sums["tokens"] == 8
  (packed,) = programs.batches
  # Behind the context of two ids each sample has its first token.
  first = packed.advantages[packed.sampled & (packed.positions == 2)]
  assert sorted(first.tolist()) == pytest.approx(expected)


async def test_an_update_sums_what_was_accumulated_since_the_last(thread):
  trainer = build(thread)
  await trainer.begin_round(0)
  tokens = []
  for calls in (1, 3, 2):
    for _ in range(calls):
      await trainer.accumulate([group(1.0, 0.0)])
    tokens.append((await trainer.update())["tokens"])
  assert tokens == [4.0, 12.0, 8.0]


async def test_what_does_not_fit_one_batch_is_accumulated_in_several(thread):
  programs = Programs()

  trainer = build(thread, programs)
  await trainer.begin_round(0)
  # 4 ids each: two fit a row of 8, so the four rows hold 8 of 10.
  await trainer.accumulate([group(1.0, 0.0)] * 5)
  sums = await trainer.update()
  assert len(programs.batches) == 2
  assert sums["tokens"] == 20
  assert programs.weights == [0, 0]


@pytest.mark.parametrize(
  "groups", [[], [group(None, None)], [group(1.0, None), group(None, 0.0)]]
)
async def test_an_update_of_nothing_takes_no_step(thread, groups):
  programs = Programs()

  trainer = build(thread, programs)
  await trainer.begin_round(0)
  before = trainer.state
  used = await trainer.accumulate(groups)
  sums = await trainer.update()
  same = trainer.state is before
  await trainer.accumulate([group(1.0, 0.0)])
  later = (await trainer.update())["tokens"]
  assert same
  found = {name: sums[name] for name in learner.METRICS}
  assert found == pytest.approx(NOTHING, nan_ok=True)
  assert not any(one.trained.any() for one in used)
  # The next one is whole, and nothing of this is in it.
  assert (len(programs.batches), later) == (1, 4.0)


async def test_an_update_of_nothing_is_in_no_mean(thread):
  trainer = build(thread, Programs(grad_norm=3.0))
  await trainer.begin_round(0)
  sums = []
  for rewards in ((1.0, 0.0), (1.0, 1.0)):
    await trainer.accumulate([group(*rewards)])
    sums.append(await trainer.update())
  found = trainer_lib.means(sums)
  # Of tokens there are 4 and 0, which count.
  assert (found["grad_norm"], found["tokens"]) == (3.0, 2.0)


@pytest.mark.parametrize(
  ("max_staleness", "expected"),
  # The weights of version v are v / 4 nats off. Those of the version before
  # are gone when nothing may be so old, and its tokens are left out.
  [
    (1, [(0.0, 4.0), (0.25, 4.0), (0.5, 4.0)]),
    (0, [(0.0, 4.0), (0.25, 2.0), (0.5, 2.0)]),
  ],
)
async def test_engine_and_learner_are_compared_under_weights_that_are_kept(
  thread, max_staleness, expected
):
  trainer, gaps = build(thread, max_staleness=max_staleness), []
  for version in range(3):
    await trainer.begin_round(version)
    # Of each version one token a member, and one of the version before.
    versions = (max(version - 1, 0), version)
    await trainer.accumulate([group(1.0, 0.0, versions=versions)])
    await trainer.update()
    gap = await trainer.describe()
    gaps.append((gap["logprob_gap_max"], gap["logprob_gap_tokens"]))
  assert gaps == expected


async def test_a_round_of_nothing_compares_nothing(thread):
  trainer = build(thread)
  await trainer.begin_round(0)
  await trainer.accumulate([group(1.0, 0.0)])
  await trainer.update()
  first = await trainer.describe()
  await trainer.begin_round(1)
  second = await trainer.describe()
  assert first["logprob_gap_tokens"] == 4.0
  assert second["logprob_gap_tokens"] == 0.0
  assert math.isnan(second["logprob_gap_max"])


def test_a_trainer_without_a_state_says_what_it_needs():
  thread = mesh_thread.MeshThread("learner", trace.Trace(None))
  programs = fakes.FakeLearner()
  trainer = trainer_lib.MeshTrainer(
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


@pytest.mark.compiled
@pytest.mark.parametrize(
  ("old_logprob", "changes"),
  [("decode", False), ("snapshot", False), ("recompute", True)],
)
async def test_a_mesh_compares_with_its_own_weights(
  thread, meshed, old_logprob: overlap.OldLogprob, changes
):
  """The weights old / behaviour say which policy was scored."""
  settings = dataclasses.replace(
    SETTINGS, share_prompts=True, old_logprob=old_logprob
  )
  trainer = trainer_lib.MeshTrainer(
    settings,
    meshed,
    thread,
    estimator=advantages.Grpo(),
    objective=CORRECTED,
  )

  trainer.restore(meshed.init(jax.random.key(0)))
  await trainer.begin_round(0)
  found = []
  for _ in range(2):
    await trainer.accumulate([group(1.0, 0.0)])
    found.append(await trainer.update())
  first, second = found
  weight, again = first["correction/weight"], second["correction/weight"]
  if old_logprob == "decode":
    assert (weight, again) == (1.0, 1.0)
    return
  # Of one version: log(old / -0.5 nats) is what the policy was off by.
  assert weight < 0.5
  assert math.isclose(weight, again, rel_tol=1e-5) != changes


@pytest.mark.compiled
def test_the_gradient_of_an_update_is_the_same_however_it_is_split(
  meshed, monkeypatch
):
  """In order of reduction only: float32, 1e-6 of the largest of each leaf."""
  groups = [
    group(1.0, 0.0, 0.5, versions=(0,) * count) for count in (2, 3, 5, 1)
  ]
  totals, update = [], meshed.update

  def recorded(state, total, left_out_divisor=0.0):
    totals.append(jax.device_get(total))
    return update(state, total, left_out_divisor)

  monkeypatch.setattr(meshed, "update", recorded)
  thread = mesh_thread.MeshThread("learner", trace.Trace(None))

  async def scenario(*ends):
    trainer = trainer_lib.MeshTrainer(
      SETTINGS, meshed, thread, estimator=advantages.Grpo(), objective=CORRECTED
    )
    trainer.restore(meshed.init(jax.random.key(0)))
    await trainer.begin_round(0)
    for start, end in itertools.pairwise((0, *ends)):
      await trainer.accumulate(groups[start:end])
    await trainer.update()

  splits = [(4,), (1, 2, 3, 4), (2, 4), (1, 4), (3, 4)]
  for split in splits:
    asyncio.run(scenario(*split))
  thread.close()
  whole, *parts = map(jax.tree.leaves, totals)
  assert len(parts) == len(splits) - 1
  assert any(np.asarray(leaf).any() for leaf in whole)
  for part in parts:
    for one, other in zip(part, whole, strict=True):
      bound = 1e-6 * np.abs(other).max()
      np.testing.assert_allclose(one, other, rtol=0, atol=bound)


@pytest.mark.parametrize("norm", [math.nan, math.inf])
async def test_updates_that_are_not_finite_are_skipped_and_too_many_end_the_run(
  thread, norm
):
  programs, skipped = Programs(grad_norm=norm), []
  trainer = build(thread, programs, max_skipped=2)
  await trainer.begin_round(5)
  message = (
    f"round 6: .* not finite: 3, and max_skipped=2 allows .* norm {norm}; "
    "nobody kept .* Lower optimizer.learning_rate or .* launch.replay"
  )
  for _ in range(2):
    await trainer.accumulate([group(1.0, 0.0)])
    skipped.append((await trainer.update())["skipped"])
  await trainer.accumulate([group(1.0, 0.0)])
  with pytest.raises(FloatingPointError, match=message):
    await trainer.update()
  assert skipped == [1.0, 1.0]
  assert programs.weights == [0, 0, 0]


@pytest.mark.compiled
def test_what_is_skipped_lies_under_its_round_and_its_place_there(tmp_path):
  built = Programs(grad_norm=math.nan)
  thread = mesh_thread.MeshThread("learner", trace.Trace(None))
  trainer = trainer_lib.MeshTrainer(
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


async def test_skipped_updates_count_only_in_a_row(thread):
  programs = Programs()

  trainer = build(thread, programs, max_skipped=1)
  await trainer.begin_round(0)
  for norm in (math.nan, 1.0, math.nan, 1.0):
    programs.grad_norm = norm
    await trainer.accumulate([group(1.0, 0.0)])
    await trainer.update()
  assert trainer.state.updates == 2


class Later(Programs):
  """Programs of which every second step is not finite."""

  steps = 0

  def update(self, state, total, left_out_divisor=0.0):
    self.steps += 1
    self.grad_norm = 1.0 if self.steps % 2 else math.nan
    return super().update(state, total, left_out_divisor)


async def test_a_later_epoch_that_is_not_finite_ends_an_update_that_counts(
  thread,
):
  programs = Later()

  trainer = build(thread, programs, epochs=3)
  await trainer.begin_round(0)
  await trainer.accumulate([group(1.0, 0.0)])
  sums = await trainer.update()
  updates = trainer.state.updates
  # One step of two; the third epoch is not even tried.
  assert (programs.steps, updates, sums["skipped"]) == (2, 1, 0.5)
  assert sums["tokens"] == 4.0


async def test_updates_whose_later_epochs_are_not_finite_count_in_a_row(thread):
  trainer, skipped = build(thread, Later(), epochs=2, max_skipped=2), []
  await trainer.begin_round(0)
  for _ in range(2):
    await trainer.accumulate([group(1.0, 0.0)])
    skipped.append((await trainer.update())["skipped"])
  await trainer.accumulate([group(1.0, 0.0)])
  with pytest.raises(FloatingPointError, match=r"not finite: 3, .* norm nan"):
    await trainer.update()
  assert skipped == [0.5, 0.5]


async def test_every_epoch_is_a_step_on_the_same_groups_and_the_same_old_policy(
  thread,
):
  programs = Programs()

  trainer = build(thread, programs, epochs=3, old_logprob="recompute")
  await trainer.begin_round(0)
  for _ in range(2):
    await trainer.accumulate([group(1.0, 0.0)] * 4)
  sums = await trainer.update()
  found = trainer.state.updates, sums["tokens"]
  # Two full batches three times; tokens are those of one epoch.
  assert found == (3, 32.0)
  assert programs.weights == [0, 0, 1, 1, 2, 2]
  assert programs.compared_with == [-0.5] * 6


async def test_a_group_that_teaches_nothing_is_masked_and_stays_in_the_divisor(
  thread,
):
  programs = Programs()

  trainer = build(thread, programs)
  await trainer.begin_round(0)
  used = await trainer.accumulate(
    [group(1.0, 0.0), group(1.0, 1.0, None), group(1.0, None)]
  )
  sums = await trainer.update()
  assert [one.trained.any() for one in used] == [True, False, False]
  assert (sums["zero_variance_groups"], sums["singleton_groups"]) == (1, 1)
  # Two trajectories; those of a fault, or alone, are nowhere.
  assert programs.masked == [2.0]
  assert sum(packed.sampled.sum() for packed in programs.batches) == 4


async def test_groups_that_are_not_computed_stay_in_the_divisor_of_every_epoch(
  thread,
):
  programs = Programs()

  trainer = build(thread, programs, epochs=3)
  await trainer.begin_round(0)
  for _ in range(2):
    await trainer.accumulate([group(1.0, 0.0), group(1.0, 1.0)])
    await trainer.update()
  # Two trajectories of a zero-variance group, and no more in the next update.
  assert programs.masked == [2.0] * 6


async def test_a_group_without_an_advantage_is_trained_where_entropy_counts(
  thread,
):
  programs = Programs()
  objective = presets.Grpo(entropy_bonus=0.01, entropy_on_zero_variance=True)
  trainer = build(thread, programs, objective=objective)
  await trainer.begin_round(0)
  (used,) = await trainer.accumulate([group(1.0, 1.0)])
  sums = await trainer.update()
  assert used.trained.all()
  assert not used.advantages.any()
  assert (sums["zero_variance_groups"], programs.masked) == (1, [0.0])
  # By default it counts where there is something to learn.
  objective = presets.Grpo(entropy_bonus=0.01)
  trainer = build(thread, objective=objective)
  await trainer.begin_round(0)
  (used,) = await trainer.accumulate([group(1.0, 1.0)])
  assert not used.trained.any()


@pytest.mark.parametrize("entropy_on_zero_variance", [False, True])
async def test_flat_groups_that_routers_need_get_no_entropy_bonus(
  thread,
  entropy_on_zero_variance,
):
  programs = Programs()
  objective = presets.Grpo(
    entropy_bonus=0.01,
    balance_weight=0.1,
    entropy_on_zero_variance=entropy_on_zero_variance,
  )

  trainer = build(thread, programs, objective=objective, has_routers=True)
  await trainer.begin_round(0)
  await trainer.accumulate([group(1.0, 0.0), group(1.0, 1.0)])
  await trainer.update()
  for packed in programs.batches:
    if entropy_on_zero_variance:
      assert packed.entropy_weights is None
    else:
      is_learned = packed.advantages != 0
      np.testing.assert_array_equal(packed.entropy_weights, is_learned)
  # Tokens of either kind were there: four of each group.
  assert sum(packed.sampled.sum() for packed in programs.batches) == 8


@pytest.mark.parametrize("weight", ["balance_weight", "z_weight"])
async def test_groups_without_an_advantage_train_routers_that_are_balanced(
  thread,
  weight,
):
  none = presets.Grpo(balance_weight=0.0, z_weight=0.0)
  objective = dataclasses.replace(none, **{weight: 0.1})

  for value, has_routers, is_trained in (
    (objective, True, True),
    (objective, False, False),
    (none, True, False),
  ):
    trainer = build(thread, objective=value, has_routers=has_routers)
    await trainer.begin_round(0)
    (used,) = await trainer.accumulate([group(1.0, 1.0)])
    assert used.trained.all() == is_trained


EPISODES = scored_episodes.draw(4)
ROWS, LENGTH = 2, 20


class Keeping(fakes.FakeLearner):
  """A learner that keeps what it is called with."""

  def __init__(self):
    super().__init__()
    self.batches: list[batch.Batch] = []
    self.params: list[Any] = []
    self.counts: list[float] = []

  def accumulate(self, params, total, batch, critic=None):
    assert critic is None
    self.params.append(params["updates"])
    self.batches.append(batch)
    return super().accumulate(params, total, batch, critic)

  def update(self, state, total, left_out_divisor=0.0):
    self.counts.append(left_out_divisor)
    return super().update(state, total, left_out_divisor)


def accumulated(scenario, *, share_prompts=False, tail_rows=None):
  """Returns what the scenario does, and what the learner was told."""
  programs = Keeping()
  thread = mesh_thread.MeshThread("learner", trace.Trace(None))

  def pack(members, *, only_full=False):
    return batch.pack(
      members,
      rows=ROWS,
      length=LENGTH,
      version=scored_episodes.VERSION,
      share_prompts=share_prompts,
      tail_rows=tail_rows,
      only_full=only_full,
    )

  this = trainer_lib.Accumulation(programs, thread, pack)
  try:
    return asyncio.run(scenario(this, programs.abstract)), programs
  finally:
    thread.close()


def part(start, stop):
  columns: dict[batch.Column, scoring.Tokens] = {
    name: own[start:stop] for name, own in EPISODES.columns.items()
  }
  return EPISODES.members[start:stop], columns


def tokens(batches):
  """All columns of each sampled token, in an order of their own."""
  names = ("tokens", "positions", "behaviour", *scored_episodes.COLUMNS)
  return sorted(
    tuple(float(getattr(b, name)[row, at]) for name in names)
    for b in batches
    for row, at in zip(*np.nonzero(b.sampled), strict=True)
  )


def expected():
  whole = scored_episodes.pack(EPISODES, rows=ROWS, length=LENGTH)
  return tokens(whole.batches)


@pytest.mark.parametrize("share_prompts", [False, True])
@pytest.mark.parametrize("step", [1, 3, 16])
def test_every_token_is_accumulated_once_with_all_that_is_known_of_it(
  step, share_prompts
):
  async def scenario(this, state):
    for start in range(0, len(EPISODES.members), step):
      await this.add(state, *part(start, start + step))
    await this.flush(state)
    return this.batches

  batches, kept = accumulated(scenario, share_prompts=share_prompts)
  assert len(expected()) == sum(EPISODES.sizes)
  assert tokens(kept.batches) == expected()
  assert [id(b) for b in batches] == [id(b) for b in kept.batches]


@pytest.mark.parametrize("share_prompts", [False, True])
def test_every_trajectory_owns_the_segment_in_which_its_tokens_lie(
  share_prompts,
):
  async def scenario(this, state):
    for start in range(len(EPISODES.members)):
      await this.add(state, *part(start, start + 1))
    await this.flush(state)
    return this

  this, _ = accumulated(scenario, share_prompts=share_prompts)
  found = {(owner.group, owner.member): owner for owner in this.owners}
  assert len(found) == len(this.owners) == len(EPISODES.members)
  for member in EPISODES.members:
    owner = found[member.group_id, member.index]
    packed = this.batches[owner.batch]
    own = packed.sampled[owner.row]
    own = own & (packed.segments[owner.row] == owner.segment)
    np.testing.assert_array_equal(
      packed.tokens[owner.row][own], member.ids[member.sampled]
    )


def test_what_fills_no_batch_waits_for_others():
  async def scenario(this, state):
    counts = []
    for start in range(len(EPISODES.members)):
      await this.add(state, *part(start, start + 1))
      counts.append(len(this.batches))
    return counts, this

  (counts, this), _ = accumulated(scenario)
  assert counts[0] == 0
  assert counts == sorted(counts)
  # Full batches alone: every row holds something.
  assert all((b.segments > 0).any(1).all() for b in this.batches)
  assert counts[-1] > 1


def test_the_rest_makes_a_smaller_batch_where_that_leaves_less_empty():
  async def scenario(this, state):
    await this.add(state, *part(0, 1))
    await this.flush(state)

  _, kept = accumulated(scenario, tail_rows=1)
  assert [b.tokens.shape for b in kept.batches] == [(1, LENGTH)]
  _, kept = accumulated(scenario)
  assert [b.tokens.shape for b in kept.batches] == [(ROWS, LENGTH)]


def test_a_second_epoch_has_the_same_batches_and_newer_weights():
  async def scenario(this, state):
    await this.add(state, *part(0, 16))
    await this.flush(state)
    state, first = await this.step(state, 3.0)
    await this.repeat(state)
    _, second = await this.step(state, 3.0)
    return first["tokens"], second["tokens"]

  sums, kept = accumulated(scenario)
  half = len(kept.batches) // 2
  assert [id(b) for b in kept.batches[:half]] == [
    id(b) for b in kept.batches[half:]
  ]
  assert kept.params == [0] * half + [1] * half
  assert kept.counts == [3.0, 3.0]
  # Each starts from nothing.
  assert sums == (sum(EPISODES.sizes),) * 2


def test_a_flush_of_nothing_does_nothing():
  async def scenario(this, state):
    await this.flush(state)
    return this.batches

  assert accumulated(scenario)[0] == []
