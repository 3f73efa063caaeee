"""The MLP of a dense layer: SwiGLU, as in Qwen3.

Letters: D width, F hidden width. Source: arXiv 2002.05202.
"""

from collections.abc import Mapping
from typing import Any

import jax
from jaxtyping import Array, Float

from models import lora

AXES = {
  "gate": ("embed", "mlp"),
  "up": ("embed", "mlp"),
  "down": ("mlp", "embed"),
}
"""Logical axes of the parameters."""


def apply(
  params: Mapping[str, Any], x: Float[Array, "*any D"]
) -> Float[Array, "*any D"]:
  """Returns (silu(x gate) * x up) down."""
  gate = lora.matmul(params, "gate", x)
  up = lora.matmul(params, "up", x)
  return lora.matmul(params, "down", jax.nn.silu(gate) * up)
