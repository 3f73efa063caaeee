"""Numbers that others have published: each names where they stand.

[derived] marks what follows from a source's formula by hand, rather than being
printed there.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl.algorithms import corrections, kl, loss_aggregation, losses
from tests.helpers.packed_rows import make, of_ratios

pytestmark = [
  pytest.mark.compiled,
  pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"]),
]


def _total(wrap, loss, row):
  """The loss as an update has it: the sum over the count."""
  total, count = wrap(lambda r: loss.aggregate(loss(r).loss, r))(row)
  return total / count


def test_truncated_and_masked_weights_of_verl(wrap):
  # verl, tests/trainer/ppo/test_rollout_corr.py, test_mask_mode: old -2
  # against rollout -1 and -2.5; a band of 0.5 to 2 rejects only the first.
  row = make([-2.0, -2.0], behaviour=[-1.0, -2.5], segments=[1, 2])
  found = wrap(corrections.TokenTruncated())(row)
  np.testing.assert_allclose(found.weights, [0.368, 1.649], atol=5e-4)
  for band in (
    corrections.IcePop(low=0.5, high=2.0),
    corrections.SequenceMasked(low=0.5, high=2.0),
  ):
    found = wrap(band)(row)
    np.testing.assert_allclose(found.weights, [0, 1.649], atol=5e-4)
    assert found.masked.tolist() == [True, False]


def test_ice_pop_of_verl(wrap):
  # verl, the same file: ratios 0.4, 0.8, 6 in a band of 0.5 to 5.
  row = make(np.log([0.4, 0.8, 6.0]), behaviour=0.0)
  found = wrap(corrections.IcePop())(row)
  weights = np.asarray(found.weights, np.float64)
  np.testing.assert_allclose(weights, [0, 0.8, 0], rtol=1e-6)
  assert found.masked.mean() == pytest.approx(2 / 3)
  assert weights.std() == pytest.approx(0.3771236, abs=1e-6)
  share = weights.sum() ** 2 / (3 * (weights**2).sum())
  assert share == pytest.approx(1 / 3)


def test_bounds_of_rejection_and_veto_of_verl(wrap):
  # verl, rollout_corr_helper.py: geometric mean within 0.999 and 1.001, no
  # token below 1e-4.
  row = make(
    np.log([1.0009, 1.0011, 1e-5, 2e-4]), behaviour=0.0, segments=[1, 2, 3, 4]
  )
  rejected = wrap(corrections.GeometricRejection())(row).masked
  assert rejected.tolist() == [False, True, True, True]
  vetoed = wrap(corrections.Veto())(row).masked
  assert vetoed.tolist() == [False, False, True, False]


def test_cispo_of_slime(wrap):
  # slime, tests/test_cispo_loss.py: ratios and clamped ratios for a band of
  # 0.2 and 0.28. The losses are [derived]: 1 * 1 * 0.7, and so on.
  row = make([-0.7, -1.2, -0.4, -2.1], advantages=[1, -0.5, 2, -1])
  row = row._replace(
    old=row.logprobs - jnp.log(jnp.asarray([1, 1.14, 1.56, 0.4]))
  )
  loss = losses.Cispo(clip_low=0.2, clip_high=0.28)
  terms = wrap(loss)(row)
  np.testing.assert_allclose(terms.loss, [0.7, -0.684, 1.024, -1.68], rtol=1e-5)
  assert terms.clipped.tolist() == [False, False, True, True]

  def total(logprobs):
    return loss(row._replace(logprobs=logprobs)).loss.sum()

  # No gradient through the ratio: it is -clamped * A.
  gradient = wrap(jax.grad(total))(row.logprobs)
  clamped = np.asarray([1, 1.14, 1.28, 0.8])
  np.testing.assert_allclose(gradient, -clamped * [1, -0.5, 2, -1], rtol=1e-5)


@pytest.mark.parametrize("loss", [losses.Gspo, losses.GspoToken])
@pytest.mark.parametrize(("gap", "ratio"), [(0.5, 1.6487), (1.0, 2.7183)])
def test_the_ratio_of_a_sequence_of_areal(wrap, loss, gap, ratio):
  # AReaL, tests/test_functional.py: the same gap at every token.
  row = make([-1.0, -2.0, -3.0], old=[-1.0 - gap, -2.0 - gap, -3.0 - gap])
  terms = wrap(loss(clip_low=1.0, clip_high=math.inf))(row)
  np.testing.assert_allclose(terms.loss, [-ratio] * 3, atol=5e-5)


@pytest.mark.parametrize("loss", [losses.Gspo(), losses.GspoToken()])
def test_the_loss_of_unequal_advantages_of_areal(wrap, loss):
  # AReaL, tests/test_functional.py: advantages 1, 2, 3, 4 and 0.5 four times
  # at ratio 1.
  row = make(
    [-1.0] * 8, advantages=[1, 2, 3, 4] + [0.5] * 4, segments=[1] * 4 + [2] * 4
  )
  assert _total(wrap, loss, row) == pytest.approx(-1.5)


@pytest.mark.parametrize(
  "loss",
  [
    losses.ClippedSurrogate(
      clip_high=0.2, aggregate=loss_aggregation.SequenceMean()
    ),
    losses.GspoToken(clip_low=0.2, clip_high=0.2),
  ],
  ids=["grpo", "gspo-token"],
)
def test_packed_and_unpacked_losses_of_tunix(wrap, loss):
  # tunix, tests/rl/algo_core_test.py, test_grpo_loss_fn_packed_equals_unpacked:
  # advantages 1.5 on 3 tokens and 3.0 on 1. A mean over rows would be -1.875.
  packed = make(
    [-1.0, -2.0, -0.5, -3.0],
    advantages=[1.5, 1.5, 1.5, 3.0],
    segments=[1, 1, 1, 2],
  )
  assert _total(wrap, loss, packed) == pytest.approx(-2.25)
  rows = [
    make([-1.0, -2.0, -0.5], advantages=1.5),
    make([-3.0, 0, 0], advantages=3.0, sampled=[True, False, False]),
  ]
  batch = jax.tree.map(lambda *x: jnp.stack(x), *rows)
  sums, counts = wrap(jax.vmap(lambda r: loss.aggregate(loss(r).loss, r)))(
    batch
  )
  assert sums.sum() / counts.sum() == pytest.approx(-2.25)


def test_decoupled_ppo(wrap):
  # [derived] from arXiv 2110.00641 and AReaL, 2505.24298: behaviour 0.1,
  # proximal 0.2, current 0.22, A = 1, bound 0.2: weight 2, u = 1.1, so 2.2.
  row = make([math.log(0.22)], old=[math.log(0.2)], behaviour=[math.log(0.1)])
  weights = wrap(corrections.TokenTruncated(cap=math.inf))(row).weights
  terms = wrap(losses.ClippedSurrogate(clip_low=0.2, clip_high=0.2))(row)
  assert weights == pytest.approx(2, rel=1e-5)
  assert terms.loss == pytest.approx(-1.1, rel=1e-5)
  assert weights * terms.loss == pytest.approx(-2.2, rel=1e-5)


@pytest.mark.parametrize(
  ("estimator", "value"),
  [("k1", 0.5), ("k2", 0.125), ("k3", 0.10653), ("k3_plus", 0.10653)],
)
def test_estimates_of_kl(wrap, estimator, value):
  # [derived] from Schulman 2020, "Approximating KL divergence", at d = 0.5.
  gap = jnp.asarray([0.5])
  found = wrap(lambda x: kl.estimate(estimator, x))(gap)
  assert found == pytest.approx(value, abs=5e-6)


def test_k3_with_the_gradient_of_k2_of_verl(wrap):
  # verl, tests/trainer/ppo/test_core_algos_on_cpu.py: the value of k3_plus is
  # that of k3, its gradient that of k2.
  gaps = jnp.asarray(np.random.default_rng(0).normal(size=20), jnp.float32)

  def run(estimator):
    def total(x):
      values = kl.estimate(estimator, x)
      return values.sum(), values

    return wrap(jax.grad(total, has_aux=True))(gaps)

  gradient, values = run("k3_plus")
  np.testing.assert_allclose(values, run("k3")[1], rtol=1e-6)
  np.testing.assert_allclose(gradient, run("k2")[0], rtol=1e-6)


def test_the_bounds_of_dapo_and_the_dual_clip(wrap):
  # [derived] DAPO, arXiv 2503.14476: 0.2 and 0.28; dual clip, 1912.09729: a
  # ratio of 4 with A = -1 and c = 3 costs 3.
  row = of_ratios([1.3, 0.7, 4.0], advantages=[1, -1, -1])
  terms = wrap(losses.ClippedSurrogate(dual_clip=3.0))(row)
  np.testing.assert_allclose(terms.loss, [-1.28, 0.8, 3], rtol=1e-6)


def test_the_soft_gate_of_sapo_leaves_on_policy_gradients_alone(wrap):
  # [derived] arXiv 2511.20347: 4 / tau makes the slope 1 at ratio 1, whatever
  # tau is; the defaults are 1 and 1.05.
  row = make([-1.0, -2.0], advantages=[2, -3])
  loss = losses.Sapo()
  np.testing.assert_allclose(
    wrap(loss)(row).loss, [-2 * 2 / 1.0, 3 * 2 / 1.05], rtol=1e-6
  )

  def total(logprobs):
    return loss(row._replace(logprobs=logprobs)).loss.sum()

  gradient = wrap(jax.grad(total))(row.logprobs)
  np.testing.assert_allclose(gradient, [-2, 3], rtol=1e-6)
