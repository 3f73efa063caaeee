"""Environments that are ready: what an episode of each is, and what it costs.

  python -m benchmarks.environments [--episodes=100]

Plays each source alone, an episode after the other: by its oracle, or by random
moves where it has none, or by the first move that a game for two offers, or by
a short answer that is wrong. Medians of the milliseconds that a
task, a `start` and a `step` take, the last two with the hop to a thread and
back; means of turns and tokens. Tokens are those of an episode, both sides and
without a chat template: words where the source has a list of words, else
characters / 4.

Games for two are played against a random player. reasoning-gym is all of its
datasets, in equal parts: most make a question in less than a millisecond, and
`slowest` names the one whose task takes longest. An environment is offline if
it looked up no address. The licence is that of the package's metadata.

Needs reasoning-gym and bfcl-eval: `make reasoning bfcl`. Writes
benchmarks/results/environments.json.
"""

import asyncio
import contextlib
import dataclasses
import importlib.metadata
import io
import os
import re
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

from absl import app
from absl import flags as absl_flags

from benchmarks import machine
from envs import base
from envs.suites import (
  bfcl,
  gymnasium,
  minigrid,
  reasoning,
  self_play,
  textarena,
)

_EPISODES = absl_flags.DEFINE_integer("episodes", 100, "Episodes of a source.")

_SOLO = (
  "2048-v0-very-easy",
  "FrozenLake-v0",
  "LightsOut-v0",
  "Mastermind-v0",
  "Minesweeper-v0-small",
  "Secretary-v0",
  "Sudoku-v0",
  "ThreeCardMonte-v0",
)
_RANDOM = self_play.RandomPlayer()
_MOVE = re.compile(r"'(\[[^\]]+\])'")  # as games for two offer them


def package_sources() -> Iterator[tuple[base.Source, str]]:
  """Yields each source with its package, but for those of reasoning-gym."""
  yield textarena.GuessTheNumber(), "textarena"
  for game in _SOLO:
    yield textarena.SinglePlayer(game=game), "textarena"
  for game in ("TicTacToe-v0", "KuhnPoker-v0"):
    yield self_play.TwoPlayer(game=game, opponent=_RANDOM), "textarena"
  yield gymnasium.FrozenLake(), "gymnasium"
  yield gymnasium.Taxi(), "gymnasium"
  yield gymnasium.CliffWalking(), "gymnasium"
  yield gymnasium.Blackjack(), "gymnasium"
  for level in ("BabyAI-GoToLocal-v0", "BabyAI-UnlockLocal-v0"):
    yield minigrid.MiniGrid(level=level), "minigrid"
  for category in ("base", "long_context"):
    yield bfcl.MultiTurn(category=category), "bfcl-eval"


@dataclasses.dataclass(frozen=True)
class Played:
  """One episode; times in milliseconds."""

  source: str
  task_ms: float
  start_ms: float
  step_ms: Sequence[float]
  tokens: float
  tools: int


async def play(source: base.Source, index: int) -> Played:
  """Plays one task to its end."""
  began = time.perf_counter()
  task = source.task(index, "train")
  task_ms = 1000 * (time.perf_counter() - began)
  environment = source(task)
  try:
    began = time.perf_counter()
    messages = list(await environment.start())
    start_ms = 1000 * (time.perf_counter() - began)
    step_ms, done = [], False
    while not done:
      answer = _answer(source, task, messages)
      began = time.perf_counter()
      step = await environment.step(answer)
      step_ms.append(1000 * (time.perf_counter() - began))
      messages += [answer, *step.messages]
      done = step.done
  finally:
    await environment.close()
  tokens = sum(_num_tokens(source, message) for message in messages)
  tools = len(getattr(environment, "tools", ()))
  return Played(source.name, task_ms, start_ms, step_ms, tokens, tools)


def _answer(
  source: base.Source, task: base.Task, messages: Sequence[base.Message]
) -> base.Message:
  answer: str | base.Message = "0"
  with contextlib.suppress(ValueError):
    answer = base.demonstrator(source).oracle(task, messages)
  if isinstance(source, textarena.SinglePlayer):
    answer = source.random_answer(task.seed + len(messages))
  elif offered := _MOVE.findall(messages[-1].content):
    answer = offered[0]
  if isinstance(answer, str):
    return base.Message("assistant", answer)
  return answer


def _num_tokens(source: base.Source, message: base.Message) -> float:
  calls = [f"{call.name} {call.arguments}" for call in message.tool_calls]
  text = " ".join([message.content, *calls])
  is_words = isinstance(source, base.WordList)
  return len(text.split()) if is_words else len(text) / 4


@contextlib.contextmanager
def _lookups() -> Iterator[list[Any]]:
  """Refuses to look addresses up, and yields those that were asked for."""
  asked, original = [], socket.getaddrinfo

  def refuse(host: Any, *args: Any, **kwargs: Any) -> Any:
    asked.append(host)
    raise OSError("the benchmark has no network")

  socket.getaddrinfo = refuse
  try:
    yield asked
  finally:
    socket.getaddrinfo = original


def measure(
  name: str, sources: Sequence[base.Source], package: str, episodes: int
) -> dict[str, Any]:
  """Returns the row of one environment, made of one source or several."""

  async def run() -> list[Played]:
    # The first episode imports the package and reads the data.
    for source in sources:
      await play(source, episodes)
    return [
      await play(source, i)
      for source in sources
      for i in range(max(1, episodes // len(sources)))
    ]

  # A few of reasoning-gym's datasets print.
  with _lookups() as asked, contextlib.redirect_stdout(io.StringIO()):
    played = asyncio.run(run())
  metadata = importlib.metadata.metadata(package)
  slowest = max(played, key=lambda episode: episode.task_ms)
  return {
    "name": name,
    "package": f"{package} {metadata['Version']}",
    "licence": next(
      text
      for field in ("License-Expression", "License")
      for text in metadata.get_all(field) or ()
    ),
    "turns": statistics.mean(len(episode.step_ms) for episode in played),
    "tools": max(episode.tools for episode in played),
    "tokens": statistics.mean(episode.tokens for episode in played),
    "task_ms": statistics.median(episode.task_ms for episode in played),
    "start_ms": statistics.median(episode.start_ms for episode in played),
    "step_ms": statistics.median(
      ms for episode in played for ms in episode.step_ms
    ),
    "slowest": f"{slowest.source}: {slowest.task_ms:.0f} ms",
    "offline": not asked,
  }


def reasoning_sources() -> list[base.Source]:
  """Returns a source for each dataset of reasoning-gym."""
  from reasoning_gym import factory  # pyright: ignore[reportMissingImports]

  # Some datasets ask for it, as their questions depend on it.
  os.environ.setdefault("PYTHONHASHSEED", "0")
  names = sorted({*factory.DATASETS} - {"composite"})
  return [reasoning.ReasoningGym(dataset=name) for name in names]


def main(_: list[str]) -> None:
  """Measures all, prints a line for each, and keeps the result."""
  episodes = _EPISODES.value
  rows = []
  for source, package in package_sources():
    rows.append(measure(source.name, [source], package, episodes))
    print(rows[-1], flush=True)
  everything = reasoning_sources()
  rows.append(
    measure(
      f"reasoning, {len(everything)} datasets",
      everything,
      "reasoning-gym",
      max(episodes, 3 * len(everything)),
    )
  )
  print(rows[-1])
  machine.keep("environments", episodes=episodes, rows=rows)


if __name__ == "__main__":
  app.run(main)
