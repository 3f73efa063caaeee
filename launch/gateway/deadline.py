"""The time by which a request is answered."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator


@dataclasses.dataclass(frozen=True)
class Deadline:
  """The end of the seconds that an answer may take; any thread may ask for it.

  Attributes:
    answer_s: all of them.
    until_s: their end, by `time.monotonic`.
  """

  answer_s: float
  until_s: float

  @classmethod
  def after(cls, answer_s: float) -> "Deadline":
    """Returns the one that begins now."""
    return cls(answer_s, time.monotonic() + answer_s)

  @property
  def left_s(self) -> float:
    """Seconds until then, 0 or more."""
    return max(self.until_s - time.monotonic(), 0.0)

  @contextlib.asynccontextmanager
  async def kept(self) -> AsyncIterator[None]:
    """Cancels what is done inside once it is late.

    Raises:
      TimeoutError: it was late, in words for the client.
    """
    try:
      async with asyncio.timeout(self.left_s):
        yield
    except TimeoutError:
      raise TimeoutError(f"the answer took over {self.answer_s:g} s") from None
