"""One thread a mesh: runs its programs one by one, off the event loop."""

import asyncio
import concurrent.futures
import time
from collections.abc import Callable
from typing import Any

import jax

from rl import trace


class MeshThread:
  """Dispatches to one mesh, waits for the results and records busy spans.

  The coordinator and the engine call `run` from the event loop; `close` is
  called once by whoever built it. Implicit transfers inside are errors, so
  everything that reaches the mesh is placed on purpose.
  """

  def __init__(self, track: str, spans: trace.Trace):
    self._track = track
    self._spans = spans
    self._pool = concurrent.futures.ThreadPoolExecutor(
      max_workers=1, thread_name_prefix=track
    )

  async def run(self, name: str, function: Callable[..., Any], *args) -> Any:
    """Returns `function(*args)`, its arrays ready; records one span.

    A caller that is cancelled leaves the program running: the next one queues
    behind it, so state is never seen half-way.
    """
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(
      self._pool, self._timed, name, function, args
    )

  def _timed(self, name: str, function: Callable[..., Any], args: tuple) -> Any:
    start = time.monotonic()
    with jax.transfer_guard("disallow"):
      result = jax.block_until_ready(function(*args))
    self._spans.add(self._track, name, start, time.monotonic())
    return result

  def close(self) -> None:
    """Waits for the running program and ends the thread."""
    self._pool.shutdown(wait=True)
