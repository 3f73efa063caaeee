"""A decode engine in a process of its own, on this host or another.

  generate, stream, abort --> connection ==> engine_worker.EngineWorker
  export_prefix: keys and values into its shared memory -> import_prefix
  begun, stats <-- what the worker has told by then
  update_weights: weights into shared memory -> stage -> serve

On another host the worker reads that memory through `weight_stream`.

The worker is started by `start`, unless it has joined by itself. When its
process ends or falls silent, all that waits raises EngineClosed with the last
lines of its log.
"""

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import pathlib
from collections.abc import (
  AsyncGenerator,
  Callable,
  Iterator,
  Mapping,
  Sequence,
)
from typing import Any

import jax
import numpy as np
from jaxtyping import Int32

from rl import experiment as experiment_lib
from rl.backends import contract as backends
from rl.engine import contract
from rl.pools import placement
from rl.remote import connection, engine_worker, joining, weight_store
from rl.remote import workers as workers_lib
from rl.runtime import mesh_thread, trace
from rl.runtime import watchdog as watchdog_lib
from rl.settings import overrides

_CONNECT_S = 120.0
_START_S = 1800.0
"""Longest start: programs are compiled in it."""
_CLOSE_S = 5.0
_CALL_S = 300.0
"""Longest transfer, switch or checksum, unless a run waits longer."""
_NEVER = contract.EngineStats(
  version=-1, running=0, waiting=0, sampled_tokens=0, prefilled_tokens=0
)


@dataclasses.dataclass(slots=True, eq=False)
class _Request:
  """A request that its worker has been sent and has not answered."""

  first_version: int | None = None


class RemoteEngine:
  """`contract.DecodeEngine` in another process.

  Args:
    name: of its worker.
    spans: gets the work of its devices.
    thread: writes weights to shared memory; the caller closes it.
    guest: the worker, if others have started it.
    call_s: longest transfer, switch or checksum.
  """

  def __init__(
    self,
    task: engine_worker.EngineTask,
    name: str,
    workers: workers_lib.Workers,
    store: weight_store.WeightStore,
    thread: mesh_thread.MeshThread,
    spans: trace.Trace,
    guest: workers_lib.Guest | None = None,
    call_s: float = _CALL_S,
  ):
    able = task.engine.capabilities(task.model)
    # A grammar's state is an object of this process.
    self.capabilities = dataclasses.replace(able, constraints=False)
    self._task = task
    self._name = name
    self._workers = workers
    self._store = store
    self._thread = thread
    self._spans = spans
    self._call_s = call_s
    self._requests: dict[str, _Request] = {}
    self._stats = _NEVER
    self._behind_s = math.inf  # Of its clock, behind that of this process.
    self._num_prefixes = itertools.count()
    self._report: Callable[[str], None] = lambda text: None
    self._on_step = contract.ignore_step
    self._update_lock = asyncio.Lock()
    self._served: Any = None
    self._staged: Any = None
    self._guest = guest
    self._worker: workers_lib.Worker | workers_lib.Guest | None = guest
    self._told = asyncio.Event()  # To leave, or of its end.
    self._stream: connection.Connection | None = None
    self._watching: asyncio.Task[None] | None = None
    self._closed: contract.EngineClosed | None = None

  # Start and end.

  async def start(
    self,
    params: Any,
    version: int,
    report: Callable[[str], None] = lambda text: None,
  ) -> None:
    """Starts a process that takes the first weights and begins to serve.

    Raises:
      EngineClosed: it ended, or took too long.
    """
    self._report = report
    if self._guest is None:
      report(f"starting a process for {self._name}")
    stored = await self._stored(params)
    try:
      self._worker, self._stream = await self._connect()
    except workers_lib.NotStarted as error:
      raise contract.EngineClosed(str(error)) from error
    self._watching = asyncio.create_task(self._watch(), name=self._name)
    await self._call("start", version, _tensors(stored), deadline_s=_START_S)
    self._served = stored

  async def _connect(
    self,
  ) -> tuple[workers_lib.Worker | workers_lib.Guest, connection.Connection]:
    task = json.dumps(overrides.to_json(self._task))
    hears = {
      "begun": self._hear_begun,
      "stats": self._hear_stats,
      "spans": self._hear_spans,
      "step": lambda step: self._on_step(step),
      "report": lambda text: self._report(text),
      "leave": self._told.set,
    }
    if self._guest is not None:
      started = await self._guest.start(self._name, task, hears=hears)
      return self._guest, started
    return await self._workers.start(
      self._name,
      task,
      environment=workers_lib.environment(),
      hears=hears,
      deadline_s=_CONNECT_S,
      python=self._task.python,
    )

  async def told_to_leave(self) -> None:
    """Returns once SIGTERM was sent to it; see `contract.LeavingEngine`."""
    await self._told.wait()
    self._check_open()

  async def _watch(self) -> None:
    """Closes the engine when its worker is lost."""
    assert self._stream is not None
    assert self._worker is not None
    await self._stream.lost.wait()
    words = await asyncio.to_thread(self._worker.last_words)
    self._fail(f"its process was lost: {words}")

  def _fail(self, reason: str) -> None:
    self._closed = self._closed or contract.EngineClosed(reason)
    self._requests.clear()
    self._told.set()

  async def close(self) -> None:
    """Ends its process; requests in flight raise EngineClosed."""
    was_told = self._told.is_set() and self._closed is None
    self._fail("the engine was closed")
    if self._watching is not None:
      self._watching.cancel()
    if self._guest is not None and self._served is None:
      await self._guest.refuse("it could not start")
    if self._stream is not None:
      await self._stream.close()
    if self._worker is not None:
      await self._worker.end(gently=was_told)
    self._served = self._staged = None

  @property
  def pid(self) -> int:
    """Number of its process, once that has connected."""
    assert self._worker is not None
    return self._worker.pid

  def _check_open(self) -> connection.Connection:
    if self._closed is not None:
      raise contract.EngineClosed(str(self._closed))
    if self._stream is None:
      raise contract.EngineClosed(f"{self._name} has not been started")
    return self._stream

  async def _call(
    self, method: str, *args: Any, deadline_s: float | None = None
  ) -> Any:
    """Returns the worker's answer.

    Args:
      deadline_s: another than that of all calls.

    Raises:
      EngineClosed: it is lost, and this one with it.
      ValueError: so did the engine.
    """
    stream = self._check_open()
    try:
      limit_s = deadline_s or self._call_s
      return await stream.call(method, *args, deadline_s=limit_s)
    except (connection.Lost, connection.Failed) as error:
      raise await self._why_lost(error) from error

  async def _why_lost(self, error: Exception) -> contract.EngineClosed:
    """Returns what to raise after the worker failed, which ends it."""
    if isinstance(error, connection.Failed):
      self._fail(str(error))
    if self._stream is not None:
      await self._stream.close()
    if self._watching is not None:
      await asyncio.wait([self._watching], timeout=_CLOSE_S)
    self._fail(str(error))
    return contract.EngineClosed(str(self._closed))

  # Requests.

  async def generate(
    self, request: contract.DecodeRequest
  ) -> contract.Completion:
    """Samples one answer; see `contract.DecodeEngine.generate`."""
    with self._asking(request):
      return await self._call("generate", request, deadline_s=math.inf)

  async def stream(
    self, request: contract.DecodeRequest
  ) -> AsyncGenerator[contract.Delta]:
    """Yields an answer as it is sampled; see `contract.DecodeEngine.stream`."""
    with self._asking(request):
      deltas = self._check_open().items("stream", request, deadline_s=math.inf)
      async with contextlib.aclosing(deltas):
        try:
          async for delta in deltas:
            yield delta
        except (connection.Lost, connection.Failed) as error:
          raise await self._why_lost(error) from error

  @contextlib.contextmanager
  def _asking(self, request: contract.DecodeRequest) -> Iterator[None]:
    self._check_open()
    contract.check_request(request, self.capabilities)
    name, asked = request.request_id, _Request()
    if name in self._requests:
      raise ValueError(f"request {name} is already in flight")
    self._requests[name] = asked
    try:
      yield
    finally:
      if self._requests.get(name) is asked:
        del self._requests[name]

  def abort(self, request_id: str | None) -> None:
    """Ends a request with what it has; see `contract.DecodeEngine.abort`."""
    if request_id is None:
      self._requests.clear()
    else:
      contract.find(self._requests, request_id)
      del self._requests[request_id]
    if self._stream is not None:
      self._stream.post("abort", request_id)

  def begun(self, request_id: str) -> int | None:
    """Returns the version of a first token; see `contract.DecodeEngine`."""
    return contract.find(self._requests, request_id).first_version

  # Prefixes for other engines, and from them.

  @contextlib.asynccontextmanager
  async def export_prefix(
    self,
    ids: Int32[np.ndarray, " N"],
    start: int = 0,
    priority: tuple[int, ...] = (),
  ) -> AsyncGenerator[contract.PrefixPages]:
    """Yields where to read pages; see `contract.PrefixEngine`."""
    name = f"prefix {next(self._num_prefixes)}"
    try:
      found = await self._call(
        "export_prefix", name, ids, start, priority, deadline_s=math.inf
      )
      yield contract.PrefixPages(*found)
    finally:
      # Behind the call, so that nothing is kept for it, however it ended.
      if self._stream is not None:
        self._stream.post("release_prefix", name)

  async def import_prefix(self, prefix: contract.PrefixPages) -> str:
    """Adds pages of another worker; see `contract.PrefixEngine`."""
    return await self._call("import_prefix", prefix)

  # Heard from the worker.

  def _hear_begun(self, versions: dict[str, int]) -> None:
    for name, version in versions.items():
      if (asked := self._requests.get(name)) is not None:
        asked.first_version = version

  def _hear_stats(self, stats: contract.EngineStats) -> None:
    self._stats = stats

  def _hear_spans(
    self, work: Sequence[tuple[str, str, float, float]], told_s: float
  ) -> None:
    # Each host has a clock of its own; the quickest message says best how far
    # they are apart.
    self._behind_s = min(self._behind_s, self._spans.now() - told_s)
    for track, name, start, end in work:
      self._spans.add(track, name, start + self._behind_s, end + self._behind_s)

  def stats(self) -> contract.EngineStats:
    """Returns the counters, as of a moment ago; requests are counted here."""
    total = len(self._requests)
    running = min(self._stats.running, total)
    return dataclasses.replace(
      self._stats, running=running, waiting=total - running
    )

  # Weights.

  async def pause(self) -> None:
    """Stops decoding; see `contract.DecodeEngine.pause`."""
    await self._call("pause")

  def resume(self) -> None:
    """Resumes decoding after `pause`."""
    if self._stream is not None:
      self._stream.post("resume")

  async def stage(self, params: Any) -> None:
    """Brings weights to the worker's devices, while decoding goes on.

    Args:
      params: arrays, or tensors of its store; see `contract.StagingEngine`.
    """
    self._check_open()
    contract.check_same_tree(self._served, params)
    stored = await self._stored(params)
    await self._call("stage", _tensors(stored))
    self._staged = stored

  async def update_weights(
    self,
    version: int,
    params: Any,
    in_flight: contract.InFlight = "recompute",
    on_step: Callable[[contract.SwitchStep], None] = contract.ignore_step,
  ) -> None:
    """Serves `params` from now on; see `contract.DecodeEngine`."""
    self._check_open()
    contract.check_in_flight(in_flight, self.capabilities)
    contract.check_same_tree(self._served, params)
    async with self._update_lock:
      contract.check_version(version, self._stats.version)
      if self._staged is not params:
        await self.stage(params)
      stored, self._staged = self._staged, None
      self._on_step = on_step
      try:
        # A drain takes as long as the longest answer.
        limit_s = math.inf if in_flight == "drain" else None
        tensors = _tensors(stored)
        await self._call(
          "serve", version, tensors, in_flight, deadline_s=limit_s
        )
      finally:
        self._on_step = contract.ignore_step
      self._served = stored

  async def _stored(self, params: Any) -> Any:
    """Returns the weights as tensors of the store."""
    leaves, tree = jax.tree.flatten(params)
    if all(isinstance(leaf, weight_store.StoredTensor) for leaf in leaves):
      return params
    stored = await self._thread.run("store", self._store.write, leaves)
    return tree.unflatten(stored)

  async def checksum(self) -> tuple[int, int]:
    """Returns the served version and `checksum.of` its weights."""
    version, total = await self._call("checksum")
    return version, total

  async def flush_cache(self) -> None:
    """Drops every cached prefix that no running request uses."""
    await self._call("flush_cache")


def _tensors(stored: Any) -> list[weight_store.Tensor]:
  """Returns what a worker needs to know of weights in the store."""
  return [leaf.address for leaf in jax.tree.leaves(stored)]


Join = Callable[[Callable[[int], RemoteEngine], placement.EngineInfo], object]
"""Lets an engine in, as `membership.Membership.join` does."""


class RemoteEngines:
  """The engines of a run that have processes of their own.

  `assemble.Parts` makes one for all of them, and closes it after its router.

  Args:
    tasks: of the engines of each pool.
    run_dir: has their output, and the address at which others may join.
    thread: writes weights to shared memory; the caller closes it.
    spans: gets the work of their devices.
    backend: starts their processes.
    call_s: longest transfer, switch or checksum.

  Raises:
    Unreachable: the backend cannot be reached.
  """

  def __init__(
    self,
    tasks: Mapping[placement.EngineInfo, engine_worker.EngineTask],
    run_dir: pathlib.Path | None,
    thread: mesh_thread.MeshThread,
    spans: trace.Trace,
    watchdog: watchdog_lib.Watchdog = watchdog_lib.UNHEARD,
    *,
    backend: backends.Backend,
    call_s: float = _CALL_S,
  ):
    self._run_dir = run_dir
    self._call_s = call_s
    self._thread = thread
    self._spans = spans
    log_dir = run_dir and run_dir / "workers"
    self._workers = workers_lib.Workers(log_dir, watchdog, backend)
    address = self._workers.weights and self._workers.weights.address
    self._tasks = {
      info: dataclasses.replace(task, stream=address)
      for info, task in tasks.items()
    }
    self._store = weight_store.WeightStore()
    self.write = self._store.write

  def build(
    self,
    number: int,
    info: placement.EngineInfo,
    guest: workers_lib.Guest | None = None,
  ) -> RemoteEngine:
    """Returns an engine, not started."""
    return RemoteEngine(
      self._tasks[info],
      f"engine {number}",
      self._workers,
      self._store,
      self._thread,
      self._spans,
      guest,
      self._call_s,
    )

  async def admit(self, join: Join) -> None:
    """Lets processes that others start join, until `close`."""

    def arrived(pool: str, guest: workers_lib.Guest) -> None:
      infos = {info.pool: info for info in self._tasks}
      if (info := infos.get(pool)) is None:
        raise ValueError(
          f"pool {pool} cannot be joined; use {', '.join(infos)}"
        )
      join(functools.partial(self.build, info=info, guest=guest), info)

    self._workers.on_guest = arrived
    address = await self._workers.listen()
    if self._run_dir is not None:
      joining.write(self._run_dir, address, self._workers.token)

  async def close(self) -> None:
    """Ends every process that is left."""
    if self._run_dir is not None:
      joining.remove(self._run_dir)
    await self._workers.close()


def of_experiment(
  experiment: experiment_lib.Experiment,
  run_dir: pathlib.Path | None,
  thread: mesh_thread.MeshThread,
  spans: trace.Trace,
  watchdog: watchdog_lib.Watchdog,
) -> RemoteEngines:
  """Returns the engines of an experiment that have processes of their own."""
  tasks = {
    pool.info: engine_worker.EngineTask(
      model=experiment.model,
      engine=experiment.engine,
      mesh=pool.mesh,
      dtype=experiment.publishing.dtype,
      platform=experiment.placement.platform,
      python=pool.python,
    )
    for pool in experiment.placement.pools
    if pool.processes
  }
  return RemoteEngines(
    tasks,
    run_dir,
    thread,
    spans,
    watchdog,
    backend=experiment.placement.backend,
    # Before the run gives up its wait for the publish: then only one is lost.
    call_s=max(_CALL_S, experiment.progress_timeout_s / 2),
  )
