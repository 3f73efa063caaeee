"""Pages on the device against a table of pages in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import config as config_lib
from models import kv_cache

pytestmark = pytest.mark.compiled

CONFIG = config_lib.tiny(num_layers=2, d_model=8, num_kv_heads=2, head_dim=4)
EMPTY = kv_cache.EMPTY
NUM_PAGES = 12
LAYER = 1
wraps = pytest.mark.parametrize(
  "wrap", [jax.jit, lambda f: f], ids=["jit", "eager"]
)


def noise(rng, shapes):
  """Returns a tree of other numbers everywhere; positions as they are."""
  return jax.tree.map(
    lambda x: (
      x if x.dtype == jnp.int32 else jnp.asarray(rng.random(x.shape), x.dtype)
    ),
    shapes,
  )


def written(pages, tables, owners, positions, values):
  """Returns what `write` makes of one array's pages, cell by cell."""
  pages = np.array(pages)
  for owner, position, value in zip(owners, positions, values, strict=True):
    if position != EMPTY:
      page, offset = divmod(int(position), pages.shape[3])
      pages[:, LAYER, tables[owner, page], offset] = value
  return pages


def put(store, tables, owners, positions, k, v):
  """Writes tokens of one layer: a dispatch without its model."""
  at = kv_cache.addresses(store, tables, owners, positions)
  return kv_cache.write(store, LAYER, at, k, v)


@wraps
@pytest.mark.parametrize("page_size", [1, 3])
def test_tokens_are_written_to_the_pages_of_their_rows(wrap, page_size):
  rng = np.random.default_rng(page_size)
  store = noise(rng, kv_cache.init_cache(CONFIG, NUM_PAGES, page_size))
  for _ in range(5):
    # Three rows of four pages: nobody shares one.
    tables = rng.permutation(NUM_PAGES).reshape(3, 4).astype(np.int32)
    owners = np.array([2, 2, 0, 0, 1, 1], np.int32)
    # The same position twice would leave open which write counts.
    positions = np.concatenate(
      [rng.permutation(4 * page_size)[:2] for _ in range(3)]
    ).astype(np.int32)
    positions[rng.random(6) < 1 / 3] = EMPTY
    values = rng.random((2, 6, 2, 4)).astype(np.float32)
    expected = [
      written(pages, tables, owners, positions, new)
      for pages, new in zip(store, values, strict=True)
    ]
    arguments = map(jnp.asarray, (tables, owners, positions, *values))
    store = wrap(put)(store, *arguments)
    for found, wanted in zip(store, expected, strict=True):
      np.testing.assert_array_equal(found, wanted)


@wraps
def test_what_has_no_page_is_dropped(wrap):
  # Of two pages of 4: padding, the first position past the table, and a row
  # whose table names a page past the end.
  store = kv_cache.init_cache(CONFIG, 3, 4)
  tables = jnp.array([[2, 0], [3, 9]], jnp.int32)
  owners = jnp.array([0, 0, 0, 1, 1, 1], jnp.int32)
  positions = jnp.array([EMPTY, 8, 5, 0, 7, EMPTY], jnp.int32)
  ones = jnp.ones((6, 2, 4))
  store = wrap(put)(store, tables, owners, positions, ones, ones)
  # Position 5 of row 0 alone: its second page is page 0.
  expected = np.zeros((2, 2, 3, 4, 4))
  expected[:, LAYER, 0, 1] = 1
  for pages in store:
    np.testing.assert_array_equal(pages, expected)


@wraps
def test_values_stay_finite_whatever_is_written(wrap):
  k = jnp.array([1, jnp.nan, -jnp.inf, 2]).reshape(1, 1, 4)
  v = jnp.array([3, 4, jnp.nan, jnp.inf]).reshape(1, 1, 4)
  store = kv_cache.init_cache(CONFIG, 1, 1)
  zero = jnp.zeros((1, 1), jnp.int32)
  store = wrap(put)(store, zero, zero[0], zero[0], k[:, [0, 0]], v[:, [0, 0]])
  expected = ([1, *[np.nan] * 3], [3, 0, 0, 0])
  for pages, new in zip(store, expected, strict=True):
    np.testing.assert_array_equal(pages[0, LAYER, 0, 0], new)


@wraps
def test_pages_are_copied_all_at_once(wrap):
  rng = np.random.default_rng(0)
  store = noise(rng, kv_cache.init_cache(CONFIG, 5, 2))
  # 0 and 1 change places; a target past the end is dropped.
  sources = jnp.array([0, 1, 4, 2], jnp.int32)
  targets = jnp.array([1, 0, 3, 5], jnp.int32)
  copied = wrap(kv_cache.copy)(store, sources, targets)
  for old, new in zip(store, copied, strict=True):
    np.testing.assert_array_equal(new, np.asarray(old)[:, :, [1, 0, 2, 4, 4]])


def test_a_donated_cache_is_written_in_place():
  tables = jnp.array([[3, 1], [0, 2]], jnp.int32)
  owners = jnp.array([0, 0, 1], jnp.int32)
  positions = jnp.array([2, 3, EMPTY], jnp.int32)
  ones = jnp.ones((3, 2, 4))
  store = kv_cache.init_cache(CONFIG, 4096, 4)
  steps = {
    "put": (put, (tables, owners, positions, ones, ones)),
    "copy": (kv_cache.copy, (jnp.array([0, 3]), jnp.array([1, 0]))),
  }
  for name, (step, arguments) in steps.items():
    step = jax.jit(step, donate_argnums=0)
    memory = step.lower(store, *arguments).compile().memory_analysis()
    assert memory is not None
    # Not even one layer's pages are copied on the way.
    assert memory.temp_size_in_bytes < store.k.nbytes / 20, name
    places = [x.unsafe_buffer_pointer() for x in store]
    before = store
    store = step(store, *arguments)
    assert [x.unsafe_buffer_pointer() for x in store] == places, name
    assert all(x.is_deleted() for x in before), name
  # `copy` moved page 3 of row 0 to page 0, which holds positions 2 and 3.
  np.testing.assert_array_equal(store.k[0, LAYER, 0, :, 0], [0, 0, 1, 1])
