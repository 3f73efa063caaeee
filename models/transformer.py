"""The decoder: tokens -> layers of attention and experts -> hidden states.

  hidden   whole rows, several segments packed into one: training, scoring
  extend   a few tokens on top of a cache: prefill in chunks, decoding
  head     logits of hidden states, where they are wanted

Parameters are a plain tree: a dict, whose "layers" are a tuple of dicts.
Letters: B rows, L row length, R decoded rows, Q new tokens, D width, V words,
S sparse layers, k experts of a token.
"""

import functools
import math
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, PRNGKeyArray

from models import (
  attention,
  attention_form,
  cache,
  flash,
  logprobs,
  lora,
  mlp,
  moe,
  sharding,
)
from models import config as config_lib

Params = dict[str, Any]
Aux = moe.Aux

REMAT: dict[str, Callable[[Callable], Callable]] = {
  "none": lambda layer: layer,
  "dots": functools.partial(
    jax.checkpoint,
    policy=jax.checkpoint_policies.save_from_both_policies(
      jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
      jax.checkpoint_policies.save_only_these_names(*flash.SAVED, *moe.SAVED),
    ),
  ),
  "layer": jax.checkpoint,
}
"""What the backward pass computes again: nothing, what is cheap beside matrix
products and tiled attention, or all of a layer."""

_INIT_STD = 0.02


def logical_axes(config: config_lib.ModelConfig) -> Params:
  """Returns the tree of parameters with their axis names as leaves."""

  def layer(index: int) -> Params:
    sparse = config.is_sparse(index)
    return {
      "attention_norm": ("norm",),
      "attention": lora.with_axes(attention.AXES, config.lora),
      "mlp_norm": ("norm",),
      "moe" if sparse else "mlp": lora.with_axes(
        moe.AXES if sparse else mlp.AXES, config.lora
      ),
    }

  axes = {
    "embed": ("vocab", "embed"),
    "layers": tuple(map(layer, range(config.num_layers))),
    "final_norm": ("norm",),
  }
  if not config.tie_embeddings:
    axes["head"] = ("embed", "vocab")
  return lora.with_axes(axes, config.lora)


def shapes(config: config_lib.ModelConfig) -> Params:
  """Returns the tree of parameters with a ShapeDtypeStruct as each leaf."""
  # The key is made inside: outside it would be put on a device.
  return jax.eval_shape(lambda: init(jax.random.key(0), config))


def init(key: PRNGKeyArray, config: config_lib.ModelConfig) -> Params:
  """Returns random parameters; norms are 1.

  Matrices have a standard deviation of 0.02, and those that write into the
  residual stream less, so that its variance does not grow with depth. They
  are the same with and without adapters, which add nothing yet.
  Source: GPT-2, Radford et al. 2019, section 2.3.
  """
  axes = logical_axes(config)
  layer_axes = axes.pop("layers")
  keys = jax.random.split(key, config.num_layers + 1)
  layers: list[Params] = [{}] * config.num_layers
  for sparse in (False, True):
    same = [
      i for i in range(config.num_layers) if config.is_sparse(i) == sparse
    ]
    if not same:
      continue
    # One draw for all layers of a kind, so that XLA compiles it only once.
    draw = jax.vmap(lambda key, at=same[0]: _draw(key, config, layer_axes[at]))
    stacked = draw(keys[1:][jnp.asarray(same)])
    for place, i in enumerate(same):
      layers[i] = jax.tree.map(lambda leaf, at=place: leaf[at], stacked)
  return _draw(keys[0], config, axes) | {"layers": tuple(layers)}


def hidden(
  params: Params,
  config: config_lib.ModelConfig,
  tokens: Int32[Array, "B L"],
  positions: Int32[Array, "B L"],
  segments: Int32[Array, "B L"],
  *,
  parents: Int32[Array, "B L"] | None = None,
  copies: Int32[Array, "B L"] | None = None,
  experts: Int32[Array, "B L S k"] | None = None,
  layout: sharding.Layout | None = None,
) -> tuple[Float[Array, "B L D"], Aux]:
  """Returns hidden states of packed rows, and how the routers did.

  Args:
    positions: of each token within its conversation.
    segments: tokens attend within their own; 0 is padding, whose hidden
      states mean nothing.
    parents: another segment of the row, before this one, that a token attends
      to as well, or `attention.NO_PARENT`.
    copies: how many tokens each stands for in Aux; None is 1 each.
    experts: those that the routers must choose, such as were chosen when the
      tokens were sampled; -1 leaves a choice to the router.
    layout: of mesh and rules; None is one device.

  Returns:
    The hidden state at index t is about the token at t + 1. Aux is averaged
    over layers with experts and over tokens that are not padding.
  """
  marks = attention.packed_marks(segments, parents)
  if copies is None:
    copies = (segments > 0).astype(jnp.int32)

  def attend(_, params, x):
    query, k, v = attention.project(params, config, x, positions)
    return attention.attend(
      query,
      marks,
      [attention.Source(k, v, marks)],
      form=config.compute.attention,
      block=config.compute.attention_block,
      layout=layout,
    )

  remat = REMAT[config.compute.remat]
  return _layers(params, config, tokens, copies, attend, experts, layout, remat)


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
  layout: sharding.Layout | None = None,
) -> tuple[Float[Array, "R Q D"], cache.Fresh]:
  """Returns hidden states of new tokens, and `fresh` with their keys in it.

  Args:
    past: only read; row r is valid below past_lengths[r].
    fresh: tokens since then, of which those up to a query's position are seen.
    offset: the new tokens go to fresh[:, offset:offset + Q].
    positions: cache.EMPTY marks padding: nobody sees it, its output means
      nothing.
  """
  seen = jax.lax.dynamic_update_slice(fresh.positions, positions, (0, offset))
  rows, length = past.k[0].shape[:2]
  order = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (rows, length))
  written = jnp.where(order < past_lengths[:, None], 1, -1)
  past_marks = attention.Marks(order, written)
  # A padded query sees whatever fresh holds: its softmax is never empty.
  fresh_marks = attention.Marks(seen, jnp.ones_like(seen))
  marks = attention.Marks(positions, jnp.ones_like(positions))
  keys, values = list(fresh.k), list(fresh.v)
  form = config.compute.attention
  form = form if form in attention_form.UNIVERSAL else "auto"

  def attend(index, params, x):
    query, k, v = attention.project(params, config, x, positions)
    start = (0, offset, 0, 0)
    keys[index] = jax.lax.dynamic_update_slice(keys[index], k, start)
    values[index] = jax.lax.dynamic_update_slice(values[index], v, start)
    sources = [
      attention.Source(past.k[index], past.v[index], past_marks),
      attention.Source(keys[index], values[index], fresh_marks),
    ]
    return attention.attend(
      query,
      marks,
      sources,
      form=form,
      block=config.compute.attention_block,
      layout=layout,
    )

  copies = (positions != cache.EMPTY).astype(jnp.int32)
  # Nothing is differentiated here, and `attend` writes to `keys`.
  kept = REMAT["none"]
  x, _ = _layers(params, config, tokens, copies, attend, None, layout, kept)
  return x, cache.Fresh(tuple(keys), tuple(values), seen)


def head(
  params: Params,
  config: config_lib.ModelConfig,
  hidden: Float[Array, "*any D"],
  *,
  layout: sharding.Layout | None = None,
) -> Float32[Array, "*any V"]:
  """Returns float32 logits of final hidden states, as training sees them."""
  params = _outside(params, logical_axes(config), layout)
  return logprobs.logits(logprobs.terms(params, config, hidden))


def _layers(
  params: Params,
  config: config_lib.ModelConfig,
  tokens: Int32[Array, "B L"],
  copies: Int32[Array, "B L"],
  attend: Callable[[int, Params, Array], Array],
  experts: Int32[Array, "B L S k"] | None,
  layout: sharding.Layout | None,
  remat: Callable[[Callable], Callable],
) -> tuple[Float[Array, "B L D"], Aux]:
  """Returns hidden states after the final norm, and Aux.

  Args:
    attend: (index of the layer, its parameters, input) -> mixed values.
  """
  eps = config.norm_eps
  axes = logical_axes(config)
  place = functools.partial(sharding.constrain, layout)

  def block(index, layer, x, chosen):
    layer = sharding.gathered(layout, layer, axes["layers"][index])
    normed = attention.rms_norm(x, layer["attention_norm"], eps)
    mixed = attend(index, layer["attention"], normed)
    out = attention.merge(layer["attention"], mixed)
    x = place(x + out, "batch", None, None)
    normed = attention.rms_norm(x, layer["mlp_norm"], eps)
    if "mlp" in layer:
      return place(
        x + mlp.apply(layer["mlp"], normed), "batch", None, None
      ), None
    flat = normed.reshape(-1, config.d_model)
    y, aux = moe.apply(
      layer["moe"], config, flat, copies.reshape(-1), layout, chosen
    )
    return place(x + y.reshape(x.shape), "batch", None, None), aux

  params = lora.scaled(params, config.lora)
  tables = _outside(params, axes, layout)
  x = place(lora.lookup(tables, "embed", tokens), "batch", None, None)
  stats = []
  for index, layer in enumerate(params["layers"]):
    chosen = None
    if experts is not None and config.is_sparse(index):
      chosen = experts[:, :, len(stats)].reshape(-1, experts.shape[-1])
    x, aux = remat(functools.partial(block, index))(layer, x, chosen)
    if aux is not None:
      stats.append(aux)
  x = attention.rms_norm(x, params["final_norm"], eps)
  return x, moe.average(stats, config.num_experts)


def _outside(
  params: Params, axes: Params, layout: sharding.Layout | None
) -> Params:
  """Returns the parameters outside of layers, gathered."""
  names = [name for name in params if name != "layers"]
  return sharding.gathered(
    layout, {n: params[n] for n in names}, {n: axes[n] for n in names}
  )


def _draw(
  key: PRNGKeyArray, config: config_lib.ModelConfig, axes: Params
) -> Params:
  """Returns parameters with these axes, and 1 where the axis is of a norm."""
  sizes = config_lib.axis_sizes(config, sparse="moe" in axes)

  def leaf(path, axes):
    name = jax.tree_util.keystr(path)
    if axes == ("norm",):
      heads = name.endswith(("['query_norm']", "['key_norm']"))
      width = config.head_dim if heads else config.d_model
      return jnp.ones(width, config.compute.dtype)
    shape = tuple(sizes[axis] for axis in axes)
    if name.endswith("['b']"):
      return jnp.zeros(shape, config.compute.dtype)
    residual = name.endswith(("['out']", "['down']"))
    std = _INIT_STD / math.sqrt(2 * config.num_layers if residual else 1)
    if name.endswith("['a']"):
      std = lora.init_std(path[-2].key, shape)
    own = jax.random.fold_in(key, zlib.crc32(name.encode()))
    noise = std * jax.random.normal(own, shape)
    return noise.astype(config.compute.dtype)

  return jax.tree_util.tree_map_with_path(leaf, axes, is_leaf=sharding.is_axes)
