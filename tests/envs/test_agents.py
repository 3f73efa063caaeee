"""Programs that are agents: what they are given, and how they may end."""

import asyncio
import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

from envs import agents, base
from envs import rows as rows_lib
from tests.helpers import machine_speed

pytestmark = pytest.mark.process

END = base.Endpoint("http://127.0.0.1:1/sessions/me", "me")


def source(code, **fields):
  return agents.OpenAI(command=(sys.executable, "-Sc", code), **fields)


def run(code, after_s=None, **fields):
  """Runs a program to its end; closes it after so long, if that is given."""

  async def scenario():
    made = source(code, **fields)
    agent = made(made.task(0, "train"))
    try:
      return await asyncio.wait_for(agent.run(END), after_s)
    finally:
      await agent.close()

  return asyncio.run(scenario())


def test_a_program_gets_its_server_and_its_task(tmp_path):
  data = tmp_path / "rows.jsonl"
  data.write_text('{"question": "1+1", "answer": 2}\n')
  code = """
import json, os
task = open(os.environ["TASK_FILE"]).read()
names = "OPENAI_BASE_URL OPENAI_API_KEY ANTHROPIC_BASE_URL ANTHROPIC_API_KEY"
seen = [os.environ[name] for name in names.split()]
print(json.dumps([seen, task]))
print(json.dumps({"reward": 1, "metrics": {"length": len(task)}}))
with open(os.environ["OUT"], "w") as file:
  json.dump([seen, task], file)
"""
  out = tmp_path / "out"
  os.environ["OUT"] = str(out)
  try:
    rows = rows_lib.Rows(data=str(data), eval_data=str(data))
    made = source(code, rows=rows, answer="answer")
    task = made.task(0, "train")
    result = run(code, rows=rows, answer="answer")
  finally:
    del os.environ["OUT"]
  seen, text = json.loads(out.read_text())
  url = "http://127.0.0.1:1/sessions/me"
  assert seen == [f"{url}/v1", "me", url, "me"]
  assert json.loads(text) == {
    "id": task.id,
    "index": 0,
    "split": "train",
    "seed": task.seed,
    "row": {"question": "1+1", "answer": 2},
  }
  assert task.answer == "2"
  assert result == base.AgentResult(1, {"length": len(text)})


@pytest.mark.parametrize("name", ["NO_PROXY", "no_proxy"])
def test_no_proxy_stands_between_a_program_and_its_server(name, monkeypatch):
  monkeypatch.setenv("http_proxy", "http://proxy.example:1")
  monkeypatch.setenv(name, "example.org")
  hosts = "('127.0.0.1', 'example.org')"
  code = f"""
import json, urllib.request
direct = [bool(urllib.request.proxy_bypass(host)) for host in {hosts}]
print(json.dumps({{"reward": sum(direct)}}))
"""
  assert run(code).reward == 2


@pytest.mark.parametrize(
  ("code", "words"),
  [
    ("import sys; sys.exit('no more moves')", "exit code 1: no more moves"),
    ("import os; os.abort()", "was ended by SIGABRT"),
    ("", "must be like"),
    ("print('1.0')", "must be like .* not '1.0'"),
    ("print('{\"reward\": 1}\\nbye')", "not 'bye'"),
    ("print('[' * 10**6)", "must be like"),
    ("import os; os.write(1, b'\\xff\\n')", "must be like"),
    ("print('x' * 10**8); raise ValueError('big')", "ValueError: big"),
  ],
)
def test_a_program_that_fails_says_how(code, words):
  with pytest.raises(agents.AgentFailed, match=f"(?s){words}"):
    run(code)


def test_output_of_a_program_that_others_grade_is_ignored():
  assert run("print('hi')", prints_reward=False) == base.AgentResult(None)


def is_gone(pid):
  try:
    text = pathlib.Path(f"/proc/{pid}/stat").read_text()
  except (FileNotFoundError, ProcessLookupError):
    return True
  return text.rpartition(")")[2].split()[0] == "Z"


LEAVES_A_DAEMON = """
import os, subprocess, sys, time
pids = sys.argv[1]
child = subprocess.Popen([sys.executable, "-Sc", "import time; time.sleep(60)"])
if not os.fork():
  os.setsid()
  if not os.fork():
    with open(pids + ".partial", "w") as file:
      file.write(f"{os.getpid()} {child.pid}")
    os.rename(pids + ".partial", pids)
    time.sleep(60)
  os._exit(0)
while not os.path.exists(pids):
  time.sleep(0.01)
print('{"reward": 0.5}', flush=True)
time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize("ends", ["by itself", "cancelled", "with the run"])
def test_no_process_is_left_of_a_program(ends, tmp_path):
  pids = tmp_path / "pids"
  lasts_s = 0 if ends == "by itself" else 60
  command = (sys.executable, "-Sc", LEAVES_A_DAEMON, str(pids), str(lasts_s))
  made = agents.OpenAI(command=command)

  async def scenario():
    agent = made(made.task(0, "train"))
    running = asyncio.create_task(agent.run(END))
    if ends == "cancelled":
      while not pids.exists():
        await asyncio.sleep(0.01)
      running.cancel()
    await asyncio.wait([running])
    await agent.close()
    return running

  if ends == "with the run":
    run_that_is_killed(command, pids)
  else:
    running = asyncio.run(scenario())
    assert running.cancelled() == (ends == "cancelled")
    if ends == "by itself":
      assert running.result().reward == 0.5
  left = [int(pid) for pid in pids.read_text().split()]
  end = time.monotonic() + machine_speed.scaled(20)
  while not all(map(is_gone, left)) and time.monotonic() < end:
    time.sleep(0.01)
  assert all(map(is_gone, left))


def run_that_is_killed(command, pids):
  """Plays a program in a process that is killed when there are such pids."""
  program = f"""
import asyncio
from envs import agents, base
made = agents.OpenAI(command={command!r})
agent = made(made.task(0, "train"))
asyncio.run(agent.run(base.Endpoint("http://127.0.0.1:1", "me")))
"""
  with subprocess.Popen([sys.executable, "-c", program]) as process:
    while not pids.exists() and process.poll() is None:
      time.sleep(0.01)
    process.kill()


def test_settings_that_cannot_work_are_refused():
  with pytest.raises(ValueError, match=r"command=\(\) is empty"):
    agents.OpenAI(command=())
  with pytest.raises(ValueError, match="no program misspelt is found"):
    agents.OpenAI(command=("misspelt", "x")).validate()
  with pytest.raises(ValueError, match="give rows"):
    agents.OpenAI(command=("true",), answer="answer")
