"""Advantages of turns and tokens: by hand, and in exact expectation."""

import itertools

import numpy as np
import pytest

from rl.algorithms import advantages, token_advantages
from tests.helpers import played_members as members


def _whole(estimator, groups):
  """Returns the advantages of all groups of an update, as lists."""
  found = [own for group in groups for own in estimator(group).advantages]
  if estimator.scope == "batch":
    found = estimator.over_batch(found)
  return [own.tolist() for own in found]


# REINFORCE++.


def test_reinforce_plus_plus_whitens_the_returns_of_all_tokens():
  # Returns of tokens are 3, 3 | -1 | 1 after a penalty of 2 and 2 of the first
  # and only token of the others: of 3, 3, -1, -1 the mean is 1 and the
  # deviation 2.
  groups = [
    [members.played(3.0, [2], penalties=[0, 0])],
    [members.played(1.0, [1], penalties=[2])],
    [members.played(-1.0, [1], penalties=[0])],
  ]
  got = _whole(token_advantages.ReinforcePlusPlus(eps=0.0), groups)
  assert got == [[1.0, 1.0], [-1.0], [-1.0]]


def test_reinforce_plus_plus_charges_a_penalty_up_to_its_token():
  # The penalty of a token does not count against later ones. Of 1 - 0.5 - 0.25,
  # 1 - 0.25 and 1, halved with each token on the way:
  member = members.played(1.0, [2, 1], penalties=[0.5, 0.25, 0.0])
  plain = token_advantages.ReinforcePlusPlus()([member]).advantages
  halved = token_advantages.ReinforcePlusPlus(discount=0.5)([member]).advantages
  assert plain[0].tolist() == [0.25, 0.75, 1.0]
  assert halved[0].tolist() == [-0.5 - 0.125 + 0.25, -0.25 + 0.5, 1.0]


def test_its_baseline_form_over_members_is_as_worked_out_by_hand():
  groups = [
    [members.played(1.0, [1]), *members.rewards(0, 0, 0)],
    [*members.rewards(1, 1, 0), members.played(0.0, [1, 6])],
  ]
  estimator = token_advantages.ReinforcePlusPlus(
    baseline="group", over="members"
  )
  # Less the group's mean: 3/4, -1/4 three times and 1/2, 1/2, -1/2, -1/2. All
  # have mean 0 and variance (9/16 + 3/16 + 4/4) / 8 = 7/32; over 0.467707:
  got = [own[0] for own in _whole(estimator, groups)]
  expected = [1.603567, -0.534522, -0.534522, -0.534522]
  expected += [1.069045, 1.069045, -1.069045, -1.069045]
  np.testing.assert_allclose(got, expected, atol=1e-6)


def test_its_baseline_form_over_tokens_counts_each_member_by_its_length():
  groups = [
    [members.played(1.0, [1]), members.played(0.0, [3])],
    [members.played(4.0, [2]), members.played(0.0, [1, 1])],
  ]
  got = _whole(token_advantages.ReinforcePlusPlus(baseline="group"), groups)
  # Less the group's mean: 0.5 once and -0.5 three times, 2 twice and -2 twice.
  # Of 8 tokens the mean is -1/8, the mean square (4/4 + 16) / 8 = 17/8, and so
  # the variance 17/8 - 1/64 = 135/64: 0.625, -0.375, 2.125 and -1.875 over
  # 1.452369.
  expected = [0.430331, *[-0.258199] * 3, *[1.463127] * 2, *[-1.290994] * 2]
  np.testing.assert_allclose(np.concatenate(got), expected, atol=1e-6)


@pytest.mark.parametrize("baseline", ["none", "group"])
def test_whitened_tokens_have_mean_zero_and_deviation_one(baseline):
  draw = np.random.default_rng(0)
  groups = [
    [
      members.played(draw.normal(), draw.integers(1, 9, 3).tolist())
      for _ in range(6)
    ]
    for _ in range(4)
  ]
  estimator = token_advantages.ReinforcePlusPlus(baseline=baseline, eps=0.0)
  values = np.concatenate(_whole(estimator, groups))
  assert values.mean() == pytest.approx(0, abs=1e-14)
  assert values.std() == pytest.approx(1, rel=1e-14)


def test_whitened_members_have_mean_zero_whatever_their_length():
  values = [np.full(1, 2.0), np.full(99, -2.0)]
  got = token_advantages.whiten(values, over="members", eps=0.0)
  np.testing.assert_allclose([own[0] for own in got], [1, -1], rtol=1e-14)


def test_whitening_adds_eps_to_the_deviation_and_not_to_the_variance():
  got = token_advantages.whiten([np.array([2.0, -2.0])], over="tokens", eps=2.0)
  assert got[0].tolist() == [0.5, -0.5]


@pytest.mark.parametrize("over", ["tokens", "members"])
@pytest.mark.parametrize("reward", [0.0, 0.1, -3.5])
def test_whitening_an_update_without_variance_is_exactly_zero(reward, over):
  got = token_advantages.whiten([np.full(3, reward)] * 7, over=over, eps=0.0)
  assert [own.tolist() for own in got] == [[0.0] * 3] * 7


def test_whitening_nothing_gives_nothing():
  assert token_advantages.whiten([], over="tokens", eps=0.0) == []


def test_only_the_baseline_form_compares_the_members_of_a_group():
  equal = members.rewards(1.0, 1.0)
  assert token_advantages.ReinforcePlusPlus(baseline="group").zero_variance(
    equal
  )
  assert (
    token_advantages.ReinforcePlusPlus(baseline="group").min_group_size == 2
  )
  assert not token_advantages.ReinforcePlusPlus().zero_variance(equal)
  assert token_advantages.ReinforcePlusPlus().min_group_size == 1


# GAE.


def test_gae_steps_from_the_last_token_of_a_turn_to_the_first_of_the_next():
  # Values 1, 2 | 4 with 1 earned by the first turn, and 3 - 1 by the last:
  # deltas 0 + 2 - 1, 1 + 4 - 2 and 2 + 0 - 4, each with half of the next.
  member = members.played(3.0, [2, 1], earned=[1, 0], values=[1, 2, 4])
  found = token_advantages.Gae(lambda_=0.5)([member])
  assert found.advantages[0].tolist() == [1 + 1, 3 - 1, -2]
  assert found.returns is not None
  assert found.returns[0].tolist() == [3, 4, 2]


def test_gae_of_a_cut_episode_ends_there_only_if_it_is_told_so():
  # Values 1, 2 and 4 in the state that it was cut in; 3 is earned by the end:
  # deltas 2 - 1 and 3 + 4 - 2, or 3 - 2 where the limit is the end.
  member = members.played(3.0, [2], values=[1, 2])._replace(bootstrap=4.0)
  on, end = (
    token_advantages.Gae(lambda_=1.0),
    token_advantages.Gae(lambda_=1.0, at_limit="end"),
  )
  for gae, expected in ((on, [6, 5]), (end, [2, 1])):
    found = gae([member])
    assert found.advantages[0].tolist() == expected
    assert found.returns is not None
    assert found.returns[0].tolist() == [expected[0] + 1, expected[1] + 2]


def test_gae_learns_from_equal_rewards_too():
  group = [members.played(1.0, [1], values=[0.25])] * 2
  assert not token_advantages.Gae().zero_variance(group)
  assert _whole(token_advantages.Gae(), [group]) == [[0.75], [0.75]]


def test_gae_may_be_whitened_over_the_update_but_its_returns_are_not():
  groups = [
    [members.played(1.0, [1], values=[0.0])],
    [members.played(3.0, [1], values=[0.0])],
  ]
  estimator = token_advantages.Gae(whitened=True, eps=0.0)
  assert estimator.scope == "batch"
  assert token_advantages.Gae().scope == "group"
  assert _whole(estimator, groups) == [[-1.0], [1.0]]
  assert estimator(groups[1]).returns == [np.array([3.0])]


def test_gae_without_a_critic_says_so():
  with pytest.raises(ValueError, match="give the policy a value head"):
    token_advantages.Gae()(members.rewards(1.0))


# GiGPO.


def test_step_groups_compare_turns_that_began_alike():
  # Both begin at "start", and then only one of them goes on, to "door".
  group = [
    members.played(1.0, [1, 2], seen=["start", "door"]),
    members.played(0.0, [1], seen=["start"]),
  ]
  estimator = token_advantages.StepGroups(
    normalise="mean", discount=0.5, weight=10.0
  )
  # Episodes: 1/2 and -1/2. At the start they earn 1/2, discounted, and 0: 1/4
  # and -1/4, ten times. At the door there is one alone.
  got = _whole(estimator, [group])
  assert got == [[0.5 + 2.5, 0.5, 0.5], [-0.5 - 2.5]]


def test_step_groups_over_the_deviation_are_worked_out_by_hand():
  group = [
    members.played(1.0, [1, 1], seen=["start", "door"]),
    members.played(0.0, [1, 1], seen=["start", "door"]),
    members.played(0.0, [1, 1], seen=["start", "wall"]),
  ]
  estimator = token_advantages.StepGroups(discount=1.0, eps=0.0)
  # 1, 0, 0 has mean 1/3 and deviation 3^-1/2: 2 / 3^1/2 and -1 / 3^1/2, for
  # episodes and for the start alike. At the door 1 and 0 are +- 2^-1/2.
  high, low, step = 2 / 3**0.5, -1 / 3**0.5, 0.5**0.5
  expected = [[2 * high, high + step], [2 * low, low - step], [2 * low, low]]
  np.testing.assert_allclose(_whole(estimator, [group]), expected, rtol=1e-12)


def test_a_state_seen_again_is_compared_at_whatever_place():
  # One comes to the door twice: it earns 1 from the last time on, and 1/2 from
  # the first: the mean of the two is 3/4.
  group = [
    members.played(1.0, [1, 1], seen=["door", "door"]),
    members.played(1.0, [1], seen=["elsewhere"]),
  ]
  estimator = token_advantages.StepGroups(normalise="mean", discount=0.5)
  assert _whole(estimator, [group]) == [[-0.25, 0.25], [0.0]]


def test_step_groups_without_weight_are_grpo():
  draw = np.random.default_rng(0)
  group = [members.played(draw.normal(), [2, 1]) for _ in range(5)]
  got = token_advantages.StepGroups(weight=0.0)(group).advantages
  expected = advantages.Grpo()(group).advantages
  np.testing.assert_allclose(
    np.concatenate(got), np.concatenate(expected), rtol=1e-14
  )


def test_equal_rewards_are_flat_only_if_no_step_differs():
  quick = members.played(1.0, [1], seen=["start"])
  slow = members.played(1.0, [1, 1], seen=["start", "door"])
  assert token_advantages.StepGroups().zero_variance([quick, quick])
  assert not token_advantages.StepGroups().zero_variance([quick, slow])
  assert token_advantages.StepGroups(discount=1.0).zero_variance([quick, slow])


# Rewards of turns.


def test_turn_returns_compare_what_was_earned_from_each_turn_on():
  group = [
    members.played(3.0, [2, 1], earned=[1, 2]),
    members.played(5.0, [1, 1], earned=[4, 1]),
    members.played(0.0, [1]),
  ]
  # At turn 0 they earn 3, 5, 0 less means of the others 2.5, 1.5, 4; at turn 1
  # two are left, with 2 and 1.
  got = np.concatenate(_whole(token_advantages.TurnReturns(), [group]))
  np.testing.assert_allclose(got, [0.5, 0.5, 1, 3.5, -1, -4], rtol=1e-14)


def test_turn_returns_are_discounted_by_turns():
  group = [
    members.played(4.0, [3, 3], earned=[0, 2]),
    members.played(0.0, [1]),
  ]
  # From turn 0 on it is 4/2. At turn 1 the other had ended, with 0.
  got = _whole(token_advantages.TurnReturns(discount=0.5), [group])
  assert got == [[2.0] * 3 + [4.0] * 3, [-2.0]]


def test_the_last_of_all_to_go_on_is_compared_with_how_the_others_ended():
  group = [
    members.played(1.0, [1, 1, 1]),
    members.played(1.0, [1]),
    members.played(0.0, [1, 1]),
  ]
  got = _whole(token_advantages.TurnReturns(), [group])
  # At turn 1 the third had 0; at turn 2 the others had ended with 1 and 0.
  assert got == [[0.5, 1.0, 0.5], [0.5], [-1.0, -1.0]]


def test_turn_returns_of_one_turn_are_leave_one_out():
  draw = np.random.default_rng(0)
  group = members.rewards(*draw.normal(size=6))
  assert _whole(token_advantages.TurnReturns(), [group]) == _whole(
    advantages.Rloo(), [group]
  )


def test_turns_of_one_grade_are_flat_only_if_they_earned_alike():
  equal = members.played(1.0, [1, 1], earned=[1, 0])
  late = members.played(1.0, [1, 1], earned=[0, 1])
  assert token_advantages.TurnReturns().zero_variance([equal, equal])
  assert not token_advantages.TurnReturns().zero_variance([equal, late])
  # The turn that did better has no token to train.
  early = members.played(1.0, [2, 0], earned=[1, 0])
  idle = members.played(1.0, [2, 0], earned=[0, 1])
  assert token_advantages.TurnReturns().zero_variance([early, idle])


# Of all of them.

EVERY = [
  token_advantages.ReinforcePlusPlus(),
  token_advantages.ReinforcePlusPlus(baseline="group", discount=0.9),
  token_advantages.Gae(whitened=True),
  token_advantages.Gae(discount=0.9),
  token_advantages.StepGroups(),
  token_advantages.StepGroups(normalise="mean"),
  token_advantages.TurnReturns(),
  token_advantages.TurnReturns(discount=0.9),
  advantages.Rloo(),
  advantages.PassAtK(k=3),
]


def _random_group(seed):
  draw = np.random.default_rng(seed)
  counts = draw.integers(1, 5, size=5).tolist()
  lengths = [draw.integers(1, 5, size=count).tolist() for count in counts]
  return [
    members.played(
      draw.normal(),
      turns,
      earned=draw.integers(-1, 2, size=len(turns)),
      seen=draw.choice(["a", "b", "c"], size=len(turns)).tolist(),
      penalties=draw.normal(size=sum(turns)),
      values=draw.normal(size=sum(turns)),
    )
    for turns in lengths
  ]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("estimator", EVERY)
def test_the_order_of_members_does_not_matter(estimator, seed):
  group = _random_group(seed)
  order = np.random.default_rng(seed).permutation(5)
  plain = _whole(estimator, [group])
  moved = _whole(estimator, [[group[i] for i in order]])
  for place, i in enumerate(order):
    assert len(plain[i]) == len(group[i].turns)
    np.testing.assert_allclose(moved[place], plain[i], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_turn_returns_sum_to_zero_where_all_are(seed):
  # A leave-one-out advantage is the centred one times G / (G - 1).
  group = _random_group(seed)
  first = [own[0] for own in token_advantages.TurnReturns()(group).advantages]
  assert sum(first) == pytest.approx(0, abs=1e-12)


# An exact oracle: two turns of one token. "On" (1) leads to the second turn,
# "off" (0) ends; each token has its reward, and the grade one for the path.
LOGITS = np.array([[0.3, -0.4], [1.0, 0.2]])
CHANCES = np.exp(LOGITS) / np.exp(LOGITS).sum(1, keepdims=True)
PATHS = [(0,), (1, 0), (1, 1)]
EARNED = [[0.5], [-0.25, 0.75], [-0.25, 2.0]]
GRADES = [0.5, 3.0, -1.0]


def _chance(path):
  return np.prod([CHANCES[turn, token] for turn, token in enumerate(path)])


def _score(path, weights):
  """Returns the sum of weights times gradients of log-probabilities."""
  total = np.zeros((2, 2))
  for turn, (token, weight) in enumerate(zip(path, weights, strict=True)):
    total[turn] += weight * (np.eye(2)[token] - CHANCES[turn])
  return total


def _expected_gradient(estimator, size):
  """Returns the mean of the estimate over all groups of `size`."""
  played = [
    members.played(
      grade,
      [1] * len(path),
      earned=earned,
      seen=["start", "on"][: len(path)],
      values=[7.0, -2.0][: len(path)],
    )
    for path, earned, grade in zip(PATHS, EARNED, GRADES, strict=True)
  ]
  total = np.zeros((2, 2))
  for drawn in itertools.product(range(3), repeat=size):
    chance = np.prod([_chance(PATHS[i]) for i in drawn])
    found = estimator([played[i] for i in drawn])
    for i, own in zip(drawn, found.advantages, strict=True):
      total += chance * _score(PATHS[i], own) / size
  return total


def _exact_gradient():
  return sum(
    _chance(path) * _score(path, [grade] * len(path))
    for path, grade in zip(PATHS, GRADES, strict=True)
  )


@pytest.mark.parametrize(
  ("estimator", "factor"),
  [
    (token_advantages.TurnReturns(), 1),
    (token_advantages.Gae(lambda_=1.0), 1),
    (token_advantages.ReinforcePlusPlus(), 1),
    (token_advantages.ReinforcePlusPlus(baseline="group"), 2 / 3),
    (advantages.Rloo(), 1),
    (advantages.DrGrpo(), 2 / 3),
  ],
)
def test_what_is_declared_unbiased_is_over_all_groups_of_three(
  estimator, factor
):
  # Of REINFORCE++ it is said of what is whitened.
  got = _expected_gradient(estimator, 3)
  np.testing.assert_allclose(got, factor * _exact_gradient(), atol=1e-14)


@pytest.mark.parametrize(
  "estimator",
  [
    token_advantages.TurnReturns(discount=0.5),
    token_advantages.Gae(lambda_=0.5),
    token_advantages.StepGroups(),
    token_advantages.StepGroups(normalise="mean", discount=1.0),
  ],
)
def test_what_is_declared_biased_is_by_more_than_a_factor(estimator):
  got, exact = _expected_gradient(estimator, 3), _exact_gradient()
  cosine = np.sum(got * exact) / np.linalg.norm(got) / np.linalg.norm(exact)
  assert cosine < 0.9999
