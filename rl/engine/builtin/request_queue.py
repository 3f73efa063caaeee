"""Who waits, who runs, and what each holds of the engine. Pure bookkeeping.

accept -> waiting --admit--> running --finish--> completion
             ^                  |
             +-----preempt------+   pages ran out: others go first
"""

import asyncio
import collections
import heapq
import itertools
import time
from collections.abc import Collection, Iterable

import numpy as np
from jaxtyping import Float32, Int32

from models import config as model_config
from rl.data import trajectory
from rl.engine import contract
from rl.engine.builtin import block_manager, decode_step, dispatch_plan
from rl.engine.builtin import settings as engine_settings


class Biases:
  """Rows of the table of biases and who uses them; row 0 is none.

  Attributes:
    uploads: (row, bias) that the device has not been given yet.
  """

  def __init__(self, rows: int):
    self._free = list(range(rows, 0, -1))
    self._row: dict[bytes, int] = {}
    self._users = collections.Counter[int]()
    self.uploads: list[tuple[int, Float32[np.ndarray, " V"]]] = []

  def acquire(self, bias: Float32[np.ndarray, " V"] | None) -> int | None:
    """Returns the row of a bias, or None when all are in use."""
    if bias is None:
      return 0
    key = bias.tobytes()
    if key not in self._row:
      idle = (k for k, row in self._row.items() if not self._users[row])
      old = None if self._free else next(idle, None)
      if not self._free and old is None:
        return None
      row = self._free.pop() if old is None else self._row.pop(old)
      self._row[key] = row
      self.uploads.append((row, np.asarray(bias, np.float32)))
    self._users[self._row[key]] += 1
    return self._row[key]

  def release(self, row: int) -> None:
    """Ends one use of a row."""
    if row:
      self._users[row] -= 1


class Batch:
  """The requests of one engine; called from its event loop only.

  Attributes:
    requests: all that have not ended, by name.
    running: those that hold a slot.
    copies: (source, target) pages that the device has not copied yet.
    biases: of the running ones.
    preemptions: so far.
  """

  def __init__(
    self,
    config: model_config.ModelConfig,
    settings: engine_settings.EngineSettings,
  ):
    self._settings = settings
    self._num_pages = settings.num_pages(config.max_length)
    self.paging = block_manager.Paging(
      self._num_pages, settings.page_size, settings.least_copied
    )
    self.requests: dict[str, dispatch_plan.Running] = {}
    self.running: list[dispatch_plan.Running] = []
    self.copies: list[tuple[int, int]] = []
    self.biases = Biases(settings.bias_slots)
    self.preemptions = 0
    self.counts = collections.Counter[str]()
    self._slots = list(range(settings.slots - 1, -1, -1))
    self._waiting: list[tuple[tuple, dispatch_plan.Running]] = []
    self._arrivals = itertools.count()
    self._left: collections.OrderedDict[str, float] = collections.OrderedDict()
    self._experts: Int32[np.ndarray, "pages page_size S k"] | None = None
    if settings.record_experts:
      sparse = sum(map(config.is_sparse, range(config.num_layers)))
      places = (self._num_pages, settings.page_size)
      shape = (*places, sparse, config.experts_per_token)
      self._experts = np.full(shape, -1, np.int32)

  # Arrivals and ends.

  def accept(
    self,
    request: contract.DecodeRequest,
    future: asyncio.Future[contract.Completion],
  ) -> dispatch_plan.Running:
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
    one = dispatch_plan.Running(request, future, order, ids, given)
    self.requests[request.request_id] = one
    self._left.pop(request.session, None)
    heapq.heappush(self._waiting, (order, one))
    return one

  def finish(self, one: dispatch_plan.Running, stop: trajectory.Stop) -> None:
    """Ends a request with what it has, and gives back what it holds."""
    completion = self._completion(one, stop)
    del self.requests[one.request.request_id]
    self._leave(one)
    self._left[one.request.session] = time.monotonic()
    if not one.future.done():
      one.future.set_result(completion)
    one.tell(completion)
    if len(self._waiting) > 2 * self.num_waiting + self._settings.slots:
      # Else those who ended while they waited would pile up.
      self._waiting = [x for x in self._waiting if not x[1].future.done()]
      heapq.heapify(self._waiting)

  def _completion(
    self, one: dispatch_plan.Running, stop: trajectory.Stop
  ) -> contract.Completion:
    experts = None
    if one.request.experts and self._experts is not None:
      experts = self._recorded(one)
    return contract.Completion(
      tokens=one.ids[len(one.request.tokens) : one.known].copy(),
      logprobs=np.asarray(one.logprobs, np.float32),
      versions=np.asarray(one.versions, np.int32),
      stop=stop,
      cached_tokens=one.cached_tokens or 0,
      decode_s=time.monotonic() - one.started,
      first_token_s=one.first_token_s,
      oldest_kv=one.oldest_kv,
      experts=experts,
    )

  def clear(self) -> list[dispatch_plan.Running]:
    """Forgets every request and returns them; nothing is given back."""
    ended = list(self.requests.values())
    self.requests.clear()
    self.running.clear()
    self._waiting.clear()
    return ended

  def expected(self, within_s: float) -> int:
    """Returns how many sessions ended a turn just now: they may come back."""
    limit = time.monotonic() - within_s
    while self._left and next(iter(self._left.values())) < limit:
      self._left.popitem(last=False)
    return len(self._left)

  @property
  def num_waiting(self) -> int:
    """Requests that hold nothing yet."""
    return len(self.requests) - len(self.running)

  # Admission.

  @property
  def has_begun(self) -> bool:
    """Whether a request runs, or did before others took its pages."""
    return any(one.begun for one in self.requests.values())

  def admit(self, again_only: bool = False) -> None:
    """Lets as many wait no longer as slots, biases and pages allow.

    One whose beginning another is just encoding waits until it is known.

    Args:
      again_only: leaves those waiting that have not run yet.
    """
    later, biases_left = [], True
    while self._waiting and self._slots:
      order, one = self._waiting[0]
      if one.future.done():
        heapq.heappop(self._waiting)
        continue
      stays = (again_only and not one.begun) or self._follows(one)
      if stays or not (biases_left or one.request.bias is None):
        later.append((order, one))
      elif (bias := self.biases.acquire(one.request.bias)) is None:
        later.append((order, one))
        biases_left = False
      elif not self._begin(one, bias):
        break
      heapq.heappop(self._waiting)
    for entry in later:
      heapq.heappush(self._waiting, entry)

  def _begin(self, one: dispatch_plan.Running, bias: int) -> bool:
    lease, copy = self.paging.begin(one.ids[: one.known])
    pages = self._settings.width(one.known + 1) - len(lease.pages)
    # Each that runs may soon need one more.
    room = self.paging.num_free + self.paging.num_idle - len(self.running)
    if self.running and pages > room:
      self.paging.end(lease, one.ids[: one.known])
      self.biases.release(bias)
      return False
    if copy is not None:
      self.copies.append(copy)
      if self._experts is not None:
        self._experts[copy[1]] = self._experts[copy[0]]
    one.slot, one.lease, one.bias = self._slots.pop(), lease, bias
    if one.cached_tokens is None:
      one.cached_tokens = lease.cached
      self.counts["cached"] += lease.cached
    one.settle()
    self.running.append(one)
    return True

  def _follows(self, one: dispatch_plan.Running) -> bool:
    """Whether someone is encoding the beginning of this request right now."""
    page = self._settings.page_size
    for other in self.running:
      assert other.lease is not None
      if other.shared:
        continue
      start = other.lease.cached // page * page
      stop = start + page
      if min(one.known - 1, other.known) < stop:
        continue
      if np.array_equal(one.ids[:stop], other.ids[:stop]):
        return True
    return False

  def make_room(
    self,
    one: dispatch_plan.Running,
    length: int,
    kept: Collection[dispatch_plan.Running],
  ) -> bool:
    """Gives a request pages for so many positions, from others if need be.

    Those of later order that are in no flight give up theirs, the last first.

    Args:
      kept: whose pages stay.
    """
    assert one.lease is not None
    while not self.paging.grow(one.lease, length):
      victims = [
        other
        for other in self.running
        if not other.flights and other.order > one.order and other not in kept
      ]
      if not victims:
        return False
      self.preempt(max(victims, key=dispatch_plan.by_order))
      self.preemptions += 1
    return True

  def preempt(self, one: dispatch_plan.Running) -> None:
    """Lets a running request wait again; it keeps its tokens."""
    self._leave(one)
    heapq.heappush(self._waiting, (one.order, one))

  def _leave(self, one: dispatch_plan.Running) -> None:
    """Takes back what a request holds, if it runs."""
    if one.lease is None:
      return
    self.running.remove(one)
    self.paging.end(one.lease, one.ids[: one.known])
    self._slots.append(one.slot)
    self.biases.release(one.bias)
    one.slot, one.lease, one.bias, one.shared = -1, None, 0, False

  def take_errands(
    self,
  ) -> tuple[
    list[tuple[int, int]], list[tuple[int, Float32[np.ndarray, " V"]]]
  ]:
    """Returns pages to copy and biases to set before the next flight, once."""
    copies, self.copies = self.copies, []
    uploads, self.biases.uploads = self.biases.uploads, []
    return copies, uploads

  # What a flight brings.

  def absorb(
    self, flight: dispatch_plan.Flight, sampled: decode_step.Sampled
  ) -> int:
    """Takes what a flight did; returns how many of its rows sampled on.

    A row whose request ended meanwhile is left out: its tokens are nobody's.
    """
    # Lists: numpy's scalars cost more than the rest of this loop.
    tokens, logprobs, counts = (x.tolist() for x in sampled[:3])
    version, alive = int(flight.version), 0
    for i, one in enumerate(flight.rows):
      one.flights -= 1
      lease, count = one.lease, counts[i]
      if one.future.done() or lease is None:
        continue
      start = lease.cached
      lease.cached += flight.fed[i] + max(count - 1, 0)
      if lease.oldest_kv is None:
        lease.oldest_kv = version
      if self._experts is not None:
        self._record(lease, start, flight, sampled, i, count)
      # The last id of a row that samples on was sampled itself: no context.
      own = one.num_sampled > 0 and start + flight.fed[i] == one.known
      self.counts["prefilled"] += flight.fed[i] - own
      if count:
        one.oldest_kv = lease.oldest_kv
        one.take(tokens[i][:count], logprobs[i][:count], version)
        self.counts["sampled"] += count
      if not one.shared:
        self.paging.share(lease, one.ids[: one.known])
        one.shared = count > 0
      if not one.flights:
        one.settle()
      stop = one.why_ended()
      if stop is not None:
        self.finish(one, stop)
        continue
      alive += 1
      one.tell()
    return alive

  def _record(
    self,
    lease: block_manager.Lease,
    start: int,
    flight: dispatch_plan.Flight,
    sampled: decode_step.Sampled,
    row: int,
    count: int,
  ) -> None:
    """Keeps the experts of what one row fed from position `start` on."""
    assert self._experts is not None
    assert sampled.fed is not None
    assert sampled.stepped is not None
    first, new = flight.starts[row], flight.fed[row]
    taken = np.concatenate(
      [
        sampled.fed[first : first + new],
        sampled.stepped[row, : max(count - 1, 0)],
      ]
    )
    places = self._places(lease, start, start + len(taken))
    self._experts[places] = taken

  def _places(
    self, lease: block_manager.Lease, start: int, stop: int
  ) -> tuple[Int32[np.ndarray, " n"], Int32[np.ndarray, " n"]]:
    size = self._settings.page_size
    positions = np.arange(start, stop, dtype=np.int32)
    pages = np.asarray(lease.pages, np.int32)
    return pages[positions // size], positions % size

  def _recorded(
    self, one: dispatch_plan.Running
  ) -> Int32[np.ndarray, "ids S k"]:
    """Returns the experts of every id, -1 where none are known."""
    assert self._experts is not None
    experts = np.full((one.known, *self._experts.shape[2:]), -1, np.int32)
    if one.lease is not None:
      held = one.lease.cached
      experts[:held] = self._experts[self._places(one.lease, 0, held)]
    return experts

  # New weights.

  def restart(self) -> None:
    """Forgets all keys and values; who runs is admitted again, in order.

    So those with the same beginning encode it once more, not each of them.
    """
    self.paging.restart(self._leases())
    self.copies.clear()
    for one in list(self.running):
      self.preempt(one)

  def check(self) -> None:
    """Raises RuntimeError unless every page has one holder, or is free."""
    self.paging.check(self._leases())

  def _leases(self) -> Iterable[block_manager.Lease]:
    return [one.lease for one in self.running if one.lease is not None]
