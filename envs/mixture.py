"""Mixes several sources in given proportions, each with its own reward."""

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
        f"weight={self.weight} of {self.source.name}: must be a finite number"
        " above 0; or leave the source out"
      )


@dataclasses.dataclass(frozen=True)
class Mixture:
  """A source whose tasks come from other sources, in proportion.

  Tasks keep the ids of their source, which also makes their environments and
  answers. The first n tasks of a split hold each source in proportion to its
  weight, to within about one task. In training `rl.rollout.prompts.Prompts`
  draws from `sources` by `weights` itself.

  Wrap a part in `delayed.Delayed`, not the mixture.

  Attributes:
    parts: the names of their sources must differ.
  """

  parts: tuple[Part, ...]

  def __post_init__(self) -> None:
    names = [part.source.name for part in self.parts]
    if not names:
      raise ValueError("parts=(): a mixture needs at least one source")
    if twice := sorted({name for name in names if names.count(name) > 1}):
      raise ValueError(
        f"sources {twice} are in the mixture more than once, so their task ids"
        " would be equal; use one with a higher weight, or another name"
      )
    for name in names:
      base.check_name(name)

  def validate(self) -> None:
    """Raises ValueError where a source of the parts cannot be played."""
    for one in base.parts(self.parts):
      if hasattr(one, "validate"):
        one.validate()

  @property
  def name(self) -> str:
    """Names of all sources, joined; task ids begin with one of them."""
    return "+".join(part.source.name for part in self.parts)

  @property
  def words(self) -> Sequence[str]:
    """Words of all sources in the order of the parts, without repeats."""
    words = (word for part in self.parts for word in base.words(part.source))
    return tuple(dict.fromkeys(words))

  @property
  def sources(self) -> tuple[base.Source, ...]:
    """The sources of the parts."""
    return tuple(part.source for part in self.parts)

  @property
  def weights(self) -> tuple[float, ...]:
    """The weights of the sources, in the same order."""
    return tuple(part.weight for part in self.parts)

  def task(self, index: int, split: base.Split) -> base.Task:
    """Returns a task of one source, whose `index` counts that source alone."""
    part, source_index = _position(index, self.weights)
    return self.parts[part].source.task(source_index, split)

  def __call__(self, task: base.Task) -> base.Environment:
    """Returns a fresh environment of the task's source.

    Raises:
      ValueError: the task belongs to another mixture.
    """
    return self._source(task)(task)

  def oracle(
    self, task: base.Task, messages: Sequence[base.Message]
  ) -> str | base.Message:
    """Returns the good answer of the task's source."""
    return base.demonstrator(self._source(task)).oracle(task, messages)

  def explore(
    self, task: base.Task, messages: Sequence[base.Message], seed: int
  ) -> str | base.Message:
    """Returns the random answer of the task's source."""
    return base.demonstrator(self._source(task)).explore(task, messages, seed)

  def _source(self, task: base.Task) -> base.Source:
    for source in self.sources:
      if source.name == task.source:
        return source
    raise ValueError(
      f"task {task.id} must belong to one of {[s.name for s in self.sources]}"
    )


@dataclasses.dataclass(frozen=True)
class RewardRule:
  """The reward for the tasks of one source."""

  source: str
  reward: base.Reward


@dataclasses.dataclass(frozen=True)
class ByTask:
  """A reward for each source of a mixture.

  If one compares the members of a group, all are called when a group has ended.

  Attributes:
    rules: their sources must differ.
    default: for sources without a rule; None if every source has one.
  """

  rules: tuple[RewardRule, ...]
  default: base.Reward | None = None

  def __post_init__(self) -> None:
    names = [rule.source for rule in self.rules]
    if twice := sorted({name for name in names if names.count(name) > 1}):
      raise ValueError(f"sources {twice} have two rules; give each one rule")
    if not names and self.default is None:
      raise ValueError("rules=() without a default grade nothing; give either")

  @property
  def stateless(self) -> bool:
    """True if all rewards are stateless."""
    return all(reward.stateless for reward in self._rewards)

  @property
  def compares(self) -> bool:
    """True if one of the rewards compares the members of a group."""
    return any(base.compares(reward) for reward in self._rewards)

  @property
  def alone(self) -> "ByTask":
    """The rewards of episodes without a group."""
    return ByTask(
      tuple(
        dataclasses.replace(rule, reward=base.alone(rule.reward))
        for rule in self.rules
      ),
      self.default and base.alone(self.default),
    )

  @property
  def _rewards(self) -> list[base.Reward]:
    own = [rule.reward for rule in self.rules]
    return own if self.default is None else [*own, self.default]

  def reward_of(self, task: base.Task) -> base.Reward:
    """Returns the reward of the task's source.

    Raises:
      ValueError: the source has no reward.
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

  def check_task(self, task: base.Task) -> None:
    """Raises ValueError on a task that has no reward, or not the right one."""
    base.check_task(self.reward_of(task), task)

  async def __call__(
    self, task: base.Task, transcripts: Sequence[base.Transcript]
  ) -> Sequence[base.Grade]:
    """Returns the grades of the reward of the task's source."""
    return await self.reward_of(task)(task, transcripts)


def _position(index: int, weights: Sequence[float]) -> tuple[int, int]:
  """Returns (part, index within the part) of the task at `index`.

  Task j of a part with share p has the time (2j + 1) / 2p, so about one task
  falls into each unit of time. The number of tasks before a time is a product,
  so only the last few tasks before `index` are counted one by one.

  Source: the method of Webster and Sainte-Laguë.
  """
  exact = [fractions.Fraction(weight) for weight in weights]
  shares = [weight / sum(exact) for weight in exact]
  # By this time at most half a task per part beyond `start` has come.
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
