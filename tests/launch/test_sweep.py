"""launch.sweep: runs every variation in its own process and directory."""

import json

import pytest

from launch.cli import flags
from tests.helpers import commands

SWEEP = """
import sys
sys.path.insert(0, {root!r})
from configs import guess_number_moe

get_config = guess_number_moe.get_config

def sweep():
  return {runs}
"""
GIVEN = commands.TINY | {"rounds": "1", "evaluation.episodes": "8"}
# The sweep sets these; a setting given twice is refused.
del GIVEN["rollout.group_size"], GIVEN["evaluation.every"]


def sweep(tmp_path, runs, run=commands.run):
  config = tmp_path / "swept.py"
  config.write_text(SWEEP.format(root=str(commands.ROOT), runs=runs))
  return run(
    "launch.sweep",
    f"--config={config}",
    f"--workdir={tmp_path / 'out'}",
    *flags.arguments(GIVEN),
  )


@pytest.mark.slow
def test_every_run_gets_its_overrides_and_a_directory(tmp_path):
  # The command line's evaluation.episodes=8 applies to the sweep's Evaluation.
  whole = {"evaluation": "rl.experiment.Evaluation(every=7)"}
  small = {"rollout.group_size": 4}
  runs = [{"seed": 3} | small, small | whole]
  result = sweep(tmp_path, runs, commands.launch)
  assert result.returncode == 0, result.stdout + result.stderr
  first, second = (
    json.loads((tmp_path / "out" / name / "config.json").read_text())
    for name in ("run_000", "run_001")
  )
  assert (first["seed"], first["rounds"]) == (3, 1)
  assert second["rollout"]["group_size"] == 4
  assert second["evaluation"]["every"] == 7
  assert second["evaluation"]["episodes"] == 8
  assert "success" in result.stdout


def test_a_run_that_cannot_work_is_found_before_any_starts(tmp_path):
  result = sweep(tmp_path, [{"seed": 1}, {"rollout.gruop_size": 4}])
  assert result.returncode == 2
  assert "rollout.group_size" in result.stderr
  assert not (tmp_path / "out").exists()


def test_settings_of_something_else_are_refused(tmp_path):
  config = "--config=configs/fleet_small.py"
  result = commands.run("launch.sweep", config, f"--workdir={tmp_path}")
  assert result.returncode == 2
  assert "takes a rl.experiment.Experiment, not Planning" in result.stderr


def test_a_config_without_variations_says_so(tmp_path):
  result = sweep(tmp_path, [])
  assert result.returncode == 2
  assert "has no sweep()" in result.stderr


def test_a_setting_that_the_sweep_sets_too_is_refused(tmp_path):
  result = sweep(tmp_path, [{"seed": 1}, {"rounds": 2}])
  assert result.returncode == 2
  assert "--config.rounds=1 is given, but sweep() sets rounds" in result.stderr
  assert not (tmp_path / "out").exists()
