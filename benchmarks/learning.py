"""What lag costs an algorithm in reward, and what a correction wins back.

  python -m benchmarks.learning [--seeds=0,1,2,3,4] [--only=grpo/*]
  python -m benchmarks.learning --rates=5e-4,1e-3,2e-3
  python -m benchmarks.learning --render

Six algorithms on five schedules, each with two or three answers to the lag, as
docs/learning.md says, which this writes. What has run is a line in --lines,
so that the same command goes on after a kill, or on another day; lines of other
settings belong elsewhere. --rates adds the runs that the learning rates were
chosen by. At the end all lines become benchmarks/results/learning.json, and
that becomes docs/learning.md and docs/learning.svg, with --render without
running anything.

A run takes about 45 s of a processor, and all of them about five hours.
"""

import asyncio
import concurrent.futures
import fnmatch
import itertools
import json
import multiprocessing
import pathlib
import re
from collections.abc import Iterable, Sequence

from absl import app, flags

from benchmarks import (
  learning_picture,
  learning_runs,
  learning_summary,
  machine,
)
from launch.cli import jax_setup
from rl.runtime import logical_clock

_SEEDS = flags.DEFINE_list(
  "seeds", ["0", "1", "2", "3", "4"], "One run of all each."
)
_WORKERS = flags.DEFINE_integer("workers", 2, "Processes side by side.")
_ONLY = flags.DEFINE_string(
  "only", "*", "Pattern of the runs: algorithm/schedule/arm/seed/rate."
)
_RATES = flags.DEFINE_list(
  "rates", [], "Only sync, once with each learning rate."
)
_OUT = flags.DEFINE_string(
  "lines", "benchmarks/results/learning", "Where lines go."
)
_RENDER = flags.DEFINE_bool("render", False, "Only write table and picture.")
_MOST = 15
_ROOT = pathlib.Path(__file__).parents[1]
_RESULT = _ROOT / "benchmarks" / "results" / "learning.json"


def finished(directory: pathlib.Path) -> list[learning_runs.Row]:
  """Returns all runs of a directory, by name and each once.

  A line that a kill has cut off is left out.
  """
  rows = {}
  for file in sorted(directory.glob("*.jsonl")):
    for line in file.read_text().splitlines(keepends=True):
      if line.endswith("\n"):
        row = json.loads(line)
        rows[learning_runs.case_of(row).name] = row
  return [row for _, row in sorted(rows.items())]


def blocks(
  cases: Iterable[learning_runs.Case],
) -> list[list[learning_runs.Case]]:
  """Returns what one process runs: the runs that share programs, at most 15.

  More would be too much compiled code for the memory maps of a process.
  """

  def programs(case: learning_runs.Case) -> tuple:
    return case.algorithm, case.arm, case.learning_rate

  parts = []
  for _, block in itertools.groupby(cases, programs):
    same = list(block)
    parts += [same[i : i + _MOST] for i in range(0, len(same), _MOST)]
  return parts


def work(cases: Sequence[learning_runs.Case], file: pathlib.Path) -> None:
  """Plays runs one after another and appends a line for each."""
  jax_setup.prepare(learning_runs.experiment(cases[0]).placement)

  bench = learning_runs.Bench()
  for case in cases:
    # Whose clock begins at 0, as it did for the run before.
    with asyncio.Runner(loop_factory=logical_clock.LogicalEventLoop) as runner:
      row = runner.run(bench.play(case))
    with file.open("a") as out:
      out.write(json.dumps(row) + "\n")
    print(
      f"{case.name}: {row['curve'][0]:.1%} -> {row['curve'][-1]:.1%},"
      f" {row['late']:.2f} updates late, {row['wall_s']} s",
      flush=True,
    )


def run_all(
  cases: Sequence[learning_runs.Case], directory: pathlib.Path, workers: int
) -> None:
  """Runs what is missing, in processes side by side.

  Raises:
    Exception: whatever one of them failed with; what has run stays.
  """
  directory.mkdir(parents=True, exist_ok=True)
  seal(directory)
  done = {learning_runs.case_of(row) for row in finished(directory)}
  missing = [case for case in cases if case not in done]
  print(f"{len(missing)} runs of {len(cases)} are missing", flush=True)
  # Spawned: jax has threads, which a fork would not have.
  with concurrent.futures.ProcessPoolExecutor(
    workers,
    mp_context=multiprocessing.get_context("spawn"),
    max_tasks_per_child=1,
  ) as processes:
    jobs = [
      processes.submit(work, part, directory / f"{_stem(part[0])}.jsonl")
      for part in blocks(missing)
    ]
    for job in concurrent.futures.as_completed(jobs):
      job.result()


def _stem(case: learning_runs.Case) -> str:
  """Returns a name for the file of a block, which no other process writes."""
  return re.sub(r"\W+", "-", case.name)


def seal(directory: pathlib.Path) -> None:
  """Cuts off half a line that a kill has left, so that others may follow."""
  for file in directory.glob("*.jsonl"):
    text = file.read_text()
    file.write_text(text[: text.rfind("\n") + 1])


def keep(rows: Sequence[learning_runs.Row], file: pathlib.Path) -> None:
  """Writes all runs and the machine, a line each."""
  lines = ",\n".join(json.dumps(row) for row in rows)
  described = json.dumps(machine.describe())
  file.write_text(f'{{"machine": {described}, "rows": [\n{lines}\n]}}\n')


def render() -> None:
  """Writes table and picture from the kept result."""
  result = json.loads(_RESULT.read_text())
  table = learning_summary.Table(result["rows"])
  docs = _ROOT / "docs"
  (docs / "learning.md").write_text(
    learning_summary.page(table, result["machine"])
  )
  (docs / "learning.svg").write_text(learning_picture.draw(table))


def main(_: list[str]) -> None:
  """Runs what is missing and renders."""
  if not _RENDER.value:
    seeds, rates = [*map(int, _SEEDS.value)], [*map(float, _RATES.value)]
    cases = learning_runs.grid(seeds)
    if rates:
      cases = learning_runs.tuning(seeds, rates)
    chosen = [c for c in cases if fnmatch.fnmatch(c.name, _ONLY.value)]
    directory = pathlib.Path(_OUT.value)
    run_all(chosen, directory, _WORKERS.value)
    keep(finished(directory), _RESULT)
  render()


if __name__ == "__main__":
  app.run(main)
