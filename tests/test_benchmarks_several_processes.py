"""The comparison of several processes with the simulation, at tiny size."""

import asyncio
import dataclasses

import pytest

from benchmarks import (
  calibration,
  declared_devices,
  one_engine,
  several_processes,
)
from launch.cli import jax_setup
from models import config as model_config
from rl import experiment as experiment_lib
from rl.pools import placement
from rl.runtime import trace
from rl.schedule import overlap
from rl.simulation import learner as simulated_learner
from rl.simulation import simulate
from tests.helpers import counting_runs

TINY = counting_runs.experiment(
  model_config.tiny(
    vocab_size=8, num_layers=1, d_model=16, d_ff=16, max_length=16
  ),
  overlap=overlap.sync(2),
  batch=experiment_lib.BatchShape(rows=2, length=16),
  rounds=6,
)


def published(at_s, version):
  return {"kind": "published", "t": at_s, "version": version}


def test_a_call_and_a_copy_follow_from_the_publishes_of_a_run():
  events = [
    event
    for version in (1, 2)
    for event in (
      {"kind": "update", "version": version - 1, "end": 10.0 * version},
      published(10.0 * version + 1.0, version),
    )
  ]
  spans = [
    trace.Span("host", name, 10.0 * version, 10.0 * version + seconds)
    for version in (1, 2)
    for name, seconds in (("store", 0.1), ("stage", 0.3))
  ]
  run = one_engine.Run(
    experiment=TINY,
    events=events,
    spans=spans,
    metrics=(),
    groups=(),
    wall_s=0.0,
    cpu_s=0.0,
  )
  costs = calibration.process_costs(run)
  # A publish of 1 s is two copies, of 0.4 s together, and two calls.
  assert costs.copy_s == pytest.approx(0.2)
  assert costs.call_s == pytest.approx(0.3)


def test_processes_divide_rows_and_steps():
  speed = simulated_learner.LearnerSpeed(token_s=4.0, update_s=6.0)
  whole = simulate.Simulation(cluster=simulate.Cluster(learner=speed))
  cluster = calibration.divided(whole, learners=2, engines=3).cluster
  assert cluster.learner.token_s == 2.0
  assert cluster.learner.update_s == 3.0
  assert cluster.learner.processes == 2
  assert [pool.engines for pool in cluster.pools] == [3]


@pytest.mark.parametrize(
  ("schedule", "expected"),
  [
    # From the end of round 1: rounds of 3, 1, 3, 1 and 9 s.
    (overlap.sync(2), 2.0),
    # From that of round 2 to that of round 5: 1, 3, 1 s.
    (overlap.in_flight(2, max_staleness=1), 2.0),
  ],
)
def test_a_round_is_half_of_two_neighbours(schedule, expected):
  ends = [5.0, 8.0, 9.0, 12.0, 13.0, 22.0]
  log = [published(at_s, i + 1) for i, at_s in enumerate(ends)]
  settings = dataclasses.replace(TINY, overlap=schedule)
  found = several_processes.outcome(log, (), settings)
  assert found["round_s"] == expected


@pytest.mark.slow
def test_processes_are_played_and_predicted_from_one_run_of_one_each():
  pace = declared_devices.Pace(dispatch_s=0.01, row_s=0.002, update_s=0.01)
  jax_setup.prepare(placement.Placement())
  selector = one_engine.TimedSelector()
  with asyncio.Runner(
    loop_factory=lambda: asyncio.SelectorEventLoop(selector)
  ) as runner:
    calibrated, rows = runner.run(
      several_processes.measure(TINY, pace, selector, places=((1, 1), (2, 2)))
    )
  names = [(row["schedule"], row["learners"], row["engines"]) for row in rows]
  assert names == [
    (schedule, count, count)
    for count in (1, 2)
    for schedule in ("sync", "in flight")
  ]
  for row in rows:
    # No program ends before it may.
    assert row["spans_s"]["decode"] >= pace.dispatch_s
    assert row["spans_s"]["update"] >= pace.update_s / row["learners"]
    assert row["simulated"]["round_s"] > 0.0
  assert dataclasses.astuple(calibrated.settings.cluster.processes) > (0.0, 0.0)
