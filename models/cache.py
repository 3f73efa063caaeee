"""Keys and values of past tokens: a big cache and the few written since.

Decoding is write-behind: a loop of steps carries only the small `Fresh`, and
`commit` moves it into the big `Cache` once at the end.

Letters: S slots, R rows, N fresh tokens, K kv heads, d head width.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from models import config as config_lib

AXES = ("batch", None, "kv_heads", None)
"""Logical axes of keys and values."""

EMPTY = int(np.iinfo(np.int32).max)
"""Position of a token that is padding."""


class Cache(NamedTuple):
  """Keys and values, one array a layer; index 1 is the position."""

  k: tuple[Float[Array, "S length K d"], ...]
  v: tuple[Float[Array, "S length K d"], ...]


class Fresh(NamedTuple):
  """Tokens not in the cache yet; EMPTY positions hold nothing."""

  k: tuple[Float[Array, "R N K d"], ...]
  v: tuple[Float[Array, "R N K d"], ...]
  positions: Int32[Array, "R N"]


def init_cache(config: config_lib.ModelConfig, rows: int, length: int) -> Cache:
  """Returns a cache of zeros for `length` tokens in each row."""
  return Cache(_zeros(config, rows, length), _zeros(config, rows, length))


def init_fresh(config: config_lib.ModelConfig, rows: int, size: int) -> Fresh:
  """Returns room for `size` tokens in each row, all of it EMPTY."""
  return Fresh(
    _zeros(config, rows, size),
    _zeros(config, rows, size),
    jnp.full((rows, size), EMPTY, jnp.int32),
  )


def take(cache: Cache, rows: Int32[Array, " R"]) -> Cache:
  """Returns R rows; an index past the end, as of padding, gives any row."""
  return jax.tree.map(lambda x: x.at[rows].get(mode="clip"), cache)


def commit(cache: Cache, rows: Int32[Array, " R"], fresh: Fresh) -> Cache:
  """Returns the cache with fresh row r written to row `rows[r]`.

  EMPTY positions, and whatever lies past the end, are dropped. Donate the
  cache, and the write happens in place.
  """
  at = (rows[:, None], fresh.positions)
  return jax.tree.map(
    lambda old, new: old.at[at].set(new, mode="drop"),
    cache,
    Cache(fresh.k, fresh.v),
  )


def _zeros(
  config: config_lib.ModelConfig, rows: int, length: int
) -> tuple[Float[Array, "S length K d"], ...]:
  shape = (rows, length, config.num_kv_heads, config.head_dim)
  return tuple(
    jnp.zeros(shape, config.compute.dtype) for _ in range(config.num_layers)
  )
