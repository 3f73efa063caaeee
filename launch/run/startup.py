"""The phases of a start, and the seconds that each takes: `log_startup`."""

import time
from collections.abc import Iterator

from rl.runtime import trace

_FIRST_UPDATE = ("learner", "update")


class Startup:
  """The work of a run up to its first update, by the spans of its trace.

  A run makes one as it begins, calls `follow` when it has a trace, and `end`
  after its first round.

  Args:
    began_s: reading of time.monotonic() when the command began.
  """

  def __init__(self, began_s: float):
    self._began_s = began_s
    self._spans = [self._until_now("imports, settings", 0.0)]
    self._first_update_cpu_s = 0.0

  def follow(self, spans: trace.Trace) -> None:
    """Ends the phase in which the parts were made, and listens to the trace."""
    self._spans.append(self._until_now("parts", self._spans[-1].end))
    self._trace = spans
    spans.listeners.append(self._add)

  def end(self) -> list[str]:
    """Stops listening and returns a table, in seconds since the command.

    Phases may run side by side. `first` is the first piece of a phase, which
    traces and loads its programs.
    """
    self._trace.listeners.remove(self._add)
    return list(self._lines())

  def _lines(self) -> Iterator[str]:
    phases: dict[tuple[str, str], list[trace.Span]] = {}
    for span in sorted(self._spans, key=lambda span: span.start):
      phases.setdefault((span.track, span.name), []).append(span)
    cpu_s = time.process_time()
    yield f"startup: {cpu_s:.1f} s of CPU by the end of the first round"
    yield f"{'':26}{'from':>8}{'to':>8}{'busy':>8}{'first':>8}"
    for (track, name), phase in phases.items():
      busy = trace.busy(phase, track)
      cells = (
        busy[0][0],
        busy[-1][1],
        sum(end - start for start, end in busy),
        phase[0].end - phase[0].start,
      )
      row = "".join(f"{seconds:8.1f}" for seconds in cells)
      yield f"{f'{track}: {name}':26}{row}"
    if updates := phases.get(_FIRST_UPDATE):
      used_s = self._first_update_cpu_s
      yield f"first update after {updates[0].end:.1f} s, {used_s:.1f} s of CPU"

  def _add(self, span: trace.Span) -> None:
    if (span.track, span.name) == _FIRST_UPDATE:
      self._first_update_cpu_s = self._first_update_cpu_s or time.process_time()
    later_s = self._trace.origin - self._began_s
    start, end = span.start + later_s, span.end + later_s
    self._spans.append(trace.Span(span.track, span.name, start, end))

  def _until_now(self, name: str, start: float) -> trace.Span:
    return trace.Span("main", name, start, time.monotonic() - self._began_s)
