"""Bounds on the metrics of a run, and its end where they are left for long.

Numbers that drift tell of a fault long before success falls: a kernel that is
wrong, weights that did not arrive, a policy that collapses or loops.
"""

import collections
import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Literal

from rl.settings import checks

Then = Literal["warn", "pause", "stop"]

_MEDIAN_OF = 50
"""Rounds whose median a gradient norm is compared with."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bound:
  """A bound on one metric.

  Attributes:
    limit: the last value that is fine; None, for `logprob_gap` alone, follows
      from the run; see `MetricBounds.resolved`.
    rounds: in a row beyond the limit that are too many.
    then: "warn"; "stop": that round is saved, and the run ends; or "pause": the
      weights of later rounds are not published until the metric is back, and
      then with the newest. Once the bound on staleness lets nothing more be
      trained, the run stops.
  """

  limit: float | None = None
  rounds: int = 3
  then: Then = "warn"

  def validate(self) -> None:
    """Raises ValueError on numbers that cannot work."""
    checks.finite_at_least(self, 0, "limit")
    checks.at_least(self, 1, "rounds")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricBounds:
  """Bounds on metrics of a round; None leaves one unbounded.

  Attributes:
    logprob_gap: upper bound of `logprob_gap_mean`, in nats. By default several
      times what rounding makes of it, see `GAPS`: beyond that the engine
      computes something else than the learner, and nothing that is trained
      then can be trusted.
    behaviour_kl, kl: upper bounds of these, in nats a token.
    behaviour_ess: lower bound of the effective share of samples.
    entropy: lower bound, in nats a token.
    grad_norm: upper bound as a multiple of its median over the 50 rounds
      before.
    fault_share, truncated_share: upper bounds of the shares of episodes that
      ended in a fault, or at a limit of turns or tokens.
    repetition: upper bound of the share of repeated text.
  """

  logprob_gap: Bound | None = Bound(rounds=2, then="stop")
  behaviour_kl: Bound | None = Bound(limit=1.0)
  kl: Bound | None = Bound(limit=10.0)
  behaviour_ess: Bound | None = Bound(limit=0.05)
  entropy: Bound | None = Bound(limit=1e-4)
  grad_norm: Bound | None = Bound(limit=100.0, rounds=1)
  fault_share: Bound | None = Bound(limit=0.5)
  truncated_share: Bound | None = Bound(limit=0.9, rounds=10)
  repetition: Bound | None = Bound(limit=0.5)

  def validate(self) -> None:
    """Raises ValueError on a bound without a limit."""
    for field in dataclasses.fields(self):
      bound = getattr(self, field.name)
      if field.name != "logprob_gap" and bound and bound.limit is None:
        raise ValueError(
          f"bounds.{field.name}.limit=None bounds nothing; give a number, or "
          f"turn it off with --noconfig.bounds.{field.name}"
        )

  def resolved(
    self, *, compute: str, published: str, on_publish: str
  ) -> "MetricBounds":
    """Returns the bounds with the limit of `logprob_gap` that a run asks for.

    Args:
      compute: type of parameters and activations.
      published: `Publishing.dtype`.
      on_publish: `Overlap.on_publish`. Caches that are kept are those of other
        weights, so the gap says nothing then, and has no bound.
    """
    gap = self.logprob_gap
    if gap is None or gap.limit is not None:
      return self
    limit = max(GAPS[compute], GAPS.get(published, 0.0))
    with_limit = dataclasses.replace(gap, limit=limit)
    kept = on_publish == "keep_kv"
    return dataclasses.replace(self, logprob_gap=None if kept else with_limit)


GAPS = {
  "float32": 0.003,
  "bfloat16": 0.1,
  "int8": 0.25,
  "float8_e4m3fn": 0.5,
}
"""Default limits of `logprob_gap_mean` by type, in nats.

The means measured by `benchmarks.weight_dtypes` are 1e-7 in float32 on a CPU,
0.014, 0.040 and 0.16; matrix products of a GPU round float32 to ten bits.
"""
_METRICS = {"logprob_gap": "logprob_gap_mean"}
_FLOORS = ("behaviour_ess", "entropy")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Crossing:
  """A metric that has been beyond its bound for too many rounds.

  Attributes:
    name: of the field of `MetricBounds`.
    round: the last of them.
    limit: of the metric itself, where the bound is a multiple.
  """

  name: str
  metric: str
  round: int
  value: float
  limit: float
  is_floor: bool
  bound: Bound

  def __str__(self) -> str:
    """Returns a sentence."""
    side = "below" if self.is_floor else "above"
    span = f", for {self.bound.rounds} rounds" if self.bound.rounds > 1 else ""
    pause = "; no later weights are published until it is back"
    return (
      f"round {self.round}: {self.metric} is {self.value:.3g}, {side} "
      f"{self.limit:.3g}{span}{pause * (self.bound.then == 'pause')}"
    )


class Monitor:
  """Compares the metrics of each round with their bounds; owns no clock.

  Attributes:
    lasting: crossings whose metric is not back yet, by field.
  """

  def __init__(self, bounds: MetricBounds):
    """Starts before the first round; every bound has its limit."""
    self._bounds: dict[str, Bound] = {
      field.name: bound
      for field in dataclasses.fields(bounds)
      if (bound := getattr(bounds, field.name)) is not None
    }
    self._beyond = collections.Counter[str]()
    self.lasting: dict[str, Crossing] = {}
    self._norms = collections.deque[float](maxlen=_MEDIAN_OF)

  def after(self, metrics: Mapping[str, float | None]) -> list[Crossing]:
    """Returns the crossings of a round; one that lasts is returned once.

    Args:
      metrics: of the round, as in metrics.jsonl. What is missing or not a
        number changes nothing.
    """
    crossings = []
    for name, bound in self._bounds.items():
      metric = _METRICS.get(name, name)
      value = metrics.get(metric)
      if value is None or math.isnan(value):
        continue
      limit, is_floor = self._limit(name, bound), name in _FLOORS
      is_beyond = value < limit if is_floor else value > limit
      self._beyond[name] = self._beyond[name] + 1 if is_beyond else 0
      if not is_beyond:
        self.lasting.pop(name, None)
      if self._beyond[name] == bound.rounds:
        crossing = Crossing(
          name=name,
          metric=metric,
          round=int(metrics["round"] or 0),
          value=value,
          limit=limit,
          is_floor=is_floor,
          bound=bound,
        )
        crossings.append(crossing)
        self.lasting[name] = crossing
    if (norm := metrics.get("grad_norm")) and not math.isnan(norm):
      self._norms.append(norm)
    return crossings

  def _limit(self, name: str, bound: Bound) -> float:
    assert bound.limit is not None
    if name != "grad_norm":
      return bound.limit
    if len(self._norms) < _MEDIAN_OF:
      return math.inf
    return bound.limit * statistics.median(self._norms)


def crossings(
  bounds: MetricBounds, rows: Iterable[Mapping[str, float | None]]
) -> list[Crossing]:
  """Returns the crossings of a whole run, from its rows of metrics."""
  monitor = Monitor(bounds)
  return [crossing for row in rows for crossing in monitor.after(row)]
