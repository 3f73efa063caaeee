"""Connections that end when a client does not send, or does not read.

  made --> head --> answering --> head --> .. --> lost
           |  late: ended
                    | not read for long: ended

uvicorn has a deadline for idle connections, but none for half a head, nor for a
reply that nobody reads.
"""

import asyncio
import dataclasses
import resource
from typing import Any

import h11
from uvicorn.protocols.http import h11_impl

_OTHER_FILES = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Patience:
  """Limits of the connections of one server.

  Attributes:
    head_s: for the head of a request, from the end of the one before.
    unread_s: for the client to read what it was sent.
    max_connections: open at a time; None: any number.
    chunks: takes bodies in chunks. Reading many tiny ones costs far more than
      sending them, and clients that know their body send its length.
  """

  head_s: float = 10.0
  unread_s: float = 30.0
  max_connections: int | None = None
  chunks: bool = True


def within_files(wanted: int) -> int:
  """Returns a number of connections for which the process may open files."""
  most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
  if most == resource.RLIM_INFINITY:
    return wanted
  return max(min(wanted, most - _OTHER_FILES), 1)


class HttpConnection(h11_impl.H11Protocol):
  """A connection of uvicorn, within limits; called by the event loop."""

  def __init__(self, patience: Patience, **given: Any):
    super().__init__(**given)
    self._patience = patience
    self._head: asyncio.TimerHandle | None = None
    self._unread: asyncio.TimerHandle | None = None
    if not patience.chunks:
      self.conn = _Framed(h11.SERVER, self.conn._max_incomplete_event_size)

  def connection_made(  # pyright: ignore[reportIncompatibleMethodOverride]
    self, transport: asyncio.Transport
  ) -> None:
    """Begins to wait for a request."""
    super().connection_made(transport)
    most = self._patience.max_connections
    if most is not None and len(self.connections) > most:
      transport.abort()
      return
    self._await_head()

  def connection_lost(self, exc: Exception | None) -> None:
    """Ends all waiting."""
    super().connection_lost(exc)
    _cancel(self._head)
    _cancel(self._unread)

  def shutdown(self) -> None:
    """Ends at once, unless a request is answered that is here as a whole."""
    super().shutdown()
    cycle = self.cycle
    if cycle is not None and cycle.more_body and not cycle.response_started:
      self.transport.abort()

  def data_received(self, data: bytes) -> None:
    """Reads a part of a request."""
    super().data_received(data)
    self._note_head()

  def on_response_complete(self) -> None:
    """Begins to wait for the next request, unless that is here."""
    self._await_head()
    super().on_response_complete()
    self._note_head()

  def pause_writing(self) -> None:
    """Begins to wait for the client to read."""
    super().pause_writing()
    _cancel(self._unread)
    self._unread = self.loop.call_later(
      self._patience.unread_s, self.transport.abort
    )

  def resume_writing(self) -> None:
    """Notes that the client has read."""
    super().resume_writing()
    _cancel(self._unread)

  def _await_head(self) -> None:
    _cancel(self._head)
    # Not close(), which waits until the client has read all.
    self._head = self.loop.call_later(
      self._patience.head_s, self.transport.abort
    )

  def _note_head(self) -> None:
    if self.cycle is not None and not self.cycle.response_complete:
      _cancel(self._head)


class _Framed(h11.Connection):
  """Refuses bodies in chunks."""

  def next_event(self) -> Any:
    event = super().next_event()
    if isinstance(event, h11.Request) and any(
      name == b"transfer-encoding" for name, _ in event.headers
    ):
      raise h11.RemoteProtocolError("send a content-length")
    return event


def _cancel(timer: asyncio.TimerHandle | None) -> None:
  if timer is not None:
    timer.cancel()
