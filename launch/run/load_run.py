"""Loads the newest checkpoint of a run for evaluation, export or serving."""

import contextlib
import os
import pathlib
from collections.abc import AsyncIterator

from launch.cli import jax_setup, workdir
from launch.gateway import agent_server
from models.hf import load
from rl import assemble, initial_state
from rl import experiment as experiment_lib
from rl.runtime import checkpoint
from rl.train import train_state
from twinmesh import error_codes


def prepare(
  experiment: experiment_lib.Experiment, run_dir: str | os.PathLike[str]
) -> None:
  """Checks the settings of a run, and starts jax on the devices it needs.

  Raises:
    ValueError: a setting cannot work, here or at all.
  """
  experiment.validate()
  workdir.check_initial(run_dir, experiment)
  experiment.build_chat()
  experiment.validate_installed()
  jax_setup.prepare(experiment.placement)
  assemble.fit(experiment)


@contextlib.asynccontextmanager
async def restored(
  experiment: experiment_lib.Experiment, run_dir: pathlib.Path
) -> AsyncIterator[tuple[assemble.Parts, checkpoint.Restored]]:
  """Yields the parts of a run, not started yet, and its newest checkpoint.

  Of its state only the parameters are read.

  Exits the process if no checkpoint can be read, or if the frozen weights it
  needs are missing, damaged or changed.
  """
  parts = assemble.build(experiment, gateway=agent_server.listen)
  saved = checkpoint.Checkpoints(run_dir / "checkpoints", keep=1)
  try:
    try:
      # The rest is of a learner that goes on, and several times as large.
      whole = parts.programs.abstract
      policy = train_state.TrainState(whole.params, (), whole.updates)
      found = await initial_state.restore(parts, saved, policy)
    except load.Unusable as error:
      code = error_codes.code_of(error)
      error_codes.fail(f"initial={error}", code)
    except checkpoint.Mismatch as error:
      error_codes.fail(error, status=1)
    if found is None:
      without = f"{run_dir} has no checkpoint that can be read"
      error_codes.fail(without, "TM-D06", status=1)
    yield parts, found
  finally:
    await parts.close()
    saved.close()
