"""Serves an ASGI application on a port, and receives bodies within limits."""

import asyncio
import contextlib
import dataclasses
import functools
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn
from starlette import requests

from launch.http import connections, disconnect, json_fields, log_limit
from rl.settings import annotations

# A client that is still sending when the connection ends sees no reply.
_UNREAD_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True)
class Tls:
  """Files of a server's certificate, with its chain, and of its key; in PEM."""

  certificate: str
  key: str


class _Server(uvicorn.Server):
  """A server with a `ready` event; signals are left to the process."""

  def __init__(self, settings: uvicorn.Config):
    super().__init__(settings)
    self.ready = asyncio.Event()

  async def startup(self, sockets: list[socket.socket] | None = None) -> None:
    await super().startup(sockets)
    self.ready.set()

  @contextlib.contextmanager
  def capture_signals(self) -> Iterator[None]:
    yield


async def body(
  request: requests.Request, max_bytes: int, seconds: float
) -> bytes:
  """Returns the body of a request.

  Raises:
    BadRequest: it is too long, or takes too long.
    ClientGone: the client disconnected.
  """
  received, length = bytearray(), 0
  try:
    async with asyncio.timeout(seconds):
      async for chunk in request.stream():
        length += len(chunk)
        if length <= max_bytes:
          received += chunk
        elif length > max_bytes + _UNREAD_BYTES:
          break
  except TimeoutError:
    raise json_fields.BadRequest(
      f"the body took over {seconds:g} s", status=408
    ) from None
  except requests.ClientDisconnect:
    raise disconnect.ClientGone from None
  if length > max_bytes:
    raise json_fields.BadRequest(
      f"the body is over {max_bytes} bytes; send less", status=413
    )
  return bytes(received)


def bind(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
  """Returns a socket bound to a port and not yet listening; 0 is any free one.

  Raises:
    OSError: the port is taken or forbidden.
  """
  found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
  family, kind, protocol, _, address = found[0]
  bound = socket.socket(family, kind, protocol)
  try:
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(address)
  except OSError:
    bound.close()
    raise
  return bound


def bind_flags(host: str, port: int) -> socket.socket:
  """Binds to what --host and --port say; see `bind`.

  Raises:
    SettingError: they cannot be used.
  """
  try:
    return bind(host, port)
  except OSError as error:
    raise annotations.SettingError(
      f"--host={host} --port={port} cannot be used: {error.strerror}; use "
      "--port=0 for any free port"
    ) from error


def read_tls(certificate: str | None, key: str | None) -> Tls | None:
  """Returns the files of --tls_certificate and --tls_key; None without them.

  Raises:
    SettingError: one is missing, or they cannot be used.
  """
  if certificate is None and key is None:
    return None
  if certificate is None or key is None:
    raise annotations.SettingError(
      "give both of --tls_certificate and --tls_key, or none of them"
    )
  try:
    # Without a password: a prompt for one would wait.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key, lambda: "")
  except (OSError, ValueError) as error:
    reason = getattr(error, "strerror", None) or error
    raise annotations.SettingError(
      f"--tls_certificate={certificate} --tls_key={key} cannot be used: "
      f"{reason}"
    ) from error
  return Tls(certificate, key)


@contextlib.asynccontextmanager
async def listening(
  app: Any,
  bound: socket.socket,
  grace_s: int = 5,
  tls: Tls | None = None,
  patience: connections.Patience | None = None,
) -> AsyncIterator[str]:
  """Serves an application and yields its address, "http://127.0.0.1:8000".

  Args:
    bound: from `bind`; closed here.
    grace_s: time that open requests get at the end.
    tls: from `read_tls`; None: without.
    patience: with the clients.
  """
  host, port = bound.getsockname()[:2]
  server = _Server(
    uvicorn.Config(
      app,
      http=functools.partial(  # pyright: ignore[reportArgumentType]
        connections.HttpConnection, patience or connections.Patience()
      ),
      log_config=None,
      log_level="warning",
      access_log=False,
      lifespan="off",
      ws="none",
      proxy_headers=False,
      server_header=False,
      timeout_graceful_shutdown=grace_s,
      ssl_certfile=tls and tls.certificate,
      ssl_keyfile=tls and tls.key,
    )
  )
  serving = asyncio.create_task(server.serve([bound]))
  ready = asyncio.create_task(server.ready.wait())
  try:
    # A server that fails to start ends before it is ready.
    await asyncio.wait((serving, ready), return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
      serving.result()
    scheme = "https" if tls else "http"
    host = f"[{host}]" if ":" in host else host
    with log_limit.limited():
      yield f"{scheme}://{host}:{port}"
  finally:
    ready.cancel()
    server.should_exit = True
    await serving
    bound.close()
