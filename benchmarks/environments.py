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
import importlib.metadata
import io
import os
import socket
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from absl import app
from absl import flags as absl_flags

from benchmarks import episodes as episodes_lib
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


def package_sources() -> Iterator[tuple[base.Source, str]]:
  """Yields each source with its package, but for those of reasoning-gym."""
  yield textarena.GuessTheNumber(), "textarena"
  for game in _SOLO:
    yield textarena.SinglePlayer(game=game, turns=70), "textarena"
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

  async def run() -> list[episodes_lib.Played]:
    # The first episode imports the package and reads the data.
    for source in sources:
      await episodes_lib.play(source, episodes, episodes_lib.own_answer)
    return [
      await episodes_lib.play(source, i, episodes_lib.own_answer)
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
