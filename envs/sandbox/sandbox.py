"""Runs Python code that a model wrote, in a sandbox of bubblewrap.

A limit that the kernel holds for one process (memory, CPU time) counts for each
of them; the whole is bound by `processes`, the number of processors and the
wall time.
"""

import asyncio
import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable
from typing import Literal

from envs.sandbox import bubblewrap

Status = Literal["ok", "error", "timeout", "memory", "output"]
_DEATH_S = 30.0  # Of pipes whose processes are killed.


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

  async def start(self, code: str) -> bubblewrap.Process:
    """Starts a program, of which the caller limits time and output.

    Raises:
      SandboxError: bubblewrap is missing.
    """
    return await bubblewrap.Process.start(
      code,
      self.disk_mib,
      {
        "cpu": f"{self.cpu_s}:{self.cpu_s + 1}",
        "as": self.memory_mib << 20,
        "fsize": self.disk_mib << 20,
        "nofile": self.open_files,
        "nproc": self.processes,
        "core": 0,
      },
    )

  async def run(self, code: str, stdin: str = "") -> Execution:
    """Runs a program to its end and leaves nothing of it behind.

    A caller that is cancelled kills it.

    Raises:
      SandboxError: bubblewrap is missing, or may not make a sandbox.
    """
    begun = time.monotonic()
    process = await self.start(code)
    limit = self.output_kib * 1024
    streams = (process.stdout, process.stderr)
    texts = (bytearray(), bytearray())
    work = asyncio.gather(
      _feed(process.stdin, bubblewrap.encode(stdin)),
      *(
        collect(*of, limit, process.kill)
        for of in zip(streams, texts, strict=True)
      ),
      process.wait(),
    )
    is_late = False
    try:
      await asyncio.wait_for(asyncio.shield(work), self.wall_s)
    except TimeoutError:
      is_late = True
    finally:  # On every path, so that nothing is left when this returns.
      process.kill()
      await asyncio.wait([work], timeout=_DEATH_S)
      work.cancel()
      code_ = await process.end()
    seconds = time.monotonic() - begun
    stdout, stderr = (bytes(t[:limit]).decode(errors="replace") for t in texts)
    if is_late or any(len(text) > limit for text in texts):
      status = "timeout" if is_late else "output"
      return Execution(stdout, stderr, status, None, seconds)
    return Execution(stdout, stderr, *ended(code_, stderr), seconds)


def ended(code: int | None, stderr: str) -> tuple[Status, int]:
  """Returns status and exit code of a program that nobody here has killed.

  Raises:
    SandboxError: it has never run.
  """
  if code is None:
    raise bubblewrap.SandboxError(bubblewrap.advice(stderr))
  return _status(code, stderr), code


async def _feed(stream: asyncio.StreamWriter, data: bytes) -> None:
  with contextlib.suppress(ConnectionError):  # It need not read all of it.
    try:
      stream.write(data)
      await stream.drain()
    finally:
      stream.close()
      await stream.wait_closed()


async def collect(
  stream: asyncio.StreamReader,
  text: bytearray,
  limit: int,
  kill: Callable[[], None],
) -> None:
  """Adds all that comes to `text`; calls `kill` above the limit, in bytes."""
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
