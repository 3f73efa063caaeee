"""Attention to pages against the same keys, gathered, in float64.

Tolerances: 2e-6 in float32, where 4e-7 is typical; in bfloat16 0.02, of values
of about 1, where 0.008 is typical.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import config as config_lib
from models import kv_cache
from models.attention import paged

pytestmark = pytest.mark.compiled

LAYERS, LAYER, PAGES = 3, 1, 40
wraps = pytest.mark.parametrize(
  "wrap", [jax.jit, lambda f: f], ids=["jit", "eager"]
)


def draw(
  rows, queries, *, kv_heads=2, groups=3, width=8, page_size=4, pages_each=9
):
  """Returns (query, positions, cache, tables) of rows of any lengths."""
  rng = np.random.default_rng(rows * queries)
  shape = (kv_heads, LAYERS, PAGES, page_size, width)
  cache = kv_cache.Cache(*rng.normal(size=(2, *shape)).astype(np.float32))
  tables = rng.permutation(PAGES)[: rows * pages_each].reshape(rows, -1)
  most = pages_each * page_size - queries
  first = np.linspace(0, most, rows).astype(np.int32)
  query = rng.normal(size=(rows, queries, kv_heads * groups, width))
  positions = first[:, None] + np.arange(queries, dtype=np.int32)
  return jax.tree.map(
    jnp.asarray,
    (query.astype(np.float32), positions, cache, tables.astype(np.int32)),
  )


def gathered(query, positions, cache, tables, size=10**6):
  """Returns what attention to a copy of the pages gives, row by row."""
  query, *pages = (np.asarray(x, np.float64) for x in (query, *cache))
  groups = query.shape[2] // len(pages[0])
  out = np.zeros(query.shape)
  for row, (table, at) in enumerate(zip(tables, positions, strict=True)):
    # [heads, keys, width]
    k, v = (
      np.repeat(x[:, LAYER, table], groups, 0).reshape(
        query.shape[2], -1, query.shape[3]
      )
      for x in pages
    )
    scores = np.einsum("qhd,hsd->hqs", query[row], k) * k.shape[-1] ** -0.5
    order, at = np.arange(k.shape[1]), np.asarray(at)[:, None]
    seen = (order <= at) & (order > at - size)
    weights = np.where(seen, np.exp(scores), 0)
    weights /= weights.sum(-1, keepdims=True)
    out[row] = np.einsum("hqs,hsd->qhd", weights, v)
  return out


@wraps
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("tile", [4, 8, 64])
def test_tiles_of_any_size_agree_with_a_copy_of_the_pages(wrap, queries, tile):
  query, positions, cache, tables = draw(4, queries)
  attend = wrap(functools.partial(paged.by_tiles, tile=tile))
  found = attend(query, positions, cache, jnp.int32(LAYER), tables)
  expected = gathered(query, positions, cache, tables)
  np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)


@wraps
@pytest.mark.parametrize(("queries", "size"), [(1, 1), (1, 6), (5, 6), (5, 99)])
@pytest.mark.parametrize("tile", [4, 64])
def test_a_window_reads_its_own_pages_alone(
  wrap, queries, size, tile, monkeypatch
):
  monkeypatch.setitem(paged.TILE, "cpu", tile)
  query, positions, cache, tables = draw(4, queries)
  expected = gathered(query, positions, cache, tables, size)
  # Pages before the first that a row sees.
  first = np.maximum(np.asarray(positions)[:, 0] - size + 1, 0) // 4
  unseen = np.concatenate([t[:n] for t, n in zip(tables, first, strict=True)])
  assert unseen.size or size == 99
  cache = jax.tree.map(lambda x: x.at[:, LAYER, unseen].set(jnp.nan), cache)
  found = wrap(paged.attend)(
    *(query, positions, cache, jnp.int32(LAYER), tables, jnp.int32(size))
  )
  np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("tile", [8, 64])
def test_the_bits_of_a_row_do_not_depend_on_the_others(tile):
  query, positions, cache, tables = draw(4, 1)
  attend = jax.jit(functools.partial(paged.by_tiles, tile=tile))
  layer = jnp.int32(LAYER)
  alone = attend(query, positions, cache, layer, tables)[0]
  # The same first row beside the longest ones and beside the shortest.
  for others in (0, 35):
    changed = positions.at[1:].set(others)
    found = attend(
      query[::-1].at[0].set(query[0]), changed, cache, layer, tables
    )
    np.testing.assert_array_equal(found[0], alone)


def test_pages_that_nobody_sees_are_not_read_into_the_result():
  query, positions, cache, tables = draw(2, 1)
  attend = jax.jit(functools.partial(paged.by_tiles, tile=8))
  before = attend(query, positions, cache, jnp.int32(LAYER), tables)
  other = jax.tree.map(
    lambda x: x.at[:, LAYER, tables[0, 1:]].set(1e30).at[:, 0].set(1e30), cache
  )
  after = attend(query, positions, other, jnp.int32(LAYER), tables)
  np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("queries", [1, 64])
def test_on_accelerators_no_row_is_copied_as_a_whole(platform, queries):
  query, positions, cache, tables = jax.eval_shape(lambda: draw(2, 1))
  query = jax.ShapeDtypeStruct((2, queries, 6, 8), jnp.float32)
  positions = jax.ShapeDtypeStruct((2, queries), jnp.int32)
  # 2^14 pages of 4 a row, of which a tile has 512 positions.
  tables = jax.ShapeDtypeStruct((2, 2**14), jnp.int32)
  attend = jax.jit(functools.partial(paged.by_tiles, tile=512))
  layer = jax.ShapeDtypeStruct((), jnp.int32)
  traced = attend.trace(query, positions, cache, layer, tables)
  text = traced.lower(lowering_platforms=(platform,)).as_text()
  assert "x512x8xf32" in text
  # 2^16 positions are nowhere but in the tables, as pages.
  assert "65536" not in text


def test_a_plan_says_how_pages_are_read_and_why():
  config = config_lib.qwen3("0.6b")
  assert paged.describe("gpu", config, 16) == (
    "decoding attends to pages by a kernel; chunks by a kernel"
  )
  assert paged.describe("tpu", config, 16) == (
    "decoding attends to pages by a kernel; chunks by tiles: the kernel takes "
    "one id a row"
  )
  assert "decoding attends to pages by tiles: the kernel needs multiples" in (
    paged.describe("tpu", config, 8)
  )
