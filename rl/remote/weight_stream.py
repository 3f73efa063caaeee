"""Weights between hosts: slices of tensors of the store, over TCP.

  WeightStream, beside the store ==slice==> StreamReader: engines and learners
                                 <==slice== StreamWriter: learners

Only the slices that a process's devices keep are sent, each once, as the reader
and writer of shared memory have them. The stream has threads and connections of
its own, so that no call waits behind weights. It knows its clients by a token
and is not encrypted: it is for a private network.
"""

import contextlib
import dataclasses
import functools
import hmac
import math
import os
import pathlib
import secrets
import socket
import socketserver
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import numpy as np

from rl.remote import weight_store, wire

_SILENCE_S = 60.0
_IDLE_S = 1800.0
"""Between two slices: a reader may have others to read, of other files."""
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
    writable: it takes slices as well.

  Attributes:
    address: for `StreamReader` and `StreamWriter`.
  """

  def __init__(self, host: str, writable: bool = False):
    self._token = secrets.token_hex(32)
    self._server = _Server(self._token, host, writable)
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

  def __init__(self, token: str, host: str, writable: bool):
    self._token = token
    self._writable = writable
    if ":" in host:
      self.address_family = socket.AF_INET6
    super().__init__((host, 0), socketserver.BaseRequestHandler)

  def finish_request(self, request: Any, client_address: Any) -> None:
    """Answers the requests of one connection, in a thread of its own."""
    del client_address
    request.settimeout(_SILENCE_S)
    # The client is gone, or sends something else.
    with contextlib.suppress(OSError, wire.Malformed):
      given = _read_request(request)
      known = isinstance(given, str) and hmac.compare_digest(
        given.encode(), self._token.encode()
      )
      if not known:
        _send_error(request, "unknown token")
        return
      self._answer(request)

  def _answer(self, stream: socket.socket) -> None:
    # Not closed here: an array that is on its way holds the memory of its file.
    files: dict[str, weight_store.StoreReader | weight_store.StoreWriter] = {}
    opened = (
      weight_store.StoreWriter if self._writable else weight_store.StoreReader
    )
    while True:
      stream.settimeout(_IDLE_S)
      asked = _read_request(stream)
      stream.settimeout(_SILENCE_S)
      try:
        writes, path, name, shape, dtype, index = asked
        if writes and not self._writable:
          raise ValueError("these weights are not to be written")
        if path not in files:
          _check_path(path)
          files[path] = opened(path)
        whole = files[path].whole(name, shape, np.dtype(dtype))
        slices = tuple(slice(*bounds) for bounds in index)
        piece = whole[slices]
      except (TypeError, ValueError, IndexError) as error:
        _send_error(stream, str(error))
        return
      # A piece that is not in one part is copied, but no other.
      data = np.ascontiguousarray(piece).reshape(-1).view(np.uint8)
      stream.sendall(_REPLY.pack(True, data.nbytes))
      if writes:
        _receive_into(stream, data.data)
        whole[slices] = data.view(whole.dtype).reshape(piece.shape)
        stream.sendall(_REPLY.pack(True, 0))
      else:
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


class _Client:
  """A connection to the stream of another host; a context."""

  def __init__(self, address: StreamAddress, path: str):
    """Connects.

    Args:
      path: of the file, as `weight_store.Tensor` has it.

    Raises:
      OSError: nothing answers.
    """
    self._path = path
    where = address.host, address.port
    self._stream = socket.create_connection(where, _CONNECT_S)
    self._stream.settimeout(_SILENCE_S)
    _send_request(self._stream, address.token)

  def _ask(
    self,
    writes: bool,
    name: str,
    shape: Sequence[int],
    dtype: np.dtype,
    index: tuple[slice, ...],
  ) -> tuple[int, ...]:
    """Asks for a slice of a tensor, or to take it; returns its shape.

    Raises:
      DamagedFile: the other side refuses, or has another tensor.
      OSError: it is gone.
    """
    bounds = [
      part.indices(size)[:2] for part, size in zip(index, shape, strict=False)
    ]
    rest = tuple(shape)[len(bounds) :]
    asked = *(stop - start for start, stop in bounds), *rest
    _send_request(
      self._stream,
      (writes, self._path, name, tuple(shape), dtype.name, bounds),
    )
    count = self._reply()
    if count != math.prod(asked) * dtype.itemsize:
      raise weight_store.DamagedFile(
        f"{count} bytes of tensor {name}, not a slice of shape {asked}"
      )
    return asked

  def _reply(self) -> int:
    ok, count = _REPLY.unpack(_received(self._stream, _REPLY.size))
    if not ok:
      text = _received(self._stream, min(count, _MAX_REQUEST))
      raise weight_store.DamagedFile(text.decode(errors="replace"))
    return count

  def close(self) -> None:
    """Closes the connection."""
    self._stream.close()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()


class StreamReader(_Client):
  """Reads slices of the tensors of another host, as `StoreReader` does here.

  Attributes:
    bytes_read: of all slices so far.
  """

  bytes_read = 0

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
    piece = np.empty(self._ask(False, name, shape, dtype, index), dtype)
    _receive_into(self._stream, piece.reshape(-1).view(np.uint8).data)
    self.bytes_read += piece.nbytes
    return piece


class StreamWriter(_Client):
  """Writes slices of tensors of another host, as `StoreWriter` does here."""

  def write(self, name: str, array: jax.Array) -> None:
    """Writes those slices of an array that this process is to write.

    Raises:
      DamagedFile: the other side refuses, or has another tensor.
      OSError: it is gone.
    """
    for index, values in weight_store.own_slices(array):
      self._ask(True, name, array.shape, array.dtype, index)
      data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
      self._stream.sendall(data.data)
      self._reply()


def reader_at(
  address: StreamAddress | None,
) -> Callable[[str], weight_store.Reader]:
  """Returns what opens a file to read, here or at an address."""
  if address is None:
    return weight_store.StoreReader
  return functools.partial(StreamReader, address)


def writer_at(
  address: StreamAddress | None, path: str
) -> weight_store.StoreWriter | StreamWriter:
  """Returns an open file to write, here or at an address."""
  if address is None:
    return weight_store.StoreWriter(path)
  return StreamWriter(address, path)
