"""The guard of a process: ends it, and all that it started, for good.

  run ---stdin, stdout, stderr---> the guarded process, in a session of its own
   |                                  its children, and theirs
   +-- starts --> guard: watches --^  and becomes the parent of orphans

All end when the guarded process ends, when together they take more memory or
are more processes than they may, and when the run closes the pipe to stdin,
which it does even if it is killed. The guard writes the reason to stderr and
ends as the guarded process did, by the same signal.

The file is also the program of the guard. It imports nothing of ours, and works
on Linux alone.
"""

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Sequence

# A look at all processes takes a few milliseconds. How many the machine has is
# known at once, so that a fork bomb is seen before it has grown.
_PERIOD_S = 0.5
_GLANCE_MS = 20
# For a process that ends by itself once its stdin does.
_GRACE_S = 1.0
# SIGKILL takes no longer, but for a process that hangs in the kernel.
_DEATH_S = 10.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def command(
  guarded: Sequence[str], *, max_rss_mib: int, max_processes: int
) -> Sequence[str]:
  """Returns the command that runs another one under a guard.

  Args:
    max_rss_mib: resident memory of all its processes; what they share counts
      for each.
    max_processes: at once, the guarded one included.
  """
  limits = [str(max_rss_mib), str(max_processes)]
  return [sys.executable, "-I", "-S", __file__, *limits, *guarded]


def _main(max_rss_mib: int, max_processes: int, guarded: list[str]) -> None:
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
  libc, priority = ctypes.CDLL(None), os.getpriority(os.PRIO_PROCESS, 0)
  with contextlib.suppress(PermissionError):
    os.nice(-10)  # A fork bomb leaves it little time; only root may do this.
  # Orphans become children of the guard, so that it can find them.
  libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
  pid = os.fork()
  if not pid:
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    os.setpriority(os.PRIO_PROCESS, 0, priority)
    _run(guarded)
  os.close(1)  # The run sees the end of stdout when the last of them dies.
  reason = _watch(pid, max_rss_mib << 20, max_processes)
  status = _end(pid)
  if reason:
    print(reason, file=sys.stderr, flush=True)
  if status < 0:
    signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else 0
    os.kill(os.getpid(), -status)
  os._exit(status)


def _run(guarded: list[str]) -> None:
  try:
    os.execvp(guarded[0], guarded)
  except OSError as error:
    print(f"{guarded[0]}: {error.strerror}", file=sys.stderr, flush=True)
  finally:
    os._exit(127)


def _watch(pid: int, max_rss: int, max_processes: int) -> str:
  """Waits until all must end; returns the limit that was met, or nothing."""
  poller, end = select.poll(), os.pidfd_open(pid)
  poller.register(0, 0)  # Never read here; it reports the end of the run.
  poller.register(end, select.POLLIN)
  looked_s, before = 0.0, 0
  while not (events := poller.poll(_GLANCE_MS)):
    num_now, now_s = _num_processes(), time.monotonic()
    if now_s < looked_s + _PERIOD_S and num_now <= before + max_processes:
      continue
    found = _descendants()
    looked_s, before = now_s, num_now
    if len(found) > max_processes:
      return f"{len(found)} processes at once are above {max_processes}"
    if (rss := sum(found.values())) > max_rss:
      used, limit = rss >> 20, max_rss >> 20
      return f"resident memory of {used} MiB is above {limit} MiB"
    _reap_orphans(pid)
  if (end, select.POLLIN) not in events:
    poller.unregister(0)
    poller.poll(1000 * _GRACE_S)
  return ""


def _end(pid: int) -> int:
  """Kills all; returns the exit code of the guarded process, or -signal."""
  deadline = time.monotonic() + _DEATH_S
  with contextlib.suppress(ProcessLookupError, PermissionError):
    # All of the group at once, so that a fork bomb cannot run ahead.
    os.killpg(pid, signal.SIGKILL)
  status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
  while (found := _descendants()) and time.monotonic() < deadline:
    for one in found:
      with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(one, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
      while os.waitpid(-1, os.WNOHANG)[0]:
        pass
    time.sleep(0.001)
  return status


def _reap_orphans(pid: int) -> None:
  """Reaps ended children, but for the guarded process."""
  with contextlib.suppress(ChildProcessError):
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while (child := os.waitid(os.P_ALL, 0, options)) and child.si_pid != pid:
      os.waitpid(child.si_pid, 0)


def _num_processes() -> int:
  """Returns the number of processes and threads of the whole machine."""
  with open("/proc/loadavg", "rb") as file:
    return int(file.read().split()[3].partition(b"/")[2])


def _descendants() -> dict[int, int]:
  """Returns the bytes of resident memory of each process below the guard."""
  children: dict[int, list[int]] = {}
  memory = {}
  for name in filter(str.isdigit, os.listdir("/proc")):
    with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
      fields = file.read().rpartition(b")")[2].split()
      children.setdefault(int(fields[1]), []).append(int(name))
      memory[int(name)] = int(fields[21]) * resource.getpagesize()
  found, waiting = {}, [os.getpid()]
  while waiting:
    below = children.get(waiting.pop(), [])
    found |= {pid: memory[pid] for pid in below}
    waiting += below
  return found


if __name__ == "__main__":
  _main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
