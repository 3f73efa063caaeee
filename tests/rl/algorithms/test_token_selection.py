"""Selected tokens against float64 references of their paper's formulas."""

import collections
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl.algorithms import losses, packed_row, token_selection
from tests.helpers import packed_rows

pytestmark = pytest.mark.compiled

WRAPS = pytest.mark.parametrize(
  "wrap", [jax.jit, lambda f: f], ids=["jit", "eager"]
)
LOSS = losses.ClippedSurrogate(clip_low=0.2, clip_high=0.2)
UNCLIPPED = losses.ClippedSurrogate(clip_low=1.0, clip_high=math.inf)


def draw(seed: int) -> packed_row.Row:
  """Four rows; where nothing was sampled stands nan."""
  rows = [packed_rows.draw(4 * seed + i, lengths=(9, 4, 7)) for i in range(4)]
  rows = jax.tree.map(lambda *x: jnp.stack(x), *rows)
  for name in packed_rows.COLUMNS:
    known = jnp.where(rows.sampled, getattr(rows, name), math.nan)
    rows = rows._replace(**{name: known})
  return rows


def covariances(rows: packed_row.Row) -> np.ndarray:
  """Eq. 10 of the sampled tokens, one after another, in float64."""
  which = np.asarray(rows.sampled)
  pi, better = (
    np.asarray(x, np.float64)[which] for x in (rows.logprobs, rows.advantages)
  )
  return (pi - pi.mean()) * (better - better.mean())


def selected(what, loss, rows):
  """Terms and sums, and the gradient in the log-probabilities."""

  def total(logprobs):
    now = rows._replace(logprobs=logprobs)
    terms, sums = what(jax.vmap(loss)(now), now)
    return terms.loss.sum(), (terms, sums)

  return jax.grad(total, has_aux=True)(rows.logprobs)


@WRAPS
def test_the_tokens_of_most_covariance_are_held_near_the_old_policy(wrap):
  what = token_selection.KlCov(share=0.25, weight=0.7)
  run = wrap(lambda rows: selected(what, UNCLIPPED, rows))
  for seed in range(3):
    rows = draw(seed)
    slopes, (terms, sums) = run(rows)
    which = np.asarray(rows.sampled)
    pi, old, better = (
      np.asarray(getattr(rows, name), np.float64)[which]
      for name in ("logprobs", "old", "advantages")
    )
    found = covariances(rows)
    costly = np.argsort(-found)[: round(0.25 * len(found))]
    # Eq. 14, minimised, with the estimate of listing 1.
    loss, slope = -np.exp(pi - old) * better, -np.exp(pi - old) * better
    loss[costly] += 0.7 * np.abs(pi - old)[costly]
    slope[costly] += 0.7 * np.sign(pi - old)[costly]
    np.testing.assert_allclose(terms.loss[which], loss, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(slopes[which], slope, rtol=1e-5, atol=1e-6)
    assert not np.asarray(terms.loss)[~which].any()
    assert not np.asarray(slopes)[~which].any()
    assert not np.asarray(terms.clipped).any()
    assert sums.covariance == pytest.approx(found.sum(), rel=1e-5)
    assert sums.selected == len(costly)


@WRAPS
def test_some_tokens_between_the_bounds_have_no_loss(wrap):
  what = token_selection.ClipCov(share=0.1, low=0.1, high=0.6)
  run = wrap(lambda rows: selected(what, LOSS, rows))
  for seed in range(3):
    rows = draw(seed)
    plain = jax.vmap(LOSS)(rows)
    slopes, (terms, sums) = run(rows)
    which = np.asarray(rows.sampled)
    drawn = np.asarray(terms.clipped & ~plain.clipped)[which]
    found = covariances(rows)
    within = (found > 0.1) & (found < 0.6) & ~np.asarray(plain.clipped)[which]
    num_drawn = round(0.1 * len(found))
    assert drawn.sum() == num_drawn < within.sum()
    assert within[drawn].all()
    # Eq. 12: what is not drawn is as it was.
    expected = np.where(drawn, 0.0, np.asarray(plain.loss)[which])
    np.testing.assert_allclose(terms.loss[which], expected, rtol=1e-6)
    assert not np.asarray(slopes)[which][drawn].any()
    assert np.asarray(slopes)[which][within & ~drawn].all()
    assert not np.asarray(terms.loss)[~which].any()
    assert not np.asarray(slopes)[~which].any()
    assert sums.selected == num_drawn
    again = run(rows)[1][0]
    assert again.clipped.tolist() == terms.clipped.tolist()


def test_every_token_between_the_bounds_is_drawn_as_often_as_another():
  what = token_selection.ClipCov(share=0.1, low=0.1, high=math.inf)
  run = jax.jit(lambda rows: what(jax.vmap(UNCLIPPED)(rows), rows)[0].clipped)
  rows, times = draw(0), collections.Counter[int]()
  for i in range(400):
    # Another batch, but for what the covariance is of.
    drawn = run(rows._replace(behaviour=rows.behaviour - i / 64))
    times.update(np.flatnonzero(np.asarray(drawn)[np.asarray(rows.sampled)]))
  within = np.flatnonzero(covariances(rows) > 0.1)
  num_drawn = round(0.1 * int(rows.sampled.sum()))
  assert sorted(times) == within.tolist()
  # 400 draws of a share p of the tokens; five standard deviations.
  p = num_drawn / len(within)
  spread = 5 * math.sqrt(400 * p * (1 - p))
  assert all(abs(n - 400 * p) < spread for n in times.values())


def test_without_a_token_between_the_bounds_none_is_drawn():
  what = token_selection.ClipCov(share=0.5, low=100.0, high=200.0)
  rows = draw(0)
  plain = jax.vmap(LOSS)(rows)
  terms, sums = what(plain, rows)
  assert terms.loss.tolist() == plain.loss.tolist()
  assert sums.selected == 0


@pytest.mark.parametrize(
  ("make", "words"),
  [
    (lambda: token_selection.ClipCov(share=0.0), "clip_cov.share=0.0 must"),
    (lambda: token_selection.ClipCov(share=1.5), "clip_cov.share=1.5 must"),
    (lambda: token_selection.ClipCov(low=math.inf), "clip_cov.low=inf must"),
    (lambda: token_selection.ClipCov(high=0.5), "clip_cov.high=0.5 must"),
    (lambda: token_selection.ClipCov(high=math.nan), "clip_cov.high=nan must"),
    (lambda: token_selection.KlCov(share=math.nan), "kl_cov.share=nan must"),
    (lambda: token_selection.KlCov(weight=0.0), "kl_cov.weight=0.0 must"),
  ],
)
def test_a_setting_that_cannot_work_is_refused(make, words):
  with pytest.raises(ValueError, match=words):
    make().validate()
