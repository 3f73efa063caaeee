"""Programs in sandboxes of bubblewrap: how they start, and how all of it dies.

  Process.start -> bwrap -> prlimit -> python main.py
                     |
                     process 1 of the sandbox: when it dies, all in there die

The code sees an empty network, /usr and Python's own files read-only, and one
directory in memory that it may write to. It has no /proc, no capability and no
user but itself. bwrap alone reports how it ended, through a pipe that the code
does not have, so the code cannot pass for a sandbox that failed.
"""

import asyncio
import contextlib
import errno
import functools
import json
import os
import platform
import shutil
import signal
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence

from envs import guarded_process

# SIGKILL takes no longer, but for a process that hangs in the kernel.
_DEATH_S = 30.0
_HOME = os.path.join(os.sep, "tmp")  # Python itself may lie below it.
_NOBODY = 65534
# Alike on every machine, so that a reward is. A library that starts a thread a
# core would meet the limits of processes and memory.
_ENVIRONMENT = {
  "HOME": _HOME,
  "TMPDIR": _HOME,
  "PATH": "/usr/bin:/bin",
  "LANG": "C.UTF-8",
  "PYTHONHASHSEED": "0",
  "OMP_NUM_THREADS": "1",
  "OPENBLAS_NUM_THREADS": "1",
}
# System calls that a capability does not guard: each holds memory that no limit
# counts, reaches into other processes, or is a large part of the kernel that
# Python does without. Numbers of x86_64 and aarch64.
_DENIED = {
  "add_key": (248, 217),
  "bpf": (321, 280),
  "io_uring_setup": (425, 425),
  "keyctl": (250, 219),
  "memfd_create": (319, 279),
  "memfd_secret": (447, 447),
  "mq_open": (240, 180),
  "msgget": (68, 186),
  "perf_event_open": (298, 241),
  "pidfd_getfd": (438, 438),
  "process_vm_readv": (310, 270),
  "process_vm_writev": (311, 271),
  "ptrace": (101, 117),
  "request_key": (249, 218),
  "setns": (308, 268),
  "shmget": (29, 194),
  "unshare": (272, 97),
  "userfaultfd": (323, 282),
}
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


class SandboxError(RuntimeError):
  """No sandbox on this machine; nothing of the code has run."""


def check() -> None:
  """Raises SandboxError where there cannot be a sandbox; starts none."""
  _filter()
  for name in ("bwrap", "prlimit"):
    _tool(name)


class Process:
  """A program in a sandbox of its own; `start` makes one, `end` is due then.

  Attributes:
    stdin, stdout, stderr: its pipes.
  """

  def __init__(self, process: asyncio.subprocess.Process, report: "_Report"):
    assert process.stdin
    assert process.stdout
    assert process.stderr
    self.stdin = process.stdin
    self.stdout = process.stdout
    self.stderr = process.stderr
    self.wait = process.wait
    self._process = process
    self._report = report

  @classmethod
  async def start(
    cls, code: str, disk_mib: int, resources: Mapping[str, object]
  ) -> "Process":
    """Starts a program.

    Args:
      disk_mib: size of the directory that it may write to.
      resources: limits of each of its processes, by their names in prlimit.

    Raises:
      SandboxError: bubblewrap is missing, or this machine is not known.
    """
    report = _Report()
    try:
      with contextlib.ExitStack() as fds:
        fds.callback(os.close, report.of_bwrap)
        main = fds.enter_context(_memory_file(encode(code)))
        seccomp = fds.enter_context(_memory_file(_filter()))
        ours = (main, seccomp, report.of_bwrap)
        starting = asyncio.ensure_future(
          asyncio.create_subprocess_exec(
            *_command(disk_mib, resources, *ours),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            pass_fds=ours,
            env={},
            cwd="/",
            start_new_session=True,
          )
        )
        try:
          # If this were cancelled, asyncio would kill bwrap without its child.
          return cls(await asyncio.shield(starting), report)
        except asyncio.CancelledError:
          await cls(await starting, report).end()
          raise
    except (OSError, SandboxError):
      report.close()
      raise

  def kill(self) -> None:
    """Kills all that is in the sandbox, if it has not ended."""
    if self._process.returncode is not None:
      return
    with contextlib.suppress(ProcessLookupError):
      # When process 1 dies, so does all in there, and then bwrap ends by
      # itself. Before there is one, all are in the group of bwrap.
      if pid := self._report.read().get("child-pid"):
        os.kill(pid, signal.SIGKILL)
      else:
        os.killpg(self._process.pid, signal.SIGKILL)

  async def end(self) -> int | None:
    """Kills what still runs, and waits until all of it is dead.

    Nobody else may read its pipes by now.

    Returns:
      The exit code, 128 + n for signal n; None if bwrap did not say so, as it
      was killed or failed.

    Raises:
      SandboxError: a process outlives SIGKILL.
    """
    self.kill()
    try:
      async with asyncio.timeout(_DEATH_S):
        # asyncio hears of the death once all pipes are at their end.
        await asyncio.gather(
          *map(guarded_process.drain, (self.stdout, self.stderr)),
          self._process.wait(),
        )
        said = self._report.read()
        await _death(said.get("child-pid"))
    except TimeoutError:
      raise SandboxError(
        f"process {self._process.pid} of a sandbox is alive {_DEATH_S:g} s "
        "after SIGKILL: it hangs in the kernel"
      ) from None
    finally:
      self._report.close()
    return said.get("exit-code")


class _Report:
  """The pipe through which bwrap says how the sandbox is."""

  def __init__(self):
    self._fd, self.of_bwrap = os.pipe()
    os.set_blocking(self._fd, False)
    self._said: dict[str, int] = {}

  def read(self) -> dict[str, int]:
    """Returns `child-pid` and, once the program has ended, `exit-code`."""
    with contextlib.suppress(BlockingIOError):
      for line in os.read(self._fd, 65536).splitlines():
        self._said |= json.loads(line)
    return self._said

  def close(self) -> None:
    """Closes this end, if it is open."""
    fd, self._fd = self._fd, -1
    if fd >= 0:
      os.close(fd)


async def _death(pid: int | None) -> None:
  """Waits until process 1, and so all of the sandbox, is dead.

  bwrap ends when process 1 says that the program has, a moment before that. An
  orphan by then, it is a child of this process if that adopts orphans, as the
  first process of a container does, and would stay as a zombie.
  """
  try:
    fd = os.pidfd_open(pid or 0)
  except OSError:  # It is gone, or never was.
    return
  try:
    dead = asyncio.Event()
    asyncio.get_running_loop().add_reader(fd, dead.set)
    await dead.wait()
    with contextlib.suppress(ChildProcessError):  # Another process adopts it.
      os.waitid(os.P_PIDFD, fd, os.WEXITED | os.WNOHANG)
  finally:
    asyncio.get_running_loop().remove_reader(fd)
    os.close(fd)


def encode(text: str) -> bytes:
  """Returns code or input as bytes, whatever a model has written."""
  # A model may write half of a surrogate pair. Python refuses the file then.
  return text.encode(errors="surrogatepass")


@contextlib.contextmanager
def _memory_file(content: bytes) -> Iterator[int]:
  fd = os.memfd_create("sandbox")
  with open(fd, "wb") as file:
    file.write(content)
    file.flush()
    file.seek(0)
    yield fd


def _command(
  disk_mib: int,
  resources: Mapping[str, object],
  main: int,
  seccomp: int,
  report: int,
) -> Sequence[str]:
  """Returns the command that runs the program of the file `main`."""
  bwrap, prlimit = (_tool(name) for name in ("bwrap", "prlimit"))
  prefixes = _prefixes()
  if is_root := os.geteuid() == 0:
    places = [f"/mnt/{n}" for n in range(len(prefixes))]
  else:
    places = prefixes
  options = f"""
    --unshare-all --unshare-user --disable-userns --uid 1000 --gid 1000
    --cap-drop ALL --die-with-parent --new-session --clearenv --hostname sandbox
    --ro-bind /usr /usr --ro-bind-try /etc/ld.so.cache /etc/ld.so.cache
    --size {disk_mib << 20} --tmpfs {_HOME} --chdir {_HOME}
    --symlink {_HOME} dev/shm
    --ro-bind-data {main} /main.py
    --seccomp {seccomp} --json-status-fd {report}
  """
  devices = [
    f"/dev/{of}" for of in ("null", "zero", "full", "random", "urandom")
  ]
  command = [bwrap, *options.split(), *_links()]
  for place, prefix in zip(places, prefixes, strict=True):
    command += ["--ro-bind", place, prefix]
  for device in devices:
    command += ["--dev-bind", device, device]
  for name, value in _ENVIRONMENT.items():
    command += ["--setenv", name, value]
  command += ["--remount-ro", "/", prlimit]
  command += [f"--{name}={value}" for name, value in resources.items()]
  command += [sys.executable, "-P", "-s", "-B", "/main.py"]
  return (
    [*_as_nobody(bwrap, prefixes, places), *command] if is_root else command
  )


def _as_nobody(
  bwrap: str, prefixes: Sequence[str], places: Sequence[str]
) -> Sequence[str]:
  """Returns a command that runs another one without the rights of root.

  The kernel exempts root from the limit of processes. Python may be where only
  root can go, so it is bound to `places` first.
  """
  nobody = f"--reuid={_NOBODY} --regid={_NOBODY} --clear-groups"
  command = [*f"{bwrap} --die-with-parent --dev-bind / / --tmpfs /mnt".split()]
  for prefix, place in zip(prefixes, places, strict=True):
    command += ["--ro-bind", prefix, place]
  return [*command, _tool("setpriv"), *nobody.split()]


def _tool(name: str) -> str:
  if path := shutil.which(name):
    return os.path.realpath(path)
  raise SandboxError(advice(f"there is no {name} here"))


@functools.cache
def _prefixes() -> Sequence[str]:
  """Returns the directories of Python and its packages outside of /usr."""
  binary = os.path.dirname(os.path.dirname(os.path.realpath(sys.executable)))
  found = dict.fromkeys((sys.base_prefix, binary, sys.prefix))
  return [path for path in found if not f"{path}/".startswith("/usr/")]


@functools.cache
def _links() -> Sequence[str]:
  """Returns the binds of the directories of programs and libraries."""
  binds = []
  for path in ("/bin", "/lib", "/lib64"):
    if os.path.islink(path):
      binds += ["--symlink", os.readlink(path), path]
    elif os.path.isdir(path):
      binds += ["--ro-bind", path, path]
  return binds


@functools.cache
def _filter() -> bytes:
  """Returns the seccomp program that refuses the calls of `_DENIED`.

  Raises:
    SandboxError: the numbers of this machine's calls are not known here.
  """
  if (machine := platform.machine()) not in _MACHINES:
    raise SandboxError(f"the sandbox runs on {[*_MACHINES]}, not on {machine}")
  column, arch = _MACHINES[machine]
  numbers = [of[column] for of in _DENIED.values()]
  load, equal, at_least, end = 0x20, 0x15, 0x35, 0x06
  # Bit 30 marks the second table of calls of x86_64.
  tests = [(at_least, 1 << 30), *((equal, number) for number in numbers)]
  program = [(load, 0, 0, 4), (equal, 0, len(tests) + 2, arch), (load, 0, 0, 0)]
  for left, (operation, value) in enumerate(reversed(tests)):
    program.insert(3, (operation, left + 1, 0, value))
  allow, refuse = 0x7FFF0000, 0x00050000 | errno.EPERM
  program += [(end, 0, 0, allow), (end, 0, 0, refuse)]
  return b"".join(struct.pack("=HBBI", *step) for step in program)


def advice(reason: str) -> str:
  """Returns an error text: the reason, and the way to a sandbox."""
  return (
    f"code of a model runs in a sandbox of bubblewrap 0.8 or above: {reason}\n"
    "Install it with `apt-get install bubblewrap`. Where it is installed, this "
    "machine does not permit it user namespaces: see kernel.apparmor_restrict_"
    "unprivileged_userns and user.max_user_namespaces of sysctl, and for a "
    "container its seccomp profile. Code is never run without a sandbox."
  )
