"""Environments of OpenEnv servers, over its WebSocket.

connect -> reset(seed) -> [ observation -> answer -> step ]* -> close

One connection is one session of the server, and one episode.
"""

import asyncio
import contextlib
import dataclasses
import json
import urllib.parse
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from envs import base, extras

# What the server says of an action that it cannot read: the agent's fault.
_UNREADABLE = "VALIDATION_ERROR"
_CLOSE_S = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenEnv:
  """Episodes of an environment that an OpenEnv server plays.

  An answer is the text of one field of an action, or a whole action as JSON.
  Messages are one field of the observations, or all of them as JSON. Rewards
  and the end are the server's. An action that cannot be read gets an error text
  and costs a turn; the metric `invalid` counts those.

  A server that cannot be reached, dies, hangs, closes the connection, raises or
  sends more than `max_mib` is a fault of that episode, which names its URL. Try
  one with `launch.try_environment` before a run: only a server that takes the
  seed of a reset gives all members of a group the same task.

  Attributes:
    url: of the server, such as http://localhost:8000 or ws://host:8000. It must
      permit as many sessions as the run plays at once (`max_concurrent_envs`).
    action: the field that takes the answer; "" for an answer that is the JSON
      of an action.
    observation: the field that is shown; "" for all.
    system: begins the conversation: what to do, and how to answer.
    max_turns: answers before the episode ends.
    reply_s: deadline of one reply, and of connecting. Below `rollout.step_s`,
      which ends the episode without naming the server.
    max_mib: size of the largest message of the server.
    name: the first part of every task id.
  """

  url: str
  action: str = ""
  observation: str = ""
  system: str | None = None
  max_turns: int = 16
  reply_s: float = 30.0
  max_mib: float = 1.0
  name: str = "openenv"
  restarts = True  # A failed connection has begun no episode.

  def __post_init__(self) -> None:
    base.check_name(self.name)
    parts = urllib.parse.urlsplit(self.url)
    if parts.scheme not in _SCHEMES or not parts.hostname:
      raise ValueError(
        f"url={self.url!r} must begin with {', '.join(_SCHEMES)} and name a "
        "host, such as http://localhost:8000"
      )
    for field in ("max_turns", "reply_s", "max_mib"):
      if not getattr(self, field) > 0:
        raise ValueError(f"{field}={getattr(self, field)} must be above 0")
    _package()

  @property
  def socket_url(self) -> str:
    """The address of the server's WebSocket."""
    parts = urllib.parse.urlsplit(self.url)
    path = parts.path.rstrip("/").removesuffix("/ws") + "/ws"
    return parts._replace(scheme=_SCHEMES[parts.scheme], path=path).geturl()

  def task(self, index: int, split: base.Split) -> base.Task:
    """Returns a task; seeds are even in training and odd in evaluation."""
    seed = 2 * index + (split == "eval")
    return base.Task(f"{self.name}/{split}/{index}", index, split, seed)

  def __call__(self, task: base.Task) -> "_Session":
    """Returns a fresh session; connects in its `start`."""
    return _Session(self, task)


_SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}


class _Session:
  """One connection to the server."""

  def __init__(self, source: OpenEnv, task: base.Task):
    self._source = source
    self._task = task
    self._num_answers = 0
    self._socket: Any = None

  async def start(self) -> Sequence[base.Message]:
    source = self._source
    async with self._deadline("connecting"):
      self._socket = await _connect(source)
    data = {"seed": self._task.seed, "episode_id": self._task.id}
    reply = await self._ask({"type": "reset", "data": data})
    if reply.get("done"):
      raise RuntimeError(f"{source.url}: the episode was over after its reset")
    system = [base.Message("system", source.system)] if source.system else []
    return [*system, self._shown(reply)]

  async def step(self, answer: base.Message) -> base.Step:
    self._num_answers += 1
    over = self._num_answers == self._source.max_turns
    try:
      action = self._action(answer.content)
      reply = await self._ask({"type": "step", "data": action})
    except _InvalidAction as error:
      text = base.Message("user", f"Error: {error}")
      return base.Step([text], 0.0, over, {"invalid": 1.0})
    reward = reply.get("reward") or 0.0
    done = bool(reply.get("done")) or over
    return base.Step([self._shown(reply)], reward, done, {"invalid": 0.0})

  async def close(self) -> None:
    socket, self._socket = self._socket, None
    if socket is not None:
      # It may be dead: the server ends the session of a closed connection.
      with contextlib.suppress(Exception):
        async with asyncio.timeout(_CLOSE_S):
          await socket.send(json.dumps({"type": "close"}))
      await socket.close()

  def _action(self, text: str) -> dict[str, Any]:
    if self._source.action:
      return {self._source.action: text}
    try:
      action = json.loads(text)
    except (ValueError, RecursionError) as error:
      raise _InvalidAction(f"the action is not JSON: {error}") from error
    if not isinstance(action, dict):
      raise _InvalidAction("the action is not a JSON object")
    return action

  async def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the data of the reply to a message."""
    url, kind = self._source.url, message["type"]
    async with self._deadline(kind):
      # A server that is full says so and closes, maybe before it is asked.
      with contextlib.suppress(_package().exceptions.ConnectionClosed):
        await self._socket.send(json.dumps(message))
      received = await self._socket.recv()
    try:
      reply = json.loads(received)
      kind, data = reply["type"], reply["data"]
      if not isinstance(data, dict):
        raise TypeError("its data must be an object")
    except (ValueError, TypeError, LookupError, RecursionError) as error:
      raise RuntimeError(
        f"{url}: its reply {received[:80]!r} is not of OpenEnv: {error!r}"
      ) from error
    if kind == "error":
      if data.get("code") == _UNREADABLE and message["type"] == "step":
        raise _InvalidAction(f"{data.get('message')} {_places(data)}".strip())
      raise RuntimeError(f"{url}: {data.get('code')}: {data.get('message')}")
    return data

  @contextlib.asynccontextmanager
  async def _deadline(self, what: str) -> AsyncIterator[None]:
    """Names the server in whatever goes wrong on the way to it."""
    url, limit = self._source.url, self._source.reply_s
    try:
      async with asyncio.timeout(limit):
        yield
    except TimeoutError as error:
      raise TimeoutError(f"{url}: {what} took over {limit:g} s") from error
    except (
      OSError,
      EOFError,
      _package().exceptions.WebSocketException,
    ) as error:
      raise ConnectionError(f"{url}: {what} failed: {error}") from error

  def _shown(self, reply: Mapping[str, Any]) -> base.Message:
    seen, field = reply.get("observation"), self._source.observation
    if field:
      if not isinstance(seen, dict) or field not in seen:
        raise RuntimeError(
          f"{self._source.url}: no field {field!r} in its observation, which "
          f"has {', '.join(seen) if isinstance(seen, dict) else 'none'}"
        )
      seen = seen[field]
    text = seen if isinstance(seen, str) else json.dumps(seen)
    return base.Message("user", text)


class _InvalidAction(Exception):
  """An answer that is no action; the text is for the agent."""


def _places(data: Mapping[str, Any]) -> str:
  """Returns which fields of an action are wrong, by the server's words."""
  with contextlib.suppress(LookupError, TypeError):
    return "; ".join(
      f"{'.'.join(map(str, error['loc']))}: {error['msg']}"
      for error in data["errors"]
    )
  return ""


def _connect(source: OpenEnv) -> Any:
  """Returns a connection, to be awaited."""
  host = urllib.parse.urlsplit(source.url).hostname
  return _package().asyncio.client.connect(
    source.socket_url,
    open_timeout=None,
    close_timeout=_CLOSE_S,
    # A server may be too busy with a step to answer; a reply has its deadline.
    ping_interval=None,
    max_size=int(source.max_mib * 2**20),
    # A proxy of the environment variables has no way to this machine.
    proxy=None if host in ("localhost", "127.0.0.1", "::1") else True,
  )


def _package() -> Any:
  """Returns the package; not at the top, as it is optional.

  Raises:
    ValueError: it is not installed.
  """
  extras.require("websockets", "openenv", "this environment")
  import websockets
  import websockets.asyncio.client

  return websockets
