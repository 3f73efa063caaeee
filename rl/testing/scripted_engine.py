"""A session router with given answers, for tests of agents and servers."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Callable, Sequence

import numpy as np

from rl.data import trajectory
from rl.engine import contract

_ABLE = contract.Capabilities(
  in_flight=frozenset(),
  max_length=1 << 16,
  vocab_size=1 << 18,
  max_stop_ids=16,
  seeds=True,
  bias=True,
  experts=False,
)


@dataclasses.dataclass(slots=True, eq=False)
class _Underway:
  """A request in flight; times are those of the event loop."""

  accepted: float
  ended: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
  tokens: list[int] = dataclasses.field(default_factory=list)
  versions: list[int] = dataclasses.field(default_factory=list)
  first_token_s: float = 0.0

  def say(self, token: int, version: int, now: float) -> None:
    if not self.tokens:
      self.first_token_s = now - self.accepted
    self.tokens.append(token)
    self.versions.append(version)

  def completion(
    self, stop: trajectory.Stop, now: float
  ) -> contract.Completion:
    count = len(self.tokens)
    return contract.Completion(
      tokens=np.array(self.tokens, np.int32),
      logprobs=-np.arange(1, count + 1, dtype=np.float32) / 8,
      versions=np.array(self.versions, np.int32),
      stop=stop,
      cached_tokens=0,
      decode_s=now - self.accepted,
      first_token_s=self.first_token_s,
    )


class ScriptedEngine:
  """Answers with given ids, one after the other.

  Attributes:
    requests: all so far, in order.
    version: of the next ids.
  """

  def __init__(
    self,
    answer: Callable[[contract.DecodeRequest], Sequence[int]],
    *,
    step_s: float = 0.0,
    capabilities: contract.Capabilities = _ABLE,
  ):
    """Takes the script.

    Args:
      answer: returns the ids of an answer; max_tokens and stop_ids end it as
        they end a real one. The i-th has log-probability -(i + 1) / 8.
      step_s: seconds before each id.
    """
    self.capabilities = capabilities
    self.version = 0
    self.requests: list[contract.DecodeRequest] = []
    self._answer = answer
    self._step_s = step_s
    self._running: dict[str, _Underway] = {}
    self._sampled = 0
    self._closed = asyncio.Event()

  async def generate(
    self, request: contract.DecodeRequest
  ) -> contract.Completion:
    """Returns the answer; see `contract.DecodeEngine`."""
    async with contextlib.aclosing(self.stream(request)) as deltas:
      last = [delta.completion async for delta in deltas][-1]
    assert last is not None
    return last

  async def stream(
    self, request: contract.DecodeRequest
  ) -> AsyncGenerator[contract.Delta]:
    """Yields the answer id by id; see `contract.DecodeEngine`."""
    if self._closed.is_set():
      raise contract.EngineClosed("the scripted engine was closed")
    contract.check_request(request, self.capabilities)
    if request.request_id in self._running:
      raise ValueError(f"request {request.request_id} is already in flight")
    time = asyncio.get_running_loop().time
    this = self._running[request.request_id] = _Underway(time())
    self.requests.append(request)
    stop: trajectory.Stop | None = None
    try:
      for token in self._answer(request):
        if await self._waits(this.ended):
          break
        this.say(token, self.version, time())
        self._sampled += 1
        if token in request.stop_ids or len(this.tokens) == request.max_tokens:
          stop = "stop" if token in request.stop_ids else "length"
          break
        yield _last(this.completion("stop", time()), 1)
      completion = this.completion(stop or "abort", time())
      yield _last(completion, int(stop is not None), completion)
    finally:
      del self._running[request.request_id]

  async def _waits(self, ended: asyncio.Event) -> bool:
    """Waits for the time of an id; returns True if the request ended before."""
    with contextlib.suppress(TimeoutError):
      async with asyncio.timeout(self._step_s):
        await ended.wait()
    if self._closed.is_set():
      raise contract.EngineClosed("the scripted engine was closed")
    return ended.is_set()

  def abort(self, request_id: str | None) -> None:
    """Ends a request, or all of them, with the ids so far."""
    if request_id is not None and request_id not in self._running:
      raise ValueError(f"request {request_id} is not in flight")
    for name, this in self._running.items():
      if request_id in (None, name):
        this.ended.set()

  def begun(self, request_id: str) -> trajectory.PolicyVersion | None:
    """Returns the version of a first token; see `contract.DecodeEngine`."""
    if request_id not in self._running:
      raise ValueError(f"request {request_id} is not in flight")
    versions = self._running[request_id].versions
    return trajectory.PolicyVersion(versions[0]) if versions else None

  async def begin(self, session: str, domain: str) -> int:
    """Returns 0, the number of the only engine."""
    return 0

  def serves(self, number: int) -> int:
    """Returns the version of the ids to come."""
    return self.version

  def end(self, session: str) -> None:
    """Does nothing: sessions hold no state here."""

  def stats(self) -> contract.EngineStats:
    """Returns the counters; those of prefill and cache are 0."""
    return contract.EngineStats(
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


def _last(
  so_far: contract.Completion,
  count: int,
  completion: contract.Completion | None = None,
) -> contract.Delta:
  """Returns the last tokens of an answer, none or one, as a delta."""
  start = len(so_far.tokens) - count
  return contract.Delta(
    tokens=so_far.tokens[start:],
    logprobs=so_far.logprobs[start:],
    versions=so_far.versions[start:],
    completion=completion,
  )
