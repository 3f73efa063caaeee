"""MCP servers as tools: commands (stdio) or URLs (streamable HTTP).

  McpServer.open -> _Connection: one task owns the client, from start to end
                      call, of any episode --> client --> server

A server that dies, hangs or answers junk is a fault of the episode that meets
it, with its command or URL. `mcp` speaks the protocol; the processes are ours,
so that they are guarded and their lines have a limit.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from envs import base, extras, guarded_process

MAX_MESSAGE_BYTES = 16 << 20
"""Size of one message of a server."""

_MAX_PROCESSES, _MAX_PAGES = 64, 100
_END_S = 40.0  # Longer than it takes to end a process.
# Of the run's, what a program cannot do without; the rest may be secrets.
_VARIABLES = ("HOME", "LANG", "LOGNAME", "PATH", "SHELL", "TERM", "USER")


class McpServerError(RuntimeError):
  """An MCP server is at fault; the text names its command or URL."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class McpServer:
  """The tools of one MCP server: a toolbox of `ToolEnvironment`.

  Attributes:
    command: starts a server that talks over stdin and stdout; or
    url: of one that talks streamable HTTP.
    shared: one connection for all episodes, and so one process, for a server
      without a state. By default each episode has its own.
    only: the tools that are offered; none names all.
    variables: environment variables that a command gets beside HOME, LANG,
      PATH and the like.
    token: the environment variable with the bearer token of a URL.
    start_s, call_s: until the server must be ready, and have answered a call.
    max_chars: of a result; the rest is cut off.
    max_rss_mib: resident memory of a command with all that it starts.
  """

  command: tuple[str, ...] = ()
  url: str = ""
  shared: bool = False
  only: tuple[str, ...] = ()
  variables: tuple[str, ...] = ()
  token: str = ""
  start_s: float = 30.0
  call_s: float = 30.0
  max_chars: int = 20_000
  max_rss_mib: int = 2048

  def __post_init__(self) -> None:
    if bool(self.command) == bool(self.url):
      raise ValueError(
        f"command={self.command} with url={self.url!r}: give one of the two"
      )
    if self.url and not self.url.startswith(("http://", "https://")):
      raise ValueError(f"url={self.url!r} must begin with http:// or https://")
    for name in ("start_s", "call_s", "max_chars", "max_rss_mib"):
      if not 0 < (value := getattr(self, name)) <= 2**31:
        raise ValueError(f"{self.name}: {name}={value} must be above 0")

  @property
  def name(self) -> str:
    """The command or the URL, for errors."""
    return f"MCP server {self.url or ' '.join(self.command)}"

  def validate(self) -> None:
    """Raises ValueError if the package or a variable is missing."""
    extras.require("mcp", "mcp", self.name)
    for variable in (*self.variables, *filter(None, [self.token])):
      if variable not in os.environ:
        raise ValueError(
          f"{self.name}: environment variable {variable} is not set"
        )

  async def open(self) -> "_OpenServer":
    """Returns the tools of a server that is ready.

    Raises:
      McpServerError: it is not, in time.
    """
    if not self.shared:
      return _OpenServer(self, await _Connection(self).ready())
    shared = _SHARED.setdefault(asyncio.get_running_loop(), {})
    if self not in shared or shared[self].is_over:
      shared[self] = _Connection(self)
    return _OpenServer(self, await shared[self].ready())


class _OpenServer:
  """The tools of a server for one episode."""

  def __init__(self, server: McpServer, connection: "_Connection"):
    self._server = server
    self._connection = connection
    self.schemas = connection.schemas

  async def call(self, asked: base.ToolCall) -> tuple[str, bool]:
    try:
      arguments = json.loads(asked.arguments)
      if not isinstance(arguments, dict):
        raise ValueError("the arguments are no object")
    except ValueError as error:
      return f"error: {asked.name}: {error}", True
    text, is_error = await self._connection.call(asked.name, arguments)
    if len(text) > self._server.max_chars:
      rest = len(text) - self._server.max_chars
      text = f"{text[: self._server.max_chars]}\n[{rest} characters more]"
    return text, is_error

  async def close(self) -> None:
    await self._connection.leave()


class _Connection:
  """One session with a server, from its start to its end.

  Attributes:
    schemas: of its tools, once it is ready.
    is_over: it takes no more calls.
  """

  def __init__(self, server: McpServer):
    extras.require("mcp", "mcp", server.name)
    self.schemas: Sequence[Mapping[str, Any]] = []
    self.is_over = False
    self._server = server
    self._client: Any = None
    self._num_users = 0
    self._is_ready = asyncio.Event()
    self._closing = asyncio.Event()
    self._has_ended = asyncio.Event()  # A command, by itself.
    self._junk = ""
    self._fault = ""
    self._life = asyncio.create_task(self._live())

  async def ready(self) -> "_Connection":
    """Returns it once its tools are known, for an episode that will `leave`."""
    self._num_users += 1
    try:
      await self._race(self._is_ready.wait(), self._server.start_s, "its start")
    except BaseException:
      await self.leave()
      raise
    return self

  async def leave(self) -> None:
    """Ends the session after its last episode, unless it is there for all."""
    self._num_users -= 1
    if not self._num_users and (self.is_over or not self._server.shared):
      self.is_over = True
      self._closing.set()
      if not self._is_ready.is_set():
        self._life.cancel()
      await asyncio.wait([self._life], timeout=_END_S)
      self._life.cancel()

  async def call(
    self, name: str, arguments: dict[str, Any]
  ) -> tuple[str, bool]:
    """Returns the result of a tool as text, and whether it is an error."""
    calling = self._call(name, arguments)
    return await self._race(calling, self._server.call_s, f"tool {name}")

  async def _call(
    self, name: str, arguments: dict[str, Any]
  ) -> tuple[str, bool]:
    import mcp
    import mcp_types

    try:
      result = await self._client.call_tool(name, arguments)
    except mcp.MCPError as error:
      if error.error.code != mcp_types.INVALID_PARAMS:
        raise
      return f"error: {name}: {error}", True
    parts = [
      part.text
      if isinstance(part, mcp_types.TextContent)
      else f"[{part.type}, which cannot be shown]"
      for part in result.content
    ]
    return "\n".join(parts), bool(result.is_error)

  async def _race(self, work: Any, deadline_s: float, what: str) -> Any:
    """Returns the result of work, unless the session ends before.

    Raises:
      McpServerError: it did, or the work failed or took too long.
    """
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
      await asyncio.wait(
        [task, self._life], timeout=deadline_s, return_when="FIRST_COMPLETED"
      )
      if task.done():
        return task.result()
    except Exception as error:
      if self._has_ended.is_set():  # Then how it ended says more.
        await asyncio.wait([self._life], timeout=_END_S)
      raise self._error(f"{what}: {self._fault or _reason(error)}") from error
    finally:
      task.cancel()
    if self._life.done():
      raise self._error(f"{what}: {self._fault or 'it has ended'}")
    raise self._error(f"{what} took over {deadline_s:g} s")

  def _error(self, text: str) -> McpServerError:
    """Returns an error; no further episode uses this connection."""
    self.is_over = True
    junk = f"; it wrote what is no message: {self._junk}" if self._junk else ""
    return McpServerError(f"{self._server.name}: {text}{junk}")

  async def _live(self) -> None:
    import mcp

    try:
      async with mcp.Client(
        self._streams(), read_timeout_seconds=self._server.call_s
      ) as client:
        self.schemas = await _schemas(client, self._server)
        self._client = client
        self._is_ready.set()
        ends = (self._closing, self._has_ended)
        waits = [asyncio.create_task(event.wait()) for event in ends]
        try:
          await asyncio.wait(waits, return_when="FIRST_COMPLETED")
        finally:
          for wait in waits:
            wait.cancel()
    except Exception as error:
      self._fault = self._fault or _reason(error)
    finally:
      self.is_over = True

  def _streams(self) -> contextlib.AbstractAsyncContextManager[Any]:
    return self._process() if self._server.command else self._http()

  @contextlib.asynccontextmanager
  async def _http(self) -> AsyncIterator[Any]:
    """Yields the streams of messages from and to a URL."""
    import httpx2
    from mcp.client import streamable_http

    # Else the size of an answer would not be that of its bytes.
    server, headers = self._server, {"Accept-Encoding": "identity"}
    if server.token:
      headers["Authorization"] = f"Bearer {os.environ[server.token]}"
    client = httpx2.AsyncClient(
      headers=headers,
      timeout=max(server.start_s, server.call_s),
      event_hooks={"response": [_limit_size]},
    )
    connected = streamable_http.streamable_http_client(
      server.url, http_client=client, max_sse_event_size=MAX_MESSAGE_BYTES
    )
    async with client, connected as streams:
      yield streams

  @contextlib.asynccontextmanager
  async def _process(self) -> AsyncIterator[Any]:
    """Yields the streams of messages from and to a command."""
    import anyio

    server = self._server
    names = {*_VARIABLES, *server.variables} & {*os.environ}
    process = await guarded_process.GuardedProcess.start(
      server.command,
      max_rss_mib=server.max_rss_mib,
      max_processes=_MAX_PROCESSES,
      env={name: os.environ[name] for name in names},
      limit=MAX_MESSAGE_BYTES,
    )
    into, incoming = anyio.create_memory_object_stream[Any](0)
    outgoing, out_of = anyio.create_memory_object_stream[Any](0)
    tasks = [
      asyncio.create_task(self._read(process.stdout, into)),
      asyncio.create_task(_write(process.stdin, out_of)),
    ]
    try:
      yield incoming, outgoing
    finally:
      has_died = self._has_ended.is_set()
      for task in tasks:
        task.cancel()
      await asyncio.wait(tasks)
      how = await process.end()
      if has_died:
        self._fault = self._fault or f"it {how}"
      for stream in (into, incoming, outgoing, out_of):
        stream.close()

  async def _read(self, stdout: asyncio.StreamReader, into: Any) -> None:
    """Passes messages on until the process ends or exceeds the limit."""
    import mcp_types
    from mcp.shared import message

    parse = mcp_types.jsonrpc_message_adapter.validate_json
    try:
      while line := await stdout.readline():
        try:
          said = parse(line, by_name=False)
        except ValueError:  # A print; not all servers can do without.
          self._junk = self._junk or repr(line[:100])
        else:
          await into.send(message.SessionMessage(said))
    except ValueError:
      self._fault = f"it wrote a line above {MAX_MESSAGE_BYTES} bytes"
    finally:
      self._has_ended.set()
      into.close()


async def _write(stdin: asyncio.StreamWriter, out_of: Any) -> None:
  with contextlib.suppress(ConnectionError):  # The other task will see its end.
    async for said in out_of:
      text = said.message.model_dump_json(by_alias=True, exclude_unset=True)
      stdin.write(f"{text}\n".encode())
      await stdin.drain()


async def _limit_size(response: Any) -> None:
  """Lets an answer end the session once it is too long, with a length or not.

  A stream of events goes on for as long as it likes: each event has the limit.
  """
  import httpx2

  encoding = response.headers.get("content-encoding", "identity")
  if encoding != "identity":
    raise ValueError(f"it encoded an answer as {encoding}, unasked")
  if "text/event-stream" in response.headers.get("content-type", ""):
    return
  whole = response.stream

  class Limited(httpx2.AsyncByteStream):
    async def __aiter__(self) -> AsyncIterator[bytes]:
      size = 0
      async for part in whole:
        size += len(part)
        if size > MAX_MESSAGE_BYTES:
          raise ValueError(f"an answer is above {MAX_MESSAGE_BYTES} bytes")
        yield part

    async def aclose(self) -> None:
      await whole.aclose()

  response.stream = Limited()


async def _schemas(client: Any, server: McpServer) -> list[dict[str, Any]]:
  """Returns the tools of a server in the form of the OpenAI API."""
  found, cursor = {}, None
  for _ in range(_MAX_PAGES):
    page = await client.list_tools(cursor=cursor)
    found |= {tool.name: tool for tool in page.tools}
    if (cursor := page.next_cursor) is None:
      break
  if missing := {*server.only} - {*found}:
    names = ", ".join(found)
    raise ValueError(
      f"it has no tools {sorted(missing)}, but {names or 'none'}"
    )
  return [
    {
      "type": "function",
      "function": {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": tool.input_schema,
      },
    }
    for tool in found.values()
    if not server.only or tool.name in server.only
  ]


def _reason(error: BaseException) -> str:
  """Returns the first of the causes that anyio has gathered."""
  while isinstance(error, BaseExceptionGroup):
    error = error.exceptions[0]
  return f"{type(error).__name__}: {error}"


_SHARED: weakref.WeakKeyDictionary[
  asyncio.AbstractEventLoop, dict[McpServer, _Connection]
] = weakref.WeakKeyDictionary()
