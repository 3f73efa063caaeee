"""Sums and counts of rows, on the device and on the host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl.algorithms import loss_aggregation
from tests.helpers import packed_rows

pytestmark = pytest.mark.compiled

WRAPS = pytest.mark.parametrize(
  "wrap", [jax.jit, lambda f: f], ids=["jit", "eager"]
)
# Trajectories of 3 and 1 tokens, a prompt and padding among them.
ROW = packed_rows.make(
  [-1.0] * 6,
  sampled=[True, False, True, True, True, False],
  segments=[1, 1, 1, 1, 2, 0],
)
VALUES = jnp.asarray([1.0, 50.0, 2.0, 6.0, 5.0, 70.0])


@WRAPS
@pytest.mark.parametrize(
  ("aggregate", "total", "count"),
  [
    # 1 + 2 + 6 + 5 over four tokens.
    (loss_aggregation.TokenMean(), 14, 4),
    # Means 3 and 5 of two trajectories.
    (loss_aggregation.SequenceMean(), 8, 2),
    (loss_aggregation.Constant(length=10.0), 1.4, 2),
  ],
  ids=str,
)
def test_a_sum_and_a_count(wrap, aggregate, total, count):
  found = wrap(aggregate)(VALUES, ROW)
  assert found == pytest.approx((total, count), rel=1e-6)
  assert all(x.dtype == jnp.float32 for x in found)


@WRAPS
@pytest.mark.parametrize("aggregate", packed_rows.AGGREGATES, ids=str)
def test_what_was_not_sampled_has_neither_value_nor_gradient(wrap, aggregate):
  run = wrap(jax.value_and_grad(lambda x: aggregate(x, ROW)[0]))
  dirty = jnp.where(ROW.sampled, VALUES, jnp.nan)
  (clean_value, clean), (value, gradient) = run(VALUES), run(dirty)
  assert value == clean_value
  assert gradient.tolist() == clean.tolist()
  assert not np.asarray(gradient)[[1, 5]].any()


@pytest.mark.parametrize("aggregate", packed_rows.AGGREGATES, ids=str)
def test_the_host_counts_as_rows_do(aggregate):
  for seed in range(5):
    row = packed_rows.draw(seed)
    tokens = [len(where) for where, _ in packed_rows.trajectories(row)]
    assert aggregate.count(tokens) == aggregate(row.logprobs, row)[1]
  # Nobody is in a row without a token.
  assert aggregate.count([3, 0]) == aggregate.count([3])
  assert aggregate.count([]) == 0


@WRAPS
def test_a_row_of_padding_counts_nothing(wrap):
  row = packed_rows.make([np.nan] * 3, sampled=False, segments=0)
  for aggregate in packed_rows.AGGREGATES:
    assert wrap(aggregate)(row.logprobs, row) == (0, 0)


def test_every_aggregate_is_looked_at_here():
  found = {type(x) for x in packed_rows.AGGREGATES}
  assert found == packed_rows.frozen_callables(loss_aggregation)


@pytest.mark.parametrize("length", [0.0, -1.0, float("inf"), float("nan")])
def test_a_length_that_divides_nothing_is_refused(length):
  with pytest.raises(ValueError, match=f"length={length}"):
    loss_aggregation.Constant(length=length).validate()
