"""What a log says of speeds and of tasks: lines, counts and histograms.

  turns     -> seconds of a token, and how many answers were under way
  episodes  -> ids of contexts, how much members of a group are alike
  seconds   -> histograms, as `distributions` draws from

Both kinds of calibration are made of it: of a run's directory, for the planner
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
Place = tuple[int, int, int]
Samples = Float64[np.ndarray, " N"]


# Speeds.


def asked_s(turn: event_log.Event) -> float:
  """Returns when a turn's answer was asked for."""
  return turn["t"] - turn["env_s"] - turn["decode_s"]


def answers(turns: Iterable[event_log.Event]) -> tuple[Samples, Samples]:
  """Returns for every answer how many were under way, and seconds a token.

  The number is the mean over the time of the answer, itself included.

  Args:
    turns: of one engine, each with at least one token.
  """
  turns = list(turns)
  ends = np.array([e["t"] - e["env_s"] for e in turns])
  took = np.array([max(e["decode_s"], 1e-6) for e in turns])
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
  """Returns intercept and slope, both above 0, that are closest to y."""
  least = 1e-3 * float(np.mean(y))
  if np.ptp(x) < 1e-6:  # One x cannot tell them apart.
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
  """Yields seconds from an engine to the first request."""
  begun = {event_log.member(e): asked_s(e) for e in turns if e["number"] == 0}
  for event in admitted:
    if event_log.member(event) in begun:
      yield max(begun[event_log.member(event)] - event["t"], 0.0)


# Tasks.


def contexts(ended: Sequence[event_log.Event]) -> tuple[float, float]:
  """Returns ids of a first context, and of what follows an answer."""
  after = np.array([e["turns"] - 1.0 for e in ended])
  ids = np.array([float(e["length"] - e["tokens"]) for e in ended])
  if np.ptp(after) == 0:
    return float(np.mean(ids)), 1.0
  reply, prompt = np.polyfit(after, ids, 1)
  return float(prompt), max(float(reply), 1.0)


def likeness(draws: Mapping[Place, Sequence[float]]) -> float:
  """Returns the correlation of the draws of a group's members, 0 to 1.

  It is that of normal variables of the same ranks, as `workload.correlated`
  mixes them. Every draw shares the one factor of its group, so means of k draws
  are more alike than draws are: those of r give k r / (1 + (k - 1) r), where k
  is the harmonic mean if members differ in it.

  Args:
    draws: one or more of each member.
  """
  ranked = iter(scores([one for own in draws.values() for one in own]).tolist())
  groups: dict[tuple[int, int], list[list[float]]] = {}
  for (group, attempt, _), own in draws.items():
    mine = [next(ranked) for _ in own]
    groups.setdefault((group, attempt), []).append(mine)
  size = max(map(len, groups.values()), default=0)
  whole = [group for group in groups.values() if len(group) == size]
  if not whole:
    return 0.0
  alike = intraclass([[statistics.fmean(o) for o in group] for group in whole])
  k = statistics.harmonic_mean([len(own) for group in whole for own in group])
  return alike / (k - (k - 1.0) * alike)


def scores(values: Sequence[float]) -> Samples:
  """Returns standard normal values of the same ranks; equals stay equal."""
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
  """Returns what was measured, in bins of equal shares, finer in the tail."""
  if not values or max(values) <= 0:
    return distributions.Constant(0.0)
  body = np.linspace(0.0, _BODY, _BINS)
  last = min(1.0 / len(values), 1.0 - _BODY)
  tail = 1.0 - np.geomspace(1.0 - _BODY, last, _BINS)
  shares = np.unique(np.concatenate([body, tail, [1.0]]))
  edges = np.maximum(np.quantile(values, shares), 0.0)
  # What is equal would make bins of no width.
  edges = np.maximum.accumulate(edges) + np.arange(len(edges)) * 1e-9
  return distributions.Histogram(
    edges=tuple(edges.tolist()), counts=tuple(np.diff(shares).tolist())
  )


def counts(values: Sequence[int]) -> distributions.Histogram:
  """Returns whole numbers as often as they were."""
  counted = collections.Counter(values)
  numbers = range(min(counted), max(counted) + 1)
  edges = [number - 0.5 for number in (*numbers, numbers.stop)]
  return distributions.Histogram(
    edges=tuple(edges), counts=tuple(float(counted[n]) for n in numbers)
  )
