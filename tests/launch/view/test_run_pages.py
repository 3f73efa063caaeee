"""The data of a page are kept until files change, and not read too often."""

import json

import pytest

from launch.cli import workdir
from launch.report import run_files, trajectory_index
from launch.view import run_pages
from tests.helpers import viewed_runs


class Hand:
  """A clock that is moved by hand, and by reading."""

  def __init__(self):
    self.now_s = 0.0
    self.step_s = 0.0

  def __call__(self):
    self.now_s += self.step_s
    return self.now_s


@pytest.fixture
def run_dir(tmp_path):
  return viewed_runs.run(tmp_path / "run")


def grow(run_dir):
  with (run_dir / "metrics.jsonl").open("a") as file:
    file.write(json.dumps({"round": 5, "success": 1.0}) + "\n")


def test_data_are_the_same_until_a_file_changes(run_dir):
  pages = run_pages.RunPages(Hand())
  before = pages.data(run_dir)
  assert pages.data(run_dir) is before
  grow(run_dir)
  assert pages.data(run_dir)["metrics"]["round"][-1] == 5
  workdir.keep_failure(run_dir, "error: no disk")
  assert "The run failed: no disk" in pages.data(run_dir)["notes"]


def test_a_page_that_waits_for_the_log_reads_the_rest_once(
  run_dir, monkeypatch
):
  pages, read, counts = run_pages.RunPages(Hand()), run_files.spans, []
  monkeypatch.setattr(
    run_files, "spans", lambda *args: counts.append(1) or read(*args)
  )
  for _ in range(3):
    first = pages.data(run_dir, log=False)
    assert first["notes"][-1] == "The event log is being read."
  with (run_dir / "events.jsonl").open("a") as file:
    file.write("\n")
  assert pages.data(run_dir)["ledger"] is not None
  assert len(counts) == 1
  grow(run_dir)
  pages.data(run_dir)
  assert len(counts) == 2


def test_reading_takes_a_tenth_of_the_time_at_most(run_dir):
  clock = Hand()
  pages = run_pages.RunPages(clock)
  clock.step_s = 1.0  # From before it is read to after that.
  before = pages.data(run_dir)
  clock.step_s = 0.0
  read_s = clock.now_s
  grow(run_dir)
  clock.now_s = read_s + 9.9
  assert pages.data(run_dir) is before
  clock.now_s = read_s + 10.0
  assert pages.data(run_dir) is not before


def test_the_index_has_all_rounds_in_order_and_grows(run_dir):
  pages = run_pages.RunPages(Hand())
  rows = [viewed_runs.trajectory(0, i) for i in range(2)]
  for number in (1, 11):
    viewed_runs.write_round(run_dir, number, rows)
  found = pages.index(run_dir)
  assert [row[0] for row in found["rows"]] == [1, 1, 11, 11]
  viewed_runs.write_round(run_dir, 21, rows)
  path = viewed_runs.write_round(run_dir, 1, rows)
  with path.open("a") as file:
    file.write("{")
  found = pages.index(run_dir)
  assert [row[0] for row in found["rows"]] == [1, 1, 11, 11, 21, 21]
  assert found["odd"] == 1


def test_the_log_tells_which_members_were_trained(run_dir):
  # In the log, the second member of each group is masked.
  rows = [viewed_runs.trajectory(0, i) for i in range(2)]
  viewed_runs.write_round(run_dir, 1, rows)
  pages = run_pages.RunPages(Hand())

  def trained():
    found = pages.index(run_dir)
    place = found["columns"].index("trained")
    return [row[place] for row in found["rows"]]

  early = pages.data(run_dir, log=False)
  assert early["notes"][-1] == "The event log is being read."
  assert early["ledger"] is None
  assert trained() == [None, None]
  pages.data(run_dir)
  assert trained() == [True, False]
  # What was read is not left out again.
  assert pages.data(run_dir, log=False)["ledger"]


def test_of_too_many_trajectories_the_newest_are_kept(run_dir, monkeypatch):
  monkeypatch.setattr(trajectory_index, "MAX_ROWS", 3)
  rows = [viewed_runs.trajectory(0, i) for i in range(2)]
  for number in (1, 11, 21):
    viewed_runs.write_round(run_dir, number, rows)
  found = run_pages.RunPages(Hand()).index(run_dir)
  assert [row[0] for row in found["rows"]] == [11, 11, 21, 21]


def test_a_round_without_trajectories_has_none_to_open(run_dir):
  with pytest.raises(trajectory_index.NoTrajectory, match="round 7"):
    run_pages.RunPages(Hand()).detail(run_dir, 7, 0)
