"""Attention by cuDNN to each segment of a packed row, without a mask.

  segments   [ 1 1 1 2 2 0 0 0 ]  ->  three runs, of 3, 2 and 3 tokens

cuDNN is told where runs begin, so its work is the sum of their squares; with a
mask it visits whole rows, of which it has to read the mask as well. Padding is
a run as any other. Rows of which a segment lies in pieces, or of more than
`MAX_RUNS`, go another way, which is chosen as the program runs.

Letters: B rows, L queries and keys, H heads, K kv heads, d head width, M runs.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from models import sharding
from models.attention import backend, mask

MAX_RUNS = 17
"""Of a row: 16 segments and padding. cuDNN has statistics of so many rows."""


def can(case: backend.Case, layout: sharding.Layout | None) -> bool:
  """Returns whether the devices have the kernel for it: NVIDIA's, from 9.0."""
  devices = jax.devices() if layout is None else layout.devices
  return (
    sharding.nvidia_version(devices[0]) >= (9, 0)
    and backend.cudnn_can(case)
    and case.in_order
    and case.sources == 1
    and case.queries == case.keys
    and not case.parents
    and not case.windowed
  )


def attend(
  query: Float[Array, "B L H d"],
  token_mask: mask.TokenMask,
  sources: Sequence[mask.KeyValues],
  *,
  otherwise: Callable[..., Float[Array, "B L H d"]],
) -> Float[Array, "B L H d"]:
  """Returns what `attention.attend` does, where `can` says so.

  Args:
    otherwise: takes the same arguments, for rows that are not as above.
  """
  (source,) = sources
  segments = token_mask.segments
  found = runs(segments)

  def by_runs(query, k, v):
    # Not on top, and not public: jax.nn has no argument for offsets.
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    starts, lengths = starts_and_lengths(found)
    return cudnn.dot_product_attention(
      query,
      k,
      v,
      q_seqlen=lengths,
      kv_seqlen=lengths,
      q_offsets=starts,
      kv_offsets=starts,
      scale=query.shape[3] ** -0.5,
      mask_type=cudnn.MaskType.PADDING_CAUSAL,
    )

  # Computed again in the backward pass, as either way's residuals are kept.
  @jax.checkpoint
  def masked(query, k, v):
    return otherwise(query, token_mask, [source._replace(k=k, v=v)])

  return jax.lax.cond(
    fits(segments, found), by_runs, masked, query, source.k, source.v
  )


def runs(segments: Int32[Array, "B L"]) -> Int32[Array, "B L"]:
  """Returns for each token how many runs ended before its own."""
  begins = segments[:, 1:] != segments[:, :-1]
  return jnp.pad(jnp.cumsum(begins, 1, dtype=jnp.int32), ((0, 0), (1, 0)))


def fits(
  segments: Int32[Array, "B L"], found: Int32[Array, "B L"]
) -> Bool[Array, ""]:
  """Returns whether every row has few runs, and no segment more than one.

  Segments ascend and padding comes last, as `rl.data.batch` packs them.
  """
  padding = jnp.iinfo(jnp.int32).max
  order = jnp.where(segments == 0, padding, segments)
  ascend = (order[:, 1:] >= order[:, :-1]).all() & (segments >= 0).all()
  return ascend & (found[:, -1] < MAX_RUNS).all()


def starts_and_lengths(
  found: Int32[Array, "B L"],
) -> tuple[Int32[Array, "B starts"], Int32[Array, "B M"]]:
  """Returns where the runs of each row begin, and how long they are.

  Entries beyond are -1, as cuDNN wants them; there is one start too many.
  """
  most = min(MAX_RUNS, found.shape[1])
  numbers = jnp.arange(most + 1, dtype=jnp.int32)
  starts = jnp.sum(found[:, None] < numbers[:, None], 2, dtype=jnp.int32)
  used = numbers <= found[:, -1:]
  lengths = jnp.where(used[:, :-1], jnp.diff(starts), -1)
  return jnp.where(used, starts, -1), lengths
