"""The requests of the sglang-jax engine. Pure bookkeeping.

accept -> waiting --admit--> running --apply_outputs--> finish
                                ^  |
                                +--+  detach, submit: new weights
"""

import asyncio
import collections
import dataclasses
import heapq
import itertools
import time
import uuid
from collections.abc import Callable, Sequence

import numpy as np

from rl.data import trajectory
from rl.engine import contract
from rl.engine.sglang import scheduler_thread


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
  """`settings.SglangSettings` resolved for a model on a platform.

  Attributes:
    row_buckets, token_buckets: ascending; the last are `slots`, and the largest
      number of ids encoded at once.
    min_tokens: ids that the cache must hold.
  """

  slots: int
  row_buckets: tuple[int, ...]
  token_buckets: tuple[int, ...]
  max_total_tokens: int | None
  min_tokens: int
  page_size: int
  memory_fraction: float
  patience_s: float

  def prompts(self, tokens: int, longest: int) -> list[int]:
    """Returns lengths of prompts that together fill a bucket of tokens."""
    count = min(self.slots, -(-tokens // longest))
    even, more = divmod(min(tokens, count * longest), count)
    return [even + (i < more) for i in range(count)]


@dataclasses.dataclass(slots=True, eq=False)
class TrackedRequest:
  """A request, from its arrival to its end.

  Attributes:
    deltas: queue that its caller reads; an error ends it.
    streams: it gets every delta, not only the last.
    rid: name at the scheduler, a new one for each submission. All have one
      length, because the scheduler aborts by prefixes.
    submissions: to the scheduler, so far.
    num_emitted: tokens that were in deltas.
    first_token_s: seconds from its arrival to its first token; 0 before.
    queue_s: seconds from its arrival to its first submission; 0 before.
    oldest_kv: see `contract.Completion`.
  """

  request: contract.DecodeRequest
  deltas: asyncio.Queue[contract.Delta | contract.EngineClosed] = (
    dataclasses.field(default_factory=asyncio.Queue)
  )
  streams: bool = False
  done: bool = False
  rid: str = ""
  submissions: int = 0
  started: float = dataclasses.field(default_factory=time.monotonic)
  tokens: list[int] = dataclasses.field(default_factory=list)
  logprobs: list[float] = dataclasses.field(default_factory=list)
  versions: list[int] = dataclasses.field(default_factory=list)
  num_emitted: int = 0
  first_token_s: float = 0.0
  queue_s: float = 0.0
  cached: int = 0
  oldest_kv: int = -1
  _fresh: bool = False

  def submit(self) -> None:
    """Takes a new name for the scheduler."""
    if not self.submissions:
      self.queue_s = time.monotonic() - self.started
    self.rid = uuid.uuid4().hex
    self.submissions += 1
    self._fresh = True

  @property
  def first_version(self) -> int | None:
    """Version of its first token, if there is one."""
    return self.versions[0] if self.versions else None

  @property
  def ids(self) -> list[int]:
    """The conversation so far."""
    return [*self.request.tokens.tolist(), *self.tokens]

  @property
  def remaining(self) -> int:
    """Tokens that may still be sampled."""
    return self.request.max_tokens - len(self.tokens)

  def add(self, output: scheduler_thread.Output) -> tuple[int, int]:
    """Appends sampled tokens; returns the numbers of ids encoded and cached.

    Both are 0 except for the first output of a submission.
    """
    encoded = cached = 0
    if self._fresh and output.tokens:
      self._fresh = False
      cached = output.cached
      encoded = len(self.request.tokens) + len(self.tokens) - cached
      if self.submissions == 1:
        self.cached = cached
      # Cached keys and values are at least as new as the last flush.
      known = not cached or output.flushed == output.version
      self.oldest_kv = output.version if known else -1
    if output.tokens and not self.tokens:
      self.first_token_s = time.monotonic() - self.started
    self.tokens += output.tokens
    self.logprobs += output.logprobs
    self.versions += [output.version] * len(output.tokens)
    return encoded, cached

  def delta(
    self, completion: contract.Completion | None = None
  ) -> contract.Delta:
    """Returns the tokens since the last delta."""
    start, self.num_emitted = self.num_emitted, len(self.tokens)
    return contract.Delta(
      tokens=np.asarray(self.tokens[start:], np.int32),
      logprobs=np.asarray(self.logprobs[start:], np.float32),
      versions=np.asarray(self.versions[start:], np.int32),
      completion=completion,
    )

  def finish(self, stop: trajectory.Stop) -> None:
    """Delivers the answer, once."""
    if self.done:
      return
    self.done = True
    completion = contract.Completion(
      tokens=np.asarray(self.tokens, np.int32),
      logprobs=np.asarray(self.logprobs, np.float32),
      versions=np.asarray(self.versions, np.int32),
      stop=stop,
      cached_tokens=self.cached,
      decode_s=time.monotonic() - self.started,
      first_token_s=self.first_token_s,
      queue_s=self.queue_s,
      oldest_kv=self.oldest_kv,
    )
    self.deltas.put_nowait(self.delta(completion))

  def fail(self, error: contract.EngineClosed) -> None:
    """Makes the caller raise."""
    if not self.done:
      self.done = True
      self.deltas.put_nowait(error)


class Requests:
  """The requests of one engine; called from its event loop only.

  Args:
    slots: of the scheduler: more requests wait here.
    submit, abort: send a request to the scheduler, or abort it there.

  Attributes:
    all: requests that have not ended, by name.
    running: requests at the scheduler, by its names.
    admits: waiting requests may go there.
    idle: set while none is at the scheduler.
    counts: tokens that were sampled, prefilled and cached.
  """

  def __init__(
    self,
    slots: int,
    submit: Callable[[TrackedRequest], None],
    abort: Callable[[TrackedRequest], None],
  ):
    self._slots = slots
    self._submit = submit
    self._abort = abort
    self._arrivals = itertools.count()
    self._waiting: list[tuple[tuple[int, ...], int, TrackedRequest]] = []
    self.all: dict[str, TrackedRequest] = {}
    self.running: dict[str, TrackedRequest] = {}
    self.admits = True
    self.idle = asyncio.Event()
    self.counts = collections.Counter[str]()

  def accept(
    self, request: contract.DecodeRequest, streams: bool
  ) -> TrackedRequest:
    """Queues a request that the engine can serve.

    Raises:
      ValueError: another one in flight has its name.
    """
    if request.request_id in self.all:
      raise ValueError(f"request {request.request_id} is already in flight")
    tracked = TrackedRequest(request, streams=streams)
    self.all[request.request_id] = tracked
    place = (request.priority, next(self._arrivals), tracked)
    heapq.heappush(self._waiting, place)
    self.admit()
    return tracked

  def admit(self) -> None:
    """Submits waiting requests while there are slots."""
    while self._waiting and self.admits and len(self.running) < self._slots:
      _, _, tracked = heapq.heappop(self._waiting)
      if not tracked.done:
        self.submit(tracked)

  def submit(self, tracked: TrackedRequest) -> None:
    """Sends a request to the scheduler, with its tokens so far."""
    tracked.submit()
    self.running[tracked.rid] = tracked
    self.idle.clear()
    self._submit(tracked)

  def detach(self, tracked: TrackedRequest) -> None:
    """Aborts a request at the scheduler, if it is there."""
    if self.running.pop(tracked.rid, None) is not None:
      self._abort(tracked)
    if not self.running:
      self.idle.set()

  def apply_outputs(self, outputs: Sequence[scheduler_thread.Output]) -> None:
    """Gives each request the tokens of one step."""
    for output in outputs:
      tracked = self.running.get(output.rid)
      if tracked is None:  # It was aborted meanwhile.
        continue
      prefilled, cached = tracked.add(output)
      self.counts.update(
        sampled=len(output.tokens), prefilled=prefilled, cached=cached
      )
      if output.end is not None:
        del self.running[output.rid]
        self.end(tracked, output.end)
      elif tracked.streams:
        tracked.deltas.put_nowait(tracked.delta())

  def end(self, tracked: TrackedRequest, stop: trajectory.Stop) -> None:
    """Ends a request with its tokens so far, waiting or running."""
    if tracked.done:
      return
    self.detach(tracked)
    del self.all[tracked.request.request_id]
    tracked.finish(stop)
    self.admit()

  def fail(self, error: contract.EngineClosed) -> None:
    """Ends all requests with an error."""
    tracked_requests = list(self.all.values())
    self.all.clear()
    self.running.clear()
    self._waiting.clear()
    for tracked in tracked_requests:
      tracked.fail(error)
    self.idle.set()


def of_length(
  name: str, length: int, max_tokens: int
) -> contract.DecodeRequest:
  """Returns a greedy request with a prompt of so many ids."""
  return contract.DecodeRequest(
    request_id=f"compiling {name}",
    session=f"compiling {name}",
    tokens=np.zeros(length, np.int32),
    max_tokens=max_tokens,
    temperature=0.0,
  )
