"""Time from the command of the README's run to its first update.

  python -m benchmarks.start [--repeats=3]

Starts `launch.train` with a compilation cache of its own: once while that is
empty, then several times more, and takes medians of these. A start ends with
the first update of the reinforcement learning, so the warm start, the engines'
programs and the evaluation before the first round are in it; the first step of
the warm start is the first to change a weight. Phases are those of
--config.log_startup and may run side by side; CPU seconds are of the process,
by the end of the first update. Programs compiled are entries that the start
added to the cache. Writes benchmarks/results/start.json.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

from absl import app, flags

from benchmarks import machine

_REPEATS = flags.DEFINE_integer("repeats", 3, "Starts with a full cache.")

_TRAIN = ("launch.train", "--config=configs/guess_number_moe.py")
_IMPORT = "import time, launch.train; print(time.process_time())"
_UPDATE = re.compile(r"first update after ([\d.]+) s, ([\d.]+) s of CPU")
_PHASE = re.compile(
  # Behind the time of day: from, to, busy, first.
  r"^[\d:]+ (\w+: [\w, ]+?) +([\d.]+) +[\d.]+ +([\d.]+) +([\d.]+)$",
  re.M,
)


def main(_: list[str]) -> None:
  """Measures a first start and further ones, prints and keeps them."""
  with tempfile.TemporaryDirectory() as name:
    directory = pathlib.Path(name)
    first, *others = [
      start(directory, number) for number in range(1 + _REPEATS.value)
    ]
  second = machine.medians(others)
  print(machine.describe())
  for name, value in second.items():
    print(f"{name:28}{first[name]:10.1f}{value:10.1f}")
  machine.keep("start", first=first, second=second)


def start(directory: pathlib.Path, number: int) -> dict[str, float]:
  """Starts a run and returns its seconds and its number of new programs.

  Args:
    directory: holds the cache, and gets the directory of the run.
    number: of the start, which names that.
  """
  imports = _output(directory, "-c", _IMPORT)
  before = _programs(directory)
  workdir = f"--workdir={directory / str(number)}"
  flags_ = ("--config.rounds=1", "--config.log_startup=true")
  text = _output(directory, "-m", *_TRAIN, *flags_, workdir)
  found, phases = _UPDATE.search(text), _PHASE.findall(text)
  if found is None or not phases:
    raise RuntimeError(f"no update, or no phases, in:\n{text}")
  wall_s, cpu_s = map(float, found.groups())
  return {
    "import, CPU": float(imports),
    **{name: float(busy_s) for name, _, busy_s, _ in phases},
    "first step of the warm start": next(
      float(from_s) + float(first_s)
      for name, from_s, _, first_s in phases
      if name == "learner: warm start"
    ),
    "first update": wall_s,
    "first update, CPU": cpu_s,
    "programs compiled": _programs(directory) - before,
  }


def _output(directory: pathlib.Path, *args: str) -> str:
  """Returns what Python prints, with the cache below a directory."""
  return subprocess.run(
    [sys.executable, *args],
    env=os.environ | {"XDG_CACHE_HOME": str(directory / "cache")},
    stdout=subprocess.PIPE,
    text=True,
    check=True,
  ).stdout


def _programs(directory: pathlib.Path) -> int:
  return len(list((directory / "cache").rglob("*-cache")))


if __name__ == "__main__":
  app.run(main)
