"""The guard of a process: ends it, and all that it started, for good.

  run ---stdin, stdout, stderr---> the guarded process, in a session of its own
   |                                  its children, and theirs
   +-- starts --> guard: watches --^  and becomes the parent of orphans

All end when the guarded process ends, when together they take more memory or
are more processes than they may, and when the run closes the pipe to the
guard's stdin, which it does even if it is killed. The guard writes the reason
to stderr and ends as the guarded process did, by the same signal.

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
from collections.abc import Iterator, Sequence

# A look at all processes takes a few milliseconds. How many the machine has is
# known at once, so that a fork bomb is seen before it has grown.
_PERIOD_S = 0.5
_GLANCE_MS = 20
# For a process that ends by itself once its stdin does.
_GRACE_S = 1.0
# SIGKILL takes no longer, but for a process that hangs in the kernel.
_DEATH_S = 10.0
_NO_LIMIT = 1 << 62
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def command(
  guarded: Sequence[str],
  *,
  max_rss_mib: int = 0,
  max_processes: int = 0,
  reads_stdin: bool = True,
) -> Sequence[str]:
  """Returns the command that runs another one under a guard.

  Args:
    max_rss_mib: resident memory of all its processes; what they share counts
      for each. 0 is no limit.
    max_processes: at once, the guarded one included; 0 is no limit.
    reads_stdin: the process shares the guard's stdin, and may end by itself
      when that ends; else its own is empty.
  """
  settings = (max_rss_mib, max_processes, int(reads_stdin))
  given = map(str, settings)
  return [sys.executable, "-I", "-S", __file__, *given, *guarded]


def _main(
  guarded: list[str], max_rss_mib: int, max_processes: int, reads_stdin: int
) -> None:
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
  libc = ctypes.CDLL(None)
  # Orphans become children of the guard, so that it can find them.
  libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
  pid = os.fork()
  if not pid:
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    if not reads_stdin:
      os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    _run(guarded)
  _hurry()
  os.close(1)  # The run sees the end of stdout when the last of them dies.
  reason = _watch(pid, max_rss_mib << 20, max_processes, reads_stdin)
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


def _hurry() -> None:
  """Goes before other processes, as a fork bomb leaves it no time else.

  Only root may do this.
  """
  with contextlib.suppress(OSError):
    os.nice(-10)
  with contextlib.suppress(OSError):
    # A thousand processes outweigh any niceness, but not this.
    param = os.sched_param(os.sched_get_priority_min(os.SCHED_RR))
    os.sched_setscheduler(0, os.SCHED_RR, param)


def _watch(pid: int, max_rss: int, max_processes: int, reads_stdin: int) -> str:
  """Waits until all must end; returns the limit that was met, or nothing."""
  poller, end = select.poll(), os.pidfd_open(pid)
  poller.register(0, 0)  # Never read here; it reports the end of the run.
  poller.register(end, select.POLLIN)
  looked_s, before = 0.0, 0
  is_limited = max_rss or max_processes
  max_rss, max_processes = max_rss or _NO_LIMIT, max_processes or _NO_LIMIT
  wait_ms = _GLANCE_MS if is_limited else 1000 * _PERIOD_S
  while not (events := poller.poll(wait_ms)):
    _reap_orphans(pid)
    if not is_limited:
      continue
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
  if reads_stdin and (end, select.POLLIN) not in events:
    poller.unregister(0)
    poller.poll(1000 * _GRACE_S)
  return ""


def _end(pid: int) -> int:
  """Kills all; returns the exit code of the guarded process, or -signal."""
  deadline, status = time.monotonic() + _DEATH_S, -signal.SIGKILL
  with contextlib.suppress(ProcessLookupError, PermissionError):
    # All of the group at once, so that a fork bomb cannot run ahead.
    os.killpg(pid, signal.SIGKILL)
  while _strike() and time.monotonic() < deadline:
    with contextlib.suppress(ChildProcessError):
      while (ended := os.waitpid(-1, os.WNOHANG))[0]:
        if ended[0] == pid:
          status = os.waitstatus_to_exitcode(ended[1])
    time.sleep(0.001)
  return status


def _strike() -> bool:
  """Kills all below the guard as it comes across them; False if none is left.

  Children follow their parents in /proc, unless the numbers began anew, and
  those of the dead are the guard's own: a later pass finds who was missed.
  """
  ours = {os.getpid()}
  for pid, parent, _ in _processes():
    if parent in ours:
      ours.add(pid)
      with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
  return len(ours) > 1


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
  for pid, parent, rss in _processes():
    children.setdefault(parent, []).append(pid)
    memory[pid] = rss
  found, waiting = {}, [os.getpid()]
  while waiting:
    below = children.get(waiting.pop(), [])
    found |= {pid: memory[pid] for pid in below}
    waiting += below
  return found


def _processes() -> Iterator[tuple[int, int, int]]:
  """Yields each process, its parent and its bytes of resident memory."""
  for name in filter(str.isdigit, os.listdir("/proc")):
    with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
      fields = file.read().rpartition(b")")[2].split()
      yield int(name), int(fields[1]), int(fields[21]) * resource.getpagesize()


if __name__ == "__main__":
  _main(sys.argv[4:], *map(int, sys.argv[1:4]))
