"""The state a run starts from, or is restored to."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from models import config as model_config
from models import lora, sharding
from models import policy as policy_lib
from models.hf import load
from rl import assemble
from rl import experiment as experiment_lib
from rl.algorithms import losses, objective
from rl.loop import fine_tuning, progress, warm_start
from rl.runtime import checkpoint, mesh_thread
from rl.train import learner, scoring, train_state

_FROZEN = "frozen"


@dataclasses.dataclass(frozen=True, eq=False)
class LearnerParts:
  """The parts of a run that its weights need, with the names of `Parts`."""

  experiment: experiment_lib.Experiment
  programs: learner.Learner
  learner_layout: sharding.Layout
  learner_thread: mesh_thread.MeshThread


_Progress = TypeVar("_Progress", progress.Progress, warm_start.Imitation)


async def create(
  parts: assemble.Parts,
  report: Callable[[str], None] = lambda text: None,
  observer: warm_start.WarmStartObserver | None = None,
  beside: Callable[[train_state.TrainState], None] = lambda state: None,
) -> train_state.TrainState:
  """Returns initial parameters, after the warm start if there is one.

  Args:
    beside: called with the state that the warm start begins with, for work that
      goes on beside it; its parameters stay readable.

  Raises:
    checkpoint.Mismatch: the warm start has one that does not fit; see
      `restore`.
  """
  experiment, thread = parts.experiment, parts.learner_thread
  settings = experiment.warm_start
  if settings is None:
    return await place(parts, await _first_state(parts, report))
  supervision = _supervision(parts, settings, report)
  supervised = supervised_settings(experiment, settings)
  programs = parts.build_programs(supervised)
  reference = scoring.reference_program(
    supervised.reference,
    programs,
    parts.learner_layout,
    supervised.temperature,
  )
  found, observer = None, observer or warm_start.WarmStartObserver()
  if observer.checkpoints is not None:
    found = await restore(parts, observer.checkpoints, programs.abstract)
  observer.on_begin(found, supervision.steps)
  if found is not None:
    now = warm_start.from_host(found.state, found.host)
  else:
    params = (await _first_state(parts, report)).params
    now = warm_start.Imitation(await thread.run("init", programs.wrap, params))
  now = dataclasses.replace(now, state=await place(parts, now.state, programs))
  beside(now.state)
  trained = await warm_start.run(
    supervision,
    programs,
    now,
    thread,
    reference=reference,
    max_skipped=experiment.max_skipped,
    observer=observer,
    report=report,
  )
  params = trained.params
  del trained  # Its optimizer state makes room for that of the rounds.
  params = await thread.run("fetch", programs.fetch, params)
  return await place(
    parts, await thread.run("init", parts.programs.wrap, params)
  )


async def place(
  parts: assemble.Parts,
  state: train_state.TrainState,
  programs: learner.Learner | None = None,
) -> train_state.TrainState:
  """Returns a state of this process where the learner's programs use it.

  Args:
    programs: others than those of the rounds.

  Raises:
    learner.LearnerLost: its processes cannot be started, or have ended.
  """
  await parts.open()
  put = (programs or parts.programs).put
  return await parts.learner_thread.run("init", put, state)


def _supervision(
  parts: assemble.Parts,
  settings: warm_start.WarmStart | fine_tuning.FineTuning,
  report: Callable[[str], None],
) -> warm_start.Supervision:
  """Returns the batches of a warm start."""
  experiment = parts.experiment
  shape: Any = {
    "rows": experiment.batch.rows,
    "length": experiment.batch.length,
    "seed": experiment.seed,
  }
  source, chat = experiment.environment, parts.chat
  if isinstance(settings, fine_tuning.FineTuning):
    report("reading the recorded conversations")
    source = fine_tuning.recorded(source, settings)
    longest = experiment.model.max_length
    return fine_tuning.supervision(
      settings, source, chat, report, max_length=longest, **shape
    )
  return warm_start.demonstrations(
    settings, source, chat, experiment.rollout, **shape
  )


def supervised_settings(
  experiment: experiment_lib.Experiment,
  settings: warm_start.WarmStart | fine_tuning.FineTuning,
) -> learner.LearnerSettings:
  """Returns all that decides the training programs of a warm start.

  Losses of recorded conversations are of the model itself, at temperature 1.
  """
  loss, reference = losses.NegativeLogLikelihood(), None
  temperature = experiment.rollout.temperature  # At which it is to play next.
  if isinstance(settings, fine_tuning.FineTuning):
    loss, temperature = settings.loss, 1.0
    reference = fine_tuning.reference(settings, experiment.model)
  return learner.LearnerSettings(
    model=experiment.model,
    objective=objective.Objective(
      loss=loss,
      balance_weight=experiment.algorithm.balance_weight,
      z_weight=experiment.algorithm.z_weight,
    ),
    optimizer=settings.optimizer,
    temperature=temperature,
    reference=reference,
    optimizer_memory=experiment.optimizer_memory,
  )


async def _first_state(
  parts: assemble.Parts | LearnerParts,
  report: Callable[[str], None] = lambda text: None,
) -> train_state.TrainState:
  """Returns what a run starts from, before anything has been trained."""
  experiment, run = parts.experiment, parts.learner_thread.run
  if experiment.initial is None:
    report("drawing the weights")
    return await run("init", fresh_state, parts.programs, experiment.seed)
  return await run(
    "init",
    loaded_state,
    parts.programs,
    experiment.model,
    parts.learner_layout,
    experiment.initial,
    experiment.seed,
    report,
  )


async def restore(
  parts: assemble.Parts | LearnerParts,
  checkpoints: checkpoint.Checkpoints,
  abstract: train_state.TrainState | None = None,
) -> checkpoint.Restored | None:
  """Returns the newest checkpoint that is whole; None when there is none.

  Its state is one of this process; see `place`. Frozen parameters are not
  saved: they are made again as at the start of the run.

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
  checkpoint.check_same(found.host[_FROZEN], checkpoint.checksums(frozen))
  params = lora.join(found.state.params, frozen)
  return dataclasses.replace(found, state=found.state._replace(params=params))


def save(
  checkpoints: checkpoint.Checkpoints,
  now: progress.Progress | warm_start.Imitation,
) -> None:
  """Starts a checkpoint that can be restored; see `Checkpoints.save`.

  Args:
    now: with a state of this process; see `fetched`.
  """
  state, frozen = _without_frozen(now.state)
  host = now.to_host() | {_FROZEN: checkpoint.checksums(frozen)}
  checkpoints.save(now.trained, state, host)


async def fetched(parts: assemble.Parts, now: _Progress) -> _Progress:
  """Returns the progress with a state of this process, to be saved."""
  fetch = parts.programs.fetch
  state = await parts.learner_thread.run("fetch", fetch, now.state)
  return dataclasses.replace(now, state=state)


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
  report: Callable[[str], None],
) -> train_state.TrainState:
  """Returns the parameters of a Hugging Face checkpoint, as `fresh_state`.

  Adapters, if the model has any, are drawn from the seed.

  Raises:
    load.Unusable: they cannot be loaded.
  """
  with jax.transfer_guard("allow"):
    params = load.load(directory, config, layout, report)
    if config.lora is not None:
      places, _ = lora.split(_shardings(config, layout))
      draw = jax.jit(
        lambda key: lora.split(policy_lib.of(config).init(key))[0],
        out_shardings=places,
      )
      params = lora.join(draw(jax.random.key(seed)), params)
    return programs.wrap(params)


def _shardings(config: model_config.ModelConfig, layout: sharding.Layout):
  return layout.tree(policy_lib.of(config).axes)
