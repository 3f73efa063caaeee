"""The learning rate by the update: what the highest is multiplied by.

Schedules rise linearly over `warmup_updates`. The first update has a rate above
0, or it would be for nothing.
"""

import dataclasses
import math
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@runtime_checkable
class Schedule(Protocol):
  """Frozen callable from the number of earlier updates to a factor."""

  def validate(self) -> None:
    """Raises ValueError on a setting that cannot work."""
    ...

  def __call__(self, updates: Int[Array, ""]) -> Float[Array, ""]:
    """Returns what the learning rate is multiplied by, of at most 1."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constant:
  """The peak, for ever.

  Attributes:
    warmup_updates: the rate rises linearly over so many updates, of which the
      last has the peak.
  """

  warmup_updates: int = 0

  def validate(self) -> None:
    """Raises ValueError on a warm-up of less than nothing."""
    if self.warmup_updates < 0:
      raise ValueError(
        f"{type(self).__name__}.warmup_updates={self.warmup_updates} is below "
        "0; use 0 to begin with the whole rate"
      )

  def __call__(self, updates: Int[Array, ""]) -> Float[Array, ""]:
    """Returns the share of the warm-up that is done."""
    return jnp.minimum((updates + 1.0) / max(self.warmup_updates, 1), 1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decay(Constant):
  """Falls from the peak to a share of it, and stays there.

  Attributes:
    hold_updates: so many more have the peak before it falls: warm-up, stable,
      decay.
    decay_updates: from the last update at the peak to the first at the end.
    end: share of the peak.
  """

  hold_updates: int = 0
  decay_updates: int
  end: float = 0.1

  def validate(self) -> None:
    """Raises ValueError on a time or an end that cannot work."""
    super().validate()
    if self.hold_updates < 0:
      raise ValueError(
        f"{type(self).__name__}.hold_updates={self.hold_updates} is below 0; "
        "use 0 to fall at once"
      )
    if self.decay_updates < 1:
      raise ValueError(
        f"{type(self).__name__}.decay_updates={self.decay_updates} is below 1; "
        "use the updates of the run, or Constant"
      )
    if not 0 <= self.end <= 1:
      raise ValueError(
        f"{type(self).__name__}.end={self.end} is no share of the peak; use 0 "
        "to 1"
      )

  def _progress(self, updates: Int[Array, ""]) -> Float[Array, ""]:
    """Returns the share of the decay that is done."""
    peak = max(self.warmup_updates - 1, 0) + self.hold_updates
    return jnp.clip((updates - peak) / self.decay_updates, 0.0, 1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Linear(Decay):
  """Falls by the same amount in every update; see `Decay`."""

  def __call__(self, updates: Int[Array, ""]) -> Float[Array, ""]:
    """Returns the factor, which during the warm-up is that of `Constant`."""
    left = 1 - self._progress(updates)
    return super().__call__(updates) * (self.end + (1 - self.end) * left)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cosine(Decay):
  """Falls along half a cosine, slowly at both ends; see `Decay`.

  Source: SGDR, arXiv 1608.03983, eq. 5, without restarts.
  """

  def __call__(self, updates: Int[Array, ""]) -> Float[Array, ""]:
    """Returns the factor, which during the warm-up is that of `Constant`."""
    left = (1 + jnp.cos(math.pi * self._progress(updates))) / 2
    return super().__call__(updates) * (self.end + (1 - self.end) * left)
