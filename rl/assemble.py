"""All wiring, once, for every runtime: Experiment -> Parts."""

import asyncio
import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from models import config as model_config
from models import sharding
from rl import experiment as experiment_lib
from rl import memory_plan
from rl.agents import agent_player
from rl.algorithms import group_filters, references
from rl.audit import event_log
from rl.engine import contract
from rl.loop import coordinator, progress
from rl.pools import (
  membership,
  recovery,
  router,
  weight_publisher,
  weight_transfer,
)
from rl.rollout import episode, grading, group_rollout, prompts, starting
from rl.runtime import mesh_thread, trace
from rl.runtime import watchdog as watchdog_lib
from rl.schedule import overlap
from rl.settings import checks
from rl.train import learner, scoring, skipped_updates, train_state
from rl.train import trainer as trainer_lib

if TYPE_CHECKING:
  from rl.remote import gang as gang_lib
  from rl.remote import remote_engine

_PROBE_ROWS = 8
_MAX_LAGS = 8


@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
  """Everything that a run is made of, wired but not started.

  `engines` are those of all decode pools, each on its own mesh, and `router`
  is all of them as one. Engines that were started again or have joined are in
  the router only.

  `open`, `start` and then `close` belong to whoever built it, on one event
  loop.

  Attributes:
    learner_layout: where states of this process lie.
    build_programs: returns training programs on the learner's mesh.
    gang: the learner's processes, if it has its own.
  """

  experiment: experiment_lib.Experiment
  chat: episode.Chat
  learner_layout: sharding.Layout
  decode_layouts: Sequence[sharding.Layout]
  programs: learner.Learner
  build_programs: Callable[[learner.LearnerSettings], learner.Learner]
  gang: "gang_lib.Gang | None"
  learner_thread: mesh_thread.MeshThread
  copy_thread: mesh_thread.MeshThread
  decode_threads: Sequence[mesh_thread.MeshThread]
  engines: Sequence[contract.StartableEngine]
  remote: "remote_engine.RemoteEngines | None"
  router: router.Router
  publisher: weight_publisher.WeightPublisher
  restarts: recovery.Restarts
  members: membership.Membership
  player: group_rollout.Player
  tasks: prompts.Prompts
  log: event_log.EventLog
  spans: trace.Trace
  watchdog: watchdog_lib.Watchdog
  trainer: trainer_lib.MeshTrainer

  async def open(self) -> None:
    """Starts the learner's processes, if it has its own; may be called again.

    Raises:
      LearnerLost: they cannot be started.
    """
    if self.gang is not None:
      await self.gang.open()

  async def start(
    self,
    state: train_state.TrainState,
    version: int,
    report: Callable[[str], None] = lambda text: None,
  ) -> None:
    """Places the weights, compiles the engines and lets them serve."""
    self.publisher.begin(version, state.params)
    for i, engine in enumerate(self.engines):
      _, copy = await self.publisher.place_newest(i)
      await engine.start(copy, version, report)

  async def admit(self) -> None:
    """Lets engines leave and join from now on, if some have own processes."""
    for i in range(len(self.engines)):
      self.members.follow(i)
    if self.remote is not None:
      await self.remote.admit(self.members.join)

  async def replace(self, state: train_state.TrainState, version: int) -> None:
    """Replaces the weights of engines that have started and played nothing."""
    self.publisher.begin(version, state.params)
    for i, engine in enumerate(self.engines):
      _, copy = await self.publisher.place_newest(i)
      await engine.update_weights(version, copy, "drain")

  async def close(self) -> None:
    """Ends the engine and the threads; safe when nothing was started."""
    threads = *self.decode_threads, self.copy_thread, self.learner_thread
    # In the opposite order; each ends whatever becomes of those before.
    async with contextlib.AsyncExitStack() as closing:
      closing.callback(self.spans.flush)
      closing.callback(self.log.flush)
      for thread in reversed(threads):
        closing.callback(thread.close)
      for others in (self.gang, self.remote):
        if others is not None:
          closing.push_async_callback(others.close)
      closing.push_async_callback(self.router.close)
      closing.push_async_callback(self.restarts.close)
      closing.push_async_callback(self.members.close)
      if self.player.agents is not None:
        closing.push_async_callback(self.player.agents.close)
      closing.push_async_callback(self.player.graders.close)
      await asyncio.gather(*self.player.closing)


def fit(
  experiment: experiment_lib.Experiment,
  longest: int | None = None,
  *,
  trains: bool = True,
) -> experiment_lib.Experiment:
  """Returns the experiment as it runs on its devices.

  Its engine fits them, and its dtype is the one that they are made for, where
  that is "auto". Allocates nothing.

  Args:
    longest: conversation to expect; None is `rollout.max_tokens`.
    trains: False is a run whose policy only plays.

  Raises:
    ValueError: devices are missing, or the run needs more memory than they
      have, or of a kind that they do not have.
  """
  place = experiment.placement
  local = [x for x in place.layouts() if isinstance(x.mesh, jax.sharding.Mesh)]
  check_host_memory(experiment, local[0].devices)
  devices = {x for layout in local for x in layout.devices}
  dtype = place.dtype(local[0].devices)
  experiment = experiment.with_auto_dtype(dtype)
  programs = learner_programs(experiment, place.learner.plan)
  memory = place.memory(list(devices))
  if not place.is_elsewhere:
    found = dataclasses.replace(place, platform=local[0].devices[0].platform)
    experiment = dataclasses.replace(experiment, placement=found)
  fitted = memory_plan.fit(experiment, programs, memory, longest, trains=trains)
  return dataclasses.replace(fitted, placement=place)


def check_host_memory(
  experiment: experiment_lib.Experiment, devices: Sequence[Any]
) -> None:
  """Raises ValueError for a setting that asks for memory that is not there.

  Args:
    devices: of the learner.
  """
  kind = references.MEMORY_KINDS["host"]
  kinds = {x.kind for device in devices for x in device.addressable_memories()}
  if kind in kinds:
    return
  reference = getattr(experiment.algorithm.reference, "memory", None)
  for setting, value, out in (
    ("optimizer_memory", experiment.optimizer_memory, "device"),
    ("algorithm.reference.memory", reference, "device"),
    ("model.compute.remat", experiment.model.remat, "layer"),
  ):
    if value == "host":
      raise ValueError(
        f"{setting}=host needs memory of the kind {kind}, and jax knows "
        f"{', '.join(sorted(kinds))} on {devices[0].platform}; use "
        f"{setting}={out}"
      )


def build(
  experiment: experiment_lib.Experiment,
  run_dir: pathlib.Path | None = None,
  report: Callable[[str], None] = lambda text: None,
  gateway: agent_player.Gateway | None = None,
  clock: Callable[[], float] = time.monotonic,
  *,
  trains: bool = True,
) -> Parts:
  """Returns the parts of a validated experiment.

  Args:
    run_dir: where events and spans are appended; None keeps them in memory.
    report: told when something stalls, and of engines that are lost.
    gateway: serves answers to agents, as `launch.gateway.agent_server.listen`;
      without one, an episode of an agent is a fault.
    clock: of the event loop.
    trains: False is a run whose policy only plays.

  Raises:
    ValueError: a setting cannot work, or devices or their memory are missing.
  """
  experiment.validate()
  experiment = fit(experiment, trains=trains)
  learner_layout, *decode_layouts = experiment.placement.layouts()
  segment_bytes = experiment.retention.segment_bytes
  spans = trace.Trace(
    run_dir and run_dir / "spans.jsonl", segment_bytes=segment_bytes
  )
  log = event_log.EventLog(
    run_dir and run_dir / "events.jsonl", clock, segment_bytes=segment_bytes
  )
  chat = experiment.build_chat(run_dir)
  watchdog = watchdog_lib.Watchdog(report, clock)
  learner_thread = mesh_thread.MeshThread("learner", spans)
  copy_thread = mesh_thread.MeshThread("host", spans)
  threads = [mesh_thread.MeshThread("decode", spans) for _ in decode_layouts]
  model = weight_transfer.pool_model(
    experiment.model, experiment.publishing.dtype
  )
  remote = None
  if experiment.placement.remote:
    # Not on top: a run of one process needs no network.
    from rl.remote import remote_engine

    remote = remote_engine.of_experiment(
      experiment, run_dir, copy_thread, spans, watchdog
    )

  def build_engine(number: int) -> contract.StartableEngine:
    if remote is not None and number in experiment.placement.remote:
      return remote.build(number, experiment.placement.engine_infos[number])
    where = decode_layouts[number], threads[number]
    return experiment.engine.build(model, *where)

  decoders = [build_engine(number) for number in range(len(decode_layouts))]
  able = sorted(decoders[0].capabilities.in_flight)
  out = "the engine offers no other"
  checks.one_of(experiment.overlap, able, "on_publish", out=out)
  serving = router.Router(
    decoders,
    infos=experiment.placement.engine_infos,
    routing=experiment.routing,
    log=log,
  )
  build_programs, gang = _programs(
    experiment, learner_layout, run_dir, watchdog
  )
  programs = build_programs(learner_settings(experiment))
  publisher = weight_publisher.WeightPublisher(
    serving,
    transfer(
      experiment,
      decode_layouts,
      learner_thread,
      copy_thread,
      fetch=gang and programs.fetch,
      remote=remote,
    ),
    log,
    spans,
  )
  restarts = recovery.Restarts(
    experiment.recovery,
    serving,
    publisher,
    build_engine,
    log,
    watchdog=watchdog,
    report=report,
    place_s=experiment.placement.backend.place_s if remote else 0.0,
  )
  members = membership.Membership(
    serving,
    publisher,
    experiment.recovery.start_s,
    restarts.lost,
    watchdog=watchdog,
    report=report,
  )
  kept = run_dir and skipped_updates.Quarantine(
    run_dir / "skipped", experiment.retention.skipped
  )
  return Parts(
    experiment=experiment,
    chat=chat,
    learner_layout=learner_layout,
    decode_layouts=decode_layouts,
    programs=programs,
    build_programs=build_programs,
    gang=gang,
    learner_thread=learner_thread,
    copy_thread=copy_thread,
    decode_threads=threads,
    engines=decoders,
    remote=remote,
    router=serving,
    publisher=publisher,
    restarts=restarts,
    members=members,
    player=player(experiment, serving, chat, log, watchdog, gateway),
    tasks=tasks(experiment),
    log=log,
    spans=spans,
    watchdog=watchdog,
    trainer=trainer(experiment, learner_layout, programs, learner_thread, kept),
  )


def engines(
  settings: contract.EngineSpec,
  model: model_config.ModelConfig,
  layouts: Sequence[sharding.Layout],
  threads: Sequence[mesh_thread.MeshThread],
) -> list[contract.StartableEngine]:
  """Returns one engine for each layout, on a thread of its own."""
  return [
    settings.build(model, layout, thread)
    for layout, thread in zip(layouts, threads, strict=True)
  ]


def learner_settings(
  experiment: experiment_lib.Experiment,
) -> learner.LearnerSettings:
  """Returns what decides the training programs of an experiment."""
  algorithm = experiment.algorithm
  return learner.LearnerSettings(
    model=experiment.model,
    objective=algorithm,
    optimizer=experiment.optimizer,
    temperature=experiment.rollout.temperature,
    critic=algorithm.advantage.needs_values,
    reference=algorithm.reference,
    optimizer_memory=experiment.optimizer_memory,
    num_lags=min(experiment.overlap.max_staleness + 1, _MAX_LAGS),
  )


def learner_programs(
  experiment: experiment_lib.Experiment, layout: sharding.Layout
) -> learner.Learner:
  """Returns the training programs of an experiment, in this process."""
  return learner_settings(experiment).build(layout)


def _programs(
  experiment: experiment_lib.Experiment,
  layout: sharding.Layout,
  run_dir: pathlib.Path | None,
  watchdog: watchdog_lib.Watchdog,
) -> tuple[
  Callable[[learner.LearnerSettings], learner.Learner], "gang_lib.Gang | None"
]:
  """Returns what builds training programs, and the processes that run them.

  Args:
    layout: where states of this process lie.
  """
  place = experiment.placement
  if place.learner_processes == 1:
    return lambda settings: settings.build(layout), None
  # Not on top: a run of one process needs no network.
  from rl.remote import gang as gang_lib
  from rl.remote import remote_learner

  gang = gang_lib.of_learner(
    place,
    run_dir and run_dir / "workers",
    deadline_s=experiment.progress_timeout_s,
    watchdog=watchdog,
  )
  return (
    lambda settings: remote_learner.RemoteLearner(
      settings, layout, place.learner.plan, gang
    ),
    gang,
  )


def trainer(
  experiment: experiment_lib.Experiment,
  layout: sharding.Layout,
  programs: learner.Learner,
  thread: mesh_thread.MeshThread,
  kept: skipped_updates.Quarantine | None,
) -> trainer_lib.MeshTrainer:
  """Returns what turns groups into weights.

  Args:
    kept: gets the batches of updates that had to be skipped.
  """
  algorithm, batch = experiment.algorithm, experiment.batch
  data = experiment.placement.learner.plan.num_batch
  return trainer_lib.MeshTrainer(
    trainer_lib.TrainerSettings(
      rows=batch.rows,
      length=batch.length,
      share_prompts=batch.share_prompts,
      tail_rows=batch.tail(data),
      shards=data,
      probe_rows=min(batch.rows, -(-_PROBE_ROWS // data) * data),
      max_staleness=experiment.overlap.max_staleness,
      old_logprob=experiment.overlap.old_logprob,
      epochs=algorithm.epochs,
      mask_truncated=algorithm.mask_truncated,
      refresh_reference=references.refresh_every(algorithm.reference),
      has_routers=experiment.model.num_sparse > 0,
      max_skipped=experiment.max_skipped,
    ),
    programs,
    thread,
    estimator=algorithm.advantage,
    objective=algorithm,
    reference=scoring.reference_program(
      algorithm.reference, programs, layout, experiment.rollout.temperature
    ),
    kept=kept,
  )


def transfer(
  experiment: experiment_lib.Experiment,
  decode_layouts: Sequence[sharding.Layout],
  learner_thread: mesh_thread.MeshThread,
  copy_thread: mesh_thread.MeshThread,
  *,
  fetch: Callable[[Any], Any] | None = None,
  remote: "remote_engine.RemoteEngines | None" = None,
) -> weight_transfer.MeshTransfer:
  """Returns the way of the weights to every engine.

  Args:
    decode_layouts: of the engines, in their order.
    fetch: brings weights here from a learner that has its own processes.
    remote: those of them that have processes of their own, if any has.
  """
  dtype = experiment.publishing.dtype
  return weight_transfer.MeshTransfer(
    [
      weight_transfer.pool_shardings(experiment.model, layout, dtype)
      for layout in decode_layouts
    ],
    learner_thread,
    copy_thread,
    experiment.publishing,
    fetch=fetch,
    write=remote and remote.write,
    remote=experiment.placement.remote,
  )


def tasks(experiment: experiment_lib.Experiment) -> prompts.Prompts:
  """Returns the tasks of an experiment, from the first on."""
  order = experiment.tasks
  return prompts.Prompts(
    experiment.environment,
    experiment.seed,
    pool=order.pool,
    curriculum=order.curriculum,
  )


def player(
  experiment: experiment_lib.Experiment,
  serving: contract.SessionRouter,
  chat: episode.Chat,
  log: event_log.EventLog,
  watchdog: watchdog_lib.Watchdog,
  gateway: agent_player.Gateway | None = None,
) -> group_rollout.Player:
  """Returns what plays the groups of an experiment; see `build`."""
  limits, schedule = experiment.rollout, experiment.overlap
  agents = None
  if gateway is not None:
    agents = agent_player.AgentPlayer(serving, chat, gateway)
  return group_rollout.Player(
    source=experiment.environment,
    router=serving,
    chat=chat,
    graders=grading.Graders(
      experiment.reward, limits.grading, watchdog=watchdog
    ),
    limits=limits,
    log=log,
    watchdog=watchdog,
    progress_timeout_s=experiment.progress_timeout_s,
    priority=overlap.priority(schedule),
    extra_members=schedule.redundancy.extra_members,
    agents=agents,
    starts=starting.Starts(limits.starting, watchdog),
  )


def coordinate(
  parts: Parts, observer: progress.RunObserver
) -> coordinator.Coordinator:
  """Returns the loop over started parts."""
  experiment = parts.experiment
  return coordinator.Coordinator(
    coordinator.LoopSettings(
      schedule=experiment.overlap,
      rounds=experiment.rounds,
      seed=experiment.seed,
      progress_timeout_s=experiment.progress_timeout_s,
      success=experiment.evaluation.success,
      num_engines=len(parts.engines),
      group_filter=group_filters.group_filter(
        experiment.algorithm.dynamic_sampling, experiment.algorithm.advantage
      ),
      settle_every=(
        experiment.retention.checkpoint_every if experiment.repeatable else 0
      ),
    ),
    trainer=parts.trainer,
    publisher=parts.publisher,
    player=parts.player,
    tasks=parts.tasks,
    log=parts.log,
    spans=parts.spans,
    watchdog=parts.watchdog,
    observer=observer,
    gauges=lambda: _gauges(parts),
    flush=parts.router.flush_cache,
  )


def _gauges(parts: Parts) -> dict[str, float]:
  """Returns counters of routing, restarts, rewards and starts."""
  graders = parts.player.graders
  rewards = dataclasses.asdict(graders.stats()) | graders.costs()
  return {
    **parts.router.describe(),
    **parts.restarts.describe(),
    **parts.members.describe(),
    "environments_late": float(len(parts.player.late)),
    **{f"rewards/{name}": float(value) for name, value in rewards.items()},
    **{
      f"starts/{name}": x for name, x in parts.player.starts.describe().items()
    },
  }
