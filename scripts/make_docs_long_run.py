"""The long runs as one SVG: what they hold, round by round.

A row of panels for each run. Every panel begins at 0, so a flat line is flat.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from launch.report import svg

_PANEL_WIDTH, _PANEL_HEIGHT = 206, 190
_LEFT, _TOP, _WIDTH, _ROW = 52, 84, 880, 236
_PLOT_WIDTH, _PLOT_HEIGHT = 158, 118
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
_COLOURS = (svg.BLUE, svg.ORANGE, svg.GREEN)

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
  parts = []
  for row, (title, samples) in enumerate(rows):
    y = row * _ROW
    parts.append(
      svg.text(28, y + 38, title, 'font-size="17" font-weight="600"')
    )
    for column, (name, keys) in enumerate(_PANELS):
      x = _LEFT + column * _PANEL_WIDTH
      parts += [
        f'<g transform="translate({x} {y + _TOP})">',
        *_panel(name, keys, samples),
        "</g>",
      ]
  return svg.picture(_WIDTH, height, "Long runs", parts, font_size=12)


def _panel(title: str, keys: Mapping[str, str], samples: Samples) -> list[str]:
  """Returns axes and a line for each key that the samples have."""
  known = {key: word for key, word in keys.items() if key in samples[0]}
  most = max(sample[key] for sample in samples for key in known) or 1.0
  last = samples[-1]["round"]
  parts = [svg.text(0, -14, title, f'fill="{svg.MUTED}"')]
  for share in (0.0, 0.5, 1.0):
    y = _PLOT_HEIGHT * (1 - share)
    parts += [
      f'<path d="M0 {y:g}H{_PLOT_WIDTH}" stroke="{svg.GRID}"/>',
      svg.text(-6, y + 4, _number(most * share), 'text-anchor="end"'),
    ]
  key_x = 0
  parts.append(svg.text(0, _PLOT_HEIGHT + 18, "0", f'fill="{svg.MUTED}"'))
  end = f'fill="{svg.MUTED}" text-anchor="end"'
  label = f"round {last:,.0f}"
  parts.append(svg.text(_PLOT_WIDTH, _PLOT_HEIGHT + 18, label, end))
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
      parts.append(svg.dot(key_x + 4, _PLOT_HEIGHT + 33, colour, radius=4))
      parts.append(
        svg.text(key_x + 12, _PLOT_HEIGHT + 37, word, f'fill="{svg.MUTED}"')
      )
      key_x += 24 + 7 * len(word)
  return parts


def _number(value: float) -> str:
  return f"{value:,.0f}" if value >= 10 else f"{value:.3g}"
