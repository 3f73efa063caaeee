"""Grouped-query attention with rotary positions, and normed or plain heads.

Letters: B rows, L queries, S keys, D width, H heads, K kv heads, G = H / K,
d head width.

Sources: Qwen3, arXiv 2505.09388, section 2; Llama 3, 2407.21783, section 3.2;
Qwen2.5, 2412.15115, section 2; Gemma 3, 2503.19786, section 2.
"""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from models import config as config_lib
from models import initializers, lora, rope, sharding
from models.attention import (
  backend,
  blockwise,
  mask,
  packed,
  ring,
  splash,
  triton,
)


def rms_norm(
  x: Float[Array, "*any D"],
  scale: Float[Array, " D"],
  eps: float,
  *,
  offset: float = 0.0,
) -> Float[Array, "*any D"]:
  """Returns x with a root mean square of offset + scale, by arXiv 1910.07467.

  The mean is taken in float32, as in Qwen's own code, and so is the gradient of
  the scale, which is a sum over all tokens. With an offset all of it is in
  float32, as in Gemma's.
  """
  wide = x.astype(jnp.float32)
  mean = jnp.mean(wide * wide, -1, keepdims=True)
  normed = wide * jax.lax.rsqrt(mean + eps)
  if offset:
    return _scaled(normed, offset + scale.astype(jnp.float32)).astype(x.dtype)
  return _scaled(normed.astype(x.dtype), scale)


@jax.custom_vjp
def _scaled(x: Float[Array, "*any D"], scale: Float[Array, " D"]) -> Array:
  return x * scale


def _scaled_fwd(x: Array, scale: Array) -> tuple[Array, tuple[Array, Array]]:
  return x * scale, (x, scale)


def _scaled_bwd(
  factors: tuple[Array, Array], gradient: Array
) -> tuple[Array, Array]:
  x, scale = factors
  product = gradient.astype(jnp.float32) * x.astype(jnp.float32)
  summed = jnp.sum(product, tuple(range(x.ndim - 1)))
  return (gradient * scale).astype(x.dtype), summed.astype(scale.dtype)


_scaled.defvjp(_scaled_fwd, _scaled_bwd)


def _biased(x: Float[Array, "B L H d"], bias: Float[Array, "H d"]) -> Array:
  # In float32, so that the gradient is, which is a sum over all tokens.
  wide = x.astype(jnp.float32) + bias.astype(jnp.float32)
  return wide.astype(x.dtype)


def norm(
  config: config_lib.ModelConfig,
  x: Float[Array, "*any D"],
  scale: Float[Array, " D"],
) -> Float[Array, "*any D"]:
  """Returns `rms_norm` as a model has it."""
  return rms_norm(x, scale, config.norm_eps, offset=config.norm_offset)


def _head_norm(
  config: config_lib.ModelConfig,
  x: Float[Array, "B L H d"],
  scale: Float[Array, " D"],
) -> Float[Array, "B L H d"]:
  """Returns heads normed, as many at once as the scale is wide."""
  wide = x.reshape(*x.shape[:2], -1, len(scale))
  return norm(config, wide, scale).reshape(x.shape)


class Attention(lora.Adapted):
  """Projections around the softmax, which `attend` is."""

  def __init__(self, initializer: initializers.Initializer):
    """Draws the parameters."""
    self.config = initializer.config
    matrix, width = initializer.matrix, self.config.head_dim
    self.query = matrix("query", "embed", "heads", "head_dim")
    self.key = matrix("key", "embed", "kv_heads", "head_dim")
    self.value = matrix("value", "embed", "kv_heads", "head_dim")
    self.out = matrix("out", "heads", "head_dim", "embed", is_residual=True)
    if self.config.qkv_bias:
      self.query_bias = initializer.bias("heads", "head_dim")
      self.key_bias = initializer.bias("kv_heads", "head_dim")
      self.value_bias = initializer.bias("kv_heads", "head_dim")
    if self.config.qk_norm:
      heads, kv_heads = 1, 1
      if self.config.norms_heads_at_once:
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
      self.query_norm = initializer.norm(width * heads)
      self.key_norm = initializer.norm(width * kv_heads)
    initializer.adapt(self)

  def project(
    self,
    x: Float[Array, "B L D"],
    positions: Int32[Array, "B L"],
    layer: int | Int32[Array, ""],
  ) -> tuple[
    Float[Array, "B L H d"], Float[Array, "B L K d"], Float[Array, "B L K d"]
  ]:
    """Returns queries, keys and values; the first two rotated, maybe normed."""
    params = self.values()
    query = lora.matmul(params, "query", x)
    key = lora.matmul(params, "key", x)
    value = lora.matmul(params, "value", x)
    if self.config.qkv_bias:
      query = _biased(query, params["query_bias"])
      key = _biased(key, params["key_bias"])
      value = _biased(value, params["value_bias"])
    if self.config.qk_norm:
      query = _head_norm(self.config, query, params["query_norm"])
      key = _head_norm(self.config, key, params["key_norm"])
    frequency, growth = self._rotary(layer)
    key = rope.rotate(key, positions, frequency, growth)
    if (width := self.config.query_pre_attn_scalar) is not None:
      growth *= math.sqrt(self.config.head_dim / width)
    return rope.rotate(query, positions, frequency, growth), key, value

  def merge(self, mixed: Float[Array, "B L H d"]) -> Float[Array, "B L D"]:
    """Returns the heads' values, projected into the residual stream."""
    return lora.matmul(self.values(), "out", mixed, num_in=2)

  def _rotary(
    self, layer: int | Int32[Array, ""]
  ) -> tuple[
    Float32[Array, " half"] | Float32[np.ndarray, " half"],
    float | Float32[Array, ""],
  ]:
    """Returns what `rope.frequencies` does, of a layer."""
    config, window = self.config, self.config.window
    found, growth = rope.frequencies(
      config.head_dim, config.rope_theta, config.rope_scaling
    )
    if window is None or window.rope_theta is None:
      return found, growth
    near, _ = rope.frequencies(config.head_dim, window.rope_theta, None)
    slides = window.holds(layer)
    return jnp.where(slides, near, found), jnp.where(slides, 1, growth)


def attend(
  query: Float[Array, "B L H d"],
  token_mask: mask.TokenMask,
  sources: Sequence[mask.KeyValues],
  *,
  form: str = "auto",
  block: int = 256,
  window: int | None = None,
  layout: sharding.Layout | None = None,
) -> Float[Array, "B L H d"]:
  """Returns one softmax over the keys of all sources, times their values.

  Every query must see at least one key. Keys and values must be finite, also
  those that nobody sees: their weight is 0, and 0 * inf is nan.

  Args:
    form: of those in `backend`; "auto" is what `backend.choose` takes, and
      "packed" the same, but by `packed` where that can.
    block: queries and keys of a tile of the blockwise form.
    window: tokens that queries see if they have a window, which follows from
      `token_mask`; needed where that has one.
    layout: where rows and heads lie; None is one device.

  Raises:
    ValueError: the form that was asked for cannot do this.
  """
  asked = _case(query, token_mask, sources, layout)
  platform = sharding.platform(layout)
  by_runs = form == "packed" and packed.can(asked, layout)
  if form in backend.CHOSEN:
    form = backend.choose(platform, asked)
  elif reason := backend.refusal(form, asked):
    raise ValueError(f"attention={form!r} {reason}")
  shared = None
  if layout is not None and (size := layout.size("length")) > 1:
    shared = ring.Ring(layout.rules.of("length"), size)
  match form:
    case "reference":
      kernel = _reference
    case "blockwise":
      kernel = functools.partial(blockwise.attend, block=block)
      if shared is not None:
        kernel = functools.partial(ring.attend, ring=shared, block=block)
    case "fused":
      cudnn = platform == "gpu" and backend.cudnn_can(asked)
      kernel = functools.partial(_fused, cudnn=cudnn)
      if shared is not None:
        kernel = functools.partial(_gathering, kernel, shared.axes)
    case "splash":
      kernel = functools.partial(
        splash.attend, interpret=platform != "tpu", window=window
      )
    case "triton":
      kernel = functools.partial(triton.attend, interpret=platform != "gpu")
    case _:
      raise ValueError(
        f"attention={form!r} is unknown; use auto, packed, reference, fused, "
        "blockwise, triton or splash"
      )
  if by_runs:
    kernel = functools.partial(packed.attend, otherwise=kernel)
  elif form == "reference":
    # Left whole: XLA splits it as it splits what is around it.
    return _reference(query, token_mask, sources)
  return _on_each_device(kernel, layout, query, token_mask, sources)


def _reference(
  query: Float[Array, "B L H d"],
  token_mask: mask.TokenMask,
  sources: Sequence[mask.KeyValues],
) -> Float[Array, "B L H d"]:
  batch, length, heads, width = query.shape
  kv_heads = sources[0].k.shape[2]
  q_BLKGd = query.reshape(batch, length, kv_heads, heads // kv_heads, width)
  scores = [
    blockwise.scores(
      q_BLKGd, source.k, mask.visible(token_mask, source.token_mask)
    )
    for source in sources
  ]
  # The scores are joined, not the keys: those of the cache are never copied.
  weights = jax.nn.softmax(jnp.concatenate(scores, -1)).astype(query.dtype)
  mixed, start = jnp.zeros(q_BLKGd.shape, jnp.float32), 0
  for source in sources:
    stop = start + source.k.shape[1]
    mixed += jnp.einsum(
      "bklgs,bskd->blkgd",
      weights[..., start:stop],
      source.v,
      preferred_element_type=jnp.float32,
    )
    start = stop
  return mixed.astype(query.dtype).reshape(query.shape)


def _fused(
  query: Float[Array, "B L H d"],
  token_mask: mask.TokenMask,
  sources: Sequence[mask.KeyValues],
  *,
  cudnn: bool,
) -> Float[Array, "B L H d"]:
  masks = [mask.visible(token_mask, source.token_mask) for source in sources]
  return jax.nn.dot_product_attention(
    query,
    jnp.concatenate([source.k for source in sources], 1),
    jnp.concatenate([source.v for source in sources], 1),
    mask=jnp.concatenate(masks, -1)[:, None],
    implementation="cudnn" if cudnn else "xla",
  )


def _on_each_device(
  kernel: Callable[..., Array],
  layout: sharding.Layout | None,
  query: Float[Array, "B L H d"],
  token_mask: mask.TokenMask,
  sources: Sequence[mask.KeyValues],
) -> Float[Array, "B L H d"]:
  """Runs a kernel on every device's own rows and heads: nothing is gathered.

  An axis that its devices do not divide stays whole on all of them.
  """
  if layout is None or layout.mesh.size == 1:
    return kernel(query, token_mask, sources)
  rows, heads = _split(layout, query, sources[0])
  wide = layout.spec(rows, "length", heads, None)
  if layout.size("length") > 1:
    # The index in the row is no longer that of the device's own part.
    token_mask = mask.with_positions(token_mask)
    sources = [
      x._replace(token_mask=mask.with_positions(x.token_mask)) for x in sources
    ]
  args = (query, token_mask, tuple(sources))
  mapped = jax.shard_map(
    kernel,
    mesh=layout.mesh,
    in_specs=jax.tree.map(
      lambda x: wide if x.ndim == 4 else layout.spec(rows, "length"), args
    ),
    out_specs=wide,
    # Loops and kernels begin with zeros, which vary over no axis yet.
    check_vma=False,
  )
  return mapped(*args)


def _gathering(
  kernel: Callable[..., Array],
  axes: tuple[str, ...],
  query: Float[Array, "B own_L H d"],
  token_mask: mask.TokenMask,
  sources: Sequence[mask.KeyValues],
) -> Float[Array, "B own_L H d"]:
  """Runs a kernel on a device's own queries and the keys of whole rows.

  Where C devices share a row, each has 1 / C of its queries. The gradients of
  keys and values go back to where they lie, summed. Source: the context
  parallelism of Llama 3, arXiv 2407.21783, section 3.3.2.
  """
  gather = functools.partial(
    jax.lax.all_gather, axis_name=axes, axis=1, tiled=True
  )
  return kernel(query, token_mask, jax.tree.map(gather, sources))


def _split(
  layout: sharding.Layout,
  query: Float[Array, "B L H d"],
  source: mask.KeyValues,
) -> tuple[str | None, str | None]:
  """Returns the logical axes over which rows and heads can be split."""
  rules = layout.rules
  divides = source.k.shape[2] % layout.size("kv_heads") == 0
  rows = "batch" if query.shape[0] % layout.size("batch") == 0 else None
  same = rules.of("heads") == rules.of("kv_heads")
  return rows, "heads" if same and divides else None


def _case(
  query: Float[Array, "B L H d"],
  token_mask: mask.TokenMask,
  sources: Sequence[mask.KeyValues],
  layout: sharding.Layout | None,
) -> backend.Case:
  batch, queries, heads, width = query.shape
  if layout is not None:
    rows, split = _split(layout, query, sources[0])
    batch //= layout.size("batch") if rows else 1
    heads //= layout.size("heads") if split else 1
    queries //= layout.size("length")
  arrays = [query, *(x for source in sources for x in (source.k, source.v))]
  explicit = [
    token_mask.positions,
    *(source.token_mask.positions for source in sources),
  ]
  return backend.Case(
    batch=batch,
    queries=queries,
    keys=sum(source.k.shape[1] for source in sources),
    heads=heads,
    head_dim=width,
    dtypes=frozenset(x.dtype.name for x in arrays),
    sources=len(sources),
    parents=token_mask.parents is not None,
    in_order=all(positions is None for positions in explicit)
    and (layout is None or layout.size("length") == 1),
    windowed=token_mask.oldest is not None,
  )
