"""Answers `launch.status` from a thread, also while the event loop is blocked.

  launch.status RUN --> RUN/.status: port and key --> _serve --> JSON

It listens on this host only, and answers whoever can read that file: the user
who launched the run.
"""

import asyncio
import contextlib
import errno
import hmac
import json
import os
import pathlib
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from models import untrusted_files
from rl.runtime import watchdog as watchdog_lib

FILE = ".status"
_HOST = "127.0.0.1"
_KEY_BYTES = 32
_BEAT_S = 1.0
"""Time in which the event loop must answer, or its stack is told."""
_CLIENT_S = 2.0
_ANSWER_S = 10.0


@contextlib.contextmanager
def serving(
  run_dir: pathlib.Path,
  watchdog: watchdog_lib.Watchdog,
  doing: Callable[[], str],
  engines: Callable[[], Sequence[str]],
) -> Iterator[None]:
  """Answers in the body of a `with`, which is on the event loop.

  Args:
    watchdog: its waits are told.
    doing, engines: return the phase of the run, and a line for each engine;
      called in another thread.
  """
  loop, loop_thread = asyncio.get_running_loop(), threading.get_ident()
  key, file = secrets.token_bytes(_KEY_BYTES), run_dir / FILE

  def state() -> dict[str, Any]:
    return {
      "doing": doing(),
      "engines": engines(),
      "waits": watchdog.waits(),
      "stack": _stack_if_blocked(loop, loop_thread),
    }

  with socket.create_server((_HOST, 0)) as server:
    threading.Thread(
      target=_serve, args=(server, key, state), name="status", daemon=True
    ).start()
    where = {
      "host": socket.gethostname(),
      "pid": os.getpid(),
      "port": server.getsockname()[1],
      "key": key.hex(),
    }
    file.unlink(missing_ok=True)
    with open(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600), "w") as output:
      json.dump(where, output)
    try:
      yield
    finally:
      file.unlink(missing_ok=True)
      with contextlib.suppress(OSError):  # Wakes the thread, which then ends.
        server.shutdown(socket.SHUT_RDWR)


def _serve(
  server: socket.socket, key: bytes, state: Callable[[], dict[str, Any]]
) -> None:
  """Answers one client after another until the server is closed."""
  while True:
    try:
      client, _ = server.accept()
    except OSError:
      return
    # A client that is gone, or says nothing, must not keep the next one.
    with client, contextlib.suppress(OSError):
      client.settimeout(_CLIENT_S)
      if hmac.compare_digest(client.recv(_KEY_BYTES, socket.MSG_WAITALL), key):
        client.sendall(json.dumps(state()).encode())


def _stack_if_blocked(loop: asyncio.AbstractEventLoop, thread: int) -> str:
  """Returns where the loop's thread is, if the loop does not answer."""
  beat = threading.Event()
  with contextlib.suppress(RuntimeError):  # The loop has just been closed.
    loop.call_soon_threadsafe(beat.set)
  return "" if beat.wait(_BEAT_S) else watchdog_lib.stack(thread)


def ask(run_dir: pathlib.Path) -> dict[str, Any]:
  """Returns the state of a run as its process tells it.

  That is `pid`; `doing`, its phase; `engines`, a line for each; `waits`, a list
  of (owner, what, seconds waited, deadline in seconds); `stack`, of the event
  loop if that is blocked, else "".

  Raises:
    OSError: no process of this host answers.
  """
  file = run_dir / FILE
  if not os.path.lexists(file):
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
  try:
    where = untrusted_files.read_object(file)
    if where["host"] != socket.gethostname():
      raise ConnectionError(f"it runs on {where['host']}: ask it there")
    address, key = (_HOST, int(where["port"])), bytes.fromhex(where["key"])
    pid = int(where["pid"])
  except (ValueError, KeyError, TypeError) as error:
    raise ConnectionError(f"{FILE} is damaged: {error}") from error
  with socket.create_connection(address, timeout=_ANSWER_S) as stream:
    stream.sendall(key)
    with stream.makefile("rb") as answer:
      data = answer.read()
  try:
    return {"pid": pid, **json.loads(data)}
  except ValueError as error:
    raise ConnectionError("another program has its port now") from error
