"""Runs and restores the programs of a real learner, for its tests."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import jax

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


@contextlib.contextmanager
def optimised() -> Iterator[None]:
  """Compiles what users run, in its body.

  Sums are compared there to their last digits.
  """
  name = "jax_disable_most_optimizations"
  before = jax.config.values[name]
  jax.config.update(name, False)
  yield
  jax.config.update(name, before)
