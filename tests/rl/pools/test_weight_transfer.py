"""Weights on their way, bucket by bucket; all else: test_weight_publisher."""

import asyncio

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl.pools import placement, weight_transfer
from rl.runtime import mesh_thread


def test_buckets_are_as_full_as_their_order_allows():
  # 3 + 4 fit into 8 and 5 more do not; 20 is a bucket of its own.
  found = weight_transfer.buckets([3, 4, 5, 20, 1, 7, 1], 8)
  assert found == [[0, 1], [2], [3], [4, 5], [6]]
  assert weight_transfer.buckets([], 8) == []


def test_buckets_of_nothing_are_refused():
  with pytest.raises(ValueError, match="bucket_bytes=0"):
    weight_transfer.Publishing(bucket_bytes=0).validate()


@pytest.mark.compiled
@pytest.mark.parametrize("dtype", ["same", "bfloat16"])
async def test_the_learner_trains_between_buckets_and_copies_hold_no_thread(
  thread, spans, dtype
):
  spec = placement.MeshSpec()
  learner, pool = placement.Placement(learner=spec, decode=spec).layouts()
  params = jax.device_put(
    [jnp.full(4, i, jnp.float32) for i in range(5)], learner.sharding()
  )
  copier = mesh_thread.MeshThread("host", spans)
  # 16 bytes an array: two make a bucket of 40.
  transfer = weight_transfer.MeshTransfer(
    [pool.sharding()] * 2,
    thread,
    copier,
    weight_transfer.Publishing(dtype=dtype, bucket_bytes=40),
  )

  staging = asyncio.create_task(transfer.stage(params, [0, 1]))
  trained = 0
  while not staging.done():
    await thread.run("train", int)
    trained += 1
  copies = await staging
  copier.close()
  size = 16 if dtype == "same" else 8
  assert [(c.moved_bytes, c.buckets) for c in copies] == [(5 * size, 3)] * 2
  for copy in copies:
    for i, leaf in enumerate(copy.params):
      np.testing.assert_array_equal(leaf, np.full(4, i))
  # Three buckets for each of two engines, beside the learner's own work.
  names = [(span.track, span.name) for span in spans.spans]
  assert names.count(("host", "reshard")) == 6
  assert names.count(("learner", "cast")) == (0 if dtype == "same" else 3)
  assert names.count(("learner", "train")) == trained > 0
