"""The packages and their floors as one SVG, for docs/architecture.md.

A box holds the first line of the package's docstring. The floors are those of
tests/test_house.py, which checks every import against them.
"""

import ast
import pathlib
import textwrap
from collections.abc import Sequence

from launch.report import svg

ROOT = pathlib.Path(__file__).parents[1]
_WIDTH, _LEFT, _GAP, _TOP = 880, 150, 8, 104
_LINE, _PER_CHARACTER, _PADDING = 16, 6.9, 12

# The top packages from the highest down, with their colours.
_COLOURS = {
  "launch": svg.ORANGE,
  "configs": svg.CRIMSON,
  "rl": svg.BLUE,
  "models": svg.GREEN,
  "envs": svg.OLIVE,
}


def draw() -> str:
  """Returns the SVG."""
  boxes = [
    svg.text(28, 42, "Packages by floor", 'font-size="19" font-weight="600"'),
    svg.text(
      28,
      66,
      "Imports go to a lower floor, or to a lower block; of envs, rl imports "
      "only the protocols.",
      f'fill="{svg.MUTED}"',
    ),
  ]
  floors = _floors()
  y = _TOP
  for name, colour in _COLOURS.items():
    start = y
    for packages in reversed(floors.get(name, [[name]])):
      row, height = _floor(packages, y, colour)
      boxes += row
      y += height + _GAP
    boxes.append(svg.text(30, start + 22, name, f'fill="{colour}" {_BOLD}'))
    boxes.append(svg.line(_LEFT - 14, start, _LEFT - 14, y - _GAP, colour, 3))
    y += 2 * _GAP
  return svg.picture(_WIDTH, y + 4, "Packages by floor", boxes, font_size=12)


def _floors() -> dict[str, list[list[str]]]:
  """Returns FLOORS of tests/test_house.py, from the ground up."""
  source = (ROOT / "tests" / "test_house.py").read_text("utf-8")
  return next(
    ast.literal_eval(node.value)
    for node in ast.parse(source).body
    if isinstance(node, ast.Assign)
    and isinstance(node.targets[0], ast.Name)
    and node.targets[0].id == "FLOORS"
  )


_BOLD = 'font-size="15" font-weight="600"'


def _floor(
  packages: Sequence[str], y: int, colour: str
) -> tuple[list[str], int]:
  """Returns the boxes of a floor, side by side, and its height."""
  free = _WIDTH - _LEFT - 28 - _GAP * (len(packages) - 1)
  width = free // len(packages)
  characters = int((width - 2 * _PADDING) / _PER_CHARACTER)
  texts = [textwrap.wrap(_purpose(package), characters) for package in packages]
  height = 2 * _PADDING + _LINE * max(1 + len(lines) for lines in texts)
  parts = []
  for place, (package, lines) in enumerate(zip(packages, texts, strict=True)):
    x = _LEFT + place * (width + _GAP)
    parts.append(
      f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" '
      f'fill="{colour}" fill-opacity="0.09" stroke="{colour}" '
      'stroke-opacity="0.35"/>'
    )
    left, top = x + _PADDING, y + _PADDING + 11
    parts.append(svg.text(left, top, _label(package), 'font-weight="600"'))
    parts += [
      svg.text(left, top + _LINE * i, line, f'fill="{svg.MUTED}"')
      for i, line in enumerate(lines, start=1)
    ]
  return parts, height


def _path(package: str) -> pathlib.Path:
  """Returns a package's folder, or the file where it is a single module."""
  path = ROOT.joinpath(*package.split("."))
  return path if path.is_dir() else path.with_suffix(".py")


def _label(package: str) -> str:
  path = str(_path(package).relative_to(ROOT))
  return path if "/" in path else f"{path}/*.py"


def _purpose(package: str) -> str:
  """Returns the first line of a package's or a module's docstring."""
  path = _path(package)
  path = path / "__init__.py" if path.is_dir() else path
  docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
  line = docstring.partition("\n\n")[0].replace("\n", " ")
  return line.rstrip(".").replace("`", "")
