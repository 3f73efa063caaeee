"""A Python process in a sandbox that keeps its variables between calls."""

import asyncio
import contextlib
import functools
import json
import pathlib
import secrets
import time
from typing import get_args

from envs.sandbox import bubblewrap, sandbox, session_program

# Of the line that ends the output of a call; a traceback is 8,000 characters.
_MAX_LINE_BYTES = 1 << 17


class PythonSession:
  """Pieces of code in one sandbox, one call at a time; `close` is due.

  Wall time and output are limited for each call. CPU time, memory, files and
  processes are those of the process, so of all its calls together. A call that
  takes more of a limit than it has, or that ends the process, ends the session:
  then `is_over`, and what it had is gone.
  """

  def __init__(self, limits: sandbox.Sandbox):
    """Starts nothing yet."""
    self.is_over = False
    self._limits = limits
    self._process: bubblewrap.Process | None = None
    self._errors = bytearray()
    self._reading: asyncio.Task[None] | None = None

  async def call(self, code: str) -> sandbox.Execution:
    """Runs a piece of code.

    Returns:
      What it printed, on whatever stream, and the value of its last expression,
      as `stdout`; the traceback as `stderr`. `code` is that of the process.

    Raises:
      SandboxError: bubblewrap is missing, or the session is over.
    """
    if self.is_over:
      raise bubblewrap.SandboxError("the session is over; begin another one")
    begun, text, is_answered = time.monotonic(), bytearray(), False
    status, error, exit_code = "error", "", None
    try:
      async with asyncio.timeout(self._limits.wall_s):
        status, error = await self._ask(code, text)
      is_answered = True
    except TimeoutError:
      status = "timeout"
    except _TooMuchError:
      status = "output"
    except (EOFError, ConnectionError):  # The process has ended.
      exit_code = await self.close()
      said = self._errors.decode(errors="replace")
      status, exit_code = sandbox.ended(exit_code, said)
    finally:
      if not is_answered:
        await self.close()
    stdout = bytes(text[: self._limit]).decode(errors="replace")
    seconds = time.monotonic() - begun
    return sandbox.Execution(stdout, error, status, exit_code, seconds)

  async def close(self) -> int | None:
    """Ends the process, waits until it is dead, and returns its exit code."""
    self.is_over = True
    process, self._process = self._process, None
    if process is None:
      return None
    assert self._reading
    self._reading.cancel()
    await asyncio.wait([self._reading])
    return await process.end()

  @property
  def _limit(self) -> int:
    return self._limits.output_kib * 1024

  async def _ask(
    self, code: str, text: bytearray
  ) -> tuple[sandbox.Status, str]:
    """Runs a piece; adds what it prints to `text`, returns how it ended."""
    process = self._process or await self._start()
    word = secrets.token_hex(16)
    mark, at = f"\0{word}".encode(), -1
    process.stdin.write(json.dumps([word, code]).encode() + b"\n")
    while at < 0 or b"\n" not in text[at:]:
      # The last line, too: its author is the code, in the worst case.
      if len(text) > self._limit + _MAX_LINE_BYTES or at > self._limit:
        raise _TooMuchError
      chunk = await process.stdout.read(65536)
      if not chunk:
        raise EOFError
      searched = max(0, len(text) - len(mark))
      text += chunk
      at = at if at >= 0 else text.find(mark, searched)
    line = bytes(text[at + len(mark) :]).partition(b"\n")[0]
    del text[at:]
    if len(text) > self._limit:
      raise _TooMuchError
    with contextlib.suppress(ValueError, TypeError):
      status, error = json.loads(line)
      if status in get_args(sandbox.Status):
        return status, str(error)
    return "error", "the code has written a line that was not its own"

  async def _start(self) -> bubblewrap.Process:
    process = await self._limits.start(_program())
    self._process = process
    self._reading = asyncio.create_task(
      sandbox.collect(process.stderr, self._errors, self._limit, process.kill)
    )
    return process


class _TooMuchError(Exception):
  """The code has printed more than it may."""


@functools.cache
def _program() -> str:
  return pathlib.Path(session_program.__file__).read_text()
