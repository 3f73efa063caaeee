"""Draws a run as one SVG for a README: success by round, and both meshes.

The picture brings its own light card, so that it reads on a dark page too.
"""

import html
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl.runtime import trace

_WIDTH, _LEFT, _RIGHT = 880, 76, 848
_CURVE_TOP, _CURVE_BOTTOM, _STRIP_TOP = 92, 292, 392
_PAPER, _INK, _MUTED, _GRID = "#fdfcf9", "#1f2430", "#626b7a", "#e8e4db"
_COLOURS = {"learner": "#4457c9", "decode": "#15857a", "publish": "#b85c00"}


def draw(
  metrics: Sequence[Mapping[str, Any]],
  evaluations: Sequence[Mapping[str, Any]],
  spans: Sequence[trace.Span],
) -> str:
  """Returns the SVG.

  Args:
    metrics: one row a round, with "round" and "success" (0 to 1 or None).
    evaluations: rows with "round", "success", "low" and "high".
    spans: of the tracks "learner" and "decode"; may be empty.
  """
  height = 508 if spans else 336
  parts = [
    f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" '
    f'height="{height}" viewBox="0 0 {_WIDTH} {height}" role="img" '
    f'aria-label="Learning curve" fill="{_INK}" font-size="13" '
    'font-family="system-ui, -apple-system, Segoe UI, Helvetica, sans-serif">',
    f'<rect x="1" y="1" width="{_WIDTH - 2}" height="{height - 2}" rx="14" '
    f'fill="{_PAPER}" stroke="{_GRID}"/>',
    *_curve(metrics, evaluations),
    *(_strip(spans) if spans else []),
    "</svg>",
  ]
  return "\n".join(parts) + "\n"


def window(spans: Sequence[trace.Span]) -> trace.Interval:
  """Returns four publishing periods in the middle of the run, in seconds.

  The whole run if it published less than five times.
  """
  published = sorted(span.end for span in spans if span.name == "publish")
  first = len(published) // 2 - 2
  if len(published) >= 5:
    return published[first], published[first + 4]
  return 0.0, max((span.end for span in spans), default=1.0)


def smooth(values: Sequence[float]) -> list[float]:
  """Returns the mean of each value's neighbours, 1/25 of the run each way."""
  radius = max(1, len(values) // 25)
  near = (
    values[max(0, i - radius) : i + radius + 1] for i in range(len(values))
  )
  return [math.fsum(part) / len(part) for part in near]


def _curve(
  metrics: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]
) -> list[str]:
  played = [row for row in metrics if row.get("success") is not None]
  rounds = [row["round"] for row in [*played, *evaluations]]
  low, high = min(rounds, default=0), max(rounds, default=1)
  x = scale(low, high, _LEFT, _RIGHT)
  y = scale(0, 1, _CURVE_BOTTOM, _CURVE_TOP)
  parts = [_text(28, 42, "Success rate", 'font-size="19" font-weight="600"')]
  parts += _key(28, 66, "learner", "training rollouts, raw and smoothed")
  if evaluations:
    words = "held-out tasks with confidence interval"
    parts += _key(290, 66, "decode", words)
  for share in (0, 0.25, 0.5, 0.75, 1):
    parts.append(_line(_LEFT, y(share), _RIGHT, y(share), _GRID))
    parts.append(_label(_LEFT - 12, y(share) + 4, f"{share:.0%}", "end"))
  for tick in ticks(low, high):
    parts.append(_label(x(tick), _CURVE_BOTTOM + 22, f"{tick:,g}"))
  parts.append(_label(_RIGHT, _CURVE_BOTTOM + 40, "rounds", "end"))
  parts += trend(
    [x(row["round"]) for row in played],
    [row["success"] for row in played],
    y,
    _COLOURS["learner"],
  )
  for row in evaluations:
    at, colour = x(row["round"]), _COLOURS["decode"]
    parts.append(_line(at, y(row["low"]), at, y(row["high"]), colour, 2))
    parts.append(_dot(at, y(row["success"]), colour))
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
    (smooth(values), 'stroke-width="2.5"'),
  ):
    points = " ".join(
      f"{x:.1f},{y(value):.1f}" for x, value in zip(at, line, strict=True)
    )
    parts.append(
      f'<polyline points="{points}" fill="none" stroke-linejoin="round" '
      f'stroke="{colour}" {style}/>'
    )
  return parts


def _strip(spans: Sequence[trace.Span]) -> list[str]:
  start, end = window(spans)
  x = scale(start, end, _LEFT, _RIGHT)
  share = trace.overlap(spans).share
  title = f"Both meshes in mid-run; overlap of the whole run: {share:.0%}"
  parts = [_text(28, _STRIP_TOP - 20, title, 'font-weight="600"')]
  bottom = _STRIP_TOP + 76
  for row, track in enumerate(("learner", "decode")):
    top = _STRIP_TOP + 8 + 34 * row
    parts.append(_text(28, top + 18, track, 'font-size="12"'))
    parts.append(_box(_LEFT, top, _RIGHT - _LEFT, "#f1eee6"))
    for left, right in _visible(trace.busy(spans, track), x):
      parts.append(_box(left, top, right - left, _COLOURS[track]))
  for span in spans:
    if span.name == "publish" and start <= span.end <= end:
      at = x(span.end)
      parts.append(_line(at, _STRIP_TOP, at, bottom, _COLOURS["publish"], 1.5))
      parts.append(_dot(at, _STRIP_TOP, _COLOURS["publish"], radius=3.5))
  for tick in ticks(start, end):
    parts.append(_label(x(tick), bottom + 18, f"{tick:,g} s"))
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


def ticks(low: float, high: float) -> list[float]:
  """Returns up to eight round numbers from `low` to `high`."""
  rough = max(high - low, 1e-9) / 7
  unit = 10.0 ** math.floor(math.log10(rough))
  step = next(unit * k for k in (1, 2, 5, 10) if unit * k >= rough)
  # 0.35 / 0.05 is a little below 7.
  first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
  return [round(i * step, 9) for i in range(first, last + 1)]


def scale(
  low: float, high: float, start: float, end: float
) -> Callable[[float], float]:
  """Returns the map of [low, high] onto pixels from `start` to `end`."""
  width = high - low or 1
  return lambda value: start + (value - low) / width * (end - start)


def _text(x: float, y: float, text: str, style: str = "") -> str:
  return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{html.escape(text)}</text>'


def _label(x: float, y: float, text: str, anchor: str = "middle") -> str:
  style = f'fill="{_MUTED}" font-size="12" text-anchor="{anchor}"'
  return _text(x, y, text, style)


def _line(
  x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1
) -> str:
  return (
    f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
    f'stroke="{colour}" stroke-width="{width}"/>'
  )


def _dot(x: float, y: float, colour: str, radius: float = 4.5) -> str:
  return (
    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}" '
    f'stroke="{_PAPER}" stroke-width="1.5"/>'
  )


def _box(x: float, y: float, width: float, colour: str) -> str:
  return (
    f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.2f}" height="26" '
    f'fill="{colour}"/>'
  )


def _key(x: float, y: float, track: str, words: str) -> list[str]:
  """Returns a legend entry: a dot in the colour of a track, and its words."""
  colour = _COLOURS[track]
  return [_dot(x + 5, y - 4, colour), _label(x + 16, y, words, "start")]
