"""Does the README's command learn? The same run for several seeds.

  python -m benchmarks.seeds [--config=configs/guess_number_moe.py]
      [--seeds=0,1,2] [--out=runs/seeds]

Launches `launch.train` once a seed, one after the other, and prints success on
held-out tasks before and after with 95 % Wilson intervals, the minutes from the
command to its end (compiled programs come from the cache after the first), and
those that it kept processors busy.
Writes benchmarks/results/seeds_<config>.json.
"""

import json
import pathlib
import resource
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
_OUT = flags.DEFINE_string("out", "runs/seeds", "Directory of the runs.")


def main(argv: list[str]) -> None:
  """Runs all seeds and prints the table."""
  del argv
  name = pathlib.Path(_CONFIG.value).stem
  rows = [run(_CONFIG.value, seed)[0] for seed in _SEEDS.value]
  show(rows)
  machine.keep(f"seeds_{name}", rows=rows)


def show(rows: Sequence[dict[str, Any]]) -> None:
  """Prints a table."""
  print(machine.describe())
  print("| seed | before | after | rounds | minutes |")
  print("|---|---|---|---|---|")
  for row in rows:
    print(
      f"| {row['seed']} | {_rate(row['before'])} | {_rate(row['after'])} | "
      f"{row['after']['round']} | {row['minutes']:.1f} |"
    )


def run(config: str, seed: str) -> tuple[dict[str, Any], pathlib.Path]:
  """Trains once; returns its figures and its directory."""
  name = pathlib.Path(config).stem
  workdir = pathlib.Path(_OUT.value) / f"{name}_{seed}"
  command = [sys.executable, "-m", "launch.train", f"--config={config}"]
  command += [f"--config.seed={seed}", f"--workdir={workdir}"]
  start, busy = time.monotonic(), _children_s()
  subprocess.run(command, check=True)
  minutes = (time.monotonic() - start) / 60
  cpu_minutes = (_children_s() - busy) / 60
  lines = (workdir / "evaluations.jsonl").read_text().splitlines()
  evaluations = [json.loads(line) for line in lines]
  figures = {
    "seed": seed,
    "before": evaluations[0],
    "after": evaluations[-1],
    "minutes": minutes,
    "cpu_minutes": cpu_minutes,
  }
  return figures, workdir


def _children_s() -> float:
  """Returns the processor time of all children that have ended."""
  used = resource.getrusage(resource.RUSAGE_CHILDREN)
  return used.ru_utime + used.ru_stime


def _rate(row: dict) -> str:
  low, high = row["low"], row["high"]
  return f"{row['success']:.1%} [{low:.1%}, {high:.1%}]"


if __name__ == "__main__":
  app.run(main)
