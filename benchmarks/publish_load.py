"""A pool's engine that decodes without a pause while weights are published."""

import asyncio
import contextlib
import dataclasses
import itertools
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence

from benchmarks import small_parts
from models import config as model_config
from models import sharding
from rl.audit import event_log
from rl.engine import contract
from rl.engine.builtin import settings as engine_settings
from rl.pools import router, weight_publisher, weight_transfer
from rl.runtime import mesh_thread, trace

Requests = Callable[[int, int], contract.DecodeRequest]
"""Returns the request of a row for its n-th answer, from 1."""


@dataclasses.dataclass(frozen=True)
class Load:
  """Rows that ask for one answer after the other, and what publishes to them.

  Attributes:
    arrivals: when each row's tokens came, by time.monotonic().
  """

  publisher: weight_publisher.WeightPublisher
  arrivals: Sequence[list[float]]

  def gap_s(self, start: float, end: float) -> float:
    """Returns the median over rows of the longest time without a token."""
    longest = []
    for times in self.arrivals:
      inside = [start, *(t for t in times if start < t < end), end]
      longest.append(max(b - a for a, b in itertools.pairwise(inside)))
    return statistics.median(longest)

  def step_s(self, start: float, end: float) -> float:
    """Returns the mean time in which every row gets a token."""
    tokens = sum(start < t < end for times in self.arrivals for t in times)
    return (end - start) * len(self.arrivals) / tokens


@contextlib.asynccontextmanager
async def decoding(
  config: model_config.ModelConfig,
  layouts: Sequence[sharding.Layout],
  settings: engine_settings.EngineSettings,
  requests: Requests,
  rows: int,
  spans: trace.Trace,
) -> AsyncIterator[Load]:
  """Yields an engine under load, whose rows are cancelled afterwards.

  Args:
    layouts: of the learner and of the engine.
  """
  learner, copier, decode = threads = [
    mesh_thread.MeshThread(n, spans) for n in ("learner", "host", "decode")
  ]
  served = settings.build(config, layouts[1], decode)
  publisher = weight_publisher.WeightPublisher(
    router.Router([served]),
    weight_transfer.MeshTransfer(
      [weight_transfer.pool_shardings(config, layouts[1], "same")],
      learner,
      copier,
    ),
    event_log.EventLog(),
    spans,
  )
  copy, _ = await publisher.place(small_parts.weights(config, layouts[0]))
  await served.start(copy, 0)
  del copy  # Large models have no room for one more.
  arrivals: list[list[float]] = [[] for _ in range(rows)]

  async def row(number: int) -> None:
    for answer in itertools.count(1):
      async for delta in served.stream(requests(number, answer)):
        arrivals[number] += [time.monotonic()] * len(delta.tokens)

  tasks = [asyncio.create_task(row(i)) for i in range(rows)]
  try:
    yield Load(publisher, arrivals)
  finally:
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await served.close()
    for thread in threads:
      thread.close()
