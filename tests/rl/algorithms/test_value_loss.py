"""The loss of the critic, and how well it knows what is to come."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl.algorithms import value_loss
from rl.data import batch

pytestmark = pytest.mark.compiled


def test_a_value_loss_is_half_the_square_or_that_of_the_clipped_value():
  loss = value_loss.ValueLoss(clip=0.2)
  values = jnp.array([1.0, 1.0, -1.0, 0.1])
  old, returns = jnp.zeros(4), jnp.array([2.0, 0.5, 1.0, 0.3])
  # Clipped to 0.2, 0.2, -0.2 and 0.1: (1.8, 0.3, 1.2, 0.2) from the returns,
  # against (1.0, 0.5, 2.0, 0.2); the larger error counts.
  expected = [1.62, 0.125, 2.0, 0.02]
  assert loss(values, old, returns).tolist() == pytest.approx(expected)
  plain = value_loss.ValueLoss(clip=None)(values, old, returns)
  assert plain.tolist() == pytest.approx([0.5, 0.125, 2.0, 0.02])


def test_a_value_that_went_far_enough_is_taken_no_further():
  loss = value_loss.ValueLoss(clip=0.2)
  values = jnp.array([1.0, 1.0, -1.0, 0.1])
  old, returns = jnp.zeros(4), jnp.array([2.0, 0.5, 1.0, 0.3])
  gradient = jax.grad(lambda x: loss(x, old, returns).sum())(values)
  # The first is on its way to 2 and has gone further than 0.2; the others come
  # back, or have hardly moved.
  assert gradient.tolist() == pytest.approx([0.0, 0.5, -2.0, -0.2])


@pytest.mark.parametrize(
  ("setting", "message"),
  [
    ({"weight": 0.0}, "value_loss.weight=0.0 must be a finite number above 0"),
    ({"clip": -1.0}, "value_loss.clip=-1.0 must be a finite number above 0"),
    ({"clip": math.nan}, "value_loss.clip=nan must be a finite number above 0"),
  ],
)
def test_a_value_loss_that_means_nothing_is_refused(setting, message):
  with pytest.raises(ValueError, match=message):
    value_loss.ValueLoss(**setting).validate()
  value_loss.ValueLoss(clip=None).validate()


def told(values, returns, sampled=None):
  """Sums of one row without a clip, and its metrics."""
  length = len(values)
  sampled = np.ones(length, bool) if sampled is None else np.array(sampled)
  data = batch.empty(1, length)._replace(
    sampled=jnp.asarray(sampled)[None],
    values=jnp.zeros((1, length)),
    returns=jnp.asarray(returns, jnp.float32)[None],
  )
  loss, sums = value_loss.of_batch(
    value_loss.ValueLoss(clip=None), jnp.asarray([values], jnp.float32), data
  )
  found = value_loss.metrics(sums)
  return loss[0].tolist(), sums, {n: float(x) for n, x in found.items()}


@pytest.mark.parametrize("planted", [100.0, math.nan, math.inf])
def test_it_learns_nothing_from_what_the_environment_said(planted):
  loss, sums, found = told(
    [planted, 1, 3], [-planted, 2, 2], [False, True, True]
  )
  # 1/2 (1 - 2)^2 and 1/2 (3 - 2)^2; targets 2 and 2, of which 1 and -1 is
  # missing.
  assert loss == [0.0, 0.5, 0.5]
  assert (sums.tokens, sums.loss) == (2.0, 1.0)
  assert (sums.targets, sums.errors) == ((2.0, 0.0), (0.0, 2.0))
  assert found["value_loss"] == pytest.approx(0.5)


@pytest.mark.parametrize(
  ("values", "expected"),
  [
    ([0, 1, 2, 3], 1.0),
    # Always 10 too much: it knows all of what differs.
    ([10, 11, 12, 13], 1.0),
    ([1.5] * 4, 0.0),
    # Errors 0, -1, 1 and 0 have a variance of 0.5, the targets of 1.25.
    ([0, 2, 1, 3], 0.6),
    ([3, 2, 1, 0], -3.0),
  ],
)
def test_the_variance_that_it_explains(values, expected):
  found = told(values, [0, 1, 2, 3])[2]["explained_variance"]
  assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("target", [3.0, 0.1, 0.2, 0.9, 3.3])
@pytest.mark.parametrize("count", [2, 3, 100])
def test_of_equal_targets_there_is_nothing_to_explain(target, count):
  found = told(np.linspace(0, 1, count), [target] * count)[2]
  assert math.isnan(found["explained_variance"])


@pytest.mark.parametrize(
  ("mean", "deviation", "too_much"),
  [
    (1.0, 0.0015, 0.0),
    (-1.0, 0.0015, 0.0),
    (10.0, 0.02, 0.0),
    (0.0, 0.01, 5.0),
    (0.0, 0.01, 50.0),
    (0.0, 0.3, 30.0),
  ],
)
@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_a_variance_far_below_the_squared_mean_is_not_lost(
  wrap, mean, deviation, too_much
):
  # Half of what differs is known, but for a constant: about 1 - 1/4 = 0.75.
  draw = np.random.default_rng(0)
  exact = mean + deviation * draw.normal(size=(8, 4, 512))
  returns = exact.astype(np.float32)
  values = (mean + (exact - mean) / 2 + too_much).astype(np.float32)
  of_batch = wrap(
    lambda now, data: value_loss.of_batch(value_loss.ValueLoss(), now, data)[1]
  )
  total = value_loss.zero()
  for now, targets in zip(values, returns, strict=True):
    data = batch.empty(4, 512)._replace(
      sampled=np.ones((4, 512), bool), values=now, returns=targets
    )
    sums = of_batch(jnp.asarray(now), jax.tree.map(jnp.asarray, data))
    total = wrap(value_loss.add)(total, sums)
  wide = returns.astype(np.float64)
  expected = 1 - (wide - values).var() / wide.var()
  assert expected == pytest.approx(0.75, abs=1e-3)
  found = value_loss.metrics(total)["explained_variance"]
  assert found == pytest.approx(expected, abs=1e-4)


def test_a_variance_below_the_rounding_of_the_errors_is_unknown():
  # In float32 the next number after 100,000 is 1/128 more.
  found = told([1e5, 1e5], [0.0, 0.001])[2]["explained_variance"]
  assert math.isnan(found)


def test_sums_of_parts_are_those_of_the_whole():
  values, returns = [1.0, 2.0, 5.0, 1.0, 0.0], [3.0, 4.0, 0.0, 1.0, 7.0]
  parts = [told(values[i:j], returns[i:j])[1] for i, j in ((0, 2), (2, 5))]
  added, whole = value_loss.add(*parts), told(values, returns)[1]
  # Targets have mean 3 and squares 0 + 1 + 9 + 4 + 16; errors 2, 2, -5, 0 and
  # 7 have mean 6/5 and squares 82 - 5 (6/5)^2 = 74.8.
  for sums in (added, whole):
    assert sums.targets == pytest.approx((3.0, 30.0))
    assert sums.errors == pytest.approx((1.2, 74.8))
  assert (added.tokens, added.loss) == (5.0, whole.loss)


def test_sums_of_nothing_add_nothing():
  sums = told([1, 2], [3, 4])[1]
  assert value_loss.add(value_loss.zero(), sums) == sums
  assert value_loss.add(sums, value_loss.zero()) == sums
