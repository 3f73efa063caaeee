"""Weights for engines on other hosts: slices of the store, over TCP.

  WeightStream, beside the store <==request, slice== StreamReader, in an engine

Only the slices that an engine's devices keep are sent, each once, as the reader
of shared memory reads them. The stream has threads and connections of its own,
so that no call of an engine waits behind weights. It knows its clients by a
token and is not encrypted: it is for a private network.
"""

import contextlib
import dataclasses
import hmac
import os
import pathlib
import secrets
import socket
import socketserver
import struct
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from rl.remote import weight_store, wire

_SILENCE_S = 60.0
_CONNECT_S = 10.0
_MAX_REQUEST = 1 << 16
_LENGTH = struct.Struct("!q")
_REPLY = struct.Struct("!?q")
_CLOSE_LOOK_S = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamAddress:
  """The place of a `WeightStream`, and the token that opens it."""

  host: str
  port: int
  token: str = dataclasses.field(repr=False)


class WeightStream:
  """Sends slices of the tensors of this process, until `close`.

  Args:
    host: address of this host at which it listens.

  Attributes:
    address: for `StreamReader`.
  """

  def __init__(self, host: str):
    self._token = secrets.token_hex(32)
    self._server = _Server(self._token, host)
    port = self._server.server_address[1]
    self.address = StreamAddress(host=host, port=port, token=self._token)
    self._thread = threading.Thread(
      target=self._server.serve_forever,
      args=(_CLOSE_LOOK_S,),
      name="weight stream",
      daemon=True,
    )
    self._thread.start()

  def close(self) -> None:
    """Listens no more."""
    self._server.shutdown()
    self._server.server_close()
    self._thread.join()


class _Server(socketserver.ThreadingTCPServer):
  daemon_threads = True

  def __init__(self, token: str, host: str):
    self._token = token
    if ":" in host:
      self.address_family = socket.AF_INET6
    super().__init__((host, 0), socketserver.BaseRequestHandler)

  def finish_request(self, request: Any, client_address: Any) -> None:
    """Answers the requests of one connection, in a thread of its own."""
    del client_address
    request.settimeout(_SILENCE_S)
    # The engine is gone, or sends something else.
    with contextlib.suppress(OSError, wire.Malformed):
      given = _read_request(request)
      known = isinstance(given, str) and hmac.compare_digest(
        given.encode(), self._token.encode()
      )
      if not known:
        _send_error(request, "unknown token")
        return
      _answer(request)


def _answer(stream: socket.socket) -> None:
  # Not closed here: an array that is on its way holds the memory of its file.
  readers: dict[str, weight_store.StoreReader] = {}
  while True:
    asked = _read_request(stream)
    try:
      path, name, shape, dtype, index = asked
      if path not in readers:
        _check_path(path)
        readers[path] = weight_store.StoreReader(path)
      slices = tuple(slice(*bounds) for bounds in index)
      piece = readers[path].view(name, shape, np.dtype(dtype), slices)
    except (TypeError, ValueError, IndexError) as error:
      _send_error(stream, str(error))
      return
    # A piece that is not in one part is copied, but no other.
    data = np.ascontiguousarray(piece).reshape(-1).view(np.uint8)
    stream.sendall(_REPLY.pack(True, data.nbytes))
    stream.sendall(data.data)


def _check_path(path: str) -> None:
  """Raises ValueError unless it is memory of this process for weights."""
  folder = f"/proc/{os.getpid()}/fd"
  try:
    is_ours = str(pathlib.PurePath(path).parent) == folder
    target = os.readlink(path) if is_ours else ""
  except OSError:
    target = ""
  if not target.startswith(f"/memfd:{weight_store.MEMORY}"):
    raise ValueError(f"{path} is no memory of weights, or is free by now")


def _send_error(stream: socket.socket, text: str) -> None:
  stream.sendall(_REPLY.pack(False, len(text.encode())) + text.encode())


def _send_request(stream: socket.socket, value: Any) -> None:
  data = wire.pack(value)
  stream.sendall(_LENGTH.pack(len(data)) + data)


def _read_request(stream: socket.socket) -> Any:
  (count,) = _LENGTH.unpack(_received(stream, _LENGTH.size))
  if not 0 < count <= _MAX_REQUEST:
    raise wire.Malformed(f"a request of {count} bytes")
  return wire.unpack(bytes(_received(stream, count)))


def _received(stream: socket.socket, count: int) -> bytearray:
  """Returns so many bytes; raises OSError when they do not come."""
  data = bytearray(count)
  _receive_into(stream, memoryview(data))
  return data


def _receive_into(stream: socket.socket, view: memoryview) -> None:
  while len(view):
    if not (count := stream.recv_into(view)):
      raise ConnectionError("the stream of weights has ended")
    view = view[count:]


class StreamReader:
  """Reads slices of the tensors of another host, as `StoreReader` does here.

  Attributes:
    bytes_read: of all slices so far.
  """

  def __init__(self, address: StreamAddress, path: str):
    """Connects.

    Args:
      path: of the file, as `weight_store.Tensor` has it.

    Raises:
      OSError: nothing answers.
    """
    self.bytes_read = 0
    self._path = path
    where = address.host, address.port
    self._stream = socket.create_connection(where, _CONNECT_S)
    self._stream.settimeout(_SILENCE_S)
    _send_request(self._stream, address.token)

  def read(
    self,
    name: str,
    shape: Sequence[int],
    dtype: np.dtype,
    index: tuple[slice, ...],
  ) -> np.ndarray:
    """Returns a slice of a tensor.

    Raises:
      DamagedFile: the other side refuses, or has another tensor.
      OSError: it is gone.
    """
    bounds = [
      part.indices(size)[:2] for part, size in zip(index, shape, strict=False)
    ]
    rest = tuple(shape)[len(bounds) :]
    piece = np.empty([stop - start for start, stop in bounds] + [*rest], dtype)
    _send_request(
      self._stream, (self._path, name, tuple(shape), dtype.name, bounds)
    )
    ok, count = _REPLY.unpack(_received(self._stream, _REPLY.size))
    if not ok:
      text = _received(self._stream, min(count, _MAX_REQUEST))
      raise weight_store.DamagedFile(text.decode(errors="replace"))
    if count != piece.nbytes:
      raise weight_store.DamagedFile(
        f"{count} bytes of tensor {name}, not {piece.nbytes}"
      )
    _receive_into(self._stream, piece.reshape(-1).view(np.uint8).data)
    self.bytes_read += count
    return piece

  def close(self) -> None:
    """Closes the connection."""
    self._stream.close()

  def __enter__(self) -> "StreamReader":
    return self

  def __exit__(self, *_: object) -> None:
    self.close()
