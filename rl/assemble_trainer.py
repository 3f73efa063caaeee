"""The wiring of what trains: Experiment -> programs, trainer."""

from models import sharding
from rl import experiment as experiment_lib
from rl.algorithms import references
from rl.runtime import mesh_thread
from rl.train import learner, scoring, skipped_updates
from rl.train import trainer as trainer_lib

_PROBE_ROWS = 8
_MAX_LAGS = 8


def programs(
  experiment: experiment_lib.Experiment, layout: sharding.Layout
) -> learner.Learner:
  """Returns the training programs of an experiment."""
  algorithm = experiment.algorithm
  return learner.build(
    experiment.model,
    layout,
    algorithm,
    experiment.optimizer(),
    experiment.rollout.temperature,
    critic=algorithm.advantage.needs_values,
    reference=references.memory(algorithm.reference),
    num_lags=min(experiment.overlap.max_staleness + 1, _MAX_LAGS),
  )


def trainer(
  experiment: experiment_lib.Experiment,
  layout: sharding.Layout,
  programs: learner.Learner,
  thread: mesh_thread.MeshThread,
  kept: skipped_updates.Quarantine | None,
) -> trainer_lib.Training:
  """Returns what turns groups into weights.

  Args:
    kept: gets the batches of updates that had to be skipped.
  """
  algorithm, batch = experiment.algorithm, experiment.batch
  data = layout.num_batch
  return trainer_lib.Training(
    trainer_lib.Settings(
      rows=batch.rows,
      length=batch.length,
      share_prompts=batch.share_prompts,
      tail_rows=batch.tail_rows,
      shards=data,
      probe_rows=min(batch.rows, -(-_PROBE_ROWS // data) * data),
      max_staleness=experiment.overlap.max_staleness,
      old_logprob=experiment.overlap.old_logprob,
      epochs=algorithm.epochs,
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
