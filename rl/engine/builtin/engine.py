"""The built-in decode engine: continuous batching over a paged cache.

  generate -> waiting --admit--> running --(launch, flight, absorb)*--> result
             (by priority) <--preempt-- (no pages left)

A flight serves running requests: it feeds them ids that are not in the cache
yet, chunks of new context among them, and samples several tokens of each. The
next one is planned while it runs, and may go on with the same requests: what
they sampled stays on the device until the host has time to look.
"""

import asyncio
import collections
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from models import config as model_config
from models import sharding, transformer
from rl.data import trajectory
from rl.engine import contract
from rl.engine.builtin import (
  decode_step,
  dispatch_plan,
  model_runner,
  request_queue,
  scheduler,
)
from rl.engine.builtin import settings as engine_settings
from rl.runtime import checksum as checksum_lib
from rl.runtime import mesh_thread

_CLOSE_S = 5.0
_DEPTH = 2
"""Flights at once: one runs, one waits behind it."""


class JaxEngine:
  """`contract.DecodeEngine` over the models of this project.

  Life: `await start(params, version)`, then the protocol, then `await close()`.
  All on one event loop; device work happens on `thread`.

  Args:
    thread: of the pool's mesh; the caller closes it.
  """

  def __init__(
    self,
    config: model_config.ModelConfig,
    settings: engine_settings.EngineSettings,
    layout: sharding.Layout,
    thread: mesh_thread.MeshThread,
  ):
    settings.validate()
    settings.validate_model(config)
    self.capabilities = contract.Capabilities(
      in_flight=frozenset({"drain", "abort", "recompute", "keep_kv"}),
      max_length=config.max_length,
      vocab_size=config.vocab_size,
      max_stop_ids=decode_step.MAX_STOP_IDS,
      seeds=True,
      bias=settings.bias_slots > 0,
      experts=settings.record_experts,
    )
    self._settings = settings
    self._thread = thread
    self._decoder = model_runner.Decoder(config, settings, layout)
    self._batch = request_queue.Batch(config, settings)
    self._schedule = scheduler.Schedule(
      self._batch,
      settings,
      longest=config.max_length,
      parts=layout.num_batch,
      platform=layout.platform,
    )
    self._version = trajectory.PolicyVersion(-1)
    self._params: transformer.Params | None = None
    self._flights: collections.deque[
      tuple[dispatch_plan.Flight, asyncio.Future[decode_step.Sampled]]
    ] = collections.deque()
    self._paused = False
    self._holding: contract.InFlight | None = None
    self._updates = asyncio.Lock()
    self._wake = asyncio.Event()
    self._settled = asyncio.Event()
    self._closed: contract.EngineClosed | None = None
    self._server: asyncio.Task[None] | None = None
    self._dispatches = 0
    self._landed = 0.0
    self._paused_s = 0.0

  # Start and end.

  async def start(
    self,
    params: transformer.Params,
    version: trajectory.PolicyVersion,
    report: Callable[[str], None] = lambda text: None,
  ) -> None:
    """Takes the first weights, compiles every shape and begins to serve."""
    self._params = params
    self._version = version
    await self._thread.run("warm up", self._decoder.allocate)
    shapes = self._decoder.shapes
    for i, shape in enumerate(shapes):
      report(f"compiling the engine {i + 1}/{len(shapes)}")
      await self._thread.run("warm up", self._decoder.warm_up, params, shape)
    await self._thread.run("warm up", self._decoder.warm_up_rest)
    self._server = asyncio.create_task(self._serve(), name="engine")

  async def close(self) -> None:
    """Stops; requests in flight raise EngineClosed."""
    self._fail(contract.EngineClosed("the engine was closed"))
    if self._server is not None:
      # Cancelled on overrun: its device program may hang.
      await asyncio.wait([self._server], timeout=_CLOSE_S)
      self._server.cancel()

  def _fail(self, reason: contract.EngineClosed) -> None:
    self._closed = self._closed or reason
    for one in self._batch.clear():
      one.fail(self._why_closed(self._closed))
    self._wake.set()
    self._settled.set()

  # Requests.

  async def generate(
    self, request: contract.DecodeRequest
  ) -> contract.Completion:
    """Samples one answer; see `contract.DecodeEngine.generate`."""
    running = self._accept(request)
    try:
      return await running.future
    except asyncio.CancelledError:
      self._end(running)
      raise

  async def stream(
    self, request: contract.DecodeRequest
  ) -> AsyncGenerator[contract.Delta]:
    """Yields an answer as it is sampled; see `contract.DecodeEngine.stream`."""
    running = self._accept(request)
    running.deltas = asyncio.Queue()
    try:
      while not (running.future.done() and running.deltas.empty()):
        delta = await running.deltas.get()
        if delta is None:
          break
        yield delta
      await running.future  # Raises what went wrong.
    finally:
      self._end(running)

  def _accept(self, request: contract.DecodeRequest) -> dispatch_plan.Running:
    self._check_open()
    contract.check_request(request, self.capabilities)
    future = asyncio.get_running_loop().create_future()
    running = self._batch.accept(request, future)
    self._wake.set()
    return running

  def _end(self, running: dispatch_plan.Running) -> None:
    """Aborts a request that nobody waits for, unless it has ended."""
    name = running.request.request_id
    if self._batch.requests.get(name) is running:
      self._batch.finish(running, "abort")
      self._wake.set()

  def abort(self, request_id: str | None) -> None:
    """Ends a request with what it has; see `contract.DecodeEngine.abort`."""
    requests = self._batch.requests
    if request_id is not None and request_id not in requests:
      raise ValueError(f"request {request_id} is not in flight")
    for name in list(requests) if request_id is None else [request_id]:
      self._batch.finish(requests[name], "abort")
    self._wake.set()

  def begun(self, request_id: str) -> trajectory.PolicyVersion | None:
    """Returns the version of a first token; see `contract.DecodeEngine`."""
    if request_id not in self._batch.requests:
      raise ValueError(f"request {request_id} is not in flight")
    return self._batch.requests[request_id].first_version

  # Weights.

  async def pause(self) -> None:
    """Suspends; see `contract.DecodeEngine.pause`."""
    self._check_open()
    self._paused = True
    await self._until(lambda: not self._flights)

  def resume(self) -> None:
    """Goes on after `pause`."""
    self._paused = False
    self._wake.set()

  async def update_weights(
    self,
    version: trajectory.PolicyVersion,
    params: transformer.Params,
    in_flight: contract.InFlight = "recompute",
  ) -> None:
    """Serves `params` from now on; see `contract.DecodeEngine`."""
    self._check_open()
    if in_flight not in self.capabilities.in_flight:
      raise ValueError(
        f"in_flight={in_flight!r}; use "
        + " or ".join(sorted(self.capabilities.in_flight))
      )
    contract.check_same_tree(self._params, params)
    async with self._updates:
      contract.check_version(version, self._version)
      self._holding, held = in_flight, time.monotonic()
      try:
        if in_flight == "drain":
          await self._until(lambda: not self._batch.has_begun)
        await self._until(lambda: not self._flights)
        self._swap(version, params, in_flight)
      finally:
        self._holding = None
        self._wake.set()
      self._fill()
      self._check_open()
      self._paused_s += time.monotonic() - max(held, self._landed)

  def _swap(
    self,
    version: trajectory.PolicyVersion,
    params: transformer.Params,
    in_flight: contract.InFlight,
  ) -> None:
    if in_flight == "abort":
      for one in list(self._batch.requests.values()):
        if one.slot >= 0 or one.num_sampled:
          self._batch.finish(one, "abort")
    if in_flight == "keep_kv":
      # Only what is in flight keeps its own, and what it shares for as long as
      # somebody uses it.
      self._batch.paging.forget()
    else:
      self._batch.restart()
    self._params, self._version = params, version

  async def checksum(self) -> tuple[trajectory.PolicyVersion, int]:
    """Returns the served version and `checksum.of` its weights."""
    self._check_open()
    version, params = self._version, self._params
    return version, await self._thread.run("checksum", checksum_lib.of, params)

  async def flush_cache(self) -> None:
    """Forgets every prefix that no running request uses."""
    self._check_open()
    self._batch.paging.forget()

  async def _until(self, done: Callable[[], bool]) -> None:
    """Returns when `done`; flights and requests end on the way.

    Raises:
      EngineClosed: the engine stopped.
    """
    self._check_open()
    self._wake.set()
    while not done():
      self._settled.clear()
      await self._settled.wait()
      self._check_open()

  def _check_open(self) -> None:
    if self._closed is not None:
      raise self._why_closed(self._closed)

  def _why_closed(self, reason: contract.EngineClosed) -> contract.EngineClosed:
    """Returns a copy for one of many that wait: raising changes it."""
    copy = contract.EngineClosed(str(reason))
    copy.__cause__ = reason.__cause__
    return copy

  def stats(self) -> contract.EngineStats:
    """Returns the counters."""
    batch = self._batch
    return contract.EngineStats(
      version=int(self._version),
      running=len(batch.running),
      waiting=batch.num_waiting,
      sampled_tokens=batch.counts["sampled"],
      prefilled_tokens=batch.counts["prefilled"],
      cached_tokens=batch.counts["cached"],
      dispatches=self._dispatches,
      compilations=self._decoder.compilations,
      preemptions=batch.preemptions,
      pages=batch.paging.num_pages,
      free_pages=batch.paging.num_free,
      paused_s=self._paused_s,
    )

  # The loop.

  async def _serve(self) -> None:
    """Launches while there is work; absorbs what has landed."""
    try:
      while self._closed is None:
        self._wake.clear()
        while self._flights and self._flights[0][1].done():
          self._absorb(*self._flights.popleft())
        self._fill()
        self._settled.set()
        await self._wake.wait()
    except Exception as error:  # A broken device program ends the engine.
      self._break(error)

  def _break(self, error: Exception) -> None:
    reason = contract.EngineClosed(f"decoding raised {error!r}")
    reason.__cause__ = error
    self._fail(reason)

  def _fill(self) -> None:
    """Launches what is worth it now."""
    try:
      while len(self._flights) < _DEPTH and self._launch():
        pass
    except Exception as error:  # Also when it is not the server that asks.
      self._break(error)

  def _absorb(
    self,
    flight: dispatch_plan.Flight,
    landed: asyncio.Future[decode_step.Sampled],
  ) -> None:
    self._landed = time.monotonic()
    survivors = self._batch.absorb(flight, landed.result())
    self._schedule.landed(flight, survivors)

  def _launch(self) -> bool:
    """Starts a flight if one is worth it now; returns whether it did."""
    if self._closed or (self._paused and self._holding != "drain"):
      return False
    if self._holding in (None, "drain"):
      self._batch.admit(again_only=self._holding == "drain")
    elif self._holding is not None:
      return False
    last = self._flights[-1][0] if self._flights else None
    if last is None and self._lingers():
      return False
    choice = self._schedule.next(last)
    if choice is None:
      return False
    flight = dispatch_plan.build(choice, self._settings, self._version)
    copies, uploads = self._batch.take_errands()
    self._dispatches += 1
    landed = self._thread.submit(
      "decode", self._fly, self._params, flight, copies, uploads
    )
    landed.add_done_callback(self._arrived)
    self._flights.append((flight, landed))
    return True

  def _arrived(self, landed: asyncio.Future[decode_step.Sampled]) -> None:
    # Of several that fail only the first is absorbed; none is left unseen.
    landed.exception()
    self._wake.set()

  def _fly(
    self,
    params: transformer.Params,
    flight: dispatch_plan.Flight,
    copies: Sequence[tuple[int, int]],
    uploads: Sequence[tuple[int, Any]],
  ) -> decode_step.Sampled:
    for row, bias in uploads:
      self._decoder.set_bias(row, bias)
    return self._decoder.advance(params, flight.plan, flight.chunks, copies)

  def _lingers(self) -> bool:
    """Whether to wait for sessions whose next turn may come at once."""
    linger_s, ready = self._settings.linger_s, len(self._batch.running)
    expected = self._batch.expected(linger_s)
    if (
      self._holding
      or not ready
      or ready >= 3 * expected
      or ready >= self._settings.slots
    ):
      return False
    asyncio.get_running_loop().call_later(linger_s / 8, self._wake.set)
    return True
