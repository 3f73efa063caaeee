"""Attention to pages on a GPU: one kernel, in Triton, for ids and for chunks.

  queries of a head that share its keys, a tile [m, d] in registers
     -> pages of a block, by the table -> scores -> running softmax -> next

A program has one tile of one row and kv head. Where those are few, as when one
conversation decodes, several programs share the keys, and their results are
joined by their log-sum-exp.

Letters: R rows, C queries of each, W pages of a table, H heads, K kv heads,
G = H / K, m of the C * G queries of a kv head, d head width, S programs that
share the keys, s keys of a block.

Source: FlashAttention-2, arXiv 2307.08691, and its split of the keys,
https://pytorch.org/blog/flash-decoding
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int32

from models import kv_cache

_WIDE = 128
"""Heads up to which a tile, and three blocks, fit into 99 KiB."""
_LEAST = -1e30
"""Stands for the score of a key that is not seen: -inf less itself is nan."""
_FEWEST = 16
"""Rows of the least matrix that is multiplied."""


class PageTiling(NamedTuple):
  """Sizes of the kernel; `benchmarks/kernel_tilings.py` compares them.

  Attributes:
    queries: of a program, at most.
    keys: that are read at once.
    programs: that keep a GPU busy.
    warps, stages: of a program; see Triton.
  """

  queries: int = 64
  keys: int = 64
  programs: int = 512
  warps: int = 4
  stages: int = 3


def attend(
  query: Float[Array, "R C H d"],
  positions: Int32[Array, "R C"],
  cache: kv_cache.Cache,
  layer: Int32[Array, ""],
  tables: Int32[Array, "R W"],
  oldest: Int32[Array, "R C"] | None = None,
  *,
  tiling: PageTiling | None = None,
  interpret: bool = False,
) -> Float[Array, "R C H d"]:
  """Returns what `paged.attend` does, within `paged_kernels.refusal`.

  The last bits of a row depend on how many go with it: with fewer, more
  programs share its keys.

  Args:
    tiling: None goes by the width of a head.
  """
  rows, length, heads, width = query.shape
  kv_heads, _, num_pages, page_size = cache.k.shape[:4]
  groups = heads // kv_heads
  count = length * groups
  if tiling is None:
    tiling = (
      PageTiling() if width <= _WIDE else PageTiling(queries=32, stages=2)
    )
  tile = min(tiling.queries, max(_FEWEST, 1 << (count - 1).bit_length()))
  q_RKmd = query.reshape(rows, length, kv_heads, groups, width)
  q_RKmd = jnp.swapaxes(q_RKmd, 1, 2).reshape(rows, kv_heads, count, width)
  q_RKmd = jnp.pad(q_RKmd, ((0, 0), (0, 0), (0, -count % tile), (0, 0)))
  if oldest is None:
    oldest = jnp.zeros_like(positions)
  # Padding sees the first key.
  first, last = (
    jnp.pad(jnp.repeat(x, groups, 1), ((0, 0), (0, -count % tile)))
    for x in (oldest, positions)
  )
  whole = max(1, tiling.keys // page_size)
  tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % whole)))
  num_tiles = last.shape[1] // tile
  num_blocks = tables.shape[1] * page_size // tiling.keys
  programs = max(1, rows * kv_heads * num_tiles)
  splits = min(num_blocks, -(-tiling.programs // programs))
  out, lse = _call(
    q_RKmd,
    first,
    last,
    tables + layer * num_pages,
    # Merging axes of an array moves nothing.
    *(x.reshape(kv_heads, -1, width) for x in cache),
    tile=tile,
    page_size=page_size,
    splits=splits,
    tiling=tiling,
    interpret=interpret,
  )
  if splits > 1:
    share = jax.nn.softmax(lse * math.log(2), axis=0)
    out = jnp.sum(out * share[..., None], 0)
  out = out.reshape(rows, kv_heads, -1, width)[:, :, :count]
  out = out.reshape(rows, kv_heads, length, groups, width)
  return jnp.swapaxes(out, 1, 2).reshape(query.shape).astype(query.dtype)


def _call(
  q: Float[Array, "R K m d"],
  first: Int32[Array, "R m"],
  last: Int32[Array, "R m"],
  tables: Int32[Array, "R W"],
  k: Float[Array, "K positions d"],
  v: Float[Array, "K positions d"],
  *,
  tile: int,
  page_size: int,
  splits: int,
  tiling: PageTiling,
  interpret: bool,
) -> tuple[Float[Array, "S R K m d"], Float[Array, "S R K m"]]:
  """Returns the values of each of S parts of the keys, and log2-sum-exps."""
  rows, kv_heads, count, width = q.shape

  def of_tile(*more):
    shape = (None, None, None, tile, *more)
    zeros = (0,) * len(more)
    return pl.BlockSpec(shape, lambda r, h, t, s: (s, r, h, t, *zeros))

  shape = (splits, rows, kv_heads, count)
  dtype = jnp.float32 if splits > 1 else q.dtype
  call = pl.pallas_call(
    functools.partial(
      _kernel, block=tiling.keys, page_size=page_size, splits=splits
    ),
    grid=(rows, kv_heads, count // tile, splits),
    in_specs=[
      pl.BlockSpec((None, None, tile, width), lambda r, h, t, s: (r, h, t, 0)),
      *(pl.BlockSpec((None, tile), lambda r, h, t, s: (r, t)),) * 2,
      pl.BlockSpec((None, tables.shape[1]), lambda r, h, t, s: (r, 0)),
      *(
        pl.BlockSpec((None, *k.shape[1:]), lambda r, h, t, s: (h, 0, 0))
        for _ in range(2)
      ),
    ],
    out_specs=(of_tile(width), of_tile()),
    out_shape=(
      jax.ShapeDtypeStruct((*shape, width), dtype),
      jax.ShapeDtypeStruct(shape, jnp.float32),
    ),
    interpret=interpret,
    compiler_params=plgpu.CompilerParams(
      num_warps=tiling.warps, num_stages=tiling.stages
    ),
    name="paged_attention",
  )
  return call(q, first, last, tables, k, v)


def _kernel(
  q_ref: Any,
  first_ref: Any,
  last_ref: Any,
  tables: Any,
  k: Any,
  v: Any,
  out: Any,
  lse: Any,
  *,
  block: int,
  page_size: int,
  splits: int,
):
  q, oldest, last = q_ref[...], first_ref[...], last_ref[...]
  tile, width = q.shape
  split = pl.program_id(3)
  # Blocks up to the last key that some query sees, in S parts.
  blocks = jax.lax.div(jnp.max(last), jnp.int32(block)) + 1
  first = jax.lax.div(split * blocks, jnp.int32(splits))
  end = jax.lax.div((split + 1) * blocks, jnp.int32(splits))
  inside = jax.lax.iota(jnp.int32, block)
  shift = page_size.bit_length() - 1

  def add(number, running):
    acc, top, total = running
    order = number * block + inside
    page = tables[jax.lax.shift_right_logical(order, jnp.int32(shift))]
    at = page * page_size + (order & (page_size - 1))
    scores = _dot(q, k[at, :], 1) * (width**-0.5 * math.log2(math.e))
    seen = (order[None, :] >= oldest[:, None]) & (
      order[None, :] <= last[:, None]
    )
    scores = jnp.where(seen, scores, _LEAST)
    new_top = jnp.maximum(top, scores.max(1))
    weights = jnp.exp2(scores - new_top[:, None])
    scale = jnp.exp2(top - new_top)
    acc = acc * scale[:, None] + _dot(weights.astype(q.dtype), v[at, :], 0)
    return acc, new_top, total * scale + weights.sum(1)

  start = (
    jnp.zeros((tile, width), jnp.float32),
    jnp.full(tile, _LEAST, jnp.float32),
    jnp.zeros(tile, jnp.float32),
  )
  acc, top, total = jax.lax.fori_loop(first, end, add, start)
  # A part without a block has seen nothing.
  total = jnp.maximum(total, 1e-30)
  out[...] = (acc / total[:, None]).astype(out.dtype)
  lse[...] = top + jnp.log2(total)


def _dot(a: Array, b: Array, axis: int) -> Array:
  """Returns the product that sums the second axis of a and one of b."""
  return jax.lax.dot_general(
    a,
    b,
    (((1,), (axis,)), ((), ())),
    preferred_element_type=jnp.float32,
  )
