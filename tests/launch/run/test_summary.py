"""The lines about its metrics that a run ends with."""

import json

import pytest

from launch.run import summary
from tests.helpers import viewed_runs


@pytest.mark.parametrize(
  ("flat", "line"),
  [
    (0, "zero-variance groups: 0 of 8 (0%)"),
    (
      2,
      "zero-variance groups: 2 of 8 (25%); their members did equally well, so "
      "they taught nothing",
    ),
  ],
)
def test_zero_variance_is_explained_where_there_is_any(flat, line, tmp_path):
  row = {"round": 1, "zero_variance_groups": flat, "groups": 8}
  (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(row)}\n")
  lines = []
  summary._log_metrics(tmp_path, lines.append)
  assert lines == [line]


def test_the_report_of_a_run_that_failed_says_why(tmp_path):
  path = viewed_runs.run(tmp_path / "run")
  with (
    pytest.raises(FloatingPointError),
    summary.report_on_failure(path, lambda: None, lambda line: None),
  ):
    raise FloatingPointError("round 4: nan")
  assert '"The run failed: round 4: nan"' in (path / "report.html").read_text()
