"""Checksums of arrays and of trees of weights, whatever their sharding.

  of_leaf: bits of each element, mixed with its place -> two sums modulo 2^32,
           on the devices -> with shape and dtype, a text on the host
  of: parts, the texts of all leaves by name -> combine -> one number

Sums of integers have no order, so a sharding cannot change them, and only two
numbers a leaf come to the host. One changed element always changes the sums;
any other change goes unseen once in 2^64, in a leaf of up to 2^32 elements.

Source: the mixing is the finalizer of MurmurHash3, by Austin Appleby.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped, UInt32

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
_SEEDS = (0x9E3779B9, 0x85EBCA77)
_BYTES = 8


def of(params: Any) -> int:
  """Returns the 64-bit number of a tree.

  Raises:
    ValueError: a leaf has elements of more than 32 bits.
  """
  return combine(parts(params))


def parts(params: Any) -> dict[str, str]:
  """Returns the checksum of each leaf, by its path in the tree.

  Unchanged leaves need not be read again: `combine` takes the parts of several
  trees under the paths of their union.
  """
  return {
    # Numbers may take the place of arrays.
    (name := jax.tree_util.keystr(path)): of_leaf(jax.device_put(leaf), name)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params)
  }


def of_leaf(leaf: jax.Array, name: str = "") -> str:
  """Returns shape, dtype and sums of one array.

  Raises:
    ValueError: it has elements of more than 32 bits.
  """
  if leaf.dtype.itemsize not in _UNSIGNED:
    raise ValueError(
      f"weights{name}: no checksum of {leaf.dtype}; use at most 32 bits an "
      "element"
    )
  # Fetched before the next leaf's program starts: programs that sum over many
  # virtual devices, dispatched together, can wait for each other's threads on
  # the CPU of jax 0.8.
  low, high = jax.device_get(_sums(leaf))
  return f"{leaf.dtype}{list(leaf.shape)}:{low}:{high}"


def combine(parts: Mapping[str, str]) -> int:
  """Returns the 64-bit number of a tree from the checksums of its leaves."""
  text = "\n".join(f"{name}={parts[name]}" for name in sorted(parts))
  digest = hashlib.blake2b(text.encode(), digest_size=_BYTES)
  return int.from_bytes(digest.digest(), "big")


@jax.jit
def _sums(leaf: Shaped[Array, "..."]) -> UInt32[Array, "2"]:
  """Returns the sums of all elements, mixed in two ways."""
  bits, place = _bits(leaf), jnp.zeros(leaf.shape, jnp.uint32)
  for axis, size in enumerate(leaf.shape):
    # Of the whole array: every device knows the start of its own part.
    own = jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
    place = place * jnp.uint32(size) + own
  mixed = [_mix(bits ^ _mix(place + jnp.uint32(seed))) for seed in _SEEDS]
  # One reduction, not two: XLA then keeps nothing of the leaf's size.
  zeros = [jnp.uint32(0)] * len(mixed)
  axes = tuple(range(leaf.ndim))
  return jnp.stack(jax.lax.reduce(mixed, zeros, _add, axes))


def _add(x: Sequence[Array], y: Sequence[Array]) -> list[Array]:
  return [a + b for a, b in zip(x, y, strict=True)]


def _bits(leaf: Shaped[Array, "..."]) -> UInt32[Array, "..."]:
  if leaf.dtype == jnp.bool_:
    return leaf.astype(jnp.uint32)
  kind = _UNSIGNED[leaf.dtype.itemsize]
  return jax.lax.bitcast_convert_type(leaf, kind).astype(jnp.uint32)


def _mix(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
  """Mixes each number: any flipped bit flips half of the result's bits."""
  x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
  x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
  return x ^ (x >> 16)
