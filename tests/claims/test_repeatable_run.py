"""A repeatable run in flight ends with the same bits, whether killed or not."""

import json
import os
import subprocess
import sys
import time

import pytest

from rl.audit import event_log, token_ledger
from tests.helpers import commands, machine_speed, processes

pytestmark = [pytest.mark.process, pytest.mark.slow]

SETTINGS = commands.TINY | {
  "rounds": "6",
  "repeatable": "true",
  "retention.checkpoint_every": "1",
  "overlap.max_staleness": "2",
  # So few that there is always something in flight.
  "engine.slots": "2",
  "engine.row_buckets": "2,",
}


def begin(workdir, hash_seed):
  """Starts a run in a process with other hashes."""
  environment = {**os.environ, "XLA_FLAGS": "", "PYTHONHASHSEED": hash_seed}
  return subprocess.Popen(
    [sys.executable, "-m", *commands.train(workdir, SETTINGS)],
    cwd=commands.ROOT,
    env=environment,
    stdin=subprocess.DEVNULL,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def finish(process):
  """Waits for a run to end well."""
  text, _ = process.communicate(timeout=machine_speed.scaled(240))
  assert process.returncode == 0, text


def last_checkpoint(workdir):
  """Returns the content of the checkpoint of the last round."""
  return processes.checkpoint(workdir, 6)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
  """The directory of a run that nothing happened to."""
  workdir = tmp_path_factory.mktemp("undisturbed") / "run"
  finish(begin(workdir, "1"))
  return workdir


def test_two_runs_of_a_seed_end_with_the_same_bits(undisturbed, tmp_path):
  finish(begin(tmp_path / "run", "2"))
  log = (undisturbed / "events.jsonl").read_text()
  assert (tmp_path / "run" / "events.jsonl").read_text() == log
  # Weights did arrive inside of trajectories.
  versions = [
    event["versions"]
    for event in map(json.loads, log.splitlines())
    if event["kind"] == "ended"
  ]
  assert any(len(runs) > 1 for runs in versions)
  assert last_checkpoint(tmp_path / "run") == last_checkpoint(undisturbed)


def test_a_run_that_was_killed_ends_with_the_bits_of_one_that_was_not(
  undisturbed, tmp_path
):
  workdir = tmp_path / "run"
  killed = begin(workdir, "3")
  saved = workdir / "checkpoints" / "2" / "commit_success.txt"
  while not saved.exists():
    assert killed.poll() is None, killed.communicate()[0]
    time.sleep(0.05)
  killed.kill()
  killed.communicate()
  finish(begin(workdir, "4"))
  assert last_checkpoint(workdir) == last_checkpoint(undisturbed)
  # Episodes went on with the answers that they had, some in the middle of one.
  log = list(event_log.LogFile(workdir / "events.jsonl"))
  resumed = [event["kind"] for event in log].index("resumed")
  continued = [e for e in log[resumed:] if e["kind"] == "continued"]
  assert any(event["turns"] for event in continued)
  assert all(event["kind"] != "begun_anew" for event in log)
  # All that is sampled counts once, as if nothing had happened.
  whole = event_log.LogFile(undisturbed / "events.jsonl")
  ledgers = [token_ledger.of(x) for x in (event_log.surviving(log), whole)]
  assert ledgers[0] == ledgers[1]
