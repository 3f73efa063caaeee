"""A sweep runs its variations, each in a process and directory of its own."""

import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
SWEEP = """
import sys
sys.path.insert(0, {root!r})
from configs import guess_number_moe

get_config = guess_number_moe.get_config

def sweep():
  return {runs}
"""
TINY = [
  "--config.rounds=1",
  "--config.model.num_layers=1",
  "--config.model.d_model=32",
  "--config.engine.slots=32",
  "--config.engine.row_buckets=32,",
  "--config.engine.chunk_buckets=8,",
  "--config.overlap.groups_per_round=2",
  "--config.overlap.groups_per_microbatch=2",
  "--config.warm_start=none",
  "--config.evaluation.episodes=8",
]


def launch(tmp_path, runs):
  config = tmp_path / "swept.py"
  config.write_text(SWEEP.format(root=str(ROOT), runs=runs))
  return subprocess.run(
    [
      *[sys.executable, "-m", "launch.sweep", f"--config={config}"],
      *[*TINY, f"--workdir={tmp_path / 'out'}"],
    ],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=240,
    stdin=subprocess.DEVNULL,
    check=False,
  )


def test_every_run_gets_its_overrides_and_a_directory(tmp_path):
  # What is given on the command line is set in what the sweep replaces.
  whole = {"evaluation": "rl.experiment.Evaluation(every=7)"}
  result = launch(tmp_path, [{"seed": 3}, {"rollout.group_size": 4} | whole])
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
  result = launch(tmp_path, [{"seed": 1}, {"rollout.gruop_size": 4}])
  assert result.returncode == 2
  assert "rollout.group_size" in result.stderr
  assert not (tmp_path / "out").exists()


def test_settings_of_something_else_are_refused(tmp_path):
  config = "--config=configs/fleet_small.py"
  result = subprocess.run(
    [sys.executable, "-m", "launch.sweep", config, f"--workdir={tmp_path}"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=60,
    check=False,
  )
  assert result.returncode == 2
  assert "takes a rl.experiment.Experiment, not Planning" in result.stderr


def test_a_config_without_variations_says_so(tmp_path):
  result = launch(tmp_path, [])
  assert result.returncode == 2
  assert "has no sweep()" in result.stderr


def test_a_setting_that_the_sweep_sets_too_is_refused(tmp_path):
  result = launch(tmp_path, [{"seed": 1}, {"rounds": 2}])
  assert result.returncode == 2
  assert "--config.rounds=1 is given, but sweep() sets rounds" in result.stderr
  assert not (tmp_path / "out").exists()
