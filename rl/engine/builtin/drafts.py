"""Drafts of the next tokens: what followed the last two ids before.

  history -> propose -> D drafts -> fed with the last token -> samples
                                        |                         |
                                        +------- num_right -------+

A draft that is what the policy samples there spares a step. Noise follows from
seed and position alone, so the tokens are those that plain decoding samples.

Letters: R rows, L ids of a conversation at most, D drafts of a row.

Source: prompt lookup decoding, as speculative decoding, arXiv 2211.17192, with
an n-gram in the place of a draft model.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

NONE = -1
"""Stands for no draft, in the place of an id."""


def propose(
  history: Int32[Array, "R L"], known: Int32[Array, " R"], num_drafts: int
) -> Int32[Array, "R D"]:
  """Returns what followed the last two ids where they last stood before.

  Args:
    history: ids of each row; from `known` on they mean nothing.
  """
  order = jnp.arange(history.shape[1], dtype=jnp.int32)
  first, second = (
    jnp.take_along_axis(history, jnp.maximum(known - back, 0)[:, None], 1)
    for back in (2, 1)
  )
  ends = (history == second).at[:, 1:].min(history[:, :-1] == first)
  ends &= (order > 0) & (order < known[:, None] - 1)
  # One past the last place where both stand; 0 if there is none.
  start = jnp.max(jnp.where(ends, order + 1, 0), 1, keepdims=True)
  place = start + jnp.arange(num_drafts, dtype=jnp.int32)
  is_known = (start > 0) & (place < known[:, None])
  found = jnp.take_along_axis(
    history, jnp.minimum(place, history.shape[1] - 1), 1
  )
  return jnp.where(is_known, found, NONE)


def num_right(
  drafts: Int32[Array, "R D"],
  is_fed: Bool[Array, "R D"],
  tokens: Int32[Array, "R D+1"],
) -> Int32[Array, " R"]:
  """Returns how many drafts in a row are what was sampled in their place.

  Args:
    tokens: sampled after the last token, and after each draft.
  """
  right = is_fed & (drafts == tokens[:, :-1])
  return jnp.cumprod(right, 1, dtype=jnp.int32).sum(1, dtype=jnp.int32)
