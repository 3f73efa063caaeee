"""Files of a run, read in any state, by hand."""

import json
import random

from launch.report import run_files


def _write_lines(path, rows):
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_sample_of_trajectories_is_whole_groups_spread_over_the_rounds(
  tmp_path,
):
  # 100 rounds of 3 groups of 16 are too many. 40 rounds are read, and 400 / 16
  # = 25 groups fit: one each of the first 25 rounds in spread order. With a
  # step of 4 that order is through after 25: every fourth from the last.
  noise = random.Random(0)
  for i in range(100):
    rows = [
      dict(group_id=3 * i + k // 16, task_id="t", index=k % 16, turns=[])
      for k in range(48)
    ]
    noise.shuffle(rows)
    _write_lines(tmp_path / f"round_{i:06d}.jsonl", rows)
  found = run_files.sample_trajectories(tmp_path, [])
  assert len(found) == 400
  assert sorted({row["round"] for row in found}) == list(range(3, 100, 4))
  assert [row["index"] for row in found] == list(range(16)) * 25


def test_of_many_spans_the_middle_is_read(tmp_path, monkeypatch):
  monkeypatch.setattr(run_files, "_MAX_SPANS_READ", 3)
  _write_lines(
    tmp_path / "spans.jsonl",
    [
      {"track": "decode", "name": "step", "start": float(i), "end": i + 1.0}
      for i in range(9)
    ],
  )
  notes = []
  spans, count = run_files.spans(tmp_path / "spans.jsonl", notes)
  assert (count, [span.start for span in spans], notes) == (9, [3, 4, 5], [])


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


def test_trajectories_and_spans_of_another_form_are_left_out(tmp_path):
  path = tmp_path / "round_000001.jsonl"
  whole = dict(group_id=1, index=0, task_id="t", turns=[])
  _write_lines(path, [whole, whole | {"turns": [3]}, {"group_id": 1}, None])
  notes = []
  assert len(run_files.sample_trajectories(tmp_path, notes)) == 1
  assert notes == [
    "round_000001.jsonl: unreadable lines left out: 2.",
    "round_000001.jsonl: lines without a trajectory left out: 1.",
  ]
  span = {"track": "a", "name": "b", "start": 0, "end": 1.5}
  _write_lines(path, [span | {"more": 1}, span | {"start": "0"}, None])
  spans, count = run_files.spans(path, [])
  assert (count, len(spans)) == (1, 1)
