"""A number for a tree of weights, the same wherever and however they lie.

  bits of each element, mixed with its place -> sum modulo 2^32, on the devices
  two such sums a leaf, with name, shape and dtype -> one number, on the host

Sums of integers have no order, so a sharding cannot change them, and nothing
but two numbers a leaf comes to the host. One changed element always changes
the sums; anything else goes unseen once in 2^64, as long as a leaf has no more
than 2^32 elements.

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
  """Returns what each leaf contributes, by its path in the tree.

  What has not changed need not be read again: `combine` takes the parts of
  several trees under the paths of their union.
  """
  named = jax.tree_util.tree_leaves_with_path(params)
  # Numbers may take the place of arrays.
  leaves = [jax.device_put(leaf) for _, leaf in named]
  for (path, _), leaf in zip(named, leaves, strict=True):
    if leaf.dtype.itemsize not in _UNSIGNED:
      raise ValueError(
        f"weights{jax.tree_util.keystr(path)}: no checksum of {leaf.dtype}; "
        "use at most 32 bits an element"
      )
  sums = jax.device_get([_sums(leaf) for leaf in leaves])
  return {
    jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}:{low}:{high}"
    for (path, _), leaf, (low, high) in zip(named, leaves, sums, strict=True)
  }


def combine(parts: Mapping[str, str]) -> int:
  """Returns the 64-bit number of a tree whose leaves contribute `parts`."""
  text = "\n".join(f"{name}={parts[name]}" for name in sorted(parts))
  digest = hashlib.blake2b(text.encode(), digest_size=_BYTES)
  return int.from_bytes(digest.digest(), "big")


@jax.jit
def _sums(leaf: Shaped[Array, "..."]) -> UInt32[Array, "2"]:
  """Returns the sums of all elements, mixed in two ways."""
  bits, place = _bits(leaf), jnp.zeros(leaf.shape, jnp.uint32)
  for axis, size in enumerate(leaf.shape):
    # Of the whole array: every device knows where its own part begins.
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
  """Returns other numbers, one for each: any bit changes half of the bits."""
  x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
  x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
  return x ^ (x >> 16)
