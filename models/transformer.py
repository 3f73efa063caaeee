"""The decoder: tokens -> layers of attention and experts -> logits.

  apply    whole rows, several segments packed into one: training, scoring
  extend   a few tokens on top of a cache: prefill in chunks, decoding; its
           hidden states go through `head` where logits are wanted

Parameters are a plain tree: a dict, whose "layers" are a tuple of dicts.
Letters: B rows, L row length, R decoded rows, Q new tokens, D width, V words.
"""

import math
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, PRNGKeyArray

from models import attention, cache, moe
from models import config as config_lib

Params = dict[str, Any]
Aux = moe.Aux

_INIT_STD = 0.02


def logical_axes(config: config_lib.ModelConfig) -> Params:
  """Returns the tree of parameters with their axis names as leaves."""
  layer = {
    "attention_norm": ("embed",),
    "attention": dict(attention.AXES),
    "moe_norm": ("embed",),
    "moe": dict(moe.AXES),
  }
  axes = {
    "embed": ("vocab", "embed"),
    "layers": tuple(layer for _ in range(config.num_layers)),
    "final_norm": ("embed",),
  }
  if not config.tie_embeddings:
    axes["head"] = ("embed", "vocab")
  return axes


def init(key: PRNGKeyArray, config: config_lib.ModelConfig) -> Params:
  """Returns random float32 parameters; norms are 1.

  Matrices have a standard deviation of 0.02, and those that write into the
  residual stream less, so that its variance does not grow with depth.
  Source: GPT-2, Radford et al. 2019, section 2.3.
  """
  axes = logical_axes(config)
  layer_axes = axes.pop("layers")[0]
  keys = jax.random.split(key, config.num_layers + 1)
  # One draw for all layers, so that XLA compiles it only once.
  draw = jax.vmap(lambda key: _draw(key, config, layer_axes))
  stacked = draw(keys[1:])
  layers = tuple(
    jax.tree.map(lambda leaf, i=i: leaf[i], stacked)
    for i in range(config.num_layers)
  )
  return _draw(keys[0], config, axes) | {"layers": layers}


def is_axes(node: Any) -> bool:
  """Whether a node of `logical_axes` is a leaf: a tuple of names."""
  return isinstance(node, tuple) and isinstance(node[0], str)


def apply(
  params: Params,
  config: config_lib.ModelConfig,
  tokens: Int32[Array, "B L"],
  positions: Int32[Array, "B L"],
  segments: Int32[Array, "B L"],
  *,
  mesh: jax.sharding.Mesh | None = None,
) -> tuple[Float[Array, "B L V"], Aux]:
  """Returns logits of packed rows, and how the routers did.

  Args:
    positions: of each token within its segment.
    segments: tokens attend within their own only; 0 is padding, whose logits
      mean nothing.
    mesh: as for `moe.apply`; B must divide over its "data" axis.

  Returns:
    Logits at index t are about the token at t + 1. Aux is averaged over
    layers and over tokens that are not padding.
  """
  mask = attention.packed_mask(segments)

  def attend(_, params, x):
    query, k, v = attention.project(params, config, x, positions)
    return attention.attend(params, query, [attention.Source(k, v, mask)])

  x, aux = _layers(params, config, tokens, segments > 0, attend, mesh)
  return head(params, config, x), aux


def extend(
  params: Params,
  config: config_lib.ModelConfig,
  past: cache.Cache,
  past_lengths: Int32[Array, " R"],
  fresh: cache.Fresh,
  offset: int | Int32[Array, ""],
  tokens: Int32[Array, "R Q"],
  positions: Int32[Array, "R Q"],
  *,
  mesh: jax.sharding.Mesh | None = None,
) -> tuple[Float[Array, "R Q D"], cache.Fresh]:
  """Returns hidden states of new tokens, and `fresh` with their keys in it.

  Args:
    past: only read; row r is valid below past_lengths[r].
    fresh: tokens since then, of which those up to a query's position are seen.
    offset: the new tokens go to fresh[:, offset:offset + Q].
    positions: cache.EMPTY marks padding: nobody sees it, its output means
      nothing.
    mesh: as for `moe.apply`; R must divide over its "data" axis.
  """
  seen = jax.lax.dynamic_update_slice(fresh.positions, positions, (0, offset))
  length = past.k[0].shape[1]
  past_mask = jnp.arange(length) < past_lengths[:, None, None]
  past_mask = jnp.broadcast_to(past_mask, (*tokens.shape, length))
  # A padded query sees whatever fresh holds: its softmax is never empty.
  fresh_mask = seen[:, None, :] <= positions[:, :, None]
  keys, values = list(fresh.k), list(fresh.v)

  def attend(index, params, x):
    query, k, v = attention.project(params, config, x, positions)
    start = (0, offset, 0, 0)
    keys[index] = jax.lax.dynamic_update_slice(keys[index], k, start)
    values[index] = jax.lax.dynamic_update_slice(values[index], v, start)
    sources = [
      attention.Source(past.k[index], past.v[index], past_mask),
      attention.Source(keys[index], values[index], fresh_mask),
    ]
    return attention.attend(params, query, sources)

  valid = positions != cache.EMPTY
  x, _ = _layers(params, config, tokens, valid, attend, mesh)
  return x, cache.Fresh(tuple(keys), tuple(values), seen)


def head(
  params: Params,
  config: config_lib.ModelConfig,
  hidden: Float[Array, "*any D"],
) -> Float[Array, "*any V"]:
  """Returns logits of final hidden states."""
  if config.tie_embeddings:
    return hidden @ params["embed"].T
  return hidden @ params["head"]


def _layers(
  params: Params,
  config: config_lib.ModelConfig,
  tokens: Int32[Array, "B L"],
  valid: Bool[Array, "B L"],
  attend: Callable[[int, Params, Array], Array],
  mesh: jax.sharding.Mesh | None,
) -> tuple[Float[Array, "B L D"], Aux]:
  """Returns hidden states after the final norm, and Aux.

  Args:
    attend: (index of the layer, its parameters, input) -> output.
  """
  eps = config.norm_eps
  x = params["embed"][tokens]
  stats = []
  for index, layer in enumerate(params["layers"]):
    normed = attention.rms_norm(x, layer["attention_norm"], eps)
    x = x + attend(index, layer["attention"], normed)
    normed = attention.rms_norm(x, layer["moe_norm"], eps)
    flat = normed.reshape(-1, config.d_model)
    y, aux = moe.apply(layer["moe"], config, flat, valid.reshape(-1), mesh)
    x = x + y.reshape(x.shape)
    stats.append(aux)
  aux = jax.tree.map(lambda *layers: jnp.mean(jnp.stack(layers)), *stats)
  return attention.rms_norm(x, params["final_norm"], eps), aux


def _draw(
  key: PRNGKeyArray, config: config_lib.ModelConfig, axes: Params
) -> Params:
  sizes = {
    "vocab": config.vocab_size,
    "embed": config.d_model,
    "heads": config.num_heads,
    "kv_heads": config.num_kv_heads,
    "head_dim": config.head_dim,
    "experts": config.num_experts,
    "router": config.num_experts,
    "mlp": config.d_ff,
  }

  def leaf(path, axes):
    shape = tuple(sizes[axis] for axis in axes)
    if len(shape) == 1:
      return jnp.ones(shape)
    name = jax.tree_util.keystr(path)
    residual = name.endswith(("['out']", "['down']"))
    std = _INIT_STD / math.sqrt(2 * config.num_layers if residual else 1)
    own = jax.random.fold_in(key, zlib.crc32(name.encode()))
    return std * jax.random.normal(own, shape)

  return jax.tree_util.tree_map_with_path(leaf, axes, is_leaf=is_axes)
