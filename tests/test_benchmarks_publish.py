"""The counts of the benchmark of publishing changes, worked out by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import delta_publish


def test_changes_are_counted_by_value_by_block_and_by_byte():
  old = np.ones(2048, np.float32)
  new = old.copy()
  new[[0, 1, 40]] = 2.0
  counts = delta_publish.changes([old], [new])
  assert counts["values"] == pytest.approx(3 / 2048)
  # 1,024 values are 4 KiB, and 16 are 64 bytes: 0 and 1 share such a block.
  assert counts["blocks of 4 KiB"] == pytest.approx(1 / 2)
  assert counts["blocks of 64 B"] == pytest.approx(2 / 128)
  assert counts["bytes"] == pytest.approx(3 * 8 / (4 * 2048))


@pytest.mark.compiled
def test_a_delta_puts_the_new_version_into_a_copy_of_the_old():
  # 1,024 float32 are a block; 100 fill none, and are one.
  old = [np.zeros((4, 1024), np.float32), np.zeros(100, np.float32)]
  new = [old[0].copy(), old[1].copy()]
  new[0][2, 5], new[1][99] = 1.0, 1.0
  (places, rows), (rest, _) = (
    delta_publish._delta(a, jnp.asarray(b))
    for a, b in zip(old, new, strict=True)
  )
  assert places.tolist() == [2]
  assert rows.shape == (1, 1024)
  assert rest.tolist() == [0]
  kept = [array.copy() for array in old]
  delta_publish.delta_s(kept, old, [jnp.asarray(x) for x in new])
  for a, b in zip(kept, new, strict=True):
    np.testing.assert_array_equal(a, b)
