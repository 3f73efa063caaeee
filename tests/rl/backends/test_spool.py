"""Programs that jobs of a queue run."""

import json
import signal
import subprocess
import sys
import time
import types

import pytest

from rl.backends import contract, host, slurm, spool
from tests.helpers import backends_under_test as under_test
from tests.helpers import commands

pytestmark = pytest.mark.process

WAITS = """
import sys
print("here", flush=True)
sys.stdin.read()
sys.exit(7)
"""


def queued(tmp_path, state="PENDING", began=False):
  """Returns a program whose job a queue has in a state, and does not run.

  And a list, of which the job gets an item when it is cancelled.
  """
  cancelled = []
  job = types.SimpleNamespace(
    job_id=12,
    state=state,
    done=lambda: state == "OUT_OF_MEMORY",
    cancel=lambda check: cancelled.append(check),
  )

  def submit(directory):
    if began:
      (directory / "began").write_text("a host")
    return slurm._Job(job)

  program = under_test.scripted(tmp_path, "waits", WAITS)
  folder = tmp_path / "jobs"
  process = spool.SpooledProcess(program, folder, under_test.DEADLINE_S, submit)
  return process, cancelled


def job(program, folder) -> subprocess.Popen:
  """Starts what a queue runs for a program."""
  folder.mkdir(exist_ok=True)
  told = {
    "program": host.sent(program),
    "log": str(program.log),
    "silence_s": under_test.DEADLINE_S,
  }
  (folder / "job.json").write_text(json.dumps(told))
  return subprocess.Popen(
    [sys.executable, "-m", spool.__name__, str(folder)], cwd=commands.ROOT
  )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_queue_that_ends_a_job_hangs_up_and_starts_it_no_second_time(
  tmp_path, number
):
  program = under_test.scripted(tmp_path, "waits", WAITS)
  program.log.parent.mkdir()
  with job(program, tmp_path / "job") as process:
    under_test.says(program, "here")
    process.send_signal(number)
  # By its own end: a signal would have been -15, or a request to leave.
  assert (tmp_path / "job/code").read_text() == "7"
  with job(program, tmp_path / "job"):
    pass  # As one that is put back into the queue.
  text = program.log.read_text()
  assert text.count("here") == 1
  assert "error: the queue ends the job of this program" in text


def test_a_job_whose_run_has_been_gone_for_long_starts_nothing(tmp_path):
  program = under_test.scripted(tmp_path, "waits", WAITS)
  (tmp_path / "job").mkdir()
  (tmp_path / "job/beat").write_text(str(time.time() - 24 * 3600))
  with job(program, tmp_path / "job") as process:
    pass
  assert process.returncode == 1
  assert not program.log.exists()


@pytest.mark.parametrize("state", ["OUT_OF_MEMORY", "PREEMPTED", "PENDING"])
def test_a_program_whose_job_never_begins_says_what_the_queue_does(
  tmp_path, monkeypatch, state
):
  # Longer than the time between two looks at the directory.
  monkeypatch.setattr(spool, "_LOST_S", 0.5)
  process, _ = queued(tmp_path, state)
  process.begin()
  if state == "PENDING":
    process.kill()
  assert under_test.ended(process) == contract.NEVER_RAN
  assert f"job 12 of Slurm is {state}" in process.reason


def test_a_job_that_was_put_back_leaves_the_queue_with_a_kill(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(spool, "_KILL_S", 0.1)
  process, cancelled = queued(tmp_path, began=True)
  process.begin()
  process.kill()
  assert under_test.ended(process) == contract.NEVER_RAN
  assert process.reason == "it was ended; job 12 of Slurm is PENDING"
  assert cancelled
