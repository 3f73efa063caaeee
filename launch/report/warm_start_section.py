"""The warm start in a report: its loss by step, and its outcome."""

import math
import pathlib

from launch.cli import workdir
from launch.report import learning_curve, run_files, svg

_WIDTH, _HEIGHT = 1040, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, _WIDTH - 12, 12, _HEIGHT - 34


def read(run_dir: pathlib.Path, notes: list[str]) -> run_files.Rows:
  """Returns the steps in order; empty for a run without a warm start.

  Args:
    notes: takes a sentence about unreadable lines.
  """
  path = run_dir / workdir.WARM_START_LINES
  if not path.exists():
    return []
  kinds = {"step": int, "tokens": float | int, "step_s": float | int}
  steps = {row["step"]: row for row in run_files.lines(path, notes, **kinds)}
  return [steps[step] for step in sorted(steps)]


def tiles(rows: run_files.Rows) -> list[tuple[str, str, str]]:
  """Returns (label, value, note) of the outcome; empty without steps."""
  losses = [row["loss"] for row in rows if row.get("loss") is not None]
  if not rows:
    return []
  value = f"{losses[0]:.3g} → {losses[-1]:.3g}" if losses else "–"
  return [("Warm start", value, f"nats a token, {_steps(rows)}")]


def section(rows: run_files.Rows) -> str:
  """Returns the section of the page, as HTML; "" without steps."""
  if not rows:
    return ""
  known = [row for row in rows if row.get("loss") is not None]
  tokens, seconds = (
    math.fsum(row[key] for row in rows) for key in ("tokens", "step_s")
  )
  caption = (
    f"Loss in nats a token, by step; thin: each step, bold: mean of its "
    f"neighbours. {_steps(rows)}, {tokens:,.0f} tokens in {seconds:,.0f} s."
  )
  return (
    '<section id="warm-start"><div class="bar"><h2>Warm start</h2></div>'
    f"<figure>{_curve(known) if known else ''}"
    f"<figcaption>{caption}</figcaption></figure></section>"
  )


def _steps(rows: run_files.Rows) -> str:
  skipped = sum(1 for row in rows if row.get("skipped"))
  words = f"{len(rows):,} steps"
  return f"{words}, {skipped:,} skipped as not finite" if skipped else words


def _curve(rows: run_files.Rows) -> str:
  """Returns an SVG in the colours of the page."""
  steps = [row["step"] for row in rows]
  losses = [row["loss"] for row in rows]
  low, high = min(0.0, *losses), max(losses)
  x = svg.scale(steps[0], steps[-1], _LEFT, _RIGHT)
  y = svg.scale(low, high, _BOTTOM, _TOP)
  parts = [
    f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
    'aria-label="Loss of the warm start by step">'
  ]
  for tick in svg.ticks(low, high):
    parts.append(
      f'<line x1="{_LEFT}" x2="{_RIGHT}" y1="{y(tick):.1f}" '
      f'y2="{y(tick):.1f}" stroke="var(--rule)"/>'
      f'<text x="{_LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">'
      f"{tick:g}</text>"
    )
  for tick in svg.ticks(steps[0], steps[-1]):
    parts.append(
      f'<text x="{x(tick):.1f}" y="{_HEIGHT - 12}" text-anchor="middle">'
      f"{tick:,g}</text>"
    )
  at = [x(step) for step in steps]
  parts += learning_curve.trend(at, losses, y, "var(--learner)")
  return "".join((*parts, "</svg>"))
