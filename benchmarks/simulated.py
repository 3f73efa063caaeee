"""Shared by benchmarks on simulated hardware: a world in lockstep, and runs."""

import asyncio
import dataclasses
import itertools
from collections.abc import Sequence

from absl import flags as absl_flags

from envs import base
from rl.audit import event_log
from rl.rollout import group_rollout
from rl.simulation import distributions, simulate, workload
from rl.simulation import learner as simulated_learner
from rl.simulation import processor as simulated_processor
from rl.simulation import world as world_lib

ROUNDS = absl_flags.DEFINE_integer("rounds", 7, "Rounds of each row.")

SWE = workload.Workload(
  name="swe",
  turns=distributions.Histogram(edges=(30, 50), counts=(1,)),
  answer_tokens=distributions.LogNormal(mean=200.0, sigma=0.5),
  reply_tokens=distributions.Fixed(400.0),
)
"""RollArt's agent: 30 to 50 turns are published, the lengths are assumed."""
SWE_ROLLOUT = group_rollout.Rollout(
  group_size=8, max_turns=50, turn_tokens=4_096, max_tokens=1 << 17
)


@dataclasses.dataclass(eq=False)
class Lockstep(world_lib.World):
  """A world in which all episodes of a round wait for the slowest, each turn.

  Environments step when all have their answers, and answers are sampled when
  all have stepped, as in systems that hold a batch of environments.

  Args:
    episodes: of a round, all at the same time.
    graded_together: rewards begin when the last episode has ended.
  """

  episodes: int = 0
  graded_together: bool = False

  def __post_init__(self) -> None:
    super().__post_init__()
    self._turns = Barrier(self.episodes)
    self._ends = Barrier(self.episodes)

  def __call__(self, task: base.Task) -> base.Environment:
    """Returns an environment that keeps step with all others."""
    return _InStep(super().__call__(task), self._turns)

  async def grade(
    self, task: base.Task, transcripts: Sequence[base.Transcript]
  ) -> Sequence[base.Grade]:
    """Returns the grades, begun when all may."""
    if self.graded_together:
      await self._ends.wait(leaves=True)
    return await super().grade(task, transcripts)


class Barrier:
  """A reusable barrier that parties may leave.

  Args:
    parties: number of waiters; when all have left, as many come again.
  """

  def __init__(self, parties: int):
    self._parties = self._left = parties
    self._waiting = self._leaving = 0
    self._opened = asyncio.Event()

  async def wait(self, leaves: bool = False) -> None:
    """Returns when all remaining parties wait.

    Args:
      leaves: this one does not come again.
    """
    self._waiting += 1
    self._leaving += leaves
    opened = self._opened
    self._open_if_all()
    await opened.wait()

  def leave(self) -> None:
    """Lets the others go on without this one."""
    self._left -= 1
    self._open_if_all()

  def _open_if_all(self) -> None:
    if self._waiting < self._left:
      return
    self._left -= self._leaving
    self._left = self._left or self._parties
    self._waiting = self._leaving = 0
    self._opened.set()
    self._opened = asyncio.Event()


class _InStep:
  """An environment that waits for all others before and after a step."""

  def __init__(self, inner: base.Environment, turns: Barrier):
    self._inner = inner
    self._turns = turns
    self._left = False

  async def start(self) -> Sequence[base.Message]:
    said = await self._inner.start()
    await self._turns.wait()
    return said

  async def step(self, answer: base.Message) -> base.Step:
    await self._turns.wait()
    step = await self._inner.step(answer)
    if step.done:
      await self._turns.wait(leaves=True)
      self._left = True
    else:
      await self._turns.wait()
    return step

  async def close(self) -> None:
    if not self._left:
      self._left = True
      self._turns.leave()
    await self._inner.close()


def cluster(
  speed: simulated_processor.Speed,
  engines: int = 1,
  *,
  token_s: float = 0.0,
  update_s: float = 0.0,
  transfer_s: float = 0.0,
) -> simulate.Cluster:
  """Returns equal engines, and a learner whose work takes no other time."""
  return simulate.Cluster(
    learner=simulated_learner.LearnerSpeed(token_s=token_s, update_s=update_s),
    pools=(simulate.EnginePool(engines=engines, speed=speed),),
    transfer_s=transfer_s,
  )


def play(
  settings: simulate.Simulation, world: world_lib.World | None = None
) -> simulate.RunRecord:
  """Returns the checked record of a run."""
  return checked(simulate.simulate(settings, world))


def rounds_s(record: simulate.RunRecord) -> list[float]:
  """Returns seconds from publish to publish, the first from the beginning."""
  ends = [e["t"] for e in event_log.of_kind(record.events, "published")]
  return [b - a for a, b in itertools.pairwise([0.0, *ends])]


def checked(record: simulate.RunRecord) -> simulate.RunRecord:
  """Returns the record of a run that kept every promise of its schedule.

  Raises:
    RuntimeError: it broke one.
  """
  if broken := record.violations:
    raise RuntimeError(f"{len(broken)} violations, such as {broken[0]}")
  return record


def deviation(ours: float, published: float) -> float:
  """Returns the relative deviation from a published number."""
  return ours / published - 1.0


def place(ours: float, low: float, high: float) -> str:
  """Returns "in range", or the deviation from the nearer end of a range."""
  if low <= ours <= high:
    return "in range"
  edge = low if ours < low else high
  return f"{deviation(ours, edge):+.1%} of {edge:g}"
