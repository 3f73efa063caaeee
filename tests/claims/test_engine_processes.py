"""Engines in processes of their own: the same run, whatever is killed."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import orbax.checkpoint as ocp
import pytest

from launch.report import log_check
from tests.helpers import commands

SYNC = {
  "overlap.max_staleness": "0",
  "overlap.wait_for_round": "true",
  "overlap.on_publish": "drain",
  "overlap.old_logprob": "snapshot",
}
REMOTE = {"placement.decode_processes": "1"}
_DEADLINE_S = 200


def until(done, process):
  """Polls `done()` while a process runs; returns its first true result."""
  deadline = time.monotonic() + _DEADLINE_S
  while time.monotonic() < deadline and process.poll() is None:
    if result := done():
      return result
    time.sleep(0.05)
  process.kill()
  raise AssertionError(process.communicate()[0])


def rounds(run_dir) -> int:
  path = run_dir / "metrics.jsonl"
  return len(path.read_text().splitlines()) if path.exists() else 0


def workers_of(process) -> list[int]:
  """Returns the process ids of the workers that a run has started."""
  found = []
  for task in pathlib.Path(f"/proc/{process.pid}/task").iterdir():
    with contextlib.suppress(OSError):
      for pid in (task / "children").read_text().split():
        words = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
        if b"launch.worker" in words:
          found.append(int(pid))
  return found


def runs(pid) -> bool:
  with contextlib.suppress(OSError):
    state = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1]
    return state.split()[0] not in "ZX"
  return False


def events(run_dir, kind):
  lines = (run_dir / "events.jsonl").read_text().splitlines()
  found = [json.loads(line) for line in lines if line]
  return [event for event in found if event["kind"] == kind]


def params(run_dir, step):
  like = ocp.PyTreeCheckpointer().restore(
    run_dir / "checkpoints" / str(step) / "state"
  )
  return {name: np.asarray(leaf) for name, leaf in like.items()}


@pytest.mark.slow
def test_a_synchronous_run_learns_the_same_bits_in_one_process_and_in_two(
  tmp_path,
):
  alone, apart = tmp_path / "alone", tmp_path / "apart"
  settings = commands.TINY | SYNC
  for run_dir, more in ((alone, {}), (apart, REMOTE)):
    done = commands.launch(*commands.train(run_dir, settings | more))
    assert done.returncode == 0, done.stdout + done.stderr
  left, right = params(alone, 4), params(apart, 4)
  assert left.keys() == right.keys()
  for name, leaf in left.items():
    np.testing.assert_array_equal(leaf, right[name], err_msg=name)
  assert log_check.of_run(apart).violations == []
  assert (apart / "workers" / "engine_0.log").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_is_killed_or_stopped_is_started_again(tmp_path, number):
  # A stopped one is lost after 30 s of silence.
  settings = commands.TINY | REMOTE | {"rounds": "400"}
  with commands.start(*commands.train(tmp_path, settings)) as process:
    until(lambda: rounds(tmp_path) >= 2, process)
    (worker,) = workers_of(process)
    os.kill(worker, number)
    until(
      lambda: [x for x in workers_of(process) if x != worker and runs(x)],
      process,
    )
    before = rounds(tmp_path)
    until(lambda: rounds(tmp_path) > before + 3, process)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=_DEADLINE_S)[0]
  assert process.returncode == 128 + signal.SIGINT, output
  assert "error 0" in output
  (lost,) = events(tmp_path, "engine_lost")
  assert "its process was lost: engine 0" in lost["reason"]
  assert len(events(tmp_path, "engine_back")) == 1
  assert log_check.of_run(tmp_path).violations == []
  assert not runs(worker)


@pytest.mark.slow
def test_no_process_is_left_of_a_run_that_was_killed(tmp_path):
  settings = commands.TINY | REMOTE | {"rounds": "400"}
  with commands.start(*commands.train(tmp_path, settings)) as process:
    until(lambda: rounds(tmp_path) >= 1, process)
    (worker,) = workers_of(process)
    process.kill()
    process.communicate()
  deadline = time.monotonic() + 10
  while runs(worker):
    assert time.monotonic() < deadline, "the worker outlived its run"
    time.sleep(0.05)


@pytest.mark.process
def test_a_run_in_one_process_imports_nothing_of_it():
  program = (
    "import sys; from launch import train; from rl import assemble;"
    "from configs import guess_number_moe as config;"
    "assemble.build(config.get_config());"
    "print([m for m in sys.modules if m.split('.')[0] in"
    " ('websockets', 'ray') or m.startswith('rl.remote')])"
  )
  done = subprocess.run(
    [sys.executable, "-c", program],
    cwd=commands.ROOT,
    capture_output=True,
    text=True,
    timeout=_DEADLINE_S,
    check=False,
  )
  assert done.stdout.strip() == "[]", done.stdout + done.stderr
