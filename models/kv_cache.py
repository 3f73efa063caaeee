"""Keys and values of past tokens: pages of a cache, and what is read of them.

A row of the batch names its pages in a table: position p lies in page
table[p // page_size] at p % page_size. Decoding is write-behind:

  pages - gather -> Past - feed -> Past - feed -> ... - take -> Fresh
    ^                      (in place)                              |
    +------------------------- commit -----------------------------+

so that the pages are read and written once a dispatch, and a step reads every
row in one piece and writes one token of it.

Letters: R rows, W pages of a table, N new tokens, K kv heads, d head width.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from models import config as config_lib

AXES = (None, None, "kv_heads", None)
"""Logical axes of pages."""

ROW_AXES = ("batch", None, "kv_heads", None)
"""Logical axes of what was gathered."""

EMPTY = int(np.iinfo(np.int32).max)
"""Position of a token that is padding."""

Experts = Int32[Array, "B L S k"] | None
"""The experts of each token in every sparse layer: -1 for padding, None for a
model without experts."""


class Cache(NamedTuple):
  """Pages of keys and values, one array a layer."""

  k: tuple[Float[Array, "pages page_size K d"], ...]
  v: tuple[Float[Array, "pages page_size K d"], ...]


class Past(NamedTuple):
  """Copy of the pages of rows, one array a layer; index 1 is the position."""

  k: tuple[Float[Array, "R length K d"], ...]
  v: tuple[Float[Array, "R length K d"], ...]


class Fresh(NamedTuple):
  """Tokens that the pages lack yet; EMPTY positions hold nothing."""

  k: tuple[Float[Array, "R N K d"], ...]
  v: tuple[Float[Array, "R N K d"], ...]
  positions: Int32[Array, "R N"]


def init_cache(
  config: config_lib.ModelConfig, pages: int, page_size: int
) -> Cache:
  """Returns a cache of zeros."""
  shape = (pages, page_size, config.num_kv_heads, config.head_dim)

  def zeros():
    return tuple(
      jnp.zeros(shape, config.compute.dtype) for _ in range(config.num_layers)
    )

  return Cache(zeros(), zeros())


def gather(cache: Cache, tables: Int32[Array, "R W"]) -> Past:
  """Returns what the pages of each row hold; any page serves as padding."""

  def read(pages):
    rows = pages.at[tables].get(mode="clip")
    return rows.reshape(len(tables), -1, *pages.shape[2:])

  return Past(*jax.tree.map(read, tuple(cache)))


def take(past: Past, positions: Int32[Array, "R N"]) -> Fresh:
  """Returns the tokens at N positions of each row; at EMPTY, any token."""
  rows = jnp.arange(len(positions), dtype=jnp.int32)[:, None]

  def read(part):
    return tuple(x.at[rows, positions].get(mode="clip") for x in part)

  return Fresh(read(past.k), read(past.v), positions)


def commit(
  cache: Cache, tables: Int32[Array, "R W"], fresh: list[tuple[Array, Fresh]]
) -> Cache:
  """Returns the cache with fresh tokens written to the pages of their rows.

  EMPTY positions are dropped. Donate the cache, and the write is in place.

  Args:
    fresh: pieces, each with the row of the table that its rows belong to.
  """
  num_pages, page_size = cache.k[0].shape[:2]
  places, offsets = [], []
  for rows, piece in fresh:
    positions = piece.positions
    # Of a padded token the page does not exist, so that it is dropped.
    page = tables.at[rows[:, None], positions // page_size].get(
      mode="fill", fill_value=num_pages
    )
    page = jnp.where(positions == EMPTY, num_pages, page)
    places.append(page.reshape(-1))
    offsets.append((positions % page_size).reshape(-1))
  at = (jnp.concatenate(places), jnp.concatenate(offsets))

  def write(old, *new):
    flat = [x.reshape(-1, *x.shape[2:]) for x in new]
    return old.at[at].set(jnp.concatenate(flat), mode="drop")

  return jax.tree.map(
    write, cache, *(Cache(piece.k, piece.v) for _, piece in fresh)
  )


def copy(
  cache: Cache, sources: Int32[Array, " n"], targets: Int32[Array, " n"]
) -> Cache:
  """Returns the cache with pages copied; a target past the end is dropped."""
  return jax.tree.map(
    lambda pages: pages.at[targets].set(
      pages.at[sources].get(mode="clip"), mode="drop"
    ),
    cache,
  )
