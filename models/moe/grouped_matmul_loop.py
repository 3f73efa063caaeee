"""The grouped matmul in plain jax: a loop over the blocks in use.

  owner[i:i + c] -> weights of c blocks, their rows and values
                 -> function of blocks: one batched matmul after the other
                 -> rows of results, or additions to the owners' gradients

A turn takes a few blocks, so that all it touches lies in a core's cache. It
serves the CPU, where the work then follows the rows and not the experts.

Letters: T tokens, k assignments of a token, E experts, N blocks of b rows, c
blocks of a turn, D width in, O width out.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from models.moe import grouped_matmul

_MOST_WEIGHTS = 2**19


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def over_blocks(
  function: Callable[[Any, Array, Array], Array],
  weights: Any,
  x: Float[Array, "T D"],
  values: Float[Array, "T k"],
  plan: grouped_matmul.Plan,
) -> Float[Array, "T O"]:
  """Returns each token's sum over its slots of a function of blocks.

  A loop over the blocks in use, a few at a time, so that what lies between rows
  and results never leaves the cache; the backward pass computes it again, and
  keeps nothing. All of it in float32.

  Args:
    function: static; (weights [c, ...], rows [c, b, D], values [c, b]) ->
      [c, b, O], of each of c blocks alone, and zeros where rows and values are.
    weights: tree of arrays [E, ...].
  """

  def body(i, out):
    piece = _piece(weights, x, values, plan, i)
    part = function(*piece).astype(out.dtype)
    return jax.lax.dynamic_update_slice_in_dim(out, part, i * len(part), 0)

  _, turns = _turns(weights, plan)
  piece = jax.eval_shape(
    lambda: function(*_piece(weights, x, values, plan, jnp.int32(0)))
  )
  out = _zeros((len(plan.owner), *piece.shape[1:]), x.dtype, plan)
  out = jax.lax.fori_loop(0, turns, body, out)
  return grouped_matmul.collect(out.reshape(-1, out.shape[-1]), plan.places)


def _over_blocks_forward(function, weights, x, values, plan):
  y = over_blocks(function, weights, x, values, plan)
  return y, (weights, x, values, plan)


def _over_blocks_backward(function, saved, dy):
  weights, x, values, plan = saved
  block = plan.places.source.size // len(plan.owner)
  chunk, turns = _turns(weights, plan)

  def body(i, total):
    dw, drows, dvalues = total
    piece = _piece(weights, x, values, plan, i)
    dout = _rows(dy, plan, i, chunk)
    parts, rows, scale = jax.vjp(function, *piece)[1](dout)
    drows, dvalues = (
      jax.lax.dynamic_update_slice_in_dim(all_, part, i * chunk, 0)
      for all_, part in ((drows, rows), (dvalues, scale))
    )
    owner = jax.lax.dynamic_slice_in_dim(plan.owner, i * chunk, chunk)
    dw = jax.tree.map(
      lambda all_, part: all_.at[owner].add(part, mode="promise_in_bounds"),
      dw,
      parts,
    )
    return dw, drows, dvalues

  def zeros(*shape):
    return _zeros(shape, jnp.float32, plan)

  dw, drows, dvalues = jax.lax.fori_loop(
    0,
    turns,
    body,
    (
      jax.tree.map(lambda leaf: zeros(*leaf.shape), weights),
      zeros(len(plan.owner), block, x.shape[1]),
      zeros(len(plan.owner), block),
    ),
  )
  dw = jax.tree.map(lambda d, leaf: d.astype(leaf.dtype), dw, weights)
  dx = grouped_matmul.collect(drows.reshape(-1, x.shape[1]), plan.places)
  dvalues = dvalues.reshape(-1).at[plan.places.slots]
  dvalues = dvalues.get(mode="fill", fill_value=0)
  return dw, dx.astype(x.dtype), dvalues.astype(values.dtype), None


over_blocks.defvjp(_over_blocks_forward, _over_blocks_backward)


def _turns(
  weights: Any, plan: grouped_matmul.Plan
) -> tuple[int, Int32[Array, ""]]:
  """Returns how many blocks one turn of the loop takes, and its turns.

  A divisor of all blocks, and so few that their weights stay in the cache.
  """
  num_blocks = len(plan.owner)
  rows = plan.places.source.size // num_blocks
  sizes = [leaf[0].size for leaf in jax.tree.leaves(weights)]
  most = min(
    grouped_matmul.chunk_blocks(rows), max(1, _MOST_WEIGHTS // max(sizes))
  )
  chunk = next(c for c in range(most, 0, -1) if num_blocks % c == 0)
  return chunk, (plan.starts[-1] + chunk - 1) // chunk


def _piece(
  weights: Any, x: Array, values: Array, plan: grouped_matmul.Plan, i: Array
) -> tuple[Any, Array, Array]:
  """Returns weights, rows and values of the blocks of turn i, in float32."""
  chunk, _ = _turns(weights, plan)
  owner = jax.lax.dynamic_slice_in_dim(plan.owner, i * chunk, chunk)

  def of_owners(leaf):
    return leaf.at[owner].get(mode="promise_in_bounds").astype(jnp.float32)

  scale = values.reshape(-1).at[_sources(plan, i, chunk)]
  scale = scale.get(mode="fill", fill_value=0).astype(jnp.float32)
  return jax.tree.map(of_owners, weights), _rows(x, plan, i, chunk), scale


def _rows(x: Array, plan: grouped_matmul.Plan, i: Array, chunk: int) -> Array:
  """Returns the tokens in the blocks of turn i, in float32."""
  token = _sources(plan, i, chunk) // plan.places.slots.shape[1]
  return x.at[token].get(mode="fill", fill_value=0).astype(jnp.float32)


def _sources(
  plan: grouped_matmul.Plan, i: Array, chunk: int
) -> Int32[Array, "c b"]:
  source = plan.places.source.reshape(len(plan.owner), -1)
  return jax.lax.dynamic_slice_in_dim(source, i * chunk, chunk)


def _zeros(
  shape: tuple[int, ...], dtype: jax.typing.DTypeLike, plan: grouped_matmul.Plan
) -> Array:
  """Returns zeros that vary over the axes of a shard_map as the plan does."""
  return jnp.zeros(shape, dtype) + (plan.starts[0] * 0).astype(dtype)
