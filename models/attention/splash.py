"""Attention by JAX's Splash kernel, for whole rows on TPU.

It knows the index in the row, segments and windows, and nothing else: no
parents, no second source. Elsewhere than on TPU it is interpreted, for tests.

Letters: B rows, L queries and keys, H heads, K kv heads, d head width.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from models.attention import mask

LANES = 128
"""Rows are whole multiples of this: the width of a TPU's vector registers."""

_NOBODY = int(jnp.iinfo(jnp.int32).min)


def attend(
  query: Float[Array, "B L H d"],
  token_mask: mask.TokenMask,
  sources: Sequence[mask.KeyValues],
  *,
  interpret: bool,
  window: int | None = None,
) -> Float[Array, "B L H d"]:
  """Returns what `attention.attend` does, within `backend.refusal`.

  Args:
    window: tokens that queries see if they have a window, which follows from
      `token_mask`; a kernel is compiled for those that have, and one for those
      that have not.
  """
  # Not on top: importing it takes longer than all of models.
  from jax.experimental.pallas.ops.tpu import splash_attention

  (source,) = sources
  length, heads, width = query.shape[1:]
  # The largest tile that divides the row, and of which several fit in VMEM.
  size = max(n for n in range(LANES, 512 + 1, LANES) if length % n == 0)
  keys = source.token_mask.segments
  segments = splash_attention.SegmentIds(
    q=token_mask.segments, kv=jnp.where(keys < 0, _NOBODY, keys)
  )
  scaled = (query.astype(jnp.float32) * width**-0.5).astype(query.dtype)
  by_head = [jnp.swapaxes(x, 1, 2) for x in (scaled, source.k, source.v)]

  def mixed(seen: splash_attention.Mask, *args: Any) -> Any:
    kernel = splash_attention.make_splash_mha(
      splash_attention.MultiHeadMask([seen] * heads),
      block_sizes=splash_attention.BlockSizes(
        block_q=size,
        block_kv=size,
        block_q_dkv=size,
        block_kv_dkv=size,
        block_q_dq=size,
        block_kv_dq=size,
      ),
      head_shards=1,
      q_seq_shards=1,
      interpret=interpret,
    )
    return jax.vmap(kernel)(*args)

  shape = (length, length)
  whole = functools.partial(mixed, splash_attention.CausalMask(shape))
  if token_mask.oldest is None:
    out = whole(*by_head, segments)
  else:
    assert window is not None
    local = splash_attention.LocalMask(shape, (window - 1, 0), offset=0)
    near = functools.partial(mixed, local)
    slides = mask.has_window(token_mask)
    out = jax.lax.cond(slides, near, whole, *by_head, segments)
  return jnp.swapaxes(out, 1, 2).astype(query.dtype)
