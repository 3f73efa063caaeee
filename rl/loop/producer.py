"""The rollout side of the loop: groups from admission to the learner's queue.

  gate.admit -> tasks.next -> play --+-- fit ------> buffer -> take
       ^                      ^      |                 |
       | release              |      +-- dropped <-----+ too old by now
       |                      +----------- again, in the same place

A group that is dropped is played again in its place: another task, or the same
one when stale work is recycled. What begins later is never older, so the gate
need not know.
"""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from envs import base
from rl.algorithms import dynamic_sampling
from rl.audit import event_log
from rl.data import trajectory
from rl.rollout import group_rollout
from rl.schedule import group_buffer, overlap, staleness_gate


@runtime_checkable
class Tasks(Protocol):
  """An endless stream of tasks; `prompts.Prompts` is one."""

  def next(self, source: str | None = None) -> base.Task:
    """Returns the next task, of that source if one is named."""
    ...

  def give_back(self, task: base.Task) -> None:
    """It will not be trained, and nothing takes its place."""
    ...

  def learned(self, task: base.Task, rewards: Sequence[float | None]) -> None:
    """A group of this task was graded so."""
    ...

  @property
  def cursor(self) -> dict[str, Any]:
    """JSON data of where it is."""
    ...


class Producer:
  """Keeps as many groups under way as the bound allows.

  The coordinator calls `begin`, then `ready`, `take` and `commit` for what it
  trains, `advance` when a round has been trained, `release` when its weights
  serve, and `stop`. All on one event loop.

  Attributes:
    news: set whenever a group is ready.
  """

  def __init__(
    self,
    schedule: overlap.Overlap,
    *,
    rounds: int,
    seed: int,
    player: group_rollout.Player,
    tasks: Tasks,
    group_filter: dynamic_sampling.GroupFilter,
    log: event_log.EventLog,
  ):
    self._schedule = schedule
    self._rounds = rounds
    self._seed = seed
    self._player = player
    self._tasks = tasks
    self._group_filter = group_filter
    self._log = log
    self._plays: dict[int, group_rollout.Play] = {}
    self._trained = 0
    self._got = 0
    self._shed_at = 0
    self._stopping = False
    self._room = asyncio.Event()
    self.news = asyncio.Event()

  # Begin and end.

  def restore(
    self,
    trained: int,
    next_group: int,
    untrained: Mapping[int, trajectory.Group],
    in_flight: Mapping[int, group_buffer.Attempt],
  ) -> None:
    """Goes on where a run was saved after so many rounds."""
    per_round = self._schedule.groups_per_round
    self._trained = trained
    self._gate = staleness_gate.StalenessGate(
      self._schedule,
      total=self._rounds * per_round,
      admitted=trained * per_round + len(untrained) + len(in_flight),
      version=trained,
      next_group=next_group,
    )
    self._buffer = group_buffer.GroupBuffer(
      trained * per_round, in_order=self._schedule.consume == "submit"
    )
    self._again = dict(in_flight)
    self._got = len(untrained)
    for group_id, group in sorted(untrained.items()):
      self._buffer.restore(group)
      self._log.emit(
        "restored",
        group=group_id,
        attempt=group.attempt,
        tokens=group.num_sampled - group.redundant_tokens,
        first_version=int(group.first_version),
      )

  async def run(self) -> None:
    """Plays until it is cancelled.

    Raises:
      ExceptionGroup: playing a group failed as a whole, which no fault of its
        environment or reward does.
    """
    async with asyncio.TaskGroup() as plays:
      self._group = plays
      for group_id, attempt in sorted(self._again.items()):
        del self._again[group_id]
        self._submit(plays, group_id, attempt, replayed=True)
      if self._full:
        self._shed()
      while True:
        self._room.clear()
        while self._may_admit:
          attempt = group_buffer.Attempt(self._tasks.next())
          self._submit(plays, self._gate.admit(), attempt)
        await self._room.wait()

  @property
  def _may_admit(self) -> bool:
    schedule = self._schedule
    at_frontier = (
      schedule.admission == "hard_frontier"
      and len(self._plays) >= schedule.frontier_groups
    )
    closed = at_frontier or self._full or self._stopping
    return self._gate.may_admit() and not closed

  def _submit(
    self,
    plays: asyncio.TaskGroup,
    group_id: int,
    attempt: group_buffer.Attempt,
    **fields: bool,
  ) -> None:
    play = self._prepare(group_id, attempt, **fields)
    plays.create_task(self._play(play, attempt), name=f"group {group_id}")

  def _prepare(
    self, group_id: int, attempt: group_buffer.Attempt, **fields: bool
  ) -> group_rollout.Play:
    self._buffer.submit(group_id, attempt)
    version = self._gate.version
    self._log.emit(
      "submitted",
      group=group_id,
      attempt=attempt.number,
      version=int(version),
      source=attempt.task.source,
      task=attempt.task.id,
      **fields,
    )
    play = self._plays[group_id] = self._player.play(
      attempt.task, group_id, self._seed, version, attempt.number
    )
    return play

  async def _play(
    self, play: group_rollout.Play, attempt: group_buffer.Attempt
  ) -> None:
    """Plays in one place until there is a group that may be trained."""
    group_id = play.group_id
    try:
      while True:
        group = await play.run()
        if play.aborted == "stopped":
          return
        reason = self._why_not(play, group, attempt.refills)
        if not play.aborted:
          rewards = [t.graded_reward for t in group.trajectories]
          self._tasks.learned(play.task, rewards)
        if not reason:
          break
        self._drop(group, reason)
        if reason == "redundant":
          self._give_up(group_id, play.task)
          return
        if self._stopping:
          return
        attempt = self._another(group_id, attempt, reason)
        play = self._prepare(group_id, attempt)
    finally:
      del self._plays[group_id]
      self._room.set()
    self._put(group)

  def _why_not(
    self, play: group_rollout.Play, group: trajectory.Group, refills: int
  ) -> str:
    """Returns why a group will not be trained; nothing when it may be."""
    if play.aborted:
      return play.aborted
    return self._too_old(group) or self._group_filter(group, refills) or ""

  def _too_old(self, group: trajectory.Group) -> str:
    checked = self._schedule.checks_age
    first = int(group.first_version)
    old = checked and self._gate.too_old(first, self._trained)
    return "stale" if old else ""

  def _drop(self, group: trajectory.Group, reason: str) -> None:
    self._log.emit(
      "dropped",
      group=group.group_id,
      attempt=group.attempt,
      reason=reason,
      version=int(self._gate.version),
      tokens=group.num_sampled,
    )

  def _give_up(self, group_id: int, task: base.Task) -> None:
    self._buffer.withdraw(group_id)
    self._gate.cancel(self._shed_at)
    self._tasks.give_back(task)

  def _another(
    self, group_id: int, before: group_buffer.Attempt, reason: str
  ) -> group_buffer.Attempt:
    """Returns what is played where an attempt was dropped.

    Of the same source, so that the mix holds in what is trained; unless that
    has been too slow for the bound too often.
    """
    task, number = before.task, before.number + 1
    if reason != "stale":
      again = self._tasks.next(task.source)
      return group_buffer.Attempt(again, number, refills=before.refills + 1)
    stale = before.stale + 1
    if stale >= self._schedule.too_slow_after:
      self._log.emit(
        "source_too_slow",
        group=group_id,
        attempt=before.number,
        source=task.source,
        task=task.id,
        attempts=stale,
      )
      task, stale = self._tasks.next(), 0
    elif self._schedule.consume == "drop":
      task = self._tasks.next(task.source)
    return group_buffer.Attempt(task, number, stale, before.refills)

  # Handing over.

  def _put(self, group: trajectory.Group) -> None:
    self._buffer.put(group)
    self._log.emit(
      "ready",
      group=group.group_id,
      attempt=group.attempt,
      version=int(self._gate.version),
      first_version=int(group.first_version),
    )
    self._got += 1
    if self._full:
      self._shed()
    self.news.set()

  @property
  def _sheds(self) -> bool:
    """Whether what a round does not need is no use to the next."""
    schedule = self._schedule
    return schedule.redundancy.extra_groups > 0 and not schedule.max_staleness

  @property
  def _full(self) -> bool:
    """Whether the round has its groups, and needs none of the others."""
    return self._sheds and self._got >= self._schedule.groups_per_round

  def _shed(self) -> None:
    self._shed_at = self._gate.version
    for play in self._plays.values():
      play.abort("redundant")

  def ready(self, count: int) -> bool:
    """Whether the next `count` groups may be taken."""
    return self._buffer.has(count)

  def missing(self, count: int) -> list[int]:
    """Ids of groups that the next `count` wait for."""
    return self._buffer.missing(count)

  def take(self, count: int) -> list[trajectory.Group]:
    """Returns the next `count` groups.

    Raises:
      RuntimeError: they are not ready, or one is older than the bound.
    """
    groups = self._buffer.take(count)
    for group in groups:
      first = int(group.first_version)
      self._gate.check(first, self._trained, group.group_id)
      self._log.emit(
        "dequeued",
        group=group.group_id,
        attempt=group.attempt,
        version=self._trained,
      )
    return groups

  def commit(self) -> None:
    """An optimizer step holds what was taken."""
    self._buffer.commit()

  def advance(self, trained: int) -> None:
    """So many rounds are trained: what is too old for the next one goes."""
    self._trained = trained
    if self._sheds:
      self._shed()
    for group in self._buffer.ready.values():
      if self._sheds:
        self._drop(group, "redundant")
        self._give_up(group.group_id, group.task)
      elif reason := self._too_old(group):
        self._drop(group, reason)
        self._buffer.withdraw(group.group_id)
        before = group_buffer.Attempt(group.task, group.attempt)
        again = self._another(group.group_id, before, reason)
        self._submit(self._group, group.group_id, again)
    if self._schedule.checks_age:
      for play in self._plays.values():
        first = play.first_version
        if first is not None and self._gate.too_old(first, trained):
          play.abort("stale")

  def release(self, version: trajectory.PolicyVersion) -> None:
    """Every engine serves this version: more may be admitted."""
    self._gate.release(version)
    self._got = 0
    self._room.set()

  async def stop(self, grace_s: float) -> None:
    """Ends what is played; every token that was sampled is counted."""
    self._stopping = True
    for play in list(self._plays.values()):
      play.abort("stopped")
    with contextlib.suppress(TimeoutError):
      async with asyncio.timeout(grace_s):
        while self._plays:
          self._room.clear()
          await self._room.wait()
        await asyncio.gather(*self._player.closing)

  @property
  def untrained(self) -> Mapping[int, trajectory.Group]:
    """Finished groups that no optimizer step holds yet."""
    return self._buffer.untrained

  @property
  def in_flight(self) -> Mapping[int, group_buffer.Attempt]:
    """What is played, or is about to be."""
    return {**self._again, **self._buffer.in_flight}

  @property
  def next_group(self) -> int:
    """Id of the group that is admitted next."""
    return self._gate.next_group
