"""The warm start in a report, with lines missing, cut or skipped."""

import itertools
import json

import pytest

from launch.report import page as report_page
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


def test_a_run_without_a_warm_start_shows_nothing(tmp_path):
  notes = []
  rows = warm_start_section.read(tmp_path, notes)
  assert (list(rows), notes) == ([], [])
  assert warm_start_section.section(rows) is None
  assert warm_start_section.tiles(rows) == []


def test_steps_are_read_in_order_and_cut_lines_are_told_of(tmp_path):
  lines = [json.dumps(row(step, 3.0 - step)) for step in (2, 1)]
  text = "\n".join([*lines, '{"step": 3, "lo'])
  (tmp_path / "warm_start.jsonl").write_text(text)
  notes = []
  rows = warm_start_section.read(tmp_path, notes)
  assert [r["loss"] for r in rows] == [2.0, 1.0]
  assert notes == ["warm_start.jsonl: unreadable lines left out: 1."]


def test_a_loss_of_pairs_is_one_a_pair():
  (tile,) = warm_start_section.tiles([row(1, 0.5)])
  assert tile == ("Warm start", "0.5 → 0.5", "nats a token, 1 steps")
  (tile,) = warm_start_section.tiles([{**row(1, 0.5), "margin": 0.1}])
  assert tile[2] == "nats a pair, 1 steps"


@pytest.mark.process
def test_the_curve_falls_with_the_loss(tmp_path, browse):
  rows = [row(step, 4.0 / step) for step in range(1, 5)]
  rows[3]["eval/loss"] = 2.0
  (tmp_path / "config.json").write_text('{"rounds": 0}')
  lines = [json.dumps(row) for row in rows]
  (tmp_path / "warm_start.jsonl").write_text("\n".join(lines))
  page = browse(report_page.write(tmp_path))
  # Without rounds it has no metrics to miss.
  assert "metrics.jsonl is missing" not in " ".join(page.text)
  raw, smooth = (
    [tuple(map(float, pair.split(","))) for pair in line["points"].split()]
    for tag, line in page.elements
    if tag == "polyline"
  )
  assert len(raw) == len(smooth) == 4
  # From left to right, in equal steps; down is more on a screen, and the
  # largest loss touches the top.
  steps = [b[0] - a[0] for a, b in itertools.pairwise(raw)]
  assert steps == pytest.approx([steps[0]] * 3, abs=0.2)
  assert raw[0][1] == 12.0
  assert [y for _, y in raw] == sorted(y for _, y in raw)
  # 4, 2, 4/3 and 1 nats: of the 3 between the ends the first step takes 2.
  falls = [(y - raw[0][1]) / (raw[3][1] - raw[0][1]) for _, y in raw]
  assert falls == pytest.approx([0, 2 / 3, 8 / 9, 1], abs=0.001)
  # On held-out rows the last step is as good as the second one.
  (dot,) = page.having("class", "dot")
  at = float(dot["cx"]), float(dot["cy"])
  assert at == pytest.approx((raw[3][0], raw[1][1]), abs=0.1)


def test_skipped_steps_are_counted_and_not_drawn():
  rows = [row(1, 2.0), row(2, None, skipped=1.0), row(3, 1.0)]
  section = warm_start_section.section(rows)
  assert section is not None
  told = "3 steps, 1 skipped as not finite, 300 tokens in 2 s."
  assert section["caption"].endswith(told)
  assert section["points"] == [[1, 2.0], [3, 1.0]]
  assert warm_start_section.tiles(rows) == [
    (
      "Warm start",
      "2 → 1",
      "nats a token, 3 steps, 1 skipped as not finite",
    )
  ]


def test_a_warm_start_that_was_never_finite_has_no_curve():
  rows = [row(1, None, skipped=1.0)]
  section = warm_start_section.section(rows)
  assert section is not None
  assert section["points"] == []
  assert warm_start_section.tiles(rows)[0][1] == "–"
