"""Runs and restores the programs of a real learner, for its tests."""

import asyncio
from typing import Any

import jax
import pytest

from rl.runtime import checkpoint, mesh_thread, trace


def on_mesh(function, *args) -> Any:
  """As in a run: on the thread of a mesh, without implicit transfers."""
  thread = mesh_thread.MeshThread("learner", trace.Trace(None))
  try:
    return asyncio.run(thread.run("work", function, *args))
  finally:
    thread.close()


def saved_and_restored(path, state, abstract) -> Any:
  """Saves a state and returns it as restored."""
  checkpoints = checkpoint.Checkpoints(path, keep=1)
  checkpoints.save(1, state, {})
  checkpoints.wait()
  restored = checkpoints.restore(abstract)
  checkpoints.close()
  assert restored is not None
  return restored.state


@pytest.fixture(scope="module", autouse=True)
def optimised():
  """Compiles what users run; for a module that names it.

  Sums are compared there to their last digits.
  """
  name = "jax_disable_most_optimizations"
  before = jax.config.values[name]
  jax.config.update(name, False)
  yield
  jax.config.update(name, before)
