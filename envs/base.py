"""The contract of environments, tasks and rewards: text in, text out."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, runtime_checkable

Role = Literal["system", "user", "assistant", "tool"]
Split = Literal["train", "eval"]


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
  """One message of a conversation."""

  role: Role
  content: str


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
  """One thing to do; equal tasks build equal environments.

  Attributes:
    id: unique within a run, readable: "guess_number/train/17".
    index: position in the stream of its split.
    split: eval tasks never appear in training.
    seed: determines all randomness of the environment.
  """

  id: str
  index: int
  split: Split
  seed: int

  @property
  def source(self) -> str:
    """Name of the source that made the task: the first part of its id."""
    return self.id.partition("/")[0]


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
  """The environment's reply to one answer.

  Attributes:
    messages: shown to the agent next; may be empty when done.
    reward: of this step. Untrusted: the rollout requires a finite number, and
      anything else is a fault of the environment.
    done: the episode is over.
  """

  messages: Sequence[Message]
  reward: float
  done: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Transcript:
  """A finished episode as text, the only input of a stateless reward.

  Attributes:
    messages: both sides, in order.
    step_rewards: one for each answer of the agent that was stepped.
  """

  messages: Sequence[Message]
  step_rewards: Sequence[float]


@dataclasses.dataclass(frozen=True, slots=True)
class Grade:
  """The reward of one trajectory and the named parts it is made of."""

  value: float
  parts: Mapping[str, float]


@runtime_checkable
class Environment(Protocol):
  """One episode. Single-use: start, step until done, close.

  Any method may raise; the rollout turns it into a status of the trajectory.
  """

  async def start(self) -> Sequence[Message]:
    """Returns the first observation."""
    ...

  async def step(self, answer: Message) -> Step:
    """Returns the reply to the agent's answer."""
    ...

  async def close(self) -> None:
    """Releases the resources of the episode; called once, on every path."""
    ...


@runtime_checkable
class Source(Protocol):
  """A family of tasks and how to build their environments.

  Frozen, hashable, picklable: it is a setting of the run.
  """

  @property
  def name(self) -> str:
    """Short name: the first part of every task id."""
    ...

  @property
  def words(self) -> Sequence[str]:
    """Every word of its environments' messages and answers, without repeats."""
    ...

  def task(self, index: int, split: Split) -> Task:
    """Returns the task at `index` >= 0 of a split; the stream has no end."""
    ...

  def __call__(self, task: Task) -> Environment:
    """Returns a fresh environment; does no slow work (that is `start`)."""
    ...

  def oracle(self, task: Task, messages: Sequence[Message]) -> str:
    """Returns a good answer to a conversation, for demonstrations."""
    ...

  def explore(self, task: Task, messages: Sequence[Message], seed: int) -> str:
    """Returns a random legal answer; the same seed gives the same answer."""
    ...


@runtime_checkable
class Reward(Protocol):
  """Grades finished episodes from their text alone."""

  @property
  def stateless(self) -> bool:
    """True if calls may run anywhere and be repeated after a failure."""
    ...

  async def __call__(
    self, task: Task, transcripts: Sequence[Transcript]
  ) -> Sequence[Grade]:
    """Returns one grade for each transcript, in order."""
    ...
