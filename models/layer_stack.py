"""Parameters of layers that are scanned, stacked along a leading axis.

  unrolled   params["layers"] = {0: layer, 1: layer, ...}
  scanned    params["layers"] = {0: run, 1: run, ...}

A run is of neighbours of one kind, whose leaves have the layers in front:
[n, *shape]. `ModelConfig.layer_runs` lists them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from models import config as config_lib
from models import definition, sharding

_M = TypeVar("_M", bound=nnx.Module)


def unrolled(config: config_lib.ModelConfig) -> config_lib.ModelConfig:
  """Returns the same model with each layer by itself."""
  compute = dataclasses.replace(config.compute, layers="unroll")
  return dataclasses.replace(config, compute=compute)


def unstack(
  params: definition.Params,
  config: config_lib.ModelConfig,
  take: Callable[[Any, int], Any] = lambda stack, index: stack[index],
) -> definition.Params:
  """Returns the parameters of `unrolled(config)`.

  Args:
    params: of `config`, or a part of their tree, such as its adapters.
    take: returns the leaf of one layer.
  """
  if not config.scans_layers or "layers" not in params:
    return params
  layers = {
    index: jax.tree.map(lambda leaf, at=place: take(leaf, at), run)
    for indices, run in zip(
      config.layer_runs, params["layers"].values(), strict=True
    )
    for place, index in enumerate(indices)
  }
  return {**params, "layers": layers}


def stack(
  params: definition.Params,
  config: config_lib.ModelConfig,
  join: Callable[[list[Any]], Any] = jnp.stack,
) -> definition.Params:
  """Returns the parameters of `config`; inverse of `unstack`.

  Args:
    params: of `unrolled(config)`, or a part of their tree.
    join: stacks the leaves of neighbours, numpy's or jax's.
  """
  if not config.scans_layers or "layers" not in params:
    return params
  runs = {
    number: jax.tree.map(
      lambda *leaves: join(list(leaves)),
      *(params["layers"][i] for i in indices),
    )
    for number, indices in enumerate(config.layer_runs)
  }
  return {**params, "layers": runs}


def stacked_module(module: _M) -> _M:
  """Returns a module whose parameters have just got a leading axis."""
  return _with_axes(module, lambda axes: (None, *axes))


def single_module(module: _M) -> _M:
  """Returns a module that is going to hold one layer of the stack."""
  return _with_axes(module, lambda axes: axes[1:])


class ExpertsInPlace:
  """Experts of scanned layers, read where they lie in the stack.

  A loop over the stack would copy all experts of a layer, of which a step of
  decoding reads few; XLA does not read a slice in a kernel or a gather. So the
  loop has the others alone, and experts are chosen among those of all layers.

  Attributes:
    others: the parameters without experts, for the loop.
  """

  def __init__(self, params: definition.Params, axes: Any, start: int):
    """Takes the experts out.

    Args:
      params: of a run of layers, stacked.
      axes: logical axes of one layer.
      start: index of the first layer.
    """
    names, self._tree = jax.tree.flatten(axes, is_leaf=sharding.is_axes)
    # Matrices in 8 bits are nodes of several arrays.
    nodes = self._tree.flatten_up_to(params)
    self._start, self._num_experts = start, 0
    self._whole: list[Any] = [None] * len(nodes)
    for place, (of, node) in enumerate(zip(names, nodes, strict=True)):
      if "experts" in of:
        self._num_experts = node.shape[1]
        self._whole[place] = jax.tree.map(
          lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), node
        )
    self.others = [
      node
      for node, whole in zip(nodes, self._whole, strict=True)
      if whole is None
    ]

  def join(self, others: list[Any]) -> definition.Params:
    """Returns the parameters of one layer, with the experts of all."""
    rest = iter(others)
    return self._tree.unflatten(
      [next(rest) if whole is None else whole for whole in self._whole]
    )

  def first(self, layer: jax.Array) -> jax.Array:
    """Returns where the experts of a layer begin."""
    return (layer - self._start) * self._num_experts


def _with_axes(module: _M, change: Callable[[tuple], tuple]) -> _M:
  copy = nnx.clone(module)
  for _, param in nnx.to_flat_state(nnx.state(copy)):
    param.set_metadata(out_sharding=change(sharding.axes_of(param)))
  return copy
