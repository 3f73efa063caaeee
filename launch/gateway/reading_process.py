"""A process of its own for what is long: its work holds up no other request.

  thread of the gateway --name, arguments--> BodyReader, in the process
                        <---value or error--

Parsing, matching and counting millions of characters are single calls of C,
during which no other thread of a Python process goes on. The process starts
with the first of them, and ends with the server.
"""

import contextlib
import json
import os
import pickle
import subprocess
import sys
import weakref
from typing import Any

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
_ENV = {
  "JAX_PLATFORMS": "cpu",  # The accelerator is the engine's.
  "RAYON_NUM_THREADS": "1",
  "TOKENIZERS_PARALLELISM": "false",
}


class ReadingProcess:
  """A `BodyReader` in a process; one thread at a time may call it."""

  def __init__(self, reader: body_reader.BodyReader):
    self._reader = reader
    self._process: subprocess.Popen[bytes] | None = None
    self._end = weakref.finalize(self, lambda: None)

  def takes_chat(self) -> bool:
    """Returns whether the chat of the reader can be sent to a process."""
    try:
      worker_process.PickledSetting.of(self._reader, "the chat")
    except ValueError:
      return False
    return True

  def call(self, name: str, *arguments: Any) -> Any:
    """Returns what a method of the reader returns, or raises its error.

    Raises:
      BadRequest: also if the process died of it; the next call starts another.
    """
    process = self._process or self._started()
    assert process.stdin
    assert process.stdout
    try:
      pickle.dump((name, arguments), process.stdin, pickle.HIGHEST_PROTOCOL)
      process.stdin.flush()
      value, error = pickle.load(process.stdout)
    except (OSError, EOFError, pickle.UnpicklingError) as cause:
      self._process = None
      self._end()
      raise json_fields.BadRequest(
        f"the process that read this ended with {process.returncode}, as over "
        f"{_MAX_RSS_MIB} MiB would end it; send less",
        status=413,
      ) from cause
    if error is not None:
      raise error
    return value

  def _started(self) -> subprocess.Popen[bytes]:
    setting = worker_process.PickledSetting.of(self._reader, "the chat")
    program = [sys.executable, "-P", "-c", _PROGRAM, json.dumps(sys.path)]
    process = subprocess.Popen(
      process_guard.command(
        program, max_rss_mib=_MAX_RSS_MIB, max_processes=_MAX_PROCESSES
      ),
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      env=os.environ | _ENV,
      start_new_session=True,  # Ctrl-C is for the server, which ends this.
    )
    self._process = process
    self._end = weakref.finalize(self, _end, process)
    assert process.stdin
    with contextlib.suppress(BrokenPipeError):  # The call tells of it.
      pickle.dump(setting, process.stdin)
      process.stdin.flush()
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
  """Ends the process, and its guard."""
  assert process.stdin
  assert process.stdout
  with contextlib.suppress(OSError):
    process.stdin.close()
  process.stdout.close()
  process.wait()


def main() -> None:
  """Answers calls until stdin ends; the program of the process."""
  calls, values = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
  os.dup2(2, 1)  # A library may print.
  reader = pickle.load(calls).load()
  with contextlib.suppress(EOFError, BrokenPipeError):
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
