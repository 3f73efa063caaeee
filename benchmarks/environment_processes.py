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

Writes benchmarks/results/environment_processes.json.
"""

import asyncio
import dataclasses
import pathlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from absl import app
from absl import flags as absl_flags

from benchmarks import machine
from envs import base, rows, workers
from envs.sandbox import sandbox
from envs.suites import textarena
from envs.tools import mcp, python_tool, tool_environment

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
) -> tuple[float, list[float]]:
  """Plays one episode; returns the ms of its start and of each turn."""
  task = source.task(index, "train")
  environment = source(task)
  try:
    began = time.perf_counter()
    messages = list(await environment.start())
    start_ms = 1000 * (time.perf_counter() - began)
    turns_ms, done = [], False
    while not done:
      said = answer or base.Message(
        "assistant", str(base.demonstrator(source).oracle(task, messages))
      )
      began = time.perf_counter()
      step = await environment.step(said)
      turns_ms.append(1000 * (time.perf_counter() - began))
      messages += [said, *step.messages]
      done = step.done
  finally:
    await environment.close()
  return start_ms, turns_ms


async def measure(
  source: base.Source, answer: base.Message | None, episodes: int
) -> dict[str, float]:
  """Returns the row of one way."""
  await play(source, 0, answer)
  played = [await play(source, i, answer) for i in range(episodes)]
  began = time.perf_counter()
  together = await asyncio.gather(
    *(play(source, i, answer) for i in range(_AT_ONCE))
  )
  seconds = time.perf_counter() - began
  return {
    "start_ms": statistics.median(start for start, _ in played),
    "turn_ms": statistics.median(ms for _, turns in played for ms in turns),
    "turns_per_s": sum(len(turns) for _, turns in together) / seconds,
  }


def main(_: list[str]) -> None:
  """Measures all, prints a line for each, and keeps the result."""
  found = []
  for name, (source, answer) in ways().items():
    row = asyncio.run(measure(source, answer, _EPISODES.value))
    found.append({"name": name, **row})
    print(found[-1], flush=True)
  machine.keep("environment_processes", episodes=_EPISODES.value, rows=found)


if __name__ == "__main__":
  app.run(main)
