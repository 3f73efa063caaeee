"""The cost of a run that repeats bit for bit, in seconds of a round.

  python -m benchmarks.repeatable [--rounds=24] [--repeats=3]

Guess-a-number in flight with a bound of 2 as `launch.train` runs it, in a
process of its own: with `repeatable` and without, with a checkpoint of every
round and with one at the end. A repeatable run has another order of events,
that of its logical clock, and waits where the machine is not as fast as that.
Before each checkpoint it holds what is in flight, and then encodes it again.
Repeats take the settings in turn, every other one backwards. A row shows the
median over the rounds of all repeats, without the first quarter of each, in
which programs are compiled.

Writes benchmarks/results/repeatable.json.
"""

import itertools
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from absl import app
from absl import flags as absl_flags

from benchmarks import machine
from launch.cli import flags
from launch.report import run_files

_ROUNDS = absl_flags.DEFINE_integer("rounds", 24, "Rounds of each run.")
_REPEATS = absl_flags.DEFINE_integer("repeats", 3, "Runs of each setting.")
_CONFIG = "configs/guess_number_moe.py"
_SETTINGS = {
  "warm_start": "none",
  "evaluation.episodes": "0",
  "overlap.max_staleness": "2",
  "retention.checkpoints": "1",
}
CASES = tuple(itertools.product((False, True), (False, True)))
"""Whether a run repeats, and whether it saves every round."""


def rounds_s(repeatable: bool, saves: bool) -> list[float]:
  """Returns the seconds of the rounds of one run that count.

  Raises:
    CalledProcessError: the run failed.
  """
  rounds = _ROUNDS.value
  changes = _SETTINGS | {
    "rounds": str(rounds),
    "repeatable": str(repeatable).lower(),
    "retention.checkpoint_every": "1" if saves else str(rounds),
  }
  with tempfile.TemporaryDirectory() as root:
    workdir = pathlib.Path(root) / "run"
    run = [f"--config={_CONFIG}", f"--workdir={workdir}"]
    subprocess.run(
      [sys.executable, "-m", "launch.train", *run, *flags.arguments(changes)],
      check=True,
      stdout=subprocess.DEVNULL,
    )
    metrics = run_files.lines(workdir / "metrics.jsonl", [])
    ends = [row["time_s"] for row in metrics]
  return [b - a for a, b in itertools.pairwise(ends[rounds // 4 :])]


def rows() -> Iterator[dict[str, float | bool]]:
  """Yields a row for each setting."""
  found: dict[tuple[bool, bool], list[float]] = {case: [] for case in CASES}
  for number in range(_REPEATS.value):
    for case in CASES[:: -1 if number % 2 else 1]:
      found[case] += (measured := rounds_s(*case))
      print(case, statistics.median(measured), flush=True)
  for (repeatable, saves), seconds in found.items():
    yield {
      "repeatable": repeatable,
      "saves": saves,
      "round_s": statistics.median(seconds),
    }


def main(_: list[str]) -> None:
  """Measures, prints and keeps."""
  measured = list(rows())
  machine.show("rounds", measured)
  machine.keep(
    "repeatable",
    rounds=_ROUNDS.value,
    repeats=_REPEATS.value,
    rows=measured,
  )


if __name__ == "__main__":
  app.run(main)
