"""The MLP of a dense layer: SwiGLU, as in Qwen3 and Llama 3, or Gemma's GEGLU.

Letters: D width, F hidden width. Source: arXiv 2002.05202.
"""

import jax
from jaxtyping import Array, Float

from models import initializers, lora


class Mlp(lora.Adapted):
  """(silu(x gate) * x up) down, or with a GELU, by its tanh, for the first."""

  def __init__(self, initializer: initializers.Initializer):
    """Draws the parameters."""
    self.config = initializer.config
    self.gate = initializer.matrix("gate", "embed", "mlp")
    self.up = initializer.matrix("up", "embed", "mlp")
    self.down = initializer.matrix("down", "mlp", "embed", is_residual=True)
    initializer.adapt(self)

  def __call__(self, x: Float[Array, "*any D"]) -> Float[Array, "*any D"]:
    """Returns what the layer adds to the residual stream."""
    params = self.values()
    gate = lora.matmul(params, "gate", x)
    up = lora.matmul(params, "up", x)
    gemma = self.config.architecture == "gemma"
    activation = jax.nn.gelu if gemma else jax.nn.silu
    return lora.matmul(params, "down", activation(gate) * up)
