"""The built-in decode engine: continuous batching over a paged cache.

  generate, stream --> waiting --admit--> running --finish--> Completion
                          ^--- preempt (no pages left) ---+

  _serve --> _launch_ready --> _launch ==> _execute, on the device's thread
    ^                                          |
    +--- _complete <---- _on_completed <-------+

  update_weights --> _swap, between two dispatches

A dispatch feeds running requests the ids that are not in the cache yet, in
chunks where there are many, and samples several tokens of each. The next one
is planned while it runs, and may go on with the same requests: their tokens
stay on the device until the host has time to look.
"""

import asyncio
import collections
import contextlib
import functools
import itertools
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int32

from models import config as model_config
from models import definition, sharding
from rl.engine import contract
from rl.engine.builtin import (
  decode_step,
  dispatch_plan,
  dispatch_shapes,
  model_runner,
  request_queue,
  scheduler,
)
from rl.engine.builtin import request as request_lib
from rl.runtime import checksum as checksum_lib
from rl.runtime import mesh_thread

if TYPE_CHECKING:
  from rl.engine.builtin import settings as engine_settings

_CLOSE_S = 5.0
_MAX_IN_FLIGHT = 2
"""Dispatches at once: one runs, one waits behind it."""


class BuiltinEngine:
  """`contract.DecodeEngine` over the models of this project.

  Life: `await start(params, version)`, then the protocol, then `await close()`.
  All on one event loop; device work happens on `thread`.

  Args:
    thread: of the pool's mesh; the caller closes it.
  """

  def __init__(
    self,
    config: model_config.ModelConfig,
    shapes: dispatch_shapes.DispatchShapes,
    layout: sharding.Layout,
    thread: mesh_thread.MeshThread,
    capabilities: contract.Capabilities,
    settings: "engine_settings.EngineSettings",
  ):
    self.capabilities = capabilities
    self._shapes = shapes
    self._batching_delay_s = settings.batching_delay_s
    self._compile_ahead = settings.compile_ahead
    self._compiled: set[tuple[model_runner.Shape, bool]] = set()
    self._thread = thread
    self._runner = model_runner.ModelRunner(
      config,
      shapes,
      layout,
      record_experts=settings.record_experts,
      **settings.extras._asdict(),
    )
    self._new_queue = functools.partial(
      request_queue.RequestQueue,
      config,
      shapes,
      min_copied_ids=settings.min_copied_ids,
      bias_slots=settings.bias_slots,
      record_experts=settings.record_experts,
      drafts=settings.speculative_tokens > 0,
    )
    self._new_scheduler = functools.partial(
      scheduler.Scheduler,
      shapes=shapes,
      longest=config.max_length,
      parts=layout.num_batch,
      platform=layout.platform,
    )
    self._queue = self._new_queue()
    self._scheduler = self._new_scheduler(self._queue)
    self._version = -1
    self._params: definition.Params | None = None
    self._in_flight: collections.deque[
      tuple[dispatch_plan.Dispatch, asyncio.Future[decode_step.Sampled]]
    ] = collections.deque()
    self._paused = False
    # The mode of the update that waits for the dispatches in flight.
    self._updating: contract.InFlight | None = None
    self._update_lock = asyncio.Lock()
    self._wake, self._progress = asyncio.Event(), asyncio.Event()
    self._closed: contract.EngineClosed | None = None
    self._server: asyncio.Task[None] | None = None
    self._num_dispatches = 0
    self._num_prefixes = itertools.count()
    self._last_completed = 0.0
    self._paused_s = 0.0

  # Start and end.

  async def start(
    self,
    params: definition.Params,
    version: int,
    report: Callable[[str], None] = lambda text: None,
  ) -> None:
    """Takes the first weights and begins to serve."""
    self._params = params
    self._version = version
    await self._thread.run("warm up", self._runner.allocate)
    if self._compile_ahead:
      await self._compile(params, report)
    self._server = asyncio.create_task(self._serve(), name="engine")

  async def _compile(
    self, params: definition.Params, report: Callable[[str], None]
  ) -> None:
    shapes = self._runner.shapes
    for i, shape in enumerate(shapes):
      rows, (prefilled, length) = shape
      work = f"{prefilled} chunks of {length} ids" if prefilled else "decoding"
      report(f"compiling the engine {i + 1}/{len(shapes)}: {rows} rows, {work}")
      await self._thread.run("warm up", self._runner.warm_up, params, shape)
    await self._thread.run("warm up", self._runner.warm_up_rest)
    self._compiled.update((shape, False) for shape in shapes)

  async def close(self) -> None:
    """Stops; requests in flight raise EngineClosed."""
    self._fail(contract.EngineClosed("the engine was closed"))
    if self._server is not None:
      # Cancelled on overrun: its device program may hang.
      await asyncio.wait([self._server], timeout=_CLOSE_S)
      self._server.cancel()
    if self._params is not None:
      self._free()

  def _free(self) -> None:
    """Frees the devices' memory, after the programs that still run."""
    self._params = None
    # Errors hold the arguments of the programs that raised them.
    self._in_flight.clear()
    self._closed = contract.EngineClosed(str(self._closed))
    with contextlib.suppress(RuntimeError):  # The thread was closed.
      self._thread.submit("free", self._runner.free)

  def _fail(self, reason: contract.EngineClosed) -> None:
    self._closed = self._closed or reason
    for state in self._queue.clear():
      state.fail(self._why_closed(self._closed))
    self._wake.set()
    self._progress.set()

  # Requests.

  async def generate(
    self, request: contract.DecodeRequest
  ) -> contract.Completion:
    """Samples one answer; see `contract.DecodeEngine.generate`."""
    state = self._accept(request)
    try:
      return await state.future
    except asyncio.CancelledError:
      self._abandon(state)
      raise

  async def stream(
    self, request: contract.DecodeRequest
  ) -> AsyncGenerator[contract.Delta]:
    """Yields an answer as it is sampled; see `contract.DecodeEngine.stream`."""
    state = self._accept(request)
    state.deltas = asyncio.Queue()
    try:
      while not (state.future.done() and state.deltas.empty()):
        delta = await state.deltas.get()
        if delta is None:
          break
        yield delta
      await state.future  # Raises the error, if there was one.
    finally:
      self._abandon(state)

  def _accept(
    self, request: contract.DecodeRequest
  ) -> request_lib.RequestState:
    self._check_open()
    contract.check_request(request, self.capabilities)
    future = asyncio.get_running_loop().create_future()
    state = self._queue.accept(request, future)
    self._wake.set()
    return state

  def _abandon(self, state: request_lib.RequestState) -> None:
    """Aborts a request that has no caller any more, unless it has ended."""
    name = state.request.request_id
    if self._queue.requests.get(name) is state:
      self._queue.finish(state, "abort")
      self._wake.set()

  def abort(self, request_id: str | None) -> None:
    """Ends a request with what it has; see `contract.DecodeEngine.abort`."""
    requests = self._queue.requests
    for name in list(requests) if request_id is None else [request_id]:
      self._queue.finish(contract.find(requests, name), "abort")
    self._wake.set()

  def begun(self, request_id: str) -> int | None:
    """Returns the version of a first token; see `contract.DecodeEngine`."""
    return contract.find(self._queue.requests, request_id).first_version

  # Prefixes for other engines, and from them.
  # A page is held within one step of the event loop only: programs of a mesh
  # run in order, so whoever gets it next writes it after them.

  @contextlib.asynccontextmanager
  async def export_prefix(
    self,
    ids: Int32[np.ndarray, " N"],
    start: int = 0,
    priority: tuple[int, ...] = (),
  ) -> AsyncGenerator[contract.PrefixPages]:
    """Yields the pages of a prompt; see `contract.PrefixEngine`.

    One token is sampled after them and dropped.
    """
    self._check_open()
    size, end = self._shapes.page_size, len(ids) - 1
    start = start // size * size
    if start < end and self._cached(ids)[0] < end:
      name = f"prefix {next(self._num_prefixes)}"
      await self.generate(
        contract.DecodeRequest(
          request_id=name,
          session="prefixes",  # One, as no next turn is worth a wait.
          tokens=ids[:end],
          max_tokens=1,
          temperature=0.0,
          priority=priority,
        )
      )
    count, pages = self._cached(ids)
    if count <= start:
      yield contract.PrefixPages(ids[:start], start, -1, 0, [])
      return
    self._copy_pages()
    pages, version = pages[start // size :], self._version
    read = self._thread.submit("hand over", self._runner.read_pages, pages)
    values = await read
    num_bytes = sum(x.nbytes for x in values)
    yield contract.PrefixPages(ids[:count], start, version, num_bytes, values)

  def _cached(self, ids: Int32[np.ndarray, " N"]) -> tuple[int, list[int]]:
    """Returns how many of all ids but the last are cached, and their pages."""
    blocks = self._queue.blocks
    table, copy = blocks.begin(ids)
    count, pages = table.cached, table.pages[:]
    if copy is not None:  # It would have been copied from there.
      pages[-1] = copy[0]
    blocks.cancel(table)
    return count, pages

  async def import_prefix(self, prefix: contract.PrefixPages) -> str:
    """Adds pages to the prefix cache; see `contract.PrefixEngine`."""
    self._check_open()
    if prefix.version != self._version:
      return "version"
    blocks, size = self._queue.blocks, self._shapes.page_size
    ids = np.append(prefix.ids, np.int32(0))  # One that is to be fed.
    table, _ = blocks.begin(ids)  # Not copied: its page is written.
    first, length = table.cached // size, len(prefix.ids)
    refusal = ""
    if first * size < prefix.start:
      refusal = "gap"
    elif table.cached < length and not blocks.grow(table, length):
      refusal = "room"
    if refusal or table.cached >= length:
      blocks.cancel(table)
      return refusal
    values = [x[:, :, first - prefix.start // size :] for x in prefix.pages]
    table.cached = length
    if table.oldest_kv is None:
      table.oldest_kv = prefix.version
    self._copy_pages()
    written = self._thread.submit(
      "hand over", self._runner.write_pages, table.pages[first:], values
    )
    written.add_done_callback(self._on_written)
    blocks.end(table, ids)
    await asyncio.wait([written])  # Not cancelled with the caller.
    self._check_open()
    return ""

  def _copy_pages(self) -> None:
    """Makes the copies that are due, from or to pages that are used now."""
    if copies := self._queue.take_copies():
      copied = self._thread.submit("hand over", self._runner.copy, copies)
      copied.add_done_callback(self._on_written)

  def _on_written(self, written: asyncio.Future[None]) -> None:
    if not written.cancelled() and (error := written.exception()) is not None:
      assert isinstance(error, Exception)
      self._fail_decoding(error)

  # Weights.

  async def pause(self) -> None:
    """Stops decoding; see `contract.DecodeEngine.pause`."""
    self._check_open()
    self._paused = True
    await self._until(lambda: not self._in_flight)

  def resume(self) -> None:
    """Resumes decoding after `pause`."""
    self._paused = False
    self._wake.set()

  async def update_weights(
    self,
    version: int,
    params: definition.Params,
    in_flight: contract.InFlight = "recompute",
    on_step: Callable[[contract.SwitchStep], None] = contract.ignore_step,
  ) -> None:
    """Serves `params` from now on; see `contract.DecodeEngine`."""
    self._check_open()
    contract.check_in_flight(in_flight, self.capabilities)
    contract.check_same_tree(self._params, params)
    async with self._update_lock:
      contract.check_version(version, self._version)
      self._updating, asked = in_flight, request_lib.now_s()
      try:
        if in_flight == "drain":
          await self._until(lambda: not self._queue.any_started)
        await self._until(lambda: not self._in_flight)
        with contract.switching(on_step):
          self._swap(version, params, in_flight)
      finally:
        self._updating = None
        self._wake.set()
      self._launch_ready()
      self._check_open()
      self._paused_s += request_lib.now_s() - max(asked, self._last_completed)

  def _swap(
    self,
    version: int,
    params: definition.Params,
    in_flight: contract.InFlight,
  ) -> None:
    if in_flight == "abort":
      for state in list(self._queue.requests.values()):
        if state.slot >= 0 or state.num_sampled:
          self._queue.finish(state, "abort")
    if in_flight == "keep_kv":
      # Requests in flight keep theirs, and nobody else gets them.
      self._queue.blocks.detach()
    else:
      self._queue.restart()
    self._params, self._version = params, version

  async def checksum(self) -> tuple[int, int]:
    """Returns the served version and `checksum.of` its weights."""
    self._check_open()
    version, params = self._version, self._params
    return version, await self._thread.run("checksum", checksum_lib.of, params)

  async def flush_cache(self) -> None:
    """Drops every cached prefix that no running request uses.

    Without requests it then plans as an engine that has just begun.
    """
    self._check_open()
    if not self._queue.requests:
      await self._until(lambda: not self._in_flight)
    old = self._queue
    if old.requests or self._in_flight:
      old.blocks.flush()
      return
    self._queue = self._new_queue()
    self._queue.counts, self._queue.preemptions = old.counts, old.preemptions
    self._scheduler = self._new_scheduler(self._queue)

  async def _until(self, done: Callable[[], bool]) -> None:
    """Returns when `done`; dispatches and requests end on the way.

    Raises:
      EngineClosed: the engine stopped.
    """
    self._check_open()
    self._wake.set()
    while not done():
      self._progress.clear()
      await self._progress.wait()
      self._check_open()

  def _check_open(self) -> None:
    if self._closed is not None:
      raise self._why_closed(self._closed)

  def _why_closed(self, reason: contract.EngineClosed) -> contract.EngineClosed:
    """Returns a copy for one of many callers: raising changes it."""
    copy = contract.EngineClosed(str(reason))
    copy.__cause__ = reason.__cause__
    return copy

  def stats(self) -> contract.EngineStats:
    """Returns the counters."""
    queue = self._queue
    return contract.EngineStats(
      version=self._version,
      running=len(queue.running),
      waiting=queue.num_waiting,
      sampled_tokens=queue.counts["sampled"],
      prefilled_tokens=queue.counts["prefilled"],
      cached_tokens=queue.counts["cached"],
      drafted_tokens=queue.counts["drafted"],
      right_drafts=queue.counts["right"],
      dispatches=self._num_dispatches,
      compilations=self._runner.compilations,
      preemptions=queue.preemptions,
      pages=queue.blocks.num_pages,
      free_pages=queue.blocks.num_free,
      paused_s=self._paused_s,
    )

  # The loop.

  async def _serve(self) -> None:
    """Launches while there is work, and completes what has run."""
    try:
      while self._closed is None:
        self._wake.clear()
        while self._in_flight and self._in_flight[0][1].done():
          self._complete(*self._in_flight.popleft())
        self._launch_ready()
        self._progress.set()
        await self._wake.wait()
    except Exception as error:  # A broken device program ends the engine.
      self._fail_decoding(error)

  def _fail_decoding(self, error: Exception) -> None:
    reason = contract.EngineClosed(f"decoding raised {error!r}")
    reason.__cause__ = error
    self._fail(reason)

  def _launch_ready(self) -> None:
    """Launches dispatches while one is worth it."""
    try:
      while len(self._in_flight) < _MAX_IN_FLIGHT and self._launch():
        pass
    except Exception as error:  # `update_weights` calls this too.
      self._fail_decoding(error)

  def _complete(
    self,
    dispatch: dispatch_plan.Dispatch,
    result: asyncio.Future[decode_step.Sampled],
  ) -> None:
    self._last_completed = request_lib.now_s()
    survivors = self._queue.apply_results(dispatch, result.result())
    self._scheduler.completed(dispatch, survivors)

  def _launch(self) -> bool:
    """Launches a dispatch if one is worth it now; returns False otherwise."""
    drains = self._updating == "drain"
    if self._closed or ((self._paused or self._updating) and not drains):
      return False
    self._queue.admit(started_only=drains)
    last = self._in_flight[-1][0] if self._in_flight else None
    if last is None and self._delays_batch():
      return False
    choice = self._scheduler.next(last)
    if choice is None:
      return False
    dispatch = dispatch_plan.build(
      choice,
      self._shapes,
      self._version,
      longest=self.capabilities.max_length,
    )
    uploads = self._queue.take_uploads()
    self._num_dispatches += 1
    shape = choice.num_rows, choice.chunks
    program = shape, dispatch.lists_top
    # Time spent compiling is not decoding.
    name = "decode" if program in self._compiled else "warm up"
    self._compiled.add(program)
    result = self._thread.submit(
      name, self._execute, self._params, dispatch, uploads
    )
    result.add_done_callback(self._on_completed)
    self._in_flight.append((dispatch, result))
    return True

  def _on_completed(self, result: asyncio.Future[decode_step.Sampled]) -> None:
    # Read, or asyncio would warn: only the first failure is raised.
    result.exception()
    self._wake.set()

  def _execute(
    self,
    params: definition.Params,
    dispatch: dispatch_plan.Dispatch,
    uploads: request_queue.Uploads,
  ) -> decode_step.Sampled:
    for row, bias in uploads.biases:
      self._runner.set_bias(row, bias)
    for slot, ids in uploads.histories:
      self._runner.set_history(slot, ids)
    self._runner.set_masks(
      [(row, matcher.compute_bitmask()) for row, matcher in dispatch.masks]
    )
    most = self.capabilities.top_logprobs
    return self._runner.advance(
      params,
      dispatch.plan,
      dispatch.chunks,
      uploads.copies,
      # One number for all, hence one more program of each shape.
      top_logprobs=most if dispatch.lists_top else 0,
    )

  def _delays_batch(self) -> bool:
    """True to wait for sessions whose next turn may come at once."""
    delay_s, ready = self._batching_delay_s, len(self._queue.running)
    returning = self._queue.num_returning(delay_s)
    if (
      self._updating
      or not ready
      or ready >= 3 * returning
      or ready >= self._shapes.slots
    ):
      return False
    asyncio.get_running_loop().call_later(delay_s / 8, self._wake.set)
    return True
