"""Your own task, complete: answer a letter with the one that follows.

python -m launch.train --config=configs/next_letter.py --workdir=DIR

Hardware: two CPU cores. Duration: one to three minutes, most of them for
compiling. Expected: success rises from 0 to between 0.8 and 0.95. Evaluations
have the same 25 letters as training.
"""

import dataclasses
import random
from collections.abc import Sequence

from configs import guess_number_moe
from envs import base
from rl import experiment

LETTERS = tuple("abcdefgh")


@dataclasses.dataclass(frozen=True)
class NextLetter:
  """Tasks of one turn; any answer but the next letter earns nothing."""

  name = "next_letter"
  words = LETTERS

  def task(self, index: int, split: base.Split) -> base.Task:
    """Returns the task at a position; its seed decides the letter."""
    seed = random.Random(f"{split}/{index}").randrange(len(LETTERS) - 1)
    return base.Task(f"{self.name}/{split}/{index}", index, split, seed)

  def __call__(self, task: base.Task) -> "_Question":
    """Returns a fresh environment, for one episode."""
    return _Question(task.seed)

  def oracle(self, task: base.Task, messages: Sequence[base.Message]) -> str:
    """Returns the right answer, for a warm start."""
    return LETTERS[task.seed + 1]

  def explore(
    self, task: base.Task, messages: Sequence[base.Message], seed: int
  ) -> str:
    """Returns a random answer, for a warm start."""
    return random.Random(seed).choice(LETTERS)


class _Question:
  def __init__(self, place: int):
    self._place = place

  async def start(self) -> Sequence[base.Message]:
    return [base.Message("user", LETTERS[self._place])]

  async def step(self, answer: base.Message) -> base.Step:
    is_next = answer.content.strip() == LETTERS[self._place + 1]
    return base.Step([], reward=float(is_next), done=True)

  async def close(self) -> None:
    pass


def get_config() -> experiment.Experiment:
  """Returns the run of guess_number_moe on this task, without a warm start."""
  return dataclasses.replace(
    guess_number_moe.get_config(),
    environment=NextLetter(),
    warm_start=None,
    rounds=100,
  )
