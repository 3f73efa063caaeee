"""Cancels work for a client when the client disconnects.

Starlette's StreamingResponse is not used: with ASGI 2.4 it notices a client
that left only at the next send, and a request that waits for its next token
would hold its slot until then.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette import responses
from starlette.types import Receive, Scope, Send

_T = TypeVar("_T")


class ClientGone(Exception):
  """The client closed the connection."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
  """Returns the result of `work`, cancelled when the client disconnects.

  Args:
    receive: of a request whose body was read.

  Raises:
    ClientGone: the client disconnected.
  """
  working = asyncio.create_task(work)
  watching = asyncio.create_task(_disconnected(receive))
  both = (working, watching)
  try:
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    if not working.done():
      raise ClientGone
    return working.result()
  finally:
    for task in both:
      task.cancel()
    await asyncio.gather(*both, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
  while (await receive())["type"] != "http.disconnect":
    pass


class Events(responses.Response):
  """Server-sent events, until they end or the client disconnects.

  Args:
    events: encoded; closed here.
    on_end: called at the end, on every path.
  """

  media_type = "text/event-stream"

  def __init__(
    self,
    events: AsyncGenerator[bytes],
    on_end: Callable[[], None],
    headers: dict[str, str],
  ):
    self.status_code = 200
    self.background = None
    self.init_headers({"cache-control": "no-cache", **headers})
    self._events = events
    self._on_end = on_end

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    """Sends the response; called by the ASGI server."""
    try:
      async with contextlib.aclosing(self._events):
        with contextlib.suppress(ClientGone):
          await unless_gone(receive, self._send(send))
    finally:
      self._on_end()

  async def _send(self, send: Send) -> None:
    await send(
      {
        "type": "http.response.start",
        "status": self.status_code,
        "headers": self.raw_headers,
      }
    )
    async for event in self._events:
      if event:
        await send(
          {"type": "http.response.body", "body": event, "more_body": True}
        )
    await send({"type": "http.response.body", "body": b""})
