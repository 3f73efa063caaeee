"""Rewards to go and GAE against sums written out, and by hand."""

import numpy as np
import pytest

from rl.algorithms import returns
from tests.helpers import played_members as members


def test_the_rest_of_the_reward_is_earned_by_the_end_of_the_last_turn():
  # 0.5 and -0.25 on the way, so 1 - 0.25 = 0.75 of the reward is left.
  member = members.played(1.0, [2, 1, 3], earned=[0.5, -0.25, 0.0])
  assert returns.of_turns(member).tolist() == [0.5, -0.25, 0.75]
  assert returns.of_tokens(member).tolist() == [0, 0.5, -0.25, 0, 0, 0.75]


def test_without_a_discount_the_first_turn_earns_the_reward_as_graded():
  member = members.played(0.625, [1, 2, 1], earned=[0.5, 4.0, -2.0])
  got = returns.to_go(returns.of_turns(member), 1.0)
  # And from then on what is left of it: 0.625 - 0.5, and - 4 more.
  assert got.tolist() == [0.625, 0.125, -3.875]


def test_the_rest_of_the_reward_is_discounted_to_each_turn():
  # Turns earn 1, 0, 2 and the rest 7 - 3 = 4 comes with the last one:
  # 1 + 0 + 6/4, then 0 + 6/2, then 6.
  member = members.played(7.0, [1, 1, 1], earned=[1, 0, 2])
  got = returns.to_go(returns.of_turns(member), 0.5)
  assert got.tolist() == [2.5, 3.0, 6.0]


def test_penalties_are_subtracted_from_the_turn_and_token_they_are_of():
  member = members.played(
    1.0, [2, 1], earned=[0.5, 0.0], penalties=[0.25, 0.5, 0.125]
  )
  assert returns.of_tokens(member).tolist() == [-0.25, 0.0, 0.375]
  assert returns.of_turns(member).tolist() == [-0.25, 0.375]
  assert returns.total(member) == 0.125


@pytest.mark.parametrize(
  ("lengths", "expected"),
  [
    ([2, 0, 1], [0, 1 + 2, 4]),  # The turn in between sampled nothing.
    ([0, 2, 1], [1, 2, 4]),  # Nor had anything been sampled before.
    ([2, 1, 0], [0, 1, 2 + 4]),
    ([0, 1, 0], [1 + 2 + 4]),
  ],
)
def test_the_reward_of_a_turn_without_tokens_is_not_lost(lengths, expected):
  member = members.played(7.0, lengths, earned=[1, 2, 3])
  assert returns.of_tokens(member).tolist() == expected


@pytest.mark.parametrize("seed", range(5))
def test_rewards_of_turns_and_of_tokens_sum_to_the_total(seed):
  draw = np.random.default_rng(seed)
  lengths = [1, *draw.integers(0, 5, size=6).tolist()]
  penalties = draw.normal(size=sum(lengths)).astype(np.float32)
  member = members.played(
    draw.normal(), lengths, earned=draw.normal(size=7), penalties=penalties
  )
  total = member.reward - penalties.sum(dtype=np.float64)
  assert returns.total(member) == pytest.approx(total, rel=1e-14)
  assert returns.of_turns(member).sum() == pytest.approx(total, rel=1e-13)
  assert returns.of_tokens(member).sum() == pytest.approx(total, rel=1e-13)


def _sums(rewards, discount):
  """Returns the definition, term by term."""
  count = len(rewards)
  return [
    sum(discount ** (j - i) * rewards[j] for j in range(i, count))
    for i in range(count)
  ]


@pytest.mark.parametrize("discount", [0.0, 0.5, 0.97, 1.0])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 8, 9, 100])
def test_rewards_to_go_are_the_sums_of_their_definition(count, discount):
  rewards = np.random.default_rng(count).normal(size=count)
  before = rewards.copy()
  got = returns.to_go(rewards, discount)
  np.testing.assert_allclose(got, _sums(rewards, discount), atol=1e-13)
  assert rewards.tolist() == before.tolist()


def test_rewards_to_go_of_a_long_episode_stay_exact():
  # A float32 sum of 1 + 2^-24 + 2^-24 + ... would stay at 1.
  rewards = np.full(2**16, 2.0**-24)
  rewards[-1] = 1.0
  got = returns.to_go(rewards, 1.0)
  assert got[0] == 1.0 + (2**16 - 1) * 2.0**-24


def test_gae_of_three_tokens_is_as_worked_out_by_hand():
  # discount 1/2, lambda 1/2; values 1, 2, 4 and then 0; rewards 0, 0, 8:
  # deltas 0 + 1 - 1 = 0, 0 + 2 - 2 = 0, 8 + 0 - 4 = 4; and backwards, each
  # with a quarter of the next: 4, 0 + 1, 0 + 1/4.
  got = returns.gae(
    np.array([0.0, 0.0, 8.0]),
    np.array([1.0, 2.0, 4.0]),
    discount=0.5,
    lambda_=0.5,
  )
  assert got.tolist() == [0.25, 1.0, 4.0]


def test_gae_of_an_episode_that_was_cut_goes_on_with_its_last_value():
  # As above, with 6 after the end: the last delta is 8 + 3 - 4 = 7; and
  # backwards, each with a quarter of the next: 7, 7/4, 7/16.
  got = returns.gae(
    np.array([0.0, 0.0, 8.0]),
    np.array([1.0, 2.0, 4.0]),
    discount=0.5,
    lambda_=0.5,
    bootstrap=6.0,
  )
  assert got.tolist() == [0.4375, 1.75, 7.0]


def _exponential_average(rewards, values, discount, lambda_, bootstrap):
  """Returns (1 - lambda) times the sum of lambda^(n-1) of n-step advantages.

  The definition of arXiv 1506.02438, eq. 16; steps beyond the end repeat the
  last advantage, so what is left of the weights goes to it.
  """
  count = len(rewards)
  following = np.append(values, bootstrap)
  out = []
  for t in range(count):
    steps, rest, total = count - t, 1.0, 0.0
    for n in range(1, steps + 1):
      earned = sum(discount**i * rewards[t + i] for i in range(n))
      ahead = earned + discount**n * following[t + n] - values[t]
      weight = rest if n == steps else (1 - lambda_) * lambda_ ** (n - 1)
      total += weight * ahead
      rest -= weight
    out.append(total)
  return out


@pytest.mark.parametrize("lambda_", [0.0, 0.3, 0.95, 1.0])
@pytest.mark.parametrize("discount", [0.9, 1.0])
@pytest.mark.parametrize("bootstrap", [0.0, -1.7])
def test_gae_is_the_exponential_average_of_its_definition(
  bootstrap, discount, lambda_
):
  draw = np.random.default_rng(1)
  rewards, values = draw.normal(size=(2, 17))
  got = returns.gae(
    rewards, values, discount=discount, lambda_=lambda_, bootstrap=bootstrap
  )
  expected = _exponential_average(rewards, values, discount, lambda_, bootstrap)
  np.testing.assert_allclose(got, expected, atol=1e-12)


def test_gae_with_lambda_one_is_the_return_less_the_value():
  draw = np.random.default_rng(2)
  rewards, values = draw.normal(size=(2, 40))
  got = returns.gae(rewards, values, discount=0.9, lambda_=1.0)
  np.testing.assert_allclose(got, returns.to_go(rewards, 0.9) - values)


def test_gae_with_lambda_zero_looks_one_step_ahead():
  draw = np.random.default_rng(3)
  rewards, values = draw.normal(size=(2, 40))
  got = returns.gae(rewards, values, discount=0.9, lambda_=0.0)
  ahead = rewards + 0.9 * np.append(values[1:], 0.0) - values
  np.testing.assert_allclose(got, ahead)


def test_a_perfect_critic_leaves_no_advantage():
  rewards = np.random.default_rng(4).normal(size=30)
  values = returns.to_go(rewards, 0.95)
  got = returns.gae(rewards, values, discount=0.95, lambda_=0.7)
  np.testing.assert_allclose(got, np.zeros(30), atol=1e-14)


@pytest.mark.parametrize("lambda_", [0.0, 0.7, 1.0])
def test_a_perfect_critic_leaves_none_wherever_the_episode_is_cut(lambda_):
  rewards = np.random.default_rng(5).normal(size=30)
  values = returns.to_go(rewards, 0.95)
  for cut in (1, 11, 29):
    got = returns.gae(
      rewards[:cut],
      values[:cut],
      discount=0.95,
      lambda_=lambda_,
      bootstrap=values[cut],
    )
    np.testing.assert_allclose(got, np.zeros(cut), atol=1e-14)


@pytest.mark.parametrize(
  ("values", "expected"),
  [
    ([0.1 + 0.2, 0.3], True),
    ([1.0, 1.0 + 1e-6], False),
    ([0.0, -0.0], True),
    ([7.0], True),
    ([], True),
  ],
)
def test_what_differs_by_rounding_alone_is_the_same(values, expected):
  assert returns.same(np.array(values, np.float64)) is expected
