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


def piece_of_ones(positions):
  """Returns a token of each position: ones everywhere."""
  positions = jnp.asarray(positions, jnp.int32)
  ones = (jnp.ones((*positions.shape, 2, 4)),) * CONFIG.num_layers
  return kv_cache.Fresh(ones, ones, positions)


def draw_piece(rng, rows, length):
  """Returns two new tokens of each row, about a third of them padding."""
  # The same position twice would leave open which write counts.
  positions = np.stack([rng.permutation(length)[:2] for _ in rows])
  positions[rng.random(positions.shape) < 1 / 3] = EMPTY
  piece = piece_of_ones(positions)
  return noise(rng, piece)


def written(pages, tables, pieces):
  """Returns what `commit` makes of one array's pages, cell by cell."""
  pages = np.array(pages)
  for rows, values, positions in pieces:
    for i, row in enumerate(rows):
      for value, position in zip(values[i], positions[i], strict=True):
        if position != EMPTY:
          page, offset = divmod(int(position), pages.shape[1])
          pages[tables[row, page], offset] = value
  return pages


@wraps
@pytest.mark.parametrize("page_size", [1, 3])
def test_tokens_are_written_to_the_pages_of_their_rows_and_read_from_there(
  wrap, page_size
):
  commit, gather = wrap(kv_cache.commit), wrap(kv_cache.gather)
  rng = np.random.default_rng(page_size)
  store = noise(rng, kv_cache.init_cache(CONFIG, NUM_PAGES, page_size))
  for _ in range(5):
    # Three rows of four pages: nobody shares one.
    tables = rng.permutation(NUM_PAGES).reshape(3, 4)
    at = jnp.asarray(tables, jnp.int32)
    length = 4 * page_size
    pieces = [(rows, draw_piece(rng, rows, length)) for rows in ([2, 0], [1])]
    before = jax.device_get(store)
    store = commit(
      store, at, [(jnp.array(rows, jnp.int32), new) for rows, new in pieces]
    )
    past = gather(store, at)
    for name in ("k", "v"):
      for layer, pages in enumerate(getattr(store, name)):
        expected = written(
          getattr(before, name)[layer],
          tables,
          [
            (rows, np.asarray(getattr(new, name)[layer]), new.positions)
            for rows, new in pieces
          ],
        )
        np.testing.assert_array_equal(pages, expected)
        np.testing.assert_array_equal(
          getattr(past, name)[layer], expected[tables].reshape(3, length, 2, 4)
        )


@wraps
def test_what_has_no_page_is_dropped(wrap):
  # Of two pages of 4: padding, the first position past the table, and a row
  # whose table names a page past the end.
  store = kv_cache.init_cache(CONFIG, 3, 4)
  tables = jnp.array([[2, 0], [3, 9]], jnp.int32)
  fresh = piece_of_ones([[EMPTY, 8, 5], [0, 7, EMPTY]])
  rows = jnp.arange(2, dtype=jnp.int32)
  store = wrap(kv_cache.commit)(store, tables, [(rows, fresh)])
  # Position 5 of row 0 alone: its second page is page 0.
  expected = np.zeros((3, 4, 2, 4))
  expected[0, 1] = 1
  for pages in jax.tree.leaves(store):
    np.testing.assert_array_equal(pages, expected)
  # Such pages may be read: they hold what some page does, never nan.
  past = wrap(kv_cache.gather)(store, tables)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(past))


@wraps
def test_tokens_are_taken_from_their_positions_alone(wrap):
  rng = np.random.default_rng(0)
  past = noise(rng, kv_cache.Past(*2 * [2 * (jnp.zeros((3, 5, 2, 4)),)]))
  # Backwards, the same one twice, and padding.
  positions = np.array([[4, 0, 1], [2, 2, EMPTY], [EMPTY, 3, EMPTY]])
  fresh = wrap(kv_cache.take)(past, jnp.asarray(positions, jnp.int32))
  np.testing.assert_array_equal(fresh.positions, positions)
  row, at = np.nonzero(positions != EMPTY)
  for taken, whole in zip(
    (*fresh.k, *fresh.v), (*past.k, *past.v), strict=True
  ):
    assert taken.shape == (3, 3, 2, 4)
    np.testing.assert_array_equal(
      taken[row, at], np.asarray(whole)[row, positions[row, at]]
    )
    # Anything but nan, which a weight of 0 would not make 0.
    assert np.isfinite(taken).all()


@wraps
def test_pages_are_copied_all_at_once(wrap):
  rng = np.random.default_rng(0)
  store = noise(rng, kv_cache.init_cache(CONFIG, 5, 2))
  # 0 and 1 change places; a target past the end is dropped.
  sources = jnp.array([0, 1, 4, 2], jnp.int32)
  targets = jnp.array([1, 0, 3, 5], jnp.int32)
  copied = wrap(kv_cache.copy)(store, sources, targets)
  for old, new in zip(
    jax.tree.leaves(store), jax.tree.leaves(copied), strict=True
  ):
    np.testing.assert_array_equal(new, np.asarray(old)[[1, 0, 2, 4, 4]])


def turn(store, tables, positions):
  """Reads pages, then writes one more there: a dispatch without its model."""
  past = jax.tree.map(lambda x: x + 1, kv_cache.gather(store, tables))
  rows = jnp.arange(len(tables), dtype=jnp.int32)
  return kv_cache.commit(
    store, tables, [(rows, kv_cache.take(past, positions))]
  )


def test_a_donated_cache_is_written_in_place():
  tables = jnp.array([[3, 1], [0, 2]], jnp.int32)
  positions = jnp.array([[2, 3, EMPTY], [0, EMPTY, 1]], jnp.int32)
  store = kv_cache.init_cache(CONFIG, 4096, 4)
  steps = {
    "turn": (turn, (tables, positions)),
    "copy": (kv_cache.copy, (jnp.array([0, 3]), jnp.array([1, 0]))),
  }
  for name, (step, arguments) in steps.items():
    step = jax.jit(step, donate_argnums=0)
    memory = step.lower(store, *arguments).compile().memory_analysis()
    assert memory is not None
    # Not even one layer's pages are copied on the way.
    assert memory.temp_size_in_bytes < store.k[0].nbytes / 10, name
    before = jax.tree.leaves(store)
    places = [x.unsafe_buffer_pointer() for x in before]
    store = step(store, *arguments)
    after = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(store)]
    assert after == places, name
    assert all(x.is_deleted() for x in before), name
  # `copy` moved page 3 of row 0 to page 0, which holds positions 2 and 3.
  np.testing.assert_array_equal(store.k[1][0, :, 0, 0], [0, 0, 1, 1])
