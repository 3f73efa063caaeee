"""Grouped-query attention with normed queries and keys, and rotary positions.

Letters: B rows, L queries, S keys, D width, H heads, K kv heads, G = H / K,
d head width.

Source: Qwen3, arXiv 2505.09388, section 2.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from models import config as config_lib

AXES = {
  "query": ("embed", "heads", "head_dim"),
  "key": ("embed", "kv_heads", "head_dim"),
  "value": ("embed", "kv_heads", "head_dim"),
  "out": ("heads", "head_dim", "embed"),
  "query_norm": ("head_dim",),
  "key_norm": ("head_dim",),
}
"""Logical axes of the parameters."""


class Source(NamedTuple):
  """Keys and values to attend to, and which query may see which."""

  k: Float[Array, "B S K d"]
  v: Float[Array, "B S K d"]
  mask: Bool[Array, "B L S"]


def rms_norm(
  x: Float[Array, "*any D"], scale: Float[Array, " D"], eps: float
) -> Float[Array, "*any D"]:
  """Returns x with a root mean square of `scale`, by arXiv 1910.07467."""
  return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * scale


def packed_mask(segments: Int32[Array, "B L"]) -> Bool[Array, "B L L"]:
  """Lets a token see itself and what came before it in its own segment."""
  # Padding sees padding: a row of the softmax is never empty, so never nan.
  same = segments[:, :, None] == segments[:, None, :]
  return same & jnp.tri(segments.shape[1], dtype=bool)


def project(
  params: Mapping[str, Array],
  config: config_lib.ModelConfig,
  x: Float[Array, "B L D"],
  positions: Int32[Array, "B L"],
) -> tuple[
  Float[Array, "B L H d"], Float[Array, "B L K d"], Float[Array, "B L K d"]
]:
  """Returns queries, keys and values; the first two normed and rotated."""
  query = jnp.einsum("bld,dhk->blhk", x, params["query"])
  key = jnp.einsum("bld,dhk->blhk", x, params["key"])
  value = jnp.einsum("bld,dhk->blhk", x, params["value"])
  query = rms_norm(query, params["query_norm"], config.norm_eps)
  key = rms_norm(key, params["key_norm"], config.norm_eps)
  theta = config.rope_theta
  return rotate(query, positions, theta), rotate(key, positions, theta), value


def attend(
  params: Mapping[str, Array],
  query: Float[Array, "B L H d"],
  sources: Sequence[Source],
) -> Float[Array, "B L D"]:
  """Returns one softmax over the keys of all sources, projected out.

  Every query must see at least one key.
  """
  batch, length, heads, width = query.shape
  kv_heads = sources[0].k.shape[2]
  q_BLKGd = query.reshape(batch, length, kv_heads, heads // kv_heads, width)
  scores = [_scores(q_BLKGd, source) for source in sources]
  # The scores are joined, not the keys: those of the cache are never copied.
  weights = jax.nn.softmax(jnp.concatenate(scores, -1))
  mixed, start = jnp.zeros_like(q_BLKGd), 0
  for source in sources:
    stop = start + source.k.shape[1]
    part = weights[..., start:stop]
    mixed += jnp.einsum("bkgls,bskd->blkgd", part, source.v)
    start = stop
  return jnp.einsum("blhk,hkd->bld", mixed.reshape(query.shape), params["out"])


def rotate(
  x: Float[Array, "B L H d"], positions: Int32[Array, "B L"], theta: float
) -> Float[Array, "B L H d"]:
  """Turns pair i by position * theta^(-2i/d) radians.

  A pair is (x[i], x[i + d/2]), as in Qwen's weights. Source: RoFormer, arXiv
  2104.09864, eq. 34.
  """
  half = x.shape[-1] // 2
  frequency = theta ** (-jnp.arange(half) / half)
  angle = positions[:, :, None, None] * frequency
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  a, b = x[..., :half], x[..., half:]
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def _scores(
  q_BLKGd: Float[Array, "B L K G d"], source: Source
) -> Float[Array, "B K G L S"]:
  scale = q_BLKGd.shape[-1] ** -0.5
  scores = jnp.einsum("blkgd,bskd->bkgls", q_BLKGd * scale, source.k)
  return jnp.where(source.mask[:, None, None], scores, -jnp.inf)
