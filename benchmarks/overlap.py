"""Every schedule on one task, as measured here and as simulated.

  python -m benchmarks.overlap [--rounds=11] [--repeats=3]
      [--tasks=as_is,slow,accelerator] [--dispatch_s=0.03] [--row_s=0.02]

Each schedule of configs/guess_number_schedules.py runs from the same weights,
with the same seed, tasks and number of trained groups, on the same engine and
learner: the task as it is; with environment steps of a log-normal time, median
30 ms, sigma 1; and on the stand-in of two accelerators. There a dispatch of
decoding and a row of training take as long as is declared, whatever part of
that the cores compute: programs are followed by a sleep up to that time. The
meshes of one machine share its cores, but not a sleep.

Repeats take the schedules in turn, every other one backwards, and a row shows
medians. Rounds in which the bound lets decoding run ahead, at the start, or in
which nothing follows, at the end, do not count. In flight a long and a short
round often take turns: with an odd number of rounds, an even number counts.

The simulation is calibrated from a run of `sync` and one of `in_flight` of each
repeat, for each task, see calibration.py: their rows are called fitted, and all
other schedules are predictions. It has as many rounds, and the same ones count.
A prediction is compared with the run of its own repeat, because the machine is
not as fast in the next one; the ratio is the median of these. Prints both, the
step T* of a perfect schedule (rl/simulation/result.py), and what is more than
10 % off; writes benchmarks/results/overlap.json.
"""

import asyncio
import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from absl import app
from absl import flags as absl_flags

from benchmarks import calibration, declared_devices, machine, one_engine
from configs import guess_number_schedules
from envs import delayed
from launch.cli import flags, jax_setup
from rl import assemble
from rl import experiment as experiment_lib
from rl.audit import event_log, token_ledger
from rl.data import trajectory
from rl.pools import router, weight_transfer
from rl.runtime import trace
from rl.schedule import overlap
from rl.simulation import result as simulation_result
from rl.simulation import simulate

_ROUNDS = absl_flags.DEFINE_integer("rounds", 11, "Rounds of each run.")
_REPEATS = absl_flags.DEFINE_integer("repeats", 3, "Runs of each schedule.")
_TASKS = absl_flags.DEFINE_list(
  "tasks", ["as_is", "slow", "accelerator"], "Which tasks."
)
_SCHEDULES = absl_flags.DEFINE_list(
  "schedules", list(guess_number_schedules.SCHEDULES), "Which schedules."
)
_DISPATCH_S = absl_flags.DEFINE_float(
  "dispatch_s", 0.03, "Declared seconds of a dispatch, of an accelerator."
)
_ROW_S = absl_flags.DEFINE_float(
  "row_s", 0.02, "Declared seconds of a row that trains, of an accelerator."
)
FITTED = ("sync", "in_flight")
_STARTS = 3
_MAX_PASSES = 3
_SETTLED = 0.02
_WARMUP = 1
_AGREE = 0.1
_Row = dict[str, float]


def _slowed(experiment: experiment_lib.Experiment) -> experiment_lib.Experiment:
  slow = delayed.Delayed(
    source=experiment.environment, median_s=0.03, sigma=1.0
  )
  return dataclasses.replace(experiment, environment=slow)


TASKS: Mapping[
  str, Callable[[experiment_lib.Experiment], experiment_lib.Experiment]
] = {
  "as_is": lambda experiment: experiment,
  "slow": _slowed,
  "accelerator": lambda experiment: experiment,
}


class _Devices:
  """The stand-in of accelerators.

  Attributes:
    are_declared: whether programs take what is declared, or end when they are
      computed.
  """

  are_declared = False

  def seconds(self, name: str, args: Sequence[Any]) -> float:
    """Returns the least seconds of a program."""
    pace = declared_devices.Pace(
      dispatch_s=_DISPATCH_S.value, row_s=_ROW_S.value
    )
    return pace.seconds(name, args) * self.are_declared


def _on_devices(parts: assemble.Parts, devices: _Devices) -> assemble.Parts:
  """Returns the parts with meshes whose programs may take a declared time."""
  experiment = parts.experiment
  (decode,) = parts.decode_threads
  declared = declared_devices.DeclaredThread(decode, devices.seconds)
  model = weight_transfer.pool_model(
    experiment.model, experiment.publishing.dtype
  )
  engines = assemble.engines(
    experiment.engine, model, parts.decode_layouts, [declared]
  )
  serving = router.Router(engines, routing=experiment.routing, log=parts.log)
  return declared_devices.with_learner(
    dataclasses.replace(parts, engines=engines, router=serving),
    devices.seconds,
  )


# What a run was worth, measured or simulated.


def outcome(
  log: Sequence[event_log.Event],
  spans: Iterable[trace.Span],
  schedule: overlap.Overlap,
  rounds: int,
) -> _Row:
  """Returns means over the rounds that count, in seconds a round."""
  eta = schedule.max_staleness
  counted = range(_WARMUP + eta, rounds - eta)
  ends = [0.0, *(e["t"] for e in event_log.of_kind(log, "published"))]
  window = ends[counted.start], ends[counted.stop]
  trained = [
    e for e in event_log.of_kind(log, "trained") if e["version"] in counted
  ]
  lags = event_log.staleness(trained)
  both = trace.overlap(_clipped(spans, window))
  ledger = token_ledger.of(log)
  each = {
    "step_s": window[1] - window[0],
    "learner_s": both.first_s,
    "decode_s": both.second_s,
    "both_s": both.both_s,
  }
  return {name: value / len(counted) for name, value in each.items()} | {
    "lag": statistics.fmean(lags),
    "max_lag": float(max(lags)),
    "useful": ledger.trained / ledger.sampled,
  }


def _clipped(
  spans: Iterable[trace.Span], window: trace.Interval
) -> list[trace.Span]:
  start, end = window
  cut = [
    dataclasses.replace(s, start=max(s.start, start), end=min(s.end, end))
    for s in spans
  ]
  return [span for span in cut if span.start < span.end]


def measured(run: one_engine.Run) -> _Row:
  """Returns what a run was worth, beside what only a real one has."""
  rounds = run.experiment.rounds
  both = trace.overlap(run.spans)
  last = run.metrics[-max(rounds // 2, 1) :]
  return outcome(run.events, run.spans, run.experiment.overlap, rounds) | {
    "wall_s": run.wall_s,
    "cpu_s": run.cpu_s,
    "learner_busy_s": both.first_s,
    "decode_busy_s": both.second_s,
    "both_busy_s": both.both_s,
    "success": statistics.fmean(row["success"] for row in last),
  }


def simulated(
  calibrated: calibration.Calibrated, schedule: overlap.Overlap
) -> _Row:
  """Returns what the simulation predicts for a schedule.

  How long the meshes work together follows from the simulation and slows it
  down, so it is repeated until that changes little. In flight long and short
  rounds follow each other, in an order that hangs on little: hence the means of
  simulations that begin with other groups.
  """
  base, recorded = calibrated.under(schedule), calibrated.recorded
  slowed, row, factors = base, _simulated(base, recorded), (1.0, 1.0, 1.0)
  for _ in range(_MAX_PASSES):
    whole, before = (row["learner_s"], row["decode_s"], row["step_s"]), factors
    shares = [row["both_s"] / seconds for seconds in whole]
    factors = calibrated.sharing.factors(*shares)
    if math.dist(before, factors) < _SETTLED:
      break
    slowed = calibration.slowed(base, *factors)
    row = _simulated(slowed, recorded)
  starts = [len(recorded) * i // _STARTS for i in range(1, _STARTS)]
  rows = [row] + [
    _simulated(slowed, [*recorded[i:], *recorded[:i]]) for i in starts
  ]
  return {key: statistics.fmean(one[key] for one in rows) for key in row}


def _simulated(
  settings: simulate.Simulation, recorded: Sequence[trajectory.Group]
) -> _Row:
  """Returns what a simulation was worth.

  Args:
    recorded: groups whose episodes it repeats.
  """
  record = calibration.replay(settings, recorded)
  spans = [*record.spans, *calibration.decode_spans(record)]
  row = outcome(record.events, spans, settings.overlap, settings.rounds)
  return row | {"ideal_s": simulation_result.measure(record).ideal_s}


# Running all of them.

_Pair = tuple[_Row, calibration.Calibrated]
"""What a run was worth, and what predicts the runs of its repeat."""
_Runs = Mapping[str, Sequence[_Pair]]


async def run_all(
  base: experiment_lib.Experiment, selector: one_engine.TimedSelector
) -> dict[str, _Runs]:
  """Returns for each task the runs by schedule.

  Args:
    selector: of the running loop.
  """
  devices = _Devices()
  parts = _on_devices(assemble.build(base), devices)
  selector.spans = parts.spans
  bench = one_engine.Bench(parts)
  runs: dict[str, _Runs] = {}
  try:
    await bench.start()
    for task in _TASKS.value:
      devices.are_declared = task == "accelerator"
      runs[task] = await _repeat(bench, TASKS[task](base))
  finally:
    await parts.close()
  return runs


async def _repeat(
  bench: one_engine.Bench, experiment: experiment_lib.Experiment
) -> _Runs:
  """Returns what every run of each schedule was worth."""
  names = dict.fromkeys([*FITTED, *_SCHEDULES.value])
  runs: dict[str, list[_Pair]] = {name: [] for name in names}
  for number in range(_REPEATS.value):
    done: dict[str, one_engine.Run] = {}
    for name in list(names)[:: -1 if number % 2 else 1]:
      schedule = guess_number_schedules.SCHEDULES[name]
      done[name] = await bench.play(
        dataclasses.replace(experiment, overlap=schedule)
      )
    calibrated = calibration.of(done["sync"], done["in_flight"])
    for name, run in done.items():
      runs[name].append((measured(run), calibrated))
  return runs


def compared(task: str, runs: _Runs) -> Iterator[dict]:
  """Yields a row for every schedule."""
  for name, every in runs.items():
    schedule = guess_number_schedules.SCHEDULES[name]
    real = [row for row, _ in every]
    said = [simulated(calibrated, schedule) for _, calibrated in every]
    steps = [row["step_s"] for row in real]
    ratios = [a["step_s"] / b for a, b in zip(said, steps, strict=True)]
    yield {
      "task": task,
      "schedule": name,
      "measured": machine.medians(real),
      "step_s_range": (min(steps), max(steps)),
      "simulated": machine.medians(said),
      "ratio": statistics.median(ratios),
      "ratio_range": (min(ratios), max(ratios)),
    }


def main(_: list[str]) -> None:
  """Measures, simulates, prints and keeps."""
  base = flags.load(
    "configs/guess_number_moe.py", {"rounds": str(_ROUNDS.value)}
  )
  jax_setup.prepare(base.placement)
  selector = one_engine.TimedSelector()
  with asyncio.Runner(
    loop_factory=lambda: asyncio.SelectorEventLoop(selector)
  ) as runner:
    runs = runner.run(run_all(base, selector))
  rows = [row for task in runs for row in compared(task, runs[task])]
  print(machine.describe())
  print(f"{_ROUNDS.value} rounds, medians of {_REPEATS.value} runs in turn")
  for side in ("measured", "simulated"):
    of_runs = [
      {"task": row["task"], "schedule": row["schedule"], "ratio": row["ratio"]}
      | row[side]
      for row in rows
    ]
    machine.show(f"{side}; ratio: simulated over measured", of_runs)
  off = {task: beyond(task, rows) for task in runs}
  for task, found in off.items():
    named = [f"{name} {ratio - 1:+.1%}" for name, ratio in found.items()]
    print(f"{task}: simulated step beyond 10 %: {', '.join(named) or 'none'}")
  machine.keep(
    "overlap",
    rounds=_ROUNDS.value,
    repeats=_REPEATS.value,
    fitted=FITTED,
    declared={"dispatch_s": _DISPATCH_S.value, "row_s": _ROW_S.value},
    rows=rows,
    beyond=off,
  )


def beyond(task: str, rows: Sequence[dict]) -> dict[str, float]:
  """Returns simulated by measured step time where they are 10 % apart."""
  return {
    row["schedule"]: row["ratio"]
    for row in rows
    if row["task"] == task and abs(row["ratio"] - 1.0) > _AGREE
  }


if __name__ == "__main__":
  app.run(main, flags_parser=flags.parse)
