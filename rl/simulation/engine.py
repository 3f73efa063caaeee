"""A decode engine without a device: answers take virtual seconds.

generate -> _submit -> Processor (decides when) -> _arm: a timer for what is due
"""

import asyncio
import functools
import math
import typing
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32

from rl.data import trajectory
from rl.engine import contract
from rl.simulation import prefill_pool
from rl.simulation import processor as simulated_processor

_LOGPROB = -0.5
_IDS = 2**31 - 1


class SimulatedEngine:
  """A `contract.DecodeEngine` whose answers are only lengths.

  Ids are 0 and log-probabilities constant. All methods belong to one event
  loop, and all times are those of its clock.

  Args:
    answer_tokens: length of an answer, cut at the request's max_tokens.
    elsewhere: encodes contexts; None: this engine does.
  """

  def __init__(
    self,
    speed: simulated_processor.Speed,
    answer_tokens: Callable[[contract.DecodeRequest], int],
    elsewhere: prefill_pool.PrefillQueue | None = None,
  ):
    self.speed = speed
    self.capabilities = contract.Capabilities(
      in_flight=frozenset(typing.get_args(contract.InFlight)),
      max_length=speed.kv_tokens,
      vocab_size=_IDS,
      max_stop_ids=16,
      seeds=True,
      bias=False,
      constraints=False,
      experts=False,
      top_logprobs=0,
    )
    self.params: Any = None
    self._answer_tokens = answer_tokens
    self._processor = simulated_processor.Processor(speed, elsewhere)
    self._jobs: dict[str, simulated_processor.Job] = {}
    self._closed = False
    self._timer: asyncio.TimerHandle | None = None
    self._timer_s = math.inf
    self._changed = asyncio.Event()
    self._updates = asyncio.Lock()

  @property
  def version(self) -> int:
    """The version of the served weights."""
    return self._processor.version

  @property
  def states(
    self,
  ) -> Sequence[tuple[float, simulated_processor.EngineActivity]]:
    """(second, state) of each change so far; the last one goes on."""
    self._advance()
    return self._processor.states

  def forget_states(self) -> None:
    """Forgets the states so far, so that memory is flat in a long run."""
    self._processor.states.clear()

  @property
  def served(self) -> float:
    """Tokens sampled so far, answers under way included."""
    return self._processor.served_by(asyncio.get_running_loop().time())

  # Requests.

  async def generate(
    self, request: contract.DecodeRequest
  ) -> contract.Completion:
    """Returns an answer at the time at which it would be sampled."""
    job = self._submit(request)
    try:
      return await job.tag
    except asyncio.CancelledError:
      if job.place != "ended":
        self._advance()
        self._end(job, "abort")
        self._go_on()
      raise

  async def stream(
    self, request: contract.DecodeRequest
  ) -> AsyncGenerator[contract.Delta]:
    """Yields the whole answer at its end."""
    yield contract.whole_delta(await self.generate(request))

  def abort(self, request_id: str | None) -> None:
    """Ends a request, or all of them, with the tokens sampled so far."""
    if request_id is not None:
      contract.find(self._jobs, request_id)
    names = list(self._jobs) if request_id is None else [request_id]
    self._advance()
    for name in names:
      self._end(self._jobs[name], "abort")
    self._go_on()

  def begun(self, request_id: str) -> int | None:
    """Returns the version of the first token of a request in flight."""
    job = contract.find(self._jobs, request_id)
    return None if job.first_s is None else job.first_version

  def expect(self, sessions: int = 0, graded: int = 0) -> None:
    """Adds to the sessions here, and to those graded: causes of idle time."""
    self._advance()
    self._processor.sessions += sessions
    self._processor.graded += graded

  def _submit(self, request: contract.DecodeRequest) -> simulated_processor.Job:
    self._check_open()
    name, ids = request.request_id, len(request.tokens)
    if name in self._jobs:
      raise ValueError(f"request {name} is already in flight")
    length = min(self._answer_tokens(request), request.max_tokens)
    if ids + length > self.speed.kv_tokens:
      raise ValueError(
        f"request {name}: {ids} tokens and an answer of {length} do not fit "
        f"kv_tokens={self.speed.kv_tokens}"
      )
    self._advance()
    job = self._jobs[name] = simulated_processor.Job(
      request=request,
      length=length,
      arrived_s=self._processor.now_s,
      tag=asyncio.get_running_loop().create_future(),
      left=float(length),
    )
    self._processor.submit(job)
    self._go_on()
    return job

  # Weights.

  async def pause(self) -> None:
    """Suspends everything at once."""
    self._check_open()
    self._advance()
    self._processor.pause(True)

  def resume(self) -> None:
    """Goes on after `pause`."""
    self._advance()
    self._processor.pause(False)
    self._go_on()

  async def update_weights(
    self,
    version: int,
    params: Any,
    in_flight: contract.InFlight = "recompute",
    on_step: Callable[[contract.SwitchStep], None] = contract.ignore_step,
  ) -> None:
    """Serves `params` after `Speed.update_s`; see `contract.DecodeEngine`."""
    async with self._updates:
      self._check_open()
      contract.check_version(version, self.version)
      try:
        if in_flight == "drain":
          self._turn("drain")
          while self._processor.running:
            self._changed.clear()
            await self._changed.wait()
            self._check_open()
        self._turn("publish")
        with contract.switching(on_step):
          await asyncio.sleep(self.speed.update_s)
          self._check_open()
          self._advance()
          self._take(version, in_flight)
          self.params = params
      finally:
        self._turn("")
        if not self._closed:
          self._go_on()

  def _turn(self, hold: simulated_processor.Hold) -> None:
    self._advance()
    self._processor.turn(hold)

  def _take(self, version: int, in_flight: contract.InFlight) -> None:
    """Applies new weights to the requests in flight."""
    begun = [job for job in self._jobs.values() if job.first_s is not None]
    for job in begun:
      self._processor.mark(job)
      if in_flight == "abort":
        self._end(job, "abort")
    self._processor.version = version
    # What is kept is for requests in flight; no later one begins with it.
    if in_flight != "keep_kv":
      jobs = [job for job in self._jobs.values() if job.place != "waiting"]
      self._processor.encode_again(jobs)
    self._processor.forget()

  async def checksum(self) -> tuple[int, int]:
    """Returns (version, version): a simulated engine has no weights."""
    self._check_open()
    return self.version, self.version

  async def flush_cache(self) -> None:
    """Empties the cache of earlier turns."""
    self._check_open()
    self._processor.forget()

  def stats(self) -> contract.EngineStats:
    """Returns the counters; `pages` are single ids of the cache."""
    self._advance()
    at = self._processor
    return contract.EngineStats(
      version=at.version,
      running=at.running,
      waiting=len(self._jobs) - at.running,
      sampled_tokens=at.sampled,
      prefilled_tokens=at.prefilled,
      cached_tokens=at.hits,
      pages=self.speed.kv_tokens,
      free_pages=max(at.free, 0),
      paused_s=at.stood_s,
    )

  async def close(self) -> None:
    """Stops; requests in flight raise EngineClosed."""
    self._advance()
    self._closed = True
    if self._timer is not None:
      self._timer.cancel()
    for job in self._jobs.values():
      job.place = "ended"
      if not job.tag.done():
        job.tag.set_exception(
          contract.EngineClosed("the simulated engine was closed")
        )
    self._jobs.clear()
    self._changed.set()

  def _check_open(self) -> None:
    if self._closed:
      raise contract.EngineClosed("the simulated engine was closed")

  # Time.

  def _advance(self) -> None:
    self._processor.advance(asyncio.get_running_loop().time())

  def _go_on(self) -> None:
    """Ends and begins requests that are due, and sets the timer."""
    while done := self._processor.settle():
      for job in done:
        cut = job.length == job.request.max_tokens
        self._end(job, "length" if cut else "stop")
    self._arm()

  def _arm(self) -> None:
    """Sets the timer to what is due next, unless it is set early enough.

    A timer that is too early finds nothing due and is set again.
    """
    when_s = self._processor.now_s + self._processor.wait_s()
    if when_s == math.inf:
      return
    if self._timer is not None:
      if self._timer_s <= when_s:
        return
      self._timer.cancel()
    loop = asyncio.get_running_loop()
    self._timer, self._timer_s = loop.call_at(when_s, self._wake), when_s

  def _wake(self) -> None:
    self._timer = None
    self._advance()
    self._go_on()

  def _end(self, job: simulated_processor.Job, stop: trajectory.Stop) -> None:
    count = self._processor.end(job)
    del self._jobs[job.request.request_id]
    if not job.tag.done():
      job.tag.set_result(self._completion(job, count, stop))
    self._changed.set()

  def _completion(
    self, job: simulated_processor.Job, count: int, stop: trajectory.Stop
  ) -> contract.Completion:
    now_s = self._processor.now_s
    first_s = now_s if job.first_s is None else job.first_s
    begun_s = now_s if job.begun_s is None else job.begun_s
    tokens, logprobs = _sampled(count)
    return contract.Completion(
      tokens=tokens,
      logprobs=logprobs,
      versions=_versions(job.spans, count, self._processor.version),
      stop=stop,
      cached_tokens=job.cached,
      decode_s=now_s - job.arrived_s,
      first_token_s=first_s - job.arrived_s if count else 0.0,
      queue_s=begun_s - job.arrived_s,
      oldest_kv=job.oldest_kv if count else -1,
    )


def _versions(
  spans: Sequence[tuple[int, int]], count: int, last: int
) -> Int32[np.ndarray, " T"]:
  """Returns the version of each token; tokens after the spans have `last`."""
  if not spans:
    return constant(last, count, np.int32)
  versions = np.full(count, last, np.int32)
  start = 0
  for version, tokens in spans:
    versions[start : start + tokens] = version
    start += tokens
  return versions


@functools.lru_cache(maxsize=1 << 16)
def _sampled(
  count: int,
) -> tuple[Int32[np.ndarray, " T"], Float32[np.ndarray, " T"]]:
  """Returns the ids and log-probabilities of an answer."""
  return constant(0, count, np.int32), constant(_LOGPROB, count, np.float32)


@functools.lru_cache(maxsize=1 << 16)
def constant(value: float, count: int, dtype: type) -> np.ndarray:
  """Returns equal numbers that all callers share, and none may change.

  One number in memory: arrays of every answer and version would fill it.
  """
  return np.broadcast_to(np.array(value, dtype), count)
