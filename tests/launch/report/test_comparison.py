"""Runs side by side: settings, ranks and groups, by hand."""

import json
import pathlib

import pytest

from launch.report import comparison
from tests.helpers import viewed_runs


def run(name, values, **settings):
  return comparison.ComparedRun(
    name=name,
    settings={key: str(value) for key, value in settings.items()},
    values=dict(enumerate(values, start=1)),
    rounds=len(values),
  )


RUNS = [
  run("run_000", [0.0, 0.2], seed=1, rate=0.1, size=8),
  run("run_001", [0.2, 0.6], seed=2, rate=0.1, size=8),
  run("run_002", [0.9, 0.5], seed=1, rate=0.3, size=8, extra="<x>"),
  run("run_003", [], seed=2, rate=0.3, size=8, extra="<x>"),
]


def test_means_move_over_ten_rounds_or_all():
  assert RUNS[0].means == [pytest.approx(0.1)]
  long = run("long", [0.0] * 5 + [1.0] * 10)
  assert long.means == pytest.approx([0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
  assert (long.last, long.best(False), long.best(True)) == (1.0, 1.0, 0.5)
  assert (RUNS[3].last, RUNS[3].best(False)) == (None, None)


def test_means_of_numbers_near_the_largest_are_finite():
  # The sum of two would be beyond a float.
  assert run("huge", [1.5e308] * 2).last == 1.5e308


def test_the_best_comes_first_and_a_run_without_the_metric_last():
  names = [one.name for one in comparison.ranked(RUNS, less=False)]
  assert names == ["run_002", "run_001", "run_000", "run_003"]
  names = [one.name for one in comparison.ranked(RUNS, less=True)]
  assert names == ["run_000", "run_001", "run_002", "run_003"]


def test_groups_differ_in_all_but_the_seed():
  assert comparison.differing(RUNS) == ["seed", "rate", "extra"]
  # A run whose settings cannot be read differs in none.
  assert comparison.differing([RUNS[0], run("damaged", [])]) == []
  found = comparison.groups(RUNS)
  assert {name: [one.name for one in runs] for name, runs in found.items()} == {
    "rate=0.1, extra=-": ["run_000", "run_001"],
    "rate=0.3, extra=<x>": ["run_002", "run_003"],
  }
  assert [*comparison.groups(RUNS[:2])] == ["all runs"]


def test_the_table_tells_what_differs():
  lines = comparison.text(RUNS, "success").splitlines()
  heads = " ".join(lines[0].split())
  assert heads == "run rounds last success best success seed rate extra"
  assert lines[1].split() == ["run_002", "2", "0.7", "0.7", "1", "0.3", "<x>"]
  assert lines[4].split() == ["run_003", "0", "-", "-", "2", "0.3", "<x>"]


def test_many_settings_that_differ_have_a_line_each():
  names = [f"part.{i}" for i in range(13)]
  pair = [
    run("run_000", [0.0], **dict.fromkeys(names, 0)),
    run("run_001", [1.0], **dict.fromkeys(names, 1)),
  ]
  lines = comparison.text(pair, "success").splitlines()
  assert lines[0].split()[:2] == ["run", "rounds"]
  assert [line.split() for line in lines[3:6]] == [
    [],
    ["run", "run_001", "run_000"],
    ["part.0", "1", "0"],
  ]
  assert len(lines) == 3 + 1 + 1 + 13


def test_settings_are_read_as_the_command_line_names_them(tmp_path):
  first, second = tmp_path / "first", tmp_path / "second"
  for weight, (directory, cls) in enumerate(
    ((first, "a.b.Grpo"), (second, "a.b.Dapo"))
  ):
    directory.mkdir()
    config = {
      "seed": 3,
      "algorithm": {"class": cls, "loss": {"class": "a.Clip", "high": 0.2}},
      "engine": {"row_buckets": [4, 8]},
      "parts": [{"class": "a.Part", "weight": weight}],
      "prompt": f"{'long ' * 50}{weight}",
      "config_files": {"task": {"path": "task.py", "lines": [cls]}},
    }
    (directory / "config.json").write_text(json.dumps(config))
    comparison.write_note(directory, f"{directory.name} was stopped", {})
  (tmp_path / "none").mkdir()
  # The last row of a repeated round counts; what is no number does not.
  rows = [{"round": 1, "loss": 3.0}, {"round": 1, "loss": 2.0}]
  rows.append({"round": 2, "loss": None})
  text = "\n".join(map(json.dumps, rows))
  (first / "metrics.jsonl").write_text(text)
  runs = comparison.read(sorted(tmp_path.iterdir()), "loss")
  assert [one.name for one in runs] == ["first", "second"]
  assert runs[0].values == {1: 2.0}
  assert (runs[0].rounds, runs[0].note) == (2, "first was stopped")
  assert runs[0].settings["engine.row_buckets"] == "4,8"
  assert runs[1].settings["parts.0.weight"] == "1"
  # Of code, and of the end of a long text, it tells that it differs.
  assert comparison.differing(runs) == [
    "algorithm",
    "parts.0.weight",
    "prompt",
    "config_files.task",
  ]
  # 100 characters, " ... " and a digest.
  assert len(runs[0].settings["prompt"]) == 100 + 5 + 8
  assert len(runs[0].settings["config_files.task"]) == 8
  assert runs[1].settings["algorithm"] == "Dapo"


@pytest.mark.parametrize(
  ("given", "metric", "less"),
  [
    (None, "success", False),
    ("loss", "loss", False),
    ("-loss", "loss", True),
    # docs/metrics.md says that more of these is worse.
    ("behaviour_kl", "behaviour_kl", True),
    ("-warm_start/eval/loss", "warm_start/eval/loss", True),
  ],
)
def test_less_is_better_with_a_minus_or_where_more_is_worse(
  given, metric, less
):
  assert comparison.metric_of(given, is_tuning=False) == (metric, less)


def test_a_directory_that_cannot_be_looked_into_is_no_run(tmp_path):
  root = viewed_runs.closed_beside(tmp_path)
  (one,) = comparison.read(sorted(root.iterdir()), "success")
  assert one.name == "run"


def test_runs_without_rounds_are_compared_by_their_steps(tmp_path):
  viewed_runs.tuning(tmp_path)
  (found,) = comparison.read([tmp_path], "warm_start/eval/loss")
  # Held-out losses are means already.
  assert found.values == {2: 0.75, 4: 0.5}
  assert (found.last, found.best(True), found.rounds) == (0.5, 0.5, 4)
  assert comparison.values(tmp_path, "evaluation/success") == {4: 1.0}


def test_runs_of_one_name_are_told_apart_by_their_parents(
  tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  for sweep in ("a", "b"):
    viewed_runs.run(tmp_path / sweep / "run_000")
  both = [pathlib.Path("a/run_000"), tmp_path / "b" / "run_000"]
  names = [one.name for one in comparison.read(both, "success")]
  assert names == ["a/run_000", "b/run_000"]
  (one,) = comparison.read(both[:1], "success")
  assert one.name == "run_000"


def test_a_run_is_compared_by_its_newest_evaluation(tmp_path):
  (tmp_path / "config.json").write_text("{}")
  for name, numbers in (("metrics", (1, 2)), ("evaluations", (0, 2))):
    rows = [json.dumps({"round": x, "success": x / 4}) for x in numbers]
    (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
  (found,) = comparison.read([tmp_path], "evaluation/success")
  assert found.values == {0: 0.0, 2: 0.5}
  assert (found.last, found.best(False), found.rounds) == (0.5, 0.5, 2)
