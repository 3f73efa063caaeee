"""The attention mask: what a query sees follows from two tokens alone.

Letters: B rows, L queries, S keys.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

NO_PARENT = -1
NO_WINDOW = 2**30
"""Tokens that a query without a window sees."""


class TokenMask(NamedTuple):
  """Tokens as the mask sees them.

  A query sees a key that does not come after it and is in its segment or in its
  parent segment, unless a window leaves it out.

  Attributes:
    positions: in time; None is the index in the row.
    segments: a negative one is seen by nobody.
    parents: of queries: another segment that they see as well, or NO_PARENT;
      None when no query has one.
    places: of keys, in their conversation, from which parents and children are
      apart in a row; None without a window.
    oldest: of queries: the first place that they see, equally far back for
      all; None without a window.
  """

  positions: Int32[Array, "B L"] | None
  segments: Int32[Array, "B L"]
  parents: Int32[Array, "B L"] | None = None
  places: Int32[Array, "B L"] | None = None
  oldest: Int32[Array, "B L"] | None = None


class KeyValues(NamedTuple):
  """Keys and values to attend to."""

  k: Float[Array, "B S K d"]
  v: Float[Array, "B S K d"]
  token_mask: TokenMask


def packed_mask(
  segments: Int32[Array, "B L"], parents: Int32[Array, "B L"] | None = None
) -> TokenMask:
  """Returns the mask of rows: a token sees itself and what came before."""
  # Padding sees padding: a row of the softmax is never empty, so never nan.
  return TokenMask(None, segments, parents)


def positions(token_mask: TokenMask) -> Int32[Array, "B L"]:
  """Returns the position of each token, also where it is its index."""
  if token_mask.positions is not None:
    return token_mask.positions
  index = jnp.arange(token_mask.segments.shape[1], dtype=jnp.int32)
  return jnp.broadcast_to(index, token_mask.segments.shape)


def with_positions(token_mask: TokenMask) -> TokenMask:
  """Returns the mask with positions that are written out."""
  return token_mask._replace(positions=positions(token_mask))


def has_window(queries: TokenMask) -> Bool[Array, ""]:
  """Returns whether the window leaves anything out; `oldest` is given."""
  assert queries.oldest is not None
  assert queries.places is not None
  reach = queries.places[0, 0] - queries.oldest[0, 0] + 1
  return reach < NO_WINDOW


def visible(queries: TokenMask, keys: TokenMask) -> Bool[Array, "B L S"]:
  """Returns for each query and key whether the query sees the key."""
  key_segments = keys.segments[:, None, :]
  seen = key_segments == queries.segments[:, :, None]
  if queries.parents is not None:
    seen |= key_segments == queries.parents[:, :, None]
  if queries.oldest is not None and keys.places is not None:
    seen &= keys.places[:, None, :] >= queries.oldest[:, :, None]
  earlier = positions(keys)[:, None, :] <= positions(queries)[:, :, None]
  return seen & earlier & (key_segments >= 0)
