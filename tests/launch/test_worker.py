"""launch.worker without a run that tells it what to do."""

import asyncio
import io
import types
from typing import Any

import pytest

from launch import worker
from launch.cli import jax_setup
from rl.settings import overrides
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


@pytest.mark.parametrize(
  ("code", "end"),
  [(1000, (0, "the run has let it go")), (1006, (1, "the run is gone"))],
)
def test_a_worker_says_whether_it_was_let_go(monkeypatch, capsys, code, end):
  async def serve(socket, name):
    del socket
    return f"{name} is gone"

  task = types.SimpleNamespace(
    placement=None, build=lambda: types.SimpleNamespace(serve=serve)
  )
  monkeypatch.setattr(overrides, "from_json", lambda data: task)
  monkeypatch.setattr(jax_setup, "prepare", lambda placement: None)
  socket: Any = types.SimpleNamespace(close_code=code)
  status = asyncio.run(worker.work(socket, "{}"))
  assert status == end[0]
  assert end[1] in capsys.readouterr().out
