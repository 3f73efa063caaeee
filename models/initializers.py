"""Random parameters, each from its own path name."""

import dataclasses
import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import PRNGKeyArray

from models import config as config_lib
from models import lora, sharding

_INIT_STD = 0.02


@dataclasses.dataclass(frozen=True)
class Initializer:
  """Makes the parameters of one module, whose shapes follow from their axes.

  Attributes:
    key: shared by a layer's modules, or by what is outside of layers.
    sparse: the layer has experts; see `config.axis_sizes`.
    path: of the module, in the notation of `jax.tree_util.keystr`.
  """

  config: config_lib.ModelConfig
  key: PRNGKeyArray
  sparse: bool = False
  path: str = ""

  def inside(self, name: str) -> "Initializer":
    """Returns the initializer of an inner module."""
    return dataclasses.replace(self, path=f"{self.path}['{name}']")

  def norm(self, width: int) -> nnx.Param:
    """Returns the scale of a norm: ones, or zeros where it counts from 1."""
    one = jnp.full(width, 1 - self.config.norm_offset, self.config.dtype)
    return sharding.parameter(one, ("norm",))

  def bias(self, *axes: str) -> nnx.Param:
    """Returns zeros, which are added to the result of a matrix."""
    zeros = jnp.zeros(self._shape(axes), self.config.dtype)
    return sharding.parameter(zeros, axes)

  def matrix(
    self, name: str, *axes: str, is_residual: bool = False
  ) -> nnx.Param:
    """Returns a matrix with a standard deviation of 0.02.

    Args:
      is_residual: it writes into the residual stream, whose variance must not
        grow with depth. Source: GPT-2, Radford et al. 2019, section 2.3.
    """
    depth = 2 * self.config.num_layers if is_residual else 1
    return self._normal(name, axes, _INIT_STD / math.sqrt(depth))

  def adapt(self, module: lora.Adapted, **targets: str) -> None:
    """Gives the module the adapters that the config wants of its matrices.

    Args:
      targets: matrix -> its name in `lora.TARGETS`, where that is another.
    """
    settings = self.config.lora
    if settings is None:
      return
    inside = self.inside("lora")
    adapters = {
      name: inside.inside(target)._adapter(target, settings, matrix)
      for name, matrix in module.matrices().items()
      if (target := targets.get(name, name)) in settings.targets
    }
    if adapters:
      module.lora = nnx.Dict(adapters)

  def _adapter(
    self, name: str, settings: lora.Lora, matrix: nnx.Param
  ) -> lora.Adapter:
    a, b = lora.adapter_axes(name, sharding.axes_of(matrix))
    dtype = self.config.dtype
    return lora.Adapter(
      self._normal("a", a, lora.init_std(name, self._shape(a))),
      sharding.parameter(jnp.zeros(self._shape(b), dtype), b),
      settings.scale,
    )

  def _normal(self, name: str, axes: tuple[str, ...], std: float) -> nnx.Param:
    path = f"{self.path}['{name}']"
    own = jax.random.fold_in(self.key, zlib.crc32(path.encode()))
    noise = std * jax.random.normal(own, self._shape(axes))
    return sharding.parameter(noise.astype(self.config.dtype), axes)

  def _shape(self, axes: tuple[str, ...]) -> tuple[int, ...]:
    sizes: dict[str, Any] = config_lib.axis_sizes(
      self.config, sparse=self.sparse
    )
    return tuple(sizes[axis] for axis in axes)
