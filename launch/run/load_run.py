"""Loads the newest checkpoint of a run for evaluation, export or serving."""

import contextlib
import dataclasses
import os
import pathlib
import sys
from collections.abc import AsyncIterator

from launch.cli import jax_setup, workdir
from launch.gateway import agent_server
from models.hf import load
from rl import assemble, initial_state
from rl import experiment as experiment_lib
from rl.pools import placement
from rl.runtime import checkpoint, mesh_thread, trace
from rl.train import train_state
from twinmesh import error_codes


def prepare(
  experiment: experiment_lib.Experiment,
  run_dir: str | os.PathLike[str],
  *,
  plays: bool = True,
) -> None:
  """Checks the settings of a run, and starts jax on the devices it needs.

  Args:
    plays: False needs no devices, packages or memory but for the weights.

  Raises:
    ValueError: a setting cannot work, here or at all.
  """
  experiment.validate()
  workdir.check_initial(run_dir, experiment)
  experiment.build_chat()
  if not plays:
    place = _of_weights(experiment.placement)
    jax_setup.prepare(place)
    place.layouts()
    return
  experiment.validate_installed()
  jax_setup.prepare(experiment.placement)
  assemble.fit(experiment, trains=False)


def _of_weights(place: placement.Placement) -> placement.Placement:
  """Returns the learner's part of a placement, in this process."""
  return placement.Placement(
    learner=place.learner, platform=place.own_platform, colocated=True
  )


@contextlib.asynccontextmanager
async def weights(
  experiment: experiment_lib.Experiment, run_dir: pathlib.Path
) -> AsyncIterator[checkpoint.Restored]:
  """Yields the newest checkpoint of a run, without any part that plays.

  Reads and exits as `restored`.
  """
  place = _of_weights(experiment.placement)
  layout, _ = place.layouts()
  fitted = experiment.with_auto_dtype(place.dtype(layout.devices))
  with contextlib.closing(
    mesh_thread.MeshThread("learner", trace.Trace(None))
  ) as thread:
    programs = assemble.learner_programs(fitted, layout)
    parts = initial_state.LearnerParts(fitted, programs, layout, thread)
    yield await _newest(parts, run_dir)


@contextlib.asynccontextmanager
async def restored(
  experiment: experiment_lib.Experiment, run_dir: pathlib.Path
) -> AsyncIterator[tuple[assemble.Parts, checkpoint.Restored]]:
  """Yields the parts of a run, not started yet, and its newest checkpoint.

  Of its state only the parameters are read. A checkpoint of a warm start that
  is not done is told of, and is one of no rounds.

  Exits the process if no checkpoint can be read, or if the frozen weights it
  needs are missing, damaged or changed.
  """
  parts = assemble.build(experiment, gateway=agent_server.listen, trains=False)
  try:
    yield parts, await _newest(parts, run_dir)
  finally:
    await parts.close()


async def _newest(
  parts: assemble.Parts | initial_state.LearnerParts, run_dir: pathlib.Path
) -> checkpoint.Restored:
  # The rest is of a learner that goes on, and several times as large.
  whole = parts.programs.abstract
  policy = train_state.TrainState(whole.params, (), whole.updates)
  try:
    found = await _read(parts, run_dir / workdir.CHECKPOINTS, policy)
    if found is None and parts.experiment.warm_start is not None:
      found = await _read(parts, run_dir / workdir.WARM_START, policy)
      if found is not None:
        steps = f"{found.step} steps of its warm start"
        print(f"{run_dir} is not done: weights after {steps}", file=sys.stderr)
        found = dataclasses.replace(found, step=0)
  except load.Unusable as error:
    code = error_codes.code_of(error)
    error_codes.fail(f"initial={error}", code)
  except checkpoint.Mismatch as error:
    error_codes.fail(error, status=1)
  if found is None:
    without = f"{run_dir} has no checkpoint that can be read"
    error_codes.fail(without, "TM-D06", status=1)
  return found


async def _read(
  parts: assemble.Parts | initial_state.LearnerParts,
  directory: pathlib.Path,
  policy: train_state.TrainState,
) -> checkpoint.Restored | None:
  saved = checkpoint.Checkpoints(directory, keep=1)
  with contextlib.closing(saved):
    return await initial_state.restore(parts, saved, policy)
