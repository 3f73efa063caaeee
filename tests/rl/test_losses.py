"""Losses against numbers worked out by hand, eager and jitted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl import losses

pytestmark = pytest.mark.parametrize(
  "wrap", [jax.jit, lambda f: f], ids=["jit", "eager"]
)


def _row(ratios, advantages, sampled=None):
  """Returns a row whose policy has moved by `ratios` since it was sampled."""
  behaviour = -1.0 - jnp.arange(len(ratios), dtype=jnp.float32)
  mask = [True] * len(ratios) if sampled is None else sampled
  return (
    behaviour + jnp.log(jnp.asarray(ratios, jnp.float32)),
    behaviour,
    jnp.asarray(advantages, jnp.float32),
    jnp.asarray(mask),
  )


def _gradient(wrap, loss, row):
  """Returns the gradient with respect to the log-probabilities."""
  return wrap(jax.grad(lambda x: loss(x, *row[1:])[0]))(row[0])


def test_gain_stops_growing_above_the_upper_bound(wrap):
  # Ratios 1, 2, 2 with advantages +1, +1, -1: the bound 1.28 caps only the
  # gain, so the loss is -(1 + 1.28 - 2) = -0.28 and one token is clipped.
  row = _row([1, 2, 2], [1, 1, -1])
  loss, clipped = wrap(losses.ClippedSurrogate())(*row)
  assert loss == pytest.approx(-0.28, abs=1e-6)
  assert clipped == 1
  # Of -ratio * advantage where it is not clipped: -1, 0, +2.
  gradient = _gradient(wrap, losses.ClippedSurrogate(), row)
  np.testing.assert_allclose(gradient, [-1, 0, 2], atol=1e-6)


def test_a_bad_token_is_pushed_down_no_further_than_the_lower_bound(wrap):
  # Ratios 0.5, 0.5, 0.9 with advantages -1, +1, -1: 0.8 bounds the first,
  # -(-0.8 + 0.5 - 0.9) = 1.2; the second may still come back up.
  row = _row([0.5, 0.5, 0.9], [-1, 1, -1])
  loss, clipped = wrap(losses.ClippedSurrogate())(*row)
  assert loss == pytest.approx(1.2, abs=1e-6)
  assert clipped == 1
  gradient = _gradient(wrap, losses.ClippedSurrogate(), row)
  np.testing.assert_allclose(gradient, [0, -0.5, 0.9], atol=1e-6)


def test_the_bounds_are_settings(wrap):
  # Bounds 0.9 and 1.1: -(1.1 - 0.9) = -0.2, and both are clipped.
  surrogate = losses.ClippedSurrogate(clip_low=0.1, clip_high=0.1)
  loss, clipped = wrap(surrogate)(*_row([2, 0.5], [1, -1]))
  assert loss == pytest.approx(-0.2, abs=1e-6)
  assert clipped == 2


def test_on_policy_the_gradient_is_that_of_plain_policy_gradient(wrap):
  # At ratio 1 the gradient is -advantage on sampled tokens, 0 elsewhere.
  row = _row([1, 1, 1], [2, -3, 5], [True, True, False])
  gradient = _gradient(wrap, losses.ClippedSurrogate(), row)
  np.testing.assert_allclose(gradient, [-2, 3, 0], atol=1e-6)


def test_imitation_is_the_negative_log_likelihood_of_sampled_tokens(wrap):
  # Log-probabilities -1, -2, -3, of which the last was not sampled: 3.
  row = _row([1, 1, 1], [0, 0, 0], [True, True, False])
  loss, clipped = wrap(losses.NegativeLogLikelihood())(*row)
  assert (loss, clipped) == (3, 0)
  gradient = _gradient(wrap, losses.NegativeLogLikelihood(), row)
  assert gradient.tolist() == [-1, -1, 0]


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", [0, 1, 2])
@pytest.mark.parametrize(
  "loss", [losses.ClippedSurrogate(), losses.NegativeLogLikelihood()]
)
def test_padding_leaks_into_neither_loss_nor_gradient(
  wrap, loss, column, poison
):
  mask = [False, True, True, False]
  clean = _row([1, 2, 0.5, 1], [3, -1, -1, 3], mask)
  dirty = list(clean)
  padding = jnp.asarray([0, 3])
  dirty[column] = clean[column].at[padding].set(poison)
  assert wrap(loss)(*dirty) == wrap(loss)(*clean)
  gradient = _gradient(wrap, loss, dirty)
  assert gradient.tolist() == _gradient(wrap, loss, clean).tolist()
  assert gradient[padding].tolist() == [0, 0]


@pytest.mark.parametrize(
  "loss", [losses.ClippedSurrogate(), losses.NegativeLogLikelihood()]
)
def test_the_loss_of_a_packed_row_is_the_sum_of_its_episodes(wrap, loss):
  draws = np.random.default_rng(0)
  rows = [
    _row(
      draws.uniform(0.3, 2.0, size=4),
      draws.normal(size=4),
      draws.random(size=4) < 0.6,
    )
    for _ in range(3)
  ]
  packed = [jnp.concatenate(column) for column in zip(*rows, strict=True)]
  alone = [wrap(loss)(*row) for row in rows]
  total, clipped = wrap(loss)(*packed)
  assert total == pytest.approx(sum(float(x) for x, _ in alone), rel=1e-5)
  assert clipped == sum(float(x) for _, x in alone)
