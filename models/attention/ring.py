"""Attention of rows that several devices share: keys go from one to the next.

  each device holds queries, keys and values of its own part of a row
  as many times as there are devices:
    attend to the part that is held, in tiles -> its softmax, joined to those
    before by the logs of their sums; hand the part to the next device

The backward pass goes round in the same way, with the gradients of a part,
which are complete when it is back home. So a device never holds more than two
parts of a row. A part that comes later in the row costs next to nothing: no
tile of it is visited.

Letters: B rows, L tokens of a part, H heads, K kv heads, G = H / K, d head
width.

Source: Ring Attention, arXiv 2310.01889, section 3.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32

from models.attention import blockwise, mask, running_softmax


class Ring(NamedTuple):
  """The axes of the mesh that a row is split over, and their devices."""

  axes: tuple[str, ...]
  size: int


def attend(
  query: Float[Array, "B L H d"],
  token_mask: mask.TokenMask,
  sources: tuple[mask.KeyValues, ...],
  *,
  ring: Ring,
  block: int,
) -> Float[Array, "B L H d"]:
  """Returns what `attention.attend` does of a device's part, by `shard_map`.

  Args:
    token_mask, sources: of the part, with positions in the row.
    block: see `blockwise.attend`.
  """
  return _attend(query, token_mask, sources, ring, block)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _attend(
  query: Float[Array, "B L H d"],
  token_mask: mask.TokenMask,
  sources: tuple[mask.KeyValues, ...],
  ring: Ring,
  block: int,
) -> Float[Array, "B L H d"]:
  return _forward(query, token_mask, sources, ring, block)[0]


def _forward(
  query: Float[Array, "B L H d"],
  token_mask: mask.TokenMask,
  sources: tuple[mask.KeyValues, ...],
  ring: Ring,
  block: int,
) -> tuple[Float[Array, "B L H d"], Any]:
  def step(_, carry):
    out, norms, held = carry
    coming = _pass_on(held, ring)
    part = blockwise.mix(query, token_mask, held, block, jnp.float32)
    return *_join((out, norms), part), coming

  kv_heads = sources[0].k.shape[2]
  shape = *query.shape[:2], kv_heads, query.shape[2] // kv_heads
  start = (
    jnp.zeros(query.shape, jnp.float32),
    jnp.full(shape, running_softmax.LOWEST, jnp.float32),
    sources,
  )
  out, norms, _ = jax.lax.fori_loop(0, ring.size, step, start)
  out = checkpoint_name(out.astype(query.dtype), blockwise.SAVED[0])
  norms = checkpoint_name(norms, blockwise.SAVED[1])
  return out, (query, token_mask, sources, out, norms)


def _backward(
  ring: Ring, block: int, saved: Any, d_out: Float[Array, "B L H d"]
) -> tuple[Float[Array, "B L H d"], None, tuple[mask.KeyValues, ...]]:
  query, token_mask, sources, out, norms = saved

  def step(_, carry):
    so_far, held = carry
    coming = _pass_on(held, ring)
    d_query, d_held = blockwise.add_gradients(
      so_far, query, token_mask, held, (d_out, out, norms), block
    )
    return (d_query, _pass_on(d_held, ring)), coming

  start = blockwise.zero_gradients(query, sources), sources
  gradients, _ = jax.lax.fori_loop(0, ring.size, step, start)
  return blockwise.in_dtypes_of(query, sources, gradients)


_attend.defvjp(_forward, _backward)


def _pass_on(held: Any, ring: Ring) -> Any:
  """Returns what the device before this one holds."""
  order = [(i, (i + 1) % ring.size) for i in range(ring.size)]
  return jax.lax.ppermute(held, ring.axes, order)


def _join(
  one: tuple[Float32[Array, "B L H d"], Float32[Array, "B L K G"]],
  other: tuple[Float32[Array, "B L H d"], Float32[Array, "B L K G"]],
) -> tuple[Float32[Array, "B L H d"], Float32[Array, "B L K G"]]:
  """Returns a softmax over the keys of two: mixed values, logs of sums."""
  norm = jnp.logaddexp(one[1], other[1])
  mixed = jnp.zeros_like(one[0])
  for values, part in (one, other):
    share = jnp.exp(part - norm).reshape(*values.shape[:3], 1)
    mixed += share * values
  return mixed, norm
