"""One advantage a member: published numbers, identities, exact expectations."""

import itertools

import numpy as np
import pytest

from rl.algorithms import advantages, token_advantages
from rl.settings import overrides
from tests.helpers import played_members as members

COMPARING = [
  advantages.Grpo(),
  advantages.Grpo(ddof=0, eps=0.0),
  advantages.DrGrpo(),
  advantages.Rloo(),
  advantages.PassAtK(k=1),
  advantages.PassAtK(k=2),
  advantages.PassAtK(k=4),
]


def _values(estimator, *rewards):
  """Returns the advantage of each member; all of its tokens have it."""
  found = estimator(members.rewards(*rewards))
  assert found.returns is None
  for own in found.advantages:
    assert own.shape == (3,)
    assert (own == own[0]).all()
  return np.array([own[0] for own in found.advantages])


# 1, 0, 0, 0 has mean 1/4; squares around it add up to 9/16 + 3/16 = 3/4: over
# 3 the deviation is 1/2, over 4 it is sqrt(3)/4. Mean of the others: 0 or 1/3.
@pytest.mark.parametrize(
  ("estimator", "success", "failure"),
  [
    (advantages.Grpo(), 1.5, -0.5),
    (advantages.Grpo(ddof=0), 3**0.5, -(3**-0.5)),
    (advantages.DrGrpo(), 0.75, -0.25),
    (advantages.Rloo(), 1.0, -1 / 3),
    (advantages.Reinforce(baseline=0.25), 0.75, -0.25),
    # Of 3 sets with it, all fall by 1 without the success: 2 * 1, and 4 * 1.
    (advantages.PassAtK(k=2), 2.0, 0.0),
    (advantages.PassAtK(k=4), 4.0, 0.0),
  ],
)
def test_one_success_in_four_has_its_value(estimator, success, failure):
  got = _values(estimator, 1, 0, 0, 0)
  np.testing.assert_allclose(got, [success] + [failure] * 3, atol=4e-6)


@pytest.mark.parametrize("three", [(1, 2, 3), (4, 5, 6)])
def test_rloo_has_the_values_of_tunix(three):
  # tunix, tests/rl/algo_core_test.py: rewards 1 to 6 in groups of 3.
  assert _values(advantages.Rloo(), *three).tolist() == [-1.5, 0.0, 1.5]


@pytest.mark.parametrize(
  ("eps", "success"),
  [
    (0.5, 0.75),
    # TRL's, AReaL's and verl's.
    (1e-4, 0.75 / 0.5001),
    (1e-5, 0.75 / 0.50001),
    (1e-6, 0.75 / 0.500001),
    (0.0, 1.5),
  ],
)
def test_grpo_adds_eps_to_the_deviation_and_not_to_the_variance(eps, success):
  got = _values(advantages.Grpo(eps=eps), 1, 0, 0, 0)
  np.testing.assert_allclose(got[0], success, rtol=1e-14)


def test_by_default_grpo_has_the_ddof_and_the_eps_of_verl():
  assert advantages.Grpo() == advantages.Grpo(ddof=1, eps=1e-6)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -1e8])
@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("estimator", COMPARING)
def test_equal_rewards_have_no_variance_and_exactly_zero(
  estimator, size, reward
):
  # By the formulas it would be 0 / 0 or what rounding left of it.
  group = members.rewards(*[reward] * size)
  assert estimator.zero_variance(group)
  assert _values(estimator, *[reward] * size).tolist() == [0.0] * size


@pytest.mark.parametrize("estimator", COMPARING)
def test_rewards_that_differ_by_rounding_alone_have_no_variance(estimator):
  assert estimator.zero_variance(members.rewards(0.1 + 0.2, 0.3))
  assert not estimator.zero_variance(members.rewards(0.3, 0.31))
  np.testing.assert_allclose(_values(estimator, 0.1 + 0.2, 0.3), 0, atol=2e-16)


@pytest.mark.parametrize("estimator", COMPARING)
def test_a_single_member_that_is_compared_gets_zero(estimator):
  assert _values(estimator, 3.0).tolist() == [0.0]


@pytest.mark.parametrize("seed", range(8))
def test_the_estimators_of_random_groups_agree_as_their_formulas_say(seed):
  draw = np.random.default_rng(seed)
  size = int(draw.integers(2, 20))
  rewards = draw.normal(size=size) * 10.0 ** draw.integers(-3, 4)
  plain = _values(advantages.DrGrpo(), *rewards)
  rloo = _values(advantages.Rloo(), *rewards)
  grpo = _values(advantages.Grpo(eps=0.0), *rewards)
  scale = np.abs(rewards).max()
  # Each less the mean of the others, written out.
  others = [(rewards.sum() - r) / (size - 1) for r in rewards]
  np.testing.assert_allclose(rloo, rewards - others, atol=1e-13 * scale)
  np.testing.assert_allclose(plain, rloo * (size - 1) / size, rtol=1e-13)
  np.testing.assert_allclose(
    grpo, plain / np.std(rewards, ddof=1), rtol=1e-12, atol=1e-14
  )
  assert plain.sum() == pytest.approx(0, abs=1e-13 * scale * size)
  assert rloo.sum() == pytest.approx(0, abs=1e-13 * scale * size)
  assert grpo.var(ddof=1) == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("estimator", [*COMPARING, advantages.Reinforce()])
def test_the_order_of_members_does_not_matter(estimator):
  draw = np.random.default_rng(0)
  rewards = draw.integers(0, 4, size=9).astype(np.float64)
  order = draw.permutation(9)
  got = _values(estimator, *rewards[order])
  np.testing.assert_allclose(
    got, _values(estimator, *rewards)[order], rtol=1e-12, atol=1e-14
  )


@pytest.mark.parametrize("estimator", COMPARING)
def test_only_differences_of_rewards_count(estimator):
  rewards = np.random.default_rng(1).normal(size=7)
  np.testing.assert_allclose(
    _values(estimator, *(rewards + 100)),
    _values(estimator, *rewards),
    atol=1e-12,
  )


def test_grpo_ignores_the_scale_of_rewards():
  rewards = np.random.default_rng(0).normal(size=8)
  plain = _values(advantages.Grpo(eps=0.0), *rewards)
  got = _values(advantages.Grpo(eps=0.0), *(4 * rewards))
  np.testing.assert_allclose(got, plain, rtol=1e-12)


def test_small_differences_of_large_rewards_survive():
  # In float32 1000.001 - 1000 is off by 2 in the second digit.
  got = _values(advantages.Rloo(), 1000.001, 1000.0)
  np.testing.assert_allclose(got, [0.001, -0.001], rtol=1e-9)


def test_reinforce_compares_nothing():
  estimator = advantages.Reinforce(baseline=0.25)
  assert _values(estimator, 1.0).tolist() == [0.75]
  assert not estimator.zero_variance(members.rewards(1.0, 1.0))
  assert estimator.min_group_size == 1


@pytest.mark.parametrize(
  "estimator", [advantages.Rloo(), advantages.Reinforce()]
)
def test_penalties_of_all_tokens_are_subtracted_from_the_reward(estimator):
  group = [
    members.played(1.0, [1, 2], penalties=[0.25, 0.5, 0.125]),
    members.played(0.5, [2], penalties=[0.0, -0.25]),
  ]
  found = estimator(group)
  # 1 - 0.875 = 0.125 and 0.5 + 0.25 = 0.75.
  expected = _values(estimator, 0.125, 0.75)
  assert [len(own) for own in found.advantages] == [3, 2]
  assert [own[0] for own in found.advantages] == expected.tolist()


def _over_all_sets(rewards, k):
  """Returns k times the mean fall of the best, set by set of k."""
  count = len(rewards)
  falls = np.zeros(count)
  sizes = np.zeros(count)
  for chosen in itertools.combinations(range(count), k):
    for i in chosen:
      best = max(rewards[j] for j in chosen)
      falls[i] += best - max(rewards[j] for j in chosen if j != i)
      sizes[i] += 1
  return k * falls / sizes


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_pass_at_k_is_the_mean_over_all_sets(count, ties):
  draw = np.random.default_rng(count)
  rewards = draw.integers(0, 3, size=count) if ties else draw.normal(size=count)
  for k in range(2, count + 1):
    got = _values(advantages.PassAtK(k=k), *rewards.tolist())
    expected = _over_all_sets(rewards.tolist(), k)
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("k", [2, 3, 5])
def test_pass_at_k_of_successes_has_the_closed_form_of_the_paper(k):
  # PKPO, arXiv 2505.15201, less its baseline: with c of n right, a right one
  # is missed in the sets whose k - 1 others are wrong: C(n-c, k-1)/C(n-1, k-1).
  got = _values(advantages.PassAtK(k=k), 1, 1, 0, 0, 0, 0, 0)
  missed = {2: 5 / 6, 3: 10 / 15, 5: 5 / 15}[k]
  np.testing.assert_allclose(got, [k * missed] * 2 + [0] * 5, rtol=1e-12)


def test_pass_at_k_of_large_groups_does_not_overflow():
  # C(1999, 999) has 600 digits.
  rewards = np.arange(2000.0)
  got = _values(advantages.PassAtK(k=1000), *rewards)
  assert np.isfinite(got).all()
  assert (np.diff(got) >= 0).all()
  assert got[-1] > 0


# An exact oracle: a policy with logits of three arms and their rewards, and
# all groups that it can draw, each with its chance.
ARMS = np.array([0.0, 1.0, 0.3])
CHANCES = np.exp([0.2, -1.0, 0.5]) / np.exp([0.2, -1.0, 0.5]).sum()
SCORES = np.eye(3) - CHANCES  # Of an arm: d log p / d logits.


def _expected_gradient(estimator, size):
  total = np.zeros(3)
  for arms in itertools.product(range(3), repeat=size):
    chosen = list(arms)
    values = _values(estimator, *ARMS[chosen])
    total += CHANCES[chosen].prod() * (values @ SCORES[chosen]) / size
  return total


def _gradient_of_best(k):
  """Returns the gradient of the expected best reward of k draws."""
  total = np.zeros(3)
  for arms in itertools.product(range(3), repeat=k):
    chosen = list(arms)
    chance = CHANCES[chosen].prod()
    total += chance * ARMS[chosen].max() * SCORES[chosen].sum(0)
  return total


@pytest.mark.parametrize(
  ("estimator", "k", "factor"),
  [
    (advantages.Reinforce(baseline=0.7), 1, 1),
    (advantages.Rloo(), 1, 1),
    (advantages.DrGrpo(), 1, 3 / 4),
    (advantages.PassAtK(k=1), 1, 1),
    (advantages.PassAtK(k=2), 2, 1),
    (advantages.PassAtK(k=3), 3, 1),
    (advantages.PassAtK(k=4), 4, 1),
  ],
)
def test_what_is_declared_unbiased_is_over_all_groups_of_four(
  estimator, k, factor
):
  np.testing.assert_allclose(
    _expected_gradient(estimator, 4), factor * _gradient_of_best(k), atol=1e-14
  )


def test_grpo_is_biased_by_more_than_a_factor():
  got = _expected_gradient(advantages.Grpo(), 4)
  exact = _gradient_of_best(1)
  cosine = got @ exact / np.linalg.norm(got) / np.linalg.norm(exact)
  assert np.linalg.norm(got) / np.linalg.norm(exact) > 1.5
  assert cosine < 0.999


def test_of_one_task_leave_one_out_needs_all_groups_of_an_update():
  assert advantages.Rloo(others="task").scope == "batch"
  assert advantages.Rloo(others="task").pool == "task"
  assert advantages.Rloo().scope == advantages.Rloo().pool == "group"


@pytest.mark.parametrize(
  ("estimator", "message"),
  [
    (advantages.Grpo(ddof=8), "grpo.ddof=8 must be 0 or 1"),
    (advantages.Grpo(eps=float("nan")), "grpo.eps=nan"),
    (advantages.Reinforce(baseline=float("inf")), "reinforce.baseline=inf"),
    (advantages.PassAtK(k=0), "pass_at_k.k=0"),
    (
      token_advantages.ReinforcePlusPlus(discount=1.1),
      "discount=1.1 must be in",
    ),
    (
      token_advantages.ReinforcePlusPlus(eps=-1.0),
      "reinforce_pp.eps=-1.0",
    ),
    (token_advantages.Gae(lambda_=-0.1), "gae.lambda_=-0.1"),
    (token_advantages.Gae(discount=float("nan")), "gae.discount=nan"),
    (token_advantages.Gae(eps=float("inf")), "gae.eps=inf"),
    (
      token_advantages.StepGroups(weight=float("nan")),
      "step_groups.weight=nan",
    ),
    (token_advantages.StepGroups(discount=2.0), "step_groups.discount=2.0"),
    (token_advantages.StepGroups(eps=-1e-9), "step_groups.eps=-1e-09"),
    (token_advantages.TurnReturns(discount=-1.0), "turn_returns.discount=-1.0"),
  ],
)
def test_an_estimator_with_nonsense_is_refused(estimator, message):
  with pytest.raises(ValueError, match=message):
    estimator.validate()


@pytest.mark.parametrize(
  "estimator",
  [
    *COMPARING,
    advantages.Reinforce(),
    token_advantages.ReinforcePlusPlus(),
    token_advantages.Gae(),
    token_advantages.StepGroups(),
    token_advantages.TurnReturns(),
  ],
)
def test_every_estimator_is_a_setting_whose_defaults_are_fine(estimator):
  assert isinstance(estimator, advantages.Estimator)
  assert overrides.from_json(overrides.to_json(estimator)) == estimator
  estimator.validate()
  assert estimator.needs_values == isinstance(estimator, token_advantages.Gae)
