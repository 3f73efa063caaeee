"""Engines in processes of their own: the same run, whatever is killed."""

import os
import signal
import subprocess
import sys

import pytest

from launch.report import log_check
from tests.helpers import commands, processes

REMOTE = {"placement.decode_processes": "1"}


@pytest.mark.slow
def test_a_synchronous_run_learns_the_same_bits_in_one_process_and_in_two(
  tmp_path,
):
  alone, apart = tmp_path / "alone", tmp_path / "apart"
  settings = commands.TINY | commands.SYNC
  for run_dir, more in ((alone, {}), (apart, REMOTE)):
    done = commands.launch(*commands.train(run_dir, settings | more))
    assert done.returncode == 0, done.stdout + done.stderr
  assert processes.saved_params(alone, 4) == processes.saved_params(apart, 4)
  assert log_check.of_run(apart).violations == []
  assert (apart / "workers" / "engine_0.log").exists()


@pytest.mark.slow
def test_an_engine_that_is_silent_for_30_s_is_started_again(tmp_path):
  settings = commands.TINY | REMOTE | {"rounds": "400"}
  with commands.start(*commands.train(tmp_path, settings)) as process:
    processes.until(lambda: processes.rounds(tmp_path) >= 2, process)
    (worker,) = processes.workers_of(process)
    os.kill(worker, signal.SIGSTOP)
    processes.until(
      lambda: [
        x
        for x in processes.workers_of(process)
        if x != worker and processes.runs(x)
      ],
      process,
    )
    before = processes.rounds(tmp_path)
    processes.until(lambda: processes.rounds(tmp_path) > before + 3, process)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=processes.DEADLINE_S)[0]
  assert process.returncode == 128 + signal.SIGINT, output
  assert "error 0" in output
  (lost,) = processes.events(tmp_path, "engine_lost")
  assert "its process was lost: engine 0" in lost["reason"]
  assert len(processes.events(tmp_path, "engine_back")) == 1
  assert log_check.of_run(tmp_path).violations == []
  assert not processes.runs(worker)


@pytest.mark.slow
def test_engines_join_a_running_run_and_leave_it(tmp_path):
  settings = commands.TINY | REMOTE | {"rounds": "4000"}
  run_dir = tmp_path / "run"

  def since(kind, rounds):
    """Waits for an event, and for two rounds after it."""
    processes.until(lambda: processes.events(run_dir, kind), process)
    processes.until(lambda: processes.rounds(run_dir) > rounds + 2, process)
    return processes.rounds(run_dir)

  with commands.start(*commands.train(run_dir, settings)) as process:
    processes.until(lambda: processes.rounds(run_dir) >= 2, process)
    (own,) = processes.workers_of(process)
    refused = commands.launch(
      "launch.worker", f"--join={run_dir}", "--pool=wide"
    )
    with commands.start("launch.worker", f"--join={run_dir}") as guest:
      done = since("engine_joined", processes.rounds(run_dir))
      asked = commands.launch("launch.status", run_dir)
      # The run's own engine leaves first, and then the last one stays.
      os.kill(own, signal.SIGTERM)
      done = since("engine_left", done)
      processes.until(lambda: not processes.runs(own), process)
      guest.send_signal(signal.SIGINT)
      with commands.start("launch.worker", f"--join={run_dir}") as other:
        processes.until(
          lambda: len(processes.events(run_dir, "engine_left")) == 2, process
        )
        words = guest.communicate(timeout=processes.DEADLINE_S)[0]
        done = since("engine_left", processes.rounds(run_dir))
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=processes.DEADLINE_S)[0]
        last = other.communicate(timeout=processes.DEADLINE_S)[0]
  assert refused.returncode == 2
  assert "the run refuses: pool wide cannot be joined; use decode" in (
    refused.stderr
  )
  assert "engine 1 (decode): open" in asked.stdout
  assert (guest.returncode, other.returncode) == (0, 0), words + last
  assert f"joins {run_dir} as engine 1; Ctrl-C lets it go" in words
  assert process.returncode == 128 + signal.SIGINT, output
  assert "engine 1 has joined pool decode" in output
  assert "error 0" in output
  assert not processes.events(run_dir, "engine_lost")
  assert not processes.events(run_dir, "fault")
  places = [x["engine"] for x in processes.events(run_dir, "engine_left")]
  assert places == [0, 1]
  assert log_check.of_run(run_dir).violations == []
  gone = commands.launch("launch.worker", f"--join={run_dir}")
  assert gone.returncode == 2
  assert "takes no engines: no process works on that run" in gone.stderr


@pytest.mark.slow
def test_a_run_in_one_process_imports_nothing_of_it():
  program = (
    "import sys; from launch import train; from rl import assemble;"
    "from configs import guess_number_moe as config;"
    "assemble.build(config.get_config());"
    "print([m for m in sys.modules if m.split('.')[0] in"
    " ('websockets', 'ray') or m.startswith(('rl.remote',"
    " 'rl.pools.hand_over'))])"
  )
  done = subprocess.run(
    [sys.executable, "-c", program],
    cwd=commands.ROOT,
    capture_output=True,
    text=True,
    timeout=processes.DEADLINE_S,
    check=False,
  )
  assert done.stdout.strip() == "[]", done.stdout + done.stderr
