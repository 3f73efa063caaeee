"""Runs whose processes are killed at random moments, time and again.

TWINMESH_KILLS=20 kills as often; the default is for a slow suite in minutes.
"""

import functools
import os
import random
import signal
import time

import pytest

from launch.report import log_check
from tests.helpers import commands, processes

KILLS = int(os.environ.get("TWINMESH_KILLS", "3"))
MANY = {"rounds": "100000", "retention.checkpoint_every": "3"}
LATE = {"overlap.max_staleness": "2"}

pytestmark = pytest.mark.slow


def end(process) -> str:
  """Ends a run as Ctrl-C does; returns its output."""
  process.send_signal(signal.SIGINT)
  output = process.communicate(timeout=processes.DEADLINE_S)[0]
  assert process.returncode == 128 + signal.SIGINT, output
  return output


def check_log(run_dir):
  verdict = log_check.of_run(run_dir)
  assert verdict.violations == []
  assert verdict.ledger.error == 0
  return verdict


def are_back(run_dir, process, times) -> bool:
  """Returns True when two engines run, after so many losses of one."""
  back = len(processes.events(run_dir, "engine_back"))
  return back >= times and len(processes.workers_of(process)) == 2


def test_a_run_goes_on_whichever_engine_is_killed(tmp_path):
  rng = random.Random(0)
  settings = commands.TINY | MANY | LATE
  settings |= {
    "placement.decode_processes": "1",
    "placement.replicas": "2",
    "recovery.steady_s": "0.01",
  }
  with commands.start(*commands.train(tmp_path, settings)) as process:
    processes.until(lambda: processes.rounds(tmp_path) >= 2, process)
    for number in range(KILLS):
      time.sleep(rng.uniform(0, 4))
      workers = processes.workers_of(process)
      os.kill(rng.choice(workers), signal.SIGKILL)
      back = functools.partial(are_back, tmp_path, process, number + 1)
      processes.until(back, process)
    before = processes.rounds(tmp_path)
    processes.until(lambda: processes.rounds(tmp_path) > before + 3, process)
    left = processes.workers_of(process)
    end(process)
  assert not processes.outliving(left)
  check_log(tmp_path)
  assert len(processes.events(tmp_path, "engine_lost")) == KILLS


@pytest.mark.parametrize("name", ["engines", "learner"])
def test_a_run_that_is_killed_at_any_moment_goes_on(tmp_path, name):
  rng = random.Random(1)
  settings = commands.TINY | MANY | LATE
  settings |= {
    "engines": {"placement.decode_processes": "1"},
    "learner": {
      "placement.learner.data": "2",
      "placement.learner_processes": "2",
    },
  }[name]
  for _ in range(KILLS):
    with commands.start(*commands.train(tmp_path, settings)) as process:
      began, seen = time.monotonic(), set()
      after_s = rng.uniform(1, 40)
      while time.monotonic() < began + after_s:
        assert process.poll() is None, process.communicate()[0]
        seen.update(processes.workers_of(process))
        time.sleep(0.1)
      process.kill()
      process.communicate()
    assert not processes.outliving(seen)
  finish(tmp_path, settings)


def finish(run_dir, settings):
  """Lets a run take three more rounds, and checks all of it."""
  before = processes.rounds(run_dir)
  with commands.start(*commands.train(run_dir, settings)) as process:
    processes.until(lambda: processes.rounds(run_dir) > before + 3, process)
    output = end(process)
  assert "error 0" in output
  check_log(run_dir)


@pytest.mark.parametrize(
  ("number", "told", "times"),
  [
    (signal.SIGKILL, "ended with code -9", KILLS),
    # After 30 s of silence.
    (signal.SIGSTOP, "it does not answer", 1),
  ],
)
def test_a_killed_or_stopped_part_of_the_learner_ends_the_run_which_goes_on(
  tmp_path, number, told, times
):
  rng = random.Random(2)
  settings = commands.TINY | MANY | LATE
  settings |= {
    "placement.learner.data": "2",
    "placement.learner_processes": "2",
  }
  for _ in range(times):
    with commands.start(*commands.train(tmp_path, settings)) as process:
      processes.until(lambda: len(processes.workers_of(process)) == 2, process)
      time.sleep(rng.uniform(0, 30))
      seen = processes.workers_of(process)
      os.kill(rng.choice(seen), number)
      output = process.communicate(timeout=processes.DEADLINE_S)[0]
    assert process.returncode not in (0, -signal.SIGKILL), output
    assert "learner" in output
    assert told in output
    assert not processes.outliving(seen)
  finish(tmp_path, settings)
