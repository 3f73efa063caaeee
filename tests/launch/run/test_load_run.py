"""Tests of the checkpoint that evaluation, export and serving load."""

import asyncio
import dataclasses

import jax
import numpy as np
import pytest

from launch.run import load_run
from models import config as model_config
from rl import initial_state
from rl.loop import progress
from rl.runtime import checkpoint
from tests.helpers import counting_runs

pytestmark = pytest.mark.compiled


def test_of_a_checkpoint_only_the_parameters_are_read(tmp_path):
  settings = counting_runs.experiment(
    model_config.tiny(vocab_size=8, num_layers=1, d_model=32, max_length=16)
  )

  async def save():
    async with counting_runs.built(settings) as parts:
      state = await initial_state.create(parts)
      kept = checkpoint.Checkpoints(tmp_path / "checkpoints", keep=1)
      start = progress.beginning(state, parts.tasks.cursor)
      initial_state.save(kept, dataclasses.replace(start, trained=3))
      kept.close()
      return jax.device_get(state.params)

  async def load():
    async with load_run.restored(settings, tmp_path) as (_, found):
      return found

  saved, found = asyncio.run(save()), asyncio.run(load())
  assert found.step == 3
  # Adam's moments would be twice as large.
  assert found.state[1:] == ((), found.state.updates, None, None, None)
  jax.tree.map(np.testing.assert_array_equal, found.state.params, saved)
