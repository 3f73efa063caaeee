"""Cancels work for a client when the client disconnects."""

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
  try:
    await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
    if not working.done():
      raise ClientGone
    return working.result()
  finally:
    await cancel(working, watching)


async def cancel(*tasks: asyncio.Task[Any]) -> None:
  """Cancels tasks and waits for their end, whatever it is."""
  for task in tasks:
    task.cancel()
  await asyncio.gather(*tasks, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
  while (await receive())["type"] != "http.disconnect":
    pass


class Events(responses.StreamingResponse):
  """Server-sent events, until they end or the client disconnects.

  With ASGI 2.4 a StreamingResponse notices a client that left only at the next
  send, and a request that waits for its next token would hold its slot until
  then.

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
    super().__init__(events, headers={"cache-control": "no-cache", **headers})
    self._events = events
    self._on_end = on_end

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    """Sends the response; called by the ASGI server."""
    try:
      async with contextlib.aclosing(self._events):
        with contextlib.suppress(ClientGone):
          await unless_gone(receive, self.stream_response(send))
    finally:
      self._on_end()
