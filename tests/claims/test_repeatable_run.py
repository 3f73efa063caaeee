"""An asynchronous run that is repeatable ends with the same bits."""

import json
import os
import subprocess

import pytest

from tests.helpers import commands

pytestmark = [pytest.mark.process, pytest.mark.slow]

SETTINGS = commands.TINY | {
  "rounds": "6",
  "repeatable": "true",
  "overlap.max_staleness": "2",
}


def run(workdir, **variables):
  """Returns the exit code, with other hashes and at another speed."""
  process = subprocess.run(
    [
      *("python", "-m", *commands.train(workdir, SETTINGS)),
    ],
    cwd=commands.ROOT,
    env={**os.environ, "XLA_FLAGS": "", **variables},
    stdin=subprocess.DEVNULL,
    capture_output=True,
    text=True,
    check=False,
    timeout=240,
  )
  return process.returncode, process.stdout + process.stderr


def checksums(workdir):
  """Returns those of all arrays of the last checkpoint, and the rest of it."""
  path = workdir / "checkpoints" / "6" / "record" / "metadata"
  return json.loads(path.read_text())["body"]


def test_two_runs_of_a_seed_end_with_the_same_bits(tmp_path):
  first, second = tmp_path / "first", tmp_path / "second"
  for workdir, seed in ((first, "1"), (second, "2")):
    code, text = run(workdir, PYTHONHASHSEED=seed)
    assert code == 0, text
  log = (first / "events.jsonl").read_text()
  assert (second / "events.jsonl").read_text() == log
  # Weights did arrive inside of trajectories.
  versions = [
    event["versions"]
    for event in map(json.loads, log.splitlines())
    if event["kind"] == "ended"
  ]
  assert any(len(runs) > 1 for runs in versions)
  assert checksums(first) == checksums(second)
