"""The logical axes of a parameter by its path, for rules that need them.

An optimizer sees a tree of arrays, whole or of adapters alone. Parameters of
scanned layers have further axes in front, one of stacked layers.
"""

import functools
import itertools
from typing import Any

import jax

from models import config as model_config
from models import lora
from models import policy as policy_lib


def of(path: tuple[Any, ...]) -> tuple[str, ...]:
  """Returns the logical axes of a parameter of a layer; none elsewhere.

  Those of one layer: of a stack they are the last. Another policy may have a
  parameter of that path with fewer axes.
  """
  keys = [k.key for k in path if isinstance(k, jax.tree_util.DictKey)]
  node: Any = _modules()
  for key in itertools.dropwhile(lambda key: key not in _modules(), keys):
    node = node.get(key) if isinstance(node, dict) else None
  return node if isinstance(node, tuple) else ()


def num_stacked(path: tuple[Any, ...], leaf: Any) -> int:
  """Returns how many axes in front of a parameter are of stacked layers."""
  names = of(path)
  return max(leaf.ndim - len(names), 0) if names else 0


@functools.cache
def _modules() -> dict[str, Any]:
  """Returns the logical axes of each part of a layer, adapters included."""
  config = model_config.tiny_moe(
    num_layers=2,
    dense_layers=(0,),
    qkv_bias=True,
    architecture="gemma",  # It has all norms.
    lora=lora.Lora(),
  )
  dense, sparse = policy_lib.of(config).axes["layers"].values()
  return {**dense, **sparse}
