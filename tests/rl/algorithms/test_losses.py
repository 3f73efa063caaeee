"""Losses against numbers worked out by hand and float64 references."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl.algorithms import loss_aggregation, losses
from tests.helpers import packed_rows
from tests.helpers.packed_rows import make, of_ratios

pytestmark = pytest.mark.compiled

WRAPS = pytest.mark.parametrize(
  "wrap", [jax.jit, lambda f: f], ids=["jit", "eager"]
)
EACH = pytest.mark.parametrize("loss", packed_rows.LOSSES, ids=str)
POLICY = [
  x
  for x in packed_rows.LOSSES
  if not isinstance(x, losses.NegativeLogLikelihood)
]


def _gradient(wrap, loss, row):
  """The gradient of the summed loss in the log-probabilities."""

  def total(logprobs):
    return loss(row._replace(logprobs=logprobs)).loss.sum()

  return wrap(jax.grad(total))(row.logprobs)


def _check(wrap, loss, row, values, gradient, clipped=None):
  terms = wrap(loss)(row)
  np.testing.assert_allclose(terms.loss, values, rtol=1e-5, atol=1e-6)
  clipped = [False] * len(values) if clipped is None else clipped
  assert terms.clipped.tolist() == clipped
  found = _gradient(wrap, loss, row)
  np.testing.assert_allclose(found, gradient, rtol=1e-5, atol=1e-6)


def test_every_loss_is_looked_at_here():
  found = {type(x) for x in packed_rows.LOSSES}
  assert found == packed_rows.frozen_callables(losses)
  assert all(isinstance(x, losses.Loss) for x in packed_rows.LOSSES)


@WRAPS
def test_gain_stops_growing_above_the_upper_bound(wrap):
  # Ratios 1, 2, 2 with advantages +1, +1, -1: the bound 1.28 caps only the
  # gain. Of -ratio * advantage where it is not clipped: -1, 0, +2.
  row = of_ratios([1, 2, 2], advantages=[1, 1, -1])
  loss = losses.ClippedSurrogate()
  _check(wrap, loss, row, [-1, -1.28, 2], [-1, 0, 2], [False, True, False])


@WRAPS
def test_a_bad_token_is_pushed_down_no_further_than_the_lower_bound(wrap):
  # Ratios 0.5, 0.5, 0.9 with advantages -1, +1, -1: 0.8 bounds the first; the
  # second may still come back up.
  row = of_ratios([0.5, 0.5, 0.9], advantages=[-1, 1, -1])
  loss = losses.ClippedSurrogate()
  _check(
    wrap, loss, row, [0.8, -0.5, 0.9], [0, -0.5, 0.9], [True, False, False]
  )


@WRAPS
def test_the_bounds_are_settings(wrap):
  row = of_ratios([2, 0.5], advantages=[1, -1])
  loss = losses.ClippedSurrogate(clip_low=0.1, clip_high=0.1)
  _check(wrap, loss, row, [-1.1, 0.9], [0, 0], [True, True])


@WRAPS
def test_bounds_of_1_and_infinity_clip_nothing(wrap):
  row = of_ratios([20, 0.01], advantages=[1, -1])
  loss = losses.ClippedSurrogate(clip_low=1.0, clip_high=math.inf)
  _check(wrap, loss, row, [-20, 0.01], [-20, 0.01])


@WRAPS
def test_at_a_bound_that_is_1_the_gradient_is_whole(wrap):
  # Both sides of the minimum are equal there; half of each would be 0.5.
  row = of_ratios([1, 1], advantages=[1, -1])
  loss = losses.ClippedSurrogate(clip_low=0.0, clip_high=0.0)
  assert _gradient(wrap, loss, row).tolist() == [-1, 1]


@WRAPS
def test_the_dual_clip_bounds_the_loss_of_bad_tokens_alone(wrap):
  # Ratio 10: for A = -2 the loss would be 20, and is 3 * 2 = 6. Below 3 and
  # for A > 0 nothing changes.
  row = of_ratios([10, 2.5, 10], advantages=[-2, -2, 2])
  loss = losses.ClippedSurrogate(dual_clip=3.0)
  _check(wrap, loss, row, [6, 5, -2.56], [0, 5, 0], [True, False, True])


@WRAPS
@pytest.mark.parametrize("loss", POLICY, ids=str)
def test_on_policy_the_gradient_is_that_of_plain_policy_gradient(wrap, loss):
  # -advantage at each sampled token, whatever the loss.
  row = make(
    [-1, -2, -3, -0.5],
    advantages=[2, 2, -3, 5],
    sampled=[True, True, True, False],
    segments=[1, 1, 2, 2],
  )
  gradient = _gradient(wrap, loss, row)
  np.testing.assert_allclose(gradient, [-2, -2, 3, 0], rtol=1e-6)


@WRAPS
def test_gspo_has_one_ratio_for_all_tokens_of_a_trajectory(wrap):
  # Gaps 0.1 and 0.3: s = exp(0.2) for both, and its gradient is s / 2 each, of
  # two losses. The third token is a trajectory of its own, whose ratio of e
  # is above the bound of 2.
  row = make(
    [-1, -2, -3],
    old=[-1.1, -2.3, -4],
    advantages=[-1, -1, 2],
    segments=[1, 1, 2],
  )
  loss = losses.Gspo(clip_low=0.5, clip_high=1.0)
  s = math.exp(0.2)
  _check(wrap, loss, row, [s, s, -4], [s, s, 0], [False, False, True])


@WRAPS
def test_gspo_takes_the_mean_of_unequal_advantages(wrap):
  row = make([-1, -2], advantages=[1, 2])
  _check(wrap, losses.Gspo(), row, [-1.5, -1.5], [-1.5, -1.5])


@WRAPS
def test_gspo_token_gives_each_token_its_own_advantage(wrap):
  # s = exp(0.2) as above, but token t's gradient is -s A_t.
  row = make([-1, -2], old=[-1.1, -2.3], advantages=[-1, 3])
  loss = losses.GspoToken(clip_low=0.5, clip_high=1.0)
  s = math.exp(0.2)
  _check(wrap, loss, row, [s, -3 * s], [s, -3 * s])


@WRAPS
@pytest.mark.parametrize("seed", range(3))
def test_gspo_token_is_gspo_where_advantages_are_equal(wrap, seed):
  row = packed_rows.draw(seed)
  whole = losses.Gspo(clip_low=0.1, clip_high=0.1)
  single = losses.GspoToken(clip_low=0.1, clip_high=0.1)
  found, expected = wrap(single)(row), wrap(whole)(row)
  np.testing.assert_allclose(found.loss, expected.loss, rtol=1e-5)
  assert found.clipped.tolist() == expected.clipped.tolist()
  np.testing.assert_allclose(
    _gradient(wrap, single, row), _gradient(wrap, whole, row), rtol=1e-5
  )


@WRAPS
def test_gmpo_clips_tokens_before_it_takes_their_mean(wrap):
  # log r is 0.5 and -1. Where A = 1 the first counts as 0.4, g = exp(-0.3);
  # where A = -2 the second counts as -0.4, g = exp(0.05). A token that is not
  # clipped has half the gradient of each of two losses.
  row = make(
    [-0.5, -3, -0.5, -3],
    old=[-1, -2, -1, -2],
    advantages=[1, 1, -2, -2],
    segments=[1, 1, 2, 2],
  )
  good, bad = math.exp(-0.3), 2 * math.exp(0.05)
  values, gradient = [-good, -good, bad, bad], [0, -good, bad, 0]
  clipped = [True, False, False, True]
  _check(wrap, losses.Gmpo(), row, values, gradient, clipped)


@WRAPS
def test_cispo_keeps_the_gradient_of_tokens_beyond_the_bounds(wrap):
  # Log-probabilities log(2) - 1 and log(0.1) - 2; weights 1.5 and 0.1, for
  # without clip_low nothing bounds it below. The gradient is -weight * A.
  row = of_ratios([2, 0.1], advantages=[1, -1])
  values = [1.5 * (1 - math.log(2)), 0.1 * (math.log(0.1) - 2)]
  loss = losses.Cispo(clip_high=0.5)
  _check(wrap, loss, row, values, [-1.5, 0.1], [True, False])
  values[1] *= 7
  loss = losses.Cispo(clip_low=0.3, clip_high=0.5)
  _check(wrap, loss, row, values, [-1.5, 0.7], [True, True])


@WRAPS
def test_reinforce_knows_no_ratio(wrap):
  row = of_ratios([2, 0.1], advantages=[3, -1])
  values = -np.asarray(row.logprobs) * [3, -1]
  _check(wrap, losses.Reinforce(), row, values, [-3, 1])


@WRAPS
def test_aipo_weighs_by_the_policy_that_sampled_up_to_a_cap(wrap):
  # pi / mu is 4 and 0.5, whatever old is.
  row = make(
    np.log([0.4, 0.2]), old=[0, -9], behaviour=np.log([0.1, 0.4]), advantages=2
  )
  values = [-3 * 2 * math.log(0.4), -0.5 * 2 * math.log(0.2)]
  _check(wrap, losses.Aipo(cap=3.0), row, values, [-6, -1], [True, False])


@WRAPS
def test_topr_tapers_whole_trajectories_of_bad_tokens_alone(wrap):
  # Trajectory 1: product of pi / mu = 0.5 * 0.8 = 0.4. Trajectory 2: 4 * 0.5 =
  # 2, which counts as 1. A good token has weight 1 in either.
  row = make(
    np.log([0.1, 0.4, 0.4, 0.2]),
    old=-9.0,
    behaviour=np.log([0.2, 0.5, 0.1, 0.4]),
    advantages=[-1, 2, -1, 2],
    segments=[1, 1, 2, 2],
  )
  weights = np.array([0.4, 1, 1, 1])
  gradient = -weights * [-1, 2, -1, 2]
  values = gradient * np.asarray(row.logprobs)
  clipped = [False, False, True, False]
  _check(wrap, losses.Topr(), row, values, gradient, clipped)


@WRAPS
def test_vespo_fades_by_the_ratio_of_a_trajectory(wrap):
  # Trajectory 1: product of pi / mu = 2 * 0.25 = 0.5, A = 1: 0.5^2 e^(3 / 2) =
  # 1.120422. Trajectory 2: 4 * 0.5 = 2, A = -1: 2^3 e^-2 = 1.082682.
  row = make(
    np.log([0.2, 0.1, 0.4, 0.2]),
    old=-9.0,
    behaviour=np.log([0.1, 0.4, 0.1, 0.4]),
    advantages=[1, 1, -1, -1],
    segments=[1, 1, 2, 2],
  )
  gradient = np.array([-1.120422, -1.120422, 1.082682, 1.082682])
  values = gradient * np.asarray(row.logprobs)
  _check(wrap, losses.Vespo(), row, values, gradient)


@WRAPS
def test_sapo_fades_softly_on_both_sides(wrap):
  # sigmoid(1) = 0.731059 and its slope 0.196612: at ratio 2 and tau 1 the loss
  # is -4 * 0.731059, the gradient -4 * 0.196612 * 2. At ratio 0.5 and tau 2,
  # for A = -1, sigmoid(-1) = 0.268941 has the same slope: 2 * 0.268941 and
  # 4 * 0.196612 * 0.5.
  row = of_ratios([2, 0.5], advantages=[1, -1])
  loss = losses.Sapo(tau_positive=1.0, tau_negative=2.0)
  _check(wrap, loss, row, [-2.924234, 0.537883], [-1.572895, 0.393224])


@WRAPS
def test_imitation_is_the_negative_log_likelihood_of_sampled_tokens(wrap):
  row = make([-1, -2, -3], advantages=0, sampled=[True, True, False])
  _check(wrap, losses.NegativeLogLikelihood(), row, [1, 2, 0], [-1, -1, 0])


@WRAPS
@EACH
def test_padding_leaks_into_neither_loss_nor_gradient(wrap, loss):
  def both(row):
    def total(logprobs):
      terms = loss(row._replace(logprobs=logprobs))
      return terms.loss.sum(), terms

    return jax.grad(total, has_aux=True)(row.logprobs)

  run = wrap(both)
  row = packed_rows.draw(3, lengths=(3, 2))
  gradient, terms = run(row)
  padding = ~np.asarray(row.sampled)
  assert padding.any()
  assert not np.asarray(gradient)[padding].any()
  assert not np.asarray(terms.loss)[padding].any()
  assert not np.asarray(terms.clipped)[padding].any()
  for dirty in packed_rows.poisoned(row):
    found, again = run(dirty)
    assert found.tolist() == gradient.tolist()
    assert again.loss.tolist() == terms.loss.tolist()
    assert again.clipped.tolist() == terms.clipped.tolist()


@EACH
@pytest.mark.parametrize("gap", [80.0, -80.0])
def test_a_gap_of_80_nats_leaves_loss_and_gradient_finite(loss, gap):
  row = make(
    [-85.0 if gap < 0 else -5.0] * 4,
    old=-5.0 if gap < 0 else -85.0,
    advantages=[3, -3, 3, -3],
    segments=[1, 1, 2, 2],
  )
  assert np.isfinite(jax.jit(loss)(row).loss).all()
  assert np.isfinite(_gradient(jax.jit, loss, row)).all()


@WRAPS
def test_the_loss_of_a_packed_row_is_the_sum_of_its_trajectories(wrap):
  def every(row):
    return [
      aggregate(loss(row).loss, row)
      for loss in packed_rows.LOSSES
      for aggregate in packed_rows.AGGREGATES
    ]

  row = packed_rows.draw(5, lengths=(5, 5, 5))
  packed = np.asarray(wrap(every)(row))
  parts = sum(np.asarray(wrap(every)(x)) for x in packed_rows.alone(row))
  np.testing.assert_allclose(packed, parts, rtol=1e-6, atol=1e-6)


def test_rows_over_eight_devices_give_the_gradient_of_one():
  rows = [packed_rows.draw(seed) for seed in range(8)]
  batch = jax.tree.map(lambda *x: jnp.stack(x), *rows)
  auto = (jax.sharding.AxisType.Auto,)
  mesh = jax.make_mesh((8,), ("data",), axis_types=auto)
  where = jax.NamedSharding(mesh, jax.P("data"))

  def every(batch):
    def total(logprobs, loss):
      rows = batch._replace(logprobs=logprobs)
      sums, counts = jax.vmap(loss.aggregate)(jax.vmap(loss)(rows).loss, rows)
      return sums.sum() / counts.sum()

    return [
      jax.value_and_grad(total)(batch.logprobs, loss)
      for loss in packed_rows.LOSSES
    ]

  compiled = jax.jit(every)
  placed = jax.device_put(batch, where)
  for found, expected in zip(compiled(placed), compiled(batch), strict=True):
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-6, atol=1e-9)
  # What lies on a device stays there: only sums are exchanged.
  program = str(compiled.lower(placed).compile().as_text())
  assert "all-reduce" in program
  assert "all-gather" not in program


@pytest.mark.parametrize(
  ("make_loss", "words"),
  [
    (lambda: losses.ClippedSurrogate(clip_low=1.5), "clip_low=1.5"),
    (lambda: losses.ClippedSurrogate(clip_high=-0.1), "clip_high=-0.1"),
    (lambda: losses.ClippedSurrogate(clip_high=math.nan), "clip_high=nan"),
    (lambda: losses.ClippedSurrogate(dual_clip=1.0), "dual_clip=1.0"),
    (lambda: losses.Gspo(clip_low=-1e-4), "gspo.clip_low=-0.0001"),
    (lambda: losses.GspoToken(clip_high=-1.0), "gspo_token.*clip_high=-1.0"),
    (lambda: losses.Gmpo(clip_low=-0.1), "gmpo.clip_low=-0.1"),
    (lambda: losses.Cispo(clip_high=-1.0), "cispo.*clip_high=-1.0"),
    (lambda: losses.Cispo(clip_low=2.0), "cispo.clip_low=2.0"),
    (lambda: losses.Aipo(cap=0.5), "cap=0.5"),
    (lambda: losses.Aipo(cap=math.nan), "cap=nan"),
    (lambda: losses.Vespo(k_negative=-1.0), "vespo.k_negative=-1.0"),
    (lambda: losses.Sapo(tau_positive=0.0), "tau_positive=0.0"),
    (lambda: losses.Sapo(tau_negative=math.inf), "tau_negative=inf"),
  ],
)
def test_a_setting_that_cannot_work_is_refused(make_loss, words):
  with pytest.raises(ValueError, match=words):
    make_loss().validate()


@EACH
def test_settings_as_they_stand_are_accepted(loss):
  if hasattr(loss, "validate"):
    loss.validate()
  assert isinstance(loss.aggregate, loss_aggregation.Aggregate)


def test_those_that_weigh_by_the_sampling_policy_say_so():
  found = {type(x) for x in packed_rows.LOSSES if x.own_weight}
  assert found == {losses.Aipo, losses.Topr, losses.Vespo}


def test_those_that_hold_the_policy_against_no_other_say_so():
  found = {type(x) for x in packed_rows.LOSSES if not x.has_ratio}
  assert found == {losses.Reinforce, losses.NegativeLogLikelihood}


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
    case losses.Gmpo(clip_low=low, clip_high=high):
      a, bounded = a.mean(), np.clip(r, math.exp(-low), math.exp(high))
      terms = np.abs(np.minimum(r * a, bounded * a))
      return np.full(len(r), -np.sign(a) * np.prod(terms) ** (1 / len(r)))
    case losses.Cispo(clip_low=low, clip_high=high):
      least = -math.inf if low is None else 1 - low
      return -np.clip(r, least, 1 + high) * a * pi
    case losses.Reinforce():
      return -a * pi
    case losses.Aipo(cap=cap):
      return -np.minimum(rho, cap) * a * pi
    case losses.Topr():
      return -np.where(a < 0, min(np.prod(rho), 1), 1) * a * pi
    case losses.Vespo():
      w, good = np.prod(rho), a > 0
      k = np.where(good, loss.k_positive, loss.k_negative)
      decay = np.where(good, loss.lambda_positive, loss.lambda_negative)
      return -(w**k) * np.exp(decay * (1 - w)) * a * pi
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
    loss,
    (losses.Cispo, losses.Reinforce, losses.Aipo, losses.Topr, losses.Vespo),
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
