"""The warm start in a report: its loss by step, and its outcome."""

import math
import pathlib
from typing import Any

from launch.cli import workdir
from launch.report import run_files


def read(run_dir: pathlib.Path, notes: list[str]) -> run_files.Rows:
  """Returns the steps in order; empty for a run without a warm start.

  Args:
    notes: takes a sentence about unreadable lines.
  """
  path = run_dir / workdir.WARM_START_LINES
  if not path.exists():
    return []
  kinds = {"tokens": float | int, "step_s": float | int}
  return [*run_files.numbered(path, notes, "step", **kinds).values()]


def tiles(rows: run_files.Rows) -> list[tuple[str, str, str]]:
  """Returns (label, value, note) of the outcome; empty without steps."""

  def course(key: str) -> str:
    losses = [loss for _, loss in _values(rows, key)]
    return f"{losses[0]:.3g} → {losses[-1]:.3g}" if losses else "–"

  if not rows:
    return []
  found = [("Warm start", course("loss"), f"{_unit(rows)}, {_steps(rows)}")]
  if _values(rows, "eval/loss"):
    found.append(("Held out", course("eval/loss"), _unit(rows)))
  return found


def section(rows: run_files.Rows) -> dict[str, Any] | None:
  """Returns the losses by step, and a caption; None without steps."""
  if not rows:
    return None
  tokens, seconds = (
    math.fsum(row[key] for row in rows) for key in ("tokens", "step_s")
  )
  held_out = _values(rows, "eval/loss")
  return {
    "points": _values(rows, "loss"),
    "held_out": held_out,
    "caption": (
      f"Loss in {_unit(rows)}, by step; thin: each step, bold: mean of its "
      f"neighbours{'; dots: held-out rows' if held_out else ''}. "
      f"{_steps(rows)}, {tokens:,.0f} tokens in {seconds:,.0f} s."
    ),
  }


def _values(rows: run_files.Rows, key: str) -> list[list[float]]:
  """Returns the (step, value) of the steps that have one."""
  return [
    [row["step"], row[key]]
    for row in rows
    if isinstance(row.get(key), int | float)
  ]


def _unit(rows: run_files.Rows) -> str:
  """Returns the unit of the loss: pairs have a margin."""
  return "nats a pair" if "margin" in rows[-1] else "nats a token"


def _steps(rows: run_files.Rows) -> str:
  skipped = sum(1 for row in rows if row.get("skipped"))
  words = f"{len(rows):,} steps"
  return f"{words}, {skipped:,} skipped as not finite" if skipped else words
