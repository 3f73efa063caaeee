"""Low-rank adapters: a product x A B beside the product x W.

A module's parameters may hold {"lora": {name: {"a", "b"}}} beside {name: W};
whoever multiplies by W adds the product with its adapter. So adapters are
leaves of the one tree of parameters, wherever it goes:

  a [in..., r]      b [r, out...]        of W [in..., out...]
  a [E, in, r]      b [E, r, out]        of experts W [E, in, out]

`b` does not contain the factor alpha / r: `Adapted.values` applies it where the
model runs, and `merge` where the adapters end.

Source: arXiv 2106.09685, section 4.1.
"""

import dataclasses
import difflib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int32

from models import quantize

_Params = Mapping[Any, Any]

TARGETS = (
  *("query", "key", "value", "out"),
  *("gate", "up", "down"),
  *("router", "embed", "head"),
)
"""What may be adapted: of attention, of MLPs and experts, and the others."""

_KEY = "lora"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lora:
  """The projections that are adapted, and by how much. The rest is frozen.

  Attributes:
    rank: inner width r.
    alpha: what the adapters add is multiplied by alpha / rank.
    targets: names out of `TARGETS`; "gate", "up" and "down" are of dense MLPs
      and of every expert alike.
  """

  rank: int = 8
  alpha: float = 16.0
  targets: tuple[str, ...] = TARGETS[:7]

  @property
  def scale(self) -> float:
    """Factor of what the adapters add."""
    return self.alpha / self.rank

  def validate(self) -> None:
    """Raises ValueError for a rank, factor or target that cannot work."""
    for problem in self._problems():
      raise ValueError(f"model.lora.{problem}")

  def _problems(self) -> Iterator[str]:
    if self.rank < 1:
      out = "use 1 or more, or model.lora=none to train all parameters"
      yield f"rank={self.rank} must be at least 1; {out}"
    if not 0 < self.alpha < math.inf:
      out = f"use {self.rank} for a factor of 1"
      yield f"alpha={self.alpha} must be a finite number above 0; {out}"
    if not self.targets:
      yield f"targets is empty; name some of {', '.join(TARGETS)}"
    for name in self.targets:
      if name not in TARGETS:
        near = difflib.get_close_matches(name, TARGETS, 1, 0)[0]
        yield f"targets names {name!r}; did you mean {near!r}?"
      if self.targets.count(name) > 1:
        yield f"targets names {name!r} twice; do it once"


class Adapter(nnx.Module):
  """The addition to the product with one matrix."""

  def __init__(self, a: nnx.Param, b: nnx.Param, scale: float):
    """Takes the two matrices, and the factor of their product."""
    self.a = a
    self.b = b
    self.scale = scale


class Adapted(nnx.Module):
  """A module of matrices and norms, some of which may have adapters."""

  lora: nnx.Dict[Adapter]

  def matrices(self) -> dict[str, nnx.Param]:
    """Returns the module's own parameters by name."""
    return {
      name: node
      for name, node in vars(self).items()
      if isinstance(node, nnx.Param)
    }

  def values(self) -> dict[str, Any]:
    """Returns the module's own arrays; adapters hold the factor alpha / r."""
    values: dict[str, Any] = {
      name: param.get_value() for name, param in self.matrices().items()
    }
    adapters = vars(self).get(_KEY)
    if adapters is not None:
      values[_KEY] = {
        name: {
          "a": adapter.a.get_value(),
          "b": adapter.b.get_value() * adapter.scale,
        }
        for name, adapter in adapters.items()
      }
    return values


def adapter_axes(
  name: str, axes: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
  """Returns the logical axes of the two factors for a matrix with these."""
  # Leading axes: that of experts, and those that the product sums over.
  stacked = axes[0] == "experts"
  num_in = stacked + (2 if name == "out" else 1)
  return (*axes[:num_in], "rank"), (*axes[:stacked], "rank", *axes[num_in:])


def init_std(name: str, shape: Sequence[int]) -> float:
  """Returns the standard deviation of a fresh `a`; a fresh `b` is zeros.

  That of Kaiming's uniform distribution with a slope of sqrt(5), as PEFT
  draws it; rows of an embedding are looked up and not summed.
  """
  if name == "embed":
    return 1.0
  return (3 * math.prod(shape[-3 if name == "out" else -2 : -1])) ** -0.5


def matmul(
  params: _Params, name: str, x: Float[Array, "..."], num_in: int = 1
) -> Float[Array, "..."]:
  """Returns x @ params[name], and what its adapter adds.

  Args:
    num_in: so many last axes of x are summed over the first of the weights.
  """
  weight = quantize.dequantize(params[name], x.dtype)
  y = jnp.tensordot(x, weight, num_in)
  adapter = params.get(_KEY, {}).get(name)
  if adapter is None:
    return y
  return y + jnp.tensordot(
    jnp.tensordot(x, adapter["a"], num_in), adapter["b"], 1
  )


def lookup(
  params: _Params,
  name: str,
  ids: Int32[Array, "..."],
  dtype: jax.typing.DTypeLike = jnp.float32,
) -> Float[Array, "..."]:
  """Returns params[name][ids], and what its adapter adds.

  Args:
    dtype: of the rows of a quantised table.
  """
  rows = jax.tree.map(lambda table: _rows(table, ids), params[name])
  x = quantize.dequantize(rows, dtype)
  adapter = params.get(_KEY, {}).get(name)
  return x if adapter is None else x + _rows(adapter["a"], ids) @ adapter["b"]


@jax.custom_vjp
def _rows(table: Array, ids: Int32[Array, "..."]) -> Array:
  """Returns table[ids]; the gradients of a row are summed in float32.

  In bfloat16 the sum over the tokens of a common word stops growing after some
  hundred of them.
  """
  return table[ids]


def _rows_fwd(table: Array, ids: Array) -> tuple[Array, tuple[Array, Array]]:
  return table[ids], (table, ids)


def _rows_bwd(
  read: tuple[Array, Array], gradient: Array
) -> tuple[Array, np.ndarray]:
  table, ids = read
  sums = jnp.zeros(table.shape, jnp.float32)
  sums = sums.at[ids].add(gradient.astype(jnp.float32))
  return sums.astype(table.dtype), np.zeros(ids.shape, jax.dtypes.float0)


_rows.defvjp(_rows_fwd, _rows_bwd)


def split(params: Any) -> tuple[Any, Any]:
  """Returns (what is trained, what is frozen).

  With adapters the first holds them and nothing else; without any it holds
  everything and the second is None. Leaves may be anything but dicts, and
  are passed on as they are.
  """
  adapters = _adapters(params)
  if not jax.tree.leaves(adapters):
    return params, None
  return adapters, drop(params)


def join(trainable: Any, frozen: Any) -> Any:
  """Returns the parameters that `split` took apart."""
  if frozen is None:
    return trainable
  joined = dict(frozen)
  for name, node in trainable.items():
    joined[name] = node if name == _KEY else join(node, frozen[name])
  return joined


def drop(params: Any) -> Any:
  """Returns the parameters without their adapters."""
  return _map_modules(
    lambda module: {
      name: node for name, node in module.items() if name != _KEY
    },
    params,
  )


def merge(params: Any, settings: Lora | None) -> Any:
  """Returns parameters without adapters that compute the same.

  W + alpha / r * A B is summed in float32 and rounded once to the dtype of W:
  bfloat16 keeps what moves a weight by more than 1 / 256 of itself.
  """
  if settings is None:
    return params

  def module(node):
    adapters = node.get(_KEY, {})
    return {
      name: _merged(leaf, adapters[name], settings.scale)
      if name in adapters
      else leaf
      for name, leaf in node.items()
      if name != _KEY
    }

  return _map_modules(module, params)


def _merged(
  weight: Float[Array, "..."], adapter: _Params, scale: float
) -> Float[Array, "..."]:
  a, b = (adapter[name].astype(jnp.float32) for name in ("a", "b"))
  # Accelerators round the factors of a float32 product unless told otherwise.
  exact = jax.lax.Precision.HIGHEST
  multiply = functools.partial(jnp.tensordot, axes=1, precision=exact)
  # Each expert has one of its own, and so has each of stacked layers.
  for _ in range(a.ndim + b.ndim - 2 - weight.ndim):
    multiply = jax.vmap(multiply)
  change = scale * multiply(a, b)
  return (weight.astype(jnp.float32) + change).astype(weight.dtype)


def _adapters(node: _Params) -> dict[Any, Any]:
  """Returns the tree with nothing but adapters in it."""
  kept = {}
  for name, child in node.items():
    if name == _KEY:
      kept[name] = child
    elif isinstance(child, Mapping):
      kept[name] = _adapters(child)
  return kept


def _map_modules(
  function: Callable[[dict[Any, Any]], dict[Any, Any]], node: _Params
) -> dict[Any, Any]:
  """Returns the tree with `function` applied to every dict, inside first."""
  inner = {
    name: _map_modules(function, child)
    if name != _KEY and isinstance(child, Mapping)
    else child
    for name, child in node.items()
  }
  return function(inner)
