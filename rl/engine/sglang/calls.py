"""Jobs of the scheduler's thread, awaited by the event loop."""

import asyncio
import contextlib
import threading
from collections.abc import Callable

from rl.engine import contract
from rl.engine.sglang import scheduler_thread


class Calls:
  """Runs jobs on the scheduler's thread, until the engine ends."""

  def __init__(self, bridge: scheduler_thread.Bridge):
    self._bridge = bridge
    self._pending: set[asyncio.Future[None]] = set()

  async def run(self, job: Callable[[], None], *, idle: bool = False) -> None:
    """Returns when a job has run; when cancelled before, it never does.

    Args:
      idle: see `scheduler_thread.Bridge.post`.

    Raises:
      EngineClosed: the engine ended first.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    taken = threading.Lock()  # By the job, or by who gives it up.

    def deliver() -> None:
      if not done.done():
        done.set_result(None)

    def run() -> None:
      if taken.acquire(blocking=False):
        job()
        with contextlib.suppress(RuntimeError):  # The loop has ended.
          loop.call_soon_threadsafe(deliver)

    self._pending.add(done)
    self._bridge.post(run, idle=idle)
    try:
      await asyncio.shield(done)
    except asyncio.CancelledError:
      if taken.acquire(blocking=False):
        self._bridge.give_up(run)
        raise
      await done  # Too late to undo: so it counts.
    finally:
      self._pending.discard(done)

  def fail(self, error: contract.EngineClosed) -> None:
    """Lets all who wait raise."""
    for done in self._pending:
      if not done.done():
        done.set_exception(contract.EngineClosed(str(error)))
