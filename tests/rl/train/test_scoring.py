"""Scores of tokens before their gradient, and penalties made of them."""

import asyncio
import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import logprobs as logprobs_lib
from models import policy as policy_lib
from rl.algorithms import corrections, kl, presets, token_advantages
from rl.data import batch, trajectory
from rl.pools import placement
from rl.runtime import mesh_thread, trace
from rl.testing import fakes
from rl.train import learner, optimizers, scoring
from rl.train import trainer as trainer_lib

pytestmark = pytest.mark.compiled

SETTINGS = trainer_lib.TrainerSettings(
  rows=4,
  length=12,
  share_prompts=False,
  probe_rows=4,
  max_staleness=0,
  old_logprob="decode",
)
PENALTY = kl.KlPenalty(estimator="k1", weight=0.1, where="reward")
FAULT = trajectory.Status.ENV_FAULT
DECOUPLED = corrections.TokenTruncated(cap=math.inf)


def member(reward, turns: Sequence[int] = (2,), index=0, first=5):
  """Answers of so many tokens, with ids that count up from `first`.

  The engine gave token `id` a log-probability of -id / 10.
  """
  records, at = [], first
  for count in turns:
    ids = np.arange(at, at + count, dtype=np.int32)
    at += count
    records.append(
      trajectory.Turn(
        context=np.array([3, 1], np.int32),
        tokens=ids,
        logprobs=(-ids / 10).astype(np.float32),
        versions=np.zeros(count, np.int32),
        stop="stop",
      )
    )
  status = trajectory.Status.COMPLETED if reward is not None else FAULT
  return trajectory.Trajectory("t", 0, index, records, status, reward)


def group(*members):
  return trajectory.Group(
    group_id=0,
    trajectories=[
      dataclasses.replace(m, index=i) for i, m in enumerate(members)
    ],
    admitted=0,
  )


class Programs(fakes.FakeLearner):
  """A learner of few words.

  Under weights of n updates token `id` has -id / 10 - n / 4 nats. Of the state
  before it the critic says (id - 5) / 2, and of the last in a row 8 more than
  of the id that led there.
  """

  def __init__(self):
    super().__init__()
    self.batches: list[batch.Batch] = []
    self.scored = 0

  def accumulate(self, params, total, batch, critic=None):
    self.batches.append(batch)
    return super().accumulate(params, total, batch, critic)

  def score(self, params, batch):
    self.scored += 1
    nats = -batch.tokens / 10 - params["updates"] / 4
    return nats.astype(np.float32)

  def values(self, params, critic, batch):
    said = (batch.tokens - 5).astype(np.float32) / 2
    after = np.roll(said, -1, axis=1)
    follows = np.roll(batch.segments, -1, axis=1) == batch.segments
    return np.where(follows, after, said + 8)

  def column(self, name) -> dict[int, float]:
    """The value of each sampled id there; each has one."""
    return {
      int(token): float(value)
      for b in self.batches
      for token, value in zip(
        b.tokens[b.sampled], getattr(b, name)[b.sampled], strict=True
      )
    }


def half_as_likely(state, placed):
  """A reference that finds every token less likely, by id / 20 nats."""
  return jax.device_put((-0.15 * placed.tokens).astype(np.float32))


def trained(scenario, programs, algorithm, reference=None, **changes):
  """Runs a scenario on a trainer of fake programs that starts afresh."""
  thread = mesh_thread.MeshThread("learner", trace.Trace(None))
  trainer = trainer_lib.MeshTrainer(
    dataclasses.replace(SETTINGS, **changes),
    programs,
    thread,
    estimator=algorithm.advantage,
    objective=algorithm,
    reference=reference,
  )
  trainer.restore(programs.abstract)
  try:
    return asyncio.run(scenario(trainer))
  finally:
    thread.close()


def once(*groups):
  async def scenario(trainer):
    await trainer.begin_round(0)
    used = await trainer.accumulate(groups)
    return used, await trainer.update()

  return scenario


# A penalty in the reward.


def scores(old, reference):
  old, reference = (
    [np.array(x, "f4") for x in own] for own in (old, reference)
  )
  return scoring.Scores(old=old, reference=reference)


def test_a_penalty_is_of_the_old_policy_to_the_reference():
  found = scoring.penalties(
    PENALTY,
    [member(0.0), member(0.0, [1])],
    scores([[-1.0, -2.0], [-3.0]], [[-1.5, -1.0], [-3.0]]),
  )
  assert found is not None
  expected = [[0.05, -0.1], [0.0]]
  assert [x.tolist() for x in found] == [pytest.approx(x) for x in expected]
  assert all(x.dtype == np.float32 for x in found)


def test_without_old_log_probabilities_those_of_the_engine_count():
  found = scoring.penalties(
    PENALTY,
    [member(0.0)],
    scoring.Scores(reference=[np.array([-1.0, -1.0], "f4")]),
  )
  assert found is not None
  assert found[0] == pytest.approx([0.05, 0.04])


def test_a_penalty_of_nobody_is_no_error():
  assert scoring.penalties(PENALTY, [], scores([], [])) == []


def test_without_a_penalty_in_the_reward_nothing_is_taken_from_it():
  assert scoring.penalties(None, [member(0.0)], scoring.Scores()) is None
  with pytest.raises(ValueError, match="without log-probabilities of a ref"):
    scoring.penalties(PENALTY, [member(0.0)], scoring.Scores())


def test_a_penalty_in_the_loss_changes_no_advantage():
  found = []
  for penalty in (None, kl.KlPenalty(estimator="k2")):
    programs = Programs()
    algorithm = presets.DrGrpo(kl=penalty)
    groups = group(member(1.0), member(0.0, first=8))
    trained(once(groups), programs, algorithm, half_as_likely)
    found.append(programs.column("advantages"))
  assert found[0] == found[1]
  assert any(found[0].values())


def test_reinforce_plus_plus_whitens_returns_less_their_penalties():
  programs = Programs()
  algorithm = presets.ReinforcePlusPlus(kl=PENALTY)
  _, sums = trained(
    once(group(member(1.0), member(0.0, first=8))),
    programs,
    algorithm,
    half_as_likely,
  )
  # Token `id` costs 0.1 * id / 20, and returns are what comes from it on.
  returns = np.array([1 - 0.025 - 0.03, 1 - 0.03, 0 - 0.04 - 0.045, 0 - 0.045])
  white = (returns - returns.mean()) / returns.std()
  found = programs.column("advantages")
  assert list(found) == [5, 6, 8, 9]
  assert list(found.values()) == pytest.approx(white, rel=1e-5)
  reference = programs.column("reference")
  assert reference[9] == pytest.approx(-1.35)
  # In nats, without the weight of 0.1.
  assert sums["kl"] == pytest.approx((5 + 6 + 8 + 9) / 20 / 4)


def test_a_round_of_faults_has_no_penalties_and_ends_nothing():
  programs = Programs()
  algorithm = presets.ReinforcePlusPlus(kl=PENALTY)
  groups = group(member(None), member(None))
  (used,), sums = trained(once(groups), programs, algorithm, half_as_likely)
  assert not used.trained.any()
  assert programs.batches == []
  assert "kl" not in sums


# A critic.


def test_gae_learns_from_the_values_of_the_critic():
  programs = Programs()
  gae = token_advantages.Gae(discount=0.9, lambda_=0.5)
  # Two turns with an observation between them, which does not count as a step.
  trained(
    once(group(member(1.0, [2, 1]))), programs, presets.Ppo(advantage=gae)
  )
  # Values 0, 0.5 and 1; the reward comes at the end.
  delta = [0.9 * 0.5 - 0.0, 0.9 * 1.0 - 0.5, 1.0 - 1.0]
  last = delta[2]
  middle = delta[1] + 0.45 * last
  first = delta[0] + 0.45 * middle
  found = programs.column("advantages")
  assert found == pytest.approx({5: first, 6: middle, 7: last})
  assert programs.column("values") == {5: 0.0, 6: 0.5, 7: 1.0}
  returns = {5: first, 6: middle + 0.5, 7: last + 1.0}
  assert programs.column("returns") == pytest.approx(returns)


def test_gae_expects_more_of_an_episode_that_was_cut():
  programs = Programs()
  ended = member(1.0, [2])
  cut = dataclasses.replace(
    member(1.0, [2], first=7),
    status=trajectory.Status.TRUNCATED,
    unanswered=np.array([9, 3], np.int32),
  )
  gae = token_advantages.Gae(lambda_=0.0)
  trained(once(group(ended, cut)), programs, presets.Ppo(advantage=gae))
  # Values 0, 0.5 and 1, 1.5; behind the last id that was seen, 3, there is
  # (3 - 5) / 2 + 8 = 7. What was not answered is not trained.
  found = programs.column("advantages")
  assert found == pytest.approx({5: 0.5, 6: 0.5, 7: 0.5, 8: 1 + 7 - 1.5})


def test_without_a_critic_a_reference_or_a_second_policy_nothing_is_scored():
  programs = Programs()
  trained(once(group(member(1.0), member(0.0))), programs, presets.Grpo())
  (packed,) = programs.batches
  assert programs.scored == 0
  for name in ("old", "reference", "values", "returns"):
    assert getattr(packed, name) is None


# Whose scores, and when.


# The real programs.


@pytest.fixture(scope="module")
def real(dense_config):
  layout, _ = placement.Placement(colocated=True).layouts()
  return learner.Learner(
    dense_config,
    layout,
    presets.Ppo(correction=DECOUPLED),
    optimizers.AdamW(learning_rate=0.1)(),
    critic=True,
    num_lags=2,
  )


@pytest.mark.parametrize("share_prompts", [False, True], ids=["own", "shared"])
def test_scores_are_those_of_each_trajectory_on_its_own(
  real, dense_config, share_prompts
):
  cut = dataclasses.replace(
    member(0.0, [4]), unanswered=np.array([3, 2], np.int32)
  )
  members = [member(1.0, [2, 3]), cut, member(0.0, [1], first=9)]
  state = real.init(jax.random.key(1))
  critic = {
    "kernel": np.linspace(-1, 1, dense_config.d_model, dtype=np.float32),
    "bias": np.float32(0.5),
  }
  where = jax.tree.map(lambda x: x.sharding, state.critic)
  state = state._replace(critic=jax.device_put(critic, where))
  spans, meter = trace.Trace(None), trace.Meter()
  spans.listeners.append(meter.add)
  thread = mesh_thread.MeshThread("learner", spans)
  scorer = scoring.Scorer(
    real,
    thread,
    lambda members: batch.pack(
      members, rows=2, length=16, version=0, share_prompts=share_prompts
    ),
    lambda state, placed: real.score(state.params, placed),
  )
  try:
    found = asyncio.run(
      scorer.score(members, state, state.params, (state.params, state.critic))
    )
  finally:
    thread.close()
  # The learner is busy with it, unlike with its checks.
  assert meter.take().first_s > 0
  assert found.old is not None
  assert found.reference is not None
  assert found.values is not None
  assert found.finals is not None
  model = policy_lib.of(dense_config).bind(state.params)
  for i, own in enumerate(members):
    at = np.flatnonzero(own.sampled)
    ids = np.append(own.ids, own.unanswered)
    hidden, _ = model.hidden(
      jnp.asarray(ids)[None],
      jnp.arange(len(ids))[None],
      jnp.ones((1, len(ids)), np.int32),
    )
    logits = logprobs_lib.logits(model.terms(hidden[0]))
    logprobs = np.asarray(jax.nn.log_softmax(logits))[at - 1, ids[at]]
    states = np.asarray(hidden[0] @ critic["kernel"]) + 0.5
    np.testing.assert_allclose(found.old[i], logprobs, atol=1e-5)
    np.testing.assert_array_equal(found.reference[i], found.old[i])
    np.testing.assert_allclose(found.values[i], states[at - 1], atol=1e-5)
    np.testing.assert_allclose(found.finals[i], states[-1], atol=1e-5)


@pytest.mark.parametrize("old_logprob", ["snapshot", "recompute"])
def test_several_updates_against_one_snapshot_clip_and_one_does_not(
  real, old_logprob
):
  # Samples of version 0 train in rounds 0 and 1. The second update of a round
  # goes the way of the first one, beyond the bounds.
  async def scenario(trainer):
    trainer.restore(real.init(jax.random.key(0)))
    clipped = []
    for version in (0, 1):
      await trainer.begin_round(version)
      for _ in range(2):
        await trainer.accumulate([group(member(1.0), member(0.0, first=9))])
        clipped.append(await trainer.update())
    return clipped

  found = {
    epochs: trained(
      scenario,
      real,
      presets.Ppo(correction=DECOUPLED),
      old_logprob=old_logprob,
      max_staleness=1,
      epochs=epochs,
    )
    for epochs in (1, 2)
  }
  # The first step meets the very policy that its ratios are against. One that
  # is scored again before each update stays it until a second epoch.
  is_clipped = [sums["clipped"] > 0 for sums in found[1]]
  moves = old_logprob == "snapshot"
  assert is_clipped == [False, moves, False, moves]
  assert found[2][0]["clipped"] > 0
  # The gap to the engine is weighed, and no part of the ratio.
  assert found[1][0]["correction/weight"] != pytest.approx(1.0, abs=0.01)
  assert [sums["lag_share/0"] for sums in found[1]] == [1, 1, 0, 0]
  assert [sums["lag_share/1"] for sums in found[1]] == [0, 0, 1, 1]


def test_a_critic_comes_to_know_what_episodes_earn(real):
  thread = mesh_thread.MeshThread("learner", trace.Trace(None))
  algorithm = presets.Ppo()
  trainer = trainer_lib.MeshTrainer(
    dataclasses.replace(SETTINGS, epochs=4),
    real,
    thread,
    estimator=algorithm.advantage,
    objective=algorithm,
  )

  async def scenario():
    trainer.restore(real.init(jax.random.key(0)))
    losses = []
    for version in range(6):
      await trainer.begin_round(version)
      await trainer.accumulate([group(member(1.0), member(1.0, first=8))])
      losses.append((await trainer.update())["value_loss"])
    return losses

  try:
    losses = asyncio.run(scenario())
  finally:
    thread.close()
  # It begins with 0 where 1 is earned, and is clipped on its way.
  assert losses[0] > 0.1
  assert losses[-1] < losses[0] / 4
