"""Runs Python code that a model wrote, in a sandbox of bubblewrap.

  run(code) -> bwrap -> prlimit -> python main.py
                 |
                 process 1 of the sandbox: when it dies, all in there die

The code sees an empty network, /usr and Python's own files read-only, and one
directory in memory that it may write to. It has no /proc, no capability and no
user but itself. bwrap alone reports how it ended, through a pipe that the code
does not have, so the code cannot pass for a sandbox that failed.

A limit that the kernel holds for one process (memory, CPU time) counts for each
of them; the whole is bound by `processes`, the number of processors and the
wall time.
"""

import asyncio
import contextlib
import dataclasses
import errno
import functools
import json
import os
import platform
import shutil
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

Status = Literal["ok", "error", "timeout", "memory", "output"]

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


@dataclasses.dataclass(frozen=True, slots=True)
class Execution:
  """The end of a program in a sandbox.

  Attributes:
    stdout, stderr: what it wrote, cut at the limit; no valid UTF-8 is replaced.
    status: `ok` where it ended with 0; `timeout` of CPU or wall time; `memory`
      where Python ran out of it; `output` where it wrote too much and was
      killed; else `error`.
    code: exit code, 128 + n for signal n; None where it was killed from here.
    seconds: wall time, start of the sandbox included.
  """

  stdout: str
  stderr: str
  status: Status
  code: int | None
  seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sandbox:
  """Limits of programs; each run has a sandbox of its own.

  Attributes:
    wall_s: until everything in the sandbox is killed.
    cpu_s: of each process.
    memory_mib: address space of each process; Python itself takes some 30.
    disk_mib: size of the directory in memory, and of one file in it.
    processes: processes and threads that exist at once.
    open_files: of each process.
    output_kib: of stdout and of stderr.
  """

  wall_s: float = 10.0
  cpu_s: int = 10
  memory_mib: int = 512
  disk_mib: int = 32
  processes: int = 8
  open_files: int = 64
  output_kib: int = 64

  def __post_init__(self):
    """Checks the limits.

    Raises:
      ValueError: one is too low to start Python with, or is none.
    """
    lowest = {
      "wall_s": 0.1,
      "cpu_s": 1,
      "memory_mib": 64,
      "disk_mib": 1,
      "processes": 1,
      "open_files": 8,
      "output_kib": 1,
    }
    for name, bound in lowest.items():
      value = getattr(self, name)
      if not bound <= value <= 2**31:  # Also false for nan and infinity.
        raise ValueError(f"sandbox {name}={value}: use {bound} to {2**31}")

  async def run(self, code: str, stdin: str = "") -> Execution:
    """Runs a program to its end and leaves nothing of it behind.

    A caller that is cancelled kills it.

    Raises:
      SandboxError: bubblewrap is missing, or may not make a sandbox.
    """
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
      report = stack.enter_context(_Report())
      with contextlib.ExitStack() as fds:
        fds.callback(os.close, report.of_bwrap)
        main = fds.enter_context(_memory_file(_encode(code)))
        seccomp = fds.enter_context(_memory_file(_filter()))
        starting = asyncio.ensure_future(
          asyncio.create_subprocess_exec(
            *_command(self, main, seccomp, report.of_bwrap),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            pass_fds=(main, seccomp, report.of_bwrap),
            env={},
            cwd="/",
            start_new_session=True,
          )
        )
        is_cancelled = False
        try:
          # If this were cancelled, asyncio would kill bwrap without its child.
          process = await asyncio.shield(starting)
        except asyncio.CancelledError:
          process = await starting
          is_cancelled = True
      kill = functools.partial(_kill, process, report)
      assert process.stdin
      assert process.stdout
      assert process.stderr
      streams = (process.stdout, process.stderr)
      texts = (bytearray(), bytearray())
      limit = self.output_kib * 1024
      end = asyncio.gather(
        _feed(process.stdin, _encode(stdin)),
        *(
          _collect(*of, limit, kill) for of in zip(streams, texts, strict=True)
        ),
        process.wait(),
      )
      is_late = False
      try:
        if is_cancelled:
          raise asyncio.CancelledError
        await asyncio.wait_for(asyncio.shield(end), self.wall_s)
      except TimeoutError:
        is_late = True
      finally:  # On every path, so that nothing is left when this returns.
        kill()
        await end
        said = report.read()
        await _death(said.get("child-pid"))
      code_ = said.get("exit-code")
    seconds = time.monotonic() - start
    stdout, stderr = (bytes(t[:limit]).decode(errors="replace") for t in texts)
    if is_late or any(len(text) > limit for text in texts):
      status = "timeout" if is_late else "output"
      return Execution(stdout, stderr, status, None, seconds)
    if code_ is None:
      raise SandboxError(_advice(stderr))
    return Execution(stdout, stderr, _status(code_, stderr), code_, seconds)


class _Report:
  """The pipe through which bwrap says how the sandbox is."""

  def __init__(self):
    self._fd, self.of_bwrap = os.pipe()
    os.set_blocking(self._fd, False)
    self._said: dict[str, int] = {}

  def __enter__(self) -> "_Report":
    return self

  def __exit__(self, *_) -> None:
    os.close(self._fd)

  def read(self) -> dict[str, int]:
    """Returns `child-pid` and, once the program has ended, `exit-code`."""
    with contextlib.suppress(BlockingIOError):
      for line in os.read(self._fd, 65536).splitlines():
        self._said |= json.loads(line)
    return self._said


def _kill(process: asyncio.subprocess.Process, report: _Report) -> None:
  """Kills all that is in the sandbox, if it has not ended."""
  if process.returncode is not None:
    return
  with contextlib.suppress(ProcessLookupError):
    # When process 1 dies, so does all in there, and then bwrap ends by itself.
    # Before there is one, all are in the group of bwrap.
    if pid := report.read().get("child-pid"):
      os.kill(pid, signal.SIGKILL)
    else:
      os.killpg(process.pid, signal.SIGKILL)


async def _death(pid: int | None) -> None:
  """Waits until process 1, and so all of the sandbox, is dead.

  bwrap ends when process 1 says that the program has, a moment before that.
  """
  try:
    fd = os.pidfd_open(pid or 0)
  except OSError:  # It is gone, or never was.
    return
  try:
    dead = asyncio.Event()
    asyncio.get_running_loop().add_reader(fd, dead.set)
    await dead.wait()
  finally:
    asyncio.get_running_loop().remove_reader(fd)
    os.close(fd)


async def _feed(stream: asyncio.StreamWriter, data: bytes) -> None:
  with contextlib.suppress(ConnectionError):  # It need not read all of it.
    try:
      stream.write(data)
      await stream.drain()
    finally:
      stream.close()
      await stream.wait_closed()


async def _collect(
  stream: asyncio.StreamReader,
  text: bytearray,
  limit: int,
  kill: Callable[[], None],
) -> None:
  """Adds what comes to `text`; kills the program above the limit."""
  while chunk := await stream.read(65536):
    text += chunk[: limit + 1 - len(text)]
    if len(text) > limit:
      kill()


def _status(code: int, stderr: str) -> Status:
  if code == 0:
    return "ok"
  if code == 128 + signal.SIGXCPU:
    return "timeout"
  last = stderr.rstrip().rpartition("\n")[2]
  return "memory" if last.startswith("MemoryError") else "error"


def _encode(text: str) -> bytes:
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
  limits: Sandbox, main: int, seccomp: int, report: int
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
    --size {limits.disk_mib << 20} --tmpfs {_HOME} --chdir {_HOME}
    --symlink {_HOME} dev/shm
    --ro-bind-data {main} /main.py
    --seccomp {seccomp} --json-status-fd {report}
  """
  resources = f"""
    --cpu={limits.cpu_s}:{limits.cpu_s + 1} --as={limits.memory_mib << 20}
    --fsize={limits.disk_mib << 20} --nofile={limits.open_files}
    --nproc={limits.processes} --core=0
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
  command += ["--remount-ro", "/", prlimit, *resources.split()]
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
  raise SandboxError(_advice(f"there is no {name} here"))


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


def _advice(reason: str) -> str:
  return (
    f"code of a model runs in a sandbox of bubblewrap 0.8 or above: {reason}\n"
    "Install it with `apt-get install bubblewrap`. Where it is installed, this "
    "machine does not permit it user namespaces: see kernel.apparmor_restrict_"
    "unprivileged_userns and user.max_user_namespaces of sysctl, and for a "
    "container its seccomp profile. Code is never run without a sandbox."
  )
