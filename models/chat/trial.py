"""A trial of foreign code in a process of its own, with bounds.

A parser without limits may hang or fill the memory. What it is given is tried
first in a process that may be killed: what takes too long there is never
started here.
"""

import importlib
import json
import os
import resource
import subprocess
import sys
from typing import Any

MAX_CPU_S = 60
MAX_BYTES = 4 << 30
# Pools of threads would map memory for each core.
_ALONE = {
  "OPENBLAS_NUM_THREADS": "1",
  "OMP_NUM_THREADS": "1",
  "RAYON_NUM_THREADS": "1",
  "TOKENIZERS_PARALLELISM": "false",
}
_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from models.chat import trial
trial.main(*sys.argv[2:])
"""
_REFUSED = 3


class TrialFailed(ValueError):
  """A trial that ended in an error, or did not end."""


def run(
  module: str,
  function: str,
  argument: Any,
  *,
  cpu_s: int = MAX_CPU_S,
  max_bytes: int = MAX_BYTES,
) -> None:
  """Calls a function of a module in another process.

  Args:
    argument: of the function, as JSON.
    cpu_s: time of the processor; ten times as long by the clock.
    max_bytes: of memory.

  Raises:
    TrialFailed: with the message of the function's ValueError, or the bound.
  """
  names = (module, function, str(cpu_s), str(max_bytes))
  try:
    done = subprocess.run(
      [sys.executable, "-c", _PROGRAM, json.dumps(sys.path), *names],
      input=json.dumps(argument),
      env={**os.environ, **_ALONE},
      capture_output=True,
      text=True,
      timeout=10 * cpu_s,
    )
  except subprocess.TimeoutExpired as error:
    raise TrialFailed(_too_much(cpu_s, max_bytes)) from error
  if done.returncode == _REFUSED:
    raise TrialFailed(json.loads(done.stdout))
  if done.returncode:
    last = done.stderr.strip().splitlines()[-1:] or [str(done.returncode)]
    raise TrialFailed(f"{_too_much(cpu_s, max_bytes)} ({last[0][:200]})")


def _too_much(cpu_s: int, max_bytes: int) -> str:
  return (
    f"using it takes more than {cpu_s} s or {max_bytes / (1 << 30):.3g} GiB, "
    "or ends the process; use another"
  )


def main(module: str, function: str, cpu_s: str, max_bytes: str) -> None:
  """Runs the function here, within limits that end this process."""
  resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_s), int(cpu_s) + 1))
  resource.setrlimit(resource.RLIMIT_AS, (int(max_bytes), int(max_bytes)))
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
  try:
    call = getattr(importlib.import_module(module), function)
    call(json.load(sys.stdin))
  except ValueError as error:
    json.dump(str(error), sys.stdout)
    sys.exit(_REFUSED)
  # Files of others may have values of any type in any place.
  except Exception as error:
    json.dump(f"it cannot be used: {error!r:.500}; copy it again", sys.stdout)
    sys.exit(_REFUSED)
