"""The speed of this machine as it is now, by which deadlines are scaled."""

import time

_STEPS = 1_000_000
# Of that many steps on one idle core of the machines that CI has.
_IDLE_S = 0.05


def _slowness() -> float:
  """Returns how many times as long as on an idle machine work takes; from 1."""
  start_s = time.perf_counter()
  total = 0
  for number in range(_STEPS):
    total += number
  return max(1.0, (time.perf_counter() - start_s) / _IDLE_S)


_SLOWNESS = _slowness()


def scaled(seconds: float) -> float:
  """Returns a deadline for work that takes a tenth of it on an idle machine.

  The machine is measured once a process, when this is imported.
  """
  return seconds * _SLOWNESS
