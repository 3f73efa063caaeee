"""One thread for each mesh: runs its programs in order, off the event loop."""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from rl.runtime import logical_clock, trace

_CLOSE_S = 5.0
# A program that is compiled in one run may have been so long since in another.
_LOGICAL_S = {"decode": 0.01, "warm up": 0.01, "accumulate": 0.05}
_OTHER_LOGICAL_S = 0.02
"""Seconds of programs on a logical clock. They decide how many tokens a publish
comes after, and whether the loop waits for one mesh while another has work."""


class MeshThread:
  """Dispatches to one mesh, waits for the results and records busy spans.

  The trainer calls `run` and the engine `submit` from the event loop;
  `assemble.Parts` closes it. Implicit transfers inside are errors, so
  everything that reaches the mesh is placed on purpose.
  """

  def __init__(self, track: str, spans: trace.Trace):
    self._track = track
    self._spans = spans
    self._jobs: queue.SimpleQueue[Callable[[], None] | None] = (
      queue.SimpleQueue()
    )
    self._closed = False
    self._due_s = 0.0
    # A daemon: a program that hangs on the device must not hold up the exit.
    self._thread = threading.Thread(target=self._work, name=track, daemon=True)
    self._thread.start()

  async def run(self, name: str, function: Callable[..., Any], *args) -> Any:
    """Returns `function(*args)`, its arrays ready; records one span.

    Cancelling the caller leaves the program running: the next one queues
    behind it, so state is never seen half-way.

    Raises:
      RuntimeError: the thread was closed.
    """
    return await self.submit(name, function, *args)

  def submit(
    self, name: str, function: Callable[..., Any], *args
  ) -> asyncio.Future[Any]:
    """Queues a program behind those before it; see `run`."""
    if self._closed or not self._thread.is_alive():
      raise RuntimeError(f"the {self._track} thread was closed")
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()
    deliver, self._due_s = logical_clock.promise(
      loop, _LOGICAL_S.get(name, _OTHER_LOGICAL_S), self._due_s
    )

    def job() -> None:
      try:
        result, error = self._timed(name, function, args), None
      except BaseException as raised:
        result, error = None, raised
      # The loop may have ended meanwhile, and the waiter with it.
      with contextlib.suppress(RuntimeError):
        deliver(_deliver, done, result, error)

    self._jobs.put(job)
    return done

  def _work(self) -> None:
    while (job := self._jobs.get()) is not None:
      job()
      del job  # It would keep arguments and result alive until the next one.

  def _timed(self, name: str, function: Callable[..., Any], args: tuple) -> Any:
    start = time.monotonic()
    with jax.transfer_guard("disallow"):
      result = jax.block_until_ready(function(*args))
    self.record(name, start, time.monotonic())
    return result

  def record(self, name: str, start: float, end: float) -> None:
    """Records a busy span of the mesh, also of work that another thread did.

    Args:
      start, end: readings of `time.monotonic`.
    """
    self._spans.add(self._track, name, start, end)

  def close(self) -> None:
    """Ends the thread after the queued jobs; leaves a hung one behind."""
    self._closed = True
    self._jobs.put(None)
    self._thread.join(_CLOSE_S)
    if self._thread.is_alive():
      _left_behind.add(self._thread)


_left_behind: set[threading.Thread] = set()


def is_one_left_behind() -> bool:
  """Returns whether a program still runs whose thread was closed.

  Then the process should end by `os._exit`: the interpreter ends such a thread
  within the program, which aborts the process.
  """
  return any(thread.is_alive() for thread in _left_behind)


def _deliver(
  done: asyncio.Future[Any], result: Any, error: BaseException | None
) -> None:
  if done.done():  # The caller was cancelled.
    return
  if error is None:
    done.set_result(result)
  else:
    done.set_exception(error)
