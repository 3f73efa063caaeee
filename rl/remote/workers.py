"""Processes that connect to this one: those that it starts, and guests.

  start --> child: python -m launch.worker, told where and by which token
              |
              +--> _connected: token, version of the code --> Connection
  others --> guest: python -m launch.worker --join=RUN
              |
              +--> _connected: the same --> on_guest, Guest.start --> Connection

A backend starts the children, on this host or on others. A child's standard
input closes when this process ends, in whatever way, and it ends with that, so
nothing is left. A guest ends with its connection.
"""

import asyncio
import dataclasses
import functools
import hashlib
import hmac
import http
import json
import os
import pathlib
import re
import secrets
import tempfile
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import websockets
from websockets.asyncio import client as websockets_client
from websockets.asyncio import server as websockets_server

from rl.backends import contract as backends
from rl.backends import host, local
from rl.remote import connection, weight_stream, wire
from rl.runtime import watchdog as watchdog_lib

MAX_MESSAGE = 64 << 20
"""Bytes of a message; a conversation of 100k ids takes one."""
HEARTBEAT_S = 5.0
SILENCE_S = 30.0
"""Time without an answer to a heartbeat after which a process counts as lost.
Programs are compiled in threads that hold Python's lock for seconds."""
_HELLO_S = 10.0
_ANSWER_S = 600.0  # The run may stand still; if it ends, so does its worker.
_CLOSE_S = 5.0
_LEAVE_S = 30.0
"""Time in which a worker that is let go ends by itself."""
_MAX_REASON = 120  # Bytes; a WebSocket allows 123.
_LOOK_S = 0.2
_LOG_LINES = 50
_COUNT = re.compile(r"--xla_force_host_platform_device_count=\S*")
_ROOT = pathlib.Path(__file__).resolve().parents[2]
_HERE = local.Local()


class NotStarted(RuntimeError):
  """A worker ended, or did not connect in time."""


@functools.cache
def code_version() -> str:
  """Returns a digest of the source, which both ends must share."""
  digest = hashlib.sha256()
  for top in ("models", "rl", "launch"):
    for file in sorted((_ROOT / top).rglob("*.py")):
      digest.update(file.read_bytes())
  return digest.hexdigest()[:16]


def environment() -> dict[str, str]:
  """Returns the variables that let a worker count its own devices."""
  return {"XLA_FLAGS": _COUNT.sub("", os.environ.get("XLA_FLAGS", ""))}


class Refused(ValueError):
  """A run that cannot be joined."""


def _check_code(name: str, code: str) -> None:
  """Raises ValueError unless a process runs this version of the code."""
  if code != code_version():
    raise ValueError(
      f"{name} runs version {code} of the code, not {code_version()}; use the "
      "same checkout"
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Worker:
  """A process that a backend has started for this one.

  Attributes:
    name: in errors, and of its log.
    log_bytes: length of the log when it started.
  """

  name: str
  process: backends.Started
  log: pathlib.Path
  log_bytes: int = 0

  @property
  def pid(self) -> int:
    """Number of the process, if it is one of this host."""
    assert isinstance(self.process, local.LocalProcess)
    assert self.process.pid is not None
    return self.process.pid

  @property
  def ended(self) -> bool:
    """True once the process has ended."""
    return self.process.code() is not None

  def last_words(self) -> str:
    """Returns how it ended, with the last lines of its log."""
    code = backends.wait(self.process, 0.5)
    state = "still runs" if code is None else f"ended with code {code}"
    if self.process.reason:
      state = f"has no process: {self.process.reason}"
    try:
      text = self.log.read_bytes()[self.log_bytes :].decode(errors="replace")
      lines = text.splitlines()[-_LOG_LINES:]
      found = "\n".join(["ends:", *lines]) if lines else "is empty"
    except FileNotFoundError:
      found = "is gone"
    where = self.process.place and f" on {self.process.place}"
    return f"{self.name}{where} {state}; its log, {self.log}, {found}"

  async def end(self, gently: bool) -> None:
    """Ends it, after a while if it may end by itself until then."""
    if gently:
      await asyncio.to_thread(backends.wait, self.process, _LEAVE_S)
    await asyncio.to_thread(self.kill)

  def kill(self) -> None:
    """Ends it at once."""
    self.process.kill()
    backends.wait(self.process, _CLOSE_S)


@dataclasses.dataclass(eq=False)
class Guest:
  """A process that others have started, and that asks for work.

  Attributes:
    name: of the process and its host.
    pid: number of the process.
  """

  socket: websockets_server.ServerConnection
  name: str
  pid: int
  watchdog: watchdog_lib.Watchdog
  _running: asyncio.Task[None] | None = None

  async def start(
    self, name: str, task: str, *, hears: Mapping[str, Any]
  ) -> connection.Connection:
    """Tells it its name and what to be; see `Workers.start`.

    Raises:
      NotStarted: it is gone.
    """
    try:
      await self.socket.send(wire.pack([name, task]))
    except websockets.ConnectionClosed as error:
      raise NotStarted(f"{self.last_words()}: {error}") from error
    stream = connection.Connection(
      self.socket, name=name, hears=hears, watchdog=self.watchdog
    )
    self._running = asyncio.create_task(self._run(stream), name=name)
    return stream

  async def _run(self, stream: connection.Connection) -> None:
    await stream.run()
    await self.socket.close()

  def last_words(self) -> str:
    """Returns how it ended."""
    return f"{self.name}, which had joined, has ended or was cut off"

  async def refuse(self, reason: str) -> None:
    """Ends its connection as a failure."""
    await self.socket.close(1011, reason)

  async def end(self, gently: bool) -> None:
    """Ends its connection, and it with that."""
    del gently
    await self.socket.close()


class _Expected(NamedTuple):
  """A worker that was started and has not connected yet."""

  task: str
  hears: Mapping[str, Any]
  admitted: asyncio.Future[connection.Connection]


class Workers:
  """The other processes of a run; all methods belong to one event loop.

  Args:
    log_dir: where each worker's output is appended; None keeps it until
      `close`.
    watchdog: lists the calls that wait for workers.
    backend: starts them, and is closed with them.
    writable: they write to `weights` too.

  Raises:
    Unreachable: the backend cannot be reached, or names another host as this.

  Attributes:
    host: the address of this host for them.
    token: that a process must know to connect.
    weights: sends tensors of this process to them; None where they share its
      memory.
    on_guest: given a guest and the pool that it asks for; refuses by a
      ValueError. None refuses all.
  """

  def __init__(
    self,
    log_dir: pathlib.Path | None,
    watchdog: watchdog_lib.Watchdog = watchdog_lib.UNHEARD,
    backend: backends.Backend = _HERE,
    *,
    writable: bool = False,
  ):
    self._kept = None
    if log_dir is None:
      self._kept = tempfile.TemporaryDirectory()
      log_dir = pathlib.Path(self._kept.name)
    self._log_dir = log_dir
    self._watchdog = watchdog
    try:
      self._launcher = backend.open(log_dir / "backend")
      self.host = self._launcher.host
    except ValueError as error:
      raise backends.Unreachable(str(error)) from error
    try:
      host.free_address(self.host)
    except (OSError, UnicodeError) as error:
      raise backends.Unreachable(
        f"placement.backend.host={self.host} is no address at which this host "
        f"can listen: {error}"
      ) from error
    self.weights = None
    if not backend.shares_memory:
      self.weights = weight_stream.WeightStream(self.host, writable)
    self._place_s = backend.place_s
    self.token = secrets.token_hex(32)
    self.on_guest: Callable[[str, Guest], None] | None = None
    self._server: websockets_server.Server | None = None
    self._expected: dict[str, _Expected] = {}
    self._children: list[Worker] = []

  async def start(
    self,
    name: str,
    task: str,
    *,
    environment: Mapping[str, str],
    hears: Mapping[str, Any],
    deadline_s: float,
    python: str | None = None,
  ) -> tuple[Worker, connection.Connection]:
    """Starts a process and returns it with its connection.

    Args:
      task: JSON that tells it what to be.
      python: the program that runs it; None is the one of this process.
      environment: variables that are different there.
      hears: see `connection.Connection`.

    Raises:
      NotStarted: it ended, or did not connect by the deadline, which counts
        from when it has a place at the latest.
    """
    address = await self.listen()
    admitted = asyncio.get_running_loop().create_future()
    self._expected[name] = _Expected(task, hears, admitted)
    worker = self._spawn(name, address, environment, python)
    deadline_s += self._place_s
    taken = False
    try:
      async with asyncio.timeout(deadline_s):
        while not admitted.done() and not worker.ended:
          await asyncio.wait([admitted], timeout=_LOOK_S)
      if admitted.done():
        taken = True
        return worker, admitted.result()
      why = ""
    except TimeoutError:
      why = f"{name} has not connected in {deadline_s:g} s; "
    finally:
      del self._expected[name]
      if not taken:  # It may have connected when this was cancelled.
        worker.kill()
    words = await asyncio.to_thread(worker.last_words)
    raise NotStarted(why + words)

  def _spawn(
    self,
    name: str,
    address: str,
    environment: Mapping[str, str],
    python: str | None,
  ) -> Worker:
    log = self._log_dir / f"{name.replace(' ', '_')}.log"
    told = {"address": address, "token": self.token, "name": name}
    program = backends.Program(
      name=name,
      module="launch.worker",
      log=log,
      told=json.dumps(told),
      environment=environment,
      python=python,
    )
    log_bytes = log.stat().st_size if log.exists() else 0
    worker = Worker(name, self._launcher.start(program), log, log_bytes)
    self._children.append(worker)
    return worker

  async def listen(self) -> str:
    """Returns the address at which it listens."""
    if self._server is None:
      self._server = await websockets_server.serve(
        self._connected,
        self.host,
        0,
        process_request=self._refusal,
        compression=None,
        max_size=MAX_MESSAGE,
        ping_interval=HEARTBEAT_S,
        ping_timeout=SILENCE_S,
      )
    port = next(iter(self._server.sockets)).getsockname()[1]
    return f"ws://{host.joined(self.host, port)}"

  def _refusal(
    self, socket: websockets_server.ServerConnection, request: Any
  ) -> Any:
    """Refuses a client that does not know the token."""
    given = request.headers.get("Authorization", "")
    if hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode()):
      return None
    return socket.respond(http.HTTPStatus.UNAUTHORIZED, "unknown token\n")

  async def _connected(
    self, socket: websockets_server.ServerConnection
  ) -> None:
    """Serves one connection, from its first message to its end."""
    try:
      async with asyncio.timeout(_HELLO_S):
        hello = await socket.recv()
      data = wire.unpack(hello if isinstance(hello, bytes) else b"")
      match data:
        case {"name": str(name), "code": str(code)} if name in self._expected:
          _check_code(name, code)
          await self._serve_child(socket, self._expected[name], name)
        case {"join": str(pool), "code": str(code), "pid": int(pid)}:
          guest = f"process {pid} on {socket.remote_address[0]}"
          _check_code(guest, code)
          if self.on_guest is None:
            raise ValueError("this run takes no engines now")
          self.on_guest(pool, Guest(socket, guest, pid, self._watchdog))
          await socket.wait_closed()
        case _:
          raise wire.Malformed("no worker of this name is expected")
    except (ValueError, TimeoutError) as error:
      reason = str(error).encode()[:_MAX_REASON].decode(errors="ignore")
      await socket.close(1008, reason)

  async def _serve_child(
    self,
    socket: websockets_server.ServerConnection,
    expected: _Expected,
    name: str,
  ) -> None:
    await socket.send(wire.pack(expected.task))
    stream = connection.Connection(
      socket, name=name, hears=expected.hears, watchdog=self._watchdog
    )
    if expected.admitted.done():  # Nobody waits for it any more.
      return
    expected.admitted.set_result(stream)
    await stream.run()

  async def close(self) -> None:
    """Ends all workers and listens no more; may be called again."""
    for worker in self._children:
      await asyncio.to_thread(worker.kill)
    self._children.clear()
    await asyncio.to_thread(self._launcher.close)
    if self._server is not None:
      self._server.close()
      await self._server.wait_closed()
      self._server = None
    if self.weights is not None:
      weights, self.weights = self.weights, None
      await asyncio.to_thread(weights.close)
    if self._kept is not None:
      self._kept.cleanup()


async def connect(
  address: str, token: str, name: str
) -> tuple[websockets_client.ClientConnection, Any]:
  """Returns a worker's connection to its coordinator, and its task.

  Raises:
    NotStarted: nothing answers, or it refuses.
  """
  try:
    return await _ask(address, token, {"name": name}, _ANSWER_S)
  except (OSError, websockets.WebSocketException) as error:
    raise NotStarted(
      f"{name} cannot join the run at {address}: {_reason(error) or error}"
    ) from error


async def join(
  address: str, token: str, pool: str
) -> tuple[websockets_client.ClientConnection, str, str]:
  """Returns a guest's connection, name and task, once the run gives it one.

  Args:
    pool: of engines that it is to join.

  Raises:
    Refused: nothing answers, or it refuses.
  """
  hello = {"join": pool, "pid": os.getpid()}
  try:
    socket, (name, task) = await _ask(address, token, hello, None)
    return socket, name, task
  except ConnectionRefusedError as error:
    raise Refused(f"nothing answers at {address}: the run has ended") from error
  except OSError as error:
    raise Refused(f"the run at {address} cannot be reached: {error}") from error
  except websockets.ConnectionClosed as error:
    why = _reason(error) or "it has ended"
    raise Refused(f"the run refuses: {why}") from error
  except websockets.WebSocketException as error:
    if (
      isinstance(error, websockets.InvalidStatus)
      and error.response.status_code == http.HTTPStatus.UNAUTHORIZED
    ):
      raise Refused(
        f"the run at {address} has another token: it was started again since, "
        "or it is another run"
      ) from error
    raise Refused(f"no run answers at {address}: {error}") from error


def _reason(error: Exception) -> str:
  """Returns the reason with which the other side has closed a connection."""
  if isinstance(error, websockets.ConnectionClosed) and error.rcvd is not None:
    return error.rcvd.reason
  return ""


async def _ask(
  address: str, token: str, hello: Mapping[str, Any], wait_s: float | None
) -> tuple[websockets_client.ClientConnection, Any]:
  socket = await websockets_client.connect(
    address,
    open_timeout=wait_s or _HELLO_S,
    additional_headers={"Authorization": f"Bearer {token}"},
    compression=None,
    max_size=MAX_MESSAGE,
    ping_interval=HEARTBEAT_S,
    ping_timeout=SILENCE_S,
    proxy=None,
  )
  await socket.send(wire.pack({**hello, "code": code_version()}))
  async with asyncio.timeout(wait_s):
    return socket, wire.unpack(await socket.recv(decode=False))
