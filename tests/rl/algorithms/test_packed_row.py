"""Ratios of a row, and sums over its trajectories."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl.algorithms import packed_row
from tests.helpers import packed_rows

pytestmark = pytest.mark.compiled

WRAPS = pytest.mark.parametrize(
  "wrap", [jax.jit, lambda f: f], ids=["jit", "eager"]
)


@WRAPS
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf], ids=str)
def test_a_log_ratio_is_a_difference_where_a_token_was_sampled(wrap, poison):
  row = packed_rows.make([-1.0] * 3, sampled=[True, False, True])

  def total(over):
    found = packed_row.log_ratio(over, jnp.asarray([-1.5, poison, 0.25]), row)
    return found.sum(), found

  over = jnp.asarray([-1.0, poison, -2.0])
  gradient, found = wrap(jax.grad(total, has_aux=True))(over)
  assert found.tolist() == [0.5, 0.0, -2.25]
  assert gradient.tolist() == [1.0, 0.0, 1.0]


@WRAPS
def test_a_ratio_is_bounded_by_20_nats_and_has_no_gradient_beyond(wrap):
  assert packed_row.MAX_LOG_RATIO == 20
  nats = jnp.asarray([-math.inf, -20.5, -19.5, 0.0, 19.5, 20.5, math.inf])
  # exp(20) = 4.85e8, exp(19.5) = 2.94e8.
  least, low, high, most = (math.exp(x) for x in (-20, -19.5, 19.5, 20))
  expected = [least, least, low, 1.0, high, most, most]
  found = wrap(packed_row.bounded_exp)(nats)
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  at_bounds = wrap(packed_row.bounded_exp)(jnp.asarray([-20.0, 20.0]))
  np.testing.assert_allclose(at_bounds, [least, most], rtol=1e-5)
  gradient = wrap(jax.grad(lambda x: packed_row.bounded_exp(x).sum()))(nats)
  np.testing.assert_allclose(gradient, [0, 0, low, 1, high, 0, 0], rtol=1e-5)


@WRAPS
def test_sums_and_means_are_of_a_tokens_trajectory_wherever_it_lies(wrap):
  # Trajectory 2 is in two pieces, and 0 and L = 5 are numbers like others.
  row = packed_rows.make([0.0] * 5, segments=[2, 0, 2, 5, 5])
  values = jnp.asarray([1.0, 2.0, 4.0, 8.0, 16.0])
  assert wrap(packed_row.totals)(values, row).tolist() == [5, 2, 5, 24, 24]
  assert wrap(packed_row.means)(values, row).tolist() == [2.5, 2, 2.5, 12, 12]
  assert wrap(packed_row.sizes)(row).tolist() == [2, 1, 2, 2, 2]
  assert wrap(packed_row.num_trajectories)(row) == 3
