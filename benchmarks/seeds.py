"""Does the README's command learn? The same run for several seeds.

  python -m benchmarks.seeds [--config=configs/guess_number_moe.py]
      [--seeds=0,1,2] [--out=runs/seeds]

Launches `launch.train` once a seed, one after the other, and prints success on
held-out tasks before and after with 95 % Wilson intervals, and the minutes from
the command to its end (compiled programs come from the cache after the first).
Writes benchmarks/results/seeds_<config>.json.
"""

import json
import pathlib
import subprocess
import sys
import time

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
  rows = [_run(name, seed) for seed in _SEEDS.value]
  print(machine.describe())
  print("| seed | before | after | rounds | minutes |")
  print("|---|---|---|---|---|")
  for row in rows:
    print(
      f"| {row['seed']} | {_rate(row['before'])} | {_rate(row['after'])} | "
      f"{row['after']['round']} | {row['minutes']:.1f} |"
    )
  machine.keep(f"seeds_{name}", rows=rows)


def _run(name: str, seed: str) -> dict:
  workdir = pathlib.Path(_OUT.value) / f"{name}_{seed}"
  command = [sys.executable, "-m", "launch.train", f"--config={_CONFIG.value}"]
  command += [f"--config.seed={seed}", f"--workdir={workdir}"]
  start = time.monotonic()
  subprocess.run(command, check=True)
  minutes = (time.monotonic() - start) / 60
  lines = (workdir / "evaluations.jsonl").read_text().splitlines()
  evaluations = [json.loads(line) for line in lines]
  before, after = evaluations[0], evaluations[-1]
  return {"seed": seed, "before": before, "after": after, "minutes": minutes}


def _rate(row: dict) -> str:
  low, high = row["low"], row["high"]
  return f"{row['success']:.1%} [{low:.1%}, {high:.1%}]"


if __name__ == "__main__":
  app.run(main)
