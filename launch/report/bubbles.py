"""Idle time of both meshes by cause: the bubbles of the timeline.

  spans of a mesh --> busy --> idle --> cut by each cause in turn --> bubbles

The first cause that fits a moment gets it, in the order of `CAUSES`.
"""

import bisect
import collections
import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl.audit import event_log
from rl.runtime import trace

CAUSES = {
  "compile": "engines compile, weights are made",
  "warm start": "the learner is taught by demonstrations first",
  "publish": "weights are on their way",
  "packing": "groups that were taken are packed into rows",
  "evaluation": "an evaluation is played",
  "checkpoint": "the state is saved",
  "rollout": "engines decode what the learner waits for",
  "environment": "environments or rewards are at work, engines wait for them",
  "gate": "nothing is played: the gate lets nothing in, or the run ends",
}
"""Causes in the order in which they are tried, and their meaning."""

MESHES = ("learner", "decode")
_COMPILES = ("init", "warm up")
_HOST = {
  "publish": "publish",
  "evaluation": "evaluate",
  "checkpoint": "checkpoint",
}
_WARM_START = "warm start"
_OF_ONE = {
  "learner": ("packing", "rollout"),
  "decode": ("warm start",),
}
_MAX_KEPT = 200_000
_SHORTEST_S = 1e-3

Intervals = list[trace.Interval]
"""Disjoint and in order."""
Clock = Callable[[float], float]
"""Returns the reading of a clock at a time of the log."""


class Phases:
  """Times in the log that no span tells; call `observe` with every event.

  Memory is flat: the newest times are kept.
  """

  def __init__(self):
    self._open: dict[tuple[int, int], set[int]] = {}
    self._since: float | None = None
    self._playing: collections.deque[trace.Interval] = _newest()
    self._taken: collections.deque[float] = _newest()
    self._published: collections.deque[tuple[int, float]] = _newest()

  def observe(self, event: event_log.Event) -> None:
    """Takes one event into account."""
    kind = event["kind"]
    if kind == "published":
      self._published.append((int(event["version"]), event["t"]))
    elif kind == "dequeued":
      self._taken.append(event["t"])
    if kind not in _BEGINS and kind not in _ENDS:
      return
    place = event["group"], event["attempt"]
    if kind in _BEGINS:
      self._open.setdefault(place, set()).add(event["index"])
    elif "index" in event:
      members = self._open.get(place, set())
      members.discard(event["index"])
      if not members:
        self._open.pop(place, None)
    else:
      self._open.pop(place, None)
    self._note(event["t"])

  def _note(self, now: float) -> None:
    if self._open and self._since is None:
      self._since = now
    elif not self._open and self._since is not None:
      start, self._since = self._since, None
      # A member that follows another at once is no pause.
      if self._playing and start - self._playing[-1][1] < _SHORTEST_S:
        start = self._playing.pop()[0]
      self._playing.append((start, max(start, now)))

  def playing(self, clock: Clock = float) -> Intervals:
    """Returns the times at which members were played or graded.

    Args:
      clock: of the times that are returned.
    """
    found = [*self._playing]
    if self._since is not None:
      found.append((self._since, math.inf))
    return [(clock(start), clock(end)) for start, end in found]

  def taken(self, clock: Clock = float) -> list[float]:
    """Returns the times at which the learner took groups."""
    return sorted(map(clock, self._taken))

  def clock(self, spans: Sequence[trace.Span]) -> Clock:
    """Returns the clock of the spans.

    Each process of a run has an offset of its own, the median over its
    publishes.
    """
    logged: Mapping[Any, float] = dict(self._published)
    # A resumed run may publish a version again: the log has the last time.
    last = {s.args.get("version"): s for s in spans if s.name == "publish"}
    begins = [s for s in spans if (s.track, s.name) == ("learner", "init")]
    processes: list[tuple[float, list[float]]] = [(-math.inf, [])]
    for span in sorted([*begins, *last.values()], key=lambda s: s.start):
      if span.name != "publish":
        if processes[-1][1]:
          processes.append((span.start, []))
      elif (version := span.args.get("version")) in logged:
        processes[-1][1].append(span.end - logged[version])
    offsets = [
      (start, statistics.median(gaps)) for start, gaps in processes if gaps
    ] or [(-math.inf, 0.0)]
    starts = [start - offset for start, offset in offsets]
    return lambda t: t + offsets[max(0, bisect.bisect(starts, t) - 1)][1]


def _newest() -> collections.deque[Any]:
  return collections.deque(maxlen=_MAX_KEPT)


_BEGINS = ("admitted", "continued")
_ENDS = ("reward", "fault", "aborted", "ready", "trained", "dropped")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshTime:
  """The time of one mesh.

  Attributes:
    busy_s: in any of its programs but those of a start.
    bubbles: (start, end, cause), in order.
  """

  seconds: float
  busy_s: float
  bubbles: Sequence[tuple[float, float, str]]

  @property
  def causes(self) -> dict[str, float]:
    """Idle seconds by cause, in the order of `CAUSES`; those above 0."""
    sums = dict.fromkeys(CAUSES, 0.0)
    for start, end, cause in self.bubbles:
      sums[cause] += end - start
    return {cause: seconds for cause, seconds in sums.items() if seconds > 0}


def find(spans: Sequence[trace.Span], phases: Phases) -> Mapping[str, MeshTime]:
  """Returns the time of each mesh that has spans, from its first to its last.

  Args:
    phases: of the log of the same run.
  """
  decoding = trace.busy([s for s in spans if trace.is_work(s)], "decode")
  clock = phases.clock(spans)
  waits = {
    cause: trace.busy([s for s in spans if s.name == name], "host")
    for cause, name in _HOST.items()
  }
  waits["rollout"] = decoding
  waits["environment"] = phases.playing(clock)
  # Neither mesh has work while engines compile or weights are made.
  waits["compile"] = _times([s for s in spans if s.name in _COMPILES])
  waits["warm start"] = _times([s for s in spans if s.name == _WARM_START])
  found = {}
  for mesh in MESHES:
    own = [s for s in spans if s.track == mesh]
    if not own:
      continue
    starts = sorted(s.start for s in own)
    busy = trace.busy([s for s in own if s.name not in _COMPILES], mesh)
    waits["packing"] = _until(phases.taken(clock), starts)
    others = [c for m, ours in _OF_ONE.items() if m != mesh for c in ours]
    allowed = [cause for cause in CAUSES if cause not in others]
    start, end = starts[0], max(s.end for s in own)
    found[mesh] = MeshTime(
      seconds=end - start,
      busy_s=math.fsum(b - a for a, b in busy),
      bubbles=_split(
        _minus([(start, end)], busy), {c: waits.get(c) for c in allowed}
      ),
    )
  return found


def _times(spans: Sequence[trace.Span]) -> Intervals:
  """Returns the times of spans of any tracks."""
  return trace.busy(
    [dataclasses.replace(span, track="") for span in spans], track=""
  )


def _split(
  idle: Intervals, waits: Mapping[str, Intervals | None]
) -> list[tuple[float, float, str]]:
  """Returns the idle time, cut by the causes in their order.

  Args:
    waits: times of each cause; None: all that is left.
  """
  bubbles = []
  for cause, times in waits.items():
    part = idle if times is None else _both(idle, times)
    idle = _minus(idle, part)
    bubbles += [(start, end, cause) for start, end in part]
  return sorted(bubbles)


def _until(times: Sequence[float], starts: Sequence[float]) -> Intervals:
  """Returns the intervals from each time to the next start."""
  found: Intervals = []
  for time in times:
    next_ = bisect.bisect_left(starts, time)
    if next_ < len(starts) and (not found or time > found[-1][1]):
      found.append((time, starts[next_]))
  return found


def _both(a: Intervals, b: Intervals) -> Intervals:
  """Returns the times in both."""
  found, i, j = [], 0, 0
  while i < len(a) and j < len(b):
    start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
    if start < end:
      found.append((start, end))
    if a[i][1] < b[j][1]:
      i += 1
    else:
      j += 1
  return found


def _minus(a: Intervals, b: Intervals) -> Intervals:
  """Returns the times in the first that are not in the second."""
  found, j = [], 0
  for start, end in a:
    while j < len(b) and b[j][1] <= start:
      j += 1
    k = j
    while k < len(b) and b[k][0] < end:
      if b[k][0] > start:
        found.append((start, b[k][0]))
      start = max(start, b[k][1])
      k += 1
    if start < end:
      found.append((start, end))
  return found
