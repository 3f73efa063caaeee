"""The task whose policy gradient is known: is it what it says it is?"""

import jax
import numpy as np
import pytest

from benchmarks import estimator_bias
from rl.testing import tabular, tabular_estimates

pytestmark = pytest.mark.compiled

LAGS = estimator_bias.LAGS
EPISODES = 100_000


@pytest.mark.parametrize("lag", LAGS)
def test_probabilities_of_all_paths_sum_to_one(lag):
  sums = tabular.probabilities(LAGS[lag]).sum(-1)
  np.testing.assert_allclose(sums, 1.0, rtol=1e-12)


@pytest.mark.parametrize("lag", LAGS)
def test_paths_are_played_as_often_as_their_probabilities_say(lag):
  kinds = len(LAGS[lag])
  found = tabular.play(np.random.default_rng(0), LAGS[lag], EPISODES)
  for kind, chances in enumerate(tabular.probabilities(LAGS[lag])):
    expected = chances * EPISODES / kinds
    counts = np.bincount(found[kind::kinds], minlength=len(chances))
    # Pearson's statistic; rare paths are pooled.
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    distance = np.sum((counts - expected) ** 2 / expected)
    assert jax.scipy.stats.chi2.sf(distance, len(expected) - 1) > 0.0027


def slope(function, table: np.ndarray) -> np.ndarray:
  """Returns central differences of a function of the table."""
  found, step = np.zeros_like(table), 1e-5
  for place in np.ndindex(table.shape):
    up, down = table.copy(), table.copy()
    up[place] += step
    down[place] -= step
    found[place] = (function(up) - function(down)) / (2 * step)
  return found


def test_gradient_of_the_return_is_that_of_finite_differences():
  def expected(table: np.ndarray) -> float:
    return float(tabular.chances_under(table) @ tabular.paths().rewards)

  table = tabular.TABLES[0]
  found = tabular.gradient(table, tabular.paths().rewards)
  np.testing.assert_allclose(slope(expected, table), found, atol=1e-9)


@pytest.mark.parametrize("k", [2, 5])
def test_gradient_of_the_best_of_k_is_that_of_finite_differences(k):
  rewards = tabular.paths().rewards

  def expected(table: np.ndarray) -> float:
    # The best is at most r when all are: sum r (P(all <= r) - P(all < r)).
    chances = tabular.chances_under(table)
    return sum(
      r * (chances[rewards <= r].sum() ** k - chances[rewards < r].sum() ** k)
      for r in np.unique(rewards)
    )

  table = tabular.TABLES[0]
  found = k * tabular.gradient(table, tabular.means_of_best(table, k))
  np.testing.assert_allclose(slope(expected, table), found, atol=1e-9)


def test_gradient_of_a_kl_is_that_of_finite_differences():
  # In one state, times visits: state 0 is visited once by every path.
  log = tabular.log_policy(tabular.TABLES[4])[0]

  def divergence(table: np.ndarray) -> float:
    own = tabular.log_policy(table)[0]
    return np.exp(own) @ (own - log)

  def reverse(table: np.ndarray) -> float:
    return np.exp(log) @ (log - tabular.log_policy(table)[0])

  pair = tabular_estimates.kl_gradients(reference=4)
  for function, found in zip((divergence, reverse), pair, strict=True):
    by_steps = slope(function, tabular.TABLES[0])
    np.testing.assert_allclose(by_steps[0], found[0], atol=1e-9)


def test_a_perfect_critic_starts_at_the_expected_return():
  table = tabular.TABLES[0]
  values = tabular.values_by_history(table)
  expected = tabular.chances_under(table) @ tabular.paths().rewards
  np.testing.assert_allclose(values[:, 0], expected, rtol=1e-12)
