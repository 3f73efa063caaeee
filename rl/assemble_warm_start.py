"""The wiring of a warm start: Experiment -> programs, state after imitation."""

from collections.abc import Callable

from models import sharding
from rl import experiment as experiment_lib
from rl.algorithms import losses, objective
from rl.loop import warm_start
from rl.rollout import episode
from rl.runtime import mesh_thread
from rl.train import learner, train_state


def programs(
  experiment: experiment_lib.Experiment,
  settings: warm_start.WarmStart,
  layout: sharding.Layout,
) -> learner.Learner:
  """Returns the training programs of a warm start."""
  return learner.build(
    experiment.model,
    layout,
    objective.Objective(
      loss=losses.NegativeLogLikelihood(),
      balance_weight=experiment.algorithm.balance_weight,
      z_weight=experiment.algorithm.z_weight,
    ),
    settings.optimizer(),
    experiment.rollout.temperature,
  )


async def imitate(
  experiment: experiment_lib.Experiment,
  settings: warm_start.WarmStart,
  programs: learner.Learner,
  now: warm_start.Imitation,
  thread: mesh_thread.MeshThread,
  chat: episode.Chat,
  observer: warm_start.Observer,
  report: Callable[[str], None],
) -> train_state.TrainState:
  """Returns the state after the last step; see `warm_start.run`."""
  return await warm_start.run(
    settings,
    programs,
    now,
    thread,
    source=experiment.environment,
    chat=chat,
    limits=experiment.rollout,
    rows=experiment.batch.rows,
    length=experiment.batch.length,
    seed=experiment.seed,
    max_skipped=experiment.max_skipped,
    observer=observer,
    report=report,
  )
