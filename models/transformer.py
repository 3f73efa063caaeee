"""The decoder: tokens -> layers of attention and experts -> hidden states.

  hidden   whole rows, several segments packed into one: training, scoring
  feed     new ids on top of a cache: chunks of some rows, one id of others
  terms    products that add up to logits, where they are wanted

Letters: B rows, L row length, R rows of a cache with tables of W pages, P of
them with chunks of C ids, N new ids in all, D width, V words, S sparse layers,
k experts of a token.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Int32, Key, PRNGKeyArray, Shaped

from models import config as config_lib
from models import (
  definition,
  initializers,
  kv_cache,
  layer_stack,
  logprobs,
  lora,
  mlp,
  quantize,
  sharding,
)
from models.attention import attention, blockwise, mask, paged
from models.moe import layer as moe_layer

_Cache = TypeVar("_Cache")

_INPUT = "layer_input"

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
  "host": functools.partial(
    jax.checkpoint,
    policy=jax.checkpoint_policies.save_and_offload_only_these_names(
      names_which_can_be_saved=[],
      names_which_can_be_offloaded=[_INPUT],
      offload_src="device",
      offload_dst="pinned_host",
    ),
  ),
}
"""What the backward pass computes again: nothing, what is cheap beside matrix
products and tiled attention, or all of a layer, whose input is kept on the
device or in the memory of the host. On a CPU the last two are one."""


class Block(nnx.Module):
  """A layer: attention, then an MLP or experts, each with its norms."""

  def __init__(self, initializer: initializers.Initializer):
    """Draws the parameters; the initializer says whether there are experts."""
    self.config = initializer.config
    self.attention = attention.Attention(initializer.inside("attention"))
    if self.config.norms_input:
      self.attention_norm = initializer.norm(self.config.d_model)
      self.mlp_norm = initializer.norm(self.config.d_model)
    if self.config.norms_output:
      self.post_attention_norm = initializer.norm(self.config.d_model)
      self.post_mlp_norm = initializer.norm(self.config.d_model)
    if initializer.sparse:
      self.moe = moe_layer.Moe(initializer.inside("moe"))
    else:
      self.mlp = mlp.Mlp(initializer.inside("mlp"))

  def __call__(
    self,
    x: Float[Array, "B L D"],
    copies: Int32[Array, "B L"],
    attend: Callable[[attention.Attention, Array], Array],
    chosen: Int[Array, "B L k"] | None,
    layout: sharding.Layout | None,
    first: Int32[Array, ""] | None,
  ) -> tuple[Float[Array, "B L D"], tuple[moe_layer.Aux, Array] | None]:
    """Returns the residual stream, and what the router did if there is one.

    Args:
      attend: (attention, its input) -> mixed values.
      first: of the experts; see `moe.layer.Moe`.
    """
    place = functools.partial(sharding.constrain, layout)
    normed = self._norm(x, "attention_norm")
    out = self.attention.merge(attend(self.attention, normed))
    out = self._norm(out, "post_attention_norm")
    x = place(x + out, "batch", "length", None)
    normed = self._norm(x, "mlp_norm")
    if not hasattr(self, "moe"):
      out = self._norm(self.mlp(normed), "post_mlp_norm")
      return place(x + out, "batch", "length", None), None
    flat, counts, chosen = jax.tree.map(
      lambda leaf: _flat(layout, leaf), (normed, copies, chosen)
    )
    y, aux, took = self.moe(flat, counts, layout, chosen, first)
    y, took = (_unflat(layout, leaf, x.shape[:2]) for leaf in (y, took))
    return place(x + y, "batch", "length", None), (aux, took)

  def _norm(self, x: Array, name: str) -> Array:
    """Returns x under the norm of a name, or x where the layer has none."""
    scale = getattr(self, name, None)
    if scale is None:
      return x
    return attention.norm(self.config, x, scale.get_value())


class Transformer(lora.Adapted):
  """A decoder as of Qwen, Llama, Gemma or OLMo: a `policy.Policy`.

  Random matrices are the same with and without adapters, which add nothing yet.
  `Initializer.matrix` gives their standard deviations.
  """

  def __init__(self, config: config_lib.ModelConfig, key: PRNGKeyArray):
    """Draws the parameters."""
    keys = jax.random.split(key, config.num_layers + 1)
    initializer = initializers.Initializer(config, keys[0])
    self.config = config
    self.embed = initializer.matrix("embed", "vocab", "embed")
    self.layers = nnx.List(_blocks(config, keys[1:]))
    self.final_norm = initializer.norm(config.d_model)
    if not config.tie_embeddings:
      self.head = initializer.matrix("head", "embed", "vocab")
    initializer.adapt(self)

  def hidden(
    self,
    tokens: Int32[Array, "B L"],
    positions: Int32[Array, "B L"],
    segments: Int32[Array, "B L"],
    *,
    parents: Int32[Array, "B L"] | None = None,
    copies: Int32[Array, "B L"] | None = None,
    experts: Int[Array, "B L S k"] | None = None,
    layout: sharding.Layout | None = None,
  ) -> tuple[Float[Array, "B L D"], moe_layer.Aux]:
    """Returns hidden states of packed rows, and how the routers did."""
    token_mask = mask.packed_mask(segments, parents)
    if copies is None:
      copies = (segments > 0).astype(jnp.int32)
    compute, window = self.config.compute, self.config.window

    def attend(nothing, index, module, x):
      query, k, v = module.project(x, positions, index)
      seen = token_mask
      if window is not None:
        oldest = positions - _reach(window, index) + 1
        seen = token_mask._replace(places=positions, oldest=oldest)
      mixed = attention.attend(
        query,
        seen,
        [mask.KeyValues(k, v, seen)],
        form=compute.attention,
        block=compute.attention_block,
        window=None if window is None else window.size,
        layout=layout,
      )
      return mixed, nothing

    remat = REMAT[self.config.remat]
    x, _, aux, _ = self._layers(
      tokens, copies, attend, None, experts, layout, remat
    )
    return x, aux

  def feed(
    self,
    cache: kv_cache.Cache,
    tables: Int32[Array, "R W"],
    tokens: Int32[Array, " N"],
    positions: Int32[Array, " N"],
    chunks: tuple[int, int],
    *,
    layout: sharding.Layout | None = None,
  ) -> tuple[Float[Array, "N D"], kv_cache.Cache, kv_cache.Experts]:
    """Returns hidden states of new ids, and the cache with them.

    One pass over the weights for all rows.
    """
    owners = _owners(len(tables), chunks)
    at = kv_cache.addresses(cache, tables, owners, positions)
    # Padding sees the first key of its row: no softmax is empty.
    order = jnp.where(positions == kv_cache.EMPTY, 0, positions)
    parts, window = _parts(len(tables), chunks), self.config.window

    def attend(cache, index, module, x):
      query, k, v = module.project(x, positions[:, None], index)
      cache = kv_cache.write(cache, index, at, k[:, 0], v[:, 0], layout)
      mixed = []
      for rows, ids, size in parts:
        part = paged.attend(
          query[ids].reshape(-1, size, *query.shape[2:]),
          order[ids].reshape(-1, size),
          cache,
          index,
          tables[rows],
          None if window is None else _reach(window, index),
          form=self.config.compute.attention,
          layout=layout,
        )
        mixed.append(part.reshape(-1, 1, *query.shape[2:]))
      return jnp.concatenate(mixed), cache

    copies = (positions != kv_cache.EMPTY).astype(jnp.int32)[:, None]
    x, cache, _, experts = self._layers(
      tokens[:, None], copies, attend, cache, None, layout
    )
    return x[:, 0], cache, experts

  def terms(
    self,
    hidden: Float[Array, "*any D"],
    *,
    layout: sharding.Layout | None = None,
  ) -> tuple[logprobs.Term, ...]:
    """Returns the products of which the logits of hidden states are the sum."""
    params = self._outside(layout)
    if self.config.tie_embeddings:
      table = quantize.dequantize(params["embed"], hidden.dtype)
      return (logprobs.Term(hidden, table),)
    adapter = params.get("lora", {}).get("head")
    table = quantize.dequantize(params["head"], hidden.dtype)
    term = logprobs.Term(hidden, table.T)
    if adapter is None:
      return (term,)
    return term, logprobs.Term(hidden @ adapter["a"], adapter["b"].T)

  def init_cache(self, pages: int, page_size: int) -> kv_cache.Cache:
    """Returns a cache of zeros."""
    return kv_cache.init_cache(self.config, pages, page_size)

  def _layers(
    self,
    tokens: Int32[Array, "B L"],
    copies: Int32[Array, "B L"],
    attend: Callable[..., tuple[Array, _Cache]],
    cache: _Cache,
    experts: Int[Array, "B L S k"] | None,
    layout: sharding.Layout | None,
    remat: Callable[[Callable], Callable] = REMAT["none"],
  ) -> tuple[Float[Array, "B L D"], _Cache, moe_layer.Aux, kv_cache.Experts]:
    """Returns hidden states after the final norm, Aux, and the experts taken.

    Args:
      attend: (cache, index of the layer, its attention, input) -> (mixed
        values, cache).
    """
    config = self.config

    def apply(graphdef, axes, stacked, carry, layer):
      (x, cache), (index, params, chosen) = carry, layer
      x, first = checkpoint_name(x, _INPUT), None
      if stacked is not None:
        params, first = stacked.join(params), stacked.first(index)

      def mix(module, normed):
        nonlocal cache
        mixed, cache = attend(cache, index, module, normed)
        return mixed

      block = nnx.merge(graphdef, sharding.gathered(layout, params, axes))
      x, routed = block(x, copies, mix, chosen, layout, first)
      return (x, cache), routed

    x = lora.lookup(self._outside(layout), "embed", tokens, config.dtype)
    if config.architecture == "gemma":
      x *= jnp.asarray(math.sqrt(config.d_model), x.dtype)
    x = sharding.constrain(layout, x, "batch", "length", None)
    carry, routed = (x, cache), []
    steps: dict[bool, Callable] = {}
    for layers, block in zip(config.layer_runs, self.layers, strict=True):
      chosen = None
      if experts is not None and config.is_sparse(layers.start):
        first = sum(map(config.is_sparse, range(layers.start)))
        own = experts[:, :, first : first + len(layers)]
        chosen = jnp.moveaxis(own, 2, 0)
      if config.scans_layers:
        block = layer_stack.single_module(block)
      graphdef, state = nnx.split(block)
      params, axes = nnx.to_pure_dict(state), sharding.axes_of(block)
      stacked = None
      # Training has a gradient for each layer, and devices that share experts
      # exchange tokens for their own.
      alone = layout is None or layout.mesh.size == 1
      if config.scans_layers and cache is not None and alone:
        stacked = layer_stack.ExpertsInPlace(params, axes, layers.start)
        params = stacked.others
      step = remat(functools.partial(apply, graphdef, axes, stacked))
      if config.scans_layers:
        order = jnp.arange(layers.start, layers.stop, dtype=jnp.int32)
        carry, some = jax.lax.scan(step, carry, (order, params, chosen))
      else:
        one = None if chosen is None else chosen[0]
        # Traced and lowered once for all layers of a kind; XLA inlines it.
        step = steps.setdefault(config.is_sparse(layers.start), jax.jit(step))
        carry, some = step(carry, (jnp.int32(layers.start), params, one))
        some = jax.tree.map(lambda leaf: leaf[None], some)
      if some is not None:
        routed.append(some)
    x, cache = carry
    x = attention.norm(config, x, self.final_norm.get_value())
    if not routed:
      return x, cache, moe_layer.average(None, config.num_experts), None
    stats, taken = jax.tree.map(lambda *runs: jnp.concatenate(runs), *routed)
    return x, cache, moe_layer.average(stats), jnp.moveaxis(taken, 0, 2)

  def _outside(self, layout: sharding.Layout | None) -> definition.Params:
    """Returns the parameters outside of layers, gathered."""
    params = self.values()
    if layout is None:
      return params
    axes = sharding.axes_of(self)
    return sharding.gathered(layout, params, {x: axes[x] for x in params})


def _reach(
  window: config_lib.Window, layer: Int32[Array, ""]
) -> Int32[Array, ""]:
  """Returns how many tokens, up to its own, a query of a layer sees."""
  return jnp.where(window.holds(layer), window.size, mask.NO_WINDOW)


def _flat(
  layout: sharding.Layout | None, x: Shaped[Array, "B L *any"]
) -> Shaped[Array, "T *any"]:
  """Returns tokens side by side, those of each device together."""
  if layout is not None and layout.size("length") > 1:
    x = sharding.by_device(layout, x)
  return x.reshape(-1, *x.shape[2:])


def _unflat(
  layout: sharding.Layout | None,
  x: Shaped[Array, "T *any"],
  shape: tuple[int, ...],
) -> Shaped[Array, "B L *any"]:
  rest = x.shape[1:]
  if layout is None or layout.size("length") == 1:
    return x.reshape(*shape, *rest)
  parts = x.reshape(layout.size("tokens"), -1, *rest)
  return sharding.by_row(layout, parts, shape)


def _blocks(
  config: config_lib.ModelConfig, keys: Key[Array, " layers"]
) -> list[Block]:
  """Returns the layers, each with its own key."""
  blocks: dict[int, Block] = {}
  for sparse in (False, True):
    same = [
      i for i in range(config.num_layers) if config.is_sparse(i) == sparse
    ]
    if not same:
      continue
    block = definition.define(
      lambda key, sparse=sparse: Block(
        initializers.Initializer(config, key, sparse)
      )
    )
    # One draw for all layers of a kind, so that XLA compiles it only once.
    stacked = jax.vmap(block.init)(keys[jnp.asarray(same)])
    for layers in config.layer_runs:
      if layers.start not in same:
        continue
      first = same.index(layers.start)
      some = slice(first, first + len(layers)) if config.scans_layers else first
      own = block.bind(jax.tree.map(lambda leaf, at=some: leaf[at], stacked))
      if config.scans_layers:
        own = layer_stack.stacked_module(own)
      blocks[layers.start] = own
  return [blocks[layers.start] for layers in config.layer_runs]


class _Part(NamedTuple):
  """Rows that are fed `size` ids each: where they and their ids are."""

  rows: slice
  ids: slice
  size: int


def _parts(num_rows: int, chunks: tuple[int, int]) -> list[_Part]:
  """Returns the rows with chunks and those without, where there are any."""
  num_chunks, size = chunks
  split = num_chunks * size
  parts = []
  if num_chunks:
    parts.append(_Part(slice(0, num_chunks), slice(0, split), size))
  if num_chunks < num_rows:
    parts.append(_Part(slice(num_chunks, None), slice(split, None), 1))
  return parts


def _owners(num_rows: int, chunks: tuple[int, int]) -> Int32[Array, " N"]:
  """Returns the row of each new id."""
  num_chunks, size = chunks
  row = jnp.arange(num_rows, dtype=jnp.int32)
  return jnp.concatenate([jnp.repeat(row[:num_chunks], size), row[num_chunks:]])
