"""DPO against its formula in float64, and against numbers of its paper."""

import math

import jax
import numpy as np
import pytest

from rl.algorithms import preference_loss
from tests.helpers import packed_rows

pytestmark = pytest.mark.compiled

WRAPS = pytest.mark.parametrize(
  "wrap", [jax.jit, lambda f: f], ids=["jit", "eager"]
)


def pairs(seed):
  """A row of two pairs; the preferred answers have the odd segments."""
  row = packed_rows.draw(seed, lengths=(4, 3, 6, 5))
  signs = np.where(np.asarray(row.segments) % 2, 1.0, -1.0)
  return row._replace(advantages=np.float32(signs))


def mean(loss, row):
  """The loss of an update whose only row this is."""
  sums, count = loss.aggregate(loss(row).loss, row)
  return sums / count


def formula(row, beta, smoothing):
  """Loss and its gradient in the log-probabilities, pair by pair: eq. 7."""
  sampled, segments = np.asarray(row.sampled), np.asarray(row.segments)
  gap = np.asarray(row.logprobs - row.old, np.float64)
  losses, gradient = [], np.zeros(len(gap))
  for chosen, rejected in ((1, 2), (3, 4)):
    won, lost = (sampled & (segments == s) for s in (chosen, rejected))
    margin = beta * (gap[won].sum() - gap[lost].sum())
    right = 1 / (1 + np.exp(-margin))
    losses.append(
      -(1 - smoothing) * np.log(right) - smoothing * np.log(1 - right)
    )
    # d/dm of -log sigmoid(m) is -(1 - sigmoid(m)), and sigmoid(m) swapped.
    slope = beta * (smoothing * right - (1 - smoothing) * (1 - right)) / 2
    gradient[won], gradient[lost] = slope, -slope
  return np.mean(losses), gradient


@WRAPS
@pytest.mark.parametrize(("beta", "smoothing"), [(0.1, 0.0), (2.0, 0.2)])
def test_loss_and_gradient_are_those_of_the_paper(wrap, beta, smoothing):
  loss = preference_loss.Dpo(beta=beta, label_smoothing=smoothing)
  for seed in range(3):
    row = pairs(seed)
    value, gradient = formula(row, beta, smoothing)
    found = wrap(lambda row: mean(loss, row))(row)
    assert found == pytest.approx(value, rel=1e-5)
    slope = wrap(
      jax.grad(lambda x, row=row: mean(loss, row._replace(logprobs=x)))
    )(row.logprobs)
    np.testing.assert_allclose(slope, gradient, rtol=1e-4, atol=1e-6)


def test_at_the_reference_every_pair_costs_ln_2_and_none_is_right():
  row = pairs(0)
  row = row._replace(logprobs=row.old)
  terms = preference_loss.Dpo()(row)
  sampled = np.asarray(row.sampled)
  np.testing.assert_allclose(terms.loss[sampled], math.log(2), rtol=1e-6)
  assert not terms.loss[~sampled].any()
  assert not terms.margin.any()
  assert not terms.clipped.any()


def test_the_margin_of_a_pair_is_beta_times_its_log_odds():
  # The preferred answer has become e^(0.5 + 0.5) likelier, the other e^-1: the
  # margin is 0.1 * (1 + 1). The second pair is the wrong way round.
  row = packed_rows.make(
    [-1.0, -2.0, -3.0, -1.0, -1.0],
    old=[-1.5, -2.5, -2.0, 0.0, -2.0],
    advantages=[1, 1, -1, 1, -1],
    segments=[1, 1, 2, 3, 4],
  )
  terms = preference_loss.Dpo(beta=0.1)(row)
  np.testing.assert_allclose(
    terms.margin, [0.2, 0.2, 0.2, -0.2, -0.2], rtol=1e-5
  )


def test_what_was_not_sampled_changes_nothing():
  loss, row = preference_loss.Dpo(), pairs(1)
  for poisoned in packed_rows.poisoned(row):
    np.testing.assert_array_equal(loss(poisoned).loss, loss(row).loss)


@pytest.mark.parametrize(
  ("fields", "told"),
  [
    ({"beta": 0.0}, "beta=0.0 must be a finite number above 0"),
    ({"label_smoothing": 0.5}, "label_smoothing=0.5 must be in"),
  ],
)
def test_settings_that_cannot_work_are_refused(fields, told):
  with pytest.raises(ValueError, match=told):
    preference_loss.Dpo(**fields).validate()
