"""The README's table: schedules at equal trained groups, side by side.

  python -m benchmarks.readme [--rounds=60] [--repeats=3]

(a) the task as it is; (b) every environment step takes a log-normal time,
median 30 ms, sigma 1. Each schedule starts from the same parameters, plays the
same tasks and trains the same number of groups; repeats take the schedules in
turn, and a row shows the medians. Speed-up is against `sync` of the same
repeat. Prints a table and writes benchmarks/results/readme.json.
"""

import asyncio
import dataclasses
import statistics
import time

import jax
from absl import app
from absl import flags as absl_flags

from benchmarks import machine
from envs import delayed
from launch import devices, flags
from rl import (
  assemble,
  batch,
  config,
  events,
  invariants,
  learner,
  overlap,
  progress,
  trace,
  trajectory,
)

_ROUNDS = absl_flags.DEFINE_integer("rounds", 60, "Rounds of each run.")
_REPEATS = absl_flags.DEFINE_integer("repeats", 3, "Runs of each schedule.")
_GROUPS = 16

SCHEDULES = {
  "sync": overlap.sync(_GROUPS, 1, 8),
  "round pipelined": overlap.strict_pipeline(_GROUPS, 4),
  "in flight, eta=1": overlap.in_flight(_GROUPS, 1, 8),
}


class _Quiet:
  """An observer that only keeps the metrics."""

  def __init__(self):
    self.rounds = []

  async def on_round(self, metrics, groups, values):
    self.rounds.append(metrics)

  async def on_published(self, version):
    pass

  async def on_boundary(self, progress):
    pass


async def measure(experiment: config.Experiment) -> dict[str, float]:
  """Returns seconds, busy seconds, lag and success of one run."""
  parts = assemble.build(experiment)
  try:
    state = await assemble.initial_state(parts)
    await parts.start(state, trajectory.PolicyVersion(0))
    await _compile_learner(parts, state)
    quiet = _Quiet()
    first = len(parts.spans.spans)
    start = time.monotonic()
    await assemble.coordinate(parts, quiet).run(
      progress.beginning(state, parts.tasks.cursor)
    )
    wall_s = time.monotonic() - start
  finally:
    await parts.close()
  broken = invariants.violations(
    parts.log.events, experiment.overlap, experiment.rollout.group_size
  )
  if broken:
    raise RuntimeError(f"invariants broke: {broken[:3]}")
  both = trace.overlap(parts.spans.spans[first:])
  last = quiet.rounds[-10:]
  return {
    "wall_s": wall_s,
    "learner_s": both.first_s,
    "decode_s": both.second_s,
    "both_s": both.both_s,
    "max_lag": max(events.staleness(parts.log.events)),
    "groups": sum(m["groups"] for m in quiet.rounds),
    "success": statistics.fmean(m["success"] for m in last),
  }


async def _compile_learner(
  parts: assemble.Parts, state: learner.TrainState
) -> None:
  """Compiles the training programs without training anything."""
  shape = parts.experiment.batch
  packed = batch.empty(
    shape.rows, shape.length, share_prompts=shape.share_prompts
  )

  def compile_all():
    programs = parts.programs
    copy = programs.wrap(state.params)
    total = programs.accumulate(
      copy.params, programs.zero(), programs.place(packed)
    )
    programs.update(copy, total)
    probe = jax.tree.map(lambda x: x[:8], packed)
    return programs.score(state.params, programs.place(probe))

  await parts.learner_thread.run("warm up", compile_all)


def main(argv: list[str]) -> None:
  """Runs both tables and prints them."""
  del argv
  base = flags.load(
    "configs/guess_number_moe.py", {"rounds": str(_ROUNDS.value)}
  )
  devices.prepare(base.placement)
  rows = []
  for label, environment in (
    ("(a) as it is", base.environment),
    (
      "(b) 30 ms steps",
      delayed.Delayed(source=base.environment, median_s=0.03, sigma=1.0),
    ),
  ):
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in SCHEDULES}
    for _ in range(_REPEATS.value):
      for name, schedule in SCHEDULES.items():
        experiment = dataclasses.replace(
          base, environment=environment, overlap=schedule
        )
        runs[name].append(asyncio.run(measure(experiment)))
    rows += [_row(label, name, runs) for name in SCHEDULES]
  print(machine.describe())
  print(f"{_ROUNDS.value} rounds of {_GROUPS} groups, {_REPEATS.value} repeats")
  _print(rows)
  machine.keep("readme", rows=rows)


def _row(label: str, name: str, runs: dict) -> dict:
  median = {
    key: statistics.median(run[key] for run in runs[name])
    for key in runs[name][0]
  }
  speed_ups = [
    sync["wall_s"] / run["wall_s"]
    for sync, run in zip(runs["sync"], runs[name], strict=True)
  ]
  return {
    "task": label,
    "schedule": name,
    "speed_up": statistics.median(speed_ups),
    "speed_up_min": min(speed_ups),
    "speed_up_max": max(speed_ups),
    **median,
  }


def _print(rows: list[dict]) -> None:
  print(
    "| task | schedule | seconds | speed-up | learner busy | decode busy | "
    "both busy | max lag | success, last 10 rounds |"
  )
  print("|---|---|---|---|---|---|---|---|---|")
  for row in rows:
    print(
      f"| {row['task']} | {row['schedule']} | {row['wall_s']:.1f} | "
      f"{row['speed_up']:.2f}x ({row['speed_up_min']:.2f}-"
      f"{row['speed_up_max']:.2f}) | {row['learner_s']:.1f} | "
      f"{row['decode_s']:.1f} | {row['both_s']:.1f} | {row['max_lag']:.0f} | "
      f"{row['success']:.1%} |"
    )


if __name__ == "__main__":
  app.run(main, flags_parser=flags.parse)
