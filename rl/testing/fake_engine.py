"""A decode engine without a model or a device, to test its callers.

generate -> wait while paused or updated -> first id -> delay_s -> stop id
"""

import asyncio
import contextlib
import dataclasses
import typing
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Int32

from rl.data import trajectory
from rl.engine import contract
from rl.runtime import checksum as checksum_lib

_Hold = Literal["", "drain", "update"]


@dataclasses.dataclass(slots=True, eq=False)
class _Underway:
  """A request of the fake engine; it runs once it has a token."""

  request: contract.DecodeRequest
  accepted: float
  first_token_s: float = 0.0
  tokens: list[int] = dataclasses.field(default_factory=list)
  versions: list[int] = dataclasses.field(default_factory=list)
  cached: int = 0
  oldest_kv: int = -1
  ended: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

  def since(
    self, start: int, completion: contract.Completion | None = None
  ) -> contract.Delta:
    tokens = np.array(self.tokens[start:], np.int32)
    return contract.Delta(
      tokens=tokens,
      logprobs=np.full(len(tokens), -0.5, np.float32),
      versions=np.array(self.versions[start:], np.int32),
      completion=completion,
    )


class FakeEngine:
  """Answers with one of some words, chosen by the seed, and a stop id.

  The word is sampled as soon as the request runs, the stop id at its end.
  Earlier turns of a session count as cached until a flush or new weights. All
  times are those of the running event loop, which may be virtual.

  Args:
    answers: ids to choose from, each followed by `stop_id`.
    delay_s: seconds of one answer, by priority of the request.
    update_s: seconds for which decoding stands still when weights arrive.
    experts: (S, k) of the routes to record: expert j of layer s for id i is
      i + s + j + version; None: a model without experts.
  """

  def __init__(
    self,
    answers: Sequence[int],
    stop_id: int,
    delay_s: Callable[[tuple[int, ...]], float] = lambda priority: 0.0,
    *,
    update_s: float = 0.0,
    experts: tuple[int, int] | None = None,
  ):
    self.capabilities = contract.Capabilities(
      in_flight=frozenset(typing.get_args(contract.InFlight)),
      max_length=1 << 20,
      vocab_size=1 << 20,
      max_stop_ids=16,
      seeds=True,
      bias=False,
      experts=experts is not None,
    )
    self.version = trajectory.PolicyVersion(0)
    self.params: Any = None
    self._answers = answers
    self._stop_id = stop_id
    self._delay_s = delay_s
    self._update_s = update_s
    self._experts = experts
    self._requests: dict[str, _Underway] = {}
    self._cached: dict[str, int] = {}
    self._sampled = self._prefilled = 0
    self._closed = self._paused = False
    self._hold: _Hold = ""
    self._changed = asyncio.Event()
    self._updates = asyncio.Lock()
    self._stood_s, self._since = 0.0, 0.0

  async def generate(
    self, request: contract.DecodeRequest
  ) -> contract.Completion:
    """Returns one answer; see `contract.DecodeEngine`."""
    return await self._answer(request, lambda delta: None)

  async def stream(
    self, request: contract.DecodeRequest
  ) -> AsyncGenerator[contract.Delta]:
    """Yields the two ids of an answer one by one."""
    deltas: asyncio.Queue[contract.Delta | None] = asyncio.Queue()
    # A task, so that an unread stream does not hold up the engine.
    answer = asyncio.create_task(self._answer(request, deltas.put_nowait))
    answer.add_done_callback(lambda _: deltas.put_nowait(None))
    try:
      while (delta := await deltas.get()) is not None:
        yield delta
      await answer  # Raises its error.
    finally:
      answer.cancel()
      await asyncio.wait([answer])

  async def _answer(
    self,
    request: contract.DecodeRequest,
    emit: Callable[[contract.Delta], None],
  ) -> contract.Completion:
    self._check_open()
    contract.check_request(request, self.capabilities)
    name, this = request.request_id, _Underway(request, _now())
    if name in self._requests:
      raise ValueError(f"request {name} is already in flight")
    self._requests[name] = this
    pick = (request.seed + len(request.tokens)) % len(self._answers)
    try:
      await self._until(lambda: this.ended.is_set() or self._admits())
      if not this.ended.is_set():
        self._begin(this)
        self._sample(this, self._answers[pick])
        emit(this.since(0))
        with contextlib.suppress(TimeoutError):
          async with asyncio.timeout(self._delay_s(request.priority)):
            await this.ended.wait()
        await self._until(lambda: this.ended.is_set() or self._samples())
      start, completion = len(this.tokens), self._finish(this)
      emit(this.since(start, completion))
      return completion
    finally:
      del self._requests[name]
      self._changed.set()

  def _check_open(self) -> None:
    if self._closed:
      raise contract.EngineClosed("the fake engine was closed")

  async def _until(self, ready: Callable[[], bool]) -> None:
    """Waits for a condition; checks it again at every change."""
    self._check_open()
    while not ready():
      self._changed.clear()
      await self._changed.wait()
      self._check_open()

  def _begin(self, this: _Underway) -> None:
    count = len(this.request.tokens)
    this.oldest_kv = int(self.version)
    this.first_token_s = _now() - this.accepted
    this.cached = min(self._cached.get(this.request.session, 0), count - 1)
    self._prefilled += count - this.cached

  def _sample(self, this: _Underway, token: int) -> None:
    this.tokens.append(token)
    this.versions.append(int(self.version))
    self._sampled += 1

  def _finish(self, this: _Underway) -> contract.Completion:
    request = this.request
    stop: trajectory.Stop = "stop" if request.max_tokens > 1 else "length"
    if this.ended.is_set():
      stop = "abort"
    elif stop == "stop":
      self._sample(this, self._stop_id)
    ids = np.concatenate([request.tokens, np.array(this.tokens, np.int32)])
    if this.tokens:  # The last id is never fed.
      self._cached[request.session] = len(ids) - 1
    all_ = this.since(0)
    return contract.Completion(
      tokens=all_.tokens,
      logprobs=all_.logprobs,
      versions=all_.versions,
      stop=stop,
      cached_tokens=this.cached,
      decode_s=_now() - this.accepted,
      first_token_s=this.first_token_s,
      oldest_kv=this.oldest_kv,
      experts=self._routes(ids) if request.experts else None,
    )

  def _routes(
    self, ids: Int32[np.ndarray, " ids"]
  ) -> Int32[np.ndarray, "ids S k"]:
    layers, count = self._experts or (0, 0)
    offsets = np.arange(layers)[:, None] + np.arange(count) + int(self.version)
    routes = (ids[:, None, None] + offsets).astype(np.int32)
    routes[-1] = -1
    return routes

  def abort(self, request_id: str | None) -> None:
    """Ends a request, or all of them, with the ids so far."""
    if request_id is not None and request_id not in self._requests:
      raise ValueError(f"request {request_id} is not in flight")
    for name, this in self._requests.items():
      if request_id in (None, name):
        this.ended.set()
    self._changed.set()

  def begun(self, request_id: str) -> trajectory.PolicyVersion | None:
    """Returns the version of a first token; see `contract.DecodeEngine`."""
    if request_id not in self._requests:
      raise ValueError(f"request {request_id} is not in flight")
    versions = self._requests[request_id].versions
    return trajectory.PolicyVersion(versions[0]) if versions else None

  @property
  def _running(self) -> list[_Underway]:
    return [this for this in self._requests.values() if this.versions]

  def _admits(self) -> bool:
    return not self._paused and not self._hold

  def _samples(self) -> bool:
    return self._admits() or self._hold == "drain"

  def _turn(self, paused: bool, hold: _Hold = "") -> None:
    """Changes the hold, and adds up the time in which nothing is sampled."""
    before, now = self._samples(), _now()
    self._paused, self._hold = paused, hold
    if before and not self._samples():
      self._since = now
    elif self._samples() and not before:
      self._stood_s += now - self._since
    self._changed.set()

  async def pause(self) -> None:
    """Suspends at once; requests under way end after `resume`."""
    self._check_open()
    self._turn(True, self._hold)

  def resume(self) -> None:
    """Goes on after `pause`."""
    self._turn(False, self._hold)

  async def update_weights(
    self,
    version: trajectory.PolicyVersion,
    params: Any,
    in_flight: contract.InFlight = "recompute",
  ) -> None:
    """Serves `params` after `update_s`; see `contract.DecodeEngine`."""
    async with self._updates:
      self._check_open()
      contract.check_version(version, self.version)
      if self.params is not None:  # The first weights may have any form.
        contract.check_same_tree(self.params, params)
      able = sorted(self.capabilities.in_flight)
      if in_flight not in able:
        raise ValueError(f"in_flight={in_flight}: this engine can only {able}")
      try:
        if in_flight == "drain":
          self._turn(self._paused, "drain")
          await self._until(lambda: not self._running)
        self._turn(self._paused, "update")
        await asyncio.sleep(self._update_s)
        self._check_open()
        for this in self._running:
          if in_flight == "abort":
            this.ended.set()
          elif in_flight == "recompute":
            this.oldest_kv = int(version)
        self._cached.clear()
        self.version, self.params = version, params
      finally:
        self._turn(self._paused)

  async def checksum(self) -> tuple[trajectory.PolicyVersion, int]:
    """Returns the served version and `checksum.of` its weights."""
    self._check_open()
    return self.version, checksum_lib.of(self.params)

  async def flush_cache(self) -> None:
    """Empties the cache of earlier turns."""
    self._check_open()
    self._cached.clear()

  def stats(self) -> contract.EngineStats:
    """Returns the counters; those of dispatches and programs are 0."""
    since = 0.0 if self._samples() else _now() - self._since
    return contract.EngineStats(
      version=int(self.version),
      running=len(self._running),
      waiting=len(self._requests) - len(self._running),
      sampled_tokens=self._sampled,
      prefilled_tokens=self._prefilled,
      paused_s=self._stood_s + since,
    )

  async def close(self) -> None:
    """Stops; requests in flight raise EngineClosed."""
    self._closed = True
    for this in self._requests.values():
      this.ended.set()
    self._changed.set()


def _now() -> float:
  return asyncio.get_running_loop().time()
