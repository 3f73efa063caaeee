"""A process of its own for what is long: its work holds up no other request.

  thread of the gateway --name, arguments--> BodyReader, in the process
                        <---value or error--

Parsing, matching and counting millions of characters are single calls of C,
during which no other thread of a Python process goes on. The process starts
with the first of them, and ends with the server, or once a call is late; the
next one then starts another. Both talk over a socket: unlike a pipe it has
timeouts, and is shut down under a thread that waits for it.
"""

import contextlib
import dataclasses
import json
import os
import pickle
import socket
import subprocess
import sys
import weakref
from typing import IO, Any

from envs import process_guard, worker_process
from launch.gateway import body_reader
from launch.http import json_fields

_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from launch.gateway import reading_process
reading_process.main()
"""
_MAX_RSS_MIB = 4096
_MAX_PROCESSES = 8
_END_S = 5.0  # Longer than a guard takes to end what it guards.
_ENV = {
  "JAX_PLATFORMS": "cpu",  # The accelerator is the engine's.
  "RAYON_NUM_THREADS": "1",
  "TOKENIZERS_PARALLELISM": "false",
}


class ReadingProcess:
  """A `BodyReader` in a process; one thread at a time may call it."""

  def __init__(self, reader: body_reader.BodyReader):
    self._reader = reader
    self._running: _Running | None = None
    self._end = weakref.finalize(self, lambda: None)

  def takes_chat(self) -> bool:
    """Returns whether the chat of the reader can be sent to a process."""
    try:
      worker_process.PickledSetting.of(self._reader, "the chat")
    except ValueError:
      return False
    return True

  def call(
    self, name: str, *arguments: Any, within_s: float | None = None
  ) -> Any:
    """Returns what a method of the reader returns, or raises its error.

    Args:
      within_s: for sending, and then for the value to begin; None: any time.

    Raises:
      BadRequest: also if the process died of it; the next call starts another.
      TimeoutError: it took longer, and the process was ended.
    """
    if within_s is not None and within_s <= 0:
      raise TimeoutError("no time was left to read this")
    sent = pickle.dumps((name, arguments), pickle.HIGHEST_PROTOCOL)
    if self._running is None:
      # Without waiting until it is there: the call has the deadline.
      sent = self._start() + sent
    running = self._running
    assert running
    try:
      running.link.settimeout(within_s)
      running.link.sendall(sent)
      value, error = pickle.load(running.values)
    except (OSError, EOFError, pickle.UnpicklingError) as cause:
      self._running = None
      running.end()
      self._end.detach()  # Not before: this process may end meanwhile.
      if isinstance(cause, TimeoutError):
        raise TimeoutError(f"reading took over {within_s:g} s") from cause
      raise json_fields.BadRequest(
        "the process that read this ended with "
        f"{running.process.returncode}, as over {_MAX_RSS_MIB} MiB would end "
        "it; send less",
        status=413,
      ) from cause
    if error is not None:
      raise error
    return value

  def _start(self) -> bytes:
    """Starts the process; returns what it must be sent first."""
    setting = worker_process.PickledSetting.of(self._reader, "the chat")
    program = [sys.executable, "-P", "-c", _PROGRAM, json.dumps(sys.path)]
    link, its_link = socket.socketpair()
    with its_link:
      process = subprocess.Popen(
        process_guard.command(
          program, max_rss_mib=_MAX_RSS_MIB, max_processes=_MAX_PROCESSES
        ),
        stdin=its_link.fileno(),
        stdout=its_link.fileno(),
        env=os.environ | _ENV,
        start_new_session=True,  # Ctrl-C is for the server, which ends this.
      )
    self._running = _Running(process, link, link.makefile("rb"))
    self._end = weakref.finalize(self, self._running.end)
    return pickle.dumps(setting)


@dataclasses.dataclass(frozen=True, eq=False)
class _Running:
  """A process under its guard, and the way to it."""

  process: subprocess.Popen[bytes]
  link: socket.socket
  values: IO[bytes]

  def end(self) -> None:
    """Ends the process, its guard, and a call in another thread.

    Two threads may do so at once, of which one is at the end of the server.
    """
    with contextlib.suppress(OSError):
      self.link.shutdown(socket.SHUT_RDWR)
    try:
      self.process.wait(_END_S)
    except subprocess.TimeoutExpired:
      self.process.kill()  # The guard; the kernel then kills the process.
      with contextlib.suppress(subprocess.TimeoutExpired):
        self.process.wait(_END_S)
    self.values.close()
    self.link.close()


def main() -> None:
  """Answers calls until stdin ends; the program of the process."""
  calls, values = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
  os.dup2(2, 1)  # A library may print.
  reader = pickle.load(calls).load()
  with contextlib.suppress(EOFError, ConnectionError):
    while True:
      name, arguments = pickle.load(calls)
      pickle.dump(_answer(reader, name, arguments), values, 5)
      values.flush()


def _answer(
  reader: body_reader.BodyReader, name: str, arguments: tuple[Any, ...]
) -> tuple[Any, Exception | None]:
  try:
    return getattr(reader, name)(*arguments), None
  except json_fields.BadRequest as error:
    return None, error
  # Errors of a chat of your own may not survive the way.
  except ValueError as error:
    return None, ValueError(str(error))
  except Exception as error:
    return None, RuntimeError(repr(error))
