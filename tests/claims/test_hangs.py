"""Runs of which a part hangs: they end in time, and name it and its thread."""

import re
import subprocess
import sys

import pytest

from tests.helpers import commands, machine_speed, processes

pytestmark = [pytest.mark.slow, pytest.mark.process]

# Lets a function of a run hang from its n-th call on.
SCRIPT = """
import importlib, sys, threading
from absl import app

module, owner, name, count = sys.argv[1:5]
sys.argv[1:5] = []
place = importlib.import_module(module)
for part in filter(None, owner.split(".")):
  place = getattr(place, part)
whole, calls = getattr(place, name), []

def this_hangs(*given, **named):
  calls.append(0)
  if len(calls) >= int(count):
    threading.Event().wait()
  return whole(*given, **named)

setattr(place, name, this_hangs)
from launch import train
from launch.cli import flags
app.run(train.main, flags_parser=flags.parse)
"""
DEADLINE_S = round(machine_speed.scaled(40))
# Half of the deadline, and 30 s at most.
LAG_S = min(30.0, DEADLINE_S / 2)
SETTINGS = commands.TINY | {
  "rounds": "1000",
  "overlap.max_staleness": "1",
  "rollout.max_turns": "1",
  "rollout.step_s": "6",
  "rollout.grading.attempts": "1",
  "rollout.grading.deadline_s": "6",
  "max_skipped": "5",
  "progress_timeout_s": f"{DEADLINE_S}",
}
_BLOCKED = re.escape(
  f"the event loop is blocked for more than {LAG_S:.1f} s in:"
)


@pytest.mark.parametrize(
  ("place", "waits", "thread"),
  [
    (
      ("etils.epath.gpath", "PosixGPath", "write_text", "1"),
      r"the run +the checkpoint of round \d+, or that before it, to be written",
      r"thread \S+ is in:",
    ),
    (
      ("rl.pools.weight_transfer", "", "copy_to", "6"),
      r"learner waited \d+\.\d s for the engines to take version \d+",
      r"thread host is in:",
    ),
    (
      ("models.chat.word_chat", "WordChat", "open", "100"),
      _BLOCKED,
      r"in this_hangs",
    ),
    (
      ("rl.engine.builtin.model_runner", "ModelRunner", "advance", "20"),
      r"an answer of the engine +\d+\.\d s",
      r"thread decode is in:",
    ),
    (
      ("rl.train.learner", "Learner", "accumulate", "5"),
      r"learner waited \d+\.\d s for its mesh to update",
      r"thread learner is in:",
    ),
    (
      ("envs.rewards.rewards", "Outcome", "__call__", "100"),
      _BLOCKED,
      r"episode (train|eval)/\S+ +reward +\d+\.\d s",
    ),
    (
      # In the evaluation before the first round.
      ("envs.rewards.rewards", "Outcome", "__call__", "1"),
      _BLOCKED,
      r"episode eval/\S+ +reward +\d+\.\d s",
    ),
    (
      ("envs.suites.textarena", "_Game", "_play", "60"),
      r"episode \S+: step of the environment took over 6 s, in:",
      r"threads? environment (is|are) in:",
    ),
  ],
  ids=[
    "checkpoint",
    "transfer",
    "tokenizer",
    "engine",
    "learner",
    "reward",
    "first reward",
    "environment",
  ],
)
def test_a_run_ends_and_names_what_hangs(tmp_path, place, waits, thread):
  module, owner, name, count = place
  arguments = commands.train(tmp_path, SETTINGS)[1:]
  done = subprocess.run(
    [sys.executable, "-c", SCRIPT, module, owner, name, count, *arguments],
    cwd=commands.ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    timeout=2 * processes.DEADLINE_S,
    check=False,
  )
  assert done.returncode == 1, done.stdout
  assert re.search(waits, done.stdout), done.stdout
  assert re.search(thread, done.stdout), done.stdout
  assert "this_hangs" in done.stdout, done.stdout
