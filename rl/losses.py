"""Policy losses: frozen callables over one packed row, summed over tokens.

Letters: L row length. Every loss returns sums, not means: the learner divides
once by the tokens of the whole update, so micro-batches add up exactly.
"""

import dataclasses
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


@runtime_checkable
class Loss(Protocol):
  """Frozen callable over one row."""

  def __call__(
    self,
    logprobs: Float[Array, " L"],
    behaviour: Float[Array, " L"],
    advantages: Float[Array, " L"],
    sampled: Bool[Array, " L"],
  ) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns (loss, number of clipped tokens); log-probabilities in nats."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClippedSurrogate:
  """Clipped policy gradient, summed over the tokens the policy sampled.

  The ratio is against the policy that sampled each token, so a row may mix
  versions. Divide by the step's token count, not the row's: a per-row mean
  would favour short answers.

  Attributes:
    clip_low, clip_high: the ratio stays in [1 - clip_low, 1 + clip_high].

  Source: PPO, arXiv 1707.06347, eq. 7; two bounds: DAPO, 2503.14476, 3.1.
  """

  clip_low: float = 0.2
  clip_high: float = 0.28

  def validate(self) -> None:
    """Raises ValueError on bounds that clip a ratio of 1, or no number."""
    if not (0 <= self.clip_low <= 1 and self.clip_high >= 0):
      raise ValueError(
        f"ClippedSurrogate: clip_low={self.clip_low} must be in [0, 1] and "
        f"clip_high={self.clip_high} at least 0"
      )

  def __call__(
    self,
    logprobs: Float[Array, " L"],
    behaviour: Float[Array, " L"],
    advantages: Float[Array, " L"],
    sampled: Bool[Array, " L"],
  ) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns (loss, number of clipped tokens); log-probabilities in nats."""
    # where() before exp(): padding may hold -inf, and inf * 0 is nan.
    ratio = jnp.exp(jnp.where(sampled, logprobs - behaviour, 0.0))
    gain = jnp.where(sampled, advantages, 0.0)
    bounded = jnp.clip(ratio, 1 - self.clip_low, 1 + self.clip_high) * gain
    clipped = bounded < ratio * gain
    loss = -jnp.minimum(ratio * gain, bounded).sum()
    return loss, clipped.sum().astype(jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NegativeLogLikelihood:
  """Imitation of the sampled tokens: supervised learning on demonstrations."""

  def __call__(
    self,
    logprobs: Float[Array, " L"],
    behaviour: Float[Array, " L"],
    advantages: Float[Array, " L"],
    sampled: Bool[Array, " L"],
  ) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns (loss, 0): nothing is clipped and no advantage is used."""
    del behaviour, advantages
    return -jnp.where(sampled, logprobs, 0.0).sum(), jnp.zeros(())
