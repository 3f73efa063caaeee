"""Places that calls queue for, while the clocks of these calls stand still.

  rl.runtime.isolation.guarded --sets--> base.CLOCK <--tells-- place(semaphore)

A reward that waits behind others for a place is not slow itself. The clock of
whoever holds a place runs, so a queue always moves on.
"""

import asyncio
import contextlib
import weakref
from collections.abc import AsyncGenerator

from envs import base


@contextlib.asynccontextmanager
async def place(places: asyncio.Semaphore) -> AsyncGenerator[None]:
  """Queues for one of the places and holds it in the body of a `with`."""
  clock = base.CLOCK.get()
  if clock is None:
    async with places:
      yield
    return
  clock.change(waiting=1)
  try:
    await places.acquire()
  finally:
    clock.change(waiting=-1)
  clock.change(held=1)
  try:
    yield
  finally:
    clock.change(held=-1)
    places.release()


class LoopPlaces:
  """So many places for the calls of each event loop."""

  def __init__(self, count: int):
    self._count = count
    self._by_loop: weakref.WeakKeyDictionary[
      asyncio.AbstractEventLoop, asyncio.Semaphore
    ] = weakref.WeakKeyDictionary()

  def place(self) -> contextlib.AbstractAsyncContextManager[None]:
    """Queues on the running loop for a place; see `place`."""
    return place(
      self._by_loop.setdefault(
        asyncio.get_running_loop(), asyncio.Semaphore(self._count)
      )
    )
