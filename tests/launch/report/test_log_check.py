"""Verdicts on the log of a run, as text and as exit codes."""

import itertools
import json
import threading
from unittest import mock

import pytest

from launch.report import log_check
from launch.report import page as report_page
from rl.runtime import segments
from rl.schedule import overlap
from rl.settings import overrides
from tests.helpers import commands, event_logs

SCHEDULE = overlap.in_flight(4, 1, 1)
LOG = event_logs.run(SCHEDULE, 60)


def _write(path, log):
  path.write_text("".join(json.dumps(event) + "\n" for event in log))


@pytest.fixture
def run_dir(tmp_path):
  config = {
    "overlap": overrides.to_json(SCHEDULE),
    "rollout": {"group_size": event_logs.GROUP_SIZE},
  }
  (tmp_path / "config.json").write_text(json.dumps(config))
  _write(tmp_path / "events.jsonl", LOG)
  return tmp_path


def test_a_run_that_keeps_its_promises_is_checked_with_exit_code_0(run_dir):
  done = commands.run("launch.report.__main__", f"--check={run_dir}")
  assert done.returncode == 0, done.stderr
  # 60 rounds of 4 groups of 2 members of 10 tokens, one of two masked.
  assert "4,800 tokens sampled = 2,400 trained + 2,400 masked" in done.stdout
  assert "at most 1 of 1 allowed, over 240 groups" in done.stdout
  assert "checked: Time never falls" in done.stdout
  assert done.stdout.endswith("\n0 violations\n")


def test_a_run_that_breaks_one_ends_with_exit_code_1(run_dir, capsys):
  log = event_logs.change(LOG, "trained", where={"group": 9}, masked=3)
  _write(run_dir / "events.jsonl", log)
  assert report_page.check_run(run_dir) == 1
  text = capsys.readouterr().out
  assert "broken: group 9: 20 tokens were sampled, but 13 are trained" in text
  assert "error 7" in text


def test_a_table_says_which_changes_of_a_log_are_noticed(run_dir, monkeypatch):
  # Of a beginning of three rounds.
  monkeypatch.setattr(log_check, "_MAX_TAMPERED", 300)
  rows = log_check.tampered(run_dir).splitlines()
  found = {tuple(row.split()[:2]): row.split()[2:] for row in rows[1:]}
  assert found["switched", "event"] == ["3", "of", "3"]
  assert found["reward", "value"] == ["0", "of", "4"]
  with pytest.raises(
    log_check.UnreadableLog, match=r"events\.jsonl is missing"
  ):
    log_check.tampered(run_dir / "none")


def test_what_cannot_be_checked_ends_with_exit_code_2(run_dir, capsys):
  assert report_page.check_run(run_dir / "none") == 2
  assert "events.jsonl is missing; name" in capsys.readouterr().err
  (run_dir / "config.json").write_text('{"overlap": {"rounds": 3}}')
  assert report_page.check_run(run_dir) == 2
  assert "rounds" in capsys.readouterr().err


@pytest.mark.parametrize("rollout", [{"group_size": "8"}, []])
def test_a_group_size_of_another_type_is_refused_and_not_in_the_way_of_a_page(
  run_dir, rollout
):
  data = {"overlap": overrides.to_json(SCHEDULE), "rollout": rollout}
  (run_dir / "config.json").write_text(json.dumps(data))
  with pytest.raises(log_check.UnreadableLog, match="should hold the schedule"):
    log_check.of_run(run_dir)
  assert "config.json has no schedule" in report_page.read(run_dir).notes[-1]


def test_a_check_and_a_page_are_not_asked_for_at_once(run_dir):
  both = [f"--check={run_dir}", f"--run={run_dir}"]
  done = commands.run("launch.report.__main__", *both)
  assert done.returncode == 2
  assert "error: name one of --run=DIR, --check=DIR and" in done.stderr


def test_ages_are_those_of_the_phases_of_a_group():
  # Group 0: submitted at 0, first token at 2 s, ready, taken and trained.
  ages = log_check.Ages()
  for event in LOG:
    ages.observe(event)
  times = [
    LOG[event_logs.place(LOG, kind, group=0)]["t"]
    for kind in ("submitted", "first_token", "ready", "dequeued", "trained")
  ]
  expected = [after - before for before, after in itertools.pairwise(times)]
  assert ages.rows[0] == [0, 0, "trained", *expected]


def test_a_dropped_attempt_has_no_age_beyond_the_phase_it_reached():
  writer = event_logs.Run(SCHEDULE, 1)
  writer.begin(0)
  writer.drop(0, 0, "stale")
  ages = log_check.Ages()
  for event in writer.log:
    ages.observe(event)
  # First token at 2 s, dropped with the last event.
  last = writer.log[-1]["t"]
  assert ages.rows == [[0, 0, "stale", 2.0, last - 2.0, 0.0, 0.0]]


def test_of_a_long_run_every_few_groups_are_kept():
  ages = log_check.Ages()
  for event in event_logs.run(overlap.sync(2), 500):
    ages.observe(event)
  # Of 1,000 groups every eighth: 125 rows; every fourth would be 250 > 240.
  assert [row[0] for row in ages.rows] == list(range(0, 1000, 8))


def test_a_run_says_in_one_sentence_how_old_and_where_its_tokens_were(run_dir):
  assert log_check.of_run(run_dir).summary == (
    "staleness: at most 1 of 1 allowed, over 240 groups; 4,800 tokens sampled"
    " = 2,400 trained + 2,400 masked (2,400 no advantage) + 0 dropped"
    " + 0 in flight; error 0"
  )


def test_sources_are_told_apart_when_there_are_several(run_dir):
  log = event_logs.change(LOG, "submitted", where={"group": 7}, source="chess")
  _write(run_dir / "events.jsonl", log)
  lines = log_check.of_run(run_dir).text.splitlines()
  # 1 group of 240 is 0.4%.
  assert "  chess: 0.4% launched, 0.4% trained" in lines
  assert "  chess: 20 tokens sampled = 10 trained + 10 masked" in "\n".join(
    lines
  )


def _mixed(*, replaced):
  """Groups 0 and 2 are of the maze and 1 of chess, which is too slow.

  Its place is left to another maze if it is `replaced`, else to more chess.
  Group 2 is redundant.
  """
  writer = event_logs.Run(SCHEDULE, 1)
  for group in range(3):
    writer.begin(group)
  writer.finish(0)
  writer.drop(1, 0, "stale")
  if replaced:
    where = {"group": 1, "attempt": 0, "source": "chess", "task": "chess/1"}
    writer.emit("source_too_slow", **where, attempts=4)
  writer.begin(1, attempt=1)
  writer.finish(1, attempt=1)
  writer.drop(2, 0, "redundant")
  writer.train([0])
  writer.train([1], attempt=1)
  log = writer.log
  for attempt in (0,) if replaced else (0, 1):
    where = {"group": 1, "attempt": attempt}
    log = event_logs.change(log, "submitted", where=where, source="chess")
  return log


def test_each_source_is_told_with_what_it_was_given_and_what_it_trained(
  run_dir,
):
  # The redundant group is given back: one place and one group each.
  _write(run_dir / "events.jsonl", _mixed(replaced=False))
  found = log_check.of_run(run_dir)
  assert found.sources == {
    "chess": log_check.SourceCounts(submitted=1, trained=1),
    "maze": log_check.SourceCounts(submitted=1, trained=1),
  }
  told = (
    "groups of chess: 50.0% of those submitted, 50.0% of those trained; 0 "
    "too slow, after 0 attempts"
  )
  assert told in found.text.splitlines()
  assert "too slow" not in found.summary


def test_a_source_that_is_too_slow_is_named_with_its_places_and_attempts(
  run_dir,
):
  _write(run_dir / "events.jsonl", _mixed(replaced=True))
  found = log_check.of_run(run_dir)
  assert found.sources == {
    "chess": log_check.SourceCounts(submitted=1, too_slow=1, attempts=4),
    "maze": log_check.SourceCounts(submitted=1, trained=2),
  }
  told = (
    "groups of chess: 50.0% of those submitted, 0.0% of those trained; 1 "
    "too slow, after 4 attempts"
  )
  assert told in found.text.splitlines()
  assert found.summary.endswith(
    "; too slow for the bound: chess in 1 of 1 places, after 4 attempts"
  )


def test_a_restored_group_without_its_history_is_of_no_known_source():
  mix = log_check.Mix()
  mix.observe({"kind": "restored", "group": 3, "attempt": 0})
  mix.observe({"kind": "trained", "group": 3, "tokens": 10})
  assert mix.sources == {
    "unknown": log_check.SourceCounts(submitted=1, trained=1)
  }


def test_a_run_without_a_group_size_has_that_of_the_defaults(run_dir):
  data = {"overlap": overrides.to_json(SCHEDULE)}
  assert log_check.schedule_of(data) == (SCHEDULE, 8)


def test_a_group_of_which_no_token_was_trained_is_not_counted_as_trained(
  run_dir,
):
  none = {"tokens": 0, "masked": 20, "used": []}
  log = event_logs.change(LOG, "trained", where={"group": 9}, **none)
  _write(run_dir / "events.jsonl", log)
  found = log_check.of_run(run_dir)
  # Group 9 is of round 2, and all groups of that have a lag of 1.
  assert found.lags == {0: 4, 1: 235}
  assert sum(source.trained for source in found.sources.values()) == 239
  assert found.violations == []


def test_a_log_without_a_schedule_is_read_but_not_checked(run_dir):
  found = log_check.read(run_dir / "events.jsonl")
  assert (found.checks, found.violations, found.bound) == ([], [], None)
  assert found.lags == {0: 4, 1: 236}
  assert "an unknown bound" in found.summary


def _write_segments(path, log):
  """Writes a log in about 100 segments, compressed."""
  file = segments.SegmentedFile(path, max_bytes=5000)
  for event in log:
    file.append([json.dumps(event)])
  for thread in threading.enumerate():
    if thread.name == "segments":
      thread.join()


def _told(verdict):
  """Returns all of a verdict as values that can be compared."""
  fields = vars(verdict)
  counted = {name: vars(fields[name]) for name in ("census", "phases")}
  return fields | counted


@pytest.mark.slow
def test_a_log_in_segments_gets_the_verdict_of_one_in_a_piece(run_dir):
  whole = log_check.of_run(run_dir)
  table = log_check.tampered(run_dir)
  (run_dir / "events.jsonl").unlink()
  _write_segments(run_dir / "events.jsonl", LOG)
  assert len(segments.closed(run_dir / "events.jsonl")) > 50
  assert _told(log_check.of_run(run_dir)) == _told(whole)
  assert log_check.tampered(run_dir) == table
  assert _told(report_page.read(run_dir).verdict) == _told(whole)


@pytest.mark.parametrize(
  ("kind", "changes"),
  [
    # The first two are seen when the verdict is made; a search found them all.
    ("admitted", {"index": None}),
    ("submitted", {"source": None}),
    ("ended", {"versions": "0"}),
    ("ended", {"length": 10**400}),
  ],
)
def test_a_field_of_another_type_makes_a_log_unreadable(run_dir, kind, changes):
  log = event_logs.change(LOG, kind, where={"group": 239}, **changes)
  _write(run_dir / "events.jsonl", log)
  with pytest.raises(log_check.UnreadableLog, match="of another type"):
    log_check.of_run(run_dir)


def test_a_log_that_lacks_a_segment_is_not_checked_and_says_which(
  run_dir, capsys
):
  log = run_dir / "events.jsonl"
  log.unlink()
  _write_segments(log, LOG)
  segments.closed(log)[0].unlink()
  words = "events/000001.jsonl.gz is missing, but 000002.jsonl.gz is there"
  assert report_page.check_run(run_dir) == 2
  assert words in capsys.readouterr().err
  with pytest.raises(log_check.UnreadableLog, match=words):
    log_check.tampered(run_dir)
  assert any(words in note for note in report_page.read(run_dir).notes)


def test_a_line_that_a_crash_cut_is_left_out_and_said(run_dir):
  log = run_dir / "events.jsonl"
  log.write_text(log.read_text()[:-5])
  found = log_check.of_run(run_dir)
  assert (found.num_cut, found.violations) == (1, [])
  assert "lines cut by a crash and left out: 1" in found.text


def test_a_line_that_no_crash_has_cut_is_a_violation(run_dir):
  log = run_dir / "events.jsonl"
  lines = log.read_text().splitlines(keepends=True)
  log.write_text("".join([*lines[:50], '{"t": 3, "ki\n', *lines[50:]]))
  found = log_check.of_run(run_dir)
  words = "1 lines in the middle of the log are not events"
  assert (found.num_cut, found.violations) == (1, [words])


def _write_metrics(run_dir, rounds):
  _write(run_dir / "metrics.jsonl", [{"round": i + 1} for i in range(rounds)])


def test_stray_lines_of_metrics_are_not_blamed_on_the_log(run_dir):
  _write_metrics(run_dir, 60)
  with (run_dir / "metrics.jsonl").open("a") as file:
    file.write('[1]\nnull\n{"rou\n{"round": "61"}\n')
  assert log_check.of_run(run_dir).violations == []


@pytest.mark.parametrize("kept", [0, 0.5])
def test_a_log_that_ends_before_the_metrics_do_is_a_violation(run_dir, kept):
  _write_metrics(run_dir, 60)
  assert log_check.of_run(run_dir).violations == []
  log = run_dir / "events.jsonl"
  lines = log.read_text().splitlines(keepends=True)
  log.write_text("".join(lines[: int(kept * len(lines))]))
  (said,) = log_check.of_run(run_dir).violations
  assert "but metrics.jsonl has 60: lines are missing at its end" in said


@pytest.mark.parametrize("rounds", [0, 20])
def test_a_log_that_was_lost_before_a_restart_is_told_by_that_alone(
  run_dir, rounds
):
  ends = [event_logs.place(LOG, "published", version=v) for v in (20, 40)]
  before = LOG[: ends[0] + 1] if rounds else []
  goes_on = {"kind": "resumed", "trained": 40, "next_group": 160, "engines": 1}
  rest = LOG[ends[1] + 1 :]
  _write(run_dir / "events.jsonl", [*before, rest[0] | goes_on, *rest])
  (said,) = log_check.of_run(run_dir).violations
  assert said.startswith(f"the log has nothing of rounds {rounds + 1} to 40, ")


def test_a_page_says_so_too(run_dir):
  _write_metrics(run_dir, 60)
  _write(run_dir / "events.jsonl", LOG[: len(LOG) // 2])
  verdict = report_page.read(run_dir).verdict
  assert verdict
  assert verdict.violations == log_check.of_run(run_dir).violations != []


def test_a_run_that_writes_while_its_log_is_read_has_lost_nothing(
  run_dir, monkeypatch
):
  read = log_check.read

  def slowly(*arguments):
    verdict = read(*arguments)
    _write_metrics(run_dir, 70)
    return verdict

  _write_metrics(run_dir, 60)
  monkeypatch.setattr(log_check, "read", slowly)
  assert log_check.of_run(run_dir).violations == []


def test_a_page_takes_a_verdict_that_is_known(run_dir):
  known = log_check.of_run(run_dir)
  (run_dir / "events.jsonl").unlink()
  assert report_page.read(run_dir, known).verdict is known
  assert report_page.write(run_dir, known).exists()


def test_segments_that_may_not_be_listed_are_told(tmp_path, monkeypatch):
  (tmp_path / "events").mkdir()
  error = PermissionError(13, "Permission denied")
  monkeypatch.setattr("os.listdir", mock.Mock(side_effect=error))
  with pytest.raises(log_check.UnreadableLog, match="events cannot be read: P"):
    log_check.of_run(tmp_path)
