"""Optimizers: frozen callables that build an optax transformation."""

import dataclasses
import math
from typing import Protocol, runtime_checkable

import optax


@runtime_checkable
class Optimizer(Protocol):
  """Frozen callable that builds an optax transformation."""

  def __call__(self) -> optax.GradientTransformation:
    """Returns a fresh transformation."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW:
  """Adam with decoupled weight decay behind a clip of the global norm.

  Attributes:
    warmup_updates: the rate rises linearly over so many updates.

  Source: arXiv 1711.05101.
  """

  learning_rate: float = 5e-4
  warmup_updates: int = 0
  b1: float = 0.9
  b2: float = 0.99
  weight_decay: float = 0.0
  max_grad_norm: float = 1.0

  def validate(self) -> None:
    """Raises ValueError on a rate, decay or norm that cannot work."""
    for name in ("learning_rate", "max_grad_norm"):
      if not 0 < getattr(self, name) < math.inf:
        raise ValueError(
          f"AdamW.{name}={getattr(self, name)} is no number above 0"
        )
    for name in ("b1", "b2"):
      if not 0 <= getattr(self, name) < 1:
        raise ValueError(f"AdamW.{name}={getattr(self, name)} is not in [0, 1)")
    for name in ("warmup_updates", "weight_decay"):
      if not 0 <= getattr(self, name) < math.inf:
        raise ValueError(f"AdamW.{name}={getattr(self, name)} is below 0")

  def __call__(self) -> optax.GradientTransformation:
    """Returns clip -> Adam -> decay, scaled by the (warmed-up) rate."""
    rate = self.learning_rate
    if self.warmup_updates:
      # Not from 0: the first update would do nothing.
      first, steps = rate / self.warmup_updates, self.warmup_updates - 1
      rate = optax.linear_schedule(first, rate, steps)
    return optax.chain(
      optax.clip_by_global_norm(self.max_grad_norm),
      optax.adamw(rate, b1=self.b1, b2=self.b2, weight_decay=self.weight_decay),
    )
