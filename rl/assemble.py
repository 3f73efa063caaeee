"""All wiring, once, for every runtime: Experiment -> Parts."""

import dataclasses
import pathlib
from collections.abc import Callable

import jax

from models import chat as chat_lib
from models import sharding
from rl import (
  config,
  coordinator,
  dispatch,
  engine_jax,
  events,
  learner,
  losses,
  progress,
  prompts,
  rollout,
  trace,
  trajectory,
  warm_start,
  watchdog,
  weights,
)

_PROBE_ROWS = 8


@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
  """Everything that a run is made of, wired but not started.

  `start` and then `close` belong to whoever built it, on one event loop.
  """

  experiment: config.Experiment
  chat: chat_lib.WordChat
  learner_mesh: jax.sharding.Mesh
  decode_mesh: jax.sharding.Mesh
  programs: learner.Learner
  learner_thread: dispatch.MeshThread
  decode_thread: dispatch.MeshThread
  engine: engine_jax.JaxEngine
  publisher: weights.WeightPublisher
  player: rollout.Player
  tasks: prompts.Prompts
  log: events.EventLog
  spans: trace.Trace
  dog: watchdog.Watchdog

  async def start(
    self,
    state: learner.TrainState,
    version: trajectory.PolicyVersion,
    report: Callable[[str], None] = lambda text: None,
  ) -> None:
    """Places the weights, compiles the engine and lets it serve."""
    copy = await self.publisher.place(state.params, self.engine_shardings)
    await self.engine.start(copy, version, report)

  @property
  def engine_shardings(self):
    """Shardings of the parameters on the decode mesh."""
    return sharding.param_shardings(self.experiment.model, self.decode_mesh)

  async def close(self) -> None:
    """Ends the engine and the threads; safe when nothing was started."""
    await self.engine.close()
    self.decode_thread.close()
    self.learner_thread.close()
    self.log.close()
    self.spans.flush()


def build(
  experiment: config.Experiment,
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
  learner_mesh, decode_mesh = experiment.placement.meshes()
  spans = trace.Trace(run_dir / "spans.jsonl" if run_dir else None)
  log = events.EventLog(run_dir / "events.jsonl" if run_dir else None)
  chat = experiment.chat()
  learner_thread = dispatch.MeshThread("learner", spans)
  decode_thread = dispatch.MeshThread("decode", spans)
  engine = engine_jax.JaxEngine(
    experiment.model, experiment.engine, decode_mesh, decode_thread
  )
  dog = watchdog.Watchdog(report)
  if experiment.overlap.on_publish not in engine.capabilities:
    raise ValueError(
      f"overlap.on_publish={experiment.overlap.on_publish}: the engine can "
      f"only {' or '.join(sorted(engine.capabilities))}"
    )
  decode_shardings = sharding.param_shardings(experiment.model, decode_mesh)
  return Parts(
    experiment=experiment,
    chat=chat,
    learner_mesh=learner_mesh,
    decode_mesh=decode_mesh,
    programs=learner.build(
      experiment.model,
      learner_mesh,
      experiment.objective,
      experiment.optimizer(),
      experiment.rollout.temperature,
    ),
    learner_thread=learner_thread,
    decode_thread=decode_thread,
    engine=engine,
    publisher=weights.WeightPublisher(
      [(engine, decode_shardings)], learner_thread, log, spans
    ),
    player=rollout.Player(
      source=experiment.environment,
      engine=rollout.Watched(engine, dog, experiment.stall_s),
      chat=chat,
      reward=experiment.reward,
      limits=experiment.rollout,
      log=log,
      dog=dog,
    ),
    tasks=prompts.Prompts(experiment.environment, experiment.seed),
    log=log,
    spans=spans,
    dog=dog,
  )


async def initial_state(
  parts: Parts, report: Callable[[str], None] = lambda text: None
) -> learner.TrainState:
  """Returns fresh parameters, after the warm start if there is one."""
  experiment = parts.experiment
  state = await parts.learner_thread.run(
    "init", fresh_state, parts.programs, experiment.seed
  )
  settings = experiment.warm_start
  if settings is None:
    return state
  imitation = learner.build(
    experiment.model,
    parts.learner_mesh,
    learner.Objective(
      loss=losses.NegativeLogLikelihood(),
      balance_weight=experiment.objective.balance_weight,
    ),
    settings.optimizer(),
    experiment.rollout.temperature,
  )
  warm = await warm_start.run(
    settings,
    imitation,
    await parts.learner_thread.run("init", imitation.wrap, state.params),
    parts.learner_thread,
    source=experiment.environment,
    chat=parts.chat,
    limits=experiment.rollout,
    rows=experiment.batch.rows,
    length=experiment.batch.length,
    seed=experiment.seed,
    report=report,
  )
  return await parts.learner_thread.run(
    "init", parts.programs.wrap, warm.params
  )


def fresh_state(programs: learner.Learner, seed: int) -> learner.TrainState:
  """Returns random parameters and an optimizer that has seen nothing."""
  with jax.transfer_guard("allow"):
    return programs.init(jax.random.key(seed))


def coordinate(
  parts: Parts, observer: progress.Observer
) -> coordinator.Coordinator:
  """Returns the loop over started parts."""
  experiment = parts.experiment
  data = experiment.placement.learner.data
  return coordinator.Coordinator(
    coordinator.Settings(
      schedule=experiment.overlap,
      rounds=experiment.rounds,
      seed=experiment.seed,
      stall_s=experiment.stall_s,
      rows=experiment.batch.rows,
      length=experiment.batch.length,
      probe_rows=min(experiment.batch.rows, -(-_PROBE_ROWS // data) * data),
      success=experiment.evaluation.success,
    ),
    programs=parts.programs,
    thread=parts.learner_thread,
    publisher=parts.publisher,
    player=parts.player,
    tasks=parts.tasks,
    estimator=experiment.advantage,
    log=parts.log,
    spans=parts.spans,
    dog=parts.dog,
    observer=observer,
  )
