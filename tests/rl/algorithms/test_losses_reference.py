"""Losses and their gradients against the papers' formulas in float64."""

import math

import jax
import numpy as np
import pytest

from rl.algorithms import losses
from tests.helpers import packed_rows

EACH = pytest.mark.parametrize("loss", packed_rows.LOSSES, ids=str)


def _surrogate(ratio, advantage, low, high):
  bounded = np.clip(ratio, 1 - low, 1 + high)
  return -np.minimum(ratio * advantage, bounded * advantage)


def _expected(loss, pi, old, mu, a):
  """The loss of one trajectory's tokens, by the papers' formulas."""
  r, rho = np.exp(pi - old), np.exp(pi - mu)
  match loss:
    case losses.ClippedSurrogate(clip_low=low, clip_high=high, dual_clip=c):
      clipped = _surrogate(r, a, low, high)
      return (
        clipped
        if c is None
        else np.where(a < 0, np.minimum(clipped, -c * a), clipped)
      )
    case losses.Gspo(clip_low=low, clip_high=high):
      s = np.prod(r) ** (1 / len(r))
      return np.full(len(r), _surrogate(s, a.mean(), low, high))
    case losses.GspoToken(clip_low=low, clip_high=high):
      return _surrogate(np.prod(r) ** (1 / len(r)), a, low, high)
    case losses.Cispo(clip_low=low, clip_high=high):
      least = -math.inf if low is None else 1 - low
      return -np.clip(r, least, 1 + high) * a * pi
    case losses.Reinforce():
      return -a * pi
    case losses.Aipo(cap=cap):
      return -np.minimum(rho, cap) * a * pi
    case losses.Topr():
      return -np.where(a < 0, min(np.prod(rho), 1), 1) * a * pi
    case losses.Sapo(tau_positive=up, tau_negative=down):
      tau = np.where(a > 0, up, down)
      return -4 / tau / (1 + np.exp(-tau * (r - 1))) * a
    case losses.NegativeLogLikelihood():
      return -pi
  raise AssertionError(f"no formula for {loss}")


@EACH
def test_the_loss_is_that_of_a_float64_reference(loss):
  compiled = jax.jit(loss)
  for seed in range(5):
    row = packed_rows.draw(seed)
    expected = np.zeros(len(row.logprobs))
    for indices, columns in packed_rows.trajectories(row):
      expected[indices] = _expected(loss, *columns)
    found = compiled(row).loss
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@EACH
def test_the_gradient_is_that_of_finite_differences(loss):
  # Of the reference, with what has no gradient held fixed. Losses that weigh
  # log pi have a gradient of -weight * A, which is loss / log pi.
  row = packed_rows.draw(11)

  def total(logprobs):
    return loss(row._replace(logprobs=logprobs)).loss.sum()

  found = np.asarray(jax.jit(jax.grad(total))(row.logprobs), np.float64)
  weighs_logprobs = isinstance(
    loss, (losses.Cispo, losses.Reinforce, losses.Aipo, losses.Topr)
  )
  for indices, (pi, *rest) in packed_rows.trajectories(row):
    if weighs_logprobs:
      expected = _expected(loss, pi, *rest) / pi
    else:
      expected = [
        sum(
          sign * _expected(loss, pi + sign * step, *rest).sum() / 2e-6
          for sign in (1, -1)
        )
        for step in 1e-6 * np.eye(len(pi))
      ]
    np.testing.assert_allclose(found[indices], expected, rtol=2e-4, atol=1e-6)
