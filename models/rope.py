"""Rotary positions, and the ways of stretching them to longer texts.

Frequencies are rounded to float32 where transformers rounds them: at position
100,000 the last bit of a frequency is worth 0.006 radians.

Letters: B rows, L row length, H heads, d head width, half = d / 2.
"""

import dataclasses
import math
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Stretching:
  factor: float

  def validate(self) -> None:
    """Raises ValueError on values that cannot work."""
    for problem in self._problems():
      raise ValueError(f"model.rope_scaling.{problem}")

  def _problems(self) -> Iterator[str]:
    if not 1 <= self.factor < math.inf:
      yield f"factor={self.factor} is not a number from 1 up; use 1 or more"
    if (length := getattr(self, "original_max_length", 1)) < 1:
      out = "use the length that the model was trained on"
      yield f"original_max_length={length} is below 1; {out}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Linear(_Stretching):
  """Divides every position by `factor`. Source: arXiv 2306.15595, eq. 4."""

  def __call__(
    self, periods: Float32[np.ndarray, " half"], theta: float
  ) -> tuple[Float32[np.ndarray, " half"], float]:
    """Returns the scaled frequencies, and 1 for the attention factor."""
    del theta
    return 1 / periods / self.factor, 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Yarn(_Stretching):
  """Divides the positions of slow pairs by `factor`, of fast ones by 1.

  Between the two the divisor changes linearly with the index of the pair.

  Attributes:
    original_max_length: trained length, in tokens.
    beta_fast: a pair that turns more often within it is fast.
    beta_slow: a pair that turns less often is slow.
    attention_factor: queries and keys grow by it; None is 1 + ln(factor) / 10.
    mscale, mscale_all_dim: with both, that factor is the ratio of two such,
      whose logarithms are multiplied by these.
    truncate: the first and the last pair in between are rounded outwards.

  Source: arXiv 2309.00071, sections 3.2 and 3.4; as transformers computes it.
  """

  original_max_length: int
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  attention_factor: float | None = None
  mscale: float | None = None
  mscale_all_dim: float | None = None
  truncate: bool = True

  def _problems(self) -> Iterator[str]:
    yield from super()._problems()
    slow, fast = self.beta_slow, self.beta_fast
    if not 0 < slow < fast < math.inf:
      bound = f"is not between 0 and beta_fast={fast}; use 1 and 32"
      yield f"beta_slow={slow} {bound}"
    for name in ("attention_factor", "mscale", "mscale_all_dim"):
      value = getattr(self, name)
      if value is not None and not 0 < value < math.inf:
        out = "leave it out, and it follows from factor"
        yield f"{name}={value} is not above 0; {out}"

  def __call__(
    self, periods: Float32[np.ndarray, " half"], theta: float
  ) -> tuple[Float32[np.ndarray, " half"], float]:
    """Returns the scaled frequencies, and what queries and keys grow by."""
    width = 2 * len(periods)
    low = self._pair(self.beta_fast, width, theta)
    high = self._pair(self.beta_slow, width, theta)
    if self.truncate:
      low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
      high += 0.001
    pairs = np.arange(len(periods), dtype=np.float32)
    kept = 1 - np.clip((pairs - low) / (high - low), 0, 1)
    scaled = 1 / (self.factor * periods)
    return scaled * (1 - kept) + 1 / periods * kept, self._attention_factor()

  def _pair(self, turns: float, width: int, theta: float) -> float:
    """Returns the index of the pair that turned so often when trained."""
    period = self.original_max_length / (turns * 2 * math.pi)
    return width * math.log(period) / (2 * math.log(theta))

  def _attention_factor(self) -> float:
    if self.attention_factor is not None:
      return self.attention_factor
    growth = 0.1 * math.log(self.factor)
    if self.mscale is None or self.mscale_all_dim is None:
      return 1 + growth
    return (1 + self.mscale * growth) / (1 + self.mscale_all_dim * growth)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3(_Stretching):
  """Divides slow pairs by `factor`, as Llama 3.1 does, and fast ones by 1.

  Between the two the frequency changes linearly with its unscaled value.

  Attributes:
    original_max_length: trained length, in tokens.
    low_freq_factor: a pair that turns less often within it is slow.
    high_freq_factor: a pair that turns more often is fast.

  Source: the code of Llama 3.1; as transformers computes it.
  """

  original_max_length: int
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0

  def _problems(self) -> Iterator[str]:
    yield from super()._problems()
    low, high = self.low_freq_factor, self.high_freq_factor
    if not 0 < low < high < math.inf:
      bound = f"is not between 0 and high_freq_factor={high}; use 1 and 4"
      yield f"low_freq_factor={low} {bound}"

  def __call__(
    self, periods: Float32[np.ndarray, " half"], theta: float
  ) -> tuple[Float32[np.ndarray, " half"], float]:
    """Returns the scaled frequencies, and 1 for the attention factor."""
    del theta
    frequency = 1 / periods
    turns = self.original_max_length / (2 * math.pi / frequency)
    low, high = self.low_freq_factor, self.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return (1 - kept) * frequency / self.factor + kept * frequency, 1.0


Scaling = Linear | Yarn | Llama3


def frequencies(
  head_dim: int, theta: float, scaling: Scaling | None
) -> tuple[Float32[np.ndarray, " half"], float]:
  """Returns radians a position of each pair, and what cos and sin grow by.

  Pair i turns by theta^(-2i/d). Source: RoFormer, arXiv 2104.09864, eq. 15.
  """
  # A period is the number of positions in which a pair turns by a radian.
  exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
  periods = (theta ** exponents.astype(np.float64)).astype(np.float32)
  return scaling(periods, theta) if scaling else (1 / periods, 1.0)


def rotate(
  x: Float[Array, "B L H d"],
  positions: Int32[Array, "B L"],
  frequency: Float32[Array, " half"] | Float32[np.ndarray, " half"],
  growth: float | Float32[Array, ""] = 1.0,
) -> Float[Array, "B L H d"]:
  """Turns every pair (x[i], x[i + d/2]), as paired in Qwen's weights.

  Angles are float32 whatever x is.

  Args:
    frequency, growth: see `frequencies`.
  """
  angle = positions[:, :, None, None].astype(jnp.float32) * frequency
  cos, sin = jnp.cos(angle) * growth, jnp.sin(angle) * growth
  a, b = jnp.split(x.astype(jnp.float32), 2, -1)
  turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
  return turned.astype(x.dtype)
