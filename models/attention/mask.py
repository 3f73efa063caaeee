"""Who sees whom: marks of tokens, and the mask that follows from them.

Letters: B rows, L queries, S keys.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

NO_PARENT = -1


class Marks(NamedTuple):
  """Who sees whom: a key is seen by a query when it does not come after it and
  is in its segment or in its parent segment.

  Attributes:
    order: place in time; None is the index in the row.
    segments: a negative one is seen by nobody.
    parents: of queries: another segment that they see as well, or NO_PARENT;
      None when no query has one.
  """

  order: Int32[Array, "B L"] | None
  segments: Int32[Array, "B L"]
  parents: Int32[Array, "B L"] | None = None


class Source(NamedTuple):
  """Keys and values to attend to, and their marks."""

  k: Float[Array, "B S K d"]
  v: Float[Array, "B S K d"]
  marks: Marks


def packed_marks(
  segments: Int32[Array, "B L"], parents: Int32[Array, "B L"] | None = None
) -> Marks:
  """Returns the marks of rows: a token sees itself and what came before."""
  # Padding sees padding: a row of the softmax is never empty, so never nan.
  return Marks(None, segments, parents)


def order(marks: Marks) -> Int32[Array, "B L"]:
  """Returns the place of each token, also where it is its index."""
  if marks.order is not None:
    return marks.order
  index = jnp.arange(marks.segments.shape[1], dtype=jnp.int32)
  return jnp.broadcast_to(index, marks.segments.shape)


def visible(queries: Marks, keys: Marks) -> Bool[Array, "B L S"]:
  """Returns which query sees which key."""
  key_segments = keys.segments[:, None, :]
  seen = key_segments == queries.segments[:, :, None]
  if queries.parents is not None:
    seen |= key_segments == queries.parents[:, :, None]
  earlier = order(keys)[:, None, :] <= order(queries)[:, :, None]
  return seen & earlier & (key_segments >= 0)
