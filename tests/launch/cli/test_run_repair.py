"""Damaged runs: each goes on or is refused, whatever is wrong with its files.

A pipe that were opened would wait for ever.
"""

import contextlib
import json
import os
import shutil

import pytest

from launch.cli import flags, run_repair, workdir
from launch.report import comparison, page, run_files
from launch.run import metrics_writer, status_server
from rl.audit import event_log
from rl.planning import calibration
from rl.runtime import line_file, trace
from rl.settings import overrides
from tests.helpers import commands, damaged_runs, planned_fleets

ROWS = [{"round": i, "loss": 0.5} for i in range(1, 5)]
EVENTS = [{"kind": "submitted", "t": float(i)} for i in range(4)]
# What the run cannot do without, or that only its user can judge.
REFUSED = ("config.json", ".lock", "checkpoints")


@pytest.fixture(scope="module")
def experiment():
  return flags.load(commands.CONFIG)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, experiment):
  """The directory of a run with a checkpoint and a few rows of each kind."""
  run = tmp_path_factory.mktemp("whole") / "run"
  workdir.claim(run, experiment).close()
  for name in damaged_runs.RECORDS:
    rows = EVENTS if name == "events.jsonl" else ROWS
    (run / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
  for name in ("checkpoints/3", "trajectories", "tensorboard"):
    (run / name).mkdir(parents=True)
  return run


@pytest.fixture(params=damaged_runs.DAMAGES)
def damaged(request, tmp_path, whole):
  run = tmp_path / "run"
  shutil.copytree(whole, run)
  damaged_runs.DAMAGES[request.param](run)
  return request.param, run


def test_a_damaged_run_goes_on_or_is_refused(damaged, experiment, capsys):
  name, run = damaged
  place = name.partition(":")[0]
  if place in REFUSED:
    with pytest.raises(overrides.SettingError, match=place):
      workdir.claim(run, experiment)
    return
  with workdir.claim(run, experiment):
    writer = metrics_writer.MetricsWriter(run, first_round=4)
    writer.write(4, {"loss": 0.25})
    writer.close()
    for record in ("events.jsonl", "spans.jsonl", "logprob_gap.jsonl"):
      line_file.LineFile(run / record).append(["{}"])
  rounds = [row["round"] for row in run_files.lines(run / "metrics.jsonl", [])]
  gone = place == "metrics.jsonl" and "line" not in name and "row" not in name
  assert rounds == ([4] if gone else [1, 2, 3, 4])
  for tree in damaged_runs.TREES:
    assert (run / tree).is_dir() or not os.path.lexists(run / tree)
  if name.endswith(("pipe", "directory", "itself", ": a file")):
    is_moved = os.path.lexists(run / f"{place}.damaged")
    is_named = f"{place}.damaged" in capsys.readouterr().err
    assert (is_moved and is_named) or "step" in name


def test_a_damaged_run_can_be_looked_at(damaged):
  _, run = damaged
  assert page.write(run).read_text().startswith("<!doctype html>")
  if (run / "config.json").is_file():
    comparison.read([run], "loss")
  # Errors that commands print.
  for read in (
    lambda: status_server.ask(run),
    lambda: calibration.apply(planned_fleets.question(), run, "quick"),
    lambda: list(event_log.LogFile(run / "events.jsonl")),
    lambda: list(trace.read(run / "spans.jsonl")),
  ):
    with contextlib.suppress(OSError, ValueError):
      read()


def test_a_file_is_written_whole_or_stays_as_it_was(tmp_path):
  path = tmp_path / "page.html"
  run_repair.write(path, "one")
  run_repair.write(path, "two")
  assert path.read_text() == "two"
  with pytest.raises(UnicodeEncodeError):
    run_repair.write(path, "\ud800")
  assert path.read_text() == "two"
  assert [*tmp_path.iterdir()] == [path]


def test_a_file_that_is_written_twice_at_once_is_one_of_both(tmp_path):
  path = tmp_path / "page.html"

  def parts():
    yield b"first, "
    run_repair.write(path, "another")
    yield b"then"

  run_repair.write(path, parts())
  assert path.read_text() == "first, then"
  assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize(
  ("line", "number"),
  [
    (b'{"round": 3}', 3),
    (b'{"round": true}', None),
    (b'{"round": 3.0}', None),
    (b'{"round": 3', None),
    (b"\xff", None),
    (b"null", None),
    (b"[" * 100_000, None),
  ],
)
def test_a_row_is_an_object_with_its_number(line, number):
  assert run_repair.number(line, "round") == number
