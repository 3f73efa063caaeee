"""Attention in tiles: memory grows with L * block, never with L * S.

  for every row and every tile of its queries:
    forward   for every tile of keys that some of them see:
                scores -> maximum, sum and mix so far, rescaled
              mix / sum -> result; of the scores only log(sum) is kept
    backward  the same tiles: scores -> weights -> parts of dq, dk and dv

The tiles that are visited follow from the extremes of their tokens, so a packed
row costs the squares of its segments, not of its length, and a cache what is
written in it. The last tile begins early enough to be whole; what it shares
with the one before is masked.

Letters: B rows (1 in a tile), L queries, S keys, H heads, K kv heads,
G = H / K, d head width, q and s queries and keys of a tile, n and m tiles.

Source: FlashAttention-2, arXiv 2307.08691, algorithms 1 and 2.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Float32, Int32

from models.attention import mask as mask_lib
from models.attention import running_softmax

SAVED = ("attention_out", "attention_norms")
"""Names, for a policy of `jax.checkpoint`, of what spares the backward pass the
forward one; both are as small as the queries."""

_HIGHEST_ID = int(np.iinfo(np.int32).max)


class _Plan(NamedTuple):
  """Tiles of keys that each tile of queries visits: the first `num_seen`."""

  tiles: Int32[Array, "B n m"]
  num_seen: Int32[Array, "B n"]


class _Ask(NamedTuple):
  """A tile of queries, and where it was cut out."""

  row: Int32[Array, ""]
  number: Int32[Array, ""]
  start: Int32[Array, ""]
  token_mask: mask_lib.TokenMask
  q: Float[Array, "1 q K G d"]


def attend(
  query: Float[Array, "B L H d"],
  token_mask: mask_lib.TokenMask,
  sources: Sequence[mask_lib.KeyValues],
  *,
  block: int,
) -> Float[Array, "B L H d"]:
  """Returns what `attention.attend` does, by tiles of `block` tokens.

  Rows are worked on one after the other, so give every device its own. A
  query that sees no key gets zeros.
  """
  token_mask = mask_lib.with_positions(token_mask)
  sources = tuple(
    s._replace(token_mask=mask_lib.with_positions(s.token_mask))
    for s in sources
  )
  return _attend(query, token_mask, sources, block)


def scores(
  q: Float[Array, "B L K G d"],
  k: Float[Array, "B S K d"],
  mask: Bool[Array, "B L S"],
) -> Float32[Array, "B K L G S"]:
  """Returns q k / sqrt(d), and -inf where a key is not seen."""
  # The order of axes in which a product of matrices comes out: no transposing.
  products = jnp.einsum(
    "blkgd,bskd->bklgs", q, k, preferred_element_type=jnp.float32
  )
  scaled = products * q.shape[-1] ** -0.5
  return jnp.where(mask[:, None, :, None], scaled, -jnp.inf)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _attend(
  query: Float[Array, "B L H d"],
  token_mask: mask_lib.TokenMask,
  sources: tuple[mask_lib.KeyValues, ...],
  block: int,
) -> Float[Array, "B L H d"]:
  return _forward(query, token_mask, sources, block)[0]


def _forward(
  query: Float[Array, "B L H d"],
  token_mask: mask_lib.TokenMask,
  sources: tuple[mask_lib.KeyValues, ...],
  block: int,
) -> tuple[Float[Array, "B L H d"], Any]:
  """Returns the result, and what the backward pass needs."""
  out, norms = mix(query, token_mask, sources, block, query.dtype)
  out = checkpoint_name(out, SAVED[0])
  norms = checkpoint_name(norms, SAVED[1])
  return out, (query, token_mask, sources, out, norms)


def mix(
  query: Float[Array, "B L H d"],
  token_mask: mask_lib.TokenMask,
  sources: tuple[mask_lib.KeyValues, ...],
  block: int,
  dtype: Any,
) -> tuple[Float[Array, "B L H d"], Float32[Array, "B L K G"]]:
  """Returns mixed values in a dtype, and logs of the sums of weights.

  Args:
    token_mask, sources: with positions that are written out.
  """
  grouped = _grouped(query, sources)
  plans = [_plan(token_mask, s.token_mask, block) for s in sources]

  def tile(number, carry):
    out, norms = carry
    ask = _ask(grouped, token_mask, number, block)
    mixed, norm = _softmax(ask, sources, plans, block)
    at = ask.row, ask.start
    return _put(out, mixed.astype(out.dtype), *at), _put(norms, norm, *at)

  shape = grouped.shape
  zeros = jnp.zeros(shape, dtype), jnp.zeros(shape[:-1], jnp.float32)
  num_tiles = len(query) * len(_starts(query.shape[1], block))
  out, norms = jax.lax.fori_loop(0, num_tiles, tile, zeros)
  return out.reshape(query.shape), norms


def _softmax(
  ask: _Ask,
  sources: Sequence[mask_lib.KeyValues],
  plans: Sequence[_Plan],
  block: int,
) -> tuple[Float32[Array, "1 q K G d"], Float32[Array, "1 q K G"]]:
  """Returns the mixed values of a tile, and the logs of its sums."""

  def visit(source, plan, step, running):
    k, v, mask, _ = _keys(ask, source, plan, step, block)
    return running_softmax.add(
      running,
      scores(ask.q, k, mask),
      lambda weights: _product("bklgs,bskd->bklgd", weights.astype(v.dtype), v),
    )

  tops = jnp.moveaxis(ask.q, 1, 2).shape[:-1]
  running = running_softmax.start(tops, ask.q.shape[-1])
  for source, plan in zip(sources, plans, strict=True):
    body = functools.partial(visit, source, plan)
    running = jax.lax.fori_loop(
      0, plan.num_seen[ask.row, ask.number], body, running
    )
  mixed, norm = running_softmax.result(running)
  return jnp.moveaxis(mixed, 2, 1), jnp.moveaxis(norm, 2, 1)


def _backward(
  block: int, saved: Any, d_out: Float[Array, "B L H d"]
) -> tuple[Float[Array, "B L H d"], None, tuple[mask_lib.KeyValues, ...]]:
  query, token_mask, sources, out, norms = saved
  gradients = add_gradients(
    zero_gradients(query, sources),
    query,
    token_mask,
    sources,
    (d_out, out, norms),
    block,
  )
  return in_dtypes_of(query, sources, gradients)


_attend.defvjp(_forward, _backward)


def in_dtypes_of(
  query: Float[Array, "B L H d"],
  sources: tuple[mask_lib.KeyValues, ...],
  gradients: tuple[Float32[Array, "B L H d"], Any],
) -> tuple[Float[Array, "B L H d"], None, tuple[mask_lib.KeyValues, ...]]:
  """Returns what `add_gradients` summed up, as a backward pass returns it."""
  d_query, d_sources = gradients
  # TokenMask have no gradient.
  d_sources = tuple(
    source._replace(
      k=dk.astype(source.k.dtype), v=dv.astype(source.v.dtype), token_mask=None
    )
    for source, (dk, dv) in zip(sources, d_sources, strict=True)
  )
  return d_query.astype(query.dtype), None, d_sources


def zero_gradients(
  query: Float[Array, "B L H d"], sources: Sequence[mask_lib.KeyValues]
) -> tuple[Float32[Array, "B L H d"], Any]:
  """Returns what `add_gradients` adds to: of queries, and (k, v) of sources."""
  return jax.tree.map(
    lambda x: jnp.zeros(x.shape, jnp.float32),
    (query, [(source.k, source.v) for source in sources]),
  )


def add_gradients(
  so_far: tuple[Float32[Array, "B L H d"], Any],
  query: Float[Array, "B L H d"],
  token_mask: mask_lib.TokenMask,
  sources: Sequence[mask_lib.KeyValues],
  given: tuple[Array, Array, Array],
  block: int,
) -> tuple[Float32[Array, "B L H d"], Any]:
  """Returns gradients with those by these sources added.

  Args:
    given: gradient of the result, result, and logs of the sums of weights, the
      last two over all sources that there are.
  """
  d_out, out, norms = given
  grouped, d_grouped = _grouped(query, sources), _grouped(d_out, sources)
  plans = [_plan(token_mask, s.token_mask, block) for s in sources]
  # Of every query: the sum over keys of weight * d_weight.
  drift = jnp.sum(d_grouped * _grouped(out, sources).astype(jnp.float32), -1)

  def tile(number, carry):
    d_query, d_sources = carry
    ask = _ask(grouped, token_mask, number, block)
    cut = functools.partial(_take, row=ask.row, start=ask.start, size=block)
    given = cut(d_grouped), cut(norms), cut(drift)
    dq, d_sources = _gradients(ask, given, sources, plans, d_sources, block)
    return _add(d_query, dq, ask.row, ask.start), d_sources

  d_query, d_sources = so_far
  start = d_query.reshape(grouped.shape), d_sources
  num_tiles = len(query) * len(_starts(query.shape[1], block))
  d_query, d_sources = jax.lax.fori_loop(0, num_tiles, tile, start)
  return d_query.reshape(query.shape), d_sources


def _gradients(
  ask: _Ask,
  given: tuple[Array, Array, Array],
  sources: Sequence[mask_lib.KeyValues],
  plans: Sequence[_Plan],
  d_sources: Any,
  block: int,
) -> tuple[Float32[Array, "1 q K G d"], Any]:
  """Returns dq of a tile, and (dk, dv) of all sources with its part added."""
  d_out, norm, drift = given
  norm, drift = (jnp.moveaxis(x, 1, 2)[..., None] for x in (norm, drift))
  size = ask.q.shape[1]
  # Those that the tile before has had must not add to dk and dv again.
  own = ask.start + jnp.arange(size) >= ask.number * block

  def visit(source, plan, step, carry):
    dq, dk, dv = carry
    k, v, mask, start = _keys(ask, source, plan, step, block)
    score = scores(ask.q, k, mask & own[:, None])
    weights = jnp.exp(score - norm)
    d_weights = _product("blkgd,bskd->bklgs", d_out, v)
    d_score = weights * (d_weights - drift) * ask.q.shape[-1] ** -0.5
    weights, d_score = weights.astype(v.dtype), d_score.astype(k.dtype)
    dv_tile = _product("bklgs,blkgd->bskd", weights, d_out)
    dk_tile = _product("bklgs,blkgd->bskd", d_score, ask.q)
    dq += _product("bklgs,bskd->bklgd", d_score, k)
    at = ask.row, start
    return dq, _add(dk, dk_tile, *at), _add(dv, dv_tile, *at)

  dq = jnp.zeros(jnp.moveaxis(ask.q, 1, 2).shape, jnp.float32)
  added = []
  for source, plan, d_source in zip(sources, plans, d_sources, strict=True):
    body = functools.partial(visit, source, plan)
    count = plan.num_seen[ask.row, ask.number]
    dq, *d_source = jax.lax.fori_loop(0, count, body, (dq, *d_source))
    added.append(tuple(d_source))
  return jnp.moveaxis(dq, 2, 1), added


def _plan(
  queries: mask_lib.TokenMask, keys: mask_lib.TokenMask, block: int
) -> _Plan:
  """Returns which tiles see each other, as far as their extremes tell."""

  def tiles(x):
    size = min(block, x.shape[1])
    return x[:, _starts(x.shape[1], block)[:, None] + np.arange(size)]

  def extremes(segments):
    segments = tiles(segments)
    lowest = jnp.where(segments < 0, _HIGHEST_ID, segments)
    return jnp.min(lowest, -1), jnp.max(segments, -1)

  first = jnp.min(tiles(keys.positions), -1)[:, None]
  last = jnp.max(tiles(queries.positions), -1)[:, :, None]
  low, high = (x[:, None] for x in extremes(keys.segments))
  meet = jnp.zeros((), bool)
  for segments in (queries.segments, queries.parents):
    if segments is not None:
      lowest, highest = (x[:, :, None] for x in extremes(segments))
      meet |= (low <= highest) & (lowest <= high)
  seen = meet & (first <= last)
  if queries.oldest is not None and keys.places is not None:
    newest = jnp.max(tiles(keys.places), -1)[:, None]
    seen &= newest >= jnp.min(tiles(queries.oldest), -1)[:, :, None]
  # Stable: tiles that are seen come first, from left to right.
  return _Plan(
    jnp.argsort(~seen, -1, stable=True).astype(jnp.int32),
    jnp.sum(seen, -1, dtype=jnp.int32),
  )


def _ask(
  grouped: Float[Array, "B L K G d"],
  token_mask: mask_lib.TokenMask,
  number: Int32[Array, ""],
  block: int,
) -> _Ask:
  """Cuts out a tile of queries, numbered over all rows."""
  starts = _starts(grouped.shape[1], block)
  row, index = number // len(starts), number % len(starts)
  start = jnp.asarray(starts)[index]
  cut = functools.partial(_take, row=row, start=start, size=block)
  return _Ask(row, index, start, jax.tree.map(cut, token_mask), cut(grouped))


def _keys(
  ask: _Ask,
  source: mask_lib.KeyValues,
  plan: _Plan,
  step: Int32[Array, ""],
  block: int,
) -> tuple[
  Float[Array, "1 s K d"],
  Float[Array, "1 s K d"],
  Bool[Array, "1 q s"],
  Int32[Array, ""],
]:
  """Returns the keys and values of one step, who sees them, and their start."""
  index = plan.tiles[ask.row, ask.number, step]
  start = jnp.asarray(_starts(source.k.shape[1], block))[index]
  cut = functools.partial(_take, row=ask.row, start=start, size=block)
  k, v, token_mask = jax.tree.map(cut, source)
  fresh = start + jnp.arange(k.shape[1]) >= index * block
  return k, v, mask_lib.visible(ask.token_mask, token_mask) & fresh, start


def _starts(length: int, block: int) -> np.ndarray:
  """Returns where each tile begins; each is min(block, length) long."""
  starts = np.arange(0, length, block)
  return np.minimum(starts, max(length - block, 0)).astype(np.int32)


def _take(x: Array, row: Array, start: Array, size: int) -> Array:
  at = (row, start, *(0,) * (x.ndim - 2))
  sizes = (1, min(size, x.shape[1]), *x.shape[2:])
  return jax.lax.dynamic_slice(x, at, sizes)


def _put(x: Array, tile: Array, row: Array, start: Array) -> Array:
  at = (row, start, *(0,) * (x.ndim - 2))
  return jax.lax.dynamic_update_slice(x, tile, at)


def _add(x: Array, tile: Array, row: Array, start: Array) -> Array:
  return _put(x, _take(x, row, start, tile.shape[1]) + tile, row, start)


def _product(spec: str, a: Array, b: Array) -> Float32[Array, "..."]:
  return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)


def _grouped(
  x: Float[Array, "B L H d"], sources: Sequence[mask_lib.KeyValues]
) -> Float[Array, "B L K G d"]:
  batch, length, heads, width = x.shape
  kv_heads = sources[0].k.shape[2]
  return x.reshape(batch, length, kv_heads, heads // kv_heads, width)
