import json

import numpy as np
import pytest

from launch.report import run_data


@pytest.fixture
def run_dir(tmp_path):
  config = {"class": "rl.Experiment", "seed": 3, "rollout": {"group_size": 8}}
  (tmp_path / "config.json").write_text(json.dumps(config))
  rows = [
    {"round": 1, "success": 0.25, "loss": None},
    {"round": 2, "success": 0.5},
    # Of a resumed run: its second round counts.
    {"round": 2, "success": 0.75, "loss": 0.5},
  ]
  (tmp_path / "metrics.jsonl").write_text(
    "".join(f"{json.dumps(row)}\n" for row in rows) + '{"round": 3, "succ'
  )
  (tmp_path / "evaluations.jsonl").write_text(
    '{"round": 0, "success": 0.5, "fault": "late"}\n'
  )
  (tmp_path / "trajectories").mkdir()
  (tmp_path / "trajectories" / "round_000002.jsonl").write_text(
    '{"group_id": 1, "turns": []}\n'
  )
  (tmp_path / "trajectories" / "round_²x.jsonl").write_text("{}\n")
  return tmp_path


def test_metrics_are_arrays_with_nan_for_what_is_missing(run_dir):
  run = run_data.read(run_dir)
  assert run.settings["rollout.group_size"] == "8"
  assert list(run.metrics) == ["round", "success", "loss"]
  np.testing.assert_array_equal(run.metrics["round"], [1, 2])
  np.testing.assert_array_equal(run.metrics["success"], [0.25, 0.75])
  np.testing.assert_array_equal(run.metrics["loss"], [np.nan, 0.5])
  assert run.notes == ["metrics.jsonl: unreadable lines left out: 1."]


def test_a_run_without_rounds_has_its_steps(tmp_path):
  (tmp_path / "warm_start.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
  config = {"rounds": 0, "warm_start": {"steps": 1}}
  (tmp_path / "config.json").write_text(json.dumps(config))
  run = run_data.read(tmp_path)
  assert {name: list(x) for name, x in run.warm_start.items()} == {
    "step": [1],
    "loss": [0.5],
  }
  assert (run.metrics, run.notes) == ({}, [])


def test_words_stay_words(run_dir):
  evaluations = run_data.read(run_dir).evaluations
  assert list(evaluations["fault"]) == ["late"]
  assert evaluations["success"].dtype == np.float64


def test_episodes_are_those_of_a_round_that_kept_some(run_dir):
  run = run_data.read(run_dir)
  assert run.trajectories(2) == [{"group_id": 1, "turns": []}]
  with pytest.raises(KeyError, match="no episodes of round 1; there are: 2"):
    run.trajectories(1)


def test_a_directory_without_a_run_is_refused(tmp_path):
  with pytest.raises(ValueError, match=r"holds no run: no config\.json"):
    run_data.read(tmp_path)
  (tmp_path / "config.json").write_text("[")
  with pytest.raises(ValueError, match=r"is no run: .* is not valid JSON"):
    run_data.read(tmp_path)


def test_an_exported_checkpoint_is_refused(run_dir):
  (run_dir / "model.safetensors").touch()
  with pytest.raises(ValueError, match="holds an exported checkpoint"):
    run_data.read(run_dir)
