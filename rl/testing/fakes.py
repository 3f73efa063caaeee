"""Fakes for tests of schedules and faults; they need no device."""

import asyncio
import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from envs import base
from rl.train import learner, train_state


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counting:
  """Tasks whose reward is the share of answers that are "yes".

  An episode ends after `turns` answers; its metric `yes` counts those.

  Attributes:
    delay_s: seconds of one step, by task index and step number.
    lag_s: more seconds of each step, by task index and member: environments of
      a task are numbered 0, 1, ... as they are built.
    fault: of tasks with an index that `faulty` accepts, for members that
      `member` accepts: "start", "step" and "close" raise; "hang_start", "hang"
      (in a step) and "hang_close" never return; "nan" and "text" are rewards of
      a step, "word" is a message that no tokenizer knows.
    restarts: whether a failed start may be tried again.
    built: environments so far, by task id.
  """

  turns: int = 2
  delay_s: Callable[[int, int], float] = lambda index, step: 0.0
  lag_s: Callable[[int, int], float] = lambda index, member: 0.0
  fault: str = ""
  restarts: bool = False
  faulty: Callable[[int], bool] = lambda index: True
  member: Callable[[int], bool] = lambda member: True
  name: str = "counting"
  built: collections.Counter[str] = dataclasses.field(
    default_factory=collections.Counter, init=False, compare=False, repr=False
  )

  @property
  def words(self) -> Sequence[str]:
    """All words that its environments say or understand."""
    return ("go", "on", "yes", "no")

  def task(self, index: int, split: base.Split) -> base.Task:
    """Returns a task whose seed is its index."""
    name = f"{self.name}/{split}/{index}"
    return base.Task(id=name, index=index, split=split, seed=index)

  def __call__(self, task: base.Task) -> "_Counter":
    """Returns a fresh environment."""
    member = self.built[task.id]
    self.built[task.id] += 1
    faulty = self.faulty(task.index) and self.member(member)
    return _Counter(self, task, member, self.fault if faulty else "")

  def oracle(self, task: base.Task, messages: Sequence[base.Message]) -> str:
    """Returns "yes"."""
    return "yes"

  def explore(
    self, task: base.Task, messages: Sequence[base.Message], seed: int
  ) -> str:
    """Returns "yes" or "no"."""
    return ("yes", "no")[seed % 2]


@dataclasses.dataclass(eq=False)
class _Counter:
  source: Counting
  task: base.Task
  member: int
  fault: str
  steps: int = 0
  closed: bool = False

  async def start(self) -> Sequence[base.Message]:
    if self.fault == "start":
      raise OSError("no such game")
    if self.fault == "hang_start":
      await asyncio.Event().wait()
    return [base.Message("user", "unheard" if self.fault == "word" else "go")]

  async def step(self, answer: base.Message) -> base.Step:
    index = self.task.index
    lag_s = self.source.lag_s(index, self.member)
    await asyncio.sleep(self.source.delay_s(index, self.steps) + lag_s)
    self.steps += 1
    if self.fault == "step":
      raise OSError("the game broke")
    if self.fault == "hang":
      await asyncio.Event().wait()
    reward: Any = (answer.content == "yes") / self.source.turns
    reward = {"nan": float("nan"), "text": "won"}.get(self.fault, reward)
    done = self.steps == self.source.turns
    metrics = {"yes": float(answer.content == "yes")}
    return base.Step([base.Message("user", "on")], reward, done, metrics)

  async def close(self) -> None:
    self.closed = True
    if self.fault == "close":
      raise OSError("the game does not end")
    if self.fault == "hang_close":
      await asyncio.Event().wait()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judge:
  """A reward that returns the environment's, late or not at all.

  Attributes:
    delay_s: seconds of a call, by task index and call: calls of a task are
      numbered 0, 1, ... as they come.
    fails: true for calls that raise after that, by the same.
    calls: calls so far, by task id.
  """

  delay_s: Callable[[int, int], float] = lambda index, call: 0.0
  fails: Callable[[int, int], bool] = lambda index, call: False
  stateless: bool = True
  calls: collections.Counter[str] = dataclasses.field(
    default_factory=collections.Counter, init=False, compare=False, repr=False
  )

  async def __call__(
    self, task: base.Task, transcripts: Sequence[base.Transcript]
  ) -> Sequence[base.Grade]:
    """Returns one grade for each transcript, in order."""
    call = self.calls[task.id]
    self.calls[task.id] += 1
    await asyncio.sleep(self.delay_s(task.index, call))
    if self.fails(task.index, call):
      raise ConnectionError(f"call {call} of {task.id} fell on deaf ears")
    return [base.Grade(float(sum(t.step_rewards)), {}) for t in transcripts]


class FakeLearner(learner.Learner):
  """A learner that trains nothing; its parameters count updates."""

  def __init__(self):
    self.abstract = _counted(0)

  def init(self, key: Any) -> train_state.TrainState:
    """Returns the state after no updates."""
    return self.abstract

  def wrap(self, params: Any) -> train_state.TrainState:
    """Returns the state after no updates."""
    return self.abstract

  def place(self, batch: Any) -> Any:
    """Returns the batch, which stays on the host."""
    return batch

  def score(self, params: Any, batch: Any) -> Any:
    """Returns the log-probabilities that the engine recorded."""
    return self.place(batch).behaviour

  def score_base(self, params: Any, batch: Any) -> Any:
    """Returns the log-probabilities that the engine recorded."""
    return self.place(batch).behaviour

  def values(self, params: Any, critic: Any, batch: Any) -> Any:
    """Returns zeros."""
    return 0 * self.place(batch).behaviour

  def accumulate(
    self, params: Any, total: Any, batch: Any, critic: Any = None
  ) -> learner.Accumulator:
    """Counts the sampled tokens of one more batch."""
    before = 0.0 if total is None else total.sums
    tokens = before + float(batch.sampled.sum())
    return learner.Accumulator._make(({}, tokens))

  def update(
    self, state: Any, total: Any, left_out_divisor: float = 0.0
  ) -> tuple[train_state.TrainState, dict[str, Any]]:
    """Counts one more update."""
    sums: dict[str, Any] = dict.fromkeys(learner.METRICS, 0.0)
    sums["tokens"] = total.sums
    return _counted(state.updates + 1), sums


def _counted(updates: Any) -> train_state.TrainState:
  return train_state.TrainState({"updates": updates}, (), updates)
