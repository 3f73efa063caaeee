"""Frozen lake: gymnasium's FrozenLake-v1 on random maps, shown once as text.

s f f h  f f h f  f f f f  h f f g  r0 c0 -> down -> r1 c0 -> ... -> goal
"""

import collections
import dataclasses
import random
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from envs import base, threads

_ACTIONS = ("left", "down", "right", "up")  # in gymnasium's numbering
_MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
_POSITION = re.compile(r"r(\d+) c(\d+)$")

# One map in five, by its hash, is for evaluation.
_EVAL_EVERY = 5
_MAX_SEEDS = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrozenLake:
  """Walk from the start to the goal and avoid the holes.

  The first message is the map, row by row, and the position; every reply is
  the new position. Anything but a direction is `invalid` and costs a turn.
  The reward is 1 at the goal and 0 otherwise.

  A hash of the map decides its split, so the splits share no map.

  Attributes:
    size: rows and columns of the map.
    frozen_probability: that a cell between start and goal is not a hole; maps
      without a path to the goal are drawn again.
    slippery: two of three moves go sideways.
    turns: answers before the episode is lost.
  """

  size: int = 4
  frozen_probability: float = 0.8
  slippery: bool = False
  turns: int = 10

  def __post_init__(self) -> None:
    if self.size < 2 or self.turns < 1:
      raise ValueError(
        f"size={self.size}, turns={self.turns}: give size >= 2, turns >= 1"
      )
    if not 0.5 <= self.frozen_probability < 1:
      raise ValueError(
        f"frozen_probability={self.frozen_probability}: must be in [0.5, 1);"
        " below it few maps have a path, and at 1 there is only one map"
      )

  @property
  def name(self) -> str:
    """Short name: the first part of every task id."""
    return "frozen_lake"

  @property
  def words(self) -> Sequence[str]:
    """Every word of the lake's messages and answers."""
    cells = ("s", "f", "h", "g")
    places = [f"{axis}{i}" for axis in "rc" for i in range(self.size)]
    return (*cells, *places, *_ACTIONS, "invalid", "goal", "hole", "lost")

  def task(self, index: int, split: base.Split) -> base.Task:
    """Returns a task; its seed is the first one whose map is of the split.

    Takes about 0.05 ms for training, 0.2 ms for evaluation (4 x 4 cells).

    Raises:
      ValueError: no map of this size and probability is of the split.
    """
    for attempt in range(_MAX_SEEDS):
      seed = zlib.crc32(f"{split}/{index}/{attempt}".encode())
      if _split(self.map(seed)) == split:
        return base.Task(f"{self.name}/{split}/{index}", index, split, seed)
    raise ValueError(
      f"none of {_MAX_SEEDS} maps of size={self.size} with"
      f" frozen_probability={self.frozen_probability} is for {split};"
      " use larger or less frozen ones"
    )

  def map(self, seed: int) -> Sequence[str]:
    """Returns the rows of a map as gymnasium writes them, such as "SFFH"."""
    # Not at the top: a run without this source needs no gymnasium.
    from gymnasium.envs.toy_text import frozen_lake

    return frozen_lake.generate_random_map(
      self.size, self.frozen_probability, seed
    )

  def __call__(self, task: base.Task) -> "_Lake":
    """Returns a fresh lake."""
    return _Lake(self, task.seed)

  def oracle(self, task: base.Task, messages: Sequence[base.Message]) -> str:
    """Returns the first move of a shortest path to the goal."""
    cells = _cells(messages, self.size)
    return _first_move(cells, _position(messages))

  def explore(
    self, task: base.Task, messages: Sequence[base.Message], seed: int
  ) -> str:
    """Returns a random direction, even into a hole."""
    return random.Random(seed).choice(_ACTIONS)


class _Lake:
  """One walk: gymnasium's replies in the words of the source."""

  def __init__(self, source: FrozenLake, seed: int):
    self._source = source
    self._seed = seed
    self._num_answers = 0
    self._state = 0
    self._env: Any = None

  async def start(self) -> Sequence[base.Message]:
    rows = await threads.call(self._reset)
    return [_say(*"".join(rows).lower(), self._place())]

  async def step(self, answer: base.Message) -> base.Step:
    self._num_answers += 1
    word = answer.content.strip()
    if word not in _ACTIONS:
      return self._reply("invalid", self._place())
    reward, terminated = await threads.call(self._move, _ACTIONS.index(word))
    if terminated:
      end = "goal" if reward == 1 else "hole"
      return base.Step([_say(end)], float(reward), True)
    return self._reply(self._place())

  async def close(self) -> None:
    self._env = None

  def _reset(self) -> Sequence[str]:
    import gymnasium

    rows = self._source.map(self._seed)
    self._env = gymnasium.make(
      "FrozenLake-v1",
      desc=rows,
      is_slippery=self._source.slippery,
      max_episode_steps=self._source.turns,
    )
    self._state, _ = self._env.reset(seed=self._seed)
    return rows

  def _move(self, action: int) -> tuple[float, bool]:
    self._state, reward, terminated, _, _ = self._env.step(action)
    return reward, terminated

  def _place(self) -> str:
    row, column = divmod(self._state, self._source.size)
    return f"r{row} c{column}"

  def _reply(self, *words: str) -> base.Step:
    if self._num_answers == self._source.turns:
      return base.Step([_say("lost")], 0.0, True)
    return base.Step([_say(*words)], 0.0, False)


def _say(*words: str) -> base.Message:
  return base.Message("user", " ".join(words))


def _split(rows: Sequence[str]) -> base.Split:
  digest = zlib.crc32("".join(rows).encode())
  return "eval" if digest % _EVAL_EVERY == 0 else "train"


def _cells(
  messages: Sequence[base.Message], size: int
) -> dict[tuple[int, int], str]:
  """Returns the cell at each (row, column) of the first observation."""
  first = next(m.content for m in messages if m.role == "user")
  cells = first.split()[: size * size]
  return {divmod(i, size): cell for i, cell in enumerate(cells)}


def _position(messages: Sequence[base.Message]) -> tuple[int, int]:
  """Returns (row, column) of the last observation."""
  match = _POSITION.search(messages[-1].content)
  if match is None:
    raise ValueError(
      f"{messages[-1].content!r} must end with a position such as r0 c0"
    )
  return int(match[1]), int(match[2])


def _first_move(
  cells: dict[tuple[int, int], str], start: tuple[int, int]
) -> str:
  """Returns the first move of a shortest path, by breadth-first search."""
  firsts = {start: ""}
  queue = collections.deque([start])
  while queue:
    here = queue.popleft()
    if cells[here] == "g":
      return firsts[here]
    for move, there in _neighbours(here):
      if there not in firsts and cells.get(there, "h") != "h":
        firsts[there] = firsts[here] or move
        queue.append(there)
  raise ValueError(f"no path to the goal from {start}")


def _neighbours(
  here: tuple[int, int],
) -> Iterator[tuple[str, tuple[int, int]]]:
  for move, (down, right) in _MOVES.items():
    yield move, (here[0] + down, here[1] + right)
