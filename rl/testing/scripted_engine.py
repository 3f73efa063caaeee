"""A decode engine with given answers, without a model or a device.

generate -> wait while paused or updated -> (delay_s -> id) for each id -> end
"""

import asyncio
import contextlib
import dataclasses
import typing
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Float32, Int32

from rl.data import trajectory
from rl.engine import contract
from rl.runtime import checksum as checksum_lib

Script = Callable[[contract.DecodeRequest], Sequence[int]]
"""Returns the ids of an answer, up to where max_tokens or a stop id end it."""
_Hold = Literal["", "drain", "update"]


def one_of(words: Sequence[int], stop_id: int) -> Script:
  """Returns a script: one of some words, chosen by the seed, and a stop id."""

  def answer(request: contract.DecodeRequest) -> Sequence[int]:
    return words[(request.seed + len(request.tokens)) % len(words)], stop_id

  return answer


@dataclasses.dataclass(slots=True, eq=False)
class _Underway:
  """A request in flight; times are those of the event loop."""

  request: contract.DecodeRequest
  accepted: float
  first_token_s: float = 0.0
  queue_s: float = 0.0
  running: bool = False
  tokens: list[int] = dataclasses.field(default_factory=list)
  versions: list[int] = dataclasses.field(default_factory=list)
  cached: int = 0
  oldest_kv: int = -1
  ended: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

  def since(
    self, start: int, completion: contract.Completion | None = None
  ) -> contract.Delta:
    count = len(self.tokens)
    tokens = np.array(self.tokens[start:], np.int32)
    logprobs = -np.arange(start + 1, count + 1, dtype=np.float32) / 8
    return contract.Delta(
      tokens=tokens,
      logprobs=logprobs,
      versions=np.array(self.versions[start:], np.int32),
      top=_top(tokens, logprobs, self.request.top_logprobs),
      completion=completion,
    )


class ScriptedEngine:
  """Answers with given ids, one after the other.

  The i-th id of an answer has log-probability -(i + 1) / 8; one that its
  script leaves open ends as if it were aborted. Listed beside an id are this
  id, the one below it with a log-probability of 1 less, and so on; those below
  0 are 0 with -inf. Earlier turns of a session count as cached until a flush or
  new weights. It is a `SessionRouter` too.

  Attributes:
    requests: all so far, in order.
    version: of the next ids.
  """

  def __init__(
    self,
    answer: Script,
    delay_s: Callable[[contract.DecodeRequest, int], float] = lambda *_: 0.0,
    *,
    start_s: float = 0.0,
    update_s: float = 0.0,
    experts: tuple[int, int] | None = None,
  ):
    """Takes the script; all times are in seconds of the running event loop.

    Args:
      delay_s: before the i-th id of a request.
      start_s: that `start` takes; without it, an engine serves version 0.
      update_s: for which decoding stands still when weights arrive.
      experts: (S, k) of the routes to record: expert j of layer s for id i is
        i + s + j + version; None: a model without experts.
    """
    self.capabilities = contract.Capabilities(
      in_flight=frozenset(typing.get_args(contract.InFlight)),
      max_length=1 << 16,
      vocab_size=1 << 18,
      max_stop_ids=16,
      seeds=True,
      bias=True,
      constraints=False,
      experts=experts is not None,
      top_logprobs=20,
    )
    self.requests: list[contract.DecodeRequest] = []
    self.version = 0
    self.params: Any = None
    self._script = answer
    self._delay_s = delay_s
    self._start_s, self._update_s = start_s, update_s
    self._experts = experts
    self._underway: dict[str, _Underway] = {}
    self._cached: dict[str, int] = {}
    self._sampled = self._prefilled = 0
    self._closed = self._paused = False
    self._hold: _Hold = ""
    self._changed = asyncio.Event()
    self._updates = asyncio.Lock()
    self._stood_s, self._since = 0.0, 0.0

  async def start(
    self,
    params: Any,
    version: int,
    report: Callable[[str], None] = lambda text: None,
  ) -> None:
    """Takes the first weights; see `contract.StartableEngine`."""
    await asyncio.sleep(self._start_s)
    self.params, self.version = params, version

  # Requests.

  async def generate(
    self, request: contract.DecodeRequest
  ) -> contract.Completion:
    """Returns one answer; see `contract.DecodeEngine`."""
    return await self._answer(request, lambda delta: None)

  async def stream(
    self, request: contract.DecodeRequest
  ) -> AsyncGenerator[contract.Delta]:
    """Yields an answer id by id; see `contract.DecodeEngine`."""
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
    if name in self._underway:
      raise ValueError(f"request {name} is already in flight")
    self._underway[name] = this
    self.requests.append(request)
    stop: trajectory.Stop = "abort"
    try:
      for i, token in enumerate(self._script(request)):
        if not await self._comes(this, i):
          break
        self._sample(this, token)
        if token in request.stop_ids or i + 1 == request.max_tokens:
          stop = "stop" if token in request.stop_ids else "length"
          break
        emit(this.since(i))
      completion = self._completion(this, stop)
      told = len(this.tokens) - (stop != "abort")
      emit(this.since(told, completion))
      return completion
    finally:
      del self._underway[name]
      self._changed.set()

  def _check_open(self) -> None:
    if self._closed:
      raise contract.EngineClosed("the scripted engine was closed")

  async def _until(self, ready: Callable[[], bool]) -> None:
    """Waits for a condition; checks it again at every change."""
    self._check_open()
    while not ready():
      self._changed.clear()
      await self._changed.wait()
      self._check_open()

  async def _comes(self, this: _Underway, i: int) -> bool:
    """Waits for the time of the i-th id; returns False if it was aborted."""
    if not this.running:
      await self._until(lambda: this.ended.is_set() or self._admits())
      if this.ended.is_set():
        return False
      self._begin(this)
    delay_s = self._delay_s(this.request, i)
    if i or delay_s:  # Without a delay the first id comes at once.
      with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(delay_s):
          await this.ended.wait()
    await self._until(lambda: this.ended.is_set() or self._samples())
    return not this.ended.is_set()

  def _begin(self, this: _Underway) -> None:
    count = len(this.request.tokens)
    this.running, this.oldest_kv = True, self.version
    this.queue_s = _now() - this.accepted
    this.cached = min(self._cached.get(this.request.session, 0), count - 1)
    self._prefilled += count - this.cached

  def _sample(self, this: _Underway, token: int) -> None:
    if not this.tokens:
      this.first_token_s = _now() - this.accepted
    this.tokens.append(token)
    this.versions.append(self.version)
    self._sampled += 1

  def _completion(
    self, this: _Underway, stop: trajectory.Stop
  ) -> contract.Completion:
    request, whole = this.request, this.since(0)
    ids = np.concatenate([request.tokens, whole.tokens])
    if this.tokens:  # The last id is never fed.
      self._cached[request.session] = len(ids) - 1
    return contract.Completion(
      tokens=whole.tokens,
      logprobs=whole.logprobs,
      versions=whole.versions,
      stop=stop,
      cached_tokens=this.cached,
      decode_s=_now() - this.accepted,
      first_token_s=this.first_token_s,
      queue_s=this.queue_s,
      oldest_kv=this.oldest_kv,
      experts=self._routes(ids) if request.experts else None,
      top=whole.top,
    )

  def _routes(
    self, ids: Int32[np.ndarray, " ids"]
  ) -> Int32[np.ndarray, "ids S k"]:
    layers, count = self._experts or (0, 0)
    offsets = np.arange(layers)[:, None] + np.arange(count) + self.version
    routes = (ids[:, None, None] + offsets).astype(np.int32)
    routes[-1] = -1
    return routes

  def abort(self, request_id: str | None) -> None:
    """Ends a request, or all of them, with the ids so far."""
    if request_id is None:
      for this in self._underway.values():
        this.ended.set()
    else:
      contract.find(self._underway, request_id).ended.set()
    self._changed.set()

  def begun(self, request_id: str) -> int | None:
    """Returns the version of a first token; see `contract.DecodeEngine`."""
    versions = contract.find(self._underway, request_id).versions
    return versions[0] if versions else None

  # Sessions.

  async def begin(
    self, session: str, domain: str, engine: int = -1, group: str = ""
  ) -> int:
    """Returns 0, the number of the only engine."""
    return 0

  def serves(self, number: int) -> int:
    """Returns the version of the ids to come."""
    return self.version

  def end(self, session: str) -> None:
    """Does nothing: what a session has said stays cached."""

  # Weights.

  @property
  def _running(self) -> list[_Underway]:
    return [this for this in self._underway.values() if this.running]

  def _admits(self) -> bool:
    return not self._paused and not self._hold

  def _samples(self) -> bool:
    return self._admits() or self._hold == "drain"

  def _turn(self, paused: bool, hold: _Hold) -> None:
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
    version: int,
    params: Any,
    in_flight: contract.InFlight = "recompute",
    on_step: Callable[[contract.SwitchStep], None] = contract.ignore_step,
  ) -> None:
    """Serves `params` after `update_s`; see `contract.DecodeEngine`."""
    async with self._updates:
      self._check_open()
      contract.check_version(version, self.version)
      if self.params is not None:  # The first weights may have any form.
        contract.check_same_tree(self.params, params)
      contract.check_in_flight(in_flight, self.capabilities)
      try:
        if in_flight == "drain":
          self._turn(self._paused, "drain")
          await self._until(lambda: not self._running)
        self._turn(self._paused, "update")
        with contract.switching(on_step):
          await asyncio.sleep(self._update_s)
          self._check_open()
          for this in self._running:
            if in_flight == "abort":
              this.ended.set()
            elif in_flight == "recompute":
              this.oldest_kv = version
          self._cached.clear()
          self.version, self.params = version, params
      finally:
        self._turn(self._paused, "")

  async def checksum(self) -> tuple[int, int]:
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
      version=self.version,
      running=len(self._running),
      waiting=len(self._underway) - len(self._running),
      sampled_tokens=self._sampled,
      prefilled_tokens=self._prefilled,
      paused_s=self._stood_s + since,
    )

  async def close(self) -> None:
    """Stops; requests in flight raise EngineClosed."""
    self._closed = True
    self.abort(None)


class UnstartableEngine(ScriptedEngine):
  """A scripted engine whose start raises RuntimeError."""

  async def start(
    self,
    params: Any,
    version: int,
    report: Callable[[str], None] = lambda text: None,
  ) -> None:
    """Raises, as an engine without memory does."""
    raise RuntimeError("no memory")


class HangingEngine(ScriptedEngine):
  """A scripted engine whose start never ends."""

  async def start(
    self,
    params: Any,
    version: int,
    report: Callable[[str], None] = lambda text: None,
  ) -> None:
    """Waits until it is cancelled."""
    await asyncio.get_running_loop().create_future()


def _top(
  tokens: Int32[np.ndarray, " t"],
  logprobs: Float32[np.ndarray, " t"],
  count: int,
) -> contract.TopLogprobs | None:
  if not count:
    return None
  ranks = np.arange(count, dtype=np.int32)
  ids, below = tokens[:, None] - ranks, logprobs[:, None] - ranks
  return contract.TopLogprobs(
    ids=np.maximum(ids, 0),
    logprobs=np.where(ids < 0, -np.inf, below).astype(np.float32),
  )


def _now() -> float:
  return asyncio.get_running_loop().time()
