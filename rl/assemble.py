"""All wiring, once, for every runtime: Experiment -> Parts."""

import asyncio
import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from models import config as model_config
from models import lora, sharding, transformer
from models.chat import word_chat
from models.hf import load
from rl import assemble_trainer, assemble_warm_start
from rl import experiment as experiment_lib
from rl.algorithms import dynamic_sampling
from rl.audit import event_log
from rl.data import trajectory
from rl.engine import contract
from rl.loop import coordinator, progress, warm_start
from rl.pools import router, weight_publisher
from rl.rollout import episode, grading, group_rollout, prompts
from rl.runtime import checkpoint, mesh_thread, trace, watchdog
from rl.schedule import overlap
from rl.train import learner, skipped_updates, train_state
from rl.train import trainer as trainer_lib

_FROZEN = "frozen"


@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
  """Everything that a run is made of, wired but not started.

  `engines` are those of all decode pools, each on its own mesh, and `router`
  is all of them as one.

  `start` and then `close` belong to whoever built it, on one event loop.
  """

  experiment: experiment_lib.Experiment
  chat: word_chat.WordChat
  learner_layout: sharding.Layout
  decode_layouts: Sequence[sharding.Layout]
  programs: learner.Learner
  learner_thread: mesh_thread.MeshThread
  decode_threads: Sequence[mesh_thread.MeshThread]
  engines: Sequence[contract.StartableEngine]
  router: router.Router
  publisher: weight_publisher.WeightPublisher
  player: group_rollout.Player
  tasks: prompts.Prompts
  log: event_log.EventLog
  spans: trace.Trace
  dog: watchdog.Watchdog
  trainer: trainer_lib.Training

  async def start(
    self,
    state: train_state.TrainState,
    version: trajectory.PolicyVersion,
    report: Callable[[str], None] = lambda text: None,
  ) -> None:
    """Places the weights, compiles the engines and lets them serve."""
    for i, engine in enumerate(self.engines):
      copy, _ = await self.publisher.place(state.params, i)
      await engine.start(copy, version, report)

  async def close(self) -> None:
    """Ends the engine and the threads; safe when nothing was started."""
    await asyncio.gather(*self.player.closing)
    await self.router.close()
    for thread in (*self.decode_threads, self.learner_thread):
      thread.close()
    self.log.close()
    self.spans.flush()


def build(
  experiment: experiment_lib.Experiment,
  run_dir: pathlib.Path | None = None,
  report: Callable[[str], None] | None = None,
) -> Parts:
  """Returns the parts of a validated experiment.

  Args:
    run_dir: where events and spans are appended; None keeps them in memory.
    report: told when something stalls.

  Raises:
    ValueError: a setting cannot work, or devices are missing.
  """
  experiment.validate()
  learner_layout, *decode_layouts = experiment.placement.layouts()
  spans = trace.Trace(run_dir / "spans.jsonl" if run_dir else None)
  log = event_log.EventLog(run_dir / "events.jsonl" if run_dir else None)
  chat = experiment.chat()
  dog = watchdog.Watchdog(report)
  learner_thread = mesh_thread.MeshThread("learner", spans)
  threads = [mesh_thread.MeshThread("decode", spans) for _ in decode_layouts]
  model = weight_publisher.pool_model(
    experiment.model, experiment.publishing.dtype
  )
  engines = [
    experiment.engine.build(model, layout, thread)
    for layout, thread in zip(decode_layouts, threads, strict=True)
  ]
  _check_able(engines[0].capabilities, experiment)
  members = [
    router.Member(engine, pool.name, pool.kind, pool.cost)
    for engine, pool in zip(engines, experiment.placement.engines, strict=True)
  ]
  serving = router.Router(members, experiment.routing, log)
  programs = assemble_trainer.programs(experiment, learner_layout)
  return Parts(
    experiment=experiment,
    chat=chat,
    learner_layout=learner_layout,
    decode_layouts=decode_layouts,
    programs=programs,
    learner_thread=learner_thread,
    decode_threads=threads,
    engines=engines,
    router=serving,
    publisher=publisher(
      experiment, serving, decode_layouts, learner_thread, log, spans
    ),
    player=player(experiment, serving, chat, log, dog),
    tasks=tasks(experiment),
    log=log,
    spans=spans,
    dog=dog,
    trainer=assemble_trainer.trainer(
      experiment,
      learner_layout,
      programs,
      learner_thread,
      _quarantine(experiment, run_dir),
    ),
  )


def _quarantine(
  experiment: experiment_lib.Experiment, run_dir: pathlib.Path | None
) -> skipped_updates.Quarantine | None:
  if run_dir is None:
    return None
  return skipped_updates.Quarantine(
    run_dir / "skipped", experiment.retention.skipped
  )


def publisher(
  experiment: experiment_lib.Experiment,
  serving: router.Router,
  decode_layouts: Sequence[sharding.Layout],
  learner_thread: mesh_thread.MeshThread,
  log: event_log.EventLog,
  spans: trace.Trace,
) -> weight_publisher.WeightPublisher:
  """Returns the way of the weights to every engine, each with its layout."""
  dtype = experiment.publishing.dtype
  return weight_publisher.WeightPublisher(
    [
      (door, weight_publisher.pool_shardings(experiment.model, layout, dtype))
      for door, layout in zip(serving.doors, decode_layouts, strict=True)
    ],
    learner_thread,
    log,
    spans,
    experiment.publishing,
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
  sessions: group_rollout.Sessions,
  chat: episode.Chat,
  log: event_log.EventLog,
  dog: watchdog.Watchdog,
) -> group_rollout.Player:
  """Returns what plays the groups of an experiment."""
  limits, schedule = experiment.rollout, experiment.overlap
  return group_rollout.Player(
    source=experiment.environment,
    engine=sessions,
    chat=chat,
    graders=grading.Graders(experiment.reward, limits.grading, dog=dog),
    limits=limits,
    log=log,
    dog=dog,
    progress_timeout_s=experiment.progress_timeout_s,
    priority=overlap.priority(schedule),
    extra_members=schedule.redundancy.extra_members,
  )


def _check_able(
  able: contract.Capabilities, experiment: experiment_lib.Experiment
) -> None:
  """Raises ValueError when the engine cannot do what the run asks of it."""
  on_publish = experiment.overlap.on_publish
  if on_publish not in able.in_flight:
    raise ValueError(
      f"overlap.on_publish={on_publish}: the engine can only "
      + " or ".join(sorted(able.in_flight))
    )


async def initial_state(
  parts: Parts,
  report: Callable[[str], None] = lambda text: None,
  observer: warm_start.Observer = warm_start.UNOBSERVED,
) -> train_state.TrainState:
  """Returns initial parameters, after the warm start if there is one.

  Raises:
    checkpoint.Mismatch: the warm start has one that does not fit; see
      `restore`.
  """
  experiment, thread = parts.experiment, parts.learner_thread
  settings = experiment.warm_start
  if settings is None:
    return await _first_state(parts)
  programs = assemble_warm_start.programs(
    experiment, settings, parts.learner_layout
  )
  found = None
  if observer.checkpoints is not None:
    found = await restore(parts, observer.checkpoints, programs.abstract)
  observer.on_begin(found)
  if found is not None:
    now = warm_start.from_host(found.state, found.host)
  else:
    params = (await _first_state(parts)).params
    now = warm_start.Imitation(await thread.run("init", programs.wrap, params))
  state = await assemble_warm_start.imitate(
    experiment, settings, programs, now, thread, parts.chat, observer, report
  )
  return await thread.run("init", parts.programs.wrap, state.params)


async def _first_state(parts: Parts) -> train_state.TrainState:
  """Returns what a run starts from, before anything has been trained."""
  experiment, run = parts.experiment, parts.learner_thread.run
  if experiment.initial is None:
    return await run("init", fresh_state, parts.programs, experiment.seed)
  return await run(
    "init",
    loaded_state,
    parts.programs,
    experiment.model,
    parts.learner_layout,
    experiment.initial,
    experiment.seed,
  )


async def restore(
  parts: Parts,
  checkpoints: checkpoint.Checkpoints,
  abstract: train_state.TrainState | None = None,
) -> checkpoint.Restored | None:
  """Returns the newest checkpoint that is whole; None when there is none.

  Frozen parameters are no part of it: they are made again as at the start of
  the run.

  Args:
    abstract: of the state, where it is not that of the rounds.

  Raises:
    checkpoint.Mismatch: its state has another tree or shapes, or was trained
      on top of other frozen parameters.
  """
  wanted, frozen = _without_frozen(abstract or parts.programs.abstract)
  found = checkpoints.restore(wanted)
  if found is None or frozen is None:
    return found
  _, frozen = _without_frozen(await _first_state(parts))
  checkpoint.check_same(found.host[_FROZEN], checkpoint.digests(frozen))
  params = lora.join(found.state.params, frozen)
  return dataclasses.replace(found, state=found.state._replace(params=params))


def save(
  checkpoints: checkpoint.Checkpoints,
  now: progress.Progress | warm_start.Imitation,
) -> None:
  """Starts a checkpoint that can be restored; see `Checkpoints.save`."""
  state, frozen = _without_frozen(now.state)
  host = now.to_host() | {_FROZEN: checkpoint.digests(frozen)}
  checkpoints.save(now.trained, state, host)


def _without_frozen(
  state: train_state.TrainState,
) -> tuple[train_state.TrainState, Any]:
  """Returns what training changes, and the parameters that it does not."""
  trainable, frozen = lora.split(state.params)
  return state._replace(params=trainable), frozen


def fresh_state(programs: learner.Learner, seed: int) -> train_state.TrainState:
  """Returns random parameters and an optimizer that has seen nothing."""
  with jax.transfer_guard("allow"):
    return programs.init(jax.random.key(seed))


def loaded_state(
  programs: learner.Learner,
  config: model_config.ModelConfig,
  layout: sharding.Layout,
  directory: str,
  seed: int,
) -> train_state.TrainState:
  """Returns the parameters of a Hugging Face checkpoint, as `fresh_state`.

  Adapters, if the model has any, are drawn from the seed.

  Raises:
    load.Unusable: they cannot be loaded.
  """
  with jax.transfer_guard("allow"):
    params = load.load(directory, config, layout)
    if config.lora is not None:
      places, _ = lora.split(_shardings(config, layout))
      draw = jax.jit(
        lambda key: lora.split(transformer.init(key, config))[0],
        out_shardings=places,
      )
      params = lora.join(draw(jax.random.key(seed)), params)
    return programs.wrap(params)


def coordinate(
  parts: Parts, observer: progress.Observer
) -> coordinator.Coordinator:
  """Returns the loop over started parts."""
  experiment = parts.experiment
  return coordinator.Coordinator(
    coordinator.Settings(
      schedule=experiment.overlap,
      rounds=experiment.rounds,
      seed=experiment.seed,
      progress_timeout_s=experiment.progress_timeout_s,
      success=experiment.evaluation.success,
      unfit=dynamic_sampling.unfit(
        experiment.algorithm.sampling, experiment.algorithm.advantage
      ),
    ),
    trainer=parts.trainer,
    publisher=parts.publisher,
    player=parts.player,
    tasks=parts.tasks,
    log=parts.log,
    spans=parts.spans,
    dog=parts.dog,
    observer=observer,
    gauges=lambda: _gauges(parts),
  )


def _gauges(parts: Parts) -> dict[str, float]:
  """Returns counters of routing and of rewards, since the run began."""
  rewards = dataclasses.asdict(parts.player.graders.stats())
  return {
    **parts.router.describe(),
    "environments_late": float(len(parts.player.late)),
    **{f"rewards/{name}": float(value) for name, value in rewards.items()},
  }


def _shardings(config: model_config.ModelConfig, layout: sharding.Layout):
  return layout.tree(transformer.logical_axes(config))
