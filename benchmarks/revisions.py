"""CPU time of the config of `make train`, now and at an earlier revision.

  python -m benchmarks.revisions [--before=bbec7a2] [--rounds=200] [--repeats=1]

Both train from the start, in turn and with this Python: the checkout as it is,
and the revision in a worktree of its own. A round before that fills a
compilation cache for each. CPU seconds are of the process and its children,
from command to exit; success is that of the last quarter of rounds. Writes
benchmarks/results/revisions.json.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

from absl import app, flags

from benchmarks import machine

_BEFORE = flags.DEFINE_string("before", "bbec7a2", "Revision to compare with.")
_ROUNDS = flags.DEFINE_integer("rounds", 200, "Rounds of each run.")
_REPEATS = flags.DEFINE_integer("repeats", 1, "Runs of each side.")

_CONFIG = "configs/guess_number_moe.py"
_ROOT = pathlib.Path(__file__).parents[1]


def main(argv: list[str]) -> None:
  """Trains both, and prints and keeps what they took."""
  del argv
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    before = folder / "before"
    _git("worktree", "add", "--detach", str(before), _BEFORE.value)
    try:
      sides = {"before": before, "now": _ROOT}
      runs = {side: [] for side in sides}
      for side, checkout in sides.items():
        train(checkout, folder / side, 1)
      for _ in range(_REPEATS.value):
        for side, checkout in sides.items():
          runs[side].append(train(checkout, folder / side, _ROUNDS.value))
    finally:
      _git("worktree", "remove", "--force", str(before))
  medians = {
    side: {
      name: statistics.median(run[name] for run in found) for name in found[0]
    }
    for side, found in runs.items()
  }
  ratio = medians["now"]["cpu_s"] / medians["before"]["cpu_s"]
  for side, found in medians.items():
    print(f"{side:8}{found['cpu_s']:8.1f} s of CPU, {found['success']:.1%}")
  print(f"ratio {ratio:.2f}")
  machine.keep(
    "revisions",
    before=_BEFORE.value,
    now=_git("rev-parse", "--short", "HEAD"),
    rounds=_ROUNDS.value,
    ratio=ratio,
    medians=medians,
  )


def train(
  checkout: pathlib.Path, folder: pathlib.Path, rounds: int
) -> dict[str, float]:
  """Trains from the start; returns its CPU seconds and success."""
  environment = os.environ | {
    "XDG_CACHE_HOME": str(folder / "cache"),
    "PYTHONPATH": str(checkout),
  }
  with tempfile.TemporaryDirectory() as run_dir:
    busy_s = machine.children_s()
    subprocess.run(
      [
        *(sys.executable, "-m", "launch.train", f"--config={_CONFIG}"),
        *(f"--config.rounds={rounds}", f"--workdir={run_dir}"),
      ],
      cwd=checkout,
      env=environment,
      stdin=subprocess.DEVNULL,
      stdout=subprocess.DEVNULL,
      check=True,
    )
    cpu_s = machine.children_s() - busy_s
    lines = (pathlib.Path(run_dir) / "metrics.jsonl").read_text().splitlines()
  rows = map(json.loads, lines)
  successes = [row["success"] for row in rows][3 * rounds // 4 :]
  return {
    "cpu_s": cpu_s,
    "success": statistics.fmean(successes),
  }


def _git(*words: str) -> str:
  return subprocess.run(
    ["git", *words], cwd=_ROOT, check=True, capture_output=True, text=True
  ).stdout.strip()


if __name__ == "__main__":
  app.run(main)
