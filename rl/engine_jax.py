"""The built-in decode engine: continuous batching over cached sessions.

  generate -> waiting --admit--> running --(plan, dispatch, absorb)*--> result
                (by priority)    owns a cache row until its session is released

A dispatch serves every running row whose new ids fit the same chunk: it feeds
them and samples up to `steps_per_dispatch` tokens a row. Turn k + 1 of a
session feeds only what turn k has not fed yet.
"""

import asyncio
import functools
import heapq
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np

from models import cache as cache_lib
from models import config as model_config
from models import sharding, transformer
from rl import decode_step, dispatch, engine, engine_plan, slots, trajectory

_CLOSE_S = 5.0


# A dispatch that has run: its requests, its plan and what was sampled.
_Done = tuple[list[engine_plan.Running], decode_step.Plan, decode_step.Sampled]


class JaxEngine:
  """`engine.DecodeEngine` over the models of this project.

  Life: `await start(params)`, then the protocol, then `await close()`. All on
  one event loop; device work happens on `thread`.

  Args:
    thread: of the pool's mesh; the caller closes it.
  """

  capabilities: frozenset[engine.OnPublish] = frozenset({"drain", "recompute"})

  def __init__(
    self,
    config: model_config.ModelConfig,
    settings: engine_plan.EngineSettings,
    layout: sharding.Layout,
    thread: dispatch.MeshThread,
  ):
    settings.validate()
    self._config = config
    self._settings = settings
    self._layout = layout
    self._thread = thread
    self._version = trajectory.PolicyVersion(-1)
    self._params: transformer.Params | None = None
    self._slots = slots.Slots(settings.slots)
    self._ids = np.zeros((settings.slots, config.max_length), np.int32)
    self._cached = np.zeros(settings.slots, np.int32)
    self._waiting: list[tuple[tuple[int, ...], int, engine_plan.Running]] = []
    self._arrivals = itertools.count()
    self._running: dict[str, engine_plan.Running] = {}
    self._requests: dict[str, engine_plan.Running] = {}
    self._sessions: dict[str, engine_plan.Running] = {}
    self._mode: Literal["open", "draining", "paused"] = "open"
    self._wake = asyncio.Event()
    self._quiet = asyncio.Event()
    self._closed: engine.EngineClosed | None = None
    self._server: asyncio.Task[None] | None = None
    self._turn = 0
    self._counts = dict.fromkeys(("sampled", "prefilled", "dispatches"), 0)
    self._build()

  def _build(self) -> None:
    rows = self._layout.sharding("batch")
    cache = self._layout.sharding(*cache_lib.AXES)
    programs = {
      whole: jax.jit(
        functools.partial(
          decode_step.advance,
          config=self._config,
          layout=self._layout,
          max_steps=self._settings.steps_per_dispatch,
          whole=whole,
        ),
        donate_argnums=1,
        out_shardings=(cache, None),
      )
      for whole in (False, True)
    }
    # Any: `_cache_size` is the only count of compilations that jax has.
    self._programs: dict[bool, Any] = programs
    self._row_sharding = rows
    self._cache_sharding = cache

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
    self._cache = jax.jit(
      functools.partial(
        cache_lib.init_cache,
        self._config,
        self._settings.slots,
        self._config.max_length,
      ),
      out_shardings=self._cache_sharding,
    )()
    shapes = list(
      itertools.product(self._settings.rows, self._settings.chunk_buckets)
    )
    for i, (rows, chunk) in enumerate(shapes):
      report(f"compiling the engine {i + 1}/{len(shapes)}")
      plan = decode_step.empty_plan(rows, chunk, idle_row=self._settings.slots)
      await self._thread.run("warm up", self._dispatch, plan)
    self._server = asyncio.create_task(self._serve(), name="engine")

  async def close(self) -> None:
    """Stops; requests in flight raise EngineClosed."""
    self._fail(engine.EngineClosed("the engine was closed"))
    self._wake.set()
    if self._server is not None:
      # Cancelled on overrun: its device program may hang.
      await asyncio.wait([self._server], timeout=_CLOSE_S)
      self._server.cancel()

  def _fail(self, reason: engine.EngineClosed) -> None:
    self._closed = self._closed or reason
    for running in list(self._requests.values()):
      if not running.future.done():
        running.future.set_exception(engine.EngineClosed(str(self._closed)))
    self._requests.clear()
    self._running.clear()
    self._waiting.clear()

  # The protocol.

  async def generate(self, request: engine.DecodeRequest) -> engine.Completion:
    """Samples one answer; see `engine.DecodeEngine.generate`."""
    self._check_open()
    self._check(request)
    loop = asyncio.get_running_loop()
    running = engine_plan.Running(
      request, loop.create_future(), time.monotonic()
    )
    self._requests[request.request_id] = running
    self._sessions[request.session] = running
    entry = (request.priority, next(self._arrivals), running)
    heapq.heappush(self._waiting, entry)
    self._wake.set()
    try:
      return await running.future
    except asyncio.CancelledError:
      self.abort(request.request_id)
      raise

  def _check_open(self) -> None:
    if self._closed is not None:
      raise engine.EngineClosed(str(self._closed))

  def _check(self, request: engine.DecodeRequest) -> None:
    engine.check_request(
      request,
      vocab_size=self._config.vocab_size,
      max_length=self._config.max_length,
      max_stop_ids=decode_step.MAX_STOP_IDS,
    )
    if request.request_id in self._requests:
      raise ValueError(f"request {request.request_id} is already in flight")
    if request.session in self._sessions:
      raise ValueError(f"session {request.session} already has a request")

  def abort(self, request_id: str) -> None:
    """Ends a request with what it has; unknown ids are ignored."""
    running = self._requests.get(request_id)
    if running is not None:
      self._finish(running, "abort")

  def release(self, session: str) -> None:
    """Frees the cache of a session that ended; unknown ones are ignored."""
    running = self._sessions.get(session)
    if running is not None:
      self._finish(running, "abort")
    # The device may still be writing to the row. Its next owner comes with
    # `_admit`, which runs between dispatches only.
    self._slots.release(session)
    self._wake.set()

  async def pause(self, in_flight: engine.OnPublish) -> None:
    """Suspends; see `engine.DecodeEngine.pause`."""
    self._check_open()
    self._mode = "draining" if in_flight == "drain" else "paused"
    if self._mode == "draining" and self._running:
      self._quiet.clear()  # An earlier pause may have left them half done.
    self._wake.set()
    await self._quiet.wait()
    self._mode = "paused"

  async def update_weights(
    self, version: trajectory.PolicyVersion, params: transformer.Params
  ) -> None:
    """Serves `params` from now on; see `engine.DecodeEngine`."""
    self._check_open()
    if self._mode != "paused" or not self._quiet.is_set():
      raise RuntimeError("update_weights needs a paused engine: await pause()")
    if version <= self._version:
      raise ValueError(
        f"version {version} is not above the served {self._version}"
      )
    engine.check_same_tree(self._params, params)
    self._params = params
    self._version = version
    self._cached[:] = 0

  def resume(self) -> None:
    """Goes on after `pause`."""
    self._mode = "open"
    self._wake.set()

  def stats(self) -> engine.EngineStats:
    """Returns the counters."""
    return engine.EngineStats(
      version=int(self._version),
      running=len(self._running),
      waiting=sum(not r.future.done() for _, _, r in self._waiting),
      sampled_tokens=self._counts["sampled"],
      prefilled_tokens=self._counts["prefilled"],
      dispatches=self._counts["dispatches"],
      compilations=sum(p._cache_size() for p in self._programs.values()),
    )

  # The loop.

  async def _serve(self) -> None:
    """Dispatches while there is work; absorbs one dispatch during the next."""
    done: _Done | None = None
    try:
      while self._closed is None:
        ready = self._ready(done)
        if done is not None and not self._settings.worthwhile(len(ready)):
          self._absorb(*done)
          done = None
          ready = await self._linger()
        if not ready:
          self._quiet.set()
          self._wake.clear()
          if not self._ready(done):  # Nothing came while it was absorbed.
            await self._wake.wait()
          continue
        self._quiet.clear()
        chosen, plan = self._plan(ready)
        step = asyncio.create_task(
          self._thread.run("decode", self._dispatch, plan)
        )
        await asyncio.sleep(0)  # It starts; the device works from here on.
        if done is not None:
          self._absorb(*done)
        done = (chosen, plan, await step)
    except Exception as error:  # A broken device program ends the engine.
      self._fail(engine.EngineClosed(f"decoding raised {error!r}"))
      raise
    finally:
      self._quiet.set()

  def _ready(self, done: _Done | None) -> list[engine_plan.Running]:
    """Returns the requests whose next ids are known, in order of admission."""
    self._admit()
    if self._mode == "paused":
      return []
    busy = set(map(id, done[0])) if done else set()
    return [one for one in self._running.values() if id(one) not in busy]

  async def _linger(self) -> list[engine_plan.Running]:
    """Returns `_ready` after sessions that come back at once had their time."""
    deadline = time.monotonic() + self._settings.linger_s
    while True:
      ready = self._ready(None)
      expected = self._settings.slots - self._slots.num_free
      full = len(ready) >= min(expected, self._settings.rows[0])
      late = time.monotonic() >= deadline
      if full or late or self._mode != "open" or self._closed is not None:
        return ready
      await asyncio.sleep(self._settings.linger_s / 8)

  def _admit(self) -> None:
    while self._waiting and self._mode == "open":
      _, _, running = self._waiting[0]
      if running.future.done():
        heapq.heappop(self._waiting)
        continue
      place = self._slots.acquire(running.request.session)
      if place is None:
        return
      heapq.heappop(self._waiting)
      self._place(running, *place)

  def _place(self, running: engine_plan.Running, row: int, kept: bool) -> None:
    tokens = running.request.tokens
    running.row = row
    running.known = len(tokens)
    held = min(int(self._cached[row]) if kept else 0, len(tokens) - 1)
    same = self._ids[row, :held] == tokens[:held]
    held = held if same.all() else int(same.argmin())
    self._cached[row] = running.cached_tokens = held
    self._ids[row, : len(tokens)] = tokens
    self._running[running.request.session] = running

  def _plan(
    self, ready: Sequence[engine_plan.Running]
  ) -> tuple[list[engine_plan.Running], decode_step.Plan]:
    self._turn += 1
    return engine_plan.plan(
      ready, self._ids, self._cached, self._settings, self._turn
    )

  def _dispatch(self, plan: decode_step.Plan) -> decode_step.Sampled:
    whole = len(plan.chunk) == self._settings.slots
    placed = jax.device_put(plan, self._row_sharding)
    self._cache, sampled = self._programs[whole](
      self._params, self._cache, placed
    )
    return jax.device_get(sampled)

  def _absorb(
    self,
    chosen: Sequence[engine_plan.Running],
    plan: decode_step.Plan,
    sampled: decode_step.Sampled,
  ) -> None:
    whole = len(plan.chunk) == self._settings.slots
    # Lists: numpy's scalars cost more than the rest of this loop.
    tokens, logprobs, counts = (x.tolist() for x in sampled)
    fed = plan.integers[:, 2].tolist()
    version = int(self._version)
    self._counts["dispatches"] += 1
    for i, running in enumerate(chosen):
      if running.future.done():  # Aborted meanwhile.
        continue
      row = running.row
      at = row if whole else i
      count, known = counts[at], running.known
      self._counts["prefilled"] += fed[at]
      self._counts["sampled"] += count
      self._cached[row] += fed[at] + max(count - 1, 0)
      if not count:
        continue
      self._ids[row, known : known + count] = tokens[at][:count]
      running.known = known + count
      running.logprobs += logprobs[at][:count]
      running.versions += [version] * count
      stop = running.why_ended(tokens[at][count - 1])
      if stop is not None:
        self._finish(running, stop)

  def _finish(
    self, running: engine_plan.Running, stop: trajectory.Stop
  ) -> None:
    request = running.request
    self._requests.pop(request.request_id, None)
    self._sessions.pop(request.session, None)
    tokens = np.zeros(0, np.int32)
    if running.row >= 0:
      start = len(request.tokens)
      tokens = self._ids[running.row, start : running.known].copy()
      self._running.pop(request.session, None)
      self._slots.rest(request.session)
    if not running.future.done():
      running.future.set_result(running.completion(tokens, stop))
