"""Tokens travel to the devices of their experts and back, by all-to-all.

  on each of P devices along an axis, which has t tokens and E / P experts
    tokens  -> leaders: at most one assignment a token and destination
            -> rows[P, C, D], with the gates and experts of each row
    all-to-all -> compute: each row's sum over the experts here
    all-to-all -> every token sums what its destinations sent back

Shapes are static, so C and the number of assignments have a capacity, which
holds while no device gets more than `SLACK` times its even share. Devices agree
beforehand on whether all fit. If not, the same happens in several rounds over
smaller slices of tokens, as many as the worst case takes, so nothing is ever
dropped and no buffer grows. The rounds are recomputed in the backward pass.

Letters: t tokens of a device, k experts of a token, E experts, P devices, C
rows from one device to another, R = P * C, D width.

Source: the exchange of GShard, arXiv 2006.16668, section 3.2, which drops
tokens above the capacity.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped

from models.moe import grouped_matmul

SLACK = 1.5
"""Capacity in the usual case, relative to an even spread."""

_FEW = 256


ExpertSum = Callable[
  [Float[Array, "R D"], Float[Array, "R k"], Int32[Array, "R k"], int],
  tuple[Float[Array, "R D"], Int32[Array, ""]],
]
"""(rows, gates, experts, bound on the number of assignments) -> sums over the
experts of this device, and how many assignments fitted. Experts count from 0
here; others mean no assignment."""


class Capacity(NamedTuple):
  """Sizes of the buffers of a round, and the number of rounds.

  Attributes:
    rows: C, tokens from one device to another.
    assignments: of the experts of one device, from all devices.
    rounds: as many as move every token.
  """

  rows: int
  assignments: int
  rounds: int


def capacities(
  num_tokens: int, num_chosen: int, num_experts: int, parts: int
) -> tuple[Capacity, Capacity]:
  """Returns the capacity of the usual case, and of rounds in the worst case.

  They are equal where the worst case takes no more than the usual one.
  """
  here = num_experts // parts
  most = min(num_chosen, here)
  elsewhere = math.comb(num_experts - here, num_chosen)
  meets = 1 - elsewhere / math.comb(num_experts, num_chosen)
  rows = min(num_tokens, 8 * math.ceil(SLACK * meets * num_tokens / 8))
  worst = parts * num_tokens * most
  assignments = math.ceil(SLACK * num_tokens * num_chosen)
  # At least one token from everyone.
  assignments = min(worst, max(assignments, parts * most))
  if worst <= _FEW:
    rows, assignments = num_tokens, worst
  if rows == num_tokens and assignments == worst:
    return Capacity(rows, worst, 1), Capacity(rows, worst, 1)
  small = min(rows, assignments // (parts * most))
  return (
    Capacity(rows, assignments, 1),
    Capacity(small, small * parts * most, -(-num_tokens // small)),
  )


def exchange(
  compute: ExpertSum,
  x: Float[Array, "t D"],
  gates: Float[Array, "t k"],
  experts: Int32[Array, "t k"],
  num_experts: int,
  *,
  axis: str,
  agree: tuple[str, ...],
) -> tuple[Float[Array, "t D"], Int32[Array, ""]]:
  """Returns each token's sum over its experts, and the assignments placed here.

  Call it inside of a `shard_map`, with everything varying over `agree`.

  Args:
    experts: k different ones of all devices; others mean no assignment.
    axis: of the mesh, over which experts lie in order.
    agree: axes of the mesh whose devices must take the same way.
  """
  parts = jax.lax.axis_size(axis)
  if parts == 1:
    return compute(x, gates, experts, experts.size)
  num_tokens, num_chosen = experts.shape
  usual, worst = capacities(num_tokens, num_chosen, num_experts, parts)
  here = num_experts // parts
  inside = (experts >= 0) & (experts < num_experts)
  targets = jnp.where(inside, experts // here, -1)

  def way(capacity):
    def exchanged(x, gates, experts, targets):
      return _rounds(compute, here, axis, capacity, x, gates, experts, targets)

    return exchanged

  if usual == worst:
    return way(usual)(x, gates, experts, targets)
  leaders = _leaders(targets)
  devices = jnp.arange(parts)
  sent = jnp.sum(leaders[..., None] == devices, (0, 1))
  load = jnp.sum(targets[..., None] == devices, (0, 1))
  load = jax.lax.psum(load, axis)
  fits = jnp.all(sent <= usual.rows) & jnp.all(load <= usual.assignments)
  fits = jax.lax.pmin(fits.astype(jnp.int32), agree) == 1
  tokens = (x, gates, experts, targets)
  return jax.lax.cond(fits, way(usual), way(worst), *tokens)


def _rounds(
  compute: ExpertSum,
  here: int,
  axis: str,
  capacity: Capacity,
  x: Float[Array, "t D"],
  gates: Float[Array, "t k"],
  experts: Int32[Array, "t k"],
  targets: Int32[Array, "t k"],
) -> tuple[Float[Array, "t D"], Int32[Array, ""]]:
  """Exchanges in as many rounds as there are."""
  parts = jax.lax.axis_size(axis)
  order, firsts = grouped_matmul.by_group(_leaders(targets).reshape(-1), parts)
  counts = jnp.diff(firsts)[:, None]

  def one(number: Array | int):
    rank = number * capacity.rows + jnp.arange(capacity.rows, dtype=jnp.int32)
    places = grouped_matmul.place(
      order, firsts[:-1, None] + rank, rank < counts, experts.shape
    )
    return _round(compute, here, axis, capacity, x, gates, experts, places)

  if capacity.rounds == 1:
    return one(0)

  # Nothing of a round is kept: in the worst case memory matters most.
  @jax.checkpoint
  def add(total, number):
    return jax.tree.map(jnp.add, total, one(number)), None

  # Of an integer, which is 0 for sure and varies as the places do.
  zero = firsts[0] * 0
  zeros = jnp.zeros_like(x) + zero.astype(x.dtype), zero
  numbers = jnp.arange(capacity.rounds, dtype=jnp.int32)
  return jax.lax.scan(add, zeros, numbers)[0]


def _round(
  compute: ExpertSum,
  here: int,
  axis: str,
  capacity: Capacity,
  x: Float[Array, "t D"],
  gates: Float[Array, "t k"],
  experts: Int32[Array, "t k"],
  places: grouped_matmul.Places,
) -> tuple[Float[Array, "t D"], Int32[Array, ""]]:
  """Exchanges the tokens that have a place."""
  parts = jax.lax.axis_size(axis)
  swap = functools.partial(_swap, axis=axis, parts=parts)
  rows = swap(grouped_matmul.spread(x, places))
  row_gates = swap(grouped_matmul.spread(gates, places))
  token = places.source // experts.shape[1]
  row_experts = experts.at[token].get(mode="fill", fill_value=-1)
  # Of the experts that a row names, only those of its target are meant.
  row_experts = swap(row_experts)
  row_experts = jnp.where(
    row_experts < 0, -1, row_experts - here * jax.lax.axis_index(axis)
  )
  y, placed = compute(rows, row_gates, row_experts, capacity.assignments)
  return grouped_matmul.collect(swap(y), places), placed


def _swap(rows: Shaped[Array, "R D"], axis: str, parts: int) -> Array:
  """Returns the part of every device for this one, in their order."""
  split = rows.reshape(parts, -1, rows.shape[-1])
  swapped = jax.lax.all_to_all(split, axis, 0, 0, tiled=True)
  return swapped.reshape(rows.shape)


def _leaders(targets: Int32[Array, "t k"]) -> Int32[Array, "t k"]:
  """Returns the targets, each once a token; -1 for the others."""
  same = targets[:, :, None] == targets[:, None, :]
  earlier = jnp.tril(jnp.ones(same.shape[1:], bool), -1)
  return jnp.where(jnp.any(same & earlier, -1), -1, targets)


def vary(tree: Any, axes: tuple[str, ...]) -> Any:
  """Returns arrays that vary over axes of a `shard_map`, with equal values."""

  def cast(leaf):
    kind: Any = jax.typeof(leaf)
    # The name of the attribute changed within the versions of jax in use.
    kind = getattr(kind, "manual_axis_type", kind)
    varying = getattr(kind, "varying", None)
    varying = kind.vma if varying is None else varying
    missing = tuple(axis for axis in axes if axis not in varying)
    return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

  return jax.tree.map(cast, tree)
