"""Looks at runs in processes of their own, and at their workers."""

import contextlib
import json
import pathlib
import time

import numpy as np
import orbax.checkpoint as ocp

from rl.audit import event_log
from tests.helpers import machine_speed

_WORKERS = {
  "engine": b"launch.worker",
  "learner": b"launch.worker",
  "environment": b"envs.worker_process",
  "reward": b"envs.offload",
}
ROLES = tuple(_WORKERS)
DEADLINE_S = machine_speed.scaled(200)


def until(done, process):
  """Polls `done()` while a process runs; returns its first true result."""
  deadline = time.monotonic() + DEADLINE_S
  while time.monotonic() < deadline and process.poll() is None:
    if result := done():
      return result
    time.sleep(0.02)
  process.kill()
  raise AssertionError(process.communicate()[0])


def rounds(run_dir, file="metrics.jsonl") -> int:
  """Returns the number of rounds, or steps, in a file of metrics of a run."""
  path = run_dir / file
  return len(path.read_text().splitlines()) if path.exists() else 0


def workers_of(process, role=None) -> list[int]:
  """Returns the process ids of the workers that a run has started.

  Args:
    role: of ROLES; None returns all.
  """
  found = []
  with contextlib.suppress(OSError):  # It has just ended.
    for task in pathlib.Path(f"/proc/{process.pid}/task").iterdir():
      with contextlib.suppress(OSError):
        for pid in (task / "children").read_text().split():
          its_role = _role(pathlib.Path(f"/proc/{pid}"))
          if its_role and role in (None, its_role):
            found.append(int(pid))
  return found


def _role(process) -> str:
  """Returns the role of a process, by its directory in /proc; "" if none."""
  words = (process / "cmdline").read_bytes()
  if _WORKERS["engine"] in words:  # Its output is in a file of its name.
    return (process / "fd" / "1").readlink().name.partition("_")[0]
  return next((role for role, name in _WORKERS.items() if name in words), "")


def runs(pid) -> bool:
  """Returns True unless a process has ended."""
  with contextlib.suppress(OSError):
    state = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1]
    return state.split()[0] not in "ZX"
  return False


def outliving(pids) -> list[int]:
  """Returns those of some processes that still run after 10 s, scaled."""
  deadline = time.monotonic() + machine_speed.scaled(10)
  while left := [pid for pid in pids if runs(pid)]:
    if time.monotonic() > deadline:
      return left
    time.sleep(0.05)
  return []


def checkpoint(run_dir, step) -> dict:
  """Returns the checksums of a checkpoint's arrays, and the rest it holds."""
  path = run_dir / "checkpoints" / str(step) / "record" / "metadata"
  return json.loads(path.read_text())["body"]


def saved_params(run_dir, step) -> dict[str, bytes]:
  """Returns every leaf that a checkpoint holds, name by name."""
  path = run_dir / "checkpoints" / str(step) / "state"
  leaves = ocp.PyTreeCheckpointer().restore(path)
  return {name: np.asarray(leaf).tobytes() for name, leaf in leaves.items()}


def events(run_dir, kind):
  """Returns the events of a kind in the log of a run."""
  log = event_log.LogFile(run_dir / "events.jsonl")
  return list(event_log.of_kind(log, kind))
