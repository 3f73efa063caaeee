"""One ordered stream of calls, answers and notices between two processes.

  call ----+                                  +-- _serve: a task for each call
  stream --+--> _outgoing --_write--> socket ~~> _read --+-- answers, items
  post ----+   one queue, in order                       +-- notices

All that one side sends arrives in the order in which it was sent, so a notice
never overtakes a call and an answer never a notice. What is sent at one moment
is one message, in pieces that any socket takes. When the stream ends, every
call of both sides ends with it.
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, Protocol

from rl.engine import contract
from rl.remote import wire
from rl.runtime import watchdog as watchdog_lib

_CLOSE_S = 2.0
_SEND_S = 30.0
"""Longest time until the other side takes a piece. A WebSocket's heartbeats
wait behind it, so they never find a process that has stopped meanwhile."""
_PIECE, _MAX_BYTES = 16 << 20, 1 << 30
_LAST, _MORE = b"\0", b"\1"


class Lost(ConnectionError):
  """The stream has ended, or its other side does not answer in time."""


class Failed(RuntimeError):
  """The other side raised something while it served a call."""


_PASSED_ON = (ValueError, contract.EngineClosed, Lost)
"""Errors that are raised on this side as they were on the other."""


class Socket(Protocol):
  """An ordered, reliable stream of messages, such as a WebSocket."""

  async def send(self, message: bytes) -> None:
    """Sends one message; raises when the stream has ended."""
    ...

  async def recv(self) -> str | bytes:
    """Returns the next message; raises when the stream has ended."""
    ...

  async def close(self) -> None:
    """Ends the stream."""
    ...


class Connection:
  """One side of a stream; all methods belong to one event loop.

  Whoever has the socket calls `run` in a task of its own, and `close`.

  Args:
    name: of the other side, in errors.
    serves: handlers of the other side's calls, by name: coroutine functions or
      async generator functions.
    hears: handlers of its notices; called at once, in order.
    before_answering: called before an answer or an item is sent; what it
      posts goes first.
    watchdog: lists the calls that wait.
  """

  def __init__(
    self,
    socket: Socket,
    *,
    name: str,
    serves: Mapping[str, Callable[..., Any]] | None = None,
    hears: Mapping[str, Callable[..., None]] | None = None,
    before_answering: Callable[[], None] = lambda: None,
    watchdog: watchdog_lib.Watchdog = watchdog_lib.UNHEARD,
  ):
    self._socket = socket
    self._name = name
    self._serves = serves or {}
    self._hears = hears or {}
    self._before_answering = before_answering
    self._watchdog = watchdog
    self._numbers = itertools.count()
    self._outgoing: list[tuple] = []
    self._ready = asyncio.Event()
    self._waiting: dict[int, asyncio.Queue[tuple]] = {}
    self._serving: dict[int, asyncio.Task[None]] = {}
    self._lost: Lost | None = None
    self.lost = asyncio.Event()

  # Asking.

  async def call(self, method: str, *args: Any, deadline_s: float) -> Any:
    """Returns the answer of the other side. Cancelling cancels it there.

    Raises:
      Lost: the stream ended, or no answer came by the deadline.
      ValueError, EngineClosed: so did the handler.
      Failed: the handler raised anything else.
    """
    replies = self._replies(method, *args, deadline_s=deadline_s)
    async with contextlib.aclosing(replies):
      async for kind, value in replies:
        if kind == "answer":
          return value
    raise AssertionError("replies end with an answer")

  async def items(
    self, method: str, *args: Any, deadline_s: float
  ) -> AsyncGenerator[Any]:
    """Yields what the handler yields; closing the iterator cancels it there.

    Args:
      deadline_s: of each item.

    Raises what `call` does.
    """
    replies = self._replies(method, *args, deadline_s=deadline_s)
    async with contextlib.aclosing(replies):
      async for kind, value in replies:
        if kind == "item":
          yield value

  async def _replies(
    self, method: str, *args: Any, deadline_s: float
  ) -> AsyncGenerator[tuple[str, Any]]:
    """Yields ("item", value) any number of times, then ("answer", value)."""
    if self._lost is not None:
      raise Lost(str(self._lost))
    number, replies = next(self._numbers), asyncio.Queue[tuple]()
    self._waiting[number] = replies
    self._send("call", number, method, args)
    kind = "item"
    try:
      while kind == "item":
        kind, *rest = await self._reply(replies, method, deadline_s)
        if kind == "error":
          raise self._error(method, *rest)
        yield kind, rest[0]
    finally:
      del self._waiting[number]
      if kind == "item":
        self._send("cancel", number)

  async def _reply(
    self, replies: asyncio.Queue[tuple], method: str, deadline_s: float
  ) -> tuple:
    try:
      with self._watchdog.track(
        owner=self._name, what=method, deadline_s=deadline_s
      ):
        async with asyncio.timeout(
          None if deadline_s == float("inf") else deadline_s
        ):
          return await replies.get()
    except TimeoutError:
      raise Lost(
        f"{self._name} has not answered {method!r} in {deadline_s:g} s"
      ) from None

  def _error(self, method: str, kind: str, text: str) -> Exception:
    for cls in _PASSED_ON:
      if cls.__name__ == kind:
        return cls(text)
    return Failed(f"{self._name} raised {kind} in {method!r}: {text}")

  def post(self, notice: str, *args: Any) -> None:
    """Sends a notice after all that was sent before, if the stream lasts."""
    self._send("notice", notice, args)

  def _send(self, *message: Any) -> None:
    if self._lost is None:
      self._outgoing.append(message)
      self._ready.set()

  # The stream.

  async def run(self) -> str:
    """Sends and receives until the stream ends; returns why it did."""
    tasks = [
      asyncio.create_task(self._read(), name=f"from {self._name}"),
      asyncio.create_task(self._write(), name=f"to {self._name}"),
    ]
    try:
      await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
      errors = [x.exception() for x in tasks if x.done() and not x.cancelled()]
      for task in tasks:
        task.cancel()
      why = next((error for error in errors if error is not None), None)
      self._end(f"{self._name} is gone: {why!r}")
    return str(self._lost)

  async def _write(self) -> None:
    while True:
      await self._ready.wait()
      self._ready.clear()
      batch, self._outgoing = self._outgoing, []
      data = wire.pack(batch)
      for start in range(0, len(data), _PIECE):
        mark = _MORE if start + _PIECE < len(data) else _LAST
        await self._send_piece(mark + data[start : start + _PIECE])

  async def _send_piece(self, piece: bytes) -> None:
    try:
      async with asyncio.timeout(_SEND_S):
        await self._socket.send(piece)
    except TimeoutError:
      raise Lost(f"it has taken nothing for {_SEND_S:g} s") from None

  async def _received(self) -> bytes:
    """Returns the next message."""
    pieces, mark, length = [], _MORE, 0
    while mark == _MORE:
      piece = await self._socket.recv()
      if isinstance(piece, str):
        raise wire.Malformed("text in place of bytes")
      mark = piece[:1]
      length += len(piece)
      if length > _MAX_BYTES:
        raise wire.Malformed(f"a message of more than {_MAX_BYTES} bytes")
      pieces.append(piece[1:])
    return b"".join(pieces)

  async def _read(self) -> None:
    is_waiting = False
    while True:
      for kind, *rest in wire.unpack(await self._received()):
        # A call begins before a notice after it is heard; but all calls of a
        # message begin together, so that an engine decodes them together.
        # The next message may lie there already, and is then read at once.
        if is_waiting and kind != "call":
          await asyncio.sleep(0)
        is_waiting = kind == "call"
        self._take(kind, *rest)

  def _take(self, kind: str, *rest: Any) -> None:
    if kind == "notice":
      name, args = rest
      self._hears[name](*args)
    elif kind == "call":
      number, method, args = rest
      task = asyncio.create_task(self._serve(number, method, args))
      self._serving[number] = task
      task.add_done_callback(lambda _: self._serving.pop(number, None))
    elif kind == "cancel":
      if (task := self._serving.get(rest[0])) is not None:
        task.cancel()
    elif kind not in ("answer", "item", "error"):
      raise wire.Malformed(f"a message of kind {kind!r}")
    else:
      number, *reply = rest
      if (replies := self._waiting.get(number)) is not None:
        replies.put_nowait((kind, *reply))

  async def _serve(self, number: int, method: str, args: tuple) -> None:
    try:
      handler = self._serves[method]
      served = handler(*args)
      if isinstance(served, AsyncGenerator):
        async with contextlib.aclosing(served):
          async for item in served:
            self._before_answering()
            self._send("item", number, item)
        answer = None
      else:
        answer = await served
    # Whatever it raises is the caller's to handle.
    except Exception as error:
      reply = "error", number, _kind(error), str(error)
    else:
      reply = "answer", number, answer
    self._before_answering()
    self._send(*reply)

  def _end(self, why: str) -> None:
    if self._lost is not None:
      return
    self._lost = Lost(why)
    for task in list(self._serving.values()):
      task.cancel()
    for replies in self._waiting.values():
      replies.put_nowait(("error", "Lost", why))
    self.lost.set()

  async def close(self) -> None:
    """Ends the stream; calls that wait raise Lost."""
    self._end(f"the connection to {self._name} was closed")
    with contextlib.suppress(Exception):  # It may have ended by itself.
      async with asyncio.timeout(_CLOSE_S):
        await self._socket.close()


def _kind(error: Exception) -> str:
  """Returns the class that the caller's side raises in its turn."""
  for cls in _PASSED_ON:
    if isinstance(error, cls):
      return cls.__name__
  return type(error).__name__
