"""Matrices in 8 bits: values, and a float32 scale of each output channel.

  w [in..., out...]  ~  values [in..., out...] * scale [1..., out...]

Symmetric: the largest magnitude of a channel becomes the largest value. int8
has 127 steps, and no weight is off by more than half a step. float8_e4m3fn goes
up to 448 in steps of an eighth of a power of 2: no weight is off by more than a
16th of itself, or 2**-10 where the value is below 2**-6. An embedding has a
scale for each word; every expert has its own. Norms, routers and adapters stay
as they are.

A quantised matrix is a node in the place of a leaf. Whoever multiplies by it
makes it a matrix of the activations' dtype first: on a mesh after it was
gathered, so that bytes travel, and in the kernels of the experts tile by tile,
so that bytes are read.

Source: arXiv 2208.07339, sections 2.1 and 3.1; the float: 2209.05433, table 1.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float8e4m3fn, Float32, Int8

Dtype = Literal["int8", "float8_e4m3fn"]

_LARGEST: dict[Dtype, float] = {"int8": 127, "float8_e4m3fn": 448}
_TINY = float(jnp.finfo(jnp.float32).tiny)

# Axes that a product sums over, from the right: layers and experts are stacked.
_SUMMED = {
  **dict.fromkeys(("query", "key", "value"), (-3,)),
  **dict.fromkeys(("gate", "up", "down", "head"), (-2,)),
  "out": (-3, -2),
  "embed": (-1,),
}


class Quantized(NamedTuple):
  """A matrix in 8 bits.

  Attributes:
    scale: the weight of a value of 1; the axes that a product sums over have
      length 1.
  """

  values: Int8[Array, "..."] | Float8e4m3fn[Array, "..."]
  scale: Float32[Array, "..."]

  @property
  def shape(self) -> tuple[int, ...]:
    """That of the matrix."""
    return self.values.shape


def summed(path: jax.tree_util.KeyPath) -> tuple[int, ...] | None:
  """Returns the axes over which a leaf has one scale; None is not quantised.

  Args:
    path: of the leaf in the parameters of a model, whatever is above them.
  """
  names = [getattr(key, "key", "") for key in path]
  if not names or "lora" in names:
    return None
  return _SUMMED.get(names[-1])


def quantize(params: Any, dtype: Dtype = "int8") -> Any:
  """Returns parameters whose matrices are `Quantized`; again is the same."""

  def leaf(path, weight):
    axes = summed(path)
    return weight if axes is None else quantize_matrix(weight, axes, dtype)

  return jax.tree_util.tree_map_with_path(leaf, params)


def quantize_matrix(
  weight: Float[Array, "..."], axes: tuple[int, ...], dtype: Dtype = "int8"
) -> Quantized:
  """Returns a matrix with one scale over these axes.

  The values are the same however it is sharded. A channel that holds nan or
  inf comes back as nan.
  """
  wide = weight.astype(jnp.float32)
  top = jnp.max(jnp.abs(wide), axes, keepdims=True)
  # A channel of zeros needs a scale as well.
  scale = jnp.maximum(top / _LARGEST[dtype], _TINY)
  values = wide / scale
  if dtype == "int8":
    values = jnp.round(values)
  return Quantized(values.astype(dtype), scale)


def dequantize(params: Any, dtype: jax.typing.DTypeLike) -> Any:
  """Returns parameters, or one matrix, with `Quantized` ones multiplied out.

  Args:
    dtype: of those; the others are passed on as they are.
  """

  def leaf(node):
    if not isinstance(node, Quantized):
      return node
    return (node.values.astype(jnp.float32) * node.scale).astype(dtype)

  return jax.tree.map(leaf, params, is_leaf=is_quantized)


def is_quantized(node: Any) -> bool:
  """Returns whether a node of a tree of parameters stands for a matrix."""
  return isinstance(node, Quantized)
