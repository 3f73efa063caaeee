"""Keeps clients from filling the log with what they do wrong."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator

_LOGGER = "uvicorn.error"


class LogLimit(logging.Filter):
  """Lets a few lines of each message through in every period.

  The first of a later period tells how many were left out.

  Args:
    most: lines of one message in a period.
    period_s: of the clock, in seconds.
  """

  def __init__(
    self,
    most: int = 5,
    period_s: float = 60.0,
    clock: Callable[[], float] = time.monotonic,
  ):
    super().__init__()
    self._most = most
    self._period_s = period_s
    self._clock = clock
    # By message: the end of its period, and its lines in that.
    self._seen: dict[str, tuple[float, int]] = {}

  def filter(self, record: logging.LogRecord) -> bool:
    """Returns whether a line is logged; called by logging."""
    now_s, key = self._clock(), str(record.msg)
    until_s, count = self._seen.get(key, (now_s + self._period_s, 0))
    if now_s >= until_s:
      if count > self._most:
        left_out = f"{count - self._most} more of these were left out"
        record.msg = f"{record.getMessage()} ({left_out})"
        record.args = ()
      until_s, count = now_s + self._period_s, 0
    self._seen[key] = until_s, count + 1
    return count < self._most


@contextlib.contextmanager
def limited() -> Iterator[None]:
  """Limits what uvicorn says of bad requests in the body of a `with`."""
  logger, limit = logging.getLogger(_LOGGER), LogLimit()
  logger.addFilter(limit)
  try:
    yield
  finally:
    logger.removeFilter(limit)
