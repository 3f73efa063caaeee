"""When each mesh worked: spans of device work and waits, and their overlap.

Tracks are "learner", "decode" and "host" (publishing, packing, checkpoints,
evaluation). All times are seconds since the start of the trace.
"""

import contextlib
import dataclasses
import json
import math
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence

Arg = int | float | str
Interval = tuple[float, float]


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
  """One stretch of work on a track; `args` say what it worked on."""

  track: str
  name: str
  start: float
  end: float
  args: Mapping[str, Arg] = dataclasses.field(default_factory=dict)


class Trace:
  """Collects the spans of a run and appends them to a file.

  Any thread may add; one thread flushes, once a round: a crash costs at most
  the spans since the last flush. A resumed run goes on behind the last span
  of its file, so that the time in between takes no room.

  Attributes:
    origin: time.monotonic() at which the trace starts.
    spans: of the whole run, in the order in which they were added.
  """

  def __init__(self, path: pathlib.Path | None):
    """Goes on with the JSON lines of `path`; keeps no file when None."""
    self._path = path
    self.spans: list[Span] = []
    if path and path.exists():
      self.spans = read(path)
      # A crash may have cut the last line; the next one must stay whole.
      with path.open("a") as file:
        file.write("\n")
    self._num_written = len(self.spans)
    last = max((span.end for span in self.spans), default=0.0)
    self.origin = time.monotonic() - last

  def add(
    self, track: str, name: str, start: float, end: float, **args: Arg
  ) -> None:
    """Records work between two readings of time.monotonic()."""
    # list.append is atomic, so device threads need no lock.
    self.spans.append(
      Span(track, name, start - self.origin, end - self.origin, args)
    )

  @contextlib.contextmanager
  def span(self, track: str, name: str, **args: Arg) -> Iterator[None]:
    """Records the body of a `with`, also when it raises."""
    start = time.monotonic()
    try:
      yield
    finally:
      self.add(track, name, start, time.monotonic(), **args)

  def flush(self) -> None:
    """Writes what was added since the last call."""
    fresh = self.spans[self._num_written :]
    if self._path and fresh:
      lines = [json.dumps(dataclasses.asdict(span)) for span in fresh]
      with self._path.open("a") as file:
        file.write("\n".join(lines) + "\n")
    self._num_written += len(fresh)


def read(path: pathlib.Path) -> list[Span]:
  """Returns the spans of a file; lines cut by a crash are left out."""
  spans = []
  for line in path.read_text().split("\n"):
    with contextlib.suppress(json.JSONDecodeError):
      spans.append(Span(**json.loads(line)))
  return spans


def busy(spans: Sequence[Span], track: str) -> list[Interval]:
  """Returns when a track worked: disjoint intervals in order."""
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
class Overlap:
  """Busy seconds of two tracks and of both at once."""

  first_s: float
  second_s: float
  both_s: float

  @property
  def share(self) -> float:
    """Part of the less busy track's work that the other one hides, 0 to 1."""
    shorter = min(self.first_s, self.second_s)
    return self.both_s / shorter if shorter else 0.0


def overlap(
  spans: Sequence[Span], first: str = "learner", second: str = "decode"
) -> Overlap:
  """Returns how much of the work of two tracks happened at once."""
  a, b = busy(spans, first), busy(spans, second)
  return Overlap(
    first_s=math.fsum(end - start for start, end in a),
    second_s=math.fsum(end - start for start, end in b),
    both_s=intersection(a, b),
  )


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


def write_chrome(spans: Sequence[Span], path: pathlib.Path) -> None:
  """Writes a file for ui.perfetto.dev: a process a track, a thread a lane."""
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
