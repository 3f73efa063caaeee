"""The warm start in a report, with lines missing, cut or skipped."""

import json
import re

from launch.report import warm_start_section


def row(step, loss, skipped=0.0):
  return {
    "step": step,
    "loss": loss,
    "grad_norm": 1.0,
    "tokens": 100.0,
    "skipped": skipped,
    "step_s": 0.5,
  }


def points(section):
  """Returns the points of each line of the drawing."""
  return [
    [tuple(map(float, pair.split(","))) for pair in found.split()]
    for found in re.findall(r'points="([^"]*)"', section)
  ]


def test_a_run_without_a_warm_start_shows_nothing(tmp_path):
  notes = []
  rows = warm_start_section.read(tmp_path, notes)
  assert (list(rows), notes) == ([], [])
  assert warm_start_section.section(rows) == ""
  assert warm_start_section.tiles(rows) == []


def test_steps_are_read_in_order_and_cut_lines_are_told_of(tmp_path):
  lines = [json.dumps(row(step, 3.0 - step)) for step in (2, 1)]
  text = "\n".join([*lines, '{"step": 3, "lo'])
  (tmp_path / "warm_start.jsonl").write_text(text)
  notes = []
  rows = warm_start_section.read(tmp_path, notes)
  assert [r["loss"] for r in rows] == [2.0, 1.0]
  assert notes == ["warm_start.jsonl: unreadable lines left out: 1."]


def test_the_curve_falls_with_the_loss():
  rows = [row(step, 4.0 / step) for step in range(1, 5)]
  raw, smooth = points(warm_start_section.section(rows))
  assert len(raw) == len(smooth) == 4
  # From the left edge to the right; down is more on a screen, and the largest
  # loss touches the top.
  assert [x for x, _ in raw] == [52.0, 377.3, 702.7, 1028.0]
  assert raw[0][1] == 12.0
  assert [y for _, y in raw] == sorted(y for _, y in raw)
  # Between 226 (no loss) and 12 (4 nats): 1 nat is a quarter of the way.
  assert raw[3][1] == 226 - (226 - 12) / 4


def test_skipped_steps_are_counted_and_not_drawn():
  rows = [row(1, 2.0), row(2, None, skipped=1.0), row(3, 1.0)]
  section = warm_start_section.section(rows)
  assert "3 steps, 1 skipped as not finite, 300 tokens in 2 s." in section
  assert [len(line) for line in points(section)] == [2, 2]
  assert warm_start_section.tiles(rows) == [
    (
      "Warm start",
      "2 → 1",
      "nats a token, 3 steps, 1 skipped as not finite",
    )
  ]


def test_a_warm_start_that_was_never_finite_has_no_curve():
  rows = [row(1, None, skipped=1.0)]
  assert "<svg" not in warm_start_section.section(rows)
  assert warm_start_section.tiles(rows)[0][1] == "–"


def test_a_single_step_is_drawn():
  (raw, _) = points(warm_start_section.section([row(1, 0.0)]))
  assert raw == [(52.0, 226.0)]
