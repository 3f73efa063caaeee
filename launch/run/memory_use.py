"""The memory that a run has taken: of its process, and of its devices."""

import math
import resource
import sys
from collections.abc import Iterable
from typing import Any

# Linux counts KiB, macOS bytes.
_UNIT = 1 if sys.platform == "darwin" else 1024
_PEAK = "peak_bytes_in_use"


def metrics(devices: Iterable[Any]) -> dict[str, float]:
  """Returns the most that this process, and a device, has held so far.

  Args:
    devices: of jax, of this process. Where none tells, as of a CPU, theirs is
      nan.
  """
  host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT
  told = [device.memory_stats() or {} for device in devices]
  peaks = [stats[_PEAK] for stats in told if _PEAK in stats]
  return {
    "host_memory_bytes": float(host),
    "device_memory_bytes": float(max(peaks, default=math.nan)),
  }
