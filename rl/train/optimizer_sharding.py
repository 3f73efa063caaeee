"""Where the state of an optimizer lies: with the parameters that it is of."""

from typing import Any

import jax
import optax


def shardings(
  optimizer: optax.GradientTransformation,
  params_shapes: Any,
  params_shardings: Any,
  replicated: jax.sharding.NamedSharding,
) -> Any:
  """Returns a tree of shardings of the structure of the optimizer's state.

  A moment of the shape of its parameter lies as that does. One over which an
  axis was reduced away lies as the axes that are left; where two axes have one
  length it cannot be told which, and the last is taken as reduced. Counts and
  placeholders are everywhere.

  Args:
    params_shapes: jax.ShapeDtypeStruct for each parameter.
    params_shardings: jax.sharding.NamedSharding for each.
  """

  def place(moment, shape, placed):
    if isinstance(moment, optax.MaskedNode):
      return moment
    return _place(moment.shape, shape.shape, placed) or replicated

  return optax.tree.map_params(
    optimizer,
    place,
    jax.eval_shape(optimizer.init, params_shapes),
    params_shapes,
    params_shardings,
    transform_non_params=lambda _: replicated,
    is_leaf=lambda node: isinstance(node, optax.MaskedNode),
  )


def _place(
  shape: tuple[int, ...],
  param: tuple[int, ...],
  placed: jax.sharding.NamedSharding,
) -> jax.sharding.NamedSharding | None:
  """Returns the sharding of a moment, or None where it is no moment."""
  if shape == param:
    return placed
  axes = (*placed.spec, *[None] * (len(param) - len(placed.spec)))
  for reduced in reversed(range(len(param))):
    if shape == (*param[:reduced], *param[reduced + 1 :]):
      kept = jax.P(*axes[:reduced], *axes[reduced + 1 :])
      return jax.sharding.NamedSharding(placed.mesh, kept)
  return None
