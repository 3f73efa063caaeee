"""Files of a run, read in any state, by hand."""

import json
from unittest import mock

from launch.report import run_files


def _write_lines(path, rows):
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _span(track, name, start, end):
  return {"track": track, "name": name, "start": start, "end": end}


def test_of_many_spans_the_middle_is_kept_and_all_are_added_up(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(run_files, "_MAX_SPANS_READ", 3)
  rows = [_span("decode", "decode", float(i), i + 1.0) for i in range(9)]
  _write_lines(tmp_path / "spans.jsonl", rows)
  notes = []
  spans = run_files.spans(tmp_path / "spans.jsonl", notes)
  assert [span.start for span in spans.middle] == [3, 4, 5]
  assert (spans.count, spans.work.second_s) == (9, 9)
  assert notes == ["spans.jsonl: bubbles are those of the middle 3 of 9 spans."]


def test_decoding_by_evaluations_beside_the_rounds_is_not_added_up(tmp_path):
  rows = [
    _span("decode", "decode", 1, 2),
    _span("host", "evaluate", 0, 3),
    _span("decode", "decode", 3, 5),
    _span("learner", "update", 4, 6),
  ]
  _write_lines(tmp_path / "spans.jsonl", rows)
  work = run_files.spans(tmp_path / "spans.jsonl", []).work
  assert (work.first_s, work.second_s, work.both_s) == (2, 2, 1)


def _gap(round_, size=0.5):
  return {"round": round_, "tokens": 1, "max": size}


def test_of_many_comparisons_the_last_and_others_spread_are_shown(tmp_path):
  path = tmp_path / "logprob_gap.jsonl"
  _write_lines(path, [_gap(i) for i in range(100)])
  found = run_files.sample_gaps(path, {*range(100)}, [])
  # Steps of 64, 32 and 16 backwards from 99 give 7; 91 comes after them.
  rounds = [3, 19, 35, 51, 67, 83, 91, 99]
  assert [row["round"] for row in found] == rounds


def test_comparisons_that_a_resume_superseded_are_left_out(tmp_path):
  path = tmp_path / "logprob_gap.jsonl"
  _write_lines(path, [_gap(1), _gap(11), _gap(21), _gap(11, 0.25)])
  with path.open("a") as file:
    file.write('{"round": 31, "tok')
  notes = []
  found = run_files.sample_gaps(path, {1, 11}, notes)
  assert [(row["round"], row["max"]) for row in found] == [(1, 0.5), (11, 0.25)]
  assert notes == ["logprob_gap.jsonl: unreadable lines left out: 1."]


def test_a_run_without_comparisons_is_not_worth_a_note(tmp_path):
  notes = []
  assert run_files.sample_gaps(tmp_path / "none.jsonl", {1}, notes) == []
  assert notes == []


def test_lines_that_are_no_rows_are_counted_and_left_out(tmp_path):
  path = tmp_path / "metrics.jsonl"
  good = b'{"round": 1, "x": NaN}\n'
  bad = [b"null", b"3", b"[]", b'{"round": "1"}', b"\xff", b"{", b"[" * 99_999]
  path.write_bytes(b"\n".join([*bad, b"", good]))
  notes = []
  rows = list(run_files.lines(path, notes, round=int))
  assert rows == [{"round": 1, "x": None}]
  assert notes == ["metrics.jsonl: unreadable lines left out: 7."]


def test_a_directory_in_the_place_of_a_file_is_noted(tmp_path):
  notes = []
  assert list(run_files.lines(tmp_path, notes)) == []
  assert notes == [f"{tmp_path.name} is no file."]


def test_spans_of_another_form_are_left_out(tmp_path):
  path = tmp_path / "spans.jsonl"
  span = {"track": "a", "name": "b", "start": 0, "end": 1.5}
  _write_lines(path, [span | {"more": 1}, span | {"start": "0"}, None])
  spans = run_files.spans(path, [])
  assert (spans.count, len(spans.middle)) == (1, 1)


def test_of_a_span_only_numbers_and_texts_are_kept_as_arguments(tmp_path):
  path = tmp_path / "spans.jsonl"
  span = {"track": "host", "name": "publish", "start": 0, "end": 1}
  args = {"version": {"x": 1}, "moved_bytes": 8}
  _write_lines(path, [span | {"args": 5}, span | {"args": args}, span])
  spans = run_files.spans(path, []).middle
  assert [one.args for one in spans] == [{}, {"moved_bytes": 8}, {}]


def test_numbers_beyond_a_float_are_none(tmp_path):
  path = tmp_path / "metrics.jsonl"
  big = "9" * 400
  path.write_text(f'{{"round": 1, "a": {big}, "b": -1e999, "c": -3}}\n')
  found = run_files.numbered(path, [])
  assert found == {1: {"round": 1, "a": None, "b": None, "c": -3}}


def test_segments_that_may_not_be_listed_are_a_note(tmp_path, monkeypatch):
  (tmp_path / "metrics").mkdir()
  error = PermissionError(13, "Permission denied")
  monkeypatch.setattr("os.listdir", mock.Mock(side_effect=error))
  notes = []
  assert not run_files.numbered(tmp_path / "metrics.jsonl", notes)
  assert "metrics cannot be read: Permission denied" in notes[0]
