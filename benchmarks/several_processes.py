"""Rounds with several processes of learner and engines: measured, simulated.

  python -m benchmarks.several_processes

Each process stands in for an accelerator (declared_devices.py): a dispatch of
an engine, a row of training and an optimizer step take as long as is declared,
and two processes of a learner do half of the rows and of the step each.

The same games of guess-a-number are played and trained with an engine in a
process and the learner in that of the run (1 x 1), with two engines (1 x 2), a
learner of two processes (2 x 1), and both (2 x 2). The first synchronous run of
1 x 1 calibrates the simulation (calibration.py), with two constants for
processes: the seconds of a call, and those of a copy of all weights. All other
rows are predictions, with no other constant.

A round is half of two neighbours, because in flight a long and a short one take
turns: the median over those that count, and over repeats. Writes
benchmarks/results/several_processes.json.
"""

import asyncio
import collections
import dataclasses
import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from absl import app

from benchmarks import (
  calibration,
  declared_devices,
  machine,
  one_engine,
)
from configs import guess_number_moe
from launch.cli import jax_setup
from models import config as model_config
from rl import assemble
from rl import experiment as experiment_lib
from rl.audit import event_log
from rl.engine.builtin import settings as engine_settings
from rl.pools import placement
from rl.runtime import trace
from rl.schedule import overlap
from rl.simulation import simulate

_ROUNDS, _REPEATS = 13, 2
_PACE = declared_devices.Pace(dispatch_s=0.1, row_s=0.16, update_s=0.2)
_MODEL = model_config.tiny(
  vocab_size=29, num_layers=1, d_model=32, d_ff=64, max_length=32
)
_WARMUP, _STARTS = 1, 3
Place = tuple[int, int]
"""Processes of the learner, and engines, each in a process of its own."""
PLACES: Sequence[Place] = ((1, 1), (1, 2), (2, 1), (2, 2))


def base(rounds: int) -> experiment_lib.Experiment:
  """Returns the run that is divided among processes.

  Half of the groups of `guess_number_moe`, and half of the rows of a dispatch:
  so the event loop has less to do in each.
  """
  config = guess_number_moe.get_config()
  assert isinstance(config.engine, engine_settings.EngineSettings)
  return dataclasses.replace(
    config,
    model=_MODEL,
    engine=dataclasses.replace(config.engine, row_buckets=(16,)),
    overlap=overlap.sync(8),
    rounds=rounds,
  )


def divided(
  whole: experiment_lib.Experiment, place: Place, pace: declared_devices.Pace
) -> experiment_lib.Experiment:
  """Returns a run with these processes, each at this pace."""
  learners, engines = place
  assert isinstance(whole.engine, engine_settings.EngineSettings)
  return dataclasses.replace(
    whole,
    engine=declared_devices.DeclaredEngine(
      **vars(whole.engine), dispatch_s=pace.dispatch_s
    ),
    placement=placement.Placement(
      learner=placement.MeshSpec(data=learners),
      learner_processes=learners,
      replicas=engines,
      decode_processes=1,
      platform="cpu",
    ),
  )


def outcome(
  log: Sequence[event_log.Event],
  spans: Sequence[trace.Span],
  settings: experiment_lib.Experiment | simulate.Simulation,
) -> dict[str, float]:
  """Returns the seconds of a round, and those of both meshes in the mean.

  The first round, which may compile, does not count; those of decoding are the
  sum of all engines.
  """
  rounds, eta = settings.rounds, settings.overlap.max_staleness
  ends = [e["t"] for e in event_log.of_kind(log, "published")]
  busy_s: dict[str, float] = collections.defaultdict(float)
  for span in spans:
    if span.start > ends[0]:
      busy_s[span.track] += span.end - span.start
  counted = ends[_WARMUP + eta - 1 : rounds - eta]
  pairs = zip(counted, counted[2:], strict=False)
  return {
    "round_s": statistics.median((b - a) / 2 for a, b in pairs),
    "learner_s": busy_s["learner"] / (rounds - 1),
    "decode_s": busy_s["decode"] / (rounds - 1),
  }


class _Played(NamedTuple):
  """Runs of one place by schedule, and the weights that they start from."""

  runs: Mapping[str, Sequence[one_engine.Run]]
  params: Any


async def _play(
  settings: experiment_lib.Experiment,
  pace: declared_devices.Pace,
  repeats: int,
  selector: one_engine.TimedSelector,
  params: Any,
) -> _Played:
  """Plays all schedules in turn, with processes that are started once."""
  parts = assemble.build(settings)
  if parts.gang is not None:
    declared_devices.pace_gang(parts.gang, pace)
  else:
    parts = declared_devices.with_learner(parts, pace.seconds)
  selector.spans = parts.spans
  bench = one_engine.Bench(parts)
  played = _schedules(settings.overlap.groups_per_round)
  runs: dict[str, list[one_engine.Run]] = {name: [] for name in played}
  try:
    await bench.start(params)
    for _, name in itertools.product(range(repeats), played):
      each = dataclasses.replace(parts.experiment, overlap=played[name])
      runs[name].append(await bench.play(each))
  finally:
    await parts.close()
  return _Played(runs, bench.params)


def _schedules(groups: int) -> Mapping[str, overlap.Overlap]:
  """Returns the schedules by their name; the first one calibrates."""
  return {
    "sync": overlap.sync(groups),
    "in flight": overlap.in_flight(groups, max_staleness=1),
  }


def predicted(
  calibrated: calibration.Calibrated, place: Place, schedule: overlap.Overlap
) -> dict[str, float]:
  """Returns the simulated `outcome`.

  In flight the order of long and short rounds hangs on little: hence medians of
  simulations that begin with other groups.
  """
  settings = calibration.divided(calibrated.under(schedule), *place)
  groups, rows = calibrated.recorded, []
  for number in range(_STARTS):
    i = len(groups) * number // _STARTS
    record = calibration.replay(settings, [*groups[i:], *groups[:i]])
    spans = [*record.spans, *calibration.decode_spans(record)]
    rows.append(outcome(record.events, spans, settings))
  return machine.medians(rows)


def _row(
  place: Place,
  name: str,
  runs: Sequence[one_engine.Run],
  calibrated: calibration.Calibrated,
) -> dict[str, Any]:
  """Returns what was measured and predicted, and the median of each span."""
  each = [outcome(run.events, run.spans, run.experiment) for run in runs]
  measured = machine.medians(each)
  simulated = predicted(calibrated, place, runs[0].experiment.overlap)
  rounds_s = [one["round_s"] for one in each]
  spans = {span.name for run in runs for span in run.spans}
  return {
    "schedule": name,
    "learners": place[0],
    "engines": place[1],
    "measured": measured,
    "range_s": (min(rounds_s), max(rounds_s)),
    "simulated": simulated,
    "ratio": simulated["round_s"] / measured["round_s"],
    "spans_s": {
      span: statistics.median(
        [s for run in runs for s in calibration.seconds(run, span)]
      )
      for span in sorted(spans - {one_engine.HOST_WAITS})
    },
  }


async def measure(
  whole: experiment_lib.Experiment,
  pace: declared_devices.Pace,
  selector: one_engine.TimedSelector,
  repeats: int = 1,
  places: Sequence[Place] = PLACES,
) -> tuple[calibration.Calibrated, list[dict[str, Any]]]:
  """Returns the calibration, and a row for each place and schedule.

  Args:
    whole: the run that is divided.
    selector: of the running loop.
    places: the first is (1, 1).
  """
  params, calibrated, rows = None, None, []
  for place in places:
    settings = divided(whole, place, pace)
    runs, params = await _play(settings, pace, repeats, selector, params)
    if calibrated is None:
      calibrated = calibration.of_processes(runs["sync"][0])
    rows += [_row(place, name, runs[name], calibrated) for name in runs]
    for row in rows[-len(runs) :]:
      print(row, flush=True)
  assert calibrated is not None
  return calibrated, rows


def main(_: list[str]) -> None:
  """Measures, simulates, prints and keeps."""
  jax_setup.prepare(placement.Placement())
  selector = one_engine.TimedSelector()
  with asyncio.Runner(
    loop_factory=lambda: asyncio.SelectorEventLoop(selector)
  ) as runner:
    calibrated, rows = runner.run(
      measure(base(_ROUNDS), _PACE, selector, _REPEATS)
    )
  cluster = calibrated.settings.cluster
  machine.keep(
    "several_processes",
    rounds=_ROUNDS,
    repeats=_REPEATS,
    declared=dataclasses.asdict(_PACE),
    constants=dataclasses.asdict(cluster.processes),
    host=dataclasses.asdict(cluster.host),
    rows=rows,
  )


if __name__ == "__main__":
  app.run(main)
