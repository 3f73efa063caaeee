"""Runs whose disk fills up: they stop with the reason, and go on with room."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.helpers import commands, machine_speed, processes

SETTINGS = commands.TINY | {"rounds": "40"}
DISK_KB = 30_000
# A disk of its own, filled but for a few kB; then the same command twice.
SCRIPT = f"""
room=$1 workdir=$2; shift 2
head -c $((({DISK_KB} - room) * 1024)) /dev/zero >"$workdir/filling"
"$@"; echo "ended with $?"
rm "$workdir/filling"
"$@"; echo "ended with $?"
"""

pytestmark = pytest.mark.slow


@pytest.fixture
def bwrap():
  path = shutil.which("bwrap")
  trial = [path or "false", "--dev-bind", "/", "/", "--size", "4096"]
  done = subprocess.run(
    [*trial, "--tmpfs", "/mnt", "true"], capture_output=True, check=False
  )
  if done.returncode:
    pytest.skip("bubblewrap cannot mount a disk of a given size here")
  return path


# Room for no checkpoint, for some, and for several rounds after them.
@pytest.mark.parametrize("room_kb", [300, 900, 2000])
def test_a_run_on_a_full_disk_ends_with_the_reason_and_goes_on_with_room(
  tmp_path, bwrap, room_kb
):
  inside = [bwrap, "--dev-bind", "/", "/"]
  inside += ["--size", str(DISK_KB * 1024), "--tmpfs", str(tmp_path)]
  train = commands.train(tmp_path / "run", SETTINGS)
  command = [sys.executable, "-m", *train]
  done = subprocess.run(
    [*inside, "sh", "-c", SCRIPT, "sh", str(room_kb), str(tmp_path), *command],
    cwd=commands.ROOT,
    env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    timeout=machine_speed.scaled(240),
    check=False,
  )
  first, then = done.stdout.split("ended with 1\n")
  assert "o space left" in first  # "No ..." is the system's, "no ..." is ours.
  assert "MB are free" in first
  assert "Traceback" not in first
  assert then.endswith("ended with 0\n"), then
  assert "error 0" in then
  assert "Traceback" not in then


def test_a_run_whose_disk_is_gone_ends_with_the_reason_and_goes_on(tmp_path):
  run, away = tmp_path / "run", tmp_path / "away"
  command = commands.train(run, SETTINGS | {"rounds": "100000"})
  with commands.start(*command) as process:
    processes.until(lambda: processes.rounds(run) >= 2, process)
    run.rename(away)
    output = process.communicate(timeout=processes.DEADLINE_S)[0]
  assert process.returncode == 1, output
  assert (
    f"cannot be written: No such file or directory; {run} is gone" in output
  )
  assert "Traceback" not in output
  assert not run.exists()
  away.rename(run)
  before = processes.rounds(run)
  with commands.start(*command) as process:
    processes.until(lambda: processes.rounds(run) > before + 2, process)
    process.terminate()
    output = process.communicate(timeout=processes.DEADLINE_S)[0]
  assert "error 0" in output, output
