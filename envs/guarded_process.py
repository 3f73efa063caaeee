"""Processes under a guard, with pipes: how they start, and how they died."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence

from envs import process_guard

_TAIL_BYTES = 2000  # Of stderr, for the message of a death.
_PROGRAM = """
import importlib, json, sys
sys.path[:] = json.loads(sys.argv[1])
importlib.import_module("{}").main()
"""
_END_S = 15.0  # Longer than a guard takes to end what it guards.


async def drain(stream: asyncio.StreamReader) -> None:
  """Reads a stream to its end, so that its writer does not block."""
  while await stream.read(65536):
    pass


class GuardedProcess:
  """A process with all that it starts; `start` makes one, `end` is due then.

  Attributes:
    stdin, stdout: its pipes.
  """

  def __init__(self, process: asyncio.subprocess.Process):
    assert process.stdin
    assert process.stdout
    assert process.stderr
    self.stdin = process.stdin
    self.stdout = process.stdout
    self._stderr = process.stderr
    self._process = process
    self._tail = b""
    self._reading = asyncio.create_task(self._keep_tail())

  @classmethod
  async def start(
    cls,
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    max_rss_mib: int = 0,
    max_processes: int = 0,
    reads_stdin: bool = True,
    limit: int = 1 << 16,
  ) -> "GuardedProcess":
    """Starts a command; see `process_guard.command`.

    Args:
      limit: of a line that is read from stdout, in bytes.

    Raises:
      OSError: the machine has no room for a process.
    """
    return cls(
      await asyncio.create_subprocess_exec(
        *process_guard.command(
          command,
          max_rss_mib=max_rss_mib,
          max_processes=max_processes,
          reads_stdin=reads_stdin,
        ),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=env,
        limit=limit,
        start_new_session=True,  # Ctrl-C is for the run, which ends this.
      )
    )

  @classmethod
  async def start_module(
    cls, name: str, *, max_rss_mib: int, max_processes: int
  ) -> "GuardedProcess":
    """Starts `main` of a module, in a Python that imports what this one does.

    Raises:
      OSError: the machine has no room for a process.
    """
    program = _PROGRAM.format(name)
    return await cls.start(
      [sys.executable, "-P", "-c", program, json.dumps(sys.path)],
      # A config file that it imports must not take the accelerator.
      env=os.environ | {"JAX_PLATFORMS": "cpu"},
      max_rss_mib=max_rss_mib,
      max_processes=max_processes,
    )

  async def wait(self) -> int:
    """Returns the exit code, or -signal, once all that it started has ended.

    Its stdout must be read meanwhile.
    """
    return await self._process.wait()

  async def end(self) -> str:
    """Ends all that still runs; returns how the process ended.

    Nobody else may read its stdout by now. A process that ends by itself once
    its stdin is closed has a second for that.
    """
    # Unlike close, this does not wait until what was written has been read.
    if not self.stdin.is_closing():
      self.stdin.transport.abort()
    # An event loop that ends may have cancelled it before.
    self._reading.cancel()
    await asyncio.wait([self._reading])
    try:
      await self._death()
    except TimeoutError:
      self._process.kill()  # The guard; the kernel then kills the process.
      with contextlib.suppress(TimeoutError):
        await self._death()
    said = self._tail.decode(errors="replace").strip()
    return self._end() + (f": {said}" if said else "")

  def _end(self) -> str:
    code = self._process.returncode
    if code is None:
      return "outlives SIGKILL"
    if code < 0:
      return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"

  async def _death(self) -> None:
    async with asyncio.timeout(_END_S):
      # asyncio hears of it once all pipes are at their end.
      await asyncio.gather(
        drain(self.stdout), self._keep_tail(), self._process.wait()
      )

  async def _keep_tail(self) -> None:
    while chunk := await self._stderr.read(65536):
      self._tail = (self._tail + chunk)[-_TAIL_BYTES:]
