"""Random parameters, each from its own name."""

import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from models import config as config_lib
from models import lora, sharding

_INIT_STD = 0.02


def draw(key: PRNGKeyArray, config: config_lib.ModelConfig, axes: Any) -> Any:
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
