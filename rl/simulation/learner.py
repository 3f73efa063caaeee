"""The trainer and the transfer of weights of a simulated run only wait."""

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from rl.data import trajectory
from rl.pools import weight_transfer
from rl.runtime import trace
from rl.settings import checks
from rl.simulation import host_thread, processes
from rl.train import trainer


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerSpeed:
  """The speed of the learner's mesh.

  Attributes:
    token_s: seconds of a trained id, context included.
    batch_ids: trained at once: fewer wait for more, or for the end of their
      update; 0: whatever there is trains at once.
    update_s: seconds of an optimizer step.
    describe_s: seconds after each publish to compare the log-probabilities of
      engine and learner.
    accelerators: of its mesh.
    processes: among which these are divided, as `placement.learner_processes`;
      see `Cluster.processes`. The seconds above are those of the whole mesh.
  """

  token_s: float = 1e-4
  batch_ids: float = 0.0
  update_s: float = 1.0
  describe_s: float = 0.0
  accelerators: int = 8
  processes: int = 1

  def validate(self) -> None:
    """Raises ValueError on a time below 0, or a mesh without accelerators."""
    where = "cluster.learner"
    names = ("token_s", "batch_ids", "update_s", "describe_s")
    checks.finite_at_least(self, 0, *names, where=where)
    checks.at_least(self, 1, "accelerators", "processes", where=where)
    if self.batch_ids:
      out = "or 0, where whatever there is trains at once"
      checks.at_least(self, 1, "batch_ids", where=where, out=out)


class SimulatedTrainer:
  """Trains in virtual time; its weights are the number of updates.

  The coordinator calls it; see `trainer.Trainer`.

  Args:
    thread: that packs; None: packing takes no time.
    gang: its processes; None: it is in this one.
  """

  def __init__(
    self,
    learner: LearnerSpeed,
    spans: trace.Trace,
    thread: host_thread.HostThread | None = None,
    gang: processes.SimulatedGang | None = None,
  ):
    self._learner = learner
    self._gang = gang
    self._spans = spans
    self._thread = thread or host_thread.HostThread(host_thread.HostWork())
    self._version = 0
    self._waiting_ids = 0.0
    self.state = 0

  def restore(self, state: int) -> None:
    """Goes on after a number of updates."""
    self.state = state

  gap = None  # Its log-probabilities are not simulated.

  @property
  def params(self) -> int:
    """The number of updates."""
    return self.state

  async def begin_round(self, version: int) -> None:
    """Assigns the spans from here on to a round."""
    self._version = version

  async def accumulate(
    self, groups: Sequence[trajectory.Group]
  ) -> Sequence[trainer.MemberUse]:
    """Waits for the time of full batches, of members without a fault."""
    await self._thread.pack(len(groups))
    used = [_used(group) for group in groups]
    self._waiting_ids += sum(
      member.num_ids
      for group, one in zip(groups, used, strict=True)
      for member, trained in zip(group.trajectories, one.trained, strict=True)
      if trained
    )
    size = self._learner.batch_ids or self._waiting_ids
    # There is a span even if nothing trains.
    await self._train(size if self._waiting_ids >= size else 0.0)
    while size and self._waiting_ids >= size:
      await self._train(size)
    return used

  async def _train(self, ids: float) -> None:
    """Trains so many of the ids that wait, as one batch."""
    self._waiting_ids -= ids
    seconds = ids * self._learner.token_s
    await self._work("accumulate", seconds, ids=round(ids))

  async def update(self) -> dict[str, float]:
    """Waits for the time of what is left, and of an optimizer step."""
    if self._waiting_ids:
      await self._train(self._waiting_ids)
    await self._work("update", self._learner.update_s)
    self.state += 1
    return {"tokens": 0.0, "grad_norm": 0.0}

  async def describe(self) -> dict[str, float]:
    """Waits for the time of the comparison; returns no metrics."""
    if self._learner.describe_s:
      await self._work("score", self._learner.describe_s)
    return {}

  async def _work(self, name: str, seconds: float, **args: int) -> None:
    loop = asyncio.get_running_loop()
    start = loop.time()
    if self._gang is None or not seconds:
      await asyncio.sleep(seconds)
    else:
      await self._gang.command(seconds)
    end, version = loop.time(), self._version
    self._spans.add("learner", name, start, end, version=version, **args)


class SimulatedTransfer:
  """A `weight_publisher.Transfer` that takes time and moves nothing.

  Args:
    sent_s: seconds in which weights are sent, and decoding goes on.
    gang: the learner's processes, from which they come; None: they are here.
  """

  def __init__(
    self, sent_s: float, gang: processes.SimulatedGang | None = None
  ):
    self._sent_s = sent_s
    self._gang = gang

  async def stage(
    self, params: Any, engines: Sequence[int]
  ) -> list[weight_transfer.StagedCopy]:
    """Returns the parameters themselves, after the seconds of the transfer."""
    if self._gang is not None:
      await self._gang.fetch()
    await asyncio.sleep(self._sent_s)
    return [weight_transfer.StagedCopy(params, 0, 0) for _ in engines]

  def checksum(self, params: Any) -> None:
    """Returns None: simulated weights are not compared."""
    del params


def _used(group: trajectory.Group) -> trainer.MemberUse:
  trained = np.array([t.status.trainable for t in group.trajectories], bool)
  nothing = np.zeros(len(trained), np.float32)
  cut = np.zeros_like(trained)
  return trainer.MemberUse(nothing, trained, cut, [None] * len(trained))
