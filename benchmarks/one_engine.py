"""Runs one after another on the same engines and learner, compiled once.

  Bench.play(experiment)  initial weights -> engines -> coordinator -> Run

Engines, and a learner of several processes, may have processes of their own.

Between runs nothing but compiled programs remains: weights, optimizer, caches,
tasks and noise begin anew, so that two runs of one seed see the same.
"""

import collections
import dataclasses
import gc
import selectors
import time
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from models import policy as policy_lib
from rl import assemble, initial_state
from rl import experiment as experiment_lib
from rl.audit import checker, event_log
from rl.data import trajectory
from rl.engine import contract
from rl.loop import progress
from rl.pools import router, weight_publisher
from rl.runtime import trace
from rl.train import train_state

HOST_WAITS = "event loop"
"""Track of the spans in which the event loop waits for something to do."""


class TimedSelector(selectors.DefaultSelector):
  """A selector that records its waits, for a loop of `asyncio.Runner`.

  Attributes:
    spans: gets them, on track HOST_WAITS; None drops them.
  """

  spans: trace.Trace | None = None

  def select(self, timeout: float | None = None) -> Any:
    """Waits as its base class does."""
    start = time.monotonic()
    ready = super().select(timeout)
    if self.spans is not None:
      self.spans.add(HOST_WAITS, HOST_WAITS, start, time.monotonic())
    return ready


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Run:
  """What one run leaves behind; all seconds are since its log began.

  Attributes:
    metrics: of each round.
    groups: trained, in order.
    cpu_s: of the whole process, while it ran.
  """

  experiment: experiment_lib.Experiment
  events: Sequence[event_log.Event]
  spans: Sequence[trace.Span]
  metrics: Sequence[Mapping[str, float]]
  groups: Sequence[trajectory.Group]
  wall_s: float
  cpu_s: float


class Bench:
  """Engines and a learner that serve one run after another.

  Args:
    parts: of any of the runs, `assemble.build`; the caller closes them.

  Attributes:
    params: that all runs start from, on the host.
  """

  def __init__(self, parts: assemble.Parts):
    self._parts = parts
    self.params: Any = None

  async def start(self, params: Any = None) -> None:
    """Compiles all programs in a round.

    Args:
      params: that the runs start from, of another bench; None trains them.
    """
    parts = self._parts
    await parts.open()
    if params is None:
      trained = await initial_state.create(parts)
      fetch = parts.programs.fetch
      params = jax.device_get(
        await parts.learner_thread.run("fetch", fetch, trained.params)
      )
    self.params = params
    state = await parts.learner_thread.run("init", self._fresh)
    await parts.start(state, 0)
    await self.play(dataclasses.replace(parts.experiment, rounds=1))

  async def play(self, experiment: experiment_lib.Experiment) -> Run:
    """Returns a run from the initial weights.

    Args:
      experiment: of the same model, engine, batch and placement.

    Raises:
      RuntimeError: it broke a promise of its schedule.
    """
    state = await self._begin()
    parts = self._rewired(experiment)
    watcher, first = _Watcher(), len(parts.spans.spans)
    # As launch.run.local does: what is there stays, and what was left goes now.
    gc.collect()
    gc.freeze()
    start_s, start_cpu_s = time.monotonic(), time.process_time()
    await assemble.coordinate(parts, watcher).run(
      progress.beginning(state, parts.tasks.cursor)
    )
    wall_s, cpu_s = time.monotonic(), time.process_time()
    offset = parts.log.since(parts.spans.origin)
    return Run(
      experiment=experiment,
      events=_checked(parts),
      spans=[_later(s, offset) for s in parts.spans.spans[first:]],
      metrics=watcher.metrics,
      groups=watcher.groups,
      wall_s=wall_s - start_s,
      cpu_s=cpu_s - start_cpu_s,
    )

  async def _begin(self) -> train_state.TrainState:
    """Returns the initial state, which the engines serve with empty caches."""
    parts = self._parts
    state = await parts.learner_thread.run("init", self._fresh)
    for number, served in enumerate(parts.engines):
      placed, _ = await parts.publisher.place(state.params, number)
      version = served.stats().version + 1
      await served.update_weights(version, placed, "abort")
    return state

  def _fresh(self) -> train_state.TrainState:
    parts = self._parts
    places = parts.learner_layout.tree(
      policy_lib.of(parts.experiment.model).axes
    )
    with jax.transfer_guard("allow"):
      state = parts.programs.wrap(jax.device_put(self.params, places))
    return parts.programs.put(state)

  def _rewired(self, experiment: experiment_lib.Experiment) -> assemble.Parts:
    """Returns the parts with everything new that a run changes."""
    parts, log = self._parts, event_log.EventLog()
    engines = list(map(_renewed, parts.engines))
    serving = router.Router(engines, routing=experiment.routing, log=log)
    return dataclasses.replace(
      parts,
      experiment=experiment,
      log=log,
      router=serving,
      publisher=weight_publisher.WeightPublisher(
        serving,
        assemble.transfer(
          experiment,
          parts.decode_layouts,
          parts.learner_thread,
          parts.copy_thread,
          fetch=parts.gang and parts.programs.fetch,
          remote=parts.remote,
        ),
        log,
        parts.spans,
      ),
      player=assemble.player(
        experiment, serving, parts.chat, log, parts.watchdog
      ),
      tasks=assemble.tasks(experiment),
    )


def _renewed(served: contract.DecodeEngine) -> contract.DecodeEngine:
  is_staging = isinstance(served, contract.StagingEngine)
  renewed = _RenewedStaging if is_staging else _Renewed
  return typing.cast(contract.DecodeEngine, renewed(served))


class _Renewed:
  """An engine that counts versions from those that it serves now."""

  def __init__(self, served: contract.DecodeEngine):
    self._served = served
    self._before = served.stats().version

  def __getattr__(self, name: str) -> Any:
    return getattr(self._served, name)

  async def generate(
    self, request: contract.DecodeRequest
  ) -> contract.Completion:
    """Samples one answer."""
    answer = await self._served.generate(request)
    return dataclasses.replace(
      answer,
      versions=answer.versions - np.int32(self._before),
      oldest_kv=max(answer.oldest_kv - self._before, -1),
    )

  def begun(self, request_id: str) -> int | None:
    """Returns the version of a first token."""
    version = self._served.begun(request_id)
    return None if version is None else version - self._before

  def stats(self) -> contract.EngineStats:
    """Returns the counters."""
    stats = self._served.stats()
    return dataclasses.replace(stats, version=stats.version - self._before)

  async def update_weights(
    self,
    version: int,
    params: Any,
    in_flight: contract.InFlight = "recompute",
    on_step: Callable[[contract.SwitchStep], None] = contract.ignore_step,
  ) -> None:
    """Serves new weights."""
    await self._served.update_weights(
      version + self._before, params, in_flight, on_step
    )


class _RenewedStaging(_Renewed):
  """Such an engine to which weights are brought before it serves them."""


# A protocol does not see `__getattr__`.
typing.cast(Any, contract.StagingEngine).register(_RenewedStaging)


class _Watcher(progress.RunObserver):
  """An observer that only keeps the metrics."""

  def __init__(self):
    self.metrics: list[Mapping[str, float]] = []
    self.groups: list[trajectory.Group] = []

  async def on_round(self, trained: progress.TrainedRound) -> None:
    self.metrics.append(trained.metrics)
    self.groups += trained.groups


def _later(span: trace.Span, seconds: float) -> trace.Span:
  return dataclasses.replace(
    span, start=span.start + seconds, end=span.end + seconds
  )


def _checked(parts: assemble.Parts) -> Sequence[event_log.Event]:
  experiment, log = parts.experiment, parts.log.events
  broken = checker.violations(
    log, experiment.overlap, experiment.rollout.group_size
  )
  if broken:
    counts = collections.Counter(broken).most_common(3)
    raise RuntimeError(f"a run broke its promises: {counts}")
  return log
