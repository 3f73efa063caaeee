"""Attention to the pages of a KV cache, where they lie.

  a tile of a few pages of every row -> scores -> running softmax -> next tile

or a kernel, where the platform has one for the case (`paged_kernels`).

A query sees the keys of its row up to its own position, or the last of them
within a window. Pages are read through the table a tile at a time, from the
first that a query of a row sees and as many as the row with the most: memory
and time follow from what is seen, not from the width of the table.

Letters: R rows, C queries of each, W pages of a table, H heads, K kv heads,
G = H / K, m = C * G, d head width, s keys of a tile.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from models import config as config_lib
from models import kv_cache, sharding
from models.attention import paged_kernels, running_softmax

TILE = {"cpu": 128, "gpu": 512, "tpu": 512}
"""Positions of a row that are read at once."""


def attend(
  query: Float[Array, "R C H d"],
  positions: Int32[Array, "R C"],
  cache: kv_cache.Cache,
  layer: int | Int32[Array, ""],
  tables: Int32[Array, "R W"],
  window: Int32[Array, ""] | None = None,
  *,
  form: str = "auto",
  layout: sharding.Layout | None = None,
) -> Float[Array, "R C H d"]:
  """Returns the softmax over the keys of each row, times their values.

  Values must be finite, as `kv_cache.write` leaves them, also where nobody sees
  them: any page that exists serves as padding of a table.

  Args:
    positions: of the queries, whose own keys have been written; from 0.
    layer: of the cache.
    window: keys that a query sees, its own included; None is all.
    form: see `paged_kernels.refusal`.
    layout: where rows and heads lie; None is one device.
  """
  platform = sharding.platform(layout)
  kernel = functools.partial(by_tiles, tile=TILE[platform])
  refused = paged_kernels.refusal(
    platform,
    queries=query.shape[1],
    head_dim=query.shape[3],
    page_size=cache.k.shape[3],
    dtypes=frozenset({query.dtype.name, cache.k.dtype.name}),
    windowed=window is not None,
    form=form,
  )
  if refused is None:
    kernel = functools.partial(paged_kernels.attend, platform=platform)
  layer = jnp.asarray(layer, jnp.int32)
  oldest = None
  if window is not None:
    oldest = positions - window + 1
    # Of each row the pages before are left out, and positions count from there.
    page_size = cache.k.shape[3]
    first = jnp.maximum(jnp.min(oldest, 1, keepdims=True), 0) // page_size
    number = first + jnp.arange(tables.shape[1], dtype=jnp.int32)
    tables = jnp.take_along_axis(tables, number, 1, mode="clip")
    positions, oldest = (x - first * page_size for x in (positions, oldest))
  if layout is None or layout.mesh.size == 1:
    return kernel(query, positions, cache, layer, tables, oldest)
  rows = "batch" if len(query) % layout.size("batch") == 0 else None
  same = layout.rules.of("heads") == layout.rules.of("kv_heads")
  heads = "heads" if same else None
  mapped = jax.shard_map(
    kernel,
    mesh=layout.mesh,
    in_specs=(
      layout.spec(rows, None, heads),
      layout.spec(rows),
      layout.spec(heads),
      layout.spec(),
      layout.spec(rows),
      layout.spec(rows),
    ),
    out_specs=layout.spec(rows, None, heads),
    # Loops and kernels begin with zeros, which vary over no axis yet.
    check_vma=False,
  )
  return mapped(query, positions, cache, layer, tables, oldest)


def describe(
  platform: str, config: config_lib.ModelConfig, page_size: int
) -> str:
  """Returns how decoding and chunks attend to pages, and why so."""

  def words(queries: int) -> str:
    refused = paged_kernels.refusal(
      platform,
      queries=queries,
      head_dim=config.head_dim,
      page_size=page_size,
      dtypes=frozenset({config.dtype}),
      windowed=config.window is not None,
      form=config.compute.attention,
    )
    return "by a kernel" if refused is None else f"by tiles: {refused}"

  return f"decoding attends to pages {words(1)}; chunks {words(2)}"


def by_tiles(
  query: Float[Array, "R C H d"],
  positions: Int32[Array, "R C"],
  cache: kv_cache.Cache,
  layer: Int32[Array, ""],
  tables: Int32[Array, "R W"],
  oldest: Int32[Array, "R C"] | None = None,
  *,
  tile: int,
) -> Float[Array, "R C H d"]:
  """Returns what `attend` does, in plain jnp, on one device.

  The bits of a row follow from its own tokens, whatever the others are.

  Args:
    oldest: first position that each query sees; None is 0.
    tile: positions of a tile, about: whole pages.
  """
  rows, length, heads, width = query.shape
  kv_heads, page_size = cache.k.shape[0], cache.k.shape[3]
  groups = heads // kv_heads
  pages_each = min(max(1, tile // page_size), tables.shape[1])
  tile = pages_each * page_size
  num_tiles = -(-tables.shape[1] // pages_each)
  padding = num_tiles * pages_each - tables.shape[1]
  tables = jnp.pad(tables, ((0, 0), (0, padding)))
  head = jnp.arange(kv_heads, dtype=jnp.int32)[:, None]
  q_RKmd = jnp.swapaxes(
    query.reshape(rows, length, kv_heads, groups, width), 1, 2
  ).reshape(rows, kv_heads, length * groups, width)
  last_seen = jnp.repeat(positions, groups, 1)[:, :, None]
  if oldest is not None:
    oldest = jnp.repeat(oldest, groups, 1)[:, :, None]

  def scored(step: int | Int32[Array, ""]) -> tuple[Array, Array]:
    """Returns the scores of a tile, -inf where unseen, and its values."""
    some = jax.lax.dynamic_slice_in_dim(
      tables, step * pages_each, pages_each, 1
    )

    def read(pages):
      # The whole array, never one layer: XLA would copy that on a CPU.
      found = pages.at[head, layer, some[:, None]].get(mode="promise_in_bounds")
      return found.reshape(rows, kv_heads, tile, width)

    k_RKsd, v_RKsd = map(read, cache)
    scores = _product("rkmd,rksd->rkms", q_RKmd, k_RKsd) * width**-0.5
    order = step * tile + jnp.arange(tile, dtype=jnp.int32)
    seen = order <= last_seen
    if oldest is not None:
      seen &= order >= oldest
    return jnp.where(seen[:, None], scores, -jnp.inf), v_RKsd

  def mix(v: Array, weights: Array) -> Array:
    return _product("rkms,rksd->rkmd", weights.astype(v.dtype), v)

  def visit(
    step: Int32[Array, ""], running: running_softmax.Running
  ) -> running_softmax.Running:
    scores, v = scored(step)
    return running_softmax.add(running, scores, functools.partial(mix, v))

  if num_tiles == 1:
    # Rounded where whole rows are in training, so that both agree.
    scores, v = scored(0)
    mixed = mix(v, jax.nn.softmax(scores))
  else:
    mixed, _ = running_softmax.result(
      jax.lax.fori_loop(
        0,
        jnp.max(positions) // tile + 1,
        visit,
        running_softmax.start(q_RKmd.shape[:3], width),
      )
    )
  mixed = mixed.reshape(rows, kv_heads, length, groups, width)
  return jnp.swapaxes(mixed, 1, 2).reshape(query.shape).astype(query.dtype)


def _product(spec: str, a: Array, b: Array) -> Array:
  return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)
