"""launch.worker without a run that tells it what to do."""

import io

import pytest

from tests.helpers import commands


class Terminal(io.StringIO):
  def isatty(self):
    return True

  def readline(self, size=-1, /):
    raise AssertionError("nobody would type a line")


@pytest.mark.parametrize(
  "stdin",
  [Terminal(), io.StringIO(), io.StringIO("runs/first\n")],
  ids=["terminal", "empty", "words"],
)
def test_a_worker_that_no_run_has_started_asks_for_one(monkeypatch, stdin):
  monkeypatch.setattr("sys.stdin", stdin)
  done = commands.run("launch.worker")
  assert done.returncode == 2
  assert done.stderr.startswith(
    "error: --join is missing; name the directory of a run"
  )
  assert "TM-C02" in done.stderr
