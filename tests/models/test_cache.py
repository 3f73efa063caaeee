import jax
import jax.numpy as jnp
import numpy as np

from models import cache


def test_a_dispatch_padded_with_rows_past_the_end_leaves_the_cache_alone(
  config,
):
  store = cache.init_cache(config, 2, 8)
  fresh = jax.tree.map(jnp.ones_like, cache.init_fresh(config, 2, 1))
  store = cache.commit(store, jnp.array([1, 2]), fresh)
  # Position 1 of row 1 only; row 2 does not exist.
  expected = np.zeros((2, 8))
  expected[1, 1] = 1
  np.testing.assert_array_equal(store.k[0][:, :, 0, 0], expected)
  assert np.isfinite(cache.take(store, jnp.array([0, 2])).v[1]).all()
