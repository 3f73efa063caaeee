"""MiniGrid and BabyAI in words: what lies ahead, in steps.

Mission: go to the red ball
You see a wall 3 ahead, a red ball 2 ahead and 1 left. -> forward -> ...
"""

import copy
import dataclasses
import difflib
import functools
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from envs import base, extras, threads

_ACTIONS = ("left", "right", "forward", "pickup", "drop", "toggle", "done")
_UNSEEN = ("unseen", "empty", "floor", "wall", "agent")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MiniGrid:
  """A mission in a grid of rooms (minigrid, MIT), described in words.

  The first message has the mission and the actions. Each message says what the
  agent sees, a window of 7 x 7 cells ahead of it, and what it carries. An
  answer is the name of an action; any other is told so, costs a turn and counts
  as `invalid`. The reward is 1 for a mission that is accomplished and 0
  otherwise; the package's, which shrinks with time, is the metric `score`.

  A hash of mission and grid decides the split, so the splits share none.

  Attributes:
    level: id in gymnasium's registry, such as BabyAI-GoToLocal-v0 or
      MiniGrid-DoorKey-5x5-v0.
    turns: answers before the mission has failed; the package has a limit of its
      own for each level.
  """

  level: str = "BabyAI-GoToLocal-v0"
  turns: int = 64

  def __post_init__(self) -> None:
    if self.turns < 1:
      raise ValueError(f"turns={self.turns}: give at least 1")
    _check_level(self.level)

  @property
  def name(self) -> str:
    """Short name: the first part of every task id."""
    return self.level.lower()

  def task(self, index: int, split: base.Split) -> base.Task:
    """Returns a task; makes grids until one is of the split.

    Takes some milliseconds, and more for levels of many rooms.

    Raises:
      ValueError: no grid is.
    """
    seed = base.first_seed(self.level, split, index, self._beginning)
    return base.Task(f"{self.name}/{split}/{index}", index, split, seed)

  def __call__(self, task: base.Task) -> "_Mission":
    """Returns a fresh mission."""
    return _Mission(self, task.seed)

  def oracle(self, task: base.Task, messages: Sequence[base.Message]) -> str:
    """Returns the next action of BabyAI's bot, which knows the whole grid.

    Raises:
      ValueError: the level is not of BabyAI, or the bot finds no way.
    """
    from minigrid.utils import baby_ai_bot

    grid = _fresh(self.level, task.seed)
    if not hasattr(grid, "instrs"):
      raise ValueError(
        f"level={self.level}: only levels of BabyAI have demonstrations; use "
        "warm_start=none"
      )
    try:
      bot = baby_ai_bot.BabyAIBot(grid)
      action: Any = bot.replan()
      for said in messages:
        if said.role == "assistant" and (taken := _action(said)) is not None:
          grid.step(taken)
          action = bot.replan(taken)
    except Exception as error:  # It asserts that it never gets lost.
      raise ValueError(f"{task.id}: the bot finds no way: {error}") from error
    return _ACTIONS[int(action)]

  def explore(
    self, task: base.Task, messages: Sequence[base.Message], seed: int
  ) -> str:
    """Returns a random action."""
    return random.Random(seed).choice(_ACTIONS)

  def _beginning(self, seed: int) -> str:
    grid = _made(self.level, seed)
    return f"{grid.mission}\n{grid.pprint_grid()}"


class _Mission:
  """One mission: the package's observations in words."""

  def __init__(self, source: MiniGrid, seed: int):
    self._source = source
    self._seed = seed
    self._num_answers = 0
    self._grid: Any = None

  async def start(self) -> Sequence[base.Message]:
    return [base.Message("user", await threads.call(self._start))]

  async def step(self, answer: base.Message) -> base.Step:
    return await threads.call(self._step, answer)

  async def close(self) -> None:
    self._grid = None

  def _start(self) -> str:
    self._grid = _fresh(self._source.level, self._seed)
    return (
      f"Mission: {self._grid.mission}\nAnswer with one action: "
      f"{', '.join(_ACTIONS)}.\n{self._described(self._grid.gen_obs())}"
    )

  def _step(self, answer: base.Message) -> base.Step:
    self._num_answers += 1
    over = self._num_answers == self._source.turns
    action = _action(answer)
    if action is None:
      text = f"The answer must be one of {', '.join(_ACTIONS)}."
      metrics = {"invalid": 1.0}
      return base.Step([base.Message("user", text)], 0.0, over, metrics)
    seen, score, terminated, truncated, _ = self._grid.step(action)
    done = bool(terminated or truncated or over)
    metrics = {"invalid": 0.0, "score": float(score)}
    messages = [] if done else [base.Message("user", self._described(seen))]
    return base.Step(messages, float(score > 0), done, metrics)

  def _described(self, seen: Mapping[str, Any]) -> str:
    """Returns an observation, and what the agent carries, in words."""
    things = ", ".join(_seen(seen["image"])) or "nothing"
    carried = self._grid.carrying
    own = f"a {carried.color} {carried.type}" if carried else "nothing"
    return f"You see {things}. You carry {own}."


def _seen(image: Any) -> Iterator[str]:
  """Yields the things of an image with their places, near ones first.

  In an image the agent is in the middle of the last row and looks to the first.
  """
  from minigrid.core import constants

  states = {index: name for name, index in constants.STATE_TO_IDX.items()}
  middle, own = len(image) // 2, len(image[0]) - 1
  cells = [
    (own - row, column - middle, image[column][row])
    for column in range(len(image))
    for row in range(own + 1)
    if (row, column) != (own, middle)
  ]
  cells.sort(key=lambda cell: (cell[0] + abs(cell[1]), cell[1]))
  walls = set()
  for ahead, right, (kind, colour, state) in cells:
    name = constants.IDX_TO_OBJECT[int(kind)]
    if name == "wall" and 0 in (ahead, right):
      # Only the nearest in a line: the agent cannot pass it.
      line = (ahead > 0, right > 0, right < 0)
      if line not in walls:
        yield f"a wall {_place(ahead, right)}"
      walls.add(line)
    elif name not in _UNSEEN:
      words = [constants.IDX_TO_COLOR[int(colour)], name]
      if name == "door":
        words = [states[int(state)], *words]
      elif name in ("goal", "lava"):
        words = [name]
      article = "an" if words[0][0] in "aeiou" else "a"
      yield f"{article} {' '.join(words)} {_place(ahead, right)}"


def _place(ahead: int, right: int) -> str:
  parts = [f"{ahead} ahead"] if ahead else []
  if right:
    parts.append(f"{abs(right)} {'right' if right > 0 else 'left'}")
  return " and ".join(parts)


def _action(answer: base.Message) -> int | None:
  """Returns the number of an action, or None if the answer names none."""
  word = answer.content.strip().lower()
  return _ACTIONS.index(word) if word in _ACTIONS else None


def _check_level(level: str) -> None:
  """Raises ValueError on a level that does not exist or pays nothing."""
  known = [
    name
    for name in _package().registry
    if name.startswith(("MiniGrid-", "BabyAI-"))
    # The first has no mission, and the second need a package of their own.
    and not name.startswith(("MiniGrid-Playground", "MiniGrid-WFC"))
  ]
  if level not in known:
    near = difflib.get_close_matches(level, known, 5, 0.4) or known
    raise ValueError(f"level={level}: must be one of {', '.join(near)}")


def _fresh(level: str, seed: int) -> Any:
  """Returns a grid of one's own."""
  return copy.deepcopy(_made(level, seed))


@functools.lru_cache(maxsize=256)
def _made(level: str, seed: int) -> Any:
  """Returns a grid that nobody has changed."""
  made: Any = _package().make(level, disable_env_checker=True).unwrapped
  made.reset(seed=seed)
  return made


@functools.cache
def _package() -> Any:
  """Returns gymnasium with the package's levels; both are optional.

  Raises:
    ValueError: they are not installed.
  """
  # It greets on standard output otherwise.
  os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
  extras.require("minigrid", "minigrid", "this environment")
  import minigrid  # noqa: F401
  from gymnasium.envs import registration
  from minigrid.envs.babyai.core import roomgrid_level

  # It prints every mission that it throws away.
  roomgrid_level.__dict__["print"] = lambda *words: None
  return registration
