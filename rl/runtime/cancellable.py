"""Work that can be cancelled without whoever waits for it."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


class Cancellable:
  """Runs work, one piece after another, until it is cancelled.

  Whoever waits calls `run`, and anybody `cancel`, on one event loop.
  """

  def __init__(self):
    self._task: asyncio.Task[Any] | None = None
    self._cancelled = False

  def cancel(self) -> None:
    """Ends what is run now and what would be run later."""
    self._cancelled = True
    if self._task is not None:
      self._task.cancel()

  async def run(self, work: Coroutine[Any, Any, _T]) -> _T | None:
    """Returns what work returns, or None when it was cancelled.

    So it was, too, when it says so by itself and nobody has called `cancel`.
    Cancel who waits, and the work is over before that is.
    """
    self._task = asyncio.create_task(work)
    if self._cancelled:
      self._task.cancel()
    try:
      return await self._task
    except asyncio.CancelledError:
      current = asyncio.current_task()
      if current is None or current.cancelling():
        self._task.cancel()
        await asyncio.wait([self._task])
        raise
      return None
