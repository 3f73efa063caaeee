"""Does a model learn to call a tool? One run of the flagship for each seed.

  python -m benchmarks.tools [--seeds=0,1,2] [--out=runs/seeds]

As `benchmarks.seeds`, for configs/tool_calculator_hf.py: success on problems
that training never saw, before and after, and how the tool was called in the
first and in the last ten rounds, in the means of their episodes. Writes
benchmarks/results/tools.json, with all runs.
"""

import json
import pathlib
import statistics
from typing import Any

from absl import app, flags

from benchmarks import machine, seeds

_CONFIG = "configs/tool_calculator_hf.py"
_METRICS = ("env/tool_calls", "env/tool_errors")


def main(_: list[str]) -> None:
  """Runs all seeds, prints the table, and keeps all figures."""
  rows = []
  for seed in flags.FLAGS.seeds:
    figures, workdir = seeds.run(_CONFIG, seed)
    rows.append(figures | _calls(workdir))
    machine.keep("tools", rows=rows)
  seeds.show(rows)


def _calls(workdir: pathlib.Path) -> dict[str, Any]:
  """Returns the means of the tool's metrics, by the part of the run."""
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  rounds = [json.loads(line) for line in lines]
  return {
    part: {name: statistics.fmean(r[name] for r in some) for name in _METRICS}
    for part, some in (("first", rounds[:10]), ("last", rounds[-10:]))
  }


if __name__ == "__main__":
  app.run(main)
