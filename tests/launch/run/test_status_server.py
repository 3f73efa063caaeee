"""A run tells its state to its owner, also while its event loop is blocked."""

import asyncio
import contextlib
import json
import os
import socket
import stat
import time

import pytest

from launch.run import status_server
from rl.runtime import watchdog as watchdog_lib
from tests.helpers import machine_speed


def asked(run_dir, during=None):
  """Returns what a run with one wait answers while `during` is called."""

  async def run():
    watchdog = watchdog_lib.Watchdog()
    wait = {"owner": "learner", "what": "groups 4..7", "deadline_s": 9.0}
    with (
      status_server.serving(
        run_dir, watchdog, lambda: "round 2 of 5", lambda: ["engine 0"]
      ),
      watchdog.track(**wait),
    ):
      asking = asyncio.to_thread(status_server.ask, run_dir)
      answer = asyncio.create_task(asking)
      await asyncio.sleep(0)
      if during is not None:
        during()
      return await answer

  return asyncio.run(run())


def test_it_tells_phase_and_waits(tmp_path):
  state = asked(tmp_path)
  assert state["doing"] == "round 2 of 5"
  assert state["engines"] == ["engine 0"]
  assert state["pid"] == os.getpid()
  assert state["stack"] == ""
  ((owner, what, waited_s, deadline_s),) = state["waits"]
  assert (owner, what, deadline_s) == ("learner", "groups 4..7", 9.0)
  assert 0 <= waited_s < 9


def test_it_tells_where_the_event_loop_is_blocked(tmp_path):
  def block():
    time.sleep(2 * status_server._BEAT_S)

  assert "in block\n    time.sleep" in asked(tmp_path, block)["stack"]


def test_only_the_owner_of_the_run_can_ask(tmp_path):
  def strangers():
    where = json.loads((tmp_path / status_server.FILE).read_text())
    mode = stat.S_IMODE((tmp_path / status_server.FILE).stat().st_mode)
    assert mode == 0o600
    for said in (b"", b"x" * 31, b"x" * 32, b"\0" * 10_000):
      # A refused key may close the connection before all of it is sent.
      with (
        socket.create_connection(("127.0.0.1", where["port"])) as stream,
        contextlib.suppress(ConnectionError),
      ):
        stream.settimeout(machine_speed.scaled(5))
        stream.sendall(said)
        if len(said) < 32:
          stream.shutdown(socket.SHUT_WR)  # The server waits for the rest.
        assert stream.recv(1) == b""

  assert asked(tmp_path, strangers)["doing"] == "round 2 of 5"


def test_nothing_answers_after_the_end(tmp_path):
  asked(tmp_path)
  assert not (tmp_path / status_server.FILE).exists()
  with pytest.raises(FileNotFoundError):
    status_server.ask(tmp_path)


@pytest.mark.parametrize(
  ("text", "why"),
  [
    ("{", "damaged"),
    ("[]", "damaged"),
    ('{"host": "elsewhere", "pid": 1, "port": 1, "key": ""}', "on elsewhere"),
  ],
)
def test_a_file_that_leads_nowhere_is_named(tmp_path, text, why):
  (tmp_path / status_server.FILE).write_text(text)
  with pytest.raises(ConnectionError, match=why):
    status_server.ask(tmp_path)
