"""Tests of random schedules: sound runs break nothing, broken ones are seen."""

import contextlib
import dataclasses
import json
import pathlib
import random
import re
import subprocess
import sys

import pytest

from rl.audit import checker
from rl.schedule import overlap, staleness_gate
from tests.helpers import machine_speed, schedule_load, virtual_run

_DEADLINE_S = machine_speed.scaled(900)
_ROOT = pathlib.Path(__file__).parents[2]


def loads(seeds, trajectories):
  """Plays so many trajectories for each seed, side by side.

  In processes of their own: pytest's checks of annotations would cost more
  than the runs.
  """
  command = [sys.executable, "-m", "tests.helpers.schedule_load"]
  children = [
    subprocess.Popen(
      [*command, str(seed), str(trajectories)],
      cwd=_ROOT,
      stdout=subprocess.PIPE,
      text=True,
    )
    for seed in range(seeds)
  ]
  try:
    texts = [child.communicate(timeout=_DEADLINE_S)[0] for child in children]
  finally:
    for child in children:
      child.kill()
  return [json.loads(text) for text in texts]


@pytest.mark.process
@pytest.mark.parametrize(
  ("seeds", "trajectories"),
  [(1, 1_000), pytest.param(2, 51_000, marks=pytest.mark.slow)],
)
def test_trajectories_of_all_modes_break_nothing(seeds, trajectories):
  results = loads(seeds, trajectories)
  assert [result["broken"] for result in results] == [[]] * seeds
  for result in results:
    assert sum(result["played"].values()) >= trajectories
    # Ten modes; each has at least a twentieth of its even share.
    assert result["played"].keys() == schedule_load.MODES.keys()
    assert min(result["played"].values()) > trajectories / 200


def slow_last(priority: tuple[int, ...]) -> float:
  """The last group of every four takes longer than two rounds of others."""
  return 30.0 if priority[0] % 4 == 3 else 1.0


IN_FLIGHT = overlap.in_flight(4, 1, 1)
BREAKS: dict[str, tuple[overlap.Overlap, overlap.Overlap, str]] = {
  "sync": (
    overlap.sync(4),
    overlap.strict_pipeline(4, 1),
    "began to train",
  ),
  "strict pipeline": (
    overlap.strict_pipeline(4, 2),
    overlap.rollout_pipe(4, 2, 2),
    r"after updates \[0, 1\], not 1",
  ),
  "rollout pipe": (
    overlap.rollout_pipe(4, 2, 2),
    overlap.strict_pipeline(4, 2),
    r"after updates \[0\], not 2",
  ),
  "hard frontier": (
    overlap.rollout_pipe(4, 2, 1, 1, hard=True),
    overlap.rollout_pipe(4, 2, 1, 3, hard=True),
    "the frontier holds 1",
  ),
  "as completed": (
    dataclasses.replace(overlap.strict_pipeline(4, 1), consume="ready"),
    dataclasses.replace(IN_FLIGHT, consume="drop"),
    "the bound is 0",
  ),
  "one step off": (
    overlap.one_step_off(4, 1),
    overlap.bounded(4, 2, 1),
    "with a lag of 2",
  ),
  "bounded": (
    overlap.bounded(4, 3, 1),
    overlap.in_flight(4, 3, 1),
    r"sampled by versions \[",
  ),
  "in flight": (IN_FLIGHT, overlap.in_flight(4, 3, 1), "the bound is 1"),
  "drop": (
    dataclasses.replace(IN_FLIGHT, consume="drop"),
    dataclasses.replace(overlap.in_flight(4, 3, 1), consume="drop"),
    "the bound is 1",
  ),
  "recycle": (
    dataclasses.replace(IN_FLIGHT, consume="recycle"),
    dataclasses.replace(IN_FLIGHT, consume="drop"),
    "which is to be recycled",
  ),
}
"""By mode: what is promised, what is run instead, and what gives it away."""


def found(run: virtual_run.Run, promised: overlap.Overlap) -> list[str]:
  return checker.violations(run.log.events, promised, run.group_size)


@pytest.mark.parametrize("mode", BREAKS)
def test_a_run_of_another_schedule_breaks_the_promises_of_a_mode(mode):
  promised, played, what = BREAKS[mode]
  run = virtual_run.Run(played, rounds=6, delay_s=slow_last).start()
  assert found(run, played) == []
  assert any(re.search(what, text) for text in found(run, promised))


@pytest.mark.parametrize("mode", schedule_load.MODES)
def test_a_gate_that_admits_one_too_many_is_seen(mode, monkeypatch):
  right = staleness_gate.StalenessGate.limit.fget
  assert right is not None
  monkeypatch.setattr(
    staleness_gate.StalenessGate,
    "limit",
    property(lambda gate: right(gate) + 1),
  )
  schedule = schedule_load.schedule(mode, random.Random(1))
  if mode == "hard frontier":  # It must not be the frontier that holds back.
    schedule = dataclasses.replace(schedule, frontier_groups=100)
  run = virtual_run.Run(schedule, rounds=8)
  with contextlib.suppress(RuntimeError):  # The learner refuses it as well.
    run.start()
  assert any("the gate ends at" in text for text in run.violations())
