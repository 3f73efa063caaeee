"""The router: softmax over all experts, of which each token takes the top k.

Always float32: at a tie of two experts, rounding would choose others where the
policy is trained than where it was sampled.

Letters: T tokens, D width, E experts, k experts of a token.

Source: Switch, arXiv 2101.03961; replay of recorded experts: 2510.11370 and
2507.18071.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32

from models import initializers, lora


class Sums(NamedTuple):
  """Sums over tokens, each as often as it has copies; add them over devices.

  Attributes:
    assigned: assignments asked of the experts, each once.
    picked: tokens that took each expert.
    probs: of each expert.
    entropy: of the probabilities, in nats.
    square: of the log of the logits' normaliser.
  """

  tokens: Float32[Array, ""]
  assigned: Int32[Array, ""]
  picked: Float32[Array, " E"]
  probs: Float32[Array, " E"]
  entropy: Float32[Array, ""]
  square: Float32[Array, ""]


class TopKRouter(lora.Adapted):
  """A linear layer of one output for each expert."""

  def __init__(self, initializer: initializers.Initializer):
    """Draws the parameters with the initializer of `Moe`."""
    self.config = initializer.config
    self.kernel = initializer.matrix("router", "embed", "router")
    initializer.adapt(self, kernel="router")

  def __call__(
    self,
    x: Float[Array, "T D"],
    copies: Int32[Array, " T"],
    chosen: Int[Array, "T k"] | None = None,
  ) -> tuple[Float32[Array, "T k"], Int32[Array, "T k"], Sums]:
    """Returns gates, their experts, and sums for statistics.

    Args:
      copies: 0 is padding, whose experts are -1; it may hold anything.
      chosen: experts that a token must take; the rest of its k, where it says
        -1, are the router's best others. One that does not exist is taken as
        it is, so that it shows as dropped.
    """
    k = self.config.experts_per_token
    valid = copies > 0
    x = jnp.where(valid[:, None], x, 0)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), self.values())
    with jax.default_matmul_precision("highest"):
      logits = lora.matmul(wide, "kernel", x.astype(jnp.float32))
    # Shifted first: large logits would leave few digits for what differs.
    top = jax.lax.stop_gradient(jnp.max(logits, -1, keepdims=True))
    rest = jax.nn.logsumexp(logits - top, -1, keepdims=True)
    logprobs = logits - top - rest
    normaliser = (top + rest)[:, 0]
    probs = jnp.exp(logprobs)
    experts = _choose(probs, chosen, k)
    picked = jax.nn.one_hot(experts, probs.shape[1])
    gates = jnp.sum(picked * probs[:, None], -1)
    if self.config.norm_topk_prob:
      # Experts whose probabilities are all 0 share nothing, instead of nan.
      total = jnp.sum(gates, -1, keepdims=True)
      gates = gates / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    weight = copies.astype(jnp.float32)
    sums = Sums(
      tokens=jnp.sum(weight),
      assigned=jnp.sum(valid, dtype=jnp.int32) * k,
      picked=jnp.sum(weight[:, None] * jnp.sum(picked, 1), 0),
      probs=jnp.sum(weight[:, None] * probs, 0),
      entropy=-jnp.sum(weight * jnp.sum(probs * logprobs, -1)),
      square=jnp.sum(weight * normaliser**2),
    )
    return gates, jnp.where(valid[:, None], experts, -1), sums


def _choose(
  probs: Float32[Array, "T E"], chosen: Int[Array, "T k"] | None, k: int
) -> Int32[Array, "T k"]:
  """Returns the experts of each token: recorded ones, where free the best."""
  scores = jax.lax.stop_gradient(probs)
  if chosen is None:
    return jax.lax.top_k(scores, k)[1].astype(jnp.int32)
  # Recorded in integers that may be too narrow to compute with.
  chosen = chosen.astype(jnp.int32)
  recorded = jnp.max(jax.nn.one_hot(chosen, probs.shape[1]), 1)
  others = jax.lax.top_k(scores - 2 * recorded, k)[1].astype(jnp.int32)
  free = chosen < 0
  rank = jnp.maximum(jnp.cumsum(free, 1) - 1, 0)
  best = jnp.take_along_axis(others, rank, 1)
  return jnp.where(free, best, chosen).astype(jnp.int32)
