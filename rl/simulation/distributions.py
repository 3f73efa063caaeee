"""Distributions as quantile functions; nothing here is random.

A draw is the quantile of a uniform number, so that draws can be correlated
while each keeps its own distribution.
"""

import bisect
import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from rl.settings import checks

_NORMAL = statistics.NormalDist()


@runtime_checkable
class Distribution(Protocol):
  """Numbers >= 0 as their quantiles."""

  def quantile(self, probability: float) -> float:
    """Returns the value that a share of draws, in (0, 1), stays below."""
    ...


@dataclasses.dataclass(frozen=True)
class Fixed:
  """A constant."""

  value: float = 0.0

  def __post_init__(self) -> None:
    checks.at_least(self, 0, "value", where="")

  def quantile(self, probability: float) -> float:
    """Returns the constant."""
    return self.value


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogNormal:
  """A log-normal body with a Pareto tail.

  Attributes:
    mean: of the body without tail and cap.
    sigma: of the body's logarithm.
    tail_share: share of draws in the tail, which replaces the same share of the
      body's largest draws.
    tail_index: P(X > x) falls as x ** -tail_index in the tail.
    max_value: larger draws become this.
  """

  mean: float
  sigma: float
  tail_share: float = 0.0
  tail_index: float = 2.5
  max_value: float = math.inf

  def __post_init__(self) -> None:
    checks.at_least(self, 0, "sigma", where="")
    checks.above(self, 0, "mean", "max_value", where="")
    out = "else the mean is infinite"
    checks.above(self, 1, "tail_index", where="", out=out)
    checks.below(self, 1, "tail_share", where="")

  def quantile(self, probability: float) -> float:
    """Returns the quantile of the body or, beyond its start, of the tail."""
    above = 1.0 - probability
    if above >= self.tail_share:
      value = self._body(probability)
    else:
      start = self._body(1.0 - self.tail_share)
      value = start * (self.tail_share / above) ** (1.0 / self.tail_index)
    return min(value, self.max_value)

  def _body(self, probability: float) -> float:
    return self._median * math.exp(self.sigma * _NORMAL.inv_cdf(probability))

  @functools.cached_property
  def _median(self) -> float:
    return self.mean * math.exp(-0.5 * self.sigma**2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gaussian:
  """A normal distribution; draws below 0 become 0."""

  mean: float
  sigma: float

  def __post_init__(self) -> None:
    checks.at_least(self, 0, "mean", "sigma", where="")

  def quantile(self, probability: float) -> float:
    """Returns the quantile, at least 0."""
    return max(0.0, self.mean + self.sigma * _NORMAL.inv_cdf(probability))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Histogram:
  """A measured distribution: counts between edges, uniform within a bin.

  Attributes:
    edges: rising, one more than counts.
    counts: weights of the bins.
  """

  edges: Sequence[float]
  counts: Sequence[float]

  def __post_init__(self) -> None:
    if len(self.edges) != len(self.counts) + 1:
      raise ValueError(
        f"{len(self.counts)} counts with {len(self.edges)} edges; give one "
        "edge more than counts"
      )
    if not self.counts:
      raise ValueError("counts=() have no bin; give one or more, and two edges")
    rising = all(a < b for a, b in itertools.pairwise(self.edges))
    if not rising or self.edges[0] < 0 or math.isinf(self.edges[-1]):
      raise ValueError(
        f"edges={self.edges} do not rise from 0 or above to a finite number"
      )
    if min(self.counts) < 0 or not sum(self.counts) > 0:
      raise ValueError(
        f"counts={self.counts} must be 0 or above, and one of them above 0"
      )

  def quantile(self, probability: float) -> float:
    """Returns the quantile, linear within a bin."""
    sums = self._sums
    target = probability * sums[-1]
    i = min(bisect.bisect_right(sums, target), len(self.counts)) - 1
    share = (target - sums[i]) / (sums[i + 1] - sums[i])
    return self.edges[i] + share * (self.edges[i + 1] - self.edges[i])

  @functools.cached_property
  def _sums(self) -> Sequence[float]:
    return [0.0, *itertools.accumulate(self.counts)]


def mean(distribution: Distribution, points: int = 1 << 14) -> float:
  """Returns the mean of a distribution by the midpoint rule on its quantiles.

  It misses the part of a Pareto tail beyond the last point.
  """
  values = (distribution.quantile((i + 0.5) / points) for i in range(points))
  return math.fsum(values) / points
