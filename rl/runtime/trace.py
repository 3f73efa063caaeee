"""The trace: spans of device work and waits of each mesh, and their overlap.

Tracks are "learner", "decode" and "host" (publishing, packing, checkpoints,
evaluation). All times are seconds since the start of the trace.
"""

import bisect
import collections
import contextlib
import dataclasses
import json
import math
import pathlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from rl.runtime import line_file, segments

Arg = int | float | str
Interval = tuple[float, float]

_FLUSH_EVERY = 1000
_ADD_UP_EVERY = 1000
_MAX_CHROME = 200_000


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
  """One stretch of work on a track; `args` describe the work."""

  track: str
  name: str
  start: float
  end: float
  args: Mapping[str, Arg] = dataclasses.field(default_factory=dict)


class Trace:
  """Collects the spans of a run and appends them to a file.

  Any thread may add. Its owner flushes once a round, and a long round is
  flushed on the way: memory stays flat, and a crash loses only the spans since
  then. A resumed run continues after the last span of its file, so that the
  time in between takes no room.

  Attributes:
    origin: reading of the clock at which the trace starts.
    spans: in the order in which they were added; with a path only those since
      the last flush.
    listeners: called with each span, by the thread that adds it.
    file: on disk; None without a path.
  """

  def __init__(
    self,
    path: pathlib.Path | None,
    clock: Callable[[], float] = time.monotonic,
    segment_bytes: int = segments.MAX_BYTES,
  ):
    """Continues the JSON lines of `path`; None keeps no file.

    Args:
      segment_bytes: of the file, from which on it is compressed.
    """
    self._clock = clock
    self._writing = threading.Lock()
    self.spans: list[Span] = []
    self.listeners: list[Callable[[Span], None]] = []
    last = _last_end(path) if path and segments.exists(path) else 0.0
    self.file: line_file.LineFile | None = (
      segments.SegmentedFile(path, segment_bytes) if path else None
    )
    self.origin = clock() - last

  def now(self) -> float:
    """Returns a reading of the clock of its spans."""
    return self._clock()

  def add(
    self, track: str, name: str, start: float, end: float, **args: Arg
  ) -> None:
    """Records work between two readings of the clock."""
    span = Span(track, name, start - self.origin, end - self.origin, args)
    # list.append is atomic, so device threads need no lock.
    self.spans.append(span)
    for listener in self.listeners:
      listener(span)
    if self.file is not None and len(self.spans) >= _FLUSH_EVERY:
      self._write(self.file.try_append)

  @contextlib.contextmanager
  def span(self, track: str, name: str, **args: Arg) -> Iterator[None]:
    """Records the body of a `with`, also when it raises."""
    start = self._clock()
    try:
      yield
    finally:
      self.add(track, name, start, self._clock(), **args)

  def flush(self) -> None:
    """Writes the spans added since the last call, and forgets them."""
    if self.file is not None:
      self._write(self.file.append)

  def _write(self, append: Callable[[Iterable[str]], bool | None]) -> None:
    with self._writing:
      fresh = self.spans[:]
      if append(map(_line, fresh)) is not False:
        # Other threads append behind these meanwhile.
        del self.spans[: len(fresh)]


def _line(span: Span) -> str:
  # dataclasses.asdict copies deeply, which costs more than all the rest.
  names = ("track", "name", "start", "end", "args")
  return json.dumps({name: getattr(span, name) for name in names})


def read(path: pathlib.Path, newest: int | None = None) -> Iterator[Span]:
  """Yields the spans of a file.

  Lines that are no spans are left out: a crash may have cut them.

  Args:
    newest: see `segments.lines`.

  Raises:
    Damaged: a part of the file is missing.
  """
  for line in segments.lines(path, newest):
    with contextlib.suppress(ValueError, TypeError, RecursionError):
      yield Span(**json.loads(line))


def _last_end(path: pathlib.Path) -> float:
  """Returns the second at which a trace ends, 0 when it is empty."""
  last = 0.0
  # Spans are added when they end, so those of older segments end earlier.
  with contextlib.suppress(segments.Damaged):
    for span in read(path, newest=1):
      last = max(last, span.end)
  return last


def busy(spans: Sequence[Span], track: str) -> list[Interval]:
  """Returns the busy times of a track: disjoint intervals in order."""
  merged: list[Interval] = []
  for start, end in sorted((s.start, s.end) for s in spans if s.track == track):
    if merged and start <= merged[-1][1]:
      merged[-1] = (merged[-1][0], max(merged[-1][1], end))
    else:
      merged.append((start, end))
  return merged


def intersection(a: Sequence[Interval], b: Sequence[Interval]) -> float:
  """Returns the seconds that both lists of `busy` intervals cover."""
  seconds, i, j = 0.0, 0, 0
  while i < len(a) and j < len(b):
    seconds += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
    if a[i][1] < b[j][1]:
      i += 1
    else:
      j += 1
  return seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrackOverlap:
  """Busy seconds of two tracks and of both at once."""

  first_s: float
  second_s: float
  both_s: float

  def __add__(self, other: "TrackOverlap") -> "TrackOverlap":
    return TrackOverlap(
      first_s=self.first_s + other.first_s,
      second_s=self.second_s + other.second_s,
      both_s=self.both_s + other.both_s,
    )

  @property
  def share(self) -> float:
    """Share of the less busy track's work that the other one hides, 0 to 1."""
    shorter = min(self.first_s, self.second_s)
    return self.both_s / shorter if shorter else 0.0


_NO_OVERLAP = TrackOverlap(first_s=0.0, second_s=0.0, both_s=0.0)


def overlap(spans: Sequence[Span]) -> TrackOverlap:
  """Returns how much of the learner's work and of decoding was at once."""
  first, second = busy(spans, "learner"), busy(spans, "decode")
  return TrackOverlap(
    first_s=math.fsum(end - start for start, end in first),
    second_s=math.fsum(end - start for start, end in second),
    both_s=intersection(first, second),
  )


WORK = {"learner": ("forward", "accumulate", "update"), "decode": ("decode",)}
"""Spans that count as work of both meshes, by track.

"forward" scores tokens before their gradient. Checks on the learner's mesh,
copies, and a warm start with all that it compiles do not. A program that is
compiled late counts with its first call.
"""


def is_work(span: Span) -> bool:
  """Returns True for a span of work of the learner or an engine."""
  return span.name in WORK.get(span.track, ())


class LoneEvaluations:
  """Finds evaluations before and after the rounds of a process.

  Call `observe` with every span of a run, in the order of their ends.
  """

  def __init__(self):
    self._found: list[Interval] = []
    # From the first to the last work of a learner, for each process.
    self._rounds: list[Interval] = []
    self._begins = True

  def observe(self, span: Span) -> None:
    """Takes one span into account."""
    if (span.track, span.name) == ("host", "evaluate"):
      self._found.append((span.start, span.end))
    elif (span.track, span.name) == ("learner", "init"):
      self._begins = True
    elif span.track == "learner" and is_work(span):
      start = span.start if self._begins else self._rounds.pop()[0]
      self._rounds.append((start, span.end))
      self._begins = False

  @property
  def intervals(self) -> list[Interval]:
    """Their times, in order."""
    return [
      one
      for one in self._found
      if not any(start <= one[0] < end for start, end in self._rounds)
    ]


class Meter:
  """Measures the overlap of work from one `take` to the next.

  Append `add` to the listeners of a trace; any thread may call it. Every
  thousand spans are added up and forgotten, so memory is flat. A span counts
  where it ends: work that goes on while others are added up, or taken, loses
  its overlap with them.

  Args:
    without: intervals in order; work that starts in one does not count.
  """

  def __init__(self, without: Sequence[Interval] = ()):
    self._without = without
    self._adding_up = threading.Lock()
    self._spans: list[Span] = []
    self._total = _NO_OVERLAP

  def add(self, span: Span) -> None:
    """Counts a span of work."""
    if is_work(span) and not self._is_left_out(span.start):
      self._spans.append(span)
      if len(self._spans) >= _ADD_UP_EVERY:
        with self._adding_up:
          self._add_up()

  def take(self) -> TrackOverlap:
    """Returns the overlap since the last call, and forgets it."""
    with self._adding_up:
      self._add_up()
      total, self._total = self._total, _NO_OVERLAP
    return total

  def _is_left_out(self, time_s: float) -> bool:
    i = bisect.bisect(self._without, (time_s, math.inf)) - 1
    return i >= 0 and time_s < self._without[i][1]

  def _add_up(self) -> None:
    fresh = self._spans[:]
    self._total += overlap(fresh)
    # Other threads append behind these meanwhile.
    del self._spans[: len(fresh)]


def lanes(spans: Sequence[Span]) -> list[int]:
  """Returns a lane for each span: within one, spans of a track never overlap.

  A span takes the lowest lane that is free when it starts; most tracks need
  lane 0 alone.
  """
  ends: dict[str, list[float]] = {}
  chosen = [0] * len(spans)
  for i in sorted(range(len(spans)), key=lambda i: spans[i].start):
    track = ends.setdefault(spans[i].track, [])
    free = (k for k, end in enumerate(track) if end <= spans[i].start)
    chosen[i] = next(free, len(track))
    track[chosen[i] : chosen[i] + 1] = [spans[i].end]
  return chosen


def write_chrome(spans: Iterable[Span], path: pathlib.Path) -> None:
  """Writes a file for ui.perfetto.dev: a process a track, a thread a lane.

  Keeps the last 200,000 spans; viewers show no more.
  """
  spans = list(collections.deque(spans, _MAX_CHROME))
  tracks = list(dict.fromkeys(span.track for span in spans))
  rows = lanes(spans)
  work = [
    {
      "ph": "X",
      "name": span.name,
      "pid": tracks.index(span.track),
      "tid": lane,
      "ts": span.start * 1e6,
      "dur": (span.end - span.start) * 1e6,
      "args": dict(span.args),
    }
    for span, lane in zip(spans, rows, strict=True)
  ]
  used = sorted({(event["pid"], event["tid"]) for event in work})
  names = [
    {
      "ph": "M",
      "name": f"{kind}_name",
      "pid": pid,
      "tid": tid,
      "args": {"name": tracks[pid]},
    }
    for pid, tid in used
    for kind in ("process", "thread")
  ]
  path.write_text(json.dumps({"traceEvents": names + work}))
