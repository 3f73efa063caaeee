"""Gymnasium's toy-text games in few words: lake, taxi, cliff and blackjack.

s f f h  f f h f  f f f f  h f f g  r0 c0 -> down -> r1 c0 -> ... -> goal
r2 c1 red blue -> north -> r1 c1 red blue -> ... -> delivered
r3 c0 -> up -> r2 c0 -> right -> r2 c1 -> ... -> goal
14 dealer 7 -> hit -> 19 dealer 7 -> stick -> win
"""

import abc
import collections
import copy
import dataclasses
import functools
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from envs import base, extras, threads

_POSITION = re.compile(r"r(\d+) c(\d+)")
_HAND = re.compile(r"(\d+)( soft)? dealer (\d+)$")
_MAX_SIZE = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Game(abc.ABC):
  """A toy-text game: an answer is the name of an action.

  Anything else is `invalid` and costs a turn. A hash of the start decides its
  split, so the splits share no start.

  Attributes:
    turns: answers before the episode is lost.
  """

  actions: ClassVar[tuple[str, ...]]  # in gymnasium's numbering

  turns: int

  def __post_init__(self) -> None:
    if self.turns < 1:
      raise ValueError(f"turns={self.turns}: give turns >= 1")

  def validate_installed(self) -> None:
    """Raises ValueError when gymnasium is not installed."""
    extras.require("gymnasium", "envs", f"environment={self.name}")

  @property
  @abc.abstractmethod
  def name(self) -> str:
    """Short name: the first part of every task id."""

  def task(self, index: int, split: base.Split) -> base.Task:
    """Returns a task; its seed is the first one whose start is of the split.

    Takes about a millisecond at most.

    Raises:
      ValueError: these settings have no start of the split.
    """
    seed = base.first_seed(f"{self}", split, index, self._start)
    return base.Task(f"{self.name}/{split}/{index}", index, split, seed)

  def __call__(self, task: base.Task) -> "_Episode":
    """Returns a fresh game."""
    return _Episode(self, task.seed)

  def explore(
    self, task: base.Task, messages: Sequence[base.Message], seed: int
  ) -> str:
    """Returns a random action, however bad."""
    return random.Random(seed).choice(self.actions)

  @abc.abstractmethod
  def _start(self, seed: int) -> str:
    """Returns the text whose hash decides the split."""

  @abc.abstractmethod
  def _make(self, seed: int) -> tuple[Any, Any]:
    """Returns gymnasium's environment, and its first observation."""

  @abc.abstractmethod
  def _say(self, state: Any) -> str:
    """Returns an observation in words."""

  def _greet(self, seed: int, state: Any) -> str:
    """Returns the first message."""
    return self._say(state)

  @abc.abstractmethod
  def _end(self, reward: float) -> tuple[str, float]:
    """Returns (word, reward) for gymnasium's reward of a game that is over."""

  def _note(self, reward: float) -> str:
    """Returns a word for gymnasium's reward of a game that goes on."""
    return ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrozenLake(_Game):
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

  actions = ("left", "down", "right", "up")

  size: int = 4
  frozen_probability: float = 0.8
  slippery: bool = False
  turns: int = 10

  def __post_init__(self) -> None:
    super().__post_init__()
    if not 2 <= self.size <= _MAX_SIZE:
      raise ValueError(f"size={self.size}: give 2 <= size <= {_MAX_SIZE}")
    if not 0.5 <= self.frozen_probability < 1:
      raise ValueError(
        f"frozen_probability={self.frozen_probability}: must be in [0.5, 1);"
        " below it few maps have a path, and at 1 there is only one map"
      )
    if self.turns < 2 * (self.size - 1):
      raise ValueError(
        f"turns={self.turns}: no way over {self.size} x {self.size} cells is "
        f"shorter than {2 * (self.size - 1)} moves, and many are longer"
      )

  @property
  def name(self) -> str:
    """Short name: the first part of every task id."""
    return "frozen_lake"

  @property
  def words(self) -> Sequence[str]:
    """Every word of the lake's messages and answers."""
    cells = ("s", "f", "h", "g")
    places = _places(self.size, self.size)
    return (*cells, *places, *self.actions, "invalid", "goal", "hole", "lost")

  def map(self, seed: int) -> Sequence[str]:
    """Returns the rows of a map as gymnasium writes them, such as "SFFH"."""
    # Not at the top: a run without this source needs no gymnasium.
    from gymnasium.envs.toy_text import frozen_lake

    return frozen_lake.generate_random_map(
      self.size, self.frozen_probability, seed
    )

  def oracle(self, task: base.Task, messages: Sequence[base.Message]) -> str:
    """Returns the first move of a shortest path to the goal."""
    row, column = _position(messages)
    return _first_action(
      _lake_without_slips(self, task.seed), row * self.size + column, self
    )

  def _start(self, seed: int) -> str:
    return "".join(self.map(seed))

  def _make(self, seed: int) -> tuple[Any, Any]:
    from gymnasium.envs.toy_text import frozen_lake

    env = frozen_lake.FrozenLakeEnv(
      desc=list(self.map(seed)), is_slippery=self.slippery
    )
    return env, env.reset(seed=seed)[0]

  def _greet(self, seed: int, state: Any) -> str:
    return f"{' '.join(self._start(seed).lower())} {self._say(state)}"

  def _say(self, state: Any) -> str:
    return _place(state, self.size)

  def _end(self, reward: float) -> tuple[str, float]:
    return ("goal", 1.0) if reward == 1 else ("hole", 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Taxi(_Game):
  """Fetch the passenger and bring it to where it wants to go.

  Every message is the taxi's position, the place of the passenger (a colour, or
  `taxi`) and the destination. The walls of the map are not shown: a move into
  one, and a wrong pickup or dropoff, change nothing. The reward is 1 for the
  delivery and 0 otherwise.

  One of the 300 starts in five is for evaluation.

  Attributes:
    turns: answers before the episode is lost; no start needs more than 18.
  """

  actions = ("south", "north", "east", "west", "pickup", "dropoff")

  turns: int = 25

  @property
  def name(self) -> str:
    """Short name: the first part of every task id."""
    return "taxi"

  @property
  def words(self) -> Sequence[str]:
    """Every word of the game's messages and answers."""
    ends = ("invalid", "delivered", "lost")
    return (*_places(5, 5), *_COLOURS, *self.actions, *ends)

  def oracle(self, task: base.Task, messages: Sequence[base.Message]) -> str:
    """Returns the first action of a shortest way to the delivery."""
    row, column = _position(messages)
    passenger, goal = map(_COLOURS.index, messages[-1].content.split()[-2:])
    state = ((row * 5 + column) * 5 + passenger) * 4 + goal
    return _first_action(_taxi().P, state, self)

  def _start(self, seed: int) -> str:
    return self._say(self._state(seed))

  def _state(self, seed: int) -> int:
    # Places, four passengers and three other destinations, by gymnasium's code.
    place, passenger, goal = seed % 25, seed // 25 % 4, seed // 100 % 3
    return (place * 5 + passenger) * 4 + goal + (goal >= passenger)

  def _make(self, seed: int) -> tuple[Any, Any]:
    env = copy.copy(_taxi())
    env.reset(seed=seed)
    env.s = self._state(seed)
    return env, env.s

  def _say(self, state: Any) -> str:
    rest, goal = divmod(int(state), 4)
    place, passenger = divmod(rest, 5)
    return f"{_place(place, 5)} {_COLOURS[passenger]} {_COLOURS[goal]}"

  def _end(self, reward: float) -> tuple[str, float]:
    return "delivered", 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class CliffWalking(_Game):
  """Walk to the corner r3 c11 and keep off the cliff beside it.

  Every message is the position. The cliff is the lowest row between its
  corners; who steps on it is told `cliff` and goes on from r3 c0. The reward is
  1 at the goal and 0 otherwise.

  Gymnasium has one start; here every cell that is not cliff or goal is one, and
  one in five is for evaluation.

  Attributes:
    turns: answers before the episode is lost; no start needs more than 14.
  """

  actions = ("up", "right", "down", "left")

  turns: int = 20

  @property
  def name(self) -> str:
    """Short name: the first part of every task id."""
    return "cliff_walking"

  @property
  def words(self) -> Sequence[str]:
    """Every word of the game's messages and answers."""
    ends = ("invalid", "cliff", "goal", "lost")
    return (*_places(4, 12), *self.actions, *ends)

  def oracle(self, task: base.Task, messages: Sequence[base.Message]) -> str:
    """Returns the first move of a shortest path around the cliff."""
    row, column = _position(messages)
    return _first_action(_cliff().P, row * 12 + column, self)

  def _start(self, seed: int) -> str:
    return self._say(self._state(seed))

  def _state(self, seed: int) -> int:
    return seed % 37  # three rows of twelve cells, and the corner r3 c0

  def _make(self, seed: int) -> tuple[Any, Any]:
    env = copy.copy(_cliff())
    env.reset(seed=seed)
    env.s = self._state(seed)
    return env, env.s

  def _say(self, state: Any) -> str:
    return _place(state, 12)

  def _note(self, reward: float) -> str:
    return "cliff " if reward == -100 else ""

  def _end(self, reward: float) -> tuple[str, float]:
    return "goal", 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blackjack(_Game):
  """Come closer to 21 than the dealer, and not above.

  Every message is the sum of the hand, `soft` if an ace counts 11 in it, and
  the dealer's card. The reward is 1 for a win, 0.5 for a draw and 0 otherwise:
  gymnasium's 1, 0 and -1, by a scale on which bad answers are no way out.

  A hash of the first message decides the split of a game, so evaluation has
  starts of its own; hands that follow from them are met in both.

  Attributes:
    turns: answers before the episode is lost.
  """

  actions = ("stick", "hit")

  turns: int = 12

  @property
  def name(self) -> str:
    """Short name: the first part of every task id."""
    return "blackjack"

  @property
  def words(self) -> Sequence[str]:
    """Every word of the game's messages and answers."""
    numbers = map(str, range(1, 22))
    ends = ("invalid", "win", "draw", "lose", "lost")
    return (*numbers, "soft", "dealer", *self.actions, *ends)

  def oracle(self, task: base.Task, messages: Sequence[base.Message]) -> str:
    """Returns the action of basic strategy."""
    match = _HAND.search(messages[-1].content)
    if match is None:
      raise ValueError(f"{messages[-1].content!r} must end with a hand")
    hand, dealer = int(match[1]), int(match[3])
    if match[2]:
      enough = 19 if dealer in (9, 10) else 18
    elif dealer in (1, 7, 8, 9, 10):
      enough = 17
    else:
      enough = 13 if dealer < 4 else 12
    return "stick" if hand >= enough else "hit"

  def _start(self, seed: int) -> str:
    return self._say(self._make(seed)[1])

  def _make(self, seed: int) -> tuple[Any, Any]:
    from gymnasium.envs.toy_text import blackjack

    env = blackjack.BlackjackEnv(sab=True)
    return env, env.reset(seed=seed)[0]

  def _say(self, state: Any) -> str:
    hand, dealer, soft = state
    return f"{hand}{' soft' if soft else ''} dealer {dealer}"

  def _end(self, reward: float) -> tuple[str, float]:
    word = "win" if reward > 0 else "lose" if reward < 0 else "draw"
    return word, (reward + 1) / 2


class _Episode:
  """One game: gymnasium's replies in the words of the source."""

  def __init__(self, source: _Game, seed: int):
    self._source = source
    self._seed = seed
    self._num_answers = 0
    self._state: Any = None
    self._env: Any = None

  async def start(self) -> Sequence[base.Message]:
    text = await threads.call(self._reset)
    return [base.Message("user", text)]

  async def step(self, answer: base.Message) -> base.Step:
    self._num_answers += 1
    word = answer.content.strip()
    if word not in self._source.actions:
      return self._reply("invalid ")
    action = self._source.actions.index(word)
    reward, terminated = await threads.call(self._move, action)
    if terminated:
      end, reward = self._source._end(reward)
      return base.Step([base.Message("user", end)], reward, True)
    return self._reply(self._source._note(reward))

  async def close(self) -> None:
    self._env = None

  def _reset(self) -> str:
    self._env, self._state = self._source._make(self._seed)
    return self._source._greet(self._seed, self._state)

  def _move(self, action: int) -> tuple[float, bool]:
    self._state, reward, terminated, _, _ = self._env.step(action)
    return float(reward), terminated

  def _reply(self, note: str) -> base.Step:
    if self._num_answers == self._source.turns:
      return base.Step([base.Message("user", "lost")], 0.0, True)
    text = note + self._source._say(self._state)
    return base.Step([base.Message("user", text)], 0.0, False)


_COLOURS = ("red", "green", "yellow", "blue", "taxi")

_Table = Mapping[int, Mapping[int, Sequence[tuple[float, int, float, bool]]]]


# Games of these are shallow copies: their tables take milliseconds to make.
@functools.cache
def _taxi() -> Any:
  from gymnasium.envs.toy_text import taxi

  return taxi.TaxiEnv()


@functools.cache
def _cliff() -> Any:
  from gymnasium.envs.toy_text import cliffwalking

  return cliffwalking.CliffWalkingEnv()


@functools.lru_cache(maxsize=1024)
def _lake_without_slips(lake: FrozenLake, seed: int) -> _Table:
  return dataclasses.replace(lake, slippery=False)._make(seed)[0].P


def _places(rows: int, columns: int) -> Sequence[str]:
  return [f"r{i}" for i in range(rows)] + [f"c{i}" for i in range(columns)]


def _place(cell: int, columns: int) -> str:
  row, column = divmod(int(cell), columns)
  return f"r{row} c{column}"


def _position(messages: Sequence[base.Message]) -> tuple[int, int]:
  """Returns (row, column) of the last observation."""
  match = _POSITION.search(messages[-1].content)
  if match is None:
    raise ValueError(
      f"{messages[-1].content!r} must have a position such as r0 c0"
    )
  return int(match[1]), int(match[2])


def _first_action(table: _Table, start: int, game: _Game) -> str:
  """Returns the first action of a shortest way to win, breadth first."""
  firsts = {start: ""}
  queue = collections.deque([start])
  while queue:
    here = queue.popleft()
    for action, word in enumerate(game.actions):
      ((_, there, reward, over),) = table[here][action]
      if over and game._end(reward)[1] == 1:
        return firsts[here] or word
      if not over and there not in firsts:
        firsts[there] = firsts[here] or word
        queue.append(there)
  raise ValueError(f"no way to win {game.name} from {game._say(start)}")
