import asyncio
import contextlib
import json
import os
import pathlib
import socket
import struct
import subprocess
import sys
import time

import pytest
from websockets.asyncio import server as ws_server

from envs.rewards import rewards
from envs.suites import openenv
from models.chat import byte_chat
from rl.data import trajectory
from rl.rollout import environment_checks, environment_trial, episode


def said(text, reward=None, done=False):
  """Returns an observation as OpenEnv's server writes it."""
  data = {"observation": {"text": text}, "reward": reward, "done": done}
  return json.dumps({"type": "observation", "data": data})


def error(code, **data):
  return json.dumps(
    {"type": "error", "data": {"code": code, "message": "no", **data}}
  )


class Server:
  """A small OpenEnv server: say the last digit of the seed.

  `fault` makes a reply that is wrong in place of that to a step.
  """

  def __init__(self, fault=None):
    self.fault = fault
    self.sessions = 0
    self.closed = 0

  async def play(self, socket):
    self.sessions += 1
    try:
      await self._play(socket)
    finally:
      self.sessions -= 1

  async def _play(self, socket):
    number = None
    async for received in socket:
      message = json.loads(received)
      if message["type"] == "close":
        self.closed += 1
        return
      if message["type"] == "reset":
        number = str(message["data"]["seed"] % 10)
        await socket.send(said("which digit?"))
      elif self.fault is not None:
        await self.fault(socket)
      elif set(message["data"]) != {"message"}:
        wrong = {"loc": ["message"], "msg": "Field required"}
        await socket.send(error("VALIDATION_ERROR", errors=[wrong]))
      else:
        right = message["data"]["message"] == number
        await socket.send(said("over", float(right), True))


def played(server, answer, **settings):
  """Returns the episodes of task 0, answered as asked, in two sessions."""

  async def respond(question):
    return answer

  async def run():
    async with ws_server.serve(server.play, "127.0.0.1", 0) as listening:
      port = listening.sockets[0].getsockname()[1]
      source = openenv.OpenEnv(
        **{
          "url": f"http://127.0.0.1:{port}",
          "action": "message",
          "observation": "text",
          **settings,
        }
      )
      trial = environment_trial.Trial(
        source=source,
        reward=rewards.Outcome(),
        limits=episode.Limits(),
        chat=byte_chat.ByteChat(),
        respond=respond,
      )
      trial = environment_checks.any_text(trial)
      task = source.task(0, "train")
      both = [environment_trial.play(trial, task) for _ in range(2)]
      done = await asyncio.gather(*both)
      while server.sessions:  # pytest's timeout is the deadline.
        await asyncio.sleep(0.01)
      return source.url, done

  return asyncio.run(run())


def test_an_episode_is_a_session_of_the_server():
  server = Server()
  _, both = played(server, "0", system="Answer with a digit.")
  for one in both:
    texts = [m.content for m in one.transcript.messages]
    assert texts == ["Answer with a digit.", "which digit?", "0", "over"]
    assert one.trajectory.reward == 1.0
    assert one.trajectory.status is trajectory.Status.COMPLETED
    assert not one.closing
  assert server.closed == 2


def test_an_answer_may_be_the_json_of_an_action():
  _, (one, _) = played(Server(), '{"message": "0"}', action="")
  assert one.trajectory.reward == 1.0


@pytest.mark.parametrize(
  ("answer", "told"),
  [
    ("the digit is 0", "Error: the action is not JSON: Expecting value"),
    ("[0]", "Error: the action is not a JSON object"),
    ('{"digit": 0}', "Error: no message: Field required"),
  ],
)
def test_an_answer_that_is_no_action_is_told_so_and_costs_a_turn(answer, told):
  _, (one, _) = played(Server(), answer, action="", max_turns=3)
  assert one.transcript.messages[-1].content.startswith(told)
  assert one.trajectory.reward == 0.0
  assert one.trajectory.metrics == {"invalid": 3.0}
  assert one.trajectory.status is trajectory.Status.COMPLETED


async def dies(socket):
  socket.transport.abort()


async def hangs(socket):
  await socket.wait_closed()


async def closes_half_way(socket):
  # A text of 256 bytes is announced, and 3 of them come.
  socket.transport.write(b"\x81\x7e\x01\x00abc")
  socket.transport.close()


async def sends_100_mb(socket):
  socket.transport.write(b"\x81\x7f" + struct.pack("!Q", 100 << 20))
  with contextlib.suppress(OSError):
    for _ in range(100):
      socket.transport.write(b"x" * (1 << 20))
      await asyncio.sleep(0)


@pytest.mark.parametrize(
  ("fault", "words"),
  [
    (dies, "step failed"),
    (hangs, "step took over 0.3 s"),
    (closes_half_way, "step failed"),
    (sends_100_mb, "step failed"),
    (lambda s: s.send("hello"), "not of OpenEnv"),
    (lambda s: s.send("[" * 100_000), "not of OpenEnv"),
    (lambda s: s.send('{"type": "observation"}'), "not of OpenEnv"),
    (lambda s: s.send(error("EXECUTION_ERROR")), "EXECUTION_ERROR: no"),
    (lambda s: s.send(said("x").replace("text", "y")), "no field 'text'"),
    (lambda s: s.send(said("x", float("nan"))), "not a finite number"),
  ],
)
def test_a_server_that_fails_is_a_fault_of_its_episode(fault, words):
  server = Server(fault)
  url, both = played(server, "0", reply_s=0.3)
  for one in both:
    assert one.trajectory.status is trajectory.Status.ENV_FAULT
    assert words in one.trajectory.fault
    assert url in one.trajectory.fault or "finite" in words
    assert one.trajectory.reward is None
    assert len(one.trajectory.turns) == 1  # What was sampled is kept.
    assert not one.closing


def test_a_server_that_cannot_be_reached_is_named():
  # No server listens on port 1.
  url, (one, _) = played(Server(), "0", url="http://127.0.0.1:1")
  assert one.trajectory.status is trajectory.Status.ENV_FAULT
  assert f"{url}: connecting failed" in one.trajectory.fault


def test_a_refused_session_is_a_fault_with_the_words_of_the_server():
  class Full(Server):
    async def play(self, socket):
      await socket.send(error("CAPACITY_REACHED"))

  _, (one, _) = played(Full(), "0")
  assert "CAPACITY_REACHED: no" in one.trajectory.fault


@pytest.mark.process
@pytest.mark.skipif("TWINMESH_OPENENV" not in os.environ, reason="make openenv")
def test_a_server_of_the_package_is_played():
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
  file = pathlib.Path(__file__).parents[2] / "helpers" / "openenv_server.py"
  command = [os.environ["TWINMESH_OPENENV"], str(file), str(port)]
  url = f"http://127.0.0.1:{port}"
  with subprocess.Popen(command) as process:
    try:
      while not listens(port):  # pytest's timeout is the deadline.
        assert process.poll() is None
        time.sleep(0.2)
      _, both = played(Server(), "0", url=url)
      assert [one.trajectory.reward for one in both] == [1.0, 1.0]
      assert both[0].transcript.messages[0].content == "which digit?"
      _, (one, _) = played(
        Server(), '{"x": 1}', url=url, action="", max_turns=2
      )
      assert one.trajectory.metrics == {"invalid": 2.0}
      assert "message: Field required" in one.transcript.messages[-1].content
      _, (one, _) = played(Server(), "crash", url=url)
      assert f"{url}: EXECUTION_ERROR: boom" in one.trajectory.fault
    finally:
      process.kill()


def listens(port):
  with socket.socket() as tried:
    return tried.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize(
  ("url", "address"),
  [
    ("http://a:8000", "ws://a:8000/ws"),
    ("https://a.b/env/", "wss://a.b/env/ws"),
    ("ws://a/ws", "ws://a/ws"),
  ],
)
def test_the_socket_is_below_the_servers_address(url, address):
  assert openenv.OpenEnv(url=url).socket_url == address


def test_seeds_of_evaluation_are_not_those_of_training():
  source = openenv.OpenEnv(url="ws://a")
  seeds = [
    [source.task(i, s).seed for i in range(9)] for s in ("train", "eval")
  ]
  assert not {*seeds[0]} & {*seeds[1]}


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"url": "localhost:8000"}, "url='localhost:8000' must begin with http"),
    ({"url": "http://"}, "name a host"),
    ({"url": "ws://a", "reply_s": 0}, "reply_s=0 must be above 0"),
    ({"url": "ws://a", "max_turns": 0}, "max_turns=0 must be above 0"),
    ({"url": "ws://a", "name": "a/b"}, "contain a slash"),
  ],
)
def test_settings_that_cannot_work_are_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    openenv.OpenEnv(**fields)


def test_a_run_without_the_package_is_told_which_extra_to_install(monkeypatch):
  monkeypatch.setitem(sys.modules, "websockets", None)
  with pytest.raises(ValueError, match=r"pip install 'twinmesh\[openenv\]'"):
    openenv.OpenEnv(url="ws://a")
