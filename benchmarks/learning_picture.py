"""The learning benchmark as one SVG: success by schedule, a panel each.

A dot is the mean over the seeds, the bar behind it goes from the least to the
most of them. The picture brings its own light card, for dark pages.
"""

import html
from collections.abc import Sequence

from benchmarks import learning_summary

_COLUMNS, _PANEL_WIDTH, _PANEL_HEIGHT = 3, 284, 236
_LEFT, _TOP, _WIDTH = 52, 122, 880
_PLOT_WIDTH, _PLOT_HEIGHT = 228, 164
_PAPER, _INK, _MUTED, _GRID = "#fdfcf9", "#1f2430", "#626b7a", "#e8e4db"
_COLOURS = {
  "uncorrected": "#b85c00",
  "ratio": "#4457c9",
  "truncated": "#15857a",
}
_WORDS = {
  "uncorrected": "uncorrected",
  "ratio": "ratio against the sampler",
  "truncated": "truncated weights, cap 2",
}
_TICKS = ("sync", "pipe", "η 1", "η 2", "η 4")
_APART = 5
"""Pixels between the arms of a schedule, so that no bar hides another."""


def draw(table: learning_summary.Table) -> str:
  """Returns the SVG; what has not run is left out."""
  names = learning_summary.NAMES
  lines = -(-len(names) // _COLUMNS)
  height = _TOP + lines * _PANEL_HEIGHT - 8
  parts = [
    f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" '
    f'height="{height}" viewBox="0 0 {_WIDTH} {height}" role="img" '
    f'aria-label="Success by schedule" fill="{_INK}" font-size="13" '
    'font-family="system-ui, -apple-system, Segoe UI, Helvetica, sans-serif">',
    f'<rect x="1" y="1" width="{_WIDTH - 2}" height="{height - 2}" rx="14" '
    f'fill="{_PAPER}" stroke="{_GRID}"/>',
    *_legend(),
  ]
  for number, algorithm in enumerate(names):
    x = _LEFT + number % _COLUMNS * _PANEL_WIDTH
    y = _TOP + number // _COLUMNS * _PANEL_HEIGHT
    parts += [
      f'<g transform="translate({x} {y})">',
      *_panel(table, algorithm),
      "</g>",
    ]
  return "\n".join([*parts, "</svg>"]) + "\n"


def _legend() -> list[str]:
  title = "Held-out games won after equally many samples"
  parts = [_text(28, 42, title, 'font-size="19" font-weight="600"')]
  x = 28
  for arm, words in _WORDS.items():
    parts.append(_dot(x + 5, 66, _COLOURS[arm]))
    parts.append(_label(x + 16, 70, words, "start"))
    x += 60 + 7 * len(words)
  parts.append(_line(x, 66, x + 22, 66, _MUTED, "4 3"))
  parts.append(_label(x + 30, 70, "before training", "start"))
  return parts


def _panel(table: learning_summary.Table, algorithm: str) -> list[str]:
  name = learning_summary.NAMES[algorithm]
  parts = [_text(0, -12, name, 'font-weight="600"')]
  for share in (0, 0.25, 0.5, 0.75, 1):
    parts.append(_line(0, _y(share), _PLOT_WIDTH, _y(share), _GRID))
    parts.append(_label(-8, _y(share) + 4, f"{share:.0%}", "end"))
  for place, tick in enumerate(_TICKS):
    parts.append(_label(_x(place), _PLOT_HEIGHT + 18, tick, "middle"))
  if before := table.before():
    y = _y(before.mean)
    parts.append(_line(0, y, _PLOT_WIDTH, y, _MUTED, "4 3"))
  for number, arm in enumerate(learning_summary.LATE):
    if learning_summary.has_arm(algorithm, arm):
      found = [
        table.spread(algorithm, schedule, arm)
        for schedule in learning_summary.LABELS
      ]
      parts += _curve(found, _COLOURS[arm], (number - 1) * _APART)
  return parts


def _curve(
  found: Sequence[learning_summary.Spread | None], colour: str, aside: float
) -> list[str]:
  """Returns dots, bars and the line through them, moved aside."""
  known = [(_x(i) + aside, own) for i, own in enumerate(found) if own]
  line = " ".join(f"{x:.1f},{_y(own.mean):.1f}" for x, own in known)
  parts = [
    f'<polyline points="{line}" fill="none" stroke-linejoin="round" '
    f'stroke="{colour}" stroke-width="2"/>'
  ]
  for x, own in known:
    parts.append(
      f'<line x1="{x:.1f}" y1="{_y(own.low):.1f}" x2="{x:.1f}" '
      f'y2="{_y(own.high):.1f}" stroke="{colour}" stroke-width="5" '
      'opacity="0.3" stroke-linecap="round"/>'
    )
    parts.append(_dot(x, _y(own.mean), colour))
  return parts


def _x(place: int) -> float:
  return 22 + place * (_PLOT_WIDTH - 44) / (len(_TICKS) - 1)


def _y(share: float) -> float:
  return (1 - share) * _PLOT_HEIGHT


def _text(x: float, y: float, text: str, style: str = "") -> str:
  return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{html.escape(text)}</text>'


def _label(x: float, y: float, text: str, anchor: str) -> str:
  style = f'fill="{_MUTED}" font-size="12" text-anchor="{anchor}"'
  return _text(x, y, text, style)


def _line(
  x1: float, y1: float, x2: float, y2: float, colour: str, dashes: str = "none"
) -> str:
  return (
    f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
    f'stroke="{colour}" stroke-dasharray="{dashes}"/>'
  )


def _dot(x: float, y: float, colour: str) -> str:
  return (
    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}" '
    f'stroke="{_PAPER}" stroke-width="1.5"/>'
  )
