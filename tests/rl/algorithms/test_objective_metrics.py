"""What is told of an update."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl.algorithms import corrections, kl, losses, objective
from rl.data import batch

PLAIN = objective.Objective(loss=losses.Reinforce())


def summed(said, data, what, num_lags=1):
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
    summed(said, data, PLAIN)
  penalised = dataclasses.replace(PLAIN, kl=kl.KlPenalty())
  with pytest.raises(ValueError, match="without log-probabilities of the ref"):
    summed((*said[:2], None), data, penalised)


def test_the_effective_sample_size_is_that_of_verl():
  """Ratios .4, .8 and 6 within .5 to 5 weigh 0, .8 and 0."""
  old = np.log([0.4, 0.8, 6.0])
  what = dataclasses.replace(
    PLAIN, correction=corrections.IcePop(low=0.5, high=5.0)
  )
  data = {"behaviour": [0.0] * 3, "old": old, "sampled": [True] * 3}
  found = metrics(summed((old, [0.0] * 3, None), data, what))
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
  found = metrics(summed((old, [0.0] * 4, None), data, what))
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
  found = metrics(summed(said, data, PLAIN, num_lags=4))
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
  found = metrics(summed(([0.0], [0.0], None), data, what))
  assert math.isnan(found["correction/ess"])
  assert found["correction/masked"] == 1


def test_sums_of_nothing_are_those_of_a_batch_of_padding():
  what = dataclasses.replace(
    PLAIN, correction=corrections.TokenTruncated(), kl=kl.KlPenalty()
  )
  data = {"behaviour": [0.0], "sampled": [False]}
  data |= {name: [0.0] for name in ("reference", "values", "returns")}
  found = summed(([0.0], [0.0], [0.0]), data, what, num_lags=2)
  nothing = objective.zero(what, num_lags=2, critic=True, num_experts=0)
  jax.tree.map(np.testing.assert_array_equal, found, nothing)
