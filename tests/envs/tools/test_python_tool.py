"""Python as a tool: whole episodes, and ways out of its sandbox."""

import asyncio
import dataclasses
import os
import pickle
import secrets
import socket

import pytest

from envs import base
from envs.rewards import rewards
from envs.sandbox import bubblewrap, sandbox
from envs.tools import python_tool, tool_environment
from rl.data import trajectory
from tests.envs.examples import powers
from tests.helpers import sandbox_escapes, scripted_chats

pytestmark = pytest.mark.process

BOX = sandbox.Sandbox(
  wall_s=2, cpu_s=2, memory_mib=128, disk_mib=4, processes=6, output_kib=16
)


def code(text):
  return base.calling("python", code=text)


def results(*texts, limits=BOX):
  """Returns the (text, is_error) of calls in one episode."""

  async def call_all():
    opened = await python_tool.Python(limits=limits).open()
    try:
      return [await opened.call(code(text).tool_calls[0]) for text in texts]
    finally:
      await opened.close()

  return asyncio.run(call_all())


@pytest.fixture(scope="module", autouse=True)
def _sandbox_exists():
  try:
    results("1")
  except bubblewrap.SandboxError as error:
    pytest.skip(str(error))


def test_an_episode_of_the_guide_is_won_by_computing():
  task = powers.POWERS.task(0, "train")
  number = powers.questions()[task.seed]["prompt"].split()[2]
  played, text, shown = scripted_chats.play(
    powers.POWERS,
    code(f"n = {number}\nprint(n)"),
    code("pow(n, n, 1009)"),
    scripted_chats.say(f"It is {task.answer}."),
    task=task,
  )
  assert played.status is trajectory.Status.COMPLETED, played.fault
  said = [m.content for m in text.messages if m.role == "tool"]
  assert said == [number, task.answer]
  assert played.metrics == {"tool_calls": 2, "tool_errors": 0}
  assert "Variables, imports and files" in shown
  (grade,) = asyncio.run(rewards.NumericMatch()(task, [text]))
  assert grade.value == 1.0


def test_a_wrong_call_or_code_that_fails_is_told_and_changes_nothing():
  async def call_all():
    opened = await python_tool.Python(limits=BOX).open()
    call = base.ToolCall
    try:
      return [
        await opened.call(call("python", '{"code": "x = 1"}')),
        await opened.call(call("python", '{"source": "x = 2"}')),
        await opened.call(call("python", "not JSON")),
        await opened.call(call("python", '{"code": "x / 0"}')),
        await opened.call(call("python", '{"code": "x"}')),
      ]
    finally:
      await opened.close()

  first, unnamed, junk, failed, last = asyncio.run(call_all())
  assert first == ("", False)
  assert unnamed[1]
  assert unnamed[0].startswith("error: python: code: Field required")
  assert junk[1]
  assert failed[1]
  assert failed[0].endswith("ZeroDivisionError: division by zero")
  assert last == ("1", False)


@pytest.mark.parametrize(
  ("text", "reason"),
  [
    ("print('begun')\nwhile True: pass", "stopped after 2 s of one call"),
    ("print('x' * 20000)", "stopped after 16 KiB of output"),
    ("import os; os._exit(9)", "the interpreter ended with exit code 9"),
  ],
)
def test_an_overrun_is_told_and_the_next_call_begins_anew(text, reason):
  first, second = results(f"x = 1\n{text}", "'x' in globals()")
  assert first[1]
  assert reason in first[0]
  assert first[0].endswith("All variables are lost.")
  assert second == ("False", False)


def test_ways_out_are_closed_to_the_tool(tmp_path, monkeypatch):
  secret = secrets.token_hex(16)
  (tmp_path / "secret").write_text(secret)
  monkeypatch.setenv("SECRET", secret)
  with socket.create_server(("127.0.0.1", 0)) as server:
    server.setblocking(False)
    host = {
      "home": str(tmp_path),
      "secret": str(tmp_path / "secret"),
      "canary": str(tmp_path / "secret"),
      "victim": os.getpid(),
      "parent": os.getppid(),
      "ipv4": server.getsockname()[1],
    }
    names = (
      "home",
      "temporary files",
      "proc of another",
      "environment",
      "ipv4",
      "symlink",
      "kill of the parent",
      "memory of another",
      "unshare",
      "count of processes",
      "memory",
    )
    said = results(
      *(
        sandbox_escapes.program(sandbox_escapes.ESCAPES[name], host)
        + 'print("tried")'
        for name in names
      )
    )
    with pytest.raises(BlockingIOError):
      server.accept()
  for name, (text, _) in zip(names, said, strict=True):
    assert "tried" in text, name
    assert "ESCAPED" not in text, name
    assert secret not in text, name
  assert (tmp_path / "secret").read_text() == secret


def test_a_name_that_two_tools_have_is_a_fault():
  class Other:
    def reset(self) -> str:
      return "on"

    def python(self) -> str:
      """Plays a snake."""
      return "hiss"

  source = tool_environment.ToolEnvironment(
    make=Other, toolboxes=(python_tool.Python(limits=BOX),)
  )
  played, _, _ = scripted_chats.play(source)
  assert played.status is trajectory.Status.ENV_FAULT
  assert "two tools have the name python" in played.fault


def test_a_tool_that_is_not_there_is_told_with_all_that_are():
  played, text, _ = scripted_chats.play(
    powers.POWERS, base.calling("perl"), scripted_chats.say("0")
  )
  assert played.metrics == {"tool_calls": 1, "tool_errors": 1}
  assert text.messages[3].content == (
    "error: perl: no such tool; there are python"
  )


def test_it_is_a_setting():
  copy = pickle.loads(pickle.dumps(powers.POWERS))
  assert (copy, hash(copy)) == (powers.POWERS, hash(powers.POWERS))


def test_without_bubblewrap_a_run_does_not_start(monkeypatch, tmp_path):
  monkeypatch.setenv("PATH", str(tmp_path))
  with pytest.raises(ValueError, match="apt-get install bubblewrap"):
    powers.POWERS.validate()


def test_the_example_runs_as_its_docstring_says():
  powers.get_config().validate()


def test_an_environment_without_a_class_needs_tools_and_rows():
  with pytest.raises(ValueError, match="make=none needs toolboxes"):
    tool_environment.ToolEnvironment(toolboxes=(python_tool.Python(),))
  with pytest.raises(ValueError, match="make=none needs toolboxes"):
    dataclasses.replace(powers.POWERS, toolboxes=())
