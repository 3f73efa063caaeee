"""A reward computed by an HTTP function, such as `launch.reward_server`.

  POST URL  request of `wire`  -> 200 grades; 4xx, 5xx {"error": TEXT}
  GET URL   -> 200 {"rewards": [IDENTITY, ..]}

Nothing of an answer is trusted: not its length, not its form, not that it ends.
"""

import asyncio
import dataclasses
import json
import math
import os
import urllib.parse
from collections.abc import Mapping
from typing import Any

from envs import base, extras
from envs.offload import calls, wire

MAX_ANSWER = 4 << 20
"""Bytes of an answer that are read; a longer one is an error."""


def check_url(name: str, url: str) -> None:
  """Raises ValueError unless a setting is the URL of a server."""
  parts = urllib.parse.urlsplit(url)
  if parts.scheme not in ("http", "https") or not parts.hostname:
    raise ValueError(
      f"{name}={url} must begin with http:// or https:// and a host"
    )


def check_limits(timeout_s: float, max_connections: int) -> None:
  """Raises ValueError on limits that allow no call."""
  if not 0 < timeout_s < math.inf:
    raise ValueError(f"timeout_s={timeout_s} must be finite and above 0")
  if max_connections < 1:
    raise ValueError(f"max_connections={max_connections} must be at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Http(wire.Elsewhere):
  """Computes a reward by an HTTP function.

  Attributes:
    url: of the function; `launch.reward_server` prints it.
    timeout_s: of one call. Below `rollout.grading.deadline_s`, as only an error
      of its own names the URL.
    max_connections: calls under way; others wait.
    key: environment variable with the key of the server; it is sent if it is
      set.
  """

  url: str
  timeout_s: float = 20.0
  max_connections: int = 64
  key: str = "REWARD_API_KEY"

  def __post_init__(self) -> None:
    super().__post_init__()
    check_url("url", self.url)
    check_limits(self.timeout_s, self.max_connections)
    extras.require("httpx2", "rewards", "reward http")

  def client(self) -> "_Function":
    """Returns a client without a connection."""
    return _Function(self)


def authorization(key: str) -> dict[str, str]:
  """Returns the headers with the key of an environment variable, if any."""
  value = os.environ.get(key)
  return {"authorization": f"Bearer {value}"} if value else {}


class Connections:
  """Connections to HTTP servers; used on one event loop, and closed."""

  def __init__(self, timeout_s: float):
    import httpx2

    self._timeout_s = timeout_s
    self._client = httpx2.AsyncClient(
      timeout=None,  # That of a whole request is ours.
      # Callers bound them. Servers close idle ones, after 5 s mostly.
      limits=httpx2.Limits(max_connections=None, keepalive_expiry=2.0),
      # A small answer must not become a large one.
      headers={"accept-encoding": "identity"},
    )

  async def request(
    self,
    method: str,
    url: str,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
  ) -> bytes:
    """Returns the body of an answer with status 200.

    Raises:
      CallError: there is none within the limits; names the URL.
    """
    import httpx2

    try:
      async with asyncio.timeout(self._timeout_s):
        return await self._request(method, url, body, dict(headers or {}))
    except TimeoutError as error:
      raise calls.CallError(f"{url} took over {self._timeout_s:g} s") from error
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
      text = str(error) or type(error).__name__
      raise calls.CallError(f"{url} cannot be reached: {text}") from error

  async def complete(
    self, url: str, request: Mapping[str, Any], key: str
  ) -> str:
    """Returns the text of a chat completion; "" where there is none.

    Args:
      url: of an OpenAI API.
      key: environment variable with its key, sent if it is set.

    Raises:
      CallError: there is no answer, or it is no completion; names the URL.
    """
    url = f"{url.rstrip('/')}/chat/completions"
    body = json.dumps(request).encode()
    received = await self.request("POST", url, body, authorization(key))
    try:
      said = json.loads(received)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
      raise calls.CallError(
        f"{url} answered {received[:60]!r}, which is no chat completion"
      ) from error
    return said if isinstance(said, str) else ""

  async def _request(
    self, method: str, url: str, body: bytes, headers: dict[str, str]
  ) -> bytes:
    headers = {"content-type": "application/json", **headers}
    received = bytearray()
    async with self._client.stream(
      method, url, content=body, headers=headers
    ) as answer:
      async for part in answer.aiter_raw():
        received += part
        if len(received) > MAX_ANSWER:
          raise calls.CallError(
            f"{url} answered more than {MAX_ANSWER:,} bytes"
          )
    if answer.status_code != 200:
      raise calls.CallError(
        f"{url} answered {answer.status_code}: {_error(received)}"
      )
    return bytes(received)

  async def close(self) -> None:
    """Closes all connections."""
    await self._client.aclose()


class _Function(calls.Client):
  def __init__(self, setting: Http):
    super().__init__(setting.hedge, setting.max_connections)
    self._setting = setting
    self._connections = Connections(setting.timeout_s)

  async def open(self) -> None:
    """Checks that the function computes this reward, with these settings."""
    url = self._setting.url
    headers = authorization(self._setting.key)
    text = await self._connections.request("GET", url, headers=headers)
    own = wire.identity(self._setting.reward)
    try:
      known = list(json.loads(text)["rewards"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
      raise calls.CallError(
        f"{url} answered {text[:60]!r} and is no reward server"
      ) from error
    if own not in known:
      raise calls.CallError(
        f"{url} computes {', '.join(map(str, known))}, not {own}; start it "
        "with the settings of the run"
      )

  async def send(self, request: bytes) -> list[base.Grade]:
    url = self._setting.url
    headers = authorization(self._setting.key)
    text = await self._connections.request("POST", url, request, headers)
    grades, is_cold = wire.read_grades(text, url)
    self.calls.counts.cold_starts += is_cold
    return grades

  async def close(self) -> None:
    await self._connections.close()


def _error(body: bytearray) -> str:
  """Returns the error text of a JSON answer, or the beginning of another."""
  try:
    data: Any = json.loads(body)
    return str(data["error"])[:300]
  except (ValueError, KeyError, TypeError, RecursionError):
    return repr(bytes(body[:60]))
