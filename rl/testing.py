"""Fakes for tests of schedules and faults: no device, no third party."""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from envs import base
from rl import engine, learner, trajectory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counting:
  """Tasks in which any answer is right; the last of `turns` ends the episode.

  The reward is the share of answers that were the word "yes".

  Attributes:
    delay_s: seconds of one step, by task index and step number.
    fault: what goes wrong, in tasks whose index `faulty` accepts: "start" and
      "step" raise, "hang" never returns from a step, "nan" and "text" are
      rewards, "word" says what no tokenizer knows.
  """

  turns: int = 2
  delay_s: Callable[[int, int], float] = lambda index, step: 0.0
  fault: str = ""
  faulty: Callable[[int], bool] = lambda index: True
  name: str = "counting"

  @property
  def words(self) -> Sequence[str]:
    """Every word that its environments say or understand."""
    return ("go", "on", "yes", "no")

  def task(self, index: int, split: base.Split) -> base.Task:
    """Returns a task whose seed is its index."""
    name = f"{self.name}/{split}/{index}"
    return base.Task(id=name, index=index, split=split, seed=index)

  def __call__(self, task: base.Task) -> "_Counter":
    """Returns a fresh environment."""
    fault = self.fault if self.faulty(task.index) else ""
    return _Counter(self, task, fault)

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
  fault: str
  steps: int = 0
  closed: bool = False

  async def start(self) -> Sequence[base.Message]:
    if self.fault == "start":
      raise OSError("no such game")
    return [base.Message("user", "unheard" if self.fault == "word" else "go")]

  async def step(self, answer: base.Message) -> base.Step:
    await asyncio.sleep(self.source.delay_s(self.task.index, self.steps))
    self.steps += 1
    if self.fault == "step":
      raise OSError("the game broke")
    if self.fault == "hang":
      await asyncio.Event().wait()
    reward: Any = (answer.content == "yes") / self.source.turns
    reward = {"nan": float("nan"), "text": "won"}.get(self.fault, reward)
    done = self.steps == self.source.turns
    return base.Step([base.Message("user", "on")], reward, done)

  async def close(self) -> None:
    self.closed = True


class FakeEngine:
  """A decode engine without a model: answers "yes" or "no" by the seed.

  Args:
    answers: ids to choose from, each followed by `stop_id`.
    delay_s: seconds of one answer, by priority of the request.
  """

  capabilities: frozenset[engine.OnPublish] = frozenset({"drain", "recompute"})

  def __init__(
    self,
    answers: Sequence[int],
    stop_id: int,
    delay_s: Callable[[tuple[int, ...]], float] = lambda priority: 0.0,
  ):
    self._answers = answers
    self._stop_id = stop_id
    self._delay_s = delay_s
    self._open = asyncio.Event()
    self._open.set()
    self._sampling = asyncio.Event()
    self._sampling.set()
    self._running = 0
    self._quiet = asyncio.Event()
    self._quiet.set()
    self.version = trajectory.PolicyVersion(0)
    self.params: Any = None

  async def generate(self, request: engine.DecodeRequest) -> engine.Completion:
    """Returns one answer; its tokens are sampled first and last of all."""
    await self._open.wait()
    self._running += 1
    self._quiet.clear()
    first = int(self.version)
    try:
      await asyncio.sleep(self._delay_s(request.priority))
      await self._sampling.wait()
    finally:
      self._running -= 1
      if not self._running:
        self._quiet.set()
    pick = (request.seed + len(request.tokens)) % len(self._answers)
    tokens = np.array([self._answers[pick], self._stop_id], np.int32)
    return engine.Completion(
      tokens=tokens,
      logprobs=np.full(2, -0.5, np.float32),
      versions=np.array([first, int(self.version)], np.int32),
      stop="stop",
      cached_tokens=0,
      decode_s=0.0,
    )

  def abort(self, request_id: str) -> None:
    """Does nothing: every answer ends soon."""

  def release(self, session: str) -> None:
    """Does nothing: there is no cache."""

  async def pause(self, in_flight: engine.OnPublish) -> None:
    """Returns when no request runs; with "recompute" at once.

    Answers under way then end after `resume`, with the new version.
    """
    self._open.clear()
    if in_flight == "recompute":
      self._sampling.clear()
    else:
      await self._quiet.wait()

  async def update_weights(
    self, version: trajectory.PolicyVersion, params: Any
  ) -> None:
    """Serves `version` from now on."""
    self.version = version
    self.params = params

  def resume(self) -> None:
    """Goes on after `pause`."""
    self._open.set()
    self._sampling.set()

  def stats(self) -> engine.EngineStats:
    """Returns the version and what runs; nothing else is counted."""
    return engine.EngineStats(
      version=int(self.version),
      running=self._running,
      waiting=0,
      sampled_tokens=0,
      prefilled_tokens=0,
      dispatches=0,
      compilations=0,
    )

  async def close(self) -> None:
    """Does nothing: there is no device."""


def fake_learner(step_s: float = 0.0) -> learner.Learner:
  """Returns a learner whose parameters count updates and which trains nothing.

  Args:
    step_s: seconds of one accumulation.
  """

  def zero() -> learner.Accumulator:
    return learner.Accumulator._make(({}, 0.0))

  def accumulate(params, total, batch) -> learner.Accumulator:
    time.sleep(step_s)
    tokens = total.sums + float(batch.sampled.sum())
    return learner.Accumulator._make(({}, tokens))

  def update(state, total) -> tuple[learner.TrainState, dict[str, Any]]:
    sums: dict[str, Any] = dict.fromkeys(learner.METRICS, 0.0)
    sums["tokens"] = total.sums
    count = state.updates + 1
    after = learner.TrainState._make(({"updates": count}, (), count, None))
    return after, sums

  start = learner.TrainState._make(({"updates": 0}, (), 0, None))
  return learner.Learner(
    init=lambda key: start,
    wrap=lambda params: start,
    zero=zero,
    accumulate=accumulate,
    update=update,
    score=lambda params, batch: batch.behaviour,
    place=lambda batch: batch,
    abstract=start,
  )
