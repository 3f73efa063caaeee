"""The coordinator: keeps learner, engines and environments busy at once.

  Producer.run     admits and plays groups, beside the rounds
  _round
    _ready         waits for groups; unblocked by Producer._put and `stop`
    _update        _microbatch -> Trainer.accumulate*, Trainer.update,
                   Producer.commit
      _microbatch  waits in _ready; Producer.fitting -> Producer.take
    _publish       waits in _published for the version before; not while
                   RunObserver.held says so, see _hold
      _ship        waits for Publisher.publish and RunObserver.on_published;
                   then Producer.release unblocks the gate
    RunObserver.on_round, RunObserver.on_boundary

A round trains `groups_per_round` groups and ends with a publish. Decoding goes
on while the learner waits for groups and while it trains; with a bound of 0
the gate makes the next round wait. With a bound above 0 `_ship` runs beside the
next round: that trains groups which the gate has admitted already. The gate
counts a version from when every engine serves it, so the bound holds however
long that takes, and the learner waits only if it takes longer than a round.
"""

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from rl.algorithms import group_filters
from rl.audit import event_log
from rl.data import trajectory
from rl.engine import contract
from rl.loop import producer, round_metrics
from rl.loop import progress as progress_lib
from rl.rollout import group_rollout, prompts
from rl.runtime import logical_clock, trace
from rl.runtime import watchdog as watchdog_lib
from rl.schedule import overlap
from rl.train import trainer as trainer_lib

_ROUND_S = 2.0**14  # Longer than any round on a logical clock.
_GRACE_S = 10.0
"""Time for episodes to end with all their tokens when a run stops."""


class Stopped(Exception):
  """The user asked the run to stop; all consumed groups are saved."""


@dataclasses.dataclass(frozen=True, eq=False)
class LoopSettings:
  """Settings of the loop; see `experiment.Experiment`.

  Attributes:
    num_engines: of the run itself, which a restart may change.
    group_filter: drops groups that teach nothing; others are played instead.
    settle_every: rounds after which all in flight is held and the engines and
      the clock begin anew, so that a checkpoint holds all that the rest of the
      run depends on; 0 never.
  """

  schedule: overlap.Overlap
  rounds: int
  seed: int
  progress_timeout_s: float
  success: float
  num_engines: int
  group_filter: group_filters.GroupFilter
  settle_every: int = 0


@runtime_checkable
class Publisher(Protocol):
  """Ships weights to engines, such as `weight_publisher.WeightPublisher`."""

  async def publish(
    self,
    version: int,
    params: Any,
    in_flight: contract.InFlight,
  ) -> float:
    """Returns the seconds of stall, once every engine serves `params`."""
    ...


@dataclasses.dataclass(eq=False)
class _Round:
  """Groups, uses and metrics that accumulate while a round is trained."""

  groups: list[trajectory.Group] = dataclasses.field(default_factory=list)
  uses: list[trainer_lib.MemberUse] = dataclasses.field(default_factory=list)
  updates: list[dict[str, float]] = dataclasses.field(default_factory=list)


class _Interval(NamedTuple):
  """Events and work between the ends of training of two rounds.

  The next round is already being played while this one is described.

  Attributes:
    events: all but turns.
  """

  wall_s: float
  events: Sequence[event_log.Event]
  work: trace.TrackOverlap


class Coordinator:
  """Runs the schedule from a `Progress` to the last round.

  Call `run` once; `stop` at any time, from the event loop.

  Args:
    gauges: further metrics, read at the end of every round.
    flush: has idle engines begin anew; see `LoopSettings.settle_every`.
  """

  def __init__(
    self,
    settings: LoopSettings,
    *,
    trainer: trainer_lib.Trainer,
    publisher: Publisher,
    player: group_rollout.Player,
    tasks: prompts.Prompts,
    log: event_log.EventLog,
    spans: trace.Trace,
    watchdog: watchdog_lib.Watchdog,
    observer: progress_lib.RunObserver,
    gauges: Callable[[], Mapping[str, float]] = dict,
    flush: Callable[[], Awaitable[None]] | None = None,
  ):
    self._settings = settings
    self._schedule = settings.schedule
    self._trainer = trainer
    self._publisher = publisher
    self._tasks = tasks
    self._log = log
    self._spans = spans
    self._watchdog = watchdog
    self._observer = observer
    self._gauges = gauges
    self._flush = flush
    self._starts = player.starts
    self._producer = producer.Producer(
      settings.schedule,
      rounds=settings.rounds,
      seed=settings.seed,
      player=player,
      tasks=tasks,
      group_filter=settings.group_filter,
      log=log,
    )
    self._publishing: asyncio.Task[None] | None = None
    self._is_held = False
    self._stall_s = 0.0
    self._stopping = False
    self._events: list[event_log.Event] = []
    self._slots = round_metrics.SlotSources()
    self._meter = trace.Meter()

  async def run(self, progress: progress_lib.Progress) -> Any:
    """Returns the trainer's state after the last round.

    Raises:
      Stopped: `stop` was called; the observer has got the last boundary.
      watchdog_lib.Stalled: something waited longer than `progress_timeout_s`.
    """
    self._trained = self._shipped = progress.trained
    self._trainer.restore(progress.state)
    if progress.next_group:
      self._log.emit(
        "resumed",
        trained=progress.trained,
        next_group=progress.next_group,
        engines=self._settings.num_engines,
      )
    self._log.listeners.append(self._note)
    self._spans.listeners.append(self._meter.add)
    self._producer.restore(
      progress.trained,
      progress.next_group,
      progress.untrained,
      progress.in_flight,
    )
    try:
      async with asyncio.TaskGroup() as tasks:
        return await self._run(tasks)
    except BaseExceptionGroup as group:  # The first is the cause.
      cause: BaseException = group
      while isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
      raise cause from None
    finally:
      self._log.listeners.remove(self._note)
      self._spans.listeners.remove(self._meter.add)

  async def _run(self, tasks: asyncio.TaskGroup) -> Any:
    # A round is measured from the end of training in the one before it.
    self._background = tasks
    self._mark = self._spans.now()
    if self._settings.settle_every:
      self._producer.hold()
    producing = tasks.create_task(self._producer.run(), name="producer")
    try:
      if self._settings.settle_every:
        await self._settle()
        self._producer.go_on()
      while self._trained < self._settings.rounds:
        if self._stopping:
          raise Stopped
        await self._round()
      if self._is_held:  # The last weights are those of the run.
        await self._go_on()
      await self._published()
      return self._trainer.state
    except Stopped:
      self._producer.hold()
      with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_GRACE_S):
          await self._producer.suspended()
      await self._observer.on_boundary(self._progress())
      raise
    finally:
      await self._producer.stop(_GRACE_S)
      producing.cancel()
      if self._publishing is not None:
        self._publishing.cancel()

  def stop(self) -> None:
    """Ends the run at the next point from which it can continue."""
    self._stopping = True
    self._producer.group_ready.set()

  def _progress(self) -> progress_lib.Progress:
    return progress_lib.Progress(
      state=self._trainer.state,
      trained=self._trained,
      cursor=self._tasks.cursor,
      untrained=self._producer.untrained,
      in_flight=self._producer.in_flight,
      next_group=self._producer.next_group,
    )

  # Training.

  async def _round(self) -> None:
    this = _Round()
    if self._schedule.wait_for_round:
      await self._ready(self._schedule.groups_per_round, this)
    await self._trainer.begin_round(self._trained)
    for _ in range(self._schedule.updates_per_round):
      await self._update(this)
    self._trained += 1
    interval = self._interval()
    self._producer.advance(self._trained)
    if not self._is_held:
      await self._publish()
    metrics = await self._describe(this, interval)
    await self._observer.on_round(
      progress_lib.TrainedRound(
        metrics=metrics,
        groups=this.groups,
        advantages=[use.advantages for use in this.uses],
        by_token=[use.by_token for use in this.uses],
        gap=self._trainer.gap,
      )
    )
    await self._hold()
    every = self._settings.settle_every
    if every and self._trained % every == 0:
      await self._published()
      self._producer.hold()
      await self._settle()
    await self._observer.on_boundary(self._progress())
    if every:
      self._producer.go_on()

  async def _settle(self) -> None:
    """Brings a run that is held to where a restart finds it.

    What is in flight waits for an answer, and goes on with what it has. In
    engines, weights and time no trace is left of what was played.
    """
    await self._guarded(
      self._producer.settled(), "environments and rewards in flight"
    )
    self._trainer.restore(self._trainer.state)  # Forgets older weights.
    self._starts.forget()
    if self._flush is not None:
      await self._flush()
    await logical_clock.advance((self._trained + 1) * _ROUND_S)

  async def _ready(self, count: int, this: _Round) -> None:
    """Waits until the next `count` groups are ready."""
    while not self._producer.ready(count):
      self._stop_if_clean(this)
      missing = self._producer.missing(count)
      self._producer.group_ready.clear()
      await self._guarded(
        self._producer.group_ready.wait(),
        f"{len(missing)} groups, the first of them {min(missing, default=0)}",
      )
    self._stop_if_clean(this)

  def _stop_if_clean(self, this: _Round) -> None:
    """Stops a round that has updated nothing: it can be given back whole."""
    if self._stopping and not this.updates:
      raise Stopped

  async def _update(self, this: _Round) -> None:
    first, start = len(this.groups), None
    end = first + self._schedule.groups_per_update
    while len(this.groups) < end:
      groups = await self._microbatch(end - len(this.groups), this)
      start = self._now() if start is None else start
      this.groups += groups
      this.uses += await self._guarded(
        self._trainer.accumulate(groups), "its mesh to accumulate"
      )
    sums = await self._guarded(self._trainer.update(), "its mesh to update")
    this.updates.append(sums)
    self._producer.commit()
    number = len(this.updates) - 1
    skipped = sums.get("skipped", 0.0) >= 1  # No step was taken at all.
    for group, use in zip(this.groups[first:], this.uses[first:], strict=True):
      self._log_trained(group, use, number, skipped)
    self._log.emit(
      "update",
      version=self._trained,
      number=number,
      start=start,
      end=self._now(),
    )

  async def _microbatch(
    self, needed: int, this: _Round
  ) -> list[trajectory.Group]:
    """Waits for groups to accumulate, at most as many as an update needs."""
    count = self._schedule.groups_per_batch
    await self._ready(count, this)
    if (tokens := self._schedule.tokens_per_microbatch) is not None:
      count = self._producer.fitting(needed, tokens)
    return self._producer.take(count)

  def _now(self) -> float:
    """Returns seconds since the log began."""
    reading = asyncio.get_running_loop().time()
    return round(self._log.since(reading), 6)

  def _log_trained(
    self,
    group: trajectory.Group,
    use: trainer_lib.MemberUse,
    number: int,
    skipped: bool,
  ) -> None:
    members = group.trajectories
    pairs = zip(members, use.trained, strict=True)
    used = [t for t, is_used in pairs if is_used and not skipped]
    cut = np.flatnonzero(use.cut).tolist()
    tokens = sum(t.num_sampled for t in used)
    self._log.emit(
      "trained",
      group=group.group_id,
      attempt=group.attempt,
      version=self._trained,
      first_version=group.first_version,
      update=number,
      tokens=tokens,
      masked=sum(t.num_sampled for t in members) - tokens,
      members=[t.index for t in members],
      used=[t.index for t in used],
      **({"cut": [members[i].index for i in cut]} if cut else {}),
      **({"skipped": True} if skipped else {}),
    )

  # Publishing.

  async def _publish(self) -> None:
    """Ships the current weights, after the version before."""
    await self._published()
    versions = range(self._shipped + 1, self._trained + 1)
    self._shipped = self._trained
    work = self._ship(versions, self._trainer.params)
    if self._schedule.publishes_behind_training:
      self._publishing = self._background.create_task(work, name="publisher")
    else:
      await work

  async def _published(self) -> None:
    """Waits until no version is being published."""
    if self._publishing is not None:
      # Its own waits have deadlines, so this one ends.
      with self._watchdog.track(
        owner="learner",
        what="the version before to be served",
        deadline_s=self._settings.progress_timeout_s,
      ):
        await self._publishing
      self._publishing = None

  async def _hold(self) -> None:
    """Holds publishing back, or lets it go on, as the observer says."""
    reason = self._observer.held()
    if self._is_held and not reason:
      await self._go_on()
    elif reason and not self._is_held:
      self._is_held = True
      version = self._trained - 1
      self._log.emit("publishing_held", version=version, reason=reason)

  async def _go_on(self) -> None:
    self._is_held = False
    self._log.emit("publishing_resumed", version=self._trained - 1)
    await self._publish()

  async def _ship(self, versions: Sequence[int], params: Any) -> None:
    """Publishes a version, after those before it that were held back.

    They get the same weights, which move once; a version says how many rounds a
    token lags at most.
    """
    for version in versions:
      self._stall_s = await self._guarded(
        self._publisher.publish(version, params, self._schedule.on_publish),
        f"the engines to take version {version}",
      )
      # Before the gate opens, so that no new group shares the cache with it.
      await self._guarded(
        self._observer.on_published(version),
        f"the evaluation of version {version}",
        renew_on_heartbeat=True,
      )
      self._producer.release(version)

  async def _guarded(
    self, work: Any, what: str, *, renew_on_heartbeat: bool = False
  ) -> Any:
    return await self._watchdog.wait(
      work,
      owner="learner",
      what=what,
      deadline_s=self._settings.progress_timeout_s,
      renew_on_heartbeat=renew_on_heartbeat,
    )

  # Metrics.

  def _note(self, event: event_log.Event) -> None:
    """Keeps an event of the round; turns are most of them, and not needed."""
    if event["kind"] != "turn":
      self._events.append(event)

  def _interval(self) -> _Interval:
    """Returns the interval since the last call."""
    now = self._spans.now()
    wall_s, self._mark = (now - self._mark) or math.nan, now
    events, self._events = self._events, []
    return _Interval(wall_s, events, self._meter.take())

  async def _describe(
    self, this: _Round, interval: _Interval
  ) -> dict[str, float]:
    """Returns the metrics of a round."""
    trainer_metrics = await self._guarded(
      self._trainer.describe(), "its mesh to score a sample"
    )
    wall_s, events, work = interval
    return {
      "round": float(self._trained),
      **round_metrics.of_groups(
        this.groups,
        success=self._settings.success,
        trained_at=self._trained - 1,
      ),
      **round_metrics.of_sources(
        this.groups,
        events,
        success=self._settings.success,
        trained_at=self._trained - 1,
        slots=self._slots.follow(events),
      ),
      **round_metrics.of_selection(this.groups, events),
      **round_metrics.of_microbatches(events),
      **round_metrics.of_updates(this.updates),
      **round_metrics.of_schedule(self._schedule),
      **trainer_metrics,
      **round_metrics.of_spans(work, wall_s),
      **round_metrics.of_speed(events, this.updates, wall_s),
      "publish_stall_s": self._stall_s,
      **self._gauges(),
    }
