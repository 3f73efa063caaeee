"""Advantages against published numbers, and who is trained at all."""

import numpy as np
import pytest

from rl import advantages, trajectory

OK = trajectory.Status.COMPLETED
FAULT = trajectory.Status.ENV_FAULT


def _rewards(*values):
  return np.asarray(values, np.float32)


def _group(*members):
  """Returns a group of (status, reward, number of sampled tokens)."""
  trajectories = []
  for index, (status, reward, num_tokens) in enumerate(members):
    turn = trajectory.Turn(
      context=np.zeros(2, np.int32),
      tokens=np.zeros(num_tokens, np.int32),
      logprobs=np.zeros(num_tokens, np.float32),
      versions=np.zeros(num_tokens, np.int32),
      stop="stop",
    )
    trajectories.append(
      trajectory.Trajectory(
        task_id="game/train/0",
        group_id=0,
        index=index,
        turns=[turn],
        status=status,
        reward=reward,
      )
    )
  return trajectory.Group(
    group_id=0,
    trajectories=trajectories,
    admitted=trajectory.PolicyVersion(0),
  )


@pytest.mark.parametrize(
  ("ddof", "expected"),
  [
    # Mean 1/4, squares add up to 9/16 + 3/16 = 3/4: over 3 the deviation is
    # 1/2, over 4 it is sqrt(3)/4, and 3/4 and -1/4 are divided by it:
    # 1.5 and -0.5, or 1.7321 and -0.5774.
    (1, [1.5, -0.5, -0.5, -0.5]),
    (0, [3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)]),
  ],
)
def test_grpo_of_one_success_in_four_has_the_published_values(ddof, expected):
  got = advantages.Grpo(ddof=ddof)(_rewards(1, 0, 0, 0))
  np.testing.assert_allclose(got, expected, atol=1e-5)
  assert got.dtype == np.float32


def test_grpo_adds_eps_to_the_deviation_and_not_to_the_variance():
  # 0.75 / (0.5 + 0.5) and -0.25 / (0.5 + 0.5).
  got = advantages.Grpo(eps=0.5)(_rewards(1, 0, 0, 0))
  np.testing.assert_allclose(got, [0.75, -0.25, -0.25, -0.25], atol=1e-7)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -1e8])
@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_grpo_of_equal_rewards_is_exactly_zero(reward, size, eps):
  # Without eps the formula would be 0 / 0.
  got = advantages.Grpo(eps=eps)(_rewards(*[reward] * size))
  assert got.tolist() == [0.0] * size


def test_grpo_ignores_the_scale_and_the_origin_of_rewards():
  rewards = np.random.default_rng(0).normal(size=8).astype(np.float32)
  plain = advantages.Grpo(eps=0.0)(rewards)
  moved = advantages.Grpo(eps=0.0)(4 * rewards + 3)
  np.testing.assert_allclose(moved, plain, atol=1e-5)
  assert plain.sum() == pytest.approx(0, abs=1e-5)


def test_reinforce_subtracts_its_baseline_from_each_reward_alone():
  got = advantages.Reinforce(baseline=0.25)(_rewards(1, 0))
  assert got.tolist() == [0.75, -0.25]


def test_a_faulted_member_is_in_no_mean_and_not_trained():
  # Grpo of 1, 0, 0: mean 1/3, squares add up to 4/9 + 2/9 = 2/3, over 2 the
  # deviation is 0.57735: 0.66667 and -0.33333 over it.
  group = _group((OK, 1.0, 3), (FAULT, None, 3), (OK, 0.0, 3), (OK, 0.0, 3))
  values, trained = advantages.of_group(group, advantages.Grpo())
  np.testing.assert_allclose(values, [1.1547, 0, -0.57735, -0.57735], atol=5e-5)
  assert trained.tolist() == [True, False, True, True]


def test_a_truncated_member_is_trained():
  group = _group((OK, 1.0, 3), (trajectory.Status.TRUNCATED, 0.0, 3))
  _, trained = advantages.of_group(group, advantages.Grpo())
  assert trained.tolist() == [True, True]


def test_a_member_without_tokens_is_in_no_mean():
  # Grpo of 1 and 0: the third has no token to train and does not count.
  group = _group((OK, 1.0, 3), (OK, 0.0, 3), (OK, 0.0, 0))
  values, trained = advantages.of_group(group, advantages.Grpo())
  np.testing.assert_allclose(values, [0.7071, -0.7071, 0.0], atol=5e-5)
  assert trained.tolist() == [True, True, False]


@pytest.mark.parametrize(
  "members",
  [
    [(OK, 1.0, 3), (FAULT, None, 3), (FAULT, None, 0)],
    [(OK, 1.0, 3), (OK, 0.0, 0)],
    [(FAULT, None, 3), (FAULT, None, 3)],
  ],
)
def test_a_group_with_too_few_members_left_is_not_trained(members):
  values, trained = advantages.of_group(_group(*members), advantages.Grpo())
  assert not trained.any()
  assert not values.any()


def test_reinforce_trains_the_one_member_that_is_left():
  group = _group((FAULT, None, 3), (OK, 1.0, 3))
  values, trained = advantages.of_group(group, advantages.Reinforce())
  assert values.tolist() == [0.0, 1.0]
  assert trained.tolist() == [False, True]


def _sizes(*members):
  """Returns a group of (reward, number of sampled tokens)."""
  return _group(*[(OK, reward, tokens) for reward, tokens in members])


def test_whitened_over_members_has_the_value_worked_out_by_hand():
  groups = [
    _sizes((1.0, 1), (0.0, 9), (0.0, 2), (0.0, 1)),
    _sizes((1.0, 1), (1.0, 1), (0.0, 5), (0.0, 1)),
  ]
  got = advantages.of_groups(groups, advantages.Whitened(over="members"))
  # Less the group's mean: 3/4, -1/4 three times and 1/2, 1/2, -1/2, -1/2. All
  # have mean 0 and variance (9/16 + 3/16 + 4/4) / 8 = 7/32; over 0.467707:
  expected = [
    [1.603567, -0.534522, -0.534522, -0.534522],
    [1.069045, 1.069045, -1.069045, -1.069045],
  ]
  np.testing.assert_allclose([v for v, _ in got], expected, atol=1e-5)
  assert all(trained.all() for _, trained in got)


def test_whitened_over_tokens_counts_each_member_by_its_length():
  groups = [_sizes((1.0, 1), (0.0, 3)), _sizes((4.0, 2), (0.0, 2))]
  got = advantages.of_groups(groups, advantages.Whitened())
  # Less the group's mean: 0.5 once and -0.5 three times, 2 twice and -2 twice.
  # Of 8 tokens the mean is -1/8, the mean square (4/4 + 16) / 8 = 17/8, and so
  # the variance 17/8 - 1/64 = 135/64: 0.625, -0.375, 2.125 and -1.875 over
  # 1.452369.
  expected = [[0.430331, -0.258199], [1.463127, -1.290994]]
  np.testing.assert_allclose([v for v, _ in got], expected, atol=1e-5)


def test_whitened_tokens_have_mean_zero_and_deviation_one():
  draw = np.random.default_rng(0)
  members = [(draw.normal(), int(n)) for n in draw.integers(1, 50, size=24)]
  groups = [_sizes(*members[i : i + 6]) for i in range(0, 24, 6)]
  got = advantages.of_groups(groups, advantages.Whitened(eps=0.0))
  values = np.concatenate([v for v, _ in got])
  spread = np.repeat(values, [tokens for _, tokens in members])
  assert spread.mean() == pytest.approx(0, abs=1e-6)
  assert spread.std() == pytest.approx(1, abs=1e-6)


def test_whitening_leaves_out_faults_and_groups_that_are_too_small():
  whole = [_sizes((1.0, 1), (0.0, 3)), _sizes((4.0, 2), (0.0, 2))]
  worse = [
    whole[0],
    _group((OK, 9.0, 4), (FAULT, None, 3)),
    _group((FAULT, None, 5), (OK, 4.0, 2), (OK, 0.0, 2)),
  ]
  want = advantages.of_groups(whole, advantages.Whitened())
  got = advantages.of_groups(worse, advantages.Whitened())
  assert got[0][0].tolist() == want[0][0].tolist()
  assert got[2][0].tolist() == [0.0, *want[1][0].tolist()]
  assert not got[1][0].any()
  assert [used.tolist() for _, used in got] == [
    [True, True],
    [False, False],
    [False, True, True],
  ]


@pytest.mark.parametrize("reward", [0.0, 0.1, -3.5])
def test_whitening_an_update_without_variance_is_exactly_zero(reward):
  groups = [_sizes((reward, 3), (reward, 5)), _sizes((1.0, 2), (1.0, 2))]
  got = advantages.of_groups(groups, advantages.Whitened(eps=0.0))
  assert [v.tolist() for v, _ in got] == [[0.0, 0.0]] * 2


@pytest.mark.parametrize("groups", [[], [_group((FAULT, None, 3))]])
def test_an_update_of_nothing_has_no_advantage(groups):
  got = advantages.of_groups(groups, advantages.Whitened())
  assert [v.tolist() for v, _ in got] == [[0.0]] * len(groups)


@pytest.mark.parametrize(
  "estimator", [advantages.Grpo(), advantages.Reinforce(baseline=0.25)]
)
def test_of_scope_group_each_group_is_on_its_own(estimator):
  groups = [_sizes((1.0, 3), (0.0, 3), (0.0, 1)), _sizes((2.0, 1), (5.0, 1))]
  assert estimator.scope == "group"
  for group, (values, used) in zip(
    groups, advantages.of_groups(groups, estimator), strict=True
  ):
    alone, trained = advantages.of_group(group, estimator)
    assert values.tolist() == alone.tolist()
    assert used.tolist() == trained.tolist()


def test_an_estimator_that_only_claims_a_batch_is_refused():
  class Claims(advantages.Reinforce):
    @property
    def scope(self) -> advantages.Scope:
      return "batch"

  with pytest.raises(TypeError, match="Claims has scope batch"):
    advantages.of_groups([_sizes((1.0, 1))], Claims())
  assert advantages.Whitened().scope == "batch"


@pytest.mark.parametrize("eps", [-1.0, float("nan"), float("inf")])
def test_whitening_with_nonsense_is_refused(eps):
  with pytest.raises(ValueError, match="Whitened: eps"):
    advantages.Whitened(eps=eps).validate()


@pytest.mark.parametrize("bad", [{"ddof": 8}, {"eps": float("nan")}])
def test_an_estimator_with_nonsense_is_refused(bad):
  with pytest.raises(ValueError, match="Grpo: ddof"):
    advantages.Grpo(**bad).validate()
