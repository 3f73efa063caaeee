"""A decode engine that says what it is told: to try agents and servers with."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence

import numpy as np

from rl import engine, trajectory

_ABLE = engine.Capabilities(
  in_flight=frozenset(),
  max_length=1 << 16,
  vocab_size=1 << 18,
  max_stop_ids=16,
  seeds=True,
  bias=True,
  experts=False,
)


class ScriptedEngine:
  """Answers with given ids, one after the other.

  Attributes:
    requests: all that came, in order.
    version: of the ids to come.
  """

  def __init__(
    self,
    answer: Callable[[engine.DecodeRequest], Sequence[int]],
    *,
    step_s: float = 0.0,
    capabilities: engine.Capabilities = _ABLE,
  ):
    """Takes the script.

    Args:
      answer: the ids to say; max_tokens and stop_ids end them as they would a
        real answer. The i-th has log-probability -(i + 1) / 8.
      step_s: seconds before each id.
    """
    self.capabilities = capabilities
    self.version = 0
    self.requests: list[engine.DecodeRequest] = []
    self._answer = answer
    self._step_s = step_s
    self._running: dict[str, asyncio.Event] = {}
    self._sampled = 0
    self._closed = asyncio.Event()

  async def generate(self, request: engine.DecodeRequest) -> engine.Completion:
    """Returns the answer; see `engine.DecodeEngine`."""
    async with contextlib.aclosing(self.stream(request)) as deltas:
      last = [delta.completion async for delta in deltas][-1]
    assert last is not None
    return last

  async def stream(
    self, request: engine.DecodeRequest
  ) -> AsyncGenerator[engine.Delta]:
    """Yields the answer id by id; see `engine.DecodeEngine`."""
    if self._closed.is_set():
      raise engine.EngineClosed("the scripted engine was closed")
    engine.check_request(request, self.capabilities)
    if request.request_id in self._running:
      raise ValueError(f"request {request.request_id} is already in flight")
    ended = self._running[request.request_id] = asyncio.Event()
    self.requests.append(request)
    tokens: list[int] = []
    versions: list[int] = []
    stop: trajectory.Stop | None = None
    try:
      for token in self._answer(request):
        if await self._waits(ended):
          break
        tokens.append(token)
        versions.append(self.version)
        self._sampled += 1
        if token in request.stop_ids or len(tokens) == request.max_tokens:
          stop = "stop" if token in request.stop_ids else "length"
          break
        yield _delta(tokens, versions, len(tokens) - 1)
      completion = _completion(tokens, versions, stop or "abort")
      yield _delta(tokens, versions, len(tokens) - bool(stop), completion)
    finally:
      del self._running[request.request_id]

  async def _waits(self, ended: asyncio.Event) -> bool:
    """Returns whether the request was ended before the next id."""
    with contextlib.suppress(TimeoutError):
      async with asyncio.timeout(self._step_s):
        await ended.wait()
    if self._closed.is_set():
      raise engine.EngineClosed("the scripted engine was closed")
    return ended.is_set()

  def abort(self, request_id: str | None) -> None:
    """Ends a request, or all of them, with what it has."""
    if request_id is not None and request_id not in self._running:
      raise ValueError(f"request {request_id} is not in flight")
    for name, ended in self._running.items():
      if request_id in (None, name):
        ended.set()

  def stats(self) -> engine.EngineStats:
    """Returns the counters; nothing is prefilled or cached."""
    return engine.EngineStats(
      version=self.version,
      running=len(self._running),
      waiting=0,
      sampled_tokens=self._sampled,
      prefilled_tokens=0,
    )

  async def close(self) -> None:
    """Stops; requests in flight raise EngineClosed."""
    self._closed.set()
    self.abort(None)


def _delta(
  tokens: Sequence[int],
  versions: Sequence[int],
  start: int,
  completion: engine.Completion | None = None,
) -> engine.Delta:
  every = _completion(tokens, versions, "stop")
  return engine.Delta(
    tokens=every.tokens[start:],
    logprobs=every.logprobs[start:],
    versions=every.versions[start:],
    completion=completion,
  )


def _completion(
  tokens: Sequence[int], versions: Sequence[int], stop: trajectory.Stop
) -> engine.Completion:
  return engine.Completion(
    tokens=np.array(tokens, np.int32),
    logprobs=-np.arange(1, len(tokens) + 1, dtype=np.float32) / 8,
    versions=np.array(versions, np.int32),
    stop=stop,
    cached_tokens=0,
    decode_s=0.0,
  )
