"""Games of textarena for one player, and guess-a-number in six words.

guess -> 10 -> lower -> 5 -> higher -> 7 -> correct
You are playing Mastermind ... -> [1 2 3 4] -> 1 black peg, 2 white pegs -> ...
"""

import contextlib
import copy
import dataclasses
import difflib
import functools
import itertools
import operator
import random
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from envs import base, extras, threads

_GUESS = re.compile(r"\[(\d+)\]")  # a guess, as the game parses it
_LIMIT = re.compile(r"Guess: (\d+), Target: (\d+)")

# int() raises for over 4300 digits, and answers must not crash the game.
_TOO_LONG = re.compile(r"\d{1000,}")
_MAX_CHARS = 20_000
_MAX_NUMBERS = 1_000_000

# Games draw from the global generator, some of them at every step.
_global_random = threading.Lock()
_DRAWS = tuple(
  name
  for name, value in vars(random).items()
  if isinstance(getattr(value, "__self__", None), random.Random)
)
_methods = operator.attrgetter(*_DRAWS)


class Game:
  """A game of textarena, with random numbers of its own.

  Calls block, and one game is called by one thread at a time.
  """

  def __init__(
    self, game: str, num_players: int, seed: int, **settings: Any
  ) -> None:
    """Begins a game.

    Args:
      game: id in textarena's registry, without the name of a wrapper.

    Raises:
      ValueError: textarena is not installed.
    """
    # The wrappers of other variants repeat the history in each observation.
    self.env = _package().make(f"{game}-raw", **settings)
    self._random = random.Random(seed)
    with self._own_random():
      self.env.reset(num_players=num_players, seed=seed)

  @property
  def state(self) -> Any:
    """The package's own state of the game."""
    return self.env.state

  def play(self, text: str) -> bool:
    """Plays an answer of the current player; returns whether the game is over.

    `state.game_info[player]["reason"]` says why it is.
    """
    with self._own_random():
      return self.env.step(_readable(text))[0]

  def said(self, player: int) -> str:
    """Returns what the game has said to a player since it was last asked.

    Answers are left out: the player knows its own, and those of another may be
    of any length. Games describe moves themselves.
    """
    said = self.state.observations[player]
    self.state.observations[player] = []
    # By name, so that textarena is imported in one place.
    return "\n".join(t for _, t, kind in said if kind.name != "PLAYER_ACTION")

  @contextlib.contextmanager
  def _own_random(self) -> Iterator[None]:
    # The module's functions are methods of its generator. To get and to set the
    # state of that would take longer than most moves.
    with _global_random:
      before = zip(_DRAWS, _methods(random), strict=True)
      try:
        random.__dict__.update(zip(_DRAWS, _methods(self._random), strict=True))
        yield
      finally:
        random.__dict__.update(before)


def check_game(game: str, families: Iterable[str]) -> None:
  """Raises ValueError on a game that textarena does not have, or not safely.

  Args:
    families: that may be played: the part of their ids before "-v0".
  """
  names = (
    n.removesuffix("-raw") for n in _package().envs.registration.ENV_REGISTRY
  )
  known = [
    name
    for name in dict.fromkeys(names)
    if name.partition("-v0")[0] in families
    and not name.endswith("-train")
    and name not in _TOO_SLOW
  ]
  if game not in known:
    near = difflib.get_close_matches(game, known, 5, 0.4) or known
    raise ValueError(f"game={game}: must be one of {', '.join(near)}")


def _readable(text: str) -> str:
  """Returns the end of an answer, where its move is, for games to parse."""
  return _TOO_LONG.sub("?", text[-_MAX_CHARS:])


def _package() -> Any:
  """Returns textarena; not at the top: it imports all of nltk and scipy.

  Raises:
    ValueError: it is not installed.
  """
  extras.require("textarena", "envs", "this environment")
  import textarena

  return textarena


@dataclasses.dataclass(frozen=True, kw_only=True)
class GuessTheNumber:
  """Find a number from the hints `higher` and `lower`.

  An answer is a bare number, or text whose first number in brackets counts. A
  repeated number, one out of range or any other text is `invalid`: it costs no
  turn, but the second in a row loses. The reward is 1 for finding the number
  and 0 otherwise; textarena's own reward, which pays for close guesses, is not
  used.

  Evaluation has its own seeds but not its own targets, as these are too few.

  Attributes:
    low, high: bounds of the target, both included.
    turns: valid guesses; binary search needs 5 for 20 numbers.
  """

  low: int = 1
  high: int = 20
  turns: int = 5

  def __post_init__(self) -> None:
    if not 0 <= self.low < self.high:
      raise ValueError(
        f"low={self.low}, high={self.high}: must be 0 <= low < high; the game"
        " cannot read negative numbers"
      )
    if self.high - self.low >= _MAX_NUMBERS:
      raise ValueError(
        f"low={self.low}, high={self.high}: at most {_MAX_NUMBERS} numbers, as "
        "each of them is a word"
      )
    if self.turns < 1:
      raise ValueError(f"turns={self.turns}: give at least 1")

  def validate_installed(self) -> None:
    """Raises ValueError when textarena is not installed."""
    extras.require("textarena", "envs", f"environment={self.name}")

  @property
  def name(self) -> str:
    """Short name: the first part of every task id."""
    return "guess_number"

  @property
  def words(self) -> Sequence[str]:
    """Every word of the game's messages and answers."""
    numbers = (str(n) for n in range(self.low, self.high + 1))
    return ("guess", "higher", "lower", "invalid", "correct", "lost", *numbers)

  def task(self, index: int, split: base.Split) -> base.Task:
    """Returns a task; seeds are even in training and odd in evaluation."""
    return base.Task(
      id=f"{self.name}/{split}/{index}",
      index=index,
      split=split,
      seed=2 * index + (split == "eval"),
    )

  def __call__(self, task: base.Task) -> "_Game":
    """Returns a fresh game.

    The first `start` of a process imports textarena, which takes seconds of CPU
    time; deadlines should allow for it.
    """
    return _Game(self, task.seed)

  def oracle(self, task: base.Task, messages: Sequence[base.Message]) -> str:
    """Returns the middle of the numbers that the hints so far allow."""
    low, high = self.low, self.high
    for answer, reply in itertools.pairwise(messages):
      if answer.role != "assistant":
        continue
      if reply.content == "higher":
        low = max(low, _guess(answer) + 1)
      elif reply.content == "lower":
        high = min(high, _guess(answer) - 1)
    return str((low + high) // 2)

  def explore(
    self, task: base.Task, messages: Sequence[base.Message], seed: int
  ) -> str:
    """Returns a random number that has not been guessed."""
    guessed = {m.content for m in messages if m.role == "assistant"}
    numbers = [str(n) for n in range(self.low, self.high + 1)]
    return random.Random(seed).choice([n for n in numbers if n not in guessed])


class _Game:
  """One game: textarena's replies in the words of the source."""

  def __init__(self, source: GuessTheNumber, seed: int):
    self._source = source
    self._seed = seed
    self._num_guesses = 0
    self._game: Any = None

  async def start(self) -> Sequence[base.Message]:
    await threads.call(self._reset)
    return [base.Message("user", "guess")]

  async def step(self, answer: base.Message) -> base.Step:
    word, done = await threads.call(self._play, answer)
    reward = 1.0 if word == "correct" else 0.0
    return base.Step([base.Message("user", word)], reward, done)

  async def close(self) -> None:
    self._game = None

  def _reset(self) -> None:
    self._game = Game(
      "GuessTheNumber-v0",
      1,
      self._seed,
      min_number=self._source.low,
      max_number=self._source.high,
      max_turns=self._source.turns,
    )
    self._game.said(0)

  def _play(self, answer: base.Message) -> tuple[str, bool]:
    """Returns (word for the game's reply, the game is over)."""
    if self._game.play(_action(answer)):
      return _verdict(self._game.state.game_info[0]["reason"]), True
    word = _hint(self._game.said(0))
    # textarena ends a game one guess later than its prompt says.
    self._num_guesses += word != "invalid"
    lost = self._num_guesses == self._source.turns
    return ("lost", True) if lost else (word, False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SinglePlayer:
  """A game of textarena (MIT) for one player, in the game's own words.

  An answer has its move in brackets, as the first message explains. The second
  invalid answer in a row loses, as in textarena, and the first mine does, which
  textarena takes for an invalid answer. A wrong number of Sudoku is an invalid
  answer, too, and may be tried again. The reward is 1 for a game that is won
  and 0 otherwise. Textarena's own, which pays for a part of the solution and
  sometimes for junk, is the metric `score`; `invalid` counts invalid answers.

  Tasks are split by a hash of the game that is dealt, hidden parts included, so
  the splits share none.

  Attributes:
    game: id in textarena, such as Minesweeper-v0-small, of a family in GAMES.
    turns: answers before the game is lost. A move of 2048 adds at most 4, so
      its tile of 256 needs at least 62.
  """

  game: str = "Mastermind-v0"
  turns: int = 50

  def __post_init__(self) -> None:
    if self.turns < 1:
      raise ValueError(f"turns={self.turns}: give at least 1")
    check_game(self.game, GAMES)
    spec = _package().envs.registration.ENV_REGISTRY[self.game]
    # The first two tiles add up to 8 at most, and a move brings one of 4.
    least = -(-(spec.kwargs.get("target_tile", 0) - 8) // 4)
    if self.turns < least:
      raise ValueError(
        f"turns={self.turns}: {self.game} takes at least {least}, and most "
        "players need twice as many"
      )

  @property
  def name(self) -> str:
    """Short name: the first part of every task id."""
    return self.game.lower()

  def task(self, index: int, split: base.Split) -> base.Task:
    """Returns a task; deals games until one is of the split.

    Takes milliseconds at most, but for Sudoku, which takes up to 50.

    Raises:
      ValueError: no game is.
    """
    hand = functools.partial(_hand, self.game)
    seed = base.first_seed(self.game, split, index, hand)
    return base.Task(f"{self.name}/{split}/{index}", index, split, seed)

  def __call__(self, task: base.Task) -> "_SinglePlayerGame":
    """Returns a fresh game."""
    return _SinglePlayerGame(self, task.seed)

  def random_answer(self, seed: int) -> str:
    """Returns a random move, which the game need not permit at this point."""
    move = GAMES[self.game.partition("-v0")[0]]
    return f"[{move(random.Random(seed))}]"


def _word(*words: str) -> Callable[[random.Random], str]:
  return lambda draw: draw.choice(words)


def _numbers(low: int, high: int, count: int) -> Callable[[random.Random], str]:
  return lambda draw: " ".join(
    str(n) for n in draw.sample(range(low, high + 1), count)
  )


# Of the other games for one player some need a download or a key (Hangman,
# Wordle, GuessWho), some have one task alone (Countdown, Cryptarithm, PegJump,
# TowerOfHanoi), two cannot be won (Bandit compares a name with a table,
# FifteenPuzzle raises when it is solved), one searches for half a second a task
# (Sokoban), and two print and deal what depends on the hash seed or has no
# solution (LogicPuzzle, RushHour).
GAMES: Mapping[str, Callable[[random.Random], str]] = {
  "2048": _word("up", "down", "left", "right"),
  "FrozenLake": _word("up", "down", "left", "right"),
  "LightsOut": lambda draw: f"{draw.randrange(5)} {draw.randrange(5)}",
  "Mastermind": _numbers(1, 6, 4),
  "Minesweeper": lambda draw: f"{draw.randrange(5)} {draw.randrange(5)}",
  "Secretary": _word("accept", "continue"),
  "Sudoku": lambda draw: " ".join(str(draw.randint(1, 9)) for _ in range(3)),
  "ThreeCardMonte": _word("0", "1", "2"),
}
"""Families of games for one player, each with a way to make a random move."""

# Takes up to five seconds for one task.
_TOO_SLOW = {"Sudoku-v0-hard"}


class _SinglePlayerGame:
  """One game in the package's words."""

  def __init__(self, source: SinglePlayer, seed: int):
    self._source = source
    self._seed = seed
    self._num_answers = 0
    self._game: Any = None

  async def start(self) -> Sequence[base.Message]:
    return [base.Message("user", await threads.call(self._deal))]

  async def step(self, answer: base.Message) -> base.Step:
    return await threads.call(self._step, answer.content)

  async def close(self) -> None:
    self._game = None

  def _deal(self) -> str:
    self._game = copy.deepcopy(_dealt(self._source.game, self._seed))
    return self._game.said(0)

  def _step(self, text: str) -> base.Step:
    self._num_answers += 1
    done = self._game.play(text)
    state = self._game.state
    kinds = [kind.name for _, _, kind in state.observations[0]]
    invalid = "GAME_ADMIN" in kinds or state.game_info[0]["invalid_move"]
    metrics = {"invalid": float(invalid)}
    if not done:
      said = self._game.said(0)
      lost = "You hit a mine" in said
      if self._num_answers == self._source.turns and not lost:
        said, lost = "No turns are left.", True
      return base.Step([base.Message("user", said)], 0.0, lost, metrics)
    # Some games confuse it with the reason of an invalid move, which is text.
    if isinstance(score := state.rewards[0], int | float):
      metrics["score"] = float(score)
    reason = base.Message("user", str(state.game_info[0]["reason"]))
    return base.Step([reason], float(_is_won(self._game)), True, metrics)


def _is_won(game: Game) -> bool:
  """Returns whether a game that is over was won.

  2048 pays in full for an invalid answer, and for a high score without the
  tile.
  """
  env, state = game.env, game.state
  if state.rewards[0] != 1 or state.game_info[0]["invalid_move"]:
    return False
  return not hasattr(env, "target_tile") or env._max_tile() >= env.target_tile


@functools.lru_cache(maxsize=256)
def _dealt(game: str, seed: int) -> Game:
  """Returns a game that has begun; players take copies."""
  while True:
    # LightsOut divides by the number of lights that are on, which may be none.
    with contextlib.suppress(ZeroDivisionError):
      return Game(game, 1, seed)
    seed += 1


def _hand(game: str, seed: int) -> str:
  """Returns all that tells a game from others of its kind."""
  dealt = copy.deepcopy(_dealt(game, seed))
  # Minesweeper lays its mines at the first move.
  later = f"{seed}" if game.startswith("Minesweeper") else ""
  return f"{dealt.said(0)}{dealt.state.game_state}{later}"


def _action(answer: base.Message) -> str:
  """Returns the answer in the game's form: a bare number gets brackets."""
  text = _readable(answer.content.strip())
  return f"[{text}]" if text.isdecimal() else text


def _guess(answer: base.Message) -> int:
  """Returns the number of an answer that the game accepted as a guess."""
  match = _GUESS.search(_action(answer))
  if match is None:
    raise ValueError(
      f"a hint follows {answer.content!r}, which must be a number"
    )
  return int(match[1])


def _hint(text: str) -> str:
  """Returns the word for the game's reply to a guess."""
  for word in ("higher", "lower"):
    if text == f"The target number is {word}.":
      return word
  if text.startswith("You attempted an invalid move."):
    return "invalid"
  raise ValueError(f"unknown reply of textarena: {text!r}")


def _verdict(reason: str) -> str:
  """Returns the word for the end of a game."""
  limit = _LIMIT.search(reason)
  # The game may report its limit although the last guess was right.
  if "Congratulations" in reason or (limit and limit[1] == limit[2]):
    return "correct"
  if limit or reason.startswith("Invalid Move"):
    return "lost"
  raise ValueError(f"unknown reply of textarena: {reason!r}")
