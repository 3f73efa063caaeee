"""What an optimizer step rests on: whose weights, which members, which sums."""

import asyncio
import dataclasses
import math

import jax
import numpy as np
import pytest

from rl import (
  advantages,
  dispatch,
  learner,
  losses,
  optimizers,
  overlap,
  placement,
  testing,
  trace,
  training,
  trajectory,
)

STATUS = trajectory.Status
SETTINGS = training.Settings(
  rows=4,
  length=8,
  share_prompts=False,
  probe_rows=4,
  max_staleness=0,
  old_logprob="decode",
)


def member(reward, index=0, versions=(0, 0), status=STATUS.COMPLETED):
  """Returns a context of two ids and an answer of some, all of -0.5 nats."""
  count = len(versions)
  turn = trajectory.Turn(
    context=np.array([3, 1], np.int32),
    tokens=np.arange(5, 5 + count, dtype=np.int32),
    logprobs=np.full(count, -0.5, np.float32),
    versions=np.array(versions, np.int32),
    stop="stop",
  )
  return trajectory.Trajectory("t", 0, index, [turn], status, reward)


def group(*rewards, **fields):
  """Returns a group of such members; a reward of None is a fault."""
  members = [
    member(
      reward,
      index,
      **fields,
      **({"status": STATUS.ENV_FAULT} if reward is None else {}),
    )
    for index, reward in enumerate(rewards)
  ]
  return trajectory.Group(
    group_id=0, trajectories=members, admitted=trajectory.PolicyVersion(0)
  )


@dataclasses.dataclass(eq=False)
class Programs:
  """A learner that counts updates and keeps what it is called with.

  It scores every token with -0.5 - updates / 4 nats, `updates` being those of
  the weights it is given.
  """

  grad_norm: float = 1.0
  batches: list = dataclasses.field(default_factory=list)
  weights: list = dataclasses.field(default_factory=list)

  def build(self):
    fake = testing.fake_learner()

    def accumulate(params, total, packed):
      self.weights.append(params["updates"])
      self.batches.append(packed)
      return fake.accumulate(params, total, packed)

    def update(state, total):
      state, sums = fake.update(state, total)
      return state, {**sums, "grad_norm": self.grad_norm}

    def score(params, packed):
      nats = -0.5 - params["updates"] / 4
      return np.full_like(packed.behaviour, nats)

    return dataclasses.replace(
      fake, accumulate=accumulate, update=update, score=score
    )

  @property
  def compared_with(self):
    """The one log-probability that the tokens of each batch have."""
    return [
      float(value)
      for packed in self.batches
      for value in np.unique(packed.behaviour[packed.sampled])
    ]


def trained(scenario, programs=None, estimator=None, **changes):
  """Runs a scenario on a trainer of fake programs that starts afresh."""
  thread = dispatch.MeshThread("learner", trace.Trace(None))
  built = (programs or Programs()).build()
  trainer = training.Training(
    dataclasses.replace(SETTINGS, **changes),
    built,
    thread,
    estimator or advantages.Grpo(),
  )
  trainer.restore(built.abstract)
  try:
    return asyncio.run(scenario(trainer))
  finally:
    thread.close()


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
  groups = [group(1.0, 0.0), group(1.0, 1.0)]

  async def scenario(trainer):
    await trainer.begin_round(0)
    return await trainer.accumulate(groups)

  used = trained(scenario, programs, advantages.Whitened())
  # Less its group's mean: 0.5, -0.5, 0, 0. Their mean is 0 and their variance
  # (0.25 + 0.25) / 4; alone the first group would have had 1 and -1.
  spread = math.sqrt(2)
  values = [one.values.tolist() for one in used]
  assert values[0] == pytest.approx([spread, -spread])
  assert values[1] == pytest.approx([0.0, 0.0])
  assert all(one.trained.all() for one in used)
  (packed,) = programs.batches
  trained_with = np.unique(packed.advantages[packed.sampled])
  assert trained_with == pytest.approx([-spread, 0.0, spread])


def test_members_with_a_fault_are_not_trained():
  programs = Programs()

  async def scenario(trainer):
    await trainer.begin_round(0)
    used = await trainer.accumulate([group(1.0, None, 0.0)])
    return used, await trainer.update()

  (used,), sums = trained(scenario, programs)
  assert used.trained.tolist() == [True, False, True]
  assert used.values[1] == 0
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
  assert sums == dict.fromkeys(learner.METRICS, 0.0)
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
  assert sums == dict.fromkeys(learner.METRICS, 0.0)


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_ends_the_run(norm):
  async def scenario(trainer):
    await trainer.begin_round(5)
    await trainer.accumulate([group(1.0, 0.0)])
    await trainer.update()

  with pytest.raises(FloatingPointError, match=f"round 5: .* norm is {norm}"):
    trained(scenario, Programs(grad_norm=norm))


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
    first = await trainer.describe()
    await trainer.begin_round(1)
    return first, await trainer.describe()

  first, second = trained(scenario)
  assert first["logprob_gap_tokens"] == 4.0
  assert second["logprob_gap_tokens"] == 0.0
  assert math.isnan(second["logprob_gap_max"])


def test_a_trainer_without_a_state_says_what_it_needs():
  thread = dispatch.MeshThread("learner", trace.Trace(None))
  programs = testing.fake_learner()
  trainer = training.Training(SETTINGS, programs, thread, advantages.Grpo())
  with pytest.raises(RuntimeError, match="call `restore` first"):
    _ = trainer.params
  thread.close()


@pytest.fixture(scope="module")
def meshed(dense_config):
  """The real programs, over two devices."""
  spec = placement.MeshSpec(data=2)
  layout, _ = placement.Placement(learner=spec, colocated=True).layouts()
  objective = learner.Objective(loss=losses.ClippedSurrogate())
  return learner.build(
    dense_config, layout, objective, optimizers.AdamW(learning_rate=0.1)()
  )


@pytest.mark.parametrize(
  ("old_logprob", "ratios"),
  [("decode", (0, 0)), ("snapshot", (1, 0)), ("recompute", (1, 1))],
)
def test_a_mesh_compares_with_its_own_weights(
  meshed, old_logprob: overlap.OldLogprob, ratios
):
  """The engine's -0.5 nats are wrong, so only own scores give a ratio of 1."""
  settings = dataclasses.replace(
    SETTINGS, share_prompts=True, old_logprob=old_logprob
  )
  thread = dispatch.MeshThread("learner", trace.Trace(None))
  trainer = training.Training(settings, meshed, thread, advantages.Grpo())

  async def scenario():
    trainer.restore(meshed.init(jax.random.key(0)))
    await trainer.begin_round(0)
    gaps = []
    for _ in range(2):
      await trainer.accumulate([group(1.0, 0.0)])
      gaps.append((await trainer.update())["behaviour_kl"])
    return gaps

  gaps = asyncio.run(scenario())
  thread.close()
  # Float32 scores of the same weights: ratios of 1, but for rounding.
  assert [abs(gap) < 1e-6 for gap in gaps] == [bool(same) for same in ratios]
