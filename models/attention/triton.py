"""Attention by JAX's Triton kernels, for whole rows on GPU, without a mask.

They know the index in the row and segments, and nothing else: no parents, no
second source. Tiles of other segments are visited as well, so a packed row
costs the square of its length. Elsewhere than on GPU they are interpreted, for
tests.

Letters: B rows, L queries and keys, H heads, K kv heads, d head width.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from models.attention import mask

TILE = 64
"""Rows are whole multiples of this: 128 would need the largest of GPUs."""

_BACKWARD_TILE = 32


def attend(
  query: Float[Array, "B L H d"],
  token_mask: mask.TokenMask,
  sources: Sequence[mask.KeyValues],
  *,
  interpret: bool,
) -> Float[Array, "B L H d"]:
  """Returns what `attention.attend` does, within `backend.refusal`.

  Queries and keys are the same tokens.
  """
  (source,) = sources
  kernels, width = _kernels(), query.shape[3]
  # A query head has a kv head of its own: gradients of copies are summed.
  k, v = (
    jnp.repeat(x, query.shape[2] // x.shape[2], 2) for x in (source.k, source.v)
  )
  return kernels.mha(
    query,
    k,
    v,
    token_mask.segments,
    sm_scale=width**-0.5,
    causal=True,
    block_sizes=kernels.BlockSizes(
      block_q=TILE,
      block_k=TILE,
      block_q_dkv=_BACKWARD_TILE,
      block_kv_dkv=_BACKWARD_TILE,
      block_q_dq=_BACKWARD_TILE,
      block_kv_dq=_BACKWARD_TILE,
    ),
    interpret=interpret,
  )


def _kernels() -> Any:
  # Not on top: importing it takes longer than all of models.
  with warnings.catch_warnings():
    # It is deprecated for tokamax, which is no dependency of ours.
    warnings.simplefilter("ignore", DeprecationWarning)
    from jax.experimental.pallas.ops.gpu import attention
  return attention
