"""The requests of one engine: waiting, admitted, preempted, finished.

accept -> waiting --admit--> running --finish--> completion
             ^                  |
             +-----preempt------+   pages ran out: others go first

Pure bookkeeping: page copies, biases and histories go to the device through
`take_uploads`, and tokens come back through `apply_results`.
"""

import asyncio
import collections
import heapq
import itertools
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int32

from models import config as model_config
from rl.data import trajectory
from rl.engine import contract
from rl.engine.builtin import (
  block_manager,
  decode_step,
  dispatch_plan,
  dispatch_shapes,
  recorded_experts,
)
from rl.engine.builtin import request as request_lib


class Uploads(NamedTuple):
  """The data that the device gets before a dispatch.

  Attributes:
    copies: (source, target) pages.
    biases: (row of the table, bias).
    histories: (slot, its ids that were in the cache), for drafts.
  """

  copies: Sequence[tuple[int, int]]
  biases: Sequence[tuple[int, Float32[np.ndarray, " V"]]]
  histories: Sequence[tuple[int, Int32[np.ndarray, " n"]]]


class BiasTable:
  """Users of the rows of the bias table; row 0 stands for none.

  Requests of one bias share its row. One with a constraint has a row of its
  own, in which each of its dispatches puts a mask.

  Attributes:
    uploads: (row, bias) that the device has not been given yet.
  """

  def __init__(self, rows: int):
    self._free = list(range(rows, 0, -1))
    self._row: dict[bytes, int] = {}
    self._own: set[int] = set()
    self._users = collections.Counter[int]()
    self.uploads: list[tuple[int, Float32[np.ndarray, " V"]]] = []

  def acquire(self, bias: Float32[np.ndarray, " V"] | None) -> int | None:
    """Returns the row of a bias, or None when all are in use."""
    if bias is None:
      return 0
    key = bias.tobytes()
    if key not in self._row:
      row = self._unused_row()
      if row is None:
        return None
      self._row[key] = row
      self.uploads.append((row, np.asarray(bias, np.float32)))
    self._users[self._row[key]] += 1
    return self._row[key]

  def acquire_own(self) -> int | None:
    """Returns a row for one request alone, or None when all are in use."""
    row = self._unused_row()
    if row is not None:
      self._own.add(row)
      self._users[row] += 1
    return row

  def release(self, row: int) -> None:
    """Ends one use of a row."""
    if row:
      self._users[row] -= 1
    if row in self._own:
      self._own.remove(row)
      self._free.append(row)

  def _unused_row(self) -> int | None:
    if self._free:
      return self._free.pop()
    idle = (bias for bias, row in self._row.items() if not self._users[row])
    old = next(idle, None)
    return None if old is None else self._row.pop(old)


class RequestQueue:
  """The requests of one engine; called from its event loop only.

  Args:
    shapes: slots, and pages of the cache.
    min_copied_ids: see `block_manager.BlockManager`.
    bias_slots: different biases in use at once.
    record_experts: keep the experts of every cached position.
    drafts: the device needs to know the ids of each slot.

  Attributes:
    requests: all that have not ended, by name.
    running: the requests that hold a slot.
    blocks: pages of the cache.
    biases: of the running ones.
    preemptions: so far.
    counts: tokens that were sampled, prefilled and cached.
  """

  def __init__(
    self,
    config: model_config.ModelConfig,
    shapes: dispatch_shapes.DispatchShapes,
    *,
    min_copied_ids: int,
    bias_slots: int,
    record_experts: bool = False,
    drafts: bool = False,
  ):
    self._shapes = shapes
    self._drafts = drafts
    num_pages = shapes.num_pages(config.max_length)
    self.blocks = block_manager.BlockManager(
      num_pages, shapes.page_size, min_copied_ids
    )
    self.requests: dict[str, request_lib.RequestState] = {}
    self.running: list[request_lib.RequestState] = []
    self.biases = BiasTable(bias_slots)
    self.preemptions = 0
    self.counts = collections.Counter[str]()
    self._copies: list[tuple[int, int]] = []
    self._histories: list[tuple[int, Int32[np.ndarray, " n"]]] = []
    self._free_slots = list(range(shapes.slots - 1, -1, -1))
    self._waiting: list[tuple[tuple, request_lib.RequestState]] = []
    self._arrivals = itertools.count()
    # When each idle session ended its last turn, the oldest first.
    self._idle_since: collections.OrderedDict[str, float] = (
      collections.OrderedDict()
    )
    self._experts = (
      recorded_experts.RecordedExperts(config, num_pages, shapes.page_size)
      if record_experts
      else None
    )

  # Arrivals and ends.

  def accept(
    self,
    request: contract.DecodeRequest,
    future: asyncio.Future[contract.Completion],
  ) -> request_lib.RequestState:
    """Queues a request that an engine of this size can serve.

    Raises:
      ValueError: another one in flight has its name.
    """
    if request.request_id in self.requests:
      raise ValueError(f"request {request.request_id} is already in flight")
    given = len(request.tokens)
    ids = np.empty(given + request.max_tokens, np.int32)
    ids[:given] = request.tokens
    order = (request.priority, next(self._arrivals))
    state = request_lib.RequestState(request, future, order, ids, given)
    self.requests[request.request_id] = state
    self._idle_since.pop(request.session, None)
    heapq.heappush(self._waiting, (order, state))
    return state

  def finish(
    self, state: request_lib.RequestState, stop: trajectory.Stop
  ) -> None:
    """Ends a request with the tokens that it has, and frees what it holds."""
    completion = self._completion(state, stop)
    self._forget(state)
    if not state.future.done():
      state.future.set_result(completion)
    state.emit_delta(completion)

  def _forget(self, state: request_lib.RequestState) -> None:
    del self.requests[state.request.request_id]
    self._release(state)
    if self.requests:  # A lone request never waits for a session that was.
      self._idle_since[state.request.session] = request_lib.now_s()
    if len(self._waiting) > 2 * self.num_waiting + self._shapes.slots:
      # Requests that ended while they waited would pile up.
      self._waiting = [x for x in self._waiting if not x[1].future.done()]
      heapq.heapify(self._waiting)

  def _completion(
    self, state: request_lib.RequestState, stop: trajectory.Stop
  ) -> contract.Completion:
    experts = None
    if state.request.experts and self._experts is not None:
      experts = self._experts.of_conversation(state)
    return contract.Completion(
      tokens=state.ids[len(state.request.tokens) : state.known].copy(),
      logprobs=np.asarray(state.logprobs, np.float32),
      versions=np.asarray(state.versions, np.int32),
      stop=stop,
      cached_tokens=state.cached_tokens or 0,
      decode_s=request_lib.now_s() - state.started,
      first_token_s=state.first_token_s,
      queue_s=state.queue_s,
      oldest_kv=state.oldest_kv,
      experts=experts,
      top=state.top and state.top.span(0, state.num_sampled),
    )

  def clear(self) -> list[request_lib.RequestState]:
    """Forgets every request and returns them; frees nothing."""
    ended = list(self.requests.values())
    self.requests.clear()
    self.running.clear()
    self._waiting.clear()
    return ended

  def num_returning(self, within_s: float) -> int:
    """Returns the number of sessions that ended a turn in the last seconds."""
    limit = request_lib.now_s() - within_s
    while self._idle_since and next(iter(self._idle_since.values())) < limit:
      self._idle_since.popitem(last=False)
    return len(self._idle_since)

  @property
  def num_waiting(self) -> int:
    """Requests that hold nothing."""
    return len(self.requests) - len(self.running)

  # Admission.

  @property
  def any_started(self) -> bool:
    """True if a request runs, or did before it gave up its pages."""
    return any(state.has_started for state in self.requests.values())

  def admit(self, started_only: bool = False) -> None:
    """Admits waiting requests while slots, bias rows and pages last.

    A request whose prefix another is just encoding waits until it is cached.

    Args:
      started_only: leaves requests waiting that have not run yet.
    """
    later, bias_rows_left = [], True
    encoding: set[tuple[int, bytes]] = set()
    if self._waiting:
      encoding.update(*map(self._page_being_encoded, self.running))
    while self._waiting and self._free_slots:
      order, state = self._waiting[0]
      if state.future.done():
        heapq.heappop(self._waiting)
        continue
      needs_row = state.request.bias is not None or state.matcher is not None
      stays = started_only and not state.has_started
      stays = stays or any(
        size < state.known and state.ids[:size].tobytes() == ids
        for size, ids in encoding
      )
      if stays or (needs_row and not bias_rows_left):
        later.append((order, state))
      elif (bias_row := self._bias_row(state)) is None:
        later.append((order, state))
        bias_rows_left = False
      elif not self._start(state, bias_row):
        break
      else:
        encoding |= self._page_being_encoded(state)
      heapq.heappop(self._waiting)
    for entry in later:
      heapq.heappush(self._waiting, entry)

  def _bias_row(self, state: request_lib.RequestState) -> int | None:
    if state.matcher is not None:
      return self.biases.acquire_own()
    return self.biases.acquire(state.request.bias)

  def _start(self, state: request_lib.RequestState, bias_row: int) -> bool:
    table, copy = self.blocks.begin(state.ids[: state.known])
    pages = self._shapes.width(state.known + 1) - len(table.pages)
    # Each running request may soon need one more.
    room = self.blocks.num_free + self.blocks.num_idle - len(self.running)
    if self.running and pages > room:
      self.blocks.cancel(table)
      self.biases.release(bias_row)
      return False
    if copy is not None:
      self._copies.append(copy)
      if self._experts is not None:
        self._experts.copy(*copy)
    state.slot, state.page_table = self._free_slots.pop(), table
    state.bias_row = bias_row
    if self._experts is not None:
      self._experts.begin(state)
    if self._drafts and table.cached:
      known = state.ids[: table.cached].copy()
      self._histories.append((state.slot, known))
    if state.cached_tokens is None:
      state.cached_tokens = table.cached
      state.queue_s = request_lib.now_s() - state.started
      self.counts["cached"] += table.cached
    state.sync_counters()
    self.running.append(state)
    return True

  def _page_being_encoded(
    self, state: request_lib.RequestState
  ) -> set[tuple[int, bytes]]:
    """Returns (length, ids) of the context that a request will share next.

    It ends with the request's next page. The set is empty if the context has
    been shared, or never will be, or has no whole page left.
    """
    table, page = state.page_table, self._shapes.page_size
    assert table is not None
    size = table.cached // page * page + page
    shares = self.blocks.shares(table) and not state.prefix_shared
    if not shares or state.known < size:
      return set()
    return {(size, state.ids[:size].tobytes())}

  def ensure_pages(
    self,
    state: request_lib.RequestState,
    length: int,
    kept: Collection[request_lib.RequestState],
  ) -> bool:
    """Gives a request pages for so many positions; False if there are too few.

    Preempts requests of later order that are not in flight, the last first.

    Args:
      kept: requests that are not preempted.
    """
    assert state.page_table is not None
    while not self.blocks.grow(state.page_table, length):
      victims = [
        other
        for other in self.running
        if not other.in_flight
        and other.order > state.order
        and other not in kept
      ]
      if not victims:
        return False
      self.preempt(max(victims, key=request_lib.by_order))
      self.preemptions += 1
    return True

  def preempt(self, state: request_lib.RequestState) -> None:
    """Makes a running request wait again; it keeps its tokens."""
    self._release(state)
    heapq.heappush(self._waiting, (state.order, state))

  def _release(self, state: request_lib.RequestState) -> None:
    """Frees what a request holds, if it runs."""
    if state.page_table is None:
      return
    self.running.remove(state)
    self.blocks.end(state.page_table, state.ids[: state.known])
    self._free_slots.append(state.slot)
    self.biases.release(state.bias_row)
    state.slot, state.page_table, state.bias_row = -1, None, 0
    state.prefix_shared = False

  def take_uploads(self) -> Uploads:
    """Returns what is due before the next dispatch, once."""
    biases, histories = self.biases.uploads, self._histories
    self.biases.uploads, self._histories = [], []
    return Uploads(self.take_copies(), biases, histories)

  def take_copies(self) -> Sequence[tuple[int, int]]:
    """Returns the copies of pages that are due, once."""
    copies, self._copies = self._copies, []
    return copies

  # Results.

  def apply_results(
    self, dispatch: dispatch_plan.Dispatch, sampled: decode_step.Sampled
  ) -> int:
    """Gives each request its tokens; returns how many of them sample on.

    Tokens for a request that has ended meanwhile are dropped.
    """
    # Lists: numpy's scalars cost more than the rest of this loop.
    tokens, logprobs, counts = (x.tolist() for x in sampled[:3])
    version, alive = dispatch.version, 0
    if sampled.drafted is not None and sampled.right is not None:
      self.counts["drafted"] += int(sampled.drafted.sum())
      self.counts["right"] += int(sampled.right.sum())
    for i, state in enumerate(dispatch.rows):
      state.in_flight -= 1
      table, count, fed = state.page_table, counts[i], dispatch.fed[i]
      if state.future.done() or table is None:
        continue
      start, fits = table.cached, state.num_fitting(tokens[i][:count])
      # Where none fits the last id that was fed is fed again.
      table.cached += fed + max(fits - 1, 0) - (fits < min(count, 1))
      count = fits
      if table.oldest_kv is None:
        table.oldest_kv = version
      # The last id of a row that samples on was sampled itself: no context.
      own = state.num_sampled > 0 and start + fed == state.known
      self.counts["prefilled"] += fed - own
      if count:
        state.oldest_kv = table.oldest_kv
        top = sampled.top and (sampled.top[0][i], sampled.top[1][i])
        state.append(tokens[i][:count], logprobs[i][:count], version, top)
        self.counts["sampled"] += count
      if self._experts is not None:
        first = dispatch.starts[i]
        new_ids = slice(first, first + fed)
        self._experts.record(state, start, sampled, i, new_ids)
      if not state.prefix_shared:
        self.blocks.share(table, state.ids[: state.known])
        state.prefix_shared = count > 0
      if not state.in_flight:
        state.sync_counters()
      if state.constraint_error:
        self._forget(state)
        name = f"request {state.request.request_id}"
        why = f"its constraint failed: {state.constraint_error}"
        state.fail(ValueError(f"{name}: {why}"))
        continue
      stop = state.stop_reason()
      if stop is not None:
        self.finish(state, stop)
        continue
      alive += 1
      state.emit_delta()
    return alive

  # New weights.

  def restart(self) -> None:
    """Drops all keys and values; running requests are admitted again, in order.

    So requests with the same prefix encode it once more, not each of them.
    """
    tables = (state.page_table for state in self.running)
    self.blocks.restart(table for table in tables if table is not None)
    self._copies.clear()
    for state in list(self.running):
      self.preempt(state)
