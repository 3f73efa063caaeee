"""The packages and their floors as one SVG, for docs/architecture.md.

A box holds the first line of the package's docstring. The floors are those of
tests/test_house.py, which checks every import against them. The picture brings
its own light card, for dark pages.
"""

import ast
import html
import pathlib
import textwrap
from collections.abc import Iterator, Sequence

ROOT = pathlib.Path(__file__).parents[1]
_WIDTH, _LEFT, _GAP, _TOP = 880, 150, 8, 104
_PAPER, _INK, _MUTED, _GRID = "#fdfcf9", "#1f2430", "#626b7a", "#e8e4db"
_FONT = "system-ui, -apple-system, Segoe UI, Helvetica, sans-serif"
_LINE, _PER_CHARACTER, _PADDING = 16, 6.9, 12

# The top packages from the highest down, with their colours.
_COLOURS = {
  "launch": "#b85c00",
  "configs": "#a03058",
  "rl": "#4457c9",
  "models": "#15857a",
  "envs": "#8a6d1f",
}


def draw() -> str:
  """Returns the SVG."""
  boxes: list[str] = []
  floors = _floors()
  y = _TOP
  for name, colour in _COLOURS.items():
    start = y
    for packages in reversed(floors.get(name, [[name]])):
      row, height = _floor(packages, y, colour)
      boxes += row
      y += height + _GAP
    boxes.append(_text(30, start + 22, name, f'fill="{colour}" {_BOLD}'))
    boxes.append(
      f'<line x1="{_LEFT - 14}" y1="{start}" x2="{_LEFT - 14}" '
      f'y2="{y - _GAP}" stroke="{colour}" stroke-width="3"/>'
    )
    y += 2 * _GAP
  return "\n".join([*_frame(y + 4), *boxes, "</svg>"]) + "\n"


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


def _frame(height: int) -> Iterator[str]:
  yield (
    f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" '
    f'height="{height}" viewBox="0 0 {_WIDTH} {height}" role="img" '
    f'aria-label="Packages by floor" fill="{_INK}" font-size="12" '
    f'font-family="{_FONT}">'
  )
  yield (
    f'<rect x="1" y="1" width="{_WIDTH - 2}" height="{height - 2}" rx="14" '
    f'fill="{_PAPER}" stroke="{_GRID}"/>'
  )
  yield _text(28, 42, "Packages by floor", 'font-size="19" font-weight="600"')
  yield _text(
    28,
    66,
    "An import leads to a lower floor, or to a lower block; of envs, rl "
    "sees the protocols alone.",
    f'fill="{_MUTED}"',
  )


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
    parts.append(_text(left, top, _label(package), 'font-weight="600"'))
    parts += [
      _text(left, top + _LINE * i, line, f'fill="{_MUTED}"')
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


def _text(x: float, y: float, text: str, style: str) -> str:
  return f'<text x="{x}" y="{y}" {style}>{html.escape(text)}</text>'
