"""Ends a process whose event loop one call blocks for good."""

import contextlib
import os
import sys
from collections.abc import Callable

from rl.runtime import watchdog as watchdog_lib
from twinmesh import error_codes

_MIN_LAG_S, _LOOP_LAG_S = 10.0, 30.0


def guard(
  watchdog: watchdog_lib.Watchdog,
  progress_timeout_s: float,
  tell: Callable[[str], object],
  advice: str = "",
) -> contextlib.AbstractContextManager[None]:
  """Guards the body of a `with`: the process ends with 1 if it is blocked.

  Args:
    tell: given the error, in a thread, right before the end.
    advice: what to do then, at the end of the error.
  """

  def end() -> None:
    blocked = (
      "the event loop was blocked for longer than progress_timeout_s="
      f"{progress_timeout_s:g}; the call that blocks it is above{advice}"
    )
    tell(error_codes.text(blocked, "TM-R07"))
    sys.stdout.flush()
    os._exit(1)

  return watchdog.guard(
    # Told before it ends the process, where that is patient enough for it.
    loop_lag_s=min(_LOOP_LAG_S, max(_MIN_LAG_S, progress_timeout_s / 2)),
    end_s=progress_timeout_s,
    end=end,
  )
