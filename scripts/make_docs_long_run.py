"""The long runs as one SVG: what they hold, round by round.

A row of panels for each run. Every panel begins at 0, so a flat line is flat.
The picture brings its own light card, for dark pages.
"""

import html
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

_PANEL_WIDTH, _PANEL_HEIGHT = 206, 190
_LEFT, _TOP, _WIDTH, _ROW = 52, 84, 880, 236
_PLOT_WIDTH, _PLOT_HEIGHT = 158, 118
_PAPER, _INK, _MUTED, _GRID = "#fdfcf9", "#1f2430", "#626b7a", "#e8e4db"
_LINE, _OTHER = "#4457c9", "#b85c00"
# Title, and keys of a sample with the word for each.
_PANELS = (
  ("resident memory, MiB", {"resident_mib": ""}),
  (
    "open files, threads, tasks",
    {"descriptors": "files", "threads": "threads", "tasks": "tasks"},
  ),
  ("checkpoints, KiB", {"checkpoint_kib": ""}),
  ("event log and spans on disk, MiB", {"logs_mib": ""}),
)
_COLOURS = (_LINE, _OTHER, "#15857a")

Samples = Sequence[Mapping[str, float]]


def draw(result: Mapping[str, Any]) -> str:
  """Returns the SVG; a run without samples is left out."""
  rows = [
    (title, found["samples"])
    for name, title in (
      ("simulated", "{rounds:,} rounds, simulated"),
      ("real", "{minutes:g} minutes of training, in {slices} processes"),
    )
    if (found := result.get(name))
    for title in [title.format(**found)]
  ]
  height = len(rows) * _ROW + 24
  parts = [
    f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" '
    f'height="{height}" viewBox="0 0 {_WIDTH} {height}" role="img" '
    f'aria-label="Long runs" fill="{_INK}" font-size="12" '
    'font-family="system-ui, -apple-system, Segoe UI, Helvetica, sans-serif">',
    f'<rect x="1" y="1" width="{_WIDTH - 2}" height="{height - 2}" rx="14" '
    f'fill="{_PAPER}" stroke="{_GRID}"/>',
  ]
  for row, (title, samples) in enumerate(rows):
    y = row * _ROW
    parts.append(_text(28, y + 38, title, 'font-size="17" font-weight="600"'))
    for column, (name, keys) in enumerate(_PANELS):
      x = _LEFT + column * _PANEL_WIDTH
      parts += [
        f'<g transform="translate({x} {y + _TOP})">',
        *_panel(name, keys, samples),
        "</g>",
      ]
  return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(title: str, keys: Mapping[str, str], samples: Samples) -> list[str]:
  """Returns axes and a line for each key that the samples have."""
  known = {key: word for key, word in keys.items() if key in samples[0]}
  most = max(sample[key] for sample in samples for key in known) or 1.0
  last = samples[-1]["round"]
  parts = [_text(0, -14, title, f'fill="{_MUTED}"')]
  for share in (0.0, 0.5, 1.0):
    y = _PLOT_HEIGHT * (1 - share)
    parts += [
      f'<path d="M0 {y:g}H{_PLOT_WIDTH}" stroke="{_GRID}"/>',
      _text(-6, y + 4, _number(most * share), 'text-anchor="end"'),
    ]
  parts.append(_text(0, _PLOT_HEIGHT + 18, "0", f'fill="{_MUTED}"'))
  end = f'fill="{_MUTED}" text-anchor="end"'
  label = f"round {last:,.0f}"
  parts.append(_text(_PLOT_WIDTH, _PLOT_HEIGHT + 18, label, end))
  for colour, (key, word) in zip(_COLOURS, known.items(), strict=False):
    points = [
      (
        _PLOT_WIDTH * sample["round"] / last,
        _PLOT_HEIGHT * (1 - sample[key] / most),
        sample.get("slice", 0),
      )
      for sample in samples
    ]
    # A process of its own begins a line of its own.
    for _, line in itertools.groupby(points, key=lambda point: point[2]):
      path = "L".join(f"{x:.1f} {y:.1f}" for x, y, _ in line)
      parts.append(f'<path d="M{path}" fill="none" stroke="{colour}"/>')
    if word:
      place = f'fill="{colour}" text-anchor="end"'
      parts.append(_text(_PLOT_WIDTH, points[-1][1] - 4, word, place))
  return parts


def _number(value: float) -> str:
  return f"{value:,.0f}" if value >= 10 else f"{value:.3g}"


def _text(x: float, y: float, words: str, more: str = "") -> str:
  return f'<text x="{x:g}" y="{y:g}" {more}>{html.escape(words)}</text>'
