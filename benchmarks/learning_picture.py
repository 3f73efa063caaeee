"""The learning benchmark as one SVG: success by schedule, a panel each.

A dot is the mean over the seeds, the bar behind it goes from the least to the
most of them.
"""

from collections.abc import Sequence

from benchmarks import learning_summary
from launch.report import svg

_COLUMNS, _PANEL_WIDTH, _PANEL_HEIGHT = 3, 284, 236
_LEFT, _TOP, _WIDTH = 52, 122, 880
_PLOT_WIDTH, _PLOT_HEIGHT = 228, 164
_COLOURS = {
  "uncorrected": svg.ORANGE,
  "ratio": svg.BLUE,
  "truncated": svg.GREEN,
}
_WORDS = {
  "uncorrected": "uncorrected",
  "ratio": "ratio against the sampler",
  "truncated": "truncated weights, cap 2",
}
_TICKS = ("sync", "pipe", "η 1", "η 2", "η 4")
_DASHED = 'stroke-dasharray="4 3"'
_BAR = 'opacity="0.3" stroke-linecap="round"'
_APART = 5
"""Pixels between the arms of a schedule, so that no bar hides another."""


def draw(table: learning_summary.Table) -> str:
  """Returns the SVG; what has not run is left out."""
  names = learning_summary.NAMES
  lines = -(-len(names) // _COLUMNS)
  height = _TOP + lines * _PANEL_HEIGHT - 8
  parts = _legend()
  for number, algorithm in enumerate(names):
    x = _LEFT + number % _COLUMNS * _PANEL_WIDTH
    y = _TOP + number // _COLUMNS * _PANEL_HEIGHT
    parts += [
      f'<g transform="translate({x} {y})">',
      *_panel(table, algorithm),
      "</g>",
    ]
  return svg.picture(_WIDTH, height, "Success by schedule", parts)


def _legend() -> list[str]:
  title = "Held-out games won after equally many samples"
  parts = [svg.text(28, 42, title, 'font-size="19" font-weight="600"')]
  x = 28
  for arm, words in _WORDS.items():
    parts.append(svg.dot(x + 5, 66, _COLOURS[arm]))
    parts.append(svg.label(x + 16, 70, words, "start"))
    x += 60 + 7 * len(words)
  parts.append(svg.line(x, 66, x + 22, 66, svg.MUTED, style=_DASHED))
  parts.append(svg.label(x + 30, 70, "before training", "start"))
  return parts


def _panel(table: learning_summary.Table, algorithm: str) -> list[str]:
  name = learning_summary.NAMES[algorithm]
  parts = [svg.text(0, -12, name, 'font-weight="600"')]
  for share in (0, 0.25, 0.5, 0.75, 1):
    parts.append(svg.line(0, _y(share), _PLOT_WIDTH, _y(share), svg.GRID))
    parts.append(svg.label(-8, _y(share) + 4, f"{share:.0%}", "end"))
  for place, tick in enumerate(_TICKS):
    parts.append(svg.label(_x(place), _PLOT_HEIGHT + 18, tick, "middle"))
  if before := table.before():
    y = _y(before.mean)
    parts.append(svg.line(0, y, _PLOT_WIDTH, y, svg.MUTED, style=_DASHED))
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
  line = [(x, _y(own.mean)) for x, own in known]
  parts = [svg.curve(line, colour, 'stroke-width="2"')]
  for x, own in known:
    ends = _y(own.low), _y(own.high)
    parts.append(svg.line(x, ends[0], x, ends[1], colour, 5, _BAR))
    parts.append(svg.dot(x, _y(own.mean), colour))
  return parts


def _x(place: int) -> float:
  return 22 + place * (_PLOT_WIDTH - 44) / (len(_TICKS) - 1)


def _y(share: float) -> float:
  return (1 - share) * _PLOT_HEIGHT
