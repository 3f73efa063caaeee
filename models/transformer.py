"""The decoder: tokens -> layers of attention and experts -> hidden states.

  hidden   whole rows, several segments packed into one: training, scoring
  feed     new ids on top of a cache: chunks of some rows, one id of others
  head     logits of hidden states, where they are wanted

Parameters are a plain tree: a dict, whose "layers" are a tuple of dicts.
Letters: B rows, L row length, R rows of a cache, P of them with chunks of C
ids, N new ids in all, D width, V words, S sparse layers, k experts of a token.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, PRNGKeyArray

from models import config as config_lib
from models import initializers, kv_cache, logprobs, lora, mlp, sharding
from models.attention import attention, backend, blockwise, mask
from models.moe import layer as moe_layer

Params = dict[str, Any]
Aux = moe_layer.Aux
Experts = Int32[Array, "B L S k"] | None
"""Those that each token took in every sparse layer, -1 of padding."""

REMAT: dict[str, Callable[[Callable], Callable]] = {
  "none": lambda layer: layer,
  "dots": functools.partial(
    jax.checkpoint,
    policy=jax.checkpoint_policies.save_from_both_policies(
      jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
      jax.checkpoint_policies.save_only_these_names(
        *blockwise.SAVED, *moe_layer.SAVED
      ),
    ),
  ),
  "layer": jax.checkpoint,
}
"""What the backward pass computes again: nothing, what is cheap beside matrix
products and tiled attention, or all of a layer."""


def logical_axes(config: config_lib.ModelConfig) -> Params:
  """Returns the tree of parameters with their axis names as leaves."""

  def layer(index: int) -> Params:
    sparse = config.is_sparse(index)
    return {
      "attention_norm": ("norm",),
      "attention": lora.with_axes(attention.AXES, config.lora),
      "mlp_norm": ("norm",),
      "moe" if sparse else "mlp": lora.with_axes(
        moe_layer.AXES if sparse else mlp.AXES, config.lora
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
    draw = jax.vmap(
      lambda key, at=same[0]: initializers.draw(key, config, layer_axes[at])
    )
    stacked = draw(keys[1:][jnp.asarray(same)])
    for place, i in enumerate(same):
      layers[i] = jax.tree.map(lambda leaf, at=place: leaf[at], stacked)
  return initializers.draw(keys[0], config, axes) | {"layers": tuple(layers)}


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
      to as well, or `mask.NO_PARENT`.
    copies: how many tokens each stands for in Aux; None is 1 each.
    experts: those that the routers must choose, such as were chosen when the
      tokens were sampled; -1 leaves a choice to the router.
    layout: of mesh and rules; None is one device.

  Returns:
    The hidden state at index t is about the token at t + 1. Aux is averaged
    over layers with experts and over tokens that are not padding.
  """
  marks = mask.packed_marks(segments, parents)
  if copies is None:
    copies = (segments > 0).astype(jnp.int32)

  def attend(_, params, x):
    query, k, v = attention.project(params, config, x, positions)
    return attention.attend(
      query,
      marks,
      [mask.Source(k, v, marks)],
      form=config.compute.attention,
      block=config.compute.attention_block,
      layout=layout,
    )

  x, aux, _ = _layers(
    params,
    config,
    tokens,
    copies,
    attend,
    experts,
    layout,
    REMAT[config.compute.remat],
  )
  return x, aux


def feed(
  params: Params,
  config: config_lib.ModelConfig,
  past: kv_cache.Past,
  lengths: Int32[Array, " R"],
  tokens: Int32[Array, " N"],
  positions: Int32[Array, " N"],
  chunks: tuple[int, int],
  *,
  layout: sharding.Layout | None = None,
) -> tuple[Float[Array, "N D"], kv_cache.Past, kv_cache.Fresh, Experts]:
  """Returns hidden states of new ids, and where their keys and values are.

  One pass over the weights for all rows: the first P have up to C new ids
  each, the others one. N = P * C + R - P, in the order of the rows. A step of
  a decoding loop has no chunks: (0, 1).

  Args:
    past: keys and values of before; below `lengths` they are valid once the
      new ones are written.
    lengths: of each row, with its new ids.
    positions: cache.EMPTY marks padding: nobody sees it, its output means
      nothing.
    chunks: (P, C).

  Returns:
    Hidden states; `past` with the new tokens in it, written in place where
    nobody else holds it; these alone, in N rows of one; and the experts that
    they took.
  """
  num_rows, length = past.k[0].shape[:2]
  owners = _owners(num_rows, chunks)
  parts = _parts(lengths, positions, chunks, length)
  keys, values = list(past.k), list(past.v)
  new_keys, new_values = [], []

  def attend(index, params, x):
    query, k, v = attention.project(params, config, x, positions[:, None])
    new_keys.append(k)
    new_values.append(v)
    # EMPTY lies past the end: such writes are dropped.
    at = (owners, positions)
    keys[index] = keys[index].at[at].set(k[:, 0], mode="drop")
    values[index] = values[index].at[at].set(v[:, 0], mode="drop")
    past = keys[index], values[index]
    return jnp.concatenate(
      [_attend_past(config, layout, part, query, *past) for part in parts]
    )

  copies = (positions != kv_cache.EMPTY).astype(jnp.int32)[:, None]
  x, _, experts = _layers(
    params, config, tokens[:, None], copies, attend, None, layout
  )
  fresh = kv_cache.Fresh(tuple(new_keys), tuple(new_values), positions[:, None])
  return x[:, 0], kv_cache.Past(tuple(keys), tuple(values)), fresh, experts


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


class _Part(NamedTuple):
  """Rows that are fed equally many ids, and who of these sees which keys.

  Attributes:
    rows, ids: where they are among all R rows and all N ids.
  """

  rows: slice
  ids: slice
  queries: mask.Marks
  keys: mask.Marks


def _parts(
  lengths: Int32[Array, " R"],
  positions: Int32[Array, " N"],
  chunks: tuple[int, int],
  max_length: int,
) -> list[_Part]:
  """Returns the rows with chunks and those without, where there are any."""
  (num_chunks, size), num_rows = chunks, len(lengths)
  split = num_chunks * size
  order = jnp.broadcast_to(
    jnp.arange(max_length, dtype=jnp.int32), (num_rows, max_length)
  )
  # A row whose ids are all padding sees its first key: no softmax is empty.
  written = jnp.where(order < jnp.maximum(lengths, 1)[:, None], 1, -1)

  def part(rows: slice, ids: slice, width: int) -> _Part:
    at = positions[ids].reshape(-1, width)
    return _Part(
      rows,
      ids,
      mask.Marks(at, jnp.ones_like(at)),
      mask.Marks(order[rows], written[rows]),
    )

  parts = []
  if num_chunks:
    parts.append(part(slice(0, num_chunks), slice(0, split), size))
  if num_chunks < num_rows:
    parts.append(part(slice(num_chunks, None), slice(split, None), 1))
  return parts


def _owners(num_rows: int, chunks: tuple[int, int]) -> Int32[Array, " N"]:
  """Returns the row of each new id."""
  num_chunks, size = chunks
  row = jnp.arange(num_rows, dtype=jnp.int32)
  return jnp.concatenate([jnp.repeat(row[:num_chunks], size), row[num_chunks:]])


def _attend_past(
  config: config_lib.ModelConfig,
  layout: sharding.Layout | None,
  part: _Part,
  query: Float[Array, "N 1 H d"],
  k: Float[Array, "R length K d"],
  v: Float[Array, "R length K d"],
) -> Float[Array, "part_of_N 1 H d"]:
  """Returns the mixed values of the ids of one part."""
  heads = query.shape[2:]
  form = config.compute.attention
  mixed = attention.attend(
    query[part.ids].reshape(*part.queries.segments.shape, *heads),
    part.queries,
    [mask.Source(k[part.rows], v[part.rows], part.keys)],
    # One that is meant for whole rows may not do here.
    form=form if form in backend.UNIVERSAL else "auto",
    block=config.compute.attention_block,
    layout=layout,
  )
  return mixed.reshape(-1, 1, *heads)


def _layers(
  params: Params,
  config: config_lib.ModelConfig,
  tokens: Int32[Array, "B L"],
  copies: Int32[Array, "B L"],
  attend: Callable[[int, Params, Array], Array],
  experts: Int32[Array, "B L S k"] | None,
  layout: sharding.Layout | None,
  # With a cache nothing is differentiated, and `attend` has side effects.
  remat: Callable[[Callable], Callable] = REMAT["none"],
) -> tuple[Float[Array, "B L D"], Aux, Experts]:
  """Returns hidden states after the final norm, Aux, and who was chosen.

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
      x = place(x + mlp.apply(layer["mlp"], normed), "batch", None, None)
      return x, None
    flat = normed.reshape(-1, config.d_model)
    y, aux, took = moe_layer.apply(
      layer["moe"], config, flat, copies.reshape(-1), layout, chosen
    )
    x = place(x + y.reshape(x.shape), "batch", None, None)
    return x, (aux, took.reshape(*x.shape[:2], -1))

  params = lora.scaled(params, config.lora)
  tables = _outside(params, axes, layout)
  x = lora.lookup(tables, "embed", tokens, config.compute.dtype)
  x = place(x, "batch", None, None)
  stats, taken = [], []
  for index, layer in enumerate(params["layers"]):
    chosen = None
    if experts is not None and config.is_sparse(index):
      chosen = experts[:, :, len(stats)].reshape(-1, experts.shape[-1])
    x, routed = remat(functools.partial(block, index))(layer, x, chosen)
    if routed is not None:
      stats.append(routed[0])
      taken.append(routed[1])
  x = attention.rms_norm(x, params["final_norm"], eps)
  aux = moe_layer.average(stats, config.num_experts)
  return x, aux, jnp.stack(taken, 2) if taken else None


def _outside(
  params: Params, axes: Params, layout: sharding.Layout | None
) -> Params:
  """Returns the parameters outside of layers, gathered."""
  names = [name for name in params if name != "layers"]
  return sharding.gathered(
    layout, {n: params[n] for n in names}, {n: axes[n] for n in names}
  )
