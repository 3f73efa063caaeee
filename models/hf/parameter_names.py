"""The map between our parameters and the tensors of Hugging Face's models.

A Linear is stored there as a matrix [out, in]; ours is [*in, *out], with heads
and their width as axes of their own, and so is a bias. Experts are a tensor
each there, and stacked here.
"""

import dataclasses
import math
from typing import Any

import jax

from models import config as config_lib
from models import definition, layer_stack, sharding
from models import policy as policy_lib

EMBED = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

_TOP = {
  "embed": (EMBED, 0),
  "final_norm": ("model.norm.weight", 0),
  "head": (HEAD, 1),
}
_LAYER = {
  "attention_norm": ("input_layernorm", 0),
  "attention.query": ("self_attn.q_proj", 1),
  "attention.key": ("self_attn.k_proj", 1),
  "attention.value": ("self_attn.v_proj", 1),
  "attention.out": ("self_attn.o_proj", 2),
  "attention.query_bias": ("self_attn.q_proj.bias", 0),
  "attention.key_bias": ("self_attn.k_proj.bias", 0),
  "attention.value_bias": ("self_attn.v_proj.bias", 0),
  "attention.query_norm": ("self_attn.q_norm", 0),
  "attention.key_norm": ("self_attn.k_norm", 0),
  "mlp_norm": ("post_attention_layernorm", 0),
  "mlp.gate": ("mlp.gate_proj", 1),
  "mlp.up": ("mlp.up_proj", 1),
  "mlp.down": ("mlp.down_proj", 1),
  "moe.router.kernel": ("mlp.gate", 1),
  "moe.gate": ("mlp.experts.{}.gate_proj", 1),
  "moe.up": ("mlp.experts.{}.up_proj", 1),
  "moe.down": ("mlp.experts.{}.down_proj", 1),
}
"""Ours -> (theirs, number of input axes); with 0 of those both are the same."""
_NORMED_OUTPUT = {
  "post_attention_norm": ("post_attention_layernorm", 0),
  "mlp_norm": ("pre_feedforward_layernorm", 0),
  "post_mlp_norm": ("post_feedforward_layernorm", 0),
}
"""What has another name in a layer of Gemma or OLMo."""


@dataclasses.dataclass(frozen=True)
class Entry:
  """One of our parameters among their tensors.

  Attributes:
    names: of the tensor, or of one for each expert.
    axes: logical axes of ours, as in `definition.Definition`.
    shape: of ours.
    num_in: input axes of a Linear, not counting experts; 0 for what is stored
      as it is.
  """

  names: tuple[str, ...]
  axes: tuple[str, ...]
  shape: tuple[int, ...]
  num_in: int

  @property
  def stacked(self) -> bool:
    """Returns whether the first axis is of experts."""
    return self.axes[0] == "experts"

  @property
  def groups(self) -> tuple[tuple[int, ...], ...]:
    """Our axes in each axis of the tensor, experts stacked in front."""
    first = int(self.stacked)
    axes = tuple(range(len(self.shape)))
    if not self.num_in and self.axes[-1] == "head_dim":  # A bias.
      return (axes,)
    if not self.num_in:
      return tuple((axis,) for axis in axes)
    end = first + self.num_in
    return (*((axis,) for axis in axes[:first]), axes[end:], axes[first:end])

  @property
  def stored_shape(self) -> tuple[int, ...]:
    """Shape of the tensor, experts stacked in front."""
    return tuple(
      math.prod(self.shape[axis] for axis in group) for group in self.groups
    )

  @property
  def tensor_shape(self) -> tuple[int, ...]:
    """Shape of each tensor."""
    return self.stored_shape[int(self.stacked) :]

  def to_ours(self, stored: Any) -> Any:
    """Returns an array [E?, out, in] as ours; numpy's or jax's."""
    if self.num_in:
      stored = stored.swapaxes(-1, -2)
    return stored.reshape(self.shape)

  def to_stored(self, ours: Any) -> Any:
    """Returns our array as theirs, experts stacked; inverse of `to_ours`."""
    if not self.num_in:
      return ours.reshape(self.stored_shape)
    expert, out, inner = (1, *self.stored_shape)[-3:]
    flat = ours.reshape(*((expert,) if self.stacked else ()), inner, out)
    return flat.swapaxes(-1, -2)


def entries(config: config_lib.ModelConfig) -> definition.Params:
  """Returns the tree of parameters with an Entry as each leaf; no adapters.

  Layers are unrolled: their files do not know of stacks.

  Raises:
    ValueError: a policy that is not ours has others than these parameters.
  """
  config = layer_stack.unrolled(dataclasses.replace(config, lora=None))
  layer_names = _LAYER | (_NORMED_OUTPUT if config.norms_output else {})
  bare = policy_lib.of(config)

  def leaf(path, axes: tuple[str, ...], shape: jax.ShapeDtypeStruct) -> Entry:
    keys = [key.key for key in path]
    inside = keys[0] == "layers"
    name = ".".join(map(str, keys[2:] if inside else keys))
    names = layer_names if inside else _TOP
    if name not in names:
      raise ValueError(
        f"model.policy has the parameter {name!r}, for which files of Hugging "
        "Face have no place; use model.policy=none"
      )
    theirs, num_in = names[name]
    if not inside:
      return Entry((theirs,), axes, shape.shape, num_in)
    kind = "" if theirs.endswith(".bias") else ".weight"
    full = f"model.layers.{keys[1]}.{theirs}{kind}"
    names = (full,)
    if axes[0] == "experts":
      names = tuple(full.format(e) for e in range(config.num_experts))
    return Entry(names, axes, shape.shape, num_in)

  return jax.tree.map_with_path(
    leaf, bare.axes, bare.shapes, is_leaf=sharding.is_axes
  )
