"""The whole objective over packed rows, without a model.

What a model would say of a token is itself the parameter here, so that
gradients are compared token by token and rounding is that of the objective
alone.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.moe import layer as moe_layer
from rl.algorithms import (
  corrections,
  kl,
  loss_aggregation,
  losses,
  objective,
  token_selection,
  value_loss,
)
from rl.data import batch
from rl.pools import placement
from rl.settings import short_names
from tests.helpers import packed_rows, scored_episodes

pytestmark = pytest.mark.compiled

ROWS, LENGTH = 8, 32
NUM_LAGS = 3
EPISODES = scored_episodes.draw(0)
NUM_TOKENS = sum(EPISODES.sizes)
PLAIN = objective.Objective(loss=losses.Reinforce())


class Said(NamedTuple):
  """The model's scores of each token; the last entry is of padding."""

  logprobs: jax.Array
  entropy: jax.Array
  values: jax.Array


def say(padding: float) -> Said:
  draws = np.random.default_rng(3)
  near = np.concatenate(EPISODES.columns["old"])
  entries = (
    near + draws.uniform(-0.5, 0.5, NUM_TOKENS),
    draws.uniform(0, 3, NUM_TOKENS),
    draws.normal(size=NUM_TOKENS),
  )
  return Said(
    *(jnp.asarray(np.append(x, padding), jnp.float32) for x in entries)
  )


def whole(loss: Any, correction: Any) -> objective.Objective:
  """An objective in which every part counts."""
  return objective.Objective(
    loss=loss,
    correction=correction,
    kl=kl.KlPenalty(estimator="k3_plus", weight=0.3),
    value=value_loss.ValueLoss(weight=0.7, clip=0.4),
    entropy_bonus=0.2,
  )


def every() -> list[objective.Objective]:
  """All losses; aggregates and corrections go round.

  A loss knows neither: what it says of a token is weighed and then summed.
  """
  parts = zip(
    packed_rows.LOSSES,
    itertools.cycle(packed_rows.AGGREGATES),
    itertools.cycle(packed_rows.CORRECTIONS),
    strict=False,
  )
  return [
    whole(dataclasses.replace(loss, aggregate=aggregate), correction)
    for loss, aggregate, correction in parts
  ]


def index_of(packed: batch.Packed) -> list[np.ndarray]:
  """The number of the token at each place; padding has the last one."""
  found = [
    np.full(b.tokens.shape, NUM_TOKENS, np.int32) for b in packed.batches
  ]
  ends = np.cumsum(EPISODES.sizes)
  for end, place in zip(ends.tolist(), packed.places, strict=True):
    assert place is not None
    start = end - len(place.index)
    found[place.batch][place.row, place.index] = np.arange(start, end)
  return found


@functools.partial(jax.jit, static_argnums=0)
def _gradient(what: objective.Objective, said: Said, data: Any, index: Any):
  def total(said):
    scored = objective.Scored(*(x[index] for x in said), aux=None)
    return objective.of_batch(what, scored, data, num_lags=NUM_LAGS)

  return jax.grad(total, has_aux=True)(said)


def summed(what: objective.Objective, packed: batch.Packed, said: Said, place):
  """Gradient and sums over all batches."""
  total = None
  for data, index in zip(packed.batches, index_of(packed), strict=True):
    data = data._replace(prefix=None)
    found = _gradient(what, said, *place((data, index)))
    if total is not None:
      gradient = jax.tree.map(jnp.add, total[0], found[0])
      found = gradient, objective.add(total[1], found[1])
    total = found
  return jax.device_get(total)


def as_is(tree):
  return tree


@functools.cache
def on_mesh():
  spec = placement.MeshSpec(data=2, expert=2, tensor=2)
  layout, _ = placement.Placement(learner=spec, colocated=True).layouts()
  return functools.partial(jax.device_put, device=layout.sharding("batch"))


@functools.cache
def layouts() -> dict[str, batch.Packed]:
  """The same episodes, laid out in several ways, all in batches of `ROWS`."""
  parts = scored_episodes.pack(EPISODES, rows=3, length=LENGTH, tail_rows=1)
  heights = [len(b.tokens) for b in parts.batches]
  assert set(heights) == {1, 3}
  return {
    "packed": packed(),
    "unpacked": scored_episodes.alone(EPISODES, rows=ROWS, length=LENGTH),
    "accumulated": parts._replace(
      batches=[scored_episodes.stacked([b], ROWS) for b in parts.batches]
    ),
    "shared": scored_episodes.pack(
      EPISODES, rows=ROWS, length=LENGTH, share_prompts=True
    ),
  }


@functools.cache
def packed() -> batch.Packed:
  found = scored_episodes.pack(EPISODES, rows=ROWS, length=LENGTH)
  (data,) = found.batches
  assert (data.segments > 1).any()
  return found


@functools.cache
def expected(number: int):
  return summed(every()[number], packed(), say(0.0), as_is)


def assert_same(found, expected):
  """Gradients to 1e-6 of the largest entry, and means to 1e-6.

  Float32 has 1e-7; sums of a hundred tokens are taken in another order. Terms
  of both signs cancel in a mean, which is then held against 1.
  """
  for leaf, other in zip(found[0], expected[0], strict=True):
    assert scored_episodes.difference(leaf, other) < 1e-6
  sums, wanted = jax.tree.leaves(found[1]), jax.tree.leaves(expected[1])
  assert len(sums) == len(wanted) > 10
  divisor = expected[1].divisor
  for leaf, other in zip(sums, wanted, strict=True):
    np.testing.assert_allclose(leaf, other, rtol=1e-6, atol=1e-6 * divisor)


NUMBERS = range(len(packed_rows.LOSSES))


def test_every_loss_aggregate_and_correction_is_compared():
  objectives = every()
  assert {type(x.loss) for x in objectives} == packed_rows.frozen_callables(
    losses
  )
  assert {
    type(x.correction) for x in objectives
  } == packed_rows.frozen_callables(corrections)
  assert {x.loss.aggregate for x in objectives} == {*packed_rows.AGGREGATES}
  assert len(objectives) == len(NUMBERS)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("layout", ["unpacked", "accumulated", "shared"])
def test_how_trajectories_are_laid_out_changes_nothing(number, layout):
  found = summed(every()[number], layouts()[layout], say(0.0), as_is)
  assert_same(found, expected(number))
  gradient, sums = found
  assert sums.tokens == NUM_TOKENS
  assert np.abs(gradient.logprobs).max() > 1e-3


@pytest.mark.parametrize("number", NUMBERS)
def test_how_rows_lie_on_a_mesh_changes_nothing(number):
  found = summed(every()[number], packed(), say(0.0), on_mesh())
  assert_same(found, expected(number))


@pytest.mark.parametrize("number", NUMBERS)
def test_nothing_that_stands_in_padding_leaks(number):
  """Not one bit, be it in a column or in what the model says there."""
  (data,) = packed().batches
  for poison in (math.nan, math.inf, -math.inf):
    planted = packed()._replace(
      batches=[scored_episodes.poisoned(data, poison)]
    )
    found = summed(every()[number], planted, say(poison), as_is)
    jax.tree.map(np.testing.assert_array_equal, found, expected(number))
    # The last entry is what the model says of padding.
    assert all(part[-1] == 0 for part in found[0])


CLIP_COV = token_selection.ClipCov(share=0.1, low=0.1)
KL_COV = token_selection.KlCov(share=0.1)


@pytest.mark.parametrize(
  ("covariance", "layout"),
  [(CLIP_COV, "mesh"), (KL_COV, "mesh"), (KL_COV, "shared")],
)
def test_the_covariance_is_that_of_a_micro_batch_however_it_lies(
  covariance, layout
):
  what = whole(losses.ClippedSurrogate(), corrections.TokenTruncated())
  what = dataclasses.replace(what, covariance=covariance)
  wanted = summed(what, packed(), say(0.0), as_is)
  if layout == "mesh":
    assert_same(summed(what, packed(), say(0.0), on_mesh()), wanted)
  else:
    assert_same(summed(what, layouts()[layout], say(0.0), as_is), wanted)
  _, sums = wanted
  assert sums.covariance.selected == round(0.1 * NUM_TOKENS)
  found = metrics(jax.tree.map(jnp.asarray, sums))
  mean = sums.covariance.covariance / NUM_TOKENS
  assert found["covariance"] == pytest.approx(mean)
  assert found["covariance/selected"] == pytest.approx(0.1, abs=0.01)


# Every part of it.


def alike(**columns: float) -> Any:
  """Two trajectories of two tokens, each in a row, and all tokens alike."""
  data: Any = batch.empty(2, 2)._replace(
    sampled=np.ones((2, 2), bool),
    segments=np.ones((2, 2), np.int32),
    **{name: np.full((2, 2), x, "f4") for name, x in columns.items()},
  )
  return jax.tree.map(jnp.asarray, data)


def routed(load_balance: jax.Array, z_loss: jax.Array) -> moe_layer.Aux:
  """The statistics of one router with one expert."""
  zero = jnp.zeros(())
  zeros = zero, jnp.zeros(1), zero, zero, zero
  return moe_layer.Aux(load_balance, z_loss, *zeros)


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_every_part_counts_with_its_sign_and_its_weight(wrap):
  what = objective.Objective(
    loss=losses.Reinforce(aggregate=loss_aggregation.SequenceMean()),
    correction=corrections.TokenTruncated(cap=2.0),
    kl=kl.KlPenalty(estimator="k2", weight=0.5),
    value=value_loss.ValueLoss(weight=0.25, clip=None),
    entropy_bonus=0.1,
    balance_weight=0.2,
    z_weight=0.01,
  )
  data = alike(
    old=-1.0,
    behaviour=-1.0 - math.log(4),
    advantages=3.0,
    reference=-3.0,
    values=9.0,
    returns=3.0,
  )

  def total(said, load_balance, z_loss):
    scored = objective.Scored(*said, aux=routed(load_balance, z_loss))
    return objective.of_batch(what, scored, data, num_lags=1)

  said = [jnp.full((2, 2), x) for x in (-1.0, 0.7, 1.0)]
  run = wrap(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True))
  (value, sums), slopes = run(said, jnp.float32(1.5), jnp.float32(7.0))
  # Of a token: -3 x -1 nats, twice, as 4 is cut to 2; half of 2^2 / 2 for the
  # KL, twice as well; a quarter of (1 - 3)^2 / 2 for the value; less a tenth of
  # the entropy.
  each = 2 * 3 + 2 * 0.5 * 2 + 0.25 * 2 - 0.1 * 0.7
  # Each trajectory has the mean of its own, and each the losses of the router.
  assert value == pytest.approx(2 * (each + 0.2 * 1.5 + 0.01 * 7))
  # Half a token's 2 x -3 + 2 x 0.5 x 2, -0.1 and 0.25 x (1 - 3).
  for slope, expected in zip(slopes[0], (-2, -0.05, -0.25), strict=True):
    np.testing.assert_allclose(slope, np.full((2, 2), expected), rtol=1e-6)
  assert slopes[1:] == pytest.approx((2 * 0.2, 2 * 0.01))
  # What is told has no weight; all but the loss is summed by token.
  assert (sums.loss, sums.divisor, sums.tokens) == pytest.approx((12, 2, 4))
  assert sums.critic is not None
  told = (sums.entropy, sums.lag_kl[0], sums.kl, sums.critic.loss)
  late = 4 - 1 - math.log(4)
  assert told == pytest.approx((4 * 0.7, 4 * late, 4 * 4, 4 * 2))
  assert (sums.ratio, sums.ratio_squared) == pytest.approx((4 * 4, 4 * 16))


def test_the_entropy_bonus_counts_where_its_weight_says_so():
  what = dataclasses.replace(PLAIN, entropy_bonus=0.1, balance_weight=0.0)
  data = alike(old=-1.0, behaviour=-1.0, advantages=0.0)
  weights = jnp.array([[1.0, 1.0], [0.0, 0.0]])

  def total(entropy, data):
    scored = objective.Scored(jnp.full((2, 2), -1.0), entropy, None, None)
    return objective.of_batch(what, scored, data, num_lags=1)[0]

  entropy = jnp.full((2, 2), 0.7)
  everywhere = jax.grad(total)(entropy, data)
  assert (everywhere < 0).all()
  weighed = jax.grad(total)(entropy, data._replace(entropy_weights=weights))
  np.testing.assert_array_equal(weighed, everywhere * weights)


@pytest.mark.parametrize(
  ("share", "entropy", "kept"),
  [
    (0.34, [[0.9, 0.1], [math.nan, 0.5]], [[1, 0], [0, 0]]),
    (0.67, [[0.9, 0.1], [math.nan, 0.5]], [[1, 0], [0, 1]]),
    (0.01, [[0.9, 0.1], [math.nan, 0.5]], [[1, 0], [0, 0]]),
    # Members of a group all begin in the same state.
    (0.34, [[0.5, 0.5], [math.nan, 0.5]], [[1, 0], [0, 0]]),
  ],
)
def test_the_loss_counts_where_the_policy_is_least_sure(share, entropy, kept):
  what = dataclasses.replace(
    PLAIN,
    loss=losses.Reinforce(aggregate=loss_aggregation.TokenMean()),
    top_entropy_share=share,
  )
  data = alike(old=-1.0, behaviour=-1.0, advantages=2.0)
  # One token of the four is context: there the entropy may be anything.
  data = data._replace(sampled=jnp.array([[True, True], [False, True]]))

  def total(logprobs):
    scored = objective.Scored(logprobs, jnp.array(entropy), None, None)
    return objective.of_batch(what, scored, data, num_lags=1)

  slope, sums = jax.jit(jax.grad(total, has_aux=True))(jnp.full((2, 2), -1.0))
  np.testing.assert_array_equal(slope, -2.0 * np.array(kept))
  # The others stay in the divisor.
  assert (sums.tokens, sums.divisor) == (3, 3)


@pytest.mark.parametrize("where", ["loss", "reward"])
def test_a_penalty_is_in_the_loss_or_in_the_rewards(where):
  penalty = kl.KlPenalty(where=where)
  what = dataclasses.replace(PLAIN, kl=penalty)
  assert getattr(what, f"{where}_kl") == penalty
  assert {what.loss_kl, what.reward_kl} == {penalty, None}
  assert what.regularises(has_routers=False) == (where == "loss")
  assert (PLAIN.loss_kl, PLAIN.reward_kl) == (None, None)


# What is refused.


@pytest.mark.parametrize(
  "name", ["entropy_bonus", "balance_weight", "z_weight"]
)
def test_weights_that_are_no_numbers_are_refused(name):
  for value in (math.nan, math.inf):
    with pytest.raises(ValueError, match=f"{name}={value} must be .*; use 0"):
      dataclasses.replace(PLAIN, **{name: value}).validate()
  backward = dataclasses.replace(PLAIN, **{name: -0.1})
  if name == "entropy_bonus":
    backward.validate()
  else:
    with pytest.raises(ValueError, match=f"{name}=-0.1 must be a finite"):
      backward.validate()


@pytest.mark.parametrize("share", [0.0, 1.5, math.nan])
def test_a_share_of_no_tokens_or_of_more_than_all_is_refused(share):
  with pytest.raises(ValueError, match=f"top_entropy_share={share} must be"):
    dataclasses.replace(PLAIN, top_entropy_share=share).validate()


@pytest.mark.parametrize("loss", packed_rows.LOSSES, ids=repr)
def test_a_loss_with_a_weight_of_its_own_takes_masks_alone(loss):
  for correction in packed_rows.CORRECTIONS:
    what = objective.Objective(loss=loss, correction=correction)
    if loss.own_weight and correction.weighs:
      name = short_names.of(correction)
      with pytest.raises(ValueError, match=f"={name} .* use correction=none"):
        what.validate()
    else:
      what.validate()


def row_sums(said, data, what, num_lags=1):
  """Sums of one row, of numpy arrays by name."""
  length = len(data["behaviour"])
  full = {"segments": np.ones(length), "advantages": np.zeros(length)}
  kinds = {"segments": np.int32, "sampled": bool, "lags": np.int32}
  fields = {
    name: np.asarray([values], kinds.get(name, np.float32))
    for name, values in {**full, **data}.items()
  }
  logprobs, entropy, values = said
  scored = objective.Scored(
    jnp.asarray([logprobs]),
    jnp.asarray([entropy]),
    None if values is None else jnp.asarray([values]),
    aux=None,
  )
  filled: Any = batch.empty(1, length)._replace(**fields)
  filled = jax.tree.map(jnp.asarray, filled)
  _, sums = objective.of_batch(what, scored, filled, num_lags=num_lags)
  return sums


def metrics(sums):
  found = objective.metrics(sums, jnp.maximum(sums.divisor, 1.0))
  return {name: float(value) for name, value in found.items()}


def test_a_batch_without_the_columns_that_are_asked_for_is_refused():
  data = {"behaviour": [0.0], "sampled": [True]}
  said = ([0.0], [0.0], [0.0])
  with pytest.raises(ValueError, match="without values and returns"):
    row_sums(said, data, PLAIN)
  penalised = dataclasses.replace(PLAIN, kl=kl.KlPenalty())
  with pytest.raises(ValueError, match="without log-probabilities of the ref"):
    row_sums((*said[:2], None), data, penalised)


def test_the_effective_sample_size_is_that_of_verl():
  """Ratios .4, .8 and 6 within .5 to 5 weigh 0, .8 and 0."""
  old = np.log([0.4, 0.8, 6.0])
  what = dataclasses.replace(
    PLAIN, correction=corrections.IcePop(low=0.5, high=5.0)
  )
  data = {"behaviour": [0.0] * 3, "old": old, "sampled": [True] * 3}
  found = metrics(row_sums((old, [0.0] * 3, None), data, what))
  # verl, test_rollout_corr.py::test_mask_mode.
  assert found["correction/ess"] == pytest.approx(1 / 3)
  assert found["correction/masked"] == pytest.approx(2 / 3)
  assert found["correction/weight"] == pytest.approx(0.8 / 3)
  assert found["correction/truncated"] == 0


def test_truncated_weights_are_counted_and_padding_is_not():
  old = np.log([4.0, 1.0, 9.0, 1.0])
  what = dataclasses.replace(PLAIN, correction=corrections.TokenTruncated())
  data = {
    "behaviour": [0.0] * 4,
    "old": old,
    "sampled": [True, True, False, True],
  }
  found = metrics(row_sums((old, [0.0] * 4, None), data, what))
  # Weights 2, 1 and 1: 16 / (3 * 6).
  assert found["correction/ess"] == pytest.approx(16 / 18)
  assert found["correction/truncated"] == pytest.approx(1 / 3)
  assert found["correction/weight"] == pytest.approx(4 / 3)


def test_lags_have_their_share_and_their_distance():
  gaps = [0.5, -0.5, 1.0, 0.25, 9.0]
  data = {
    "behaviour": [-1.0] * 5,
    "sampled": [True] * 4 + [False],
    # The last entry is of all that are later still.
    "lags": [0, 1, 4, 1, 1],
  }
  said = ([-1 + gap for gap in gaps], [0.0] * 5, None)
  found = metrics(row_sums(said, data, PLAIN, num_lags=4))
  shares = [found[f"lag_share/{i}"] for i in range(4)]
  assert shares == [0.25, 0.5, 0.0, 0.25]
  # k3 of KL(behaviour, policy): e^gap - 1 - gap.
  k3 = [math.expm1(gap) - gap for gap in gaps]
  assert found["behaviour_kl/lag_0"] == pytest.approx(k3[0], rel=1e-5)
  mean = (k3[1] + k3[3]) / 2
  assert found["behaviour_kl/lag_1"] == pytest.approx(mean, rel=1e-5)
  assert math.isnan(found["behaviour_kl/lag_2"])
  assert found["behaviour_kl/lag_3"] == pytest.approx(k3[2], rel=1e-5)
  assert found["behaviour_kl"] == pytest.approx(sum(k3[:4]) / 4, rel=1e-5)
  ratios = np.exp(gaps[:4])
  ess = ratios.sum() ** 2 / (4 * (ratios**2).sum())
  assert found["behaviour_ess"] == pytest.approx(ess, rel=1e-5)


def test_of_weights_that_are_all_0_there_is_no_sample_size():
  what = dataclasses.replace(PLAIN, correction=corrections.IcePop())
  data = {"behaviour": [0.0], "old": [9.0], "sampled": [True]}
  found = metrics(row_sums(([0.0], [0.0], None), data, what))
  assert math.isnan(found["correction/ess"])
  assert found["correction/masked"] == 1


def test_sums_of_nothing_are_those_of_a_batch_of_padding():
  what = dataclasses.replace(
    PLAIN,
    correction=corrections.TokenTruncated(),
    covariance=KL_COV,
    kl=kl.KlPenalty(),
  )
  data = {"behaviour": [0.0], "sampled": [False]}
  data |= {name: [0.0] for name in ("reference", "values", "returns")}
  found = row_sums(([0.0], [0.0], [0.0]), data, what, num_lags=2)
  nothing = objective.zero(what, num_lags=2, critic=True, num_experts=0)
  jax.tree.map(np.testing.assert_array_equal, found, nothing)
