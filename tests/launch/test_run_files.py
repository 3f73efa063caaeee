"""What is read of the files of a run, by hand."""

import json
import random

from launch import run_files


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
