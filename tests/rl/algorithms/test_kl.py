"""KL estimates: values, gradients, and what they mean on average."""

import math
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl.algorithms import corrections, kl, packed_row

pytestmark = pytest.mark.compiled

WRAPS = pytest.mark.parametrize(
  "wrap", [jax.jit, lambda f: f], ids=["jit", "eager"]
)
ESTIMATORS = get_args(kl.KlEstimator)
EACH = pytest.mark.parametrize("estimator", ESTIMATORS)


def _penalty(estimator, late=None):
  where = "reward" if estimator == "k1" else "loss"
  return kl.KlPenalty(estimator=estimator, where=where, late=late)


def _row(logprobs, sampled, behaviour=None):
  return packed_row.Row(
    logprobs=logprobs,
    old=jnp.full_like(logprobs, jnp.nan),
    behaviour=logprobs if behaviour is None else behaviour,
    advantages=jnp.zeros_like(logprobs),
    sampled=sampled,
    segments=jnp.ones(logprobs.shape, jnp.int32),
  )


@WRAPS
@pytest.mark.parametrize(
  ("estimator", "values", "slopes"),
  [
    # At d = 1 and -2; of k3 1/e - 1 + 1 and e^2 - 1 - 2, slopes 1 - e^-d.
    ("k1", [1, -2], [1, 1]),
    ("k2", [0.5, 2], [1, -2]),
    ("k3", [0.3678794, 4.3890561], [0.6321206, -6.3890561]),
    ("k3_plus", [0.3678794, 4.3890561], [1, -2]),
  ],
)
def test_values_and_slopes_by_hand(wrap, estimator, values, slopes):
  gaps = jnp.asarray([1.0, -2.0])
  found = wrap(lambda x: kl.estimate(estimator, x))(gaps)
  np.testing.assert_allclose(found, values, rtol=1e-5)
  gradient = jax.grad(lambda x: kl.estimate(estimator, x).sum())
  np.testing.assert_allclose(wrap(gradient)(gaps), slopes, rtol=1e-5)


def _softmax(logits):
  return jnp.exp(logits - jax.nn.logsumexp(logits))


def _kl(logits, reference):
  p = jax.nn.log_softmax(logits)
  return (jnp.exp(p) * (p - jax.nn.log_softmax(reference))).sum()


@EACH
def test_the_mean_value_and_gradient_over_all_tokens_are_as_documented(
  estimator,
):
  # Expectations over a vocabulary of 6, in closed form.
  rng = np.random.default_rng(0)
  logits, reference = jnp.asarray(rng.normal(size=(2, 6)), jnp.float32)

  def mean(moving):
    gaps = jax.nn.log_softmax(moving) - jax.nn.log_softmax(reference)
    # The tokens are sampled from the policy as it is.
    chances = _softmax(jax.lax.stop_gradient(moving))
    return (chances * kl.estimate(estimator, gaps)).sum()

  value, gradient = jax.value_and_grad(mean)(logits)
  true_value, true = jax.value_and_grad(_kl)(logits, reference)
  reverse = jax.grad(lambda x: _kl(reference, x))(logits)
  expected = {"k1": 0 * true, "k2": true, "k3": reverse, "k3_plus": true}
  np.testing.assert_allclose(
    gradient, expected[estimator], rtol=1e-4, atol=1e-6
  )
  assert np.abs(true).max() > 0.05
  is_exact = abs(value - true_value) < 1e-6
  assert is_exact == (estimator != "k2")


@WRAPS
@EACH
def test_k3_stays_exact_where_the_policies_are_nearly_equal(wrap, estimator):
  # d = 1e-4: k2 and k3 are 5e-9, less than float32 resolves beside 1.
  found = wrap(lambda x: kl.estimate(estimator, x))(jnp.asarray([1e-4]))
  expected = 1e-4 if estimator == "k1" else 5e-9
  np.testing.assert_allclose(found, expected, rtol=1e-3)


@EACH
@pytest.mark.parametrize("gap", [80.0, -80.0])
def test_a_gap_of_80_nats_has_a_finite_value_and_gradient(estimator, gap):
  run = jax.value_and_grad(lambda x: kl.estimate(estimator, x).sum())
  value, gradient = run(jnp.asarray([gap]))
  assert math.isfinite(value)
  assert np.isfinite(gradient).all()
  # It pulls the policy back, or lets it be; k1 does neither.
  assert estimator == "k1" or (gradient * gap >= 0).all()


@WRAPS
@EACH
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_padding_leaks_into_neither_value_nor_gradient(wrap, estimator, poison):
  sampled = jnp.asarray([True, False, True, False])

  def run(logprobs, reference):
    def total(x):
      weighed = _penalty(estimator, corrections.TokenTruncated())
      found = weighed(_row(x, sampled, jnp.zeros(4)), reference)
      return found.sum(), found

    return jax.grad(total, has_aux=True)(logprobs)

  run = wrap(run)
  clean = jnp.asarray([-1.0, -2.0, -3.0, 0.0]), jnp.asarray([-1.5] * 4)
  gradient, values = run(*clean)
  assert values[~sampled].tolist() == [0, 0]
  for column in (0, 1):
    dirty = [
      jnp.where(sampled, x, poison) if i == column else x
      for i, x in enumerate(clean)
    ]
    found, again = run(*dirty)
    assert found.tolist() == gradient.tolist()
    assert again.tolist() == values.tolist()


@EACH
def test_batches_have_the_estimates_of_their_rows(estimator):
  rng = np.random.default_rng(1)
  logprobs, reference = jnp.asarray(rng.normal(size=(2, 3, 4)))
  sampled = jnp.asarray(rng.random((3, 4)) < 0.5)
  run = _penalty(estimator, corrections.SequenceTruncated())
  whole = jax.vmap(run)(_row(logprobs, sampled, logprobs - 0.1), reference)
  rows = [
    run(_row(own, mask, own - 0.1), other)
    for own, mask, other in zip(logprobs, sampled, reference, strict=True)
  ]
  np.testing.assert_array_equal(whole, rows)


@WRAPS
def test_late_tokens_are_weighed_without_a_gradient_of_the_weight(wrap):
  # Twice, half and eight times as likely as when they were sampled, of which 2
  # is the cap; gaps of 1, 2 and -1 nats are slopes of k2.
  now = jnp.asarray([-1.0, -2.0, -3.0])
  behaviour = now - jnp.log(jnp.asarray([2.0, 0.5, 8.0]))
  reference = now - jnp.asarray([1.0, 2.0, -1.0])
  penalty = _penalty("k2", corrections.TokenTruncated())
  everything = jnp.ones(3, bool)

  def run(own):
    found = penalty(_row(own, everything, behaviour), reference)
    return found.sum(), found

  gradient, values = wrap(jax.grad(run, has_aux=True))(now)
  np.testing.assert_allclose(values, [2 / 2, 0.5 * 2, 2 / 2], rtol=1e-6)
  np.testing.assert_allclose(gradient, [2, 1, -2], rtol=1e-6)


def test_a_weight_that_compares_the_policy_with_itself_is_refused():
  penalty = kl.KlPenalty(late=corrections.DppoMask())
  with pytest.raises(ValueError, match=r"late=dppo_mask.*token_truncated"):
    penalty.validate()


def test_k1_as_a_loss_is_refused_with_the_way_out():
  with pytest.raises(ValueError, match="mean 0; use k2 or k3_plus, or where"):
    kl.KlPenalty(estimator="k1", where="loss").validate()


@pytest.mark.parametrize("weight", [0.0, -1.0, math.inf, math.nan])
def test_a_weight_that_is_no_price_is_refused(weight):
  with pytest.raises(ValueError, match=f"weight={weight}"):
    kl.KlPenalty(weight=weight).validate()


@EACH
def test_all_other_settings_are_accepted(estimator):
  assert _penalty(estimator).validate() is None
  assert kl.KlPenalty().validate() is None
