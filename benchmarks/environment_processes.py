"""The price of a turn, by where an environment or its tool runs.

  python -m benchmarks.environment_processes [--episodes=20]

A game and two kinds of tools, each in the process of the run and elsewhere. An
episode is 20 turns at most. Medians of the milliseconds of a start and of a
turn, one episode after the other, the first of each way left out, as it imports
packages; then turns per second of 16 episodes at once. A run's own process, in
which all of these meet, does nothing else here.

  game            guess-a-number, played by its oracle, in a thread
  Python tool     one call a turn, of `1 + 1`
  sandbox a call  the same, in a new sandbox each time: without a state
  MCP             one call a turn, of a server written with the package mcp

A second table has the whole way of a turn: an engine answers the game at once
and always alike, a chat template encodes, and the run keeps its records. A
start is all up to the first request of the engine.

  as an environment  the run plays, and calls the game
  through HTTP       an agent plays, in the process of the run, and asks the
                     run's OpenAI API
  by a program       the same, a process an episode, on http.client alone

Writes benchmarks/results/environment_processes.json.
"""

import asyncio
import collections
import dataclasses
import itertools
import pathlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from absl import app
from absl import flags as absl_flags

from benchmarks import episodes, machine
from envs import agents, base, rows, workers
from envs.offload import http
from envs.rewards import rewards
from envs.sandbox import sandbox
from envs.suites import textarena
from envs.tools import mcp, python_tool, tool_environment
from launch.gateway import agent_server
from models.chat import word_chat
from rl.agents import agent_player
from rl.audit import event_log
from rl.engine import contract
from rl.pools import router
from rl.rollout import episode, grading, group_rollout
from rl.testing import scripted_engine

_EPISODES = absl_flags.DEFINE_integer("episodes", 20, "Episodes of a way.")

_TURNS, _AT_ONCE = 20, 16
_SERVER = (
  pathlib.Path(__file__).parents[1] / "tests/envs/examples/shop_server.py"
)


class SandboxACall:
  """Python in a sandbox that is new for each call, as a toolbox."""

  async def open(self) -> "SandboxACall":
    """Returns itself: there is nothing to keep."""
    return self

  schemas: Sequence[dict[str, Any]] = (
    {"type": "function", "function": {"name": "python"}},
  )

  async def call(self, asked: base.ToolCall) -> tuple[str, bool]:
    """Returns what the code prints."""
    done = await sandbox.Sandbox().run("print(1 + 1)")
    return done.stdout, done.status != "ok"

  async def close(self) -> None:
    """Does nothing."""


def _questions() -> list[dict[str, str]]:
  return [{"prompt": "Compute."}] * 8


def _tools(toolbox: Any) -> base.Source:
  return tool_environment.ToolEnvironment(
    toolboxes=(toolbox,),
    rows=rows.Rows(data=_questions),
    max_turns=_TURNS,
  )


def _elsewhere(source: base.Source) -> base.Source:
  return workers.Processes(source=source, processes=2, sessions=_AT_ONCE)


def ways() -> dict[str, tuple[base.Source, base.Message | None]]:
  """Returns each source, and the answer to all of its turns; None: oracle."""
  game, python = textarena.GuessTheNumber(), _tools(python_tool.Python())
  add = base.calling("python", code="1 + 1")
  server = mcp.McpServer(command=(sys.executable, str(_SERVER)))
  shared = dataclasses.replace(server, shared=True)
  return {
    "game": (game, None),
    "game, in a worker": (_elsewhere(game), None),
    "Python tool": (python, add),
    "sandbox a call": (_tools(SandboxACall()), add),
    "MCP, a server an episode": (_tools(server), base.calling("total")),
    "MCP, one server for all": (_tools(shared), base.calling("total")),
  }


async def play(
  source: base.Source, index: int, answer: base.Message | None
) -> episodes.Played:
  """Plays one episode, by the oracle if there is no answer to all turns."""

  def say(
    source: base.Source, task: base.Task, messages: Sequence[base.Message]
  ) -> base.Message:
    return answer or episodes.own_answer(source, task, messages)

  return await episodes.play(source, index, say)


async def measure(
  source: base.Source, answer: base.Message | None, count: int
) -> dict[str, float]:
  """Returns the row of one way."""
  await play(source, 0, answer)
  played = [await play(source, i, answer) for i in range(count)]
  began = time.perf_counter()
  together = await asyncio.gather(
    *(play(source, i, answer) for i in range(_AT_ONCE))
  )
  seconds = time.perf_counter() - began
  return {
    "start_ms": statistics.median(one.start_ms for one in played),
    "turn_ms": statistics.median(ms for one in played for ms in one.step_ms),
    "turns_per_s": sum(len(one.step_ms) for one in together) / seconds,
  }


# The whole way of a turn.

_GAME = textarena.GuessTheNumber(turns=_TURNS)
_PROGRAM = f"""
import http.client, json, os, urllib.parse
url = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
server = http.client.HTTPConnection(url.hostname, url.port)
said = [{{"role": "user", "content": "guess"}}]
for _ in range({_TURNS}):
  body = json.dumps({{"model": "any", "messages": said}})
  path = url.path + "/chat/completions"
  server.request("POST", path, body, {{"content-type": "application/json"}})
  answer = json.loads(server.getresponse().read())["choices"][0]["message"]
  said += [answer, {{"role": "user", "content": "higher"}}]
print(json.dumps({{"reward": 0}}))
"""


@dataclasses.dataclass(frozen=True)
class OverHttp:
  """A source whose agent plays the game, asking for its answers over HTTP."""

  name: str = _GAME.name
  task = _GAME.task

  def __call__(self, task: base.Task) -> Any:
    """Returns the agent."""
    return _Agent(task)


class _Agent:
  def __init__(self, task: base.Task):
    self._environment = _GAME(task)

  async def run(self, endpoint: base.Endpoint) -> base.AgentResult:
    connections = http.Connections(60.0)
    messages = list(await self._environment.start())
    try:
      while True:
        asked = [{"role": m.role, "content": m.content} for m in messages]
        request = {"model": "any", "messages": asked}
        text = await connections.complete(endpoint.openai_url, request, "")
        answer = base.Message("assistant", text)
        step = await self._environment.step(answer)
        messages += [answer, *step.messages]
        if step.done:
          return base.AgentResult(step.reward)
    finally:
      await connections.close()

  async def close(self) -> None:
    await self._environment.close()


def whole_ways() -> dict[str, Any]:
  """Returns the sources that a run plays from end to end."""
  program = (sys.executable, "-S", "-c", _PROGRAM)
  return {
    "as an environment": _GAME,
    "through HTTP": OverHttp(),
    "by a program": agents.OpenAI(command=program, name=_GAME.name),
  }


async def measure_whole(source: Any, count: int) -> dict[str, float]:
  """Returns the row of one way that a run plays from end to end."""
  chat = word_chat.WordChat(tuple(_GAME.words))
  guess = next(iter(chat.open([base.Message("user", "1")])))
  asked_s: dict[str, list[float]] = collections.defaultdict(list)

  def answer(request: contract.DecodeRequest) -> Sequence[int]:
    asked_s[request.session].append(time.perf_counter())
    return guess, word_chat.END

  log = event_log.EventLog()
  routed = router.Router([scripted_engine.ScriptedEngine(answer)], log=log)
  plays = agent_player.AgentPlayer(routed, chat, agent_server.listen)
  player = group_rollout.Player(
    source=source,
    router=routed,
    chat=chat,
    graders=grading.Graders(rewards.Outcome()),
    limits=group_rollout.Rollout(
      max_turns=_TURNS, turn_tokens=2, max_tokens=32 * _TURNS
    ),
    log=log,
    agents=plays,
  )

  async def one(index: int) -> list[float]:
    """Returns the seconds from the start of an episode to each request."""
    task, began = source.task(index, "train"), time.perf_counter()
    alone = episode.Episode(task, index, 0, 0)
    played = await player.play_alone(alone)
    assert not played.fault, played.fault
    return [asked - began for asked in asked_s[alone.name]]

  try:
    await one(0)
    played = [await one(1 + i) for i in range(count)]
    began = time.perf_counter()
    together = await asyncio.gather(
      *map(one, range(count + 1, count + 1 + _AT_ONCE))
    )
    seconds = time.perf_counter() - began
  finally:
    await plays.close()
  return {
    "start_ms": statistics.median(1000 * times[0] for times in played),
    "turn_ms": statistics.median(
      1000 * (after - before)
      for times in played
      for before, after in itertools.pairwise(times)
    ),
    "turns_per_s": sum(map(len, together)) / seconds,
  }


def main(_: list[str]) -> None:
  """Measures all, prints a line for each, and keeps the result."""
  found = []
  for name, (source, answer) in ways().items():
    row = asyncio.run(measure(source, answer, _EPISODES.value))
    found.append({"name": name, **row})
    print(found[-1], flush=True)
  whole = []
  for name, source in whole_ways().items():
    row = asyncio.run(measure_whole(source, _EPISODES.value))
    whole.append({"name": name, **row})
    print(whole[-1], flush=True)
  machine.keep(
    "environment_processes",
    episodes=_EPISODES.value,
    rows=found,
    whole=whole,
  )


if __name__ == "__main__":
  app.run(main)
