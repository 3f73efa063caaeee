"""Waking those who wait for a change, whichever it is."""

import asyncio


class Signal:
  """Wakes all who wait for it now; each looks again for itself."""

  def __init__(self):
    self._event = asyncio.Event()

  async def wait(self) -> None:
    """Returns when `fire` is called next."""
    await self._event.wait()

  def fire(self) -> None:
    """Something has changed."""
    self._event.set()
    self._event = asyncio.Event()
