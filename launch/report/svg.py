"""Parts of SVG pictures, in the colours of the pages.

The attributes of a picture hold its light colours, and a style on top of it
turns each into its dark one where the browser, or the page around it, is dark.
A card behind it keeps it readable where these two disagree.
"""

import html
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence

from launch.report import frozen

_COLOUR = re.compile(r"--([\w-]+): (#[0-9a-f]{6});")
_found = _COLOUR.findall((frozen.STATIC / "style.css").read_text("utf-8"))
# A name stands there twice: with its light colour, then with its dark one.
_LIGHT = dict(reversed(_found))
_DARK = {_LIGHT[name]: colour for name, colour in dict(_found).items()}

Place = tuple[float, float]
"""In pixels, from the left and from the top."""

PAPER, INK, MUTED, GRID, WELL = (
  _LIGHT[name] for name in ("card", "ink", "muted", "rule", "well")
)
BLUE, GREEN, ORANGE, CRIMSON, OLIVE = (_LIGHT[f"series-{i}"] for i in range(5))


def picture(
  width: int,
  height: int,
  label: str,
  parts: Sequence[str],
  font_size: int = 13,
) -> str:
  """Returns a whole SVG of parts on a card."""
  whole = [
    f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" '
    f'height="{height}" viewBox="0 0 {width} {height}" role="img" '
    f'aria-label="{html.escape(label)}" fill="{INK}" font-size="{font_size}" '
    'font-family="system-ui, -apple-system, Segoe UI, Helvetica, sans-serif">',
    f'<rect x="1" y="1" width="{width - 2}" height="{height - 2}" rx="14" '
    f'fill="{PAPER}" stroke="{GRID}"/>',
    *parts,
    "</svg>",
  ]
  whole.insert(1, _style("".join(whole)))
  return "\n".join(whole) + "\n"


def _style(text: str) -> str:
  """Returns the dark colours of all attributes in the text of a picture."""
  rules = [
    f"  [{attribute}] {{ {kind}: {dark}; }}"
    for light, dark in _DARK.items()
    for kind in ("fill", "stroke")
    if (attribute := f'{kind}="{light}"') in text
  ]
  query = "@media (prefers-color-scheme: dark)"
  return "\n".join(["<style>", f"{query} {{", *rules, "}", "</style>"])


def smooth(values: Sequence[float]) -> list[float]:
  """Returns the mean of each value's neighbours, 1/25 of the run each way."""
  radius, count = max(1, len(values) // 25), len(values)
  sums = list(itertools.accumulate(values, initial=0.0))
  ends = (
    (max(0, i - radius), min(count, i + radius + 1)) for i in range(count)
  )
  return [(sums[end] - sums[start]) / (end - start) for start, end in ends]


def ticks(low: float, high: float, least: float = 1e-10) -> list[float]:
  """Returns up to eight round numbers from `low` to `high`.

  Args:
    least: distance of two of them.
  """
  rough = max((high - low) / 7, least)
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


def text(x: float, y: float, words: str, style: str = "") -> str:
  """Returns a text that begins at a place."""
  return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{html.escape(words)}</text>'


def label(x: float, y: float, words: str, anchor: str = "middle") -> str:
  """Returns a small grey text, anchored at a place."""
  style = f'fill="{MUTED}" font-size="12" text-anchor="{anchor}"'
  return text(x, y, words, style)


def curve(points: Sequence[Place], colour: str, style: str) -> str:
  """Returns a line through places."""
  text = " ".join(f"{x:.1f},{y:.1f}" for x, y in _seen(points))
  return (
    f'<polyline points="{text}" fill="none" stroke-linejoin="round" '
    f'stroke="{colour}" {style}/>'
  )


def _seen(points: Sequence[Place]) -> Iterator[Place]:
  """Yields the places that show: in each pixel the ends and the extremes."""
  numbered = enumerate(points)
  for _, column in itertools.groupby(numbered, lambda one: int(one[1][0])):
    places = list(column)
    low = min(places, key=lambda one: one[1][1])
    high = max(places, key=lambda one: one[1][1])
    for _, place in sorted({places[0], low, high, places[-1]}):
      yield place


def line(
  x1: float,
  y1: float,
  x2: float,
  y2: float,
  colour: str,
  width: float = 1,
  style: str = "",
) -> str:
  """Returns a line between two places."""
  return (
    f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
    f'stroke="{colour}" stroke-width="{width}" {style}/>'
  )


def dot(x: float, y: float, colour: str, radius: float = 4.5) -> str:
  """Returns a dot with a rim in the colour of the card."""
  return (
    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}" '
    f'stroke="{PAPER}" stroke-width="1.5"/>'
  )


def box(x: float, y: float, width: float, colour: str) -> str:
  """Returns a box, 26 high."""
  return (
    f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.2f}" height="26" '
    f'fill="{colour}"/>'
  )
