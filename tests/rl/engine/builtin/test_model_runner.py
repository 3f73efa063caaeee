"""The device's side of the engine: shapes, compilations, copies of pages."""

import jax
import numpy as np
import pytest

from rl.engine.builtin import decode_step, dispatch_shapes, model_runner

SHAPES = dispatch_shapes.DispatchShapes(
  slots=4,
  page_size=4,
  pages=12,
  row_buckets=(2,),
  chunk_buckets=(2, 6),
  prefill_tokens=8,
  length_buckets=(16,),
)


@pytest.fixture
def fresh(dense_config, one_device):
  fresh = model_runner.ModelRunner(
    dense_config, SHAPES, one_device, bias_slots=1
  )
  fresh.allocate()
  return fresh


def test_every_form_of_every_number_of_rows_and_length_is_a_shape(fresh):
  # Rows of 2 with up to 2 chunks of 2 or one of 6; 4 with 4 or 1.
  forms = {2: [(0, 1), (2, 2), (1, 6)], 4: [(0, 1), (4, 2), (1, 6)]}
  assert fresh.shapes == [
    (rows, form, length)
    for rows in (2, 4)
    for length in (16, 32)
    for form in forms[rows]
  ]


def test_compilations_are_those_of_this_engine(
  fresh, dense_config, dense_params, one_device
):
  other = model_runner.ModelRunner(
    dense_config, SHAPES, one_device, bias_slots=1
  )
  other.allocate()
  other.warm_up_rest()
  assert (other.compilations, fresh.compilations) == (2, 0)
  rows, chunks, _ = shape = fresh.shapes[0]
  fresh.warm_up(dense_params, shape)
  fresh.warm_up_rest()
  assert (other.compilations, fresh.compilations) == (2, 3)
  # What was warmed up does not compile again.
  plan = decode_step.empty_plan(rows, chunks, 4, slots=4)
  fresh.advance(dense_params, plan, chunks, [(0, 1)])
  fresh.set_bias(1, np.ones(24, np.float32))
  assert fresh.compilations == 3


@pytest.mark.parametrize("seed", range(4))
def test_pages_are_copied_as_if_one_after_the_other(fresh, seed):
  rng = np.random.default_rng(seed)

  def number(pages):
    marks = np.arange(12, dtype=np.float32)[:, None, None, None]
    return jax.device_put(np.broadcast_to(marks, pages.shape), pages.sharding)

  fresh._cache = jax.tree.map(number, fresh._cache)
  expected = list(range(12))
  # More than one program copies at once; most pages are source and target.
  copies = [tuple(rng.permutation(12)[:2].tolist()) for _ in range(21)]
  for source, target in copies:
    expected[target] = expected[source]
  fresh.copy(copies)
  for pages in jax.tree.leaves(fresh._cache):
    assert np.asarray(pages)[:, 0, 0, 0].tolist() == expected
    assert (np.ptp(np.asarray(pages), (1, 2, 3)) == 0).all()
