"""Several sources as one: tasks in given proportions, each with its reward."""

import dataclasses
import fractions
import math
from collections.abc import Sequence

from envs import base


@dataclasses.dataclass(frozen=True)
class Part:
  """One source of a mixture.

  Attributes:
    weight: its share of the tasks, relative to the other parts.
  """

  source: base.Source
  weight: float = 1.0

  def __post_init__(self) -> None:
    if not 0 < self.weight < math.inf:
      raise ValueError(
        f"weight={self.weight} of {self.source.name}: give a number above 0, or"
        " leave the source out"
      )


@dataclasses.dataclass(frozen=True)
class Mixture:
  """A source whose tasks come from other sources, in proportion.

  Tasks keep the ids of the source that made them, and environments, oracle and
  exploration are that source's. A beginning of either split holds each source
  in proportion to its weight, to within about a task. What *training* holds is
  up to whoever draws from `sources` by `weights`: `rl.rollout.prompts.Prompts`
  does.

  A wrapper such as `delayed.Delayed` goes around a part, not around this.

  Attributes:
    parts: their sources' names differ.
  """

  parts: tuple[Part, ...]

  def __post_init__(self) -> None:
    names = [part.source.name for part in self.parts]
    if not names:
      raise ValueError("parts=(): a mixture needs at least one source")
    if twice := sorted({name for name in names if names.count(name) > 1}):
      raise ValueError(
        f"sources {twice} are in the mixture more than once: task ids could not"
        " tell them apart; give each source another name, or a higher weight"
      )
    if wrong := [name for name in names if not name or "/" in name]:
      raise ValueError(
        f"sources named {wrong}: a name is the first part of a task id, so it "
        "is not empty and has no slash"
      )

  @property
  def name(self) -> str:
    """Names of the sources; task ids begin with one of them, not with this."""
    return "+".join(part.source.name for part in self.parts)

  @property
  def words(self) -> Sequence[str]:
    """Words of all sources, without repeats, those of the first part first."""
    said = (word for part in self.parts for word in part.source.words)
    return tuple(dict.fromkeys(said))

  @property
  def sources(self) -> tuple[base.Source, ...]:
    """What the tasks come from."""
    return tuple(part.source for part in self.parts)

  @property
  def weights(self) -> tuple[float, ...]:
    """Of the sources, in the same order."""
    return tuple(part.weight for part in self.parts)

  def task(self, index: int, split: base.Split) -> base.Task:
    """Returns a task of one source; its `index` is the place within that."""
    part, place = _position(index, self.weights)
    return self.parts[part].source.task(place, split)

  def __call__(self, task: base.Task) -> base.Environment:
    """Returns a fresh environment of the task's source.

    Raises:
      ValueError: the task is of no source of the mixture.
    """
    return self._source(task)(task)

  def oracle(self, task: base.Task, messages: Sequence[base.Message]) -> str:
    """Returns the good answer of the task's source."""
    return self._source(task).oracle(task, messages)

  def explore(
    self, task: base.Task, messages: Sequence[base.Message], seed: int
  ) -> str:
    """Returns the random answer of the task's source."""
    return self._source(task).explore(task, messages, seed)

  def _source(self, task: base.Task) -> base.Source:
    for source in self.sources:
      if source.name == task.source:
        return source
    raise ValueError(
      f"task {task.id} is of none of {[s.name for s in self.sources]}"
    )


@dataclasses.dataclass(frozen=True)
class RewardRule:
  """How the tasks of one source are graded."""

  source: str
  reward: base.Reward


@dataclasses.dataclass(frozen=True)
class ByTask:
  """A reward for each source of a mixture.

  Attributes:
    rules: their sources differ.
    default: for sources without a rule; None: there must be none.
  """

  rules: tuple[RewardRule, ...]
  default: base.Reward | None = None

  def __post_init__(self) -> None:
    names = [rule.source for rule in self.rules]
    if twice := sorted({name for name in names if names.count(name) > 1}):
      raise ValueError(f"sources {twice} have two rewards; give each one rule")
    if not names and self.default is None:
      raise ValueError("rules=() without a default grade nothing; give either")

  @property
  def stateless(self) -> bool:
    """Whether all rewards are."""
    rewards = [rule.reward for rule in self.rules]
    if self.default is not None:
      rewards.append(self.default)
    return all(reward.stateless for reward in rewards)

  def reward_of(self, task: base.Task) -> base.Reward:
    """Returns the reward of the task's source.

    Raises:
      ValueError: it has none.
    """
    for rule in self.rules:
      if rule.source == task.source:
        return rule.reward
    if self.default is None:
      raise ValueError(
        f"no reward grades task {task.id}: there are rules for "
        f"{[rule.source for rule in self.rules]}; add one, or a default"
      )
    return self.default

  async def __call__(
    self, task: base.Task, transcripts: Sequence[base.Transcript]
  ) -> Sequence[base.Grade]:
    """Returns the grades that the reward of the task's source gives."""
    return await self.reward_of(task)(task, transcripts)


def _position(index: int, weights: Sequence[float]) -> tuple[int, int]:
  """Returns whose task is at `index`, and which of its own it is.

  Task j of a part with share p stands at time (2j + 1) / 2p, so that about one
  task falls on each unit of time. What lies before a time is a product, so
  only the last few tasks before `index` are counted one by one.

  Source: the method of Webster and Sainte-Laguë.
  """
  exact = [fractions.Fraction(weight) for weight in weights]
  shares = [weight / sum(exact) for weight in exact]
  # At this time at most half a task a part more than `start` has come.
  start = max(0, index - len(shares))
  counts = [
    math.floor(share * start + fractions.Fraction(1, 2)) for share in shares
  ]
  while True:
    times = [
      (2 * j + 1) / share for j, share in zip(counts, shares, strict=True)
    ]
    part = times.index(min(times))
    if sum(counts) == index:
      return part, counts[part]
    counts[part] += 1
