"""Who waits and who runs in the sglang-jax engine. Pure bookkeeping.

accept -> waiting --admit--> running --absorb--> answered
                                ^  |
                                +--+  moved: submitted once more
"""

import asyncio
import collections
import dataclasses
import heapq
import itertools
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from rl.data import trajectory
from rl.engine import contract
from rl.engine.sglang import scheduler_thread


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
  """What `settings.SglangSettings` come to for a model on a platform.

  Attributes:
    row_buckets, token_buckets: ascending; the last are `slots` and the most
      ids that are encoded at once.
    least_tokens: so many ids the cache must hold.
  """

  slots: int
  row_buckets: tuple[int, ...]
  token_buckets: tuple[int, ...]
  max_total_tokens: int | None
  least_tokens: int
  page_size: int
  memory_fraction: float
  patience_s: float

  def prompts(self, tokens: int, longest: int) -> list[int]:
    """Returns lengths of prompts that together fill a bucket of tokens."""
    count = min(self.slots, -(-tokens // longest))
    even, more = divmod(min(tokens, count * longest), count)
    return [even + (i < more) for i in range(count)]


@dataclasses.dataclass(slots=True, eq=False)
class Record:
  """A request, from its arrival to its end.

  Attributes:
    news: deltas, or what ended the engine.
    streams: whether it gets every delta, or only the last.
    rid: name at the scheduler, another one each time it is submitted. All are
      as long, because the scheduler aborts by prefixes.
    submissions: at the scheduler.
    told: tokens that were in deltas.
    first_token_s: seconds from its arrival to its first token; 0 before.
    oldest_kv: see `contract.Completion`.
  """

  request: contract.DecodeRequest
  news: asyncio.Queue[contract.Delta | contract.EngineClosed] = (
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
  told: int = 0
  first_token_s: float = 0.0
  cached: int = 0
  oldest_kv: int = -1
  _fresh: bool = False

  def submit(self) -> None:
    """Takes a new name at the scheduler."""
    self.rid = uuid.uuid4().hex
    self.submissions += 1
    self._fresh = True

  @property
  def first_version(self) -> trajectory.PolicyVersion | None:
    """Version of its first token, if there is one."""
    return trajectory.PolicyVersion(self.versions[0]) if self.versions else None

  @property
  def ids(self) -> list[int]:
    """The conversation so far."""
    return [*self.request.tokens.tolist(), *self.tokens]

  @property
  def left(self) -> int:
    """Tokens that may still be sampled."""
    return self.request.max_tokens - len(self.tokens)

  def add(self, output: scheduler_thread.Output) -> tuple[int, int]:
    """Takes sampled tokens; returns ids that were encoded and that were cached.

    Both are 0 but for the first output of a submission.
    """
    encoded = cached = 0
    if self._fresh and output.tokens:
      self._fresh = False
      cached = output.cached
      encoded = len(self.request.tokens) + len(self.tokens) - cached
      if self.submissions == 1:
        self.cached = cached
      # Of what the cache held it is known only that it is no older than the
      # last flush.
      sure = not cached or output.flushed == output.version
      self.oldest_kv = output.version if sure else -1
    if output.tokens and not self.tokens:
      self.first_token_s = time.monotonic() - self.started
    self.tokens += output.tokens
    self.logprobs += output.logprobs
    self.versions += [output.version] * len(output.tokens)
    return encoded, cached

  def delta(
    self, completion: contract.Completion | None = None
  ) -> contract.Delta:
    """Returns what was sampled since the delta before."""
    start, self.told = self.told, len(self.tokens)
    return contract.Delta(
      tokens=np.asarray(self.tokens[start:], np.int32),
      logprobs=np.asarray(self.logprobs[start:], np.float32),
      versions=np.asarray(self.versions[start:], np.int32),
      completion=completion,
    )

  def finish(self, stop: trajectory.Stop) -> None:
    """Delivers the answer, unless it has been."""
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
      oldest_kv=self.oldest_kv,
    )
    self.news.put_nowait(self.delta(completion))

  def fail(self, error: contract.EngineClosed) -> None:
    """Lets whoever waits raise."""
    if not self.done:
      self.done = True
      self.news.put_nowait(error)


@runtime_checkable
class Upstream(Protocol):
  """What the engine needs of sgl_jax, without importing it."""

  def start(self, bridge: scheduler_thread.Bridge) -> None:
    """Starts sglang-jax, whose scheduler the bridge then drives."""
    ...

  def request(self, record: Record, version: int) -> Any:
    """Returns the message that submits a request under served weights."""
    ...

  def abort(self, rid: str) -> Any:
    """Returns the message that aborts a request."""
    ...

  def evicting(self, count: int) -> Any:
    """Returns the argument of an eviction of so many ids."""
    ...


class Requests:
  """The requests of one engine; called from its event loop only.

  Args:
    slots: of the scheduler: more requests wait here.
    submit, abort: tell the scheduler of a record.

  Attributes:
    all: that have not ended, by name.
    running: those that are at the scheduler, by its name.
    admits: whether waiting ones may go there.
    quiet: set while none is at the scheduler.
    counts: tokens that were sampled, prefilled and cached.
  """

  def __init__(
    self,
    slots: int,
    submit: Callable[[Record], None],
    abort: Callable[[Record], None],
  ):
    self._slots = slots
    self._submit = submit
    self._abort = abort
    self._arrivals = itertools.count()
    self._waiting: list[tuple[tuple[int, ...], int, Record]] = []
    self.all: dict[str, Record] = {}
    self.running: dict[str, Record] = {}
    self.admits = True
    self.quiet = asyncio.Event()
    self.counts = collections.Counter[str]()

  def accept(self, request: contract.DecodeRequest, streams: bool) -> Record:
    """Queues a request that the engine can serve.

    Raises:
      ValueError: another one in flight has its name.
    """
    if request.request_id in self.all:
      raise ValueError(f"request {request.request_id} is already in flight")
    record = Record(request, streams=streams)
    self.all[request.request_id] = record
    place = (request.priority, next(self._arrivals), record)
    heapq.heappush(self._waiting, place)
    self.admit()
    return record

  def admit(self) -> None:
    """Submits what waits, while there are slots."""
    while self._waiting and self.admits and len(self.running) < self._slots:
      _, _, record = heapq.heappop(self._waiting)
      if not record.done:
        self.submit(record)

  def submit(self, record: Record) -> None:
    """Sends a request to the scheduler, with what it has so far."""
    record.submit()
    self.running[record.rid] = record
    self.quiet.clear()
    self._submit(record)

  def detach(self, record: Record) -> None:
    """Aborts a request at the scheduler, if it is there."""
    if self.running.pop(record.rid, None) is not None:
      self._abort(record)
    if not self.running:
      self.quiet.set()

  def absorb(self, outputs: Sequence[scheduler_thread.Output]) -> None:
    """Takes what one step sampled."""
    for output in outputs:
      record = self.running.get(output.rid)
      if record is None:  # It was aborted meanwhile.
        continue
      prefilled, cached = record.add(output)
      self.counts.update(
        sampled=len(output.tokens), prefilled=prefilled, cached=cached
      )
      if output.end is not None:
        del self.running[output.rid]
        self.end(record, output.end)
      elif record.streams:
        record.news.put_nowait(record.delta())

  def end(self, record: Record, stop: trajectory.Stop) -> None:
    """Ends a request with what it has, wherever it is."""
    if record.done:
      return
    self.detach(record)
    del self.all[record.request.request_id]
    record.finish(stop)
    self.admit()

  def fail(self, error: contract.EngineClosed) -> None:
    """Ends all requests with an error."""
    records = list(self.all.values())
    self.all.clear()
    self.running.clear()
    self._waiting.clear()
    for record in records:
      record.fail(error)
    self.quiet.set()


def of_length(
  name: str, length: int, max_tokens: int
) -> contract.DecodeRequest:
  """Returns a greedy request of so many ids."""
  return contract.DecodeRequest(
    request_id=f"compiling {name}",
    session=f"compiling {name}",
    tokens=np.zeros(length, np.int32),
    max_tokens=max_tokens,
    temperature=0.0,
  )
