"""The loops that keep learner, engines and environments busy at once.

  produce:  gate.admit -> prompts.next -> one task a group --+
               ^                                             |
               | gate.release(version)                       v
            publish <- update <- accumulate* <- take <--- buffer.put
               |          (train: one round)         (groups in order)
               +-> suspend, update every engine, resume

A round takes `groups_per_round` groups and ends with a publish. While the
learner waits for the first groups of a round, and while it trains, decoding
goes on; with a bound of 0 it is the gate that makes the next round wait.
"""

import asyncio
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from rl import (
  advantages,
  agreement,
  batch,
  dispatch,
  events,
  learner,
  overlap,
  prompts,
  rollout,
  round_report,
  staleness,
  trace,
  trajectory,
  watchdog,
  weights,
)
from rl import buffer as buffer_lib
from rl import progress as progress_lib


class Stopped(Exception):
  """The user asked the run to stop; what was consumed is still saved."""


@dataclasses.dataclass(frozen=True, eq=False)
class Settings:
  """The numbers of the loop; see `config.Experiment`."""

  schedule: overlap.Overlap
  rounds: int
  seed: int
  stall_s: float
  rows: int
  length: int
  share_prompts: bool
  probe_rows: int
  success: float


@dataclasses.dataclass(eq=False)
class _Round:
  """What accumulates while a round is trained."""

  groups: list[trajectory.Group] = dataclasses.field(default_factory=list)
  values: list[np.ndarray] = dataclasses.field(default_factory=list)
  trained: list[np.ndarray] = dataclasses.field(default_factory=list)
  updates: list[dict[str, float]] = dataclasses.field(default_factory=list)
  probe: batch.Batch | None = None


class Coordinator:
  """Runs the schedule from a `Progress` to the last round.

  `run` is called once; `stop` may be called at any time, from the event loop.
  """

  def __init__(
    self,
    settings: Settings,
    *,
    programs: learner.Learner,
    thread: dispatch.MeshThread,
    publisher: weights.WeightPublisher,
    player: rollout.Player,
    tasks: prompts.Prompts,
    estimator: advantages.Estimator,
    log: events.EventLog,
    spans: trace.Trace,
    dog: watchdog.Watchdog,
    observer: progress_lib.Observer,
  ):
    self._settings = settings
    self._schedule = settings.schedule
    self._programs = programs
    self._thread = thread
    self._publisher = publisher
    self._player = player
    self._tasks = tasks
    self._estimator = estimator
    self._log = log
    self._spans = spans
    self._dog = dog
    self._observer = observer
    self._news = asyncio.Event()
    self._opened = asyncio.Event()
    self._stopping = False

  async def run(self, progress: progress_lib.Progress) -> learner.TrainState:
    """Returns the state after the last round.

    Raises:
      Stopped: `stop` was called; the observer has seen the boundary.
      watchdog.Stalled: something waited longer than `stall_s`.
    """
    self._restore(progress)
    try:
      async with asyncio.TaskGroup() as tasks:
        return await self._run(tasks)
    except BaseExceptionGroup as group:  # The first is the cause.
      cause: BaseException = group
      while isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
      raise cause from None

  async def _run(self, tasks: asyncio.TaskGroup) -> learner.TrainState:
    # A round is measured from the end of the one before it.
    self._mark = time.monotonic()
    self._first_span = len(self._spans.spans)
    self._first_event = len(self._log.events)
    producer = tasks.create_task(self._produce(tasks), name="producer")
    try:
      while self._trained < self._settings.rounds:
        if self._stopping:
          raise Stopped
        await self._round()
      return self._state
    except Stopped:
      await self._observer.on_boundary(self._progress())
      raise
    finally:
      producer.cancel()
      for play in self._plays:
        play.cancel()

  def stop(self) -> None:
    """Ends the run at the next point from which it can go on."""
    self._stopping = True
    self._news.set()

  def _restore(self, progress: progress_lib.Progress) -> None:
    self._state = progress.state
    self._trained = progress.trained
    self._served = {progress.trained: progress.state.params}
    per_round = self._schedule.groups_per_round
    first = progress.trained * per_round
    waiting = {**progress.in_flight, **progress.untrained}
    self._gate = staleness.StalenessGate(
      self._schedule,
      total=self._settings.rounds * per_round,
      submitted=first + len(waiting),
      version=progress.trained,
    )
    self._buffer = buffer_lib.GroupBuffer(first)
    self._replayed = dict(progress.in_flight)
    self._plays: set[asyncio.Task] = set()
    for group_id, group in sorted(progress.untrained.items()):
      self._buffer.restore(group)
      self._log.emit(
        "restored",
        group=group_id,
        tokens=group.num_sampled,
        first_version=int(group.first_version),
      )

  def _progress(self) -> progress_lib.Progress:
    return progress_lib.Progress(
      state=self._state,
      trained=self._trained,
      cursor=self._tasks.cursor,
      untrained=self._buffer.untrained,
      in_flight=self._buffer.in_flight,
    )

  # Rollout.

  async def _produce(self, tasks: asyncio.TaskGroup) -> None:
    for group_id, task in sorted(self._replayed.items()):
      self._start(tasks, group_id, task)
    while True:
      while self._gate.may_admit():
        self._start(tasks, self._gate.admit(), self._tasks.next())
      self._opened.clear()
      await self._opened.wait()

  def _start(self, tasks: asyncio.TaskGroup, group_id: int, task: Any) -> None:
    self._buffer.submit(group_id, task)
    version = self._gate.version
    self._log.emit("submitted", group=group_id, version=int(version))
    play = tasks.create_task(self._play(task, group_id, version))
    self._plays.add(play)
    play.add_done_callback(self._plays.discard)

  async def _play(
    self, task: Any, group_id: int, admitted: trajectory.PolicyVersion
  ) -> None:
    group = await self._player.group(
      task, group_id, self._settings.seed, admitted
    )
    self._buffer.put(group)
    self._log.emit("ready", group=group_id, version=int(self._gate.version))
    self._news.set()

  # Training.

  async def _round(self) -> None:
    this = _Round()
    if self._schedule.wait_for_round:
      await self._ready(self._schedule.groups_per_round, this)
    for _ in range(self._schedule.updates_per_round):
      await self._update(this)
    self._trained += 1
    self._served[self._trained] = self._state.params
    stall_s = await self._publish()
    metrics = await self._describe(this)
    metrics["publish_stall_s"] = stall_s
    await self._observer.on_round(metrics, this.groups, this.values)
    await self._observer.on_boundary(self._progress())

  async def _ready(self, count: int, this: _Round) -> None:
    """Returns when the next `count` groups in order are ready."""
    while not self._buffer.has(count):
      self._stop_if_clean(this)
      missing = self._buffer.missing(count)
      self._news.clear()
      await self._guarded(
        self._news.wait(),
        f"{len(missing)} groups, the first of them {missing[0]}",
      )
    self._stop_if_clean(this)

  def _stop_if_clean(self, this: _Round) -> None:
    """A round that has updated nothing yet can be given back whole."""
    if self._stopping and not this.updates:
      raise Stopped

  async def _update(self, this: _Round) -> None:
    per_batch = self._schedule.groups_per_microbatch
    total = await self._device("zero", self._programs.zero)
    first = len(this.groups)
    for _ in range(self._schedule.groups_per_update // per_batch):
      await self._ready(per_batch, this)
      groups = self._buffer.take(per_batch)
      for group in groups:
        self._log.emit("dequeued", group=group.group_id)
      total = await self._accumulate(this, groups, total)
    if not any(used.any() for used in this.trained[first:]):
      sums = dict.fromkeys(learner.METRICS, 0.0)
    else:
      self._state, sums = await self._device(
        "update", _update, self._programs, self._state, total
      )
    if not math.isfinite(sums["grad_norm"]):
      raise FloatingPointError(
        f"round {self._trained}: the gradient's norm is {sums['grad_norm']}; "
        "go on from the last checkpoint with a lower learning rate"
      )
    this.updates.append(sums)
    self._buffer.commit()
    for group, values in zip(
      this.groups[first:], this.trained[first:], strict=True
    ):
      self._book(group, values)

  async def _accumulate(
    self,
    this: _Round,
    groups: Sequence[trajectory.Group],
    total: learner.Accumulator,
  ) -> learner.Accumulator:
    members: list[trajectory.Trajectory] = []
    weights_: list[float] = []
    for group in groups:
      self._gate.check(int(group.first_version), self._trained, group.group_id)
      values, trained = advantages.of_group(group, self._estimator)
      this.groups.append(group)
      this.values.append(values)
      this.trained.append(trained)
      chosen = np.flatnonzero(trained).tolist()
      members += [group.trajectories[i] for i in chosen]
      weights_ += [float(values[i]) for i in chosen]
    batches = batch.pack(
      members,
      weights_,
      rows=self._settings.rows,
      length=self._settings.length,
      share_prompts=self._settings.share_prompts,
    )
    for packed in batches:
      this.probe = this.probe or packed
      params = self._state.params
      total = await self._device(
        "accumulate", _accumulate, self._programs, params, total, packed
      )
    return total

  def _book(self, group: trajectory.Group, trained: np.ndarray) -> None:
    tokens = [t.num_sampled for t in group.trajectories]
    kept = sum(n for n, used in zip(tokens, trained, strict=True) if used)
    self._log.emit(
      "trained",
      group=group.group_id,
      version=self._trained,
      first_version=int(group.first_version),
      tokens=kept,
      masked=sum(tokens) - kept,
    )

  async def _publish(self) -> float:
    """Returns the seconds for which decoding stood still."""
    version = trajectory.PolicyVersion(self._trained)
    stall_s = await self._guarded(
      self._publisher.publish(
        version, self._state.params, self._schedule.on_publish
      ),
      f"the engines to take version {version}",
    )
    # Before the gate opens, so that no new group shares the cache with it.
    await self._observer.on_published(version)
    self._gate.release(version)
    self._opened.set()
    return stall_s

  async def _device(self, name: str, function: Callable, *args: Any) -> Any:
    work = self._thread.run(name, function, *args)
    return await self._guarded(work, f"its mesh to {name}")

  async def _guarded(self, work: Any, what: str) -> Any:
    return await self._dog.wait(
      work, owner="learner", what=what, deadline_s=self._settings.stall_s
    )

  async def _describe(self, this: _Round) -> dict[str, float]:
    """Returns the metrics of a round; engine and learner are compared anew."""
    now = time.monotonic()
    wall_s, self._mark = now - self._mark, now
    spans = self._spans.spans[self._first_span :]
    news = self._log.events[self._first_event :]
    self._first_span += len(spans)
    self._first_event += len(news)
    gap = await self._guarded(
      agreement.measure(
        self._programs,
        self._thread,
        self._served,
        this.probe,
        self._settings.probe_rows,
      ),
      "its mesh to score a sample",
    )
    oldest = self._trained - self._schedule.max_staleness
    self._served = {v: p for v, p in self._served.items() if v >= oldest}
    return {
      "round": float(self._trained),
      **round_report.of_groups(
        this.groups,
        success=self._settings.success,
        trained_at=self._trained - 1,
      ),
      **round_report.of_updates(this.updates),
      **round_report.of_schedule(self._schedule),
      **round_report.of_gap(gap),
      **round_report.of_spans(spans, wall_s),
      **round_report.of_speed(news, this.updates, wall_s),
    }


def _accumulate(
  programs: learner.Learner,
  params: Any,
  total: learner.Accumulator,
  packed: batch.Batch,
) -> learner.Accumulator:
  return programs.accumulate(params, total, programs.place(packed))


def _update(
  programs: learner.Learner,
  state: learner.TrainState,
  total: learner.Accumulator,
) -> tuple[learner.TrainState, dict[str, float]]:
  state, sums = programs.update(state, total)
  sums = jax.device_get(sums)
  return state, {name: float(value) for name, value in sums.items()}
