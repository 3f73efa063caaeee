"""The side of a remote engine that has the devices.

  remote_engine.RemoteEngine <== connection ==> EngineWorker -> the engine

A version arrives in two steps: `stage` reads its slices into the devices while
decoding goes on, and `serve` switches to what was staged.

  export_prefix --> memory of this process --read--> import_prefix of another
"""

import asyncio
import contextlib
import dataclasses
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int32

from models import config as model_config
from rl.engine import contract
from rl.pools import placement, weight_transfer
from rl.remote import connection, weight_store, weight_stream
from rl.runtime import log_line, mesh_thread, trace

_TELL_S = 0.005
"""Between two looks at first tokens and counters."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineTask:
  """The engine that a worker is to run: settings only.

  Attributes:
    model: of the learner.
    mesh: of the engine, on the first devices of the worker.
    dtype: of the weights that it will be sent.
    platform: of its devices; None takes the one that jax finds.
    python: see `placement.DecodePool`.
    stream: sends the weights to other hosts; None is memory of this one.
  """

  model: model_config.ModelConfig
  engine: contract.EngineSpec
  mesh: placement.MeshSpec
  dtype: weight_transfer.Dtype = "same"
  platform: str | None = None
  python: str | None = None
  stream: weight_stream.StreamAddress | None = None

  @property
  def placement(self) -> placement.Placement:
    """The worker's own devices, all for this engine."""
    mesh = dataclasses.replace(self.mesh, first_device=0)
    return placement.Placement(
      decode=mesh, platform=self.platform, colocated=True
    )

  def build(self) -> "EngineWorker":
    """Returns the worker that runs it."""
    return EngineWorker(self)


class EngineWorker:
  """An engine behind a connection, whose other side starts it.

  Whoever has the socket calls `serve`.
  """

  def __init__(self, task: EngineTask):
    self._task = task
    _, layout = task.placement.layouts()
    self._spans = trace.Trace(None)
    self._thread = mesh_thread.MeshThread("decode", self._spans)
    self._copier = mesh_thread.MeshThread("host", self._spans)
    model = weight_transfer.pool_model(task.model, task.dtype)
    self._engine = task.engine.build(model, layout, self._thread)
    shapes = weight_transfer.pool_shapes(task.model, task.dtype)
    places = weight_transfer.pool_shardings(task.model, layout, task.dtype)
    self._tree = jax.tree.structure(shapes)
    self._shapes = jax.tree.leaves(shapes)
    self._places = self._tree.flatten_up_to(places)
    # Arrays of the version that is served, and of the one that is staged, by
    # the names of their tensors.
    self._served: dict[str, jax.Array] = {}
    self._staged: dict[str, jax.Array] = {}
    # Keys and values for other workers, by the names of their hand-overs.
    self._exported: dict[str, Sequence[weight_store.StoredTensor]] = {}
    self._host = ""
    self._outlet: weight_stream.WeightStream | None = None
    self._unbegun: set[str] = set()
    self._told: contract.EngineStats | None = None
    self._post: Callable[..., None] = lambda *notice: None

  async def serve(self, socket: connection.Socket, name: str) -> str:
    """Serves until the stream ends; returns why it did.

    SIGTERM asks the other side to let it go; a second one ends it at once.
    """
    stream = connection.Connection(
      socket,
      name=name,
      serves={
        "start": self._start,
        "generate": self._generate,
        "stream": self._stream,
        "pause": self._engine.pause,
        "stage": self._stage,
        "serve": self._serve,
        "checksum": self._engine.checksum,
        "flush_cache": self._engine.flush_cache,
        "export_prefix": self._export_prefix,
        "import_prefix": self._import_prefix,
      },
      hears={
        "abort": self._abort,
        "resume": self._engine.resume,
        "release_prefix": self._release_prefix,
      },
      before_answering=self._tell_stats,
    )
    self._post = stream.post
    # As the run's host is reached from here, other workers reach this one.
    self._host = getattr(socket, "local_address", ("",))[0]
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._leave)
    watching = asyncio.create_task(self._watch())
    try:
      return await stream.run()
    finally:
      watching.cancel()
      await self.close()

  def _leave(self) -> None:
    told = "to leave once nothing is asked of it; again to end at once"
    log_line.tell(told, sys.stdout)
    self._post("leave")
    asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)

  async def close(self) -> None:
    """Stops the engine and its threads."""
    await self._engine.close()
    if self._outlet is not None:
      await asyncio.to_thread(self._outlet.close)
    for thread in (self._thread, self._copier):
      thread.close()

  # What it tells.

  async def _watch(self) -> None:
    """Tells first tokens and counters, for as long as it runs."""
    while True:
      await asyncio.sleep(_TELL_S)
      self._tell_begun()
      self._tell_stats()
      self._tell_spans()

  def _tell_spans(self) -> None:
    """Tells the work of its devices, and the time, on the clock of its host."""
    since, fresh = self._spans.origin, self._spans.spans[:]
    del self._spans.spans[: len(fresh)]
    if fresh:
      work = [(x.track, x.name, since + x.start, since + x.end) for x in fresh]
      self._post("spans", work, self._spans.now())

  def _tell_begun(self) -> None:
    begun = {}
    for name in self._unbegun:
      with contextlib.suppress(ValueError):  # It has not quite arrived.
        if (version := self._engine.begun(name)) is not None:
          begun[name] = int(version)
    if begun:
      self._unbegun -= begun.keys()
      self._post("begun", begun)

  def _tell_stats(self) -> None:
    stats = self._engine.stats()
    if stats != self._told:
      self._told = stats
      self._post("stats", stats)

  def _tell_step(self, step: contract.SwitchStep) -> None:
    # First tokens of the old version come before the switch.
    self._tell_begun()
    self._post("step", step)

  # Requests.

  async def _generate(
    self, request: contract.DecodeRequest
  ) -> contract.Completion:
    with self._asking(request):
      return await self._engine.generate(request)

  async def _stream(
    self, request: contract.DecodeRequest
  ) -> AsyncGenerator[contract.Delta]:
    with self._asking(request):
      deltas: Any = self._engine.stream(request)
      async with contextlib.aclosing(deltas):
        async for delta in deltas:
          yield delta

  @contextlib.contextmanager
  def _asking(self, request: contract.DecodeRequest) -> Iterator[None]:
    self._unbegun.add(request.request_id)
    try:
      yield
    finally:
      self._unbegun.discard(request.request_id)

  def _abort(self, request_id: str | None) -> None:
    with contextlib.suppress(ValueError):  # It has just ended.
      self._engine.abort(request_id)

  # Prefixes for other workers, and from them.

  async def _export_prefix(
    self,
    name: str,
    ids: Int32[np.ndarray, " N"],
    start: int,
    priority: tuple[int, ...],
  ) -> contract.PrefixPages:
    """Keeps pages of a prompt until the other side releases them."""
    engine = self._engine
    assert isinstance(engine, contract.PrefixEngine)
    async with engine.export_prefix(ids, start, priority) as prefix:
      if not prefix.nbytes:
        return prefix
      stored = await asyncio.to_thread(weight_store.keep, prefix.pages)
    self._exported[name] = stored
    addresses = [tensor.address for tensor in stored]
    return prefix._replace(pages=(addresses, self._stream_address()))

  def _release_prefix(self, name: str) -> None:
    self._exported.pop(name, None)

  def _stream_address(self) -> dict[str, Any] | None:
    """Returns where workers of other hosts read; None: there are none."""
    if self._task.stream is None:
      return None
    if self._outlet is None:
      self._outlet = weight_stream.WeightStream(self._host)
    return dataclasses.asdict(self._outlet.address)

  async def _import_prefix(self, given: Sequence[Any]) -> str:
    """Reads pages from another worker into the prefix cache."""
    engine, prefix = self._engine, contract.PrefixPages(*given)
    assert isinstance(engine, contract.PrefixEngine)
    if prefix.version != engine.stats().version:
      return "version"
    pages = await asyncio.to_thread(_read_pages, *prefix.pages)
    return await engine.import_prefix(prefix._replace(pages=pages))

  # Weights.

  async def _start(
    self, version: int, tensors: Sequence[weight_store.Tensor]
  ) -> None:
    await self._stage(tensors)
    await self._engine.start(
      self._params(tensors), version, lambda text: self._post("report", text)
    )
    self._served = self._staged

  async def _stage(self, tensors: Sequence[weight_store.Tensor]) -> int:
    """Reads weights into the devices; returns the bytes that were read.

    Args:
      tensors: of the leaves, in order of the tree. Those that are served
        already are not read again.

    Raises:
      ValueError: they are another model's, or damaged.
    """
    tensors = [weight_store.Tensor._make(tensor) for tensor in tensors]
    wanted = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    expected = [(leaf.shape, leaf.dtype.name) for leaf in self._shapes]
    if wanted != expected:
      raise ValueError("these are the weights of another model")
    self._staged, num_bytes = await self._copier.run(
      "stage", self._read, tensors
    )
    return num_bytes

  def _read(
    self, tensors: Sequence[weight_store.Tensor]
  ) -> tuple[dict[str, jax.Array], int]:
    arrays: dict[str, jax.Array] = {}
    opened = weight_stream.reader_at(self._task.stream)
    with weight_store.Readers(opened) as readers:
      for tensor, place in zip(tensors, self._places, strict=True):
        if (array := self._served.get(tensor.name)) is None:
          array = weight_store.placed(readers.of(tensor), tensor, place)
        arrays[tensor.name] = array
      return arrays, readers.bytes_read

  def _params(self, tensors: Sequence[weight_store.Tensor]) -> Any:
    names = [weight_store.Tensor._make(tensor).name for tensor in tensors]
    return self._tree.unflatten([self._staged[name] for name in names])

  async def _serve(
    self,
    version: int,
    tensors: Sequence[weight_store.Tensor],
    in_flight: contract.InFlight,
  ) -> None:
    """Switches to what was staged."""
    staged, params = self._staged, self._params(tensors)
    await self._engine.update_weights(
      version, params, in_flight, self._tell_step
    )
    self._served = staged


def _read_pages(
  addresses: Sequence[Sequence[Any]], stream: dict[str, Any] | None
) -> list[np.ndarray]:
  """Returns whole tensors of another worker.

  Raises:
    ValueError: they are gone, or damaged.
  """
  place = None if stream is None else weight_stream.StreamAddress(**stream)
  tensors = [weight_store.Tensor._make(address) for address in addresses]
  try:
    with weight_store.Readers(weight_stream.reader_at(place)) as readers:
      return [
        readers.of(x).read(x.name, x.shape, np.dtype(x.dtype), ())
        for x in tensors
      ]
  except OSError as error:
    raise ValueError(
      f"the keys and values are out of reach: {error}"
    ) from error
