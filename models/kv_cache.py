"""Pages of keys and values of past tokens.

A row of the batch names its pages in a table: position p lies in page
table[p // page_size] at p % page_size. New tokens are written to their pages,
in place where the cache is donated, and `models.attention.paged` reads them
there.

Letters: R rows, W pages of a table, N new tokens, K kv heads, d head width.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from models import config as config_lib
from models import sharding

AXES = ("kv_heads", None, None, None, None)
"""Logical axes of pages."""

EMPTY = int(np.iinfo(np.int32).max)
"""Position of a token that is padding."""

Experts = Int32[Array, "B L S k"] | None
"""The experts of each token in every sparse layer: -1 for padding, None for a
model without experts."""


class Cache(NamedTuple):
  """Pages of keys and values.

  Heads come first, as kernels want them, and layers are an axis: the pages of a
  layer are read and written where they lie, without a slice of them.
  """

  k: Float[Array, "K layers pages page_size d"]
  v: Float[Array, "K layers pages page_size d"]


class Addresses(NamedTuple):
  """Page and offset of each new token; the page of padding does not exist."""

  page: Int32[Array, " N"]
  offset: Int32[Array, " N"]


def init_cache(
  config: config_lib.ModelConfig, pages: int, page_size: int
) -> Cache:
  """Returns a cache of zeros."""
  shape = (
    config.num_kv_heads,
    config.num_layers,
    pages,
    page_size,
    config.head_dim,
  )
  return Cache(*(jnp.zeros(shape, config.dtype) for _ in range(2)))


def addresses(
  cache: Cache,
  tables: Int32[Array, "R W"],
  owners: Int32[Array, " N"],
  positions: Int32[Array, " N"],
) -> Addresses:
  """Returns where new tokens are written.

  Args:
    owners: row of each.
    positions: EMPTY marks padding.
  """
  num_pages, page_size = cache.k.shape[2:4]
  page = tables.at[owners, positions // page_size].get(
    mode="fill", fill_value=num_pages
  )
  page = jnp.where(positions == EMPTY, num_pages, page)
  return Addresses(page, positions % page_size)


def write(
  cache: Cache,
  layer: int | Int32[Array, ""],
  at: Addresses,
  k: Float[Array, "N K d"],
  v: Float[Array, "N K d"],
  layout: sharding.Layout | None = None,
) -> Cache:
  """Returns the cache with the keys and values of new tokens of a layer.

  What has no page is dropped. Donate the cache, and the write is in place.

  Values stay finite: attention also reads those that it does not see, with a
  weight of 0, and 0 * nan would be nan to whoever has the page next. In the
  place of a key and value that are not finite there are nan and 0, so that only
  their own conversation ends in nan. On a TPU the key is 0 too, since the
  kernel adds its mask to the scores.

  Args:
    layout: every device of a row of the mesh gets all tokens; None is one
      device.
  """
  is_finite = jnp.isfinite(k) & jnp.isfinite(v)
  mark = 0 if sharding.platform(layout) == "tpu" else jnp.nan
  k = jnp.where(is_finite, k, mark)
  v = jnp.where(is_finite, v, 0)

  def put(pages, new):
    new = sharding.constrain(layout, jnp.swapaxes(new, 0, 1), AXES[0])
    pages = pages.at[:, layer, at.page, at.offset].set(new, mode="drop")
    return sharding.constrain(layout, pages, *AXES)

  return Cache(put(cache.k, k), put(cache.v, v))


def copy(
  cache: Cache, sources: Int32[Array, " n"], targets: Int32[Array, " n"]
) -> Cache:
  """Returns the cache with pages copied; a target past the end is dropped."""
  return scatter(cache, targets, gather(cache, sources))


def gather(cache: Cache, pages: Int32[Array, " n"]) -> Cache:
  """Returns some pages of a cache, in this order."""
  return jax.tree.map(lambda of: of.at[:, :, pages].get(mode="clip"), cache)


def scatter(cache: Cache, pages: Int32[Array, " n"], values: Cache) -> Cache:
  """Returns the cache with pages replaced; one past the end is dropped."""
  return jax.tree.map(
    lambda of, new: of.at[:, :, pages].set(new, mode="drop"), cache, values
  )
