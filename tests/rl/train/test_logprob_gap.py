"""The gap between engine and learner, on gaps that are known."""

import asyncio
import math

import jax
import numpy as np
import pytest

from rl.algorithms import losses, objective
from rl.data import batch
from rl.runtime import mesh_thread, trace
from rl.train import learner, logprob_gap, optimizers

pytestmark = pytest.mark.compiled


@pytest.fixture(scope="module")
def programs(config, one_device):
  goal = objective.Objective(loss=losses.NegativeLogLikelihood())
  optimizer = optimizers.AdamW()()
  return learner.Learner(config, one_device, goal, optimizer)


@pytest.fixture(scope="module")
def measure(programs):
  thread = mesh_thread.MeshThread("learner", trace.Trace(None))
  yield lambda *args: asyncio.run(logprob_gap.measure(programs, thread, *args))
  thread.close()


@pytest.fixture(scope="module")
def weights(programs, params, one_device):
  """Versions 3 and 4."""
  where = jax.tree.map(lambda x: x.sharding, programs.abstract.params)
  return {
    3: jax.device_put(params, where),
    4: jax.device_put(jax.tree.map(lambda x: 1.1 * x, params), where),
  }


@pytest.fixture(scope="module")
def packed(programs, weights):
  """4 rows of 8; places 2-4 were sampled at version 3, 5-7 at version 4.

  Behaviour is right, but for 0.25 nats at [0, 3] and 0.5 nats at [3, 6].
  """
  data, rng = batch.empty(4, 8), np.random.default_rng(0)
  data.tokens[:] = rng.integers(24, size=(4, 8))
  data.positions[:] = np.arange(8)
  data.segments[:] = 1
  data.sampled[:, 2:] = True
  data.versions[:, 2:5], data.versions[:, 5:] = 3, 4
  data.lags[:, 2:5] = 1
  for version, params in weights.items():
    scored = programs.score(params, programs.place(data))
    at = data.versions == version
    data.behaviour[at] = np.asarray(scored)[at]
  data.behaviour[0, 3] += 0.25
  data.behaviour[3, 6] -= 0.5
  return data


def test_each_token_is_scored_under_its_own_version(measure, weights, packed):
  gap = measure(weights, packed, 4)
  # 4 rows of 6 tokens: (0.25 + 0.5) / 24 on average.
  assert gap.tokens == 24
  assert gap.max == pytest.approx(0.5, abs=1e-5)
  assert gap.mean == pytest.approx(0.75 / 24, abs=1e-5)


def test_only_the_first_rows_are_scored(measure, weights, packed):
  gap = measure(weights, packed, 2)
  assert gap.tokens == 12
  assert gap.max == pytest.approx(0.25, abs=1e-5)


def test_a_batch_of_fewer_rows_is_compared_by_the_same_program(
  programs, measure, weights, packed
):
  whole = measure(weights, packed, 4)
  known = programs._score._cache_size()
  few = jax.tree.map(lambda x: x[-1:], packed)
  gap = measure(weights, few, 4)
  assert gap.tokens == 6
  assert gap.max == pytest.approx(whole.max, abs=1e-5)
  assert gap.mean == pytest.approx(0.5 / 6, abs=1e-5)
  assert programs._score._cache_size() == known


def test_tokens_of_versions_that_are_gone_are_left_out(
  measure, weights, packed
):
  gap = measure({4: weights[4]}, packed, 4)
  assert gap.tokens == 12
  assert gap.max == pytest.approx(0.5, abs=1e-5)


@pytest.mark.parametrize("case", ["no batch", "no tokens", "no version"])
def test_nothing_to_compare_is_no_gap(measure, weights, packed, case):
  data = {"no batch": None, "no tokens": batch.empty(4, 8)}.get(case, packed)
  gap = measure({} if case == "no version" else weights, data, 4)
  assert gap.tokens == 0
  assert math.isnan(gap.max)
  assert math.isnan(gap.mean)


def test_the_tokens_themselves_can_be_told_apart(measure, weights, packed):
  gap = measure(weights, packed, 4)
  # Those of version 3 are first, and one version late: place 1 is [0, 3].
  assert gap.lags.tolist() == [1] * 12 + [0] * 12
  assert gap.engine[1] - gap.learner[1] == pytest.approx(0.25, abs=1e-5)
  at = packed.versions == 3
  np.testing.assert_array_equal(gap.engine[:12], packed.behaviour[at])


def _gap(differences):
  learner = np.array(differences, np.float32)
  lags = np.arange(len(learner), dtype=np.int32)
  return logprob_gap.Gap(
    engine=0 * lags.astype("f4"), learner=learner, lags=lags
  )


@pytest.mark.parametrize("worst", [0, 1, 57, 98, 99])
@pytest.mark.parametrize("size", [-3.0, math.nan, math.inf])
def test_a_sample_is_spread_and_holds_the_worst(worst, size):
  gap = _gap([0.5] * worst + [size] + [0.5] * (99 - worst))
  lags = gap.sample(10).lags.tolist()
  # 0, 11, 22, ... 99, with the nearest of them moved to the worst.
  assert worst in lags
  assert len(lags) == 10
  assert lags == sorted(set(lags))
  assert len({*lags} & {*range(0, 100, 11)}) >= 9


def test_a_sample_of_few_is_all_of_them():
  gap = _gap([0.5, 0.25])
  assert gap.sample(2) is gap
