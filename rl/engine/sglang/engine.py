"""A decode engine over sglang-jax's scheduler.

  generate --> waiting --_submit--> running ==Bridge.post==> sglang-jax's
     ^                                 ^                     scheduler, on its
     +-- Completion <-- apply_outputs -+<------ Output ----- own thread

Requests wait here, by priority, and not at the scheduler. An abort answers at
once; tokens that the scheduler still samples for it are dropped. "recompute" is
an abort that the caller never sees: under the new weights the request is
submitted again, with the tokens sampled so far in its prompt.
"""

import asyncio
import contextlib
import functools
import gc
import threading
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import jax

from models import config as model_config
from models import definition, sharding
from rl.engine import contract
from rl.engine.sglang import requests as sglang_requests
from rl.engine.sglang import scheduler_thread
from rl.engine.sglang import upstream as sglang_upstream
from rl.engine.sglang import weights as sglang_weights
from rl.runtime import checksum as checksum_lib
from rl.runtime import mesh_thread

_CLOSE_S = 5.0
_LOOK_S = 0.5


class SglangEngine:
  """`contract.DecodeEngine` over sglang-jax.

  Life: `await start(params, version)` in the main thread, then the protocol,
  then `await close()`. All on one event loop.

  Args:
    layout: its devices; heads, MLPs and words are split over all of them.
    thread: converts weights; the caller closes it.
    upstream: starts sglang-jax and makes the messages to its scheduler.
  """

  def __init__(
    self,
    config: model_config.ModelConfig,
    sizes: sglang_requests.Sizes,
    layout: sharding.Layout,
    thread: mesh_thread.MeshThread,
    upstream: sglang_upstream.Upstream,
    capabilities: contract.Capabilities,
  ):
    self.capabilities = capabilities
    self._config = config
    self._sizes = sizes
    self._layout = layout
    self._thread = thread
    self._upstream = upstream
    self._shapes: definition.Params = {}
    self._program = jax.jit(
      functools.partial(sglang_weights.convert, config=config)
    )
    self._version = -1
    self._checksum = 0
    self._requests = sglang_requests.Requests(
      sizes.slots, self._submit, self._abort
    )
    self._paused = self._swapping = self._is_warm = False
    self._updating = asyncio.Lock()
    self._paused_s = 0.0
    self._closed: contract.EngineClosed | None = None
    self._bridge: scheduler_thread.Bridge | None = None
    self._jobs: set[asyncio.Future[None]] = set()
    self._watching: asyncio.Task[None] | None = None

  # Start and end.

  async def start(
    self,
    params: definition.Params,
    version: int,
    report: Callable[[str], None] = lambda text: None,
  ) -> None:
    """Starts sglang-jax with these weights, and compiles every shape.

    Raises:
      RuntimeError: this is not the main thread, or sglang-jax did not start.
    """
    self._shapes = jax.tree.map(
      lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params
    )
    report("starting sglang-jax")
    loop = asyncio.get_running_loop()

    def call_soon(function: Callable[..., None], *args: Any) -> None:
      # RuntimeError: the loop has ended, and with it all callers.
      with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *args)

    self._bridge = scheduler_thread.Bridge(
      deliver=functools.partial(call_soon, self._requests.apply_outputs),
      on_death=functools.partial(call_soon, self._on_death),
      evict_argument=self._upstream.evict_argument,
      replicated=self._layout.sharding(),
      on_step=self._record_step,
    )
    self._upstream.start(self._bridge)
    self._watching = asyncio.create_task(self._watch(), name="sglang watch")
    leaves, checksum = await self._thread.run("convert", self._convert, params)
    await self._swap(version, leaves, checksum, idle=True)
    await self._compile(report)
    self._is_warm = True

  async def _compile(self, report: Callable[[str], None]) -> None:
    sizes, longest = self._sizes, self._config.max_length - 1
    batches = [
      (sizes.prompts(tokens, longest), 1) for tokens in sizes.token_buckets
    ]
    # The second token of a prompt is decoded.
    batches += [([1] * rows, min(2, longest)) for rows in sizes.row_buckets]
    for i, (lengths, count) in enumerate(batches):
      report(f"compiling the engine {i + 1}/{len(batches)}")
      await self.pause()  # So that they come as one batch.
      tasks = [
        asyncio.create_task(
          self.generate(sglang_requests.of_length(f"{i}/{at}", length, count))
        )
        for at, length in enumerate(lengths)
      ]
      await asyncio.sleep(0)
      self.resume()
      await asyncio.gather(*tasks)
      await self._run_job(self._open_bridge.flush, idle=True)
    self._requests.counts.clear()

  async def close(self) -> None:
    """Stops; requests in flight raise EngineClosed."""
    self._fail("the engine was closed")
    if self._watching is not None:
      self._watching.cancel()
    if self._bridge is not None:
      await asyncio.to_thread(self._bridge.close, _CLOSE_S)
      self._upstream.release()
      # sglang-jax's objects refer to each other, and may have been frozen.
      frozen = gc.get_freeze_count()
      gc.unfreeze()
      gc.collect()
      if frozen:
        gc.freeze()

  # Requests.

  async def generate(
    self, request: contract.DecodeRequest
  ) -> contract.Completion:
    """Samples one answer; see `contract.DecodeEngine.generate`."""
    async with contextlib.aclosing(self._deltas(request, False)) as deltas:
      last = await anext(deltas)
    assert last.completion is not None
    return last.completion

  async def stream(
    self, request: contract.DecodeRequest
  ) -> AsyncGenerator[contract.Delta]:
    """Yields an answer as it is sampled; see `contract.DecodeEngine.stream`."""
    async with contextlib.aclosing(self._deltas(request, True)) as deltas:
      async for delta in deltas:
        yield delta

  async def _deltas(
    self, request: contract.DecodeRequest, streams: bool
  ) -> AsyncGenerator[contract.Delta]:
    """Yields deltas, or only the last; aborts unless read to the end."""
    self._check_open()
    contract.check_request(request, self.capabilities)
    tracked = self._requests.accept(request, streams)
    try:
      while True:
        item = await tracked.deltas.get()
        if isinstance(item, contract.EngineClosed):
          raise item
        yield item
        if item.completion is not None:
          return
    finally:
      self._requests.end(tracked, "abort")

  def _submit(self, tracked: sglang_requests.TrackedRequest) -> None:
    self._send(self._upstream.request(tracked, self._version))

  def _abort(self, tracked: sglang_requests.TrackedRequest) -> None:
    self._send(self._upstream.abort(tracked.rid))

  def _send(self, message: Any) -> None:
    bridge = self._open_bridge
    bridge.post(lambda: bridge.send(message))

  def abort(self, request_id: str | None) -> None:
    """Ends a request with what it has; see `contract.DecodeEngine.abort`."""
    requests = self._requests
    for name in list(requests.all) if request_id is None else [request_id]:
      requests.end(contract.find(requests.all, name), "abort")

  def begun(self, request_id: str) -> int | None:
    """Returns the version of a first token; see `contract.DecodeEngine`."""
    return contract.find(self._requests.all, request_id).first_version

  # Weights.

  async def pause(self) -> None:
    """Stops decoding; see `contract.DecodeEngine.pause`."""
    async with self._updating:
      self._check_open()
      self._paused, self._requests.admits = True, False
      await self._run_job(self._open_bridge.hold)

  def resume(self) -> None:
    """Resumes decoding after `pause`."""
    self._paused = False
    self._admit_again()
    if self._bridge is not None:
      self._bridge.post(self._bridge.release)

  def _admit_again(self) -> None:
    self._requests.admits = not (self._paused or self._swapping)
    self._requests.admit()

  async def update_weights(
    self,
    version: int,
    params: definition.Params,
    in_flight: contract.InFlight = "recompute",
    on_step: Callable[[contract.SwitchStep], None] = contract.ignore_step,
  ) -> None:
    """Serves `params` from now on; see `contract.DecodeEngine`."""
    async with self._updating:
      self._check_open()
      contract.check_version(version, self._version)
      contract.check_in_flight(in_flight, self.capabilities)
      contract.check_same_tree(self._shapes, params)
      leaves, checksum = await self._thread.run(
        "convert", self._convert, params
      )
      await self._update(version, leaves, checksum, in_flight, on_step)

  async def _update(
    self,
    version: int,
    leaves: list[Any],
    checksum: int,
    in_flight: contract.InFlight,
    on_step: Callable[[contract.SwitchStep], None],
  ) -> None:
    start, requests = time.monotonic(), self._requests
    self._swapping, requests.admits = True, False
    running = list(requests.running.values())
    try:
      if in_flight == "drain":
        await self._drained()
        start = time.monotonic()
      elif in_flight == "abort":
        for tracked in running:
          requests.end(tracked, "abort")
      elif in_flight == "recompute":
        for tracked in running:
          requests.detach(tracked)
      idle = in_flight != "keep_kv"
      with contract.switching(on_step):
        await self._swap(version, leaves, checksum, idle=idle)
    finally:
      self._paused_s += time.monotonic() - start
      if in_flight == "recompute" and self._closed is None:
        for tracked in running:
          if not tracked.done:
            requests.submit(tracked)
      self._swapping = False
      self._admit_again()

  def _convert(self, params: definition.Params) -> tuple[list[Any], int]:
    converted = self._program(params)
    paths, leaves = self._open_bridge.leaves
    filled = sglang_weights.fill(converted, paths, leaves)
    return filled, checksum_lib.of(params)

  async def _drained(self) -> None:
    """Returns when nothing runs, although the engine may be paused."""
    if not self._requests.running:
      return
    bridge = self._open_bridge
    bridge.post(bridge.release)
    try:
      await self._requests.idle.wait()
    finally:
      if self._paused:
        bridge.post(bridge.hold)
    self._check_open()

  async def _swap(
    self,
    version: int,
    leaves: list[Any],
    checksum: int,
    *,
    idle: bool,
  ) -> None:
    bridge = self._open_bridge

    def swap() -> None:
      bridge.swap(leaves, version)
      bridge.flush()

    await self._run_job(swap, idle=idle)
    self._version, self._checksum = version, checksum

  async def checksum(self) -> tuple[int, int]:
    """Returns the served version and `checksum.of` its weights."""
    self._check_open()
    return self._version, self._checksum

  async def flush_cache(self) -> None:
    """Drops every cached prefix that no running request uses."""
    self._check_open()
    await self._run_job(self._open_bridge.flush)

  def stats(self) -> contract.EngineStats:
    """Returns the counters."""
    bridge, counts = self._bridge, self._requests.counts
    running = len(self._requests.running)
    return contract.EngineStats(
      version=self._version,
      running=running,
      waiting=len(self._requests.all) - running,
      sampled_tokens=counts["sampled"],
      prefilled_tokens=counts["prefilled"],
      cached_tokens=counts["cached"],
      dispatches=bridge.steps if bridge else 0,
      compilations=bridge.compilations if bridge else 0,
      preemptions=bridge.preemptions if bridge else 0,
      pages=bridge.pages[0] if bridge else 0,
      free_pages=bridge.pages[1] if bridge else 0,
      paused_s=self._paused_s,
    )

  # The scheduler.

  async def _run_job(
    self, job: Callable[[], None], *, idle: bool = False
  ) -> None:
    """Runs a job on the scheduler's thread; if cancelled in time, never.

    Args:
      idle: see `scheduler_thread.Bridge.post`.

    Raises:
      EngineClosed: the engine ended first.
    """
    loop, bridge = asyncio.get_running_loop(), self._open_bridge
    done: asyncio.Future[None] = loop.create_future()
    taken = threading.Lock()  # By the job, or by its cancellation.

    def deliver() -> None:
      if not done.done():
        done.set_result(None)

    def run() -> None:
      if taken.acquire(blocking=False):
        job()
        with contextlib.suppress(RuntimeError):  # The loop has ended.
          loop.call_soon_threadsafe(deliver)

    self._jobs.add(done)
    bridge.post(run, idle=idle)
    try:
      await asyncio.shield(done)
    except asyncio.CancelledError:
      if taken.acquire(blocking=False):
        bridge.cancel(run)
        raise
      await done  # Too late to undo: so it counts.
    finally:
      self._jobs.discard(done)

  @property
  def _open_bridge(self) -> scheduler_thread.Bridge:
    if self._bridge is None:
      raise RuntimeError("the engine has not started; await `start` first")
    return self._bridge

  async def _watch(self) -> None:
    """Ends the engine when the scheduler makes no progress for too long."""
    while True:
      await asyncio.sleep(_LOOK_S)
      silent = time.monotonic() - self._open_bridge.last_seen
      if silent > self._sizes.patience_s:
        self._fail(
          f"sglang-jax took no step for {silent:.0f} s; if it compiles for so "
          f"long, raise engine.patience_s={self._sizes.patience_s}"
        )
        return

  def _record_step(self, began_s: float, ended_s: float) -> None:
    # Time spent compiling is not decoding.
    name = "decode" if self._is_warm else "warm up"
    self._thread.record(name, began_s, ended_s)

  def _on_death(self, error: BaseException) -> None:
    self._fail(f"sglang-jax's scheduler raised {error!r}")

  def _check_open(self) -> None:
    if self._closed is not None:
      raise contract.EngineClosed(str(self._closed))

  def _fail(self, reason: str) -> None:
    if self._closed is not None:
      return
    self._closed = contract.EngineClosed(reason)
    self._requests.fail(self._closed)
    for done in self._jobs:
      if not done.done():
        done.set_exception(contract.EngineClosed(reason))
