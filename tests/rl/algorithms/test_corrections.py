"""Weights and masks against numbers worked out by hand and NumPy."""

import math

import jax
import numpy as np
import pytest

from rl.algorithms import corrections, losses
from tests.helpers import packed_rows
from tests.helpers.packed_rows import make

pytestmark = pytest.mark.compiled

WRAPS = pytest.mark.parametrize(
  "wrap", [jax.jit, lambda f: f], ids=["jit", "eager"]
)
EACH = pytest.mark.parametrize("correction", packed_rows.CORRECTIONS, ids=str)


def _of_rhos(rhos, **columns):
  """A row with these ratios of old over behaviour."""
  behaviour = -1.0 - np.arange(len(rhos))
  old = behaviour + np.log(rhos)
  return make(old, behaviour=behaviour, **columns)


def _check(wrap, correction, row, weights, *, truncated=(), masked=()):
  """The last two: the indices where they are true."""
  found = wrap(correction)(row)
  np.testing.assert_allclose(found.weights, weights, rtol=1e-5)
  assert np.flatnonzero(found.truncated).tolist() == list(truncated)
  assert np.flatnonzero(found.masked).tolist() == list(masked)


def test_every_correction_is_looked_at_here():
  found = {type(x) for x in packed_rows.CORRECTIONS}
  assert found == packed_rows.frozen_callables(corrections)
  assert all(
    isinstance(x, corrections.Correction) for x in packed_rows.CORRECTIONS
  )


@WRAPS
def test_a_token_weighs_its_ratio_up_to_the_cap(wrap):
  row = _of_rhos([0.25, 1, 3])
  token = corrections.TokenTruncated()
  _check(wrap, token, row, [0.25, 1, 2], truncated=[2])
  _check(wrap, corrections.TokenTruncated(cap=math.inf), row, [0.25, 1, 3])


@WRAPS
def test_a_trajectory_weighs_the_product_of_its_ratios(wrap):
  # 0.5 * 3 = 1.5 and 2 * 4 = 8, which the cap of 2 cuts.
  row = _of_rhos([0.5, 3, 2, 4], segments=[1, 1, 2, 2])
  sequence = corrections.SequenceTruncated()
  _check(wrap, sequence, row, [1.5, 1.5, 2, 2], truncated=[2, 3])


@WRAPS
def test_ice_pop_masks_tokens_out_of_the_band(wrap):
  row = _of_rhos([0.4, 0.6, 4.9, 5.1])
  _check(wrap, corrections.IcePop(), row, [0, 0.6, 4.9, 0], masked=[0, 3])


@WRAPS
def test_a_trajectory_whose_product_is_out_of_the_band_is_masked(wrap):
  # 0.5 * 3 = 1.5, and 2 * 1.5 = 3 is above 2.
  row = _of_rhos([0.5, 3, 2, 1.5], segments=[1, 1, 2, 2])
  masked = corrections.SequenceMasked()
  _check(wrap, masked, row, [1.5, 1.5, 0, 0], masked=[2, 3])


@WRAPS
def test_geometric_rejection_looks_at_the_mean_and_weighs_nothing(wrap):
  # Geometric means 1 and sqrt(1.0081) = 1.00404; the first is kept, weight 1.
  row = _of_rhos([2, 0.5, 1.0081, 1], segments=[1, 1, 2, 2])
  geometric = corrections.GeometricRejection()
  _check(wrap, geometric, row, [1, 1, 0, 0], masked=[2, 3])


@WRAPS
def test_one_token_out_of_thin_air_vetoes_its_trajectory(wrap):
  row = _of_rhos([1, 0.9e-4, 1.1e-4, 9], segments=[1, 1, 2, 2])
  _check(wrap, corrections.Veto(), row, [0, 0, 1, 1], masked=[0, 1])


@WRAPS
def test_bad_trajectories_that_the_policy_left_are_masked(wrap):
  # mean log mu / pi: 0.2 in trajectories 1 and 2, of which only the bad one is
  # masked; -0.2 in the third, which the policy moved towards. Old is unused.
  row = make(
    [-1.1, -1.3, -1.1, -1.3, -0.8],
    old=-9.0,
    behaviour=-1.0,
    advantages=[-1, -1, 1, 1, -1],
    segments=[1, 1, 2, 2, 3],
  )
  mask = corrections.OffPolicySequenceMask(delta=0.19)
  _check(wrap, mask, row, [0, 0, 1, 1, 1], masked=[0, 1])
  mask = corrections.OffPolicySequenceMask(delta=0.21)
  _check(wrap, mask, row, [1, 1, 1, 1, 1])


@WRAPS
def test_dppo_masks_what_moved_far_and_is_pushed_further(wrap):
  # Probabilities 0.1 -> 0.4 and 0.6 -> 0.3, good and bad; 0.3 is beyond 0.2.
  # 0.001 -> 0.1 is a ratio of 100, but near.
  row = make(
    np.log([0.4, 0.4, 0.3, 0.3, 0.1]),
    old=-9.0,
    behaviour=np.log([0.1, 0.1, 0.6, 0.6, 0.001]),
    advantages=[1, -1, 1, -1, 1],
  )
  _check(wrap, corrections.DppoMask(), row, [0, 1, 1, 0, 1], masked=[0, 3])


@WRAPS
def test_both_multiply_weights_and_unite_masks(wrap):
  # The first is cut to 2; the second trajectory is vetoed.
  row = _of_rhos([3, 0.5, 3, 1e-5], segments=[1, 1, 2, 2])
  both = corrections.Both(
    first=corrections.TokenTruncated(), second=corrections.Veto()
  )
  _check(wrap, both, row, [2, 0.5, 0, 0], truncated=[0, 2], masked=[2, 3])


def _expected(correction, pi, old, mu, a):
  """The weights of one trajectory's tokens, by the papers' formulas."""
  ones = np.ones(len(pi))
  rho, product = np.exp(old - mu), np.prod(np.exp(old - mu)) * ones
  match correction:
    case corrections.TokenTruncated(cap=cap):
      return np.minimum(rho, cap)
    case corrections.SequenceTruncated(cap=cap):
      return np.minimum(product, cap)
    case corrections.IcePop(low=low, high=high):
      return rho * ((low <= rho) & (rho <= high))
    case corrections.SequenceMasked(low=low, high=high):
      return product * ((low <= product) & (product <= high))
    case corrections.GeometricRejection(low=low, high=high):
      return ones * (low <= product[0] ** (1 / len(pi)) <= high)
    case corrections.Veto(least=least):
      return ones * (rho.min() >= least)
    case corrections.OffPolicySequenceMask(delta=delta):
      return np.where((a < 0) & ((mu - pi).mean() > delta), 0, 1)
    case corrections.DppoMask(bound=bound):
      moved = np.exp(pi) - np.exp(mu)
      return np.where(
        (abs(moved) > bound) & (np.sign(moved) == np.sign(a)), 0, 1
      )
    case corrections.Both(first=first, second=second):
      parts = [_expected(x, pi, old, mu, a) for x in (first, second)]
      return parts[0] * parts[1]
  raise AssertionError(f"no formula for {correction}")


@pytest.mark.parametrize(
  "correction",
  [
    *packed_rows.CORRECTIONS,
    # Bounds in the middle of what the rows have.
    corrections.GeometricRejection(low=0.8, high=1.2),
    corrections.Veto(least=0.5),
    corrections.DppoMask(bound=0.05),
  ],
  ids=str,
)
def test_weights_are_those_of_a_float64_reference(correction):
  compiled = jax.jit(correction)
  for seed in range(8):
    row = packed_rows.draw(seed)
    found = compiled(row)
    for indices, columns in packed_rows.trajectories(row):
      expected = _expected(correction, *columns)
      np.testing.assert_allclose(found.weights[indices], expected, rtol=1e-5)
      assert found.masked[indices].tolist() == (expected == 0).tolist()


@WRAPS
@EACH
def test_on_policy_every_weight_is_exactly_1(wrap, correction):
  row = packed_rows.draw(1)
  row = row._replace(logprobs=row.behaviour, old=row.behaviour)
  found = wrap(correction)(row)
  assert found.weights.tolist() == [1.0] * len(row.logprobs)
  assert not found.truncated.any()
  assert not found.masked.any()


@WRAPS
@pytest.mark.parametrize(
  "correction",
  [
    x
    for x in packed_rows.CORRECTIONS
    if x.compares_old and not isinstance(x, corrections.Both)
  ],
  ids=str,
)
def test_in_bypass_mode_what_compares_old_weighs_exactly_1(wrap, correction):
  # Whatever the current policy is: the ratio of the loss has it already.
  row = packed_rows.draw(2)
  found = wrap(correction)(row._replace(old=row.behaviour))
  assert found.weights.tolist() == [1.0] * len(row.logprobs)
  assert not found.truncated.any()
  assert not found.masked.any()


@WRAPS
@EACH
def test_nothing_of_a_weight_has_a_gradient(wrap, correction):
  row = packed_rows.draw(4)

  def total(row):
    return correction(row).weights.sum()

  gradient = wrap(jax.grad(total, allow_int=True))(row)
  for name in packed_rows.COLUMNS:
    assert not np.asarray(getattr(gradient, name)).any()


@WRAPS
@EACH
def test_padding_leaks_into_neither_weights_nor_gradient(wrap, correction):
  def both(row):
    def total(logprobs):
      moved = row._replace(logprobs=logprobs)
      found = correction(moved)
      return (found.weights * losses.Reinforce()(moved).loss).sum(), found

    return jax.grad(total, has_aux=True)(row.logprobs)

  run = wrap(both)
  row = packed_rows.draw(3, lengths=(3, 2))
  gradient, weights = run(row)
  padding = ~np.asarray(row.sampled)
  assert padding.any()
  assert np.isfinite(weights.weights).all()
  assert not np.asarray(weights.masked | weights.truncated)[padding].any()
  for dirty in packed_rows.poisoned(row):
    found, again = run(dirty)
    assert found.tolist() == gradient.tolist()
    for old, new in zip(weights, again, strict=True):
      assert old.tolist() == new.tolist()


@EACH
def test_a_packed_row_has_the_weights_of_its_trajectories(correction):
  row = packed_rows.draw(6, lengths=(5, 5, 5))
  packed = jax.jit(correction)(row)
  segments = np.asarray(row.segments)
  for number, part in enumerate(packed_rows.alone(row), start=1):
    for one, alone in zip(packed, jax.jit(correction)(part), strict=True):
      np.testing.assert_allclose(one[segments == number], alone, rtol=1e-6)


@EACH
@pytest.mark.parametrize("gap", [80.0, -80.0])
def test_a_gap_of_80_nats_at_every_token_leaves_weights_finite(correction, gap):
  row = make(
    [-5.0] * 64, old=-90.0 + gap / 2, behaviour=-90.0 - gap / 2, advantages=-1
  )
  weights = jax.jit(correction)(row).weights
  assert np.isfinite(weights).all()
  assert np.isfinite(weights * losses.ClippedSurrogate()(row).loss).all()


def test_which_policy_is_compared_and_who_weighs():
  found = {
    type(x).__name__: (x.compares_old, x.weighs)
    for x in packed_rows.CORRECTIONS
  }
  assert found == {
    "TokenTruncated": (True, True),
    "SequenceTruncated": (True, True),
    "IcePop": (True, True),
    "SequenceMasked": (True, True),
    "GeometricRejection": (True, False),
    "Veto": (True, False),
    "OffPolicySequenceMask": (False, False),
    "DppoMask": (False, False),
    "Both": (True, True),
  }
  masks = corrections.Both(
    first=corrections.DppoMask(),
    second=corrections.OffPolicySequenceMask(delta=0.1),
  )
  assert (masks.compares_old, masks.weighs) == (False, False)


@pytest.mark.parametrize(
  ("make_correction", "words"),
  [
    (lambda: corrections.TokenTruncated(cap=0.9), "token_truncated.cap=0.9"),
    (lambda: corrections.SequenceTruncated(cap=math.nan), "cap=nan"),
    (lambda: corrections.IcePop(low=1.5), "ice_pop.low=1.5"),
    (lambda: corrections.SequenceMasked(high=0.9), "high=0.9"),
    (lambda: corrections.GeometricRejection(low=-1.0), "low=-1.0"),
    (lambda: corrections.Veto(least=0.0), "least=0.0"),
    (lambda: corrections.Veto(least=1.0), "least=1.0"),
    (lambda: corrections.OffPolicySequenceMask(delta=-0.1), "delta=-0.1"),
    (lambda: corrections.OffPolicySequenceMask(delta=math.inf), "delta=inf"),
    (lambda: corrections.DppoMask(bound=0.0), "bound=0.0"),
    (lambda: corrections.DppoMask(bound=1.1), "bound=1.1"),
    (
      lambda: corrections.Both(
        first=corrections.TokenTruncated(), second=corrections.IcePop()
      ),
      "first=token_truncated with second=ice_pop",
    ),
  ],
)
def test_a_setting_that_cannot_work_is_refused(make_correction, words):
  with pytest.raises(ValueError, match=words):
    make_correction().validate()


@EACH
def test_settings_as_they_stand_are_accepted(correction):
  assert correction.validate() is None
