"""Does the README's command learn? The same run for several seeds.

  python -m benchmarks.seeds [--config=configs/guess_number_moe.py]
      [--seeds=0,1,2] [--metric=success] [--out=runs/seeds]
      [--change=config.NAME=VALUE --label=NAME]

Launches `launch.train` once a seed, one after the other, and prints a metric
when it was first measured and at the end: of the evaluations, success with 95 %
Wilson intervals or reward, or of a run that has none the loss or accuracy on
held-out rows of its warm start. Also the minutes from the command to its end
(compiled programs come from the cache after the first), and those that it kept
processors busy.
Writes benchmarks/results/seeds_<config>.json; of a config with an argument, as
in --config=FILE:teacher, seeds_<config>_<argument>.json. A label is added in
the same way: without one, changed settings replace the result of the others.
"""

import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from absl import app, flags

from benchmarks import machine

_CONFIG = flags.DEFINE_string(
  "config", "configs/guess_number_moe.py", "The run."
)
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "One run each.")
_METRIC = flags.DEFINE_enum(
  "metric", "success", ["success", "reward", "loss", "accuracy"], "See above."
)
_CHANGES = flags.DEFINE_multi_string(
  "change", [], "Further flag of the run, such as config.rounds=400."
)
_LABEL = flags.DEFINE_string("label", "", "Of the changes; see above.")
_OUT = flags.DEFINE_string("out", "runs/seeds", "Directory of the runs.")


def main(_: list[str]) -> None:
  """Runs all seeds and prints the table."""
  rows = [run(_CONFIG.value, seed)[0] for seed in _SEEDS.value]
  show(rows)
  machine.keep(
    "_".join(filter(None, ("seeds", _name(_CONFIG.value), _LABEL.value))),
    metric=_METRIC.value,
    changes=_CHANGES.value,
    rows=rows,
  )


def show(rows: Sequence[dict[str, Any]]) -> None:
  """Prints a table."""
  print(machine.describe())
  print("| seed | before | after | minutes | CPU time |")
  print("|---|---|---|---|---|")
  for row in rows:
    print(
      f"| {row['seed']} | {_text(row['before'])} | {_text(row['after'])} | "
      f"{row['minutes']:.1f} | {row['cpu_minutes']:.1f} |"
    )


def run(config: str, seed: str) -> tuple[dict[str, Any], pathlib.Path]:
  """Trains once; returns its figures and its directory."""
  workdir = pathlib.Path(_OUT.value) / f"{_name(config)}_{seed}"
  command = [sys.executable, "-m", "launch.train", f"--config={config}"]
  command += [f"--config.seed={seed}", f"--workdir={workdir}"]
  command += [f"--{change}" for change in _CHANGES.value]
  start, busy = time.monotonic(), machine.children_s()
  subprocess.run(command, check=True)
  minutes = (time.monotonic() - start) / 60
  cpu_minutes = (machine.children_s() - busy) / 60
  evaluated = _evaluated(workdir)
  figures = {
    "seed": seed,
    "before": evaluated[0] if len(evaluated) > 1 else None,
    "after": evaluated[-1],
    "minutes": minutes,
    "cpu_minutes": cpu_minutes,
  }
  return figures, workdir


def _name(config: str) -> str:
  path, _, argument = config.partition(":")
  return "_".join(filter(None, (pathlib.Path(path).stem, argument)))


def _evaluated(workdir: pathlib.Path) -> list[dict[str, Any]]:
  """Returns evaluations, or measurements of a warm start on held-out rows."""
  rows = _rows(workdir / "evaluations.jsonl")
  return rows or [
    {name.removeprefix("eval/"): value for name, value in row.items()}
    for row in _rows(workdir / "warm_start.jsonl")
    if "eval/loss" in row
  ]


def _rows(path: pathlib.Path) -> list[dict[str, Any]]:
  lines = path.read_text("utf-8").splitlines() if path.exists() else []
  return [json.loads(line) for line in lines]


def _text(row: dict[str, Any] | None) -> str:
  if row is None:
    return "-"
  if _METRIC.value != "success":
    return f"{row[_METRIC.value]:.3f}"
  return f"{row['success']:.1%} [{row['low']:.1%}, {row['high']:.1%}]"


if __name__ == "__main__":
  app.run(main)
