"""Guess the number: textarena's GuessTheNumber-v0 in six words and numbers.

guess -> 10 -> lower -> 5 -> higher -> 7 -> correct
"""

import dataclasses
import itertools
import random
import re
import threading
from collections.abc import Sequence
from typing import Any

from envs import base, threads

_GUESS = re.compile(r"\[(\d+)\]")  # a guess, as the game parses it
_LIMIT = re.compile(r"Guess: (\d+), Target: (\d+)")

# int() raises for over 4300 digits, and answers must not crash the game.
_MAX_CHARS = 1000

# The game draws its target from the global generator, which it seeds itself.
_global_random = threading.Lock()


@dataclasses.dataclass(frozen=True, kw_only=True)
class GuessTheNumber:
  """Find a number from the hints `higher` and `lower`.

  An answer is a bare number. A repeated number, one out of range or any other
  text is `invalid`: it costs no turn, but the second in a row loses. The reward
  is 1 for finding the number and 0 otherwise; textarena's own reward, which
  pays for close guesses, is not used.

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
    if self.turns < 1:
      raise ValueError(f"turns={self.turns}: give at least 1")

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
    # Not at the top: it imports all of nltk and scipy.
    import textarena

    # The wrappers of other variants repeat the history in each observation.
    self._game = textarena.make(
      "GuessTheNumber-v0-raw",
      min_number=self._source.low,
      max_number=self._source.high,
      max_turns=self._source.turns,
    )
    with _global_random:
      before = random.getstate()
      self._game.reset(num_players=1, seed=self._seed)
      random.setstate(before)
    self._game.get_observation()

  def _play(self, answer: base.Message) -> tuple[str, bool]:
    """Returns (word for the game's reply, the game is over)."""
    done, _ = self._game.step(_action(answer))
    if done:
      _, info = self._game.close()
      return _verdict(info[0]["reason"]), True
    _, observation = self._game.get_observation()
    word = _hint(observation[-1][1])
    # textarena ends a game one guess later than its prompt says.
    self._num_guesses += word != "invalid"
    lost = self._num_guesses == self._source.turns
    return ("lost", True) if lost else (word, False)


def _action(answer: base.Message) -> str:
  """Returns the answer in the game's form: a bare number gets brackets."""
  text = answer.content.strip()[:_MAX_CHARS]
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
