"""The layout of a model on a mesh, and the memory it takes: arithmetic only.

Nothing here touches a device, so a laptop can plan for a pod. Parameters, and
whatever is laid out like them, are exact; activations are an estimate.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from models import config as config_lib
from models import kv_cache, layer_stack, lora, sharding
from models import policy as policy_lib
from models.attention import backend, packed, paged


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter:
  """One row of the table: a parameter, or the same one of several layers.

  Attributes:
    name: dotted path; "layers.0-27" and "layers.0,4-9" stand for several.
    count: number of parameters that the row stands for.
    device_bytes: of all of them on one device.
  """

  name: str
  shape: tuple[int, ...]
  axes: tuple[str | None, ...]
  spec: jax.sharding.PartitionSpec
  dtype: str
  count: int
  device_bytes: int


class ParameterCount(NamedTuple):
  """Numbers of parameters: all, those that a token uses, those that train."""

  total: int
  active: int
  trained: int


def num_params(config: config_lib.ModelConfig) -> ParameterCount:
  """Returns how many parameters the policy has."""
  policy = policy_lib.of(config)
  trained, _ = lora.split(policy.shapes)

  def active(names, leaf):
    if "experts" not in names:
      return leaf.size
    experts = leaf.shape[names.index("experts")]
    return leaf.size // experts * config.experts_per_token

  used = jax.tree.map(
    active, policy.axes, policy.shapes, is_leaf=sharding.is_axes
  )
  total, trained = (
    sum(leaf.size for leaf in jax.tree.leaves(tree))
    for tree in (policy.shapes, trained)
  )
  return ParameterCount(total, sum(jax.tree.leaves(used)), trained)


def parameters(
  config: config_lib.ModelConfig, layout: sharding.Layout
) -> list[Parameter]:
  """Returns every parameter once, layers of the same shape as one row.

  Args:
    layout: validated; of existing devices or of an AbstractMesh.
  """
  policy = policy_lib.of(layer_stack.unrolled(config))
  axes, shapes = policy.axes, jax.tree.leaves(policy.shapes)
  leaves = jax.tree_util.tree_leaves_with_path(axes, is_leaf=sharding.is_axes)
  found: dict[tuple, list[int]] = {}
  for (path, names), leaf in zip(leaves, shapes, strict=True):
    layer, name = _name(path)
    key = (name, leaf.shape, names, str(leaf.dtype))
    found.setdefault(key, []).append(layer)
  rows = []
  for (name, shape, names, dtype), layers in found.items():
    prefix = "" if layers == [-1] else f"layers.{_ranges(layers)}."
    sharded = layout.sharding(*names)
    size = math.prod(sharded.shard_shape(shape)) * np.dtype(dtype).itemsize
    rows.append(
      Parameter(
        name=prefix + name,
        shape=shape,
        axes=names,
        spec=sharded.spec,
        dtype=dtype,
        count=len(layers),
        device_bytes=size * len(layers),
      )
    )
  # As they are used.
  places = {"embed": 0, "final_norm": 2, "head": 3}
  return sorted(rows, key=lambda row: places.get(row.name, 1))


def placed(shapes: Any, shardings: Any) -> Any:
  """Returns a tree of ShapeDtypeStruct with shardings, which need no device.

  Args:
    shardings: of the same tree, or of one that this one begins with.
  """
  return jax.tree.map(
    lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
    shapes,
    jax.tree.broadcast(shardings, shapes),
  )


def device_bytes(tree: Any) -> int:
  """Returns bytes on one device of a tree of ShapeDtypeStruct with shardings.

  A leaf without a sharding is taken as whole on every device. One in the
  memory of the host takes nothing.
  """

  def size(leaf):
    place = leaf.sharding
    if place is not None and place.memory_kind == "pinned_host":
      return 0
    shape = leaf.shape if place is None else place.shard_shape(leaf.shape)
    return math.prod(shape) * leaf.dtype.itemsize

  return sum(map(size, jax.tree.leaves(tree)))


def readable(number: int) -> str:
  """Returns bytes with up to three digits: 345 B, 1.2 KiB, 12 GiB."""
  size, units = float(number), ["B", "KiB", "MiB", "GiB", "TiB"]
  while size >= 1000 and len(units) > 1:
    size /= 1024
    units.pop(0)
  digits = 0 if units[0] == "B" else 2 if size < 10 else 1 if size < 100 else 0
  return f"{size:.{digits}f} {units[0]}"


def cache_bytes(
  config: config_lib.ModelConfig,
  layout: sharding.Layout,
  *,
  pages: int,
  page_size: int,
) -> int:
  """Returns bytes on one device of the pages of a KV cache."""
  init_cache = policy_lib.of(config).module.init_cache
  shapes = jax.eval_shape(lambda: init_cache(pages, page_size))
  place = layout.sharding(*kv_cache.AXES)
  return device_bytes(placed(shapes, jax.tree.map(lambda _: place, shapes)))


def activation_bytes(
  config: config_lib.ModelConfig,
  layout: sharding.Layout,
  *,
  rows: int,
  length: int,
  platform: str = "cpu",
) -> int:
  """Estimates what the tokens of one micro-batch need on one device.

  With n tokens on the device, s bytes a number, and widths as split over the
  mesh: D of the model, h of queries, k of keys, f of an MLP or, in a sparse
  layer, 9/8 of k_e experts, whose last blocks are filled up:

    inside     of a layer: n (8 D + 4 h + 6 k + 5 f) s, 2 n k_e D s when
               sparse, and 8 bytes for each score of attention, unless it goes
               by tiles
    kept       of every layer for the backward pass, by `config.remat`: all of
               it with "none"; n (2 D + h + 2 k) s and, when dense, 2 n f s
               with "dots"; n D s with "layer"; with "host" the same, but of
               two layers at most: that in use and that on its way
    shared     where C devices share a row: keys and values that come from the
               next one, and the gradients handed on, or with "fused" the keys
               and values of the whole row; of one layer
    logits     12 bytes each, of `logprob_chunk` tokens, less by C

  and the estimate is the sum, with the inside of one layer. Together with
  `parameter_use_bytes` it has been between half and twice of what XLA takes.
  """
  compute = config.compute
  form, has_scores = _attention(config, layout, rows, length, platform)
  scores = 0.0
  if has_scores:
    scores = length * config.num_heads / layout.size("heads")
  itemsize = np.dtype(config.dtype).itemsize
  inside, kept = 0.0, 0.0
  if compute.attention == "packed" and platform == "gpu":
    # Statistics of the softmax of every run.
    scores += packed.MAX_RUNS / 2 * config.num_heads / layout.size("heads")
  for index in range(config.num_layers):
    sparse = config.is_sparse(index)
    everything, dots = _widths(config, layout, sparse)
    everything += 8 / itemsize * scores
    inside = max(inside, everything)
    by_policy = {"none": everything, "dots": dots}
    kept += by_policy.get(config.remat, config.d_model)
  if config.remat == "host" and platform != "cpu":
    kept = min(config.num_layers, 2) * config.d_model
  tokens = rows * length // layout.size("tokens")
  words = config.vocab_size // layout.size("vocab")
  if (parts := layout.size("length")) > 1:
    keys = 2 * config.num_kv_heads * config.head_dim / layout.size("kv_heads")
    inside += keys * (1 + 4 / itemsize if form == "blockwise" else parts)
  chunk = -(-compute.logprob_chunk // parts)
  return (
    round(tokens * itemsize * (inside + kept)) + 12 * min(tokens, chunk) * words
  )


def parameter_use_bytes(
  config: config_lib.ModelConfig, layout: sharding.Layout
) -> int:
  """Estimates what one micro-batch needs on one device for parameters.

  gathered   the largest layer's parameters and the tables, as they are used,
             and their gradients; with "none" those of every layer
  gradients  of this micro-batch, before they are added to the sum
  """
  gathered = _gathered_bytes(config, layout)
  return 2 * gathered + _gradient_bytes(config, layout)


def dispatch_bytes(
  config: config_lib.ModelConfig,
  layout: sharding.Layout,
  *,
  rows: int,
  ids: int,
  sampled: int,
) -> int:
  """Estimates what decoding needs on one device beside its cache.

  That is the inside of a layer for new ids, their scores of a tile of pages,
  the tile of each row, and the logits of the ids sampled at once: four arrays
  of float32.
  """
  inside = max(
    _widths(config, layout, config.is_sparse(index))[0]
    for index in range(config.num_layers)
  )
  heads = config.num_heads / layout.size("heads")
  tile = min(config.max_length, max(paged.TILE.values()))
  keys = config.num_kv_heads * config.head_dim / layout.size("kv_heads")
  words = config.vocab_size // layout.size("vocab")
  itemsize = np.dtype(config.dtype).itemsize
  return round(
    itemsize * (ids * inside + 2 * rows * tile * keys)
    + 4 * ids * heads * tile
    + 16 * sampled * words
  )


def _widths(
  config: config_lib.ModelConfig,
  layout: sharding.Layout,
  sparse: bool,
) -> tuple[float, float]:
  """Returns numbers a token inside of a layer, and kept with "dots"."""
  width = config.d_model
  queries = config.num_heads * config.head_dim / layout.size("heads")
  keys = config.num_kv_heads * config.head_dim / layout.size("kv_heads")
  if sparse:
    num = config.experts_per_token
    hidden = 9 / 8 * num * config.d_expert / layout.mesh.shape["tensor"]
  else:
    num = 0
    hidden = config.d_ff / layout.size("mlp")
  inside = 8 * width + 4 * queries + 6 * keys + 5 * hidden + 2 * num * width
  dots = 2 * width + queries + 2 * keys + (0 if sparse else 2 * hidden)
  return inside, dots


def _gathered_bytes(
  config: config_lib.ModelConfig, layout: sharding.Layout
) -> int:
  """Returns bytes of the copies that `sharding.gathered` makes."""

  def size(names, leaf):
    if layout.is_whole(leaf.shape, *names):
      return 0
    part = layout.whole(*names).shard_shape(leaf.shape)
    return math.prod(part) * leaf.dtype.itemsize

  def total(names, tree):
    sizes = jax.tree.map(size, names, tree, is_leaf=sharding.is_axes)
    return sum(jax.tree.leaves(sizes))

  policy = policy_lib.of(layer_stack.unrolled(config))
  layers = [
    total(axes, policy.shapes["layers"][i])
    for i, axes in policy.axes.get("layers", {}).items()
  ]
  join = sum if config.remat == "none" else max
  inside = join(layers) if layers else 0
  outside = policy.axes.keys() - {"layers"}
  return inside + sum(
    total(policy.axes[name], policy.shapes[name]) for name in outside
  )


def _gradient_bytes(
  config: config_lib.ModelConfig, layout: sharding.Layout
) -> int:
  policy = policy_lib.of(config)
  shapes, _ = lora.split(policy.shapes)
  axes, _ = lora.split(policy.axes)
  return device_bytes(placed(shapes, layout.tree(axes)))


def _name(path: tuple[Any, ...]) -> tuple[int, str]:
  """Returns the layer, or -1, and the dotted path below it."""
  keys = [getattr(key, "key", getattr(key, "idx", key)) for key in path]
  if keys[0] == "layers":
    return keys[1], ".".join(map(str, keys[2:]))
  return -1, ".".join(map(str, keys))


def _ranges(numbers: Iterable[int]) -> str:
  """Returns "0-2,5" for 0, 1, 2, 5."""

  runs: list[tuple[int, int]] = []
  for number in numbers:
    first, last = runs.pop() if runs else (number, number)
    if number > last + 1:
      runs.append((first, last))
      first = number
    runs.append((first, number))
  return ",".join(f"{a}-{b}" if b > a else f"{a}" for a, b in runs)


def _attention(
  config: config_lib.ModelConfig,
  layout: sharding.Layout,
  rows: int,
  length: int,
  platform: str,
) -> tuple[str, bool]:
  """Returns the form, and whether all scores of a layer exist at once."""
  case = backend.Case(
    batch=rows // layout.num_batch,
    queries=length // layout.size("length"),
    keys=length,
    heads=config.num_heads // layout.size("heads"),
    head_dim=config.head_dim,
    dtypes=frozenset([config.dtype]),
    windowed=config.window is not None,
  )
  form = config.compute.attention
  if form in backend.CHOSEN:
    form = backend.choose(platform, case)
  if form == "fused":
    return form, not (platform == "gpu" and backend.cudnn_can(case))
  return form, form == "reference"
