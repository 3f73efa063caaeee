"""A Flax NNX module apart from its parameters.

  define(create) -> Definition -+- init(key) -> parameters, a plain tree
                                +- bind(parameters) -> the module, in a trace

Outside of compiled programs a module exists once, without arrays. What travels,
is donated and is sharded is the tree of its parameters: dicts by path name, as
the attributes of modules are called, of which jax flattens hundreds in no time.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import jax
from flax import nnx
from jaxtyping import PRNGKeyArray

from models import quantize, sharding

Params = dict[Any, Any]
M = TypeVar("M")


@dataclasses.dataclass(frozen=True, eq=False)
class Definition(Generic[M]):
  """A module apart from its parameters.

  Attributes:
    module: with a jax.ShapeDtypeStruct in the place of each array.
    create: key -> the module with random parameters.
    shapes: the tree of parameters with a ShapeDtypeStruct as each leaf.
    axes: the same tree with logical axes as leaves.
  """

  module: M
  create: Callable[[PRNGKeyArray], M]
  graphdef: Any
  shapes: Params
  axes: Params

  def init(self, key: PRNGKeyArray) -> Params:
    """Returns random parameters; compile it for a large module."""
    return nnx.to_pure_dict(nnx.state(self.create(key)))

  def bind(self, params: Params) -> M:
    """Returns the module with these parameters, some perhaps quantised.

    Raises:
      ValueError: they belong to another module.
    """
    found = jax.tree.structure(params, is_leaf=quantize.is_quantized)
    wanted = jax.tree.structure(self.shapes)
    if found != wanted:
      raise ValueError(
        f"the parameters do not fit this {type(self.module).__name__}: "
        f"{_first_difference(params, self.shapes)}; make them with "
        "`init` of the same definition"
      )
    return nnx.merge(self.graphdef, params)


def define(create: Callable[[PRNGKeyArray], M]) -> Definition[M]:
  """Returns the definition of what is created, without touching a device.

  Raises:
    ValueError: the module has other state than parameters.
  """
  # The key is made inside: outside it would be put on a device.
  module = nnx.eval_shape(lambda: create(jax.random.key(0)))
  graphdef, state, rest = nnx.split(module, nnx.Param, ...)
  if jax.tree.leaves(rest):
    names = [jax.tree_util.keystr(path) for path, _ in nnx.to_flat_state(rest)]
    raise ValueError(
      f"{type(module).__name__} must hold nnx.Param only, and has "
      f"{', '.join(names)}; draw random numbers where it is created only"
    )
  shapes = nnx.to_pure_dict(state)
  return Definition(module, create, graphdef, shapes, sharding.axes_of(module))


def _first_difference(params: Params, shapes: Params) -> str:
  given, wanted = (
    [
      jax.tree_util.keystr(path, simple=True, separator="/")
      for path, _ in jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=quantize.is_quantized
      )
    ]
    for tree in (params, shapes)
  )
  missing = [name for name in wanted if name not in given]
  extra = [name for name in given if name not in wanted]
  if missing:
    return f"{missing[0]} is missing"
  return f"{extra[0]} is extra" if extra else "containers differ"
