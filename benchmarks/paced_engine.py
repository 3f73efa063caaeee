"""A built-in engine that has a share of a processor, by kind of program.

Where programs that encode context have another share than those that only
sample, engines differ as accelerators do, one of which computes faster and the
other of which reads its memory faster.
"""

import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax

from benchmarks import rollart_affinity, small_parts
from models import config as model_config
from models import sharding
from rl.backends import local
from rl.engine.builtin import engine
from rl.engine.builtin import settings as engine_settings
from rl.pools import placement
from rl.remote import engine_worker, remote_engine
from rl.runtime import mesh_thread, trace


class Shares(NamedTuple):
  """Shares of a processor that an engine has to encode and to sample."""

  encode: float
  sample: float


MOST = 0.3
"""Of a processor: little enough for others to leave it."""
TWO_KINDS = (
  Shares(MOST, MOST / rollart_affinity.BANDWIDTH_RATIO),
  Shares(MOST * rollart_affinity.COMPUTE_RATIO, MOST),
)
ALIKE = (Shares(MOST, MOST), Shares(MOST, MOST))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PacedEngine(engine_settings.EngineSettings):
  """A built-in engine whose programs take longer than the processor needs.

  A program that needs c seconds of a processor takes c / share: it is followed
  by a sleep. So the time does not depend on what else the machine does, as long
  as that leaves the process its share. Work between programs is not paced.

  Attributes:
    encode_share: of a processor, for programs that encode context; other rows
      may sample in them.
    sample_share: for programs that only sample.
  """

  short_name: ClassVar[str] = "paced"

  encode_share: float = 1.0
  sample_share: float = 1.0

  def build(
    self,
    config: model_config.ModelConfig,
    layout: sharding.Layout,
    thread: mesh_thread.MeshThread,
  ) -> engine.BuiltinEngine:
    """Returns an engine of this speed, not started."""
    paced: Any = _PacedThread(thread, self.encode_share, self.sample_share)
    return super().build(config, layout, paced)


class _PacedThread:
  """The thread of a mesh, with dispatches that are paced.

  Spans of those that encode are called "encode", of the others "decode".
  """

  def __init__(
    self, thread: mesh_thread.MeshThread, encode: float, sample: float
  ):
    self._thread = thread
    self._encode, self._sample = encode, sample

  def __getattr__(self, name: str) -> Any:
    return getattr(self._thread, name)

  def submit(self, name: str, function: Callable[..., Any], *args) -> Any:
    """Queues a program; a dispatch ends no earlier than its share allows."""
    if name != "decode":
      return self._thread.submit(name, function, *args)
    _, dispatch, *_ = args
    encodes = dispatch.chunks[0] > 0
    share = self._encode if encodes else self._sample

    def paced(*args) -> Any:
      start, used = time.monotonic(), time.process_time()
      result = jax.block_until_ready(function(*args))
      needs_s = (time.process_time() - used) / share
      time.sleep(max(start + needs_s - time.monotonic(), 0.0))
      return result

    return self._thread.submit("encode" if encodes else name, paced, *args)


@contextlib.asynccontextmanager
async def processes(
  pools: Mapping[placement.EngineInfo, Shares],
  spans: trace.Trace,
  model: model_config.ModelConfig,
  settings: PacedEngine,
) -> AsyncGenerator[list[remote_engine.RemoteEngine]]:
  """Yields an engine for each pool, in a process of its own."""
  thread = mesh_thread.MeshThread("host", trace.Trace(None))
  tasks = {
    info: engine_worker.EngineTask(
      model=model,
      engine=dataclasses.replace(
        settings, encode_share=shares.encode, sample_share=shares.sample
      ),
      mesh=placement.Placement().decode,
    )
    for info, shares in pools.items()
  }
  remote = remote_engine.RemoteEngines(
    tasks, None, thread, spans, backend=local.Local()
  )
  engines = [remote.build(i, info) for i, info in enumerate(tasks)]
  params = small_parts.weights(model)
  try:
    for engine in engines:
      await engine.start(params, 0)
    yield engines
  finally:
    for engine in engines:
      await engine.close()
    await remote.close()
    thread.close()
