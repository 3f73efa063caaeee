"""Draws a run as one SVG for a README: success by round, and both meshes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launch.report import run_files, svg
from rl.runtime import trace

_WIDTH, _LEFT, _RIGHT = 880, 76, 848
_CURVE_TOP, _CURVE_BOTTOM, _STRIP_TOP = 92, 292, 392
_COLOURS = {
  "learner": svg.BLUE,
  "decode": svg.GREEN,
  "publish": svg.ORANGE,
}


def draw(
  metrics: Sequence[Mapping[str, Any]],
  evaluations: Sequence[Mapping[str, Any]],
  spans: run_files.RunSpans,
) -> str:
  """Returns the SVG.

  Args:
    metrics: one row a round, with "round" and "success" (0 to 1 or None).
    evaluations: rows with "round", "success", "low" and "high".
    spans: of a run, which may have none.
  """
  height = 508 if spans.middle else 336
  parts = _curve(metrics, evaluations)
  parts += _strip(spans.middle, spans.work.share) if spans.middle else []
  return svg.picture(_WIDTH, height, "Learning curve", parts)


def window(spans: Sequence[trace.Span]) -> trace.Interval:
  """Returns four publishing periods in the middle of the run, in seconds.

  The whole run if it published less than five times.
  """
  published = sorted(span.end for span in spans if span.name == "publish")
  first = len(published) // 2 - 2
  if len(published) >= 5:
    return published[first], published[first + 4]
  return 0.0, max((span.end for span in spans), default=1.0)


def _curve(
  metrics: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]
) -> list[str]:
  played = [row for row in metrics if row.get("success") is not None]
  rounds = [row["round"] for row in [*played, *evaluations]]
  low, high = min(rounds, default=0), max(rounds, default=1)
  x = svg.scale(low, high, _LEFT, _RIGHT)
  y = svg.scale(0, 1, _CURVE_BOTTOM, _CURVE_TOP)
  parts = [svg.text(28, 42, "Success rate", 'font-size="19" font-weight="600"')]
  parts += _key(28, 66, "learner", "training rollouts, raw and smoothed")
  if evaluations:
    words = "held-out tasks with confidence interval"
    parts += _key(290, 66, "decode", words)
  for share in (0, 0.25, 0.5, 0.75, 1):
    parts.append(svg.line(_LEFT, y(share), _RIGHT, y(share), svg.GRID))
    parts.append(svg.label(_LEFT - 12, y(share) + 4, f"{share:.0%}", "end"))
  for tick in svg.ticks(low, high, least=1):
    parts.append(svg.label(x(tick), _CURVE_BOTTOM + 22, f"{tick:,g}"))
  parts.append(svg.label(_RIGHT, _CURVE_BOTTOM + 40, "rounds", "end"))
  parts += trend(
    [x(row["round"]) for row in played],
    [row["success"] for row in played],
    y,
    _COLOURS["learner"],
  )
  for row in evaluations:
    at, colour = x(row["round"]), _COLOURS["decode"]
    parts.append(svg.line(at, y(row["low"]), at, y(row["high"]), colour, 2))
    parts.append(svg.dot(at, y(row["success"]), colour))
  return parts


def trend(
  at: Sequence[float],
  values: Sequence[float],
  y: Callable[[float], float],
  colour: str,
) -> list[str]:
  """Returns a thin curve of the values, and a bold one of moving means.

  Args:
    at: horizontal positions of the values.
  """
  parts = []
  for line, style in (
    (values, 'stroke-width="1" opacity="0.35"'),
    (svg.smooth(values), 'stroke-width="2.5"'),
  ):
    points = [(x, y(value)) for x, value in zip(at, line, strict=True)]
    parts.append(svg.curve(points, colour, style))
  return parts


def _strip(spans: Sequence[trace.Span], share: float) -> list[str]:
  start, end = window(spans)
  x = svg.scale(start, end, _LEFT, _RIGHT)
  title = f"Both meshes in mid-run; overlap of the whole run: {share:.0%}"
  parts = [svg.text(28, _STRIP_TOP - 20, title, 'font-weight="600"')]
  bottom = _STRIP_TOP + 76
  for row, track in enumerate(("learner", "decode")):
    top = _STRIP_TOP + 8 + 34 * row
    parts.append(svg.text(28, top + 18, track, 'font-size="12"'))
    parts.append(svg.box(_LEFT, top, _RIGHT - _LEFT, svg.WELL))
    for left, right in _visible(trace.busy(spans, track), x):
      parts.append(svg.box(left, top, right - left, _COLOURS[track]))
  for span in spans:
    if span.name == "publish" and start <= span.end <= end:
      at = x(span.end)
      parts.append(
        svg.line(at, _STRIP_TOP, at, bottom, _COLOURS["publish"], 1.5)
      )
      parts.append(svg.dot(at, _STRIP_TOP, _COLOURS["publish"], radius=3.5))
  for tick in svg.ticks(start, end):
    parts.append(svg.label(x(tick), bottom + 18, f"{tick:,g} s"))
  parts += _key(_RIGHT - 124, _STRIP_TOP - 20, "publish", "weights published")
  return parts


def _visible(
  busy: Sequence[trace.Interval], x: Callable[[float], float]
) -> list[trace.Interval]:
  """Returns the intervals in pixels, cut to the plot, without hairlines."""
  shown: list[trace.Interval] = []
  for start, end in busy:
    left, right = max(x(start), _LEFT), min(x(end), _RIGHT)
    if right <= left:
      continue
    if shown and left - shown[-1][1] < 0.5:
      left = shown.pop()[0]
    shown.append((left, right))
  return shown


def _key(x: float, y: float, track: str, words: str) -> list[str]:
  """Returns a legend entry: a dot in the colour of a track, and its words."""
  colour = _COLOURS[track]
  return [svg.dot(x + 5, y - 4, colour), svg.label(x + 16, y, words, "start")]
