"""Runs below a directory: found, compared, and told as they grow."""

import json
import os
import socket
import subprocess
import sys

import pytest

from launch.cli import workdir
from launch.run import status_server
from launch.view import runs
from tests.helpers import viewed_runs


def overview(root):
  return runs.RunsDirectory(root).overview()


def test_runs_are_found_at_any_depth_and_named_by_their_path(tmp_path):
  viewed_runs.run(tmp_path / "one")
  viewed_runs.run(tmp_path / "sweep" / "run_000")
  viewed_runs.run(tmp_path / ".hidden")
  (tmp_path / "empty").mkdir()
  for name in ("model.safetensors", "model.safetensors.index.json"):
    viewed_runs.run(tmp_path / f"exported-{name}")
    (tmp_path / f"exported-{name}" / name).touch()
  # A copy of settings inside of a run is no run.
  viewed_runs.run(tmp_path / "one" / "copy")
  (tmp_path / "link").symlink_to(tmp_path / "one")
  found = overview(tmp_path)
  assert [run["name"] for run in found["runs"]] == ["one", "sweep/run_000"]
  assert found["title"] == tmp_path.name


def test_a_directory_that_cannot_be_looked_into_hides_no_other(tmp_path):
  root = viewed_runs.closed_beside(tmp_path)
  assert [run["name"] for run in overview(root)["runs"]] == ["run"]


def test_a_directory_that_is_a_run_has_one(tmp_path):
  viewed_runs.run(tmp_path / "one")
  (run,) = overview(tmp_path / "one")["runs"]
  assert (run["name"], run["round"], run["rounds"]) == ("one", 4, 4)


def test_settings_that_differ_are_named_and_seeds_make_no_group(tmp_path):
  for number, (rate, seed) in enumerate([(1, 0), (1, 1), (2, 0)]):
    viewed_runs.run(
      tmp_path / f"run_{number}", optimizer={"rate": rate}, seed=seed
    )
  found = overview(tmp_path)
  assert found["differing"] == ["seed", "optimizer.rate"]
  assert [run["group"] for run in found["runs"]] == [
    "optimizer.rate=1",
    "optimizer.rate=1",
    "optimizer.rate=2",
  ]
  assert found["runs"][2]["settings"] == {"seed": "0", "optimizer.rate": "2"}


def test_a_setting_that_only_some_runs_have_differs(tmp_path):
  viewed_runs.run(tmp_path / "a", more=1)
  viewed_runs.run(tmp_path / "b")
  found = overview(tmp_path)
  assert found["differing"] == ["more"]
  assert found["runs"][1]["settings"] == {}


def test_the_last_and_the_best_of_a_metric_are_means_of_ten_rounds(tmp_path):
  viewed_runs.run(tmp_path / "a", 12)
  directory = runs.RunsDirectory(tmp_path)
  curve = directory.curves("success")["runs"]["a"]
  # 0.1 to 1.2: the mean of the last ten is 0.75, of the first ten 0.55.
  assert curve["last"] == curve["best"] == pytest.approx(0.75)
  # Less entropy is worse, and it falls.
  curve = directory.curves("entropy")["runs"]["a"]
  assert curve["last"] == pytest.approx(1.25)
  assert curve["best"] == pytest.approx(1.45)
  meaning = directory.curves("entropy")["meaning"]
  assert meaning.startswith("Randomness of the policy")


def test_less_is_better_of_a_metric_of_which_more_is_worse(tmp_path):
  path = viewed_runs.run(tmp_path / "a") / "metrics.jsonl"
  # docs/metrics.md says so of the norm of the gradient.
  rows = [{"round": i, "grad_norm": float(i)} for i in range(1, 12)]
  viewed_runs.write_lines(path, rows)
  curve = runs.RunsDirectory(tmp_path).curves("grad_norm")["runs"]["a"]
  # Means of 1 to 10 and of 2 to 11.
  assert (curve["best"], curve["last"]) == (5.5, 6.5)


def test_a_curve_lies_over_rounds_tokens_and_seconds(tmp_path):
  viewed_runs.run(tmp_path / "a", 3)
  curve = runs.RunsDirectory(tmp_path).curves("success")["runs"]["a"]
  assert curve["rounds"] == [1, 2, 3]
  assert curve["tokens"] == [100.0, 200.0, 300.0]
  assert curve["time"] == [2.0, 4.0, 6.0]
  assert curve["values"] == pytest.approx([0.1, 0.2, 0.3])


def test_evaluations_are_metrics_of_the_rounds_before_them(tmp_path):
  path = viewed_runs.run(tmp_path / "a", 3)
  viewed_runs.write_lines(
    path / "evaluations.jsonl",
    [
      {"round": 0, "success": 0.25, "time_s": 1.0, "fault": ""},
      {"round": 2, "success": 0.75, "time_s": 5.0},
      {"round": 9, "success": 1.0},  # Of a round that is not there.
    ],
  )
  directory = runs.RunsDirectory(tmp_path)
  found = directory.overview()["metrics"]
  assert "evaluation/success" in found
  assert not {"round", "evaluation/round", "evaluation/fault"} & {*found}
  curve = directory.curves("evaluation/success")["runs"]["a"]
  assert curve["rounds"] == [0, 1, 2, 3]
  assert curve["values"] == [0.25, None, 0.75, None]
  assert curve["tokens"] == [0.0, 100.0, 200.0, 300.0]
  # Before the first round it is the time of the evaluation.
  assert curve["time"] == [1.0, 2.0, 4.0, 6.0]
  # An evaluation is a mean already.
  assert (curve["last"], curve["best"]) == (0.75, 0.75)
  held_out = directory.metrics_of("a")["metrics"]["evaluation/success"]
  assert held_out == curve["values"]
  assert directory.metrics_of("a")["last"]["evaluation/success"] == 0.75


def test_the_steps_of_fine_tuning_are_its_rows(tmp_path):
  path = viewed_runs.tuning(tmp_path / "a")
  directory = runs.RunsDirectory(tmp_path)
  found = directory.overview()
  assert found["is_tuning"]
  assert found["metrics"] == [
    *(f"warm_start/{x}" for x in ("loss", "tokens", "step_s", "eval/loss")),
    "evaluation/success",
  ]
  (row,) = found["runs"]
  assert (row["state"], row["round"], row["rounds"]) == ("stopped", 4, 4)
  # Its last step leaves a checkpoint for rounds to begin with.
  (path / "checkpoints" / "0").mkdir(parents=True)
  assert overview(tmp_path)["runs"][0]["state"] == "ended"
  curve = directory.curves("warm_start/loss")["runs"]["a"]
  assert curve["tokens"] == [100.0, 200.0, 300.0, 400.0]
  assert curve["time"] == [2.0, 4.0, 6.0, 8.0]
  assert curve["values"] == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4], rel=1e-5)
  metrics = directory.metrics_of("a")["metrics"]
  assert metrics["evaluation/success"] == [None, None, None, 1.0]
  # A run with rounds beside it has those.
  viewed_runs.run(tmp_path / "b")
  assert not overview(tmp_path)["is_tuning"]


def test_a_metric_that_few_rounds_have_is_one_of_the_run(tmp_path):
  path = viewed_runs.run(tmp_path / "a", 3)
  rows = viewed_runs.metrics(3)
  rows[1]["source/rare/success"] = 0.5  # It was trained in round 2 only.
  viewed_runs.write_lines(path / "metrics.jsonl", rows)
  viewed_runs.write_lines(path / "evaluations.jsonl", [{"round": 0}])
  directory = runs.RunsDirectory(tmp_path)
  assert "source/rare/success" in directory.overview()["metrics"]
  found = directory.metrics_of("a")
  assert found["metrics"]["source/rare/success"] == [None, None, 0.5, None]
  assert found["last"]["source/rare/success"] == 0.5


def test_a_file_of_all_runs_has_every_metric_and_links_to_reports(tmp_path):
  viewed_runs.run(tmp_path / "a b")
  (tmp_path / "a b" / "report.html").touch()
  viewed_runs.run(tmp_path / "c", level=0.3)
  found = runs.RunsDirectory(tmp_path).frozen("entropy", less=True)
  names = found["table"]["metrics"]
  assert names == [
    "entropy",
    "success",
    "reward_mean",
    "sampled_tokens",
    "time_s",
  ]
  pages = [row.get("page") for row in found["table"]["runs"]]
  assert pages == ["a%20b/report.html", None]
  run = found["runs"]["c"]
  assert run["rounds"] == [1, 2, 3, 4]
  assert run["metrics"]["success"] == pytest.approx([0.4, 0.5, 0.6, 0.7])
  # Four rounds, so one mean: of 1.9, 1.8, 1.7, 1.6.
  assert (run["last"]["entropy"], run["best"]["entropy"]) == (
    pytest.approx(1.75),
    pytest.approx(1.75),
  )
  assert "reward_mean" not in run["metrics"]


def test_a_file_of_many_runs_has_fewer_points(tmp_path, monkeypatch):
  monkeypatch.setattr(runs, "_FROZEN_VALUES", 60)
  monkeypatch.setattr(runs, "_MIN_FROZEN", 3)
  viewed_runs.run(tmp_path / "a", rounds=8)
  found = runs.RunsDirectory(tmp_path).frozen("success", less=False)
  # 60 values for 5 metrics of a run: 12 points, which 8 rounds do not need.
  assert len(found["runs"]["a"]["rounds"]) == 8
  monkeypatch.setattr(runs, "_FROZEN_VALUES", 20)
  found = runs.RunsDirectory(tmp_path).frozen("success", less=False)
  # Four: every second one, up to the newest.
  assert found["runs"]["a"]["rounds"] == [2, 4, 6, 8]
  # Means of 0.1 and 0.2, of 0.3 and 0.4, and so on.
  assert found["runs"]["a"]["metrics"]["success"] == pytest.approx(
    [0.15, 0.35, 0.55, 0.75]
  )
  assert found["runs"]["a"]["last"]["success"] == pytest.approx(0.45)


def test_a_long_curve_is_thinned_and_keeps_its_end(tmp_path):
  viewed_runs.run(tmp_path / "a", 2)
  rows = viewed_runs.metrics(5001)
  viewed_runs.write_lines(tmp_path / "a" / "metrics.jsonl", rows)
  curve = runs.RunsDirectory(tmp_path).curves("success")["runs"]["a"]
  # Three of 5001 rounds are a point: the last is that of 499.9 to 500.1, in
  # the place of round 5001.
  assert len(curve["rounds"]) == len(curve["values"]) == 1667
  assert curve["rounds"][-1] == 5001
  assert curve["values"][-1] == pytest.approx(500.0)


def test_evaluations_between_the_points_of_a_long_curve_are_kept(tmp_path):
  path = viewed_runs.run(tmp_path / "a", 2)
  viewed_runs.write_lines(path / "metrics.jsonl", viewed_runs.metrics(5001))
  viewed_runs.write_lines(
    path / "evaluations.jsonl", [{"round": 4000, "success": 0.25}]
  )
  curve = runs.RunsDirectory(tmp_path).curves("evaluation/success")
  values = curve["runs"]["a"]["values"]
  assert [x for x in values if x is not None] == [0.25]


def test_a_run_that_grows_is_told_as_it_is_now(tmp_path):
  path = viewed_runs.run(tmp_path / "a", 3) / "metrics.jsonl"
  directory = runs.RunsDirectory(tmp_path)
  assert directory.overview()["runs"][0]["round"] == 3
  with path.open("a") as file:
    file.write(json.dumps({"round": 4, "success": 1.0, "fresh": 2.0}) + "\n")
  found = directory.overview()
  assert found["runs"][0]["round"] == 4
  assert "fresh" in found["metrics"]
  assert directory.curves("fresh")["runs"]["a"]["values"] == [
    *[None] * 3,
    2.0,
  ]


def test_all_metrics_of_a_run_are_the_same_until_it_grows(tmp_path):
  path = viewed_runs.run(tmp_path / "a", 3) / "metrics.jsonl"
  directory = runs.RunsDirectory(tmp_path)
  before = directory.metrics_of("a")
  assert directory.metrics_of("a") is before
  viewed_runs.write_lines(path, viewed_runs.metrics(4))
  assert directory.metrics_of("a")["rounds"] == [1, 2, 3, 4]


def test_a_run_is_over_once_it_has_all_rounds(tmp_path):
  viewed_runs.run(tmp_path / "a", 3)
  viewed_runs.run(tmp_path / "b", 3)
  rows = viewed_runs.metrics(2)
  viewed_runs.write_lines(tmp_path / "b" / "metrics.jsonl", rows)
  states = [run["state"] for run in overview(tmp_path)["runs"]]
  assert states == ["ended", "stopped"]


def test_a_run_that_an_error_ended_has_failed_and_says_why(tmp_path):
  path = viewed_runs.run(tmp_path / "a", 3)
  workdir.keep_failure(path, "error: round 3: nan\n  more: twinmesh explain x")
  (run,) = overview(tmp_path)["runs"]
  assert (run["state"], run["note"]) == ("failed", "error: round 3: nan")


@pytest.mark.process
def test_a_run_is_alive_while_its_process_is(tmp_path):
  path = viewed_runs.run(tmp_path / "a")

  def note(**where):
    (path / status_server.FILE).write_text(json.dumps(where))

  host = socket.gethostname()
  note(host=host, pid=os.getpid())
  assert runs.is_alive(path)
  note(host="another", pid=os.getpid())
  assert not runs.is_alive(path)
  with subprocess.Popen([sys.executable, "-c", ""]) as process:
    process.wait()
  note(host=host, pid=process.pid)
  assert not runs.is_alive(path)


@pytest.mark.parametrize(
  "text", ["", "[]", "{", '{"host": 3}', '{"host": "HERE", "pid": 0}']
)
def test_a_damaged_note_of_a_process_is_no_process(tmp_path, text):
  here = text.replace("HERE", socket.gethostname())
  (tmp_path / status_server.FILE).write_text(here)
  assert not runs.is_alive(tmp_path)


def test_a_run_of_any_content_is_a_row(tmp_path):
  (tmp_path / "a").mkdir()
  (tmp_path / "a" / "config.json").write_text("[" * 9999)
  (tmp_path / "a" / "metrics.jsonl").mkdir()
  for name in ("sweep_note.txt", status_server.FILE):
    os.mkfifo(tmp_path / "a" / name)
  viewed_runs.run(tmp_path / "b")
  found = overview(tmp_path)
  assert [run["round"] for run in found["runs"]] == [0, 4]
  assert found["runs"][0]["rounds"] is None
  assert found["differing"] == []
