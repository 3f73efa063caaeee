"""Recorded trajectories: rows, one in full, and files of any content."""

import json
import random

import pytest

from launch.report import trajectory_index


def recorded(**fields):
  turn = {
    "context": [5, 6],
    "context_words": ["<b>", "ask"],
    "tokens": [7, 8, 1],
    "words": ["an", "swer", "<end>"],
    "logprobs": [-0.5, -1.23456789, 0.0],
    "versions": [3, 3, 4],
    "stop": "stop",
    "decode_s": 0.25,
    "env_s": 0.5,
  }
  return {
    "task_id": "maths/hard/train/17",
    "group_id": 40,
    "index": 2,
    "turns": [turn, turn | {"versions": [4, 4, 4], "opens": True}],
    "status": "completed",
    "reward": 0.75,
    "parts": {"form": 1.0},
    "advantage": -0.5,
    **fields,
  }


def written(path, rows):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return path


def test_a_row_has_the_numbers_that_a_page_filters_by():
  row = trajectory_index.row(recorded(), 6, {40: [0, 2]}, offset=99)
  # Round 6 trains version 5; the first token is of version 3. Twice 3 tokens
  # were sampled after 2 ids of context.
  assert dict(zip(trajectory_index.COLUMNS, row, strict=True)) == {
    "round": 6,
    "group": 40,
    "index": 2,
    "task": "maths/hard/train/17",
    "source": "maths/hard",
    "status": "completed",
    "reward": 0.75,
    "advantage": -0.5,
    "lag": 2,
    "tokens": 6,
    "ids": 10,
    "turns": 2,
    "trained": True,
    "offset": 99,
  }


@pytest.mark.parametrize(
  ("used", "trained"), [({40: [2]}, True), ({40: [1]}, False), ({}, None)]
)
def test_the_log_tells_whether_a_member_was_trained(used, trained):
  assert trajectory_index.row(recorded(), 6, used)[-2] is trained


def test_the_offset_of_a_row_leads_to_all_of_its_trajectory(tmp_path):
  path = written(tmp_path / "x.jsonl", [recorded(index=i) for i in range(3)])
  rows, odd = trajectory_index.rows(path, 6, {})
  assert odd == 0
  found = trajectory_index.detail(path, 6, rows[1][-1])
  assert (found["round"], found["index"], found["parts"]) == (
    6,
    1,
    {"form": 1.0},
  )
  first, second = found["turns"]
  assert first["words"] == ["an", "swer", "<end>"]
  assert (first["ids"], first["context_ids"]) == ([7, 8, 1], [5, 6])
  assert first["logprobs"] == [-0.5, -1.2346, 0.0]
  assert (first["opens"], second["opens"]) == (False, True)


def test_numbers_of_tokens_are_shown_where_they_were_kept():
  data = recorded()
  data["turns"] = [data["turns"][0] | {"old_logprobs": [1.0, 0.5, 2.0]}]
  (turn,) = trajectory_index.shown(data, 6)["turns"]
  assert turn["old_logprobs"] == [1.0, 0.5, 2.0]
  assert "advantages" not in turn


def test_ids_stand_for_texts_that_an_older_file_lacks():
  data = recorded()
  for turn in data["turns"]:
    del turn["words"], turn["context_words"]
  (turn, _) = trajectory_index.shown(data, 6)["turns"]
  assert (turn["context"], turn["words"]) == (["5", "6"], ["7", "8", "1"])


@pytest.mark.parametrize(
  ("fields", "gap"), [({}, " "), ({"gap": ""}, ""), ({"gap": "<b>"}, " ")]
)
def test_a_file_tells_the_text_between_two_words(fields, gap):
  assert trajectory_index.shown(recorded(**fields), 6)["gap"] == gap


def test_one_piece_of_text_tells_that_an_older_file_has_no_gaps():
  data = recorded()
  data["turns"][1] = data["turns"][1] | {"context_words": ["<b>", " ask"]}
  assert trajectory_index.shown(data, 6)["gap"] == ""


@pytest.mark.parametrize(
  "line",
  [
    b"",
    b"{",
    b"[" * 99_999,
    b"[]",
    b'{"turns": 3}',
    json.dumps(recorded(turns=[3])).encode(),
    json.dumps(recorded(group_id="x")).encode(),
    json.dumps(recorded(group_id=1e400)).encode(),
    json.dumps(recorded(turns=[{"versions": [1], "tokens": 1}])).encode(),
  ],
)
def test_what_is_no_trajectory_is_refused(line):
  with pytest.raises(trajectory_index.NoTrajectory):
    trajectory_index.row(trajectory_index.parse(line), 1, {})


@pytest.mark.parametrize(
  "change",
  [
    {"words": ["one"]},
    {"logprobs": None},
    {"logprobs": [0.0]},
    {"versions": [1]},
    {"tokens": "777"},
    {"advantages": [1.0]},
  ],
)
def test_a_turn_whose_lists_do_not_fit_is_refused(change):
  data = recorded()
  data["turns"] = [data["turns"][0] | change]
  with pytest.raises(trajectory_index.NoTrajectory):
    trajectory_index.shown(data, 1)


def test_numbers_that_no_page_can_show_are_left_out():
  huge = recorded(reward=10**400, advantage=float("nan"), parts={"a": True})
  row = trajectory_index.row(huge, 1, {})
  assert row[6:8] == [None, None]
  assert trajectory_index.shown(huge, 1)["parts"] == {"a": None}


def test_a_place_behind_the_end_of_a_file_is_refused(tmp_path):
  path = written(tmp_path / "x.jsonl", [recorded()])
  with pytest.raises(trajectory_index.NoTrajectory, match="has changed"):
    trajectory_index.detail(path, 1, path.stat().st_size)
  with pytest.raises(trajectory_index.NoTrajectory, match="not JSON"):
    trajectory_index.detail(path, 1, 5)


def test_only_files_of_rounds_are_found(tmp_path):
  where = tmp_path / "trajectories"
  for name in ("round_000012", "round_000002", "round_x", "other"):
    written(where / f"{name}.jsonl", [])
  (where / "round_000003.jsonl").mkdir()
  assert list(trajectory_index.files(tmp_path)) == [2, 12]


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
    written(tmp_path / "trajectories" / f"round_{i:06d}.jsonl", rows)
  found = trajectory_index.sample(tmp_path, [], {})
  assert len(found) == 400
  assert sorted({row[0] for row, _ in found}) == list(range(3, 100, 4))
  assert [row[2] for row, _ in found] == list(range(16)) * 25


def test_lines_of_another_form_are_left_out_and_told_of(tmp_path):
  whole = dict(group_id=1, index=0, task_id="t", turns=[])
  rows = [whole, whole | {"turns": [3]}, {"group_id": 1}, None]
  written(tmp_path / "trajectories" / "round_000001.jsonl", rows)
  notes = []
  assert len(trajectory_index.sample(tmp_path, notes, {})) == 1
  assert notes == [
    "round_000001.jsonl: unreadable lines left out: 2.",
    "round_000001.jsonl: lines without a trajectory left out: 1.",
  ]


def test_a_file_that_a_run_deletes_meanwhile_is_said_and_left_out(
  tmp_path, monkeypatch
):
  gone = tmp_path / "round_000001.jsonl"
  monkeypatch.setattr(trajectory_index, "files", lambda _: {1: gone})
  notes = []
  assert trajectory_index.sample(tmp_path, notes, {}) == []
  assert notes == [
    "round_000001.jsonl cannot be read: No such file or directory."
  ]
