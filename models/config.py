"""What a model is: its sizes, checked, and its number of parameters."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
  """Sizes of a Qwen3-style decoder with mixture-of-experts layers.

  Attributes:
    num_kv_heads: key and value heads; each serves num_heads / num_kv_heads
      query heads.
    d_ff: hidden width of one expert.
    experts_per_token: experts that each token is sent to.
    max_length: longest conversation, in tokens.
    rope_theta: base of the wavelengths of the rotary positions.
    tie_embeddings: the embedding is also the output projection.
    moe_block: fewest rows of a block of the grouped matmul, to which every
      expert pads; with many tokens blocks are larger.
  """

  vocab_size: int = 64
  num_layers: int = 4
  d_model: int = 128
  num_heads: int = 4
  num_kv_heads: int = 2
  head_dim: int = 32
  d_ff: int = 128
  num_experts: int = 4
  experts_per_token: int = 2
  max_length: int = 64
  rope_theta: float = 10_000.0
  norm_eps: float = 1e-6
  tie_embeddings: bool = True
  moe_block: int = 16

  def validate(self) -> None:
    """Raises ValueError for sizes that cannot work."""
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.type is int and value < 1:
        raise ValueError(
          f"model.{field.name}={value} is below 1; use 1 or more"
        )
      if field.type is float and not value > 0:
        raise ValueError(
          f"model.{field.name}={value} is not above 0; use "
          f"{field.default} unless the weights were trained otherwise"
        )
    heads, groups = self.num_heads, self.num_kv_heads
    if heads % groups:
      above = (heads // groups + 1) * groups
      raise ValueError(
        f"model.num_heads={heads} does not split over "
        f"num_kv_heads={groups}; use {above}"
      )
    if self.head_dim % 2:
      raise ValueError(
        f"model.head_dim={self.head_dim} is odd, and rotary positions turn "
        f"pairs; use {self.head_dim + 1}"
      )
    if self.experts_per_token > self.num_experts:
      raise ValueError(
        f"model.experts_per_token={self.experts_per_token} is above "
        f"num_experts={self.num_experts}; use {self.num_experts} or fewer"
      )


def tiny_moe(**overrides: Any) -> ModelConfig:
  """Returns the default sizes, small enough to train on a CPU, overridden."""
  return dataclasses.replace(ModelConfig(), **overrides)


def num_params(config: ModelConfig) -> tuple[int, int]:
  """Returns how many parameters there are, and how many a token uses."""
  heads = 2 * config.num_heads + 2 * config.num_kv_heads
  attention = config.d_model * heads * config.head_dim + 2 * config.head_dim
  shared = attention + config.d_model * (config.num_experts + 2)
  expert = 3 * config.d_model * config.d_ff
  tables = 1 if config.tie_embeddings else 2
  outside = tables * config.vocab_size * config.d_model + config.d_model
  total, active = (
    outside + config.num_layers * (shared + num * expert)
    for num in (config.num_experts, config.experts_per_token)
  )
  return total, active
