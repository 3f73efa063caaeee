"""Numbers that vary: distributions as their quantiles, and nothing random.

A draw is the quantile of a uniform number, so that draws can be correlated
while each keeps its own distribution.
"""

import bisect
import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

_NORMAL = statistics.NormalDist()


def _at_least(bound: float, **values: float) -> None:
  for name, value in values.items():
    if not value >= bound:
      raise ValueError(f"{name}={value} is below {bound:g}")


def _above(bound: float, **values: float) -> None:
  for name, value in values.items():
    if not value > bound:
      raise ValueError(f"{name}={value} is not above {bound:g}")


def _below(bound: float, **values: float) -> None:
  for name, value in values.items():
    if not value < bound:
      raise ValueError(f"{name}={value} is not below {bound:g}")


@runtime_checkable
class Distribution(Protocol):
  """Numbers >= 0 as their quantiles."""

  def quantile(self, probability: float) -> float:
    """Returns the value that this share of draws, in (0, 1), stays below."""
    ...


@dataclasses.dataclass(frozen=True)
class Fixed:
  """Always the same number."""

  value: float = 0.0

  def __post_init__(self) -> None:
    _at_least(0.0, value=self.value)

  def quantile(self, probability: float) -> float:
    """Returns the number."""
    return self.value


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogNormal:
  """A log-normal body; the largest draws follow a Pareto tail.

  Attributes:
    mean: of the body, as if it had neither tail nor cap.
    sigma: of the body's logarithm.
    tail_share: share of draws in the tail; it begins where the body's largest
      draws of that share would.
    tail_index: of the tail: P(X > x) falls as x ** -tail_index.
    max_value: larger draws become this.
  """

  mean: float
  sigma: float
  tail_share: float = 0.0
  tail_index: float = 2.5
  max_value: float = math.inf

  def __post_init__(self) -> None:
    _at_least(0.0, sigma=self.sigma, tail_share=self.tail_share)
    _above(0.0, mean=self.mean, max_value=self.max_value)
    _above(1.0, tail_index=self.tail_index)  # Below it there is no mean.
    _below(1.0, tail_share=self.tail_share)

  def quantile(self, probability: float) -> float:
    """Returns the body's quantile, or the tail's behind where it begins."""
    above = 1.0 - probability
    if above >= self.tail_share:
      value = self._body(probability)
    else:
      start = self._body(1.0 - self.tail_share)
      value = start * (self.tail_share / above) ** (1.0 / self.tail_index)
    return min(value, self.max_value)

  def _body(self, probability: float) -> float:
    median = self.mean * math.exp(-0.5 * self.sigma**2)
    return median * math.exp(self.sigma * _NORMAL.inv_cdf(probability))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gaussian:
  """A normal distribution; draws below 0 become 0."""

  mean: float
  sigma: float

  def __post_init__(self) -> None:
    _at_least(0.0, mean=self.mean, sigma=self.sigma)

  def quantile(self, probability: float) -> float:
    """Returns the quantile, 0 at the least."""
    return max(0.0, self.mean + self.sigma * _NORMAL.inv_cdf(probability))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Histogram:
  """What was measured: counts between edges, even within each bin.

  Attributes:
    edges: rising, one more than there are counts.
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
    rising = all(a < b for a, b in itertools.pairwise(self.edges))
    if not rising or self.edges[0] < 0:
      raise ValueError(f"edges={self.edges} do not rise from 0 or above")
    if min(self.counts) < 0 or not sum(self.counts) > 0:
      raise ValueError(f"counts={self.counts} are no weights of bins")

  def quantile(self, probability: float) -> float:
    """Returns the quantile, linear within a bin."""
    sums = [0.0, *itertools.accumulate(self.counts)]
    wanted = probability * sums[-1]
    i = min(bisect.bisect_right(sums, wanted), len(self.counts)) - 1
    share = (wanted - sums[i]) / (sums[i + 1] - sums[i])
    return self.edges[i] + share * (self.edges[i + 1] - self.edges[i])


def mean(distribution: Distribution, points: int = 1 << 14) -> float:
  """Returns the mean of a distribution by the midpoint rule on its quantiles.

  Of a Pareto tail it misses what lies beyond the last point.
  """
  values = (distribution.quantile((i + 0.5) / points) for i in range(points))
  return math.fsum(values) / points
