"""Runs of a tiny model on `fakes.Counting`."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator

from envs.rewards import rewards
from models import config as model_config
from rl import assemble, initial_state
from rl import experiment as experiment_lib
from rl.engine.builtin import settings as engine_settings
from rl.loop import progress
from rl.rollout import group_rollout
from rl.runtime import checkpoint
from rl.schedule import overlap
from rl.testing import fakes
from rl.train import optimizers
from tests.helpers import machine_speed


def experiment(
  model: model_config.ModelConfig, *, slots: int = 32, **changes
) -> experiment_lib.Experiment:
  """Returns the settings of a synchronous run."""
  base = experiment_lib.Experiment(
    environment=fakes.Counting(turns=2),
    reward=rewards.Outcome(),
    model=model,
    optimizer=optimizers.AdamW(learning_rate=0.01),
    rollout=group_rollout.Rollout(group_size=4, max_tokens=16),
    engine=engine_settings.EngineSettings(
      slots=slots, row_buckets=(slots,), chunk_buckets=(4,)
    ),
    overlap=overlap.sync(4, 2),
    batch=experiment_lib.BatchShape(rows=8, length=16, tail_rows=None),
  )
  return dataclasses.replace(base, **changes)


class Watching(progress.RunObserver):
  """An observer that keeps the metrics of all rounds."""

  def __init__(self):
    self.rounds = []

  async def on_round(self, trained):
    self.rounds.append(trained.metrics)


@contextlib.asynccontextmanager
async def built(
  settings: experiment_lib.Experiment,
) -> AsyncIterator[assemble.Parts]:
  """Builds the parts of a run and closes them, at the latest after a time."""
  parts = assemble.build(settings)
  try:
    async with asyncio.timeout(machine_speed.scaled(300)):
      yield parts
  finally:
    await parts.close()


async def begun(
  parts: assemble.Parts, checkpoints: checkpoint.Checkpoints | None = None
) -> progress.Progress:
  """Starts the parts, from the newest checkpoint if there is one."""
  found = checkpoints and await initial_state.restore(parts, checkpoints)
  if found:
    parts.tasks.seek(found.host["cursor"])
    state = await initial_state.place(parts, found.state)
    start = progress.from_host(state, found.host)
  else:
    state = await initial_state.create(parts)
    start = progress.beginning(state, parts.tasks.cursor)
  await parts.start(start.state, start.trained)
  return start
