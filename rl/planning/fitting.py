"""Fits speeds and tasks to a log: lines, counts and histograms.

  turns     -> seconds of a token by the number of answers under way
  episodes  -> ids of contexts, within-group correlation
  seconds   -> histograms that `distributions` can draw from

Used by both calibrations: of a run's directory, for the planner
(calibration.py), and of benchmarks on one machine.
"""

import collections
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from jaxtyping import Float64

from rl.audit import event_log
from rl.simulation import distributions

_BINS = 60
_BODY = 0.9
_NORMAL = statistics.NormalDist()
MemberId = tuple[int, int, int]
Samples = Float64[np.ndarray, " N"]


# Speeds.


def asked_s(turn: event_log.Event) -> float:
  """Returns the time at which a turn's answer was requested."""
  return turn["t"] - turn["env_s"] - turn["decode_s"]


def answers(turns: Iterable[event_log.Event]) -> tuple[Samples, Samples]:
  """Returns the load and the seconds a token of every answer.

  The load is the number of answers under way, itself included, as a mean over
  its time. An answer begins when it has a slot.

  Args:
    turns: of one engine, each with at least one token.
  """
  turns = list(turns)
  ends = np.array([e["t"] - e["env_s"] for e in turns])
  decoded = (e["decode_s"] - e.get("queue_s", 0.0) for e in turns)
  took = np.array([max(seconds, 1e-6) for seconds in decoded])
  tokens = np.array([e["tokens"] for e in turns], np.float64)
  edges = np.concatenate([ends - took, ends])
  order = np.argsort(edges, kind="stable")
  times = edges[order]
  change = np.concatenate([np.ones(len(took)), -np.ones(len(took))])[order]
  number = np.cumsum(change)
  # The integral of the number under way, at each edge.
  area = np.concatenate([[0.0], np.cumsum(np.diff(times) * number[:-1])])
  mean = np.interp(ends, times, area) - np.interp(ends - took, times, area)
  return mean / took, took / tokens


def line(x: Samples, y: Samples) -> tuple[float, float]:
  """Returns the least-squares intercept and slope, both kept above 0."""
  least = 1e-3 * float(np.mean(y))
  if np.ptp(x) < 1e-6:  # A single x does not determine a slope.
    return float(np.mean(y)), 1e-3 * least
  slope, at_zero = np.polyfit(x, y, 1)
  if at_zero < least:
    slope, at_zero = float(np.sum(x * y) / np.sum(x * x)), least
  if slope <= 0:
    slope, at_zero = 1e-3 * least, float(np.mean(y))
  return float(at_zero), float(slope)


def starts_s(
  admitted: Iterable[event_log.Event], turns: Iterable[event_log.Event]
) -> Iterator[float]:
  """Yields seconds from the admission of a member to its first request."""
  begun = {event_log.member(e): asked_s(e) for e in turns if e["number"] == 0}
  for event in admitted:
    if event_log.member(event) in begun:
      yield max(begun[event_log.member(event)] - event["t"], 0.0)


# Tasks.


def contexts(ended: Sequence[event_log.Event]) -> tuple[float, float]:
  """Returns the mean ids of a first context, and of the reply to an answer."""
  after = np.array([e["turns"] - 1.0 for e in ended])
  ids = np.array([float(e["length"] - e["tokens"]) for e in ended])
  if np.ptp(after) == 0:
    return float(np.mean(ids)), 1.0
  reply, prompt = np.polyfit(after, ids, 1)
  return float(prompt), max(float(reply), 1.0)


def correlation(draws: Mapping[MemberId, Sequence[float]]) -> float:
  """Returns the correlation of draws within groups, 0 to 1.

  It is the correlation of normal variables of the same ranks, as
  `workload.correlated` mixes them. All draws share the one factor of their
  group, so means of k draws correlate more than the draws: a correlation r of
  draws gives k r / (1 + (k - 1) r), where k is the harmonic mean if members
  differ in it.

  Args:
    draws: one or more for each member.
  """
  ranked = iter(scores([one for own in draws.values() for one in own]).tolist())
  groups: dict[tuple[int, int], list[list[float]]] = {}
  for (group, attempt, _), own in draws.items():
    member_scores = [next(ranked) for _ in own]
    groups.setdefault((group, attempt), []).append(member_scores)
  size = max(map(len, groups.values()), default=0)
  whole = [group for group in groups.values() if len(group) == size]
  if not whole:
    return 0.0
  means = [[statistics.fmean(own) for own in group] for group in whole]
  of_means = intraclass(means)
  k = statistics.harmonic_mean([len(own) for group in whole for own in group])
  return of_means / (k - (k - 1.0) * of_means)


def scores(values: Sequence[float]) -> Samples:
  """Returns standard normal values of the same ranks; ties stay ties."""
  _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
  middle = (np.cumsum(counts) - counts / 2.0) / max(len(values), 1)
  return np.array([_NORMAL.inv_cdf(p) for p in middle.tolist()])[place]


def intraclass(groups: Sequence[Sequence[float]]) -> float:
  """Returns the correlation within groups of one size, between 0 and 1.

  Source: Shrout and Fleiss, 1979, ICC(1, 1).
  """
  values = np.array(groups, np.float64)
  count, size = values.shape
  if count < 2 or size < 2 or not np.ptp(values):
    return 0.0
  between = size * values.mean(axis=1).var(ddof=1)
  within = values.var(axis=1, ddof=1).mean()
  share = (between - within) / (between + (size - 1) * within)
  return float(min(max(share, 0.0), 1.0))


# Distributions.


def seconds(values: Sequence[float]) -> distributions.Distribution:
  """Returns a histogram with bins of equal shares, finer in the tail."""
  if not values or max(values) <= 0:
    return distributions.Fixed(0.0)
  body = np.linspace(0.0, _BODY, _BINS)
  last = min(1.0 / len(values), 1.0 - _BODY)
  tail = 1.0 - np.geomspace(1.0 - _BODY, last, _BINS)
  shares = np.unique(np.concatenate([body, tail, [1.0]]))
  edges = np.maximum(np.quantile(values, shares), 0.0)
  # Equal quantiles would make bins of no width.
  edges = np.maximum.accumulate(edges) + np.arange(len(edges)) * 1e-9
  return distributions.Histogram(
    edges=tuple(edges.tolist()), counts=tuple(np.diff(shares).tolist())
  )


def counts(
  values: Sequence[int], weights: Sequence[float] | None = None
) -> distributions.Histogram:
  """Returns the frequencies of whole numbers; None: of equal weights."""
  counted: dict[int, float] = collections.defaultdict(float)
  for value, weight in zip(values, weights or [1.0] * len(values), strict=True):
    counted[value] += weight
  numbers = range(min(counted), max(counted) + 1)
  edges = [number - 0.5 for number in (*numbers, numbers.stop)]
  return distributions.Histogram(
    edges=tuple(edges), counts=tuple(counted[n] for n in numbers)
  )
