"""The producer: takes groups from admission to the learner's queue.

  run       StalenessGate.admit -> Prompts.next -> _submit
            waits for `_room`; unblocked by `release` and the end of a `_play`
  _play     GroupRollout.run -> fit ----> _put -> GroupBuffer -> take
              ^                 |
              +---- _another ---+-- dropped: too old, or not worth training
  advance   drops the groups of the buffer that have become too old

A dropped group is played again in its place: another task, or the same one
when stale work is recycled. A later attempt is never older, so the gate does
not need to know of it.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Mapping

from envs import base
from rl.algorithms import group_filters
from rl.audit import event_log
from rl.data import trajectory
from rl.rollout import group_rollout, member_requests, prompts
from rl.schedule import group_buffer, overlap, staleness_gate


class Producer:
  """Keeps as many groups under way as the bound allows.

  The coordinator calls `restore` and `run`, then `ready`, `take` and `commit`
  for the groups that it trains, `advance` when a round has been trained,
  `release` when its weights serve, and `stop`. All on one event loop.

  Attributes:
    group_ready: set whenever a group is ready.
  """

  def __init__(
    self,
    schedule: overlap.Overlap,
    *,
    rounds: int,
    seed: int,
    player: group_rollout.Player,
    tasks: prompts.Prompts,
    group_filter: group_filters.GroupFilter,
    log: event_log.EventLog,
  ):
    self._schedule = schedule
    self._rounds = rounds
    self._seed = seed
    self._player = player
    self._tasks = tasks
    self._group_filter = group_filter
    self._log = log
    self._rollouts: dict[int, group_rollout.GroupRollout] = {}
    self._trained = 0
    self._num_ready = 0  # Since the last release.
    self._num_taken = 0  # Micro-batches of the round.
    self._shed_at = 0
    self._stopping = False
    self._hold = member_requests.Hold()
    self._room = asyncio.Event()
    self.group_ready = asyncio.Event()

  # Begin and end.

  def restore(
    self,
    trained: int,
    next_group: int,
    untrained: Mapping[int, trajectory.Group],
    in_flight: Mapping[int, group_buffer.Attempt],
  ) -> None:
    """Continues a run that was saved after `trained` rounds."""
    self._trained = trained
    self._replays = dict(in_flight)
    self._count(next_group, untrained, in_flight)
    for group_id, group in sorted(untrained.items()):
      self._log.emit(
        "restored",
        group=group_id,
        attempt=group.attempt,
        tokens=group.num_sampled - group.redundant_tokens,
        first_version=group.first_version,
      )

  def _count(
    self,
    next_group: int,
    untrained: Mapping[int, trajectory.Group],
    in_flight: Mapping[int, group_buffer.Attempt],
  ) -> None:
    """Makes gate and buffer of these groups, as a restart finds them."""
    done = self._trained * self._schedule.groups_per_round
    self._gate = staleness_gate.StalenessGate(
      self._schedule,
      total=self._rounds * self._schedule.groups_per_round,
      admitted=done + len(untrained) + len(in_flight),
      version=self._trained,
      next_group=next_group,
    )
    self._buffer = group_buffer.GroupBuffer(
      done, in_order=self._schedule.consume == "submit"
    )
    self._num_ready = len(untrained)
    for _, group in sorted(untrained.items()):
      self._buffer.restore(group)

  async def run(self) -> None:
    """Plays until it is cancelled.

    Raises:
      ExceptionGroup: playing a group failed as a whole; faults of environments
        and rewards do not do that.
    """
    async with asyncio.TaskGroup() as tasks:
      self._group_tasks = tasks
      for group_id, attempt in sorted(self._replays.items()):
        del self._replays[group_id]
        self._submit(group_id, attempt, replayed=True)
      if self._full:
        self._shed()
      while True:
        self._room.clear()
        while self._may_admit:
          attempt = group_buffer.Attempt(self._tasks.next())
          self._submit(self._gate.admit(), attempt)
        await self._room.wait()

  @property
  def _may_admit(self) -> bool:
    schedule = self._schedule
    at_frontier = (
      schedule.admission == "hard_frontier"
      and len(self._rollouts) >= schedule.frontier_groups
    )
    closed = at_frontier or self._full or self._stopping or self._hold.is_closed
    return self._gate.may_admit() and not closed

  def _submit(
    self, group_id: int, attempt: group_buffer.Attempt, **fields: bool
  ) -> None:
    rollout = self._prepare(group_id, attempt, **fields)
    self._group_tasks.create_task(
      self._play(rollout, attempt), name=f"group {group_id}"
    )

  def _prepare(
    self, group_id: int, attempt: group_buffer.Attempt, **fields: bool
  ) -> group_rollout.GroupRollout:
    self._buffer.submit(group_id, attempt)
    version, past = self._gate.version, attempt.past
    self._log.emit(
      "submitted",
      group=group_id,
      attempt=attempt.number,
      version=version,
      source=attempt.task.source,
      task=attempt.task.id,
      **fields,
    )
    rollout = self._rollouts[group_id] = group_rollout.GroupRollout(
      self._player,
      attempt.task,
      group_id=group_id,
      seed=self._seed,
      admitted=past.admitted if past else version,
      attempt=attempt.number,
      hold=self._hold,
      past=past.members if past else {},
      refusals=self._refusals(attempt),
    )
    return rollout

  def _refusals(self, attempt: group_buffer.Attempt) -> dict[int, str]:
    """Returns why members in flight before a restart are played anew."""
    members = attempt.past.members if attempt.past else {}
    sources = prompts.sources_of(self._player.source)
    if any(
      base.members_together(one) > 1
      for one in sources
      if one.name == attempt.task.source
    ):
      return dict.fromkeys(members, "members of its group play each other")
    if not self._schedule.drains:
      return {}
    why = "engines drain, so that its tokens are of one version"
    return {
      index: why
      for index, member in members.items()
      if not member.is_over
      and {v for v, _ in member.trajectory.versions} - {self._gate.version}
    }

  async def _play(
    self, rollout: group_rollout.GroupRollout, attempt: group_buffer.Attempt
  ) -> None:
    """Plays in one place until a group may be trained."""
    group_id = rollout.group_id
    try:
      while True:
        group = await rollout.run()
        if rollout.aborted == "stopped":
          return
        reason = self._drop_reason(rollout, group, attempt.refills)
        if not rollout.aborted:
          rewards = [t.graded_reward for t in group.trajectories]
          self._tasks.learned(rollout.task, rewards)
        if not reason:
          break
        self._drop(group, reason)
        if reason == "redundant":
          self._give_up(group_id, rollout.task)
          return
        if self._stopping:
          return
        attempt = self._another(group_id, attempt, reason)
        rollout = self._prepare(group_id, attempt)
    finally:
      del self._rollouts[group_id]
      self._room.set()
      self._hold.changed.set()
    self._put(dataclasses.replace(group, refills=attempt.refills))

  def _drop_reason(
    self,
    rollout: group_rollout.GroupRollout,
    group: trajectory.Group,
    refills: int,
  ) -> str:
    """Returns why a group will not be trained; "" if it may be."""
    if rollout.aborted:
      return rollout.aborted
    return self._too_old(group) or self._group_filter(group, refills) or ""

  def _too_old(self, group: trajectory.Group) -> str:
    checked = self._schedule.checks_age
    first = group.first_version
    old = checked and self._gate.too_old(first, self._trained)
    return "stale" if old else ""

  def _drop(self, group: trajectory.Group, reason: str) -> None:
    self._log.emit(
      "dropped",
      group=group.group_id,
      attempt=group.attempt,
      reason=reason,
      version=self._gate.version,
      tokens=group.num_sampled,
    )

  def _give_up(self, group_id: int, task: base.Task) -> None:
    self._buffer.withdraw(group_id)
    self._gate.cancel(self._shed_at)
    self._tasks.give_back(task)

  def _another(
    self, group_id: int, before: group_buffer.Attempt, reason: str
  ) -> group_buffer.Attempt:
    """Returns the next attempt in the place of a dropped one.

    Its task is of the same source, so that the trained mix holds; unless that
    source has been too slow for the bound too often.
    """
    task, number = before.task, before.number + 1
    if reason != "stale":
      refill = self._tasks.next(task.source)
      return group_buffer.Attempt(refill, number, refills=before.refills + 1)
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
      version=self._gate.version,
      first_version=group.first_version,
    )
    self._num_ready += 1
    if self._full:
      self._shed()
    self.group_ready.set()

  @property
  def _sheds(self) -> bool:
    """True if the next round has no use for the surplus groups of this one."""
    schedule = self._schedule
    return schedule.redundancy.extra_groups > 0 and not schedule.max_staleness

  @property
  def _full(self) -> bool:
    """True if the round has its groups and the surplus is dropped."""
    return self._sheds and self._num_ready >= self._schedule.groups_per_round

  def _shed(self) -> None:
    self._shed_at = self._gate.version
    for rollout in self._rollouts.values():
      rollout.abort("redundant")

  def ready(self, count: int) -> bool:
    """Returns True if the next `count` groups may be taken."""
    return self._buffer.has(count)

  def missing(self, count: int) -> list[int]:
    """Returns ids of groups that the next `count` wait for."""
    return self._buffer.missing(count)

  def fitting(self, most: int, tokens: int) -> int:
    """Returns how many ready groups fit a budget; see `GroupBuffer.fitting`."""
    return self._buffer.fitting(most, tokens)

  def take(self, count: int) -> list[trajectory.Group]:
    """Returns the next `count` groups: a micro-batch.

    Raises:
      RuntimeError: they are not ready, or one is older than the bound.
    """
    groups = self._buffer.take(count)
    for group in groups:
      first = group.first_version
      self._gate.check(first, self._trained, group.group_id)
      self._log.emit(
        "dequeued",
        group=group.group_id,
        attempt=group.attempt,
        version=self._trained,
        microbatch=self._num_taken,
        length=group.num_trainable_ids,
      )
    self._num_taken += 1
    return groups

  def commit(self) -> None:
    """Forgets the taken groups: an optimizer step has used them."""
    self._buffer.commit()

  def advance(self, trained: int) -> None:
    """Drops groups that are too old after `trained` rounds."""
    self._trained, self._num_taken = trained, 0
    if self._sheds:
      self._shed()
    for group in self._buffer.ready.values():
      if self._sheds:
        self._drop(group, "redundant")
        self._give_up(group.group_id, group.task)
      elif reason := self._too_old(group):
        self._drop(group, reason)
        self._buffer.withdraw(group.group_id)
        before = group_buffer.Attempt(
          group.task, group.attempt, refills=group.refills
        )
        self._submit(
          group.group_id, self._another(group.group_id, before, reason)
        )
    if self._schedule.checks_age:
      for rollout in self._rollouts.values():
        first = rollout.first_version
        if first is not None and self._gate.too_old(first, trained):
          rollout.abort("stale")

  def release(self, version: int) -> None:
    """Opens the gate for a version that every engine serves."""
    self._gate.release(version)
    self._num_ready = 0
    self._room.set()

  async def stop(self, grace_s: float) -> None:
    """Ends all attempts; every token that was sampled is counted."""
    self._stopping = True
    self._hold.changed.set()
    for rollout in list(self._rollouts.values()):
      rollout.abort("stopped")
    with contextlib.suppress(TimeoutError):
      async with asyncio.timeout(grace_s):
        while self._rollouts:
          self._room.clear()
          await self._room.wait()
        await asyncio.gather(*self._player.closing)

  def hold(self) -> None:
    """Admits nothing more, and ends all requests with what they have."""
    self._hold.close()
    for rollout in self._rollouts.values():
      rollout.hold()

  async def suspended(self) -> None:
    """Waits, after `hold`, until no request is in flight that it has ended."""
    await self._until(
      lambda: not any(r.is_sampling for r in self._rollouts.values())
    )

  async def settled(self) -> None:
    """Waits, after `hold`, until all that goes on without an answer is over.

    All else is then as a restart would have it.
    """
    await self._until(
      lambda: (
        not self._replays
        and all(rollout.is_held for rollout in self._rollouts.values())
      )
    )
    await asyncio.gather(*self._player.closing)
    if not self._stopping:
      self._rollouts = dict(sorted(self._rollouts.items()))
      untrained, in_flight = self.untrained, self._buffer.in_flight
      self._count(self.next_group, untrained, in_flight)
      for group_id, attempt in sorted(in_flight.items()):
        self._buffer.submit(group_id, attempt)

  async def _until(self, is_so: Callable[[], bool]) -> None:
    while not self._stopping and not is_so():
      self._hold.changed.clear()
      await self._hold.changed.wait()

  def go_on(self) -> None:
    """Goes on after `hold`."""
    self._hold.open()
    self._room.set()

  @property
  def untrained(self) -> Mapping[int, trajectory.Group]:
    """Finished groups that no optimizer step has used yet."""
    return self._buffer.untrained

  @property
  def in_flight(self) -> Mapping[int, group_buffer.Attempt]:
    """Attempts that are being played, or are about to be, with their past."""
    played = {
      group_id: dataclasses.replace(
        attempt, past=self._rollouts[group_id].open_group
      )
      for group_id, attempt in self._buffer.in_flight.items()
    }
    return {**self._replays, **played}

  @property
  def next_group(self) -> int:
    """Id of the next group to be admitted."""
    return self._gate.next_group
