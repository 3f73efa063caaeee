"""Work that can be cancelled without cancelling its waiter."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


class Cancellable:
  """Runs work, one piece after another, until it is cancelled.

  The waiter calls `run`, and anyone `cancel`, on one event loop.
  """

  def __init__(self):
    self._task: asyncio.Task[Any] | None = None
    self._cancelled = False

  def cancel(self) -> None:
    """Cancels the current work and all later work."""
    self._cancelled = True
    if self._task is not None:
      self._task.cancel()

  async def run(self, work: Coroutine[Any, Any, _T]) -> _T | None:
    """Returns the result of the work, or None if it was cancelled.

    Also returns None if the work raises CancelledError itself. Cancelling the
    caller cancels the work and waits for it.
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
