"""A tiny built-in engine that really decodes, and requests for it."""

import contextlib
import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from models import config as config_lib
from models import definition, sharding
from rl.engine import contract
from rl.engine.builtin import engine as builtin_engine
from rl.engine.builtin import settings as engine_settings
from rl.pools import placement
from tests.helpers import engines_under_test, page_holders

CONFIG = dataclasses.replace(engines_under_test.CONFIG, max_length=32)
DENSE = config_lib.tiny(
  vocab_size=24,
  num_layers=1,
  d_model=16,
  num_heads=2,
  num_kv_heads=1,
  head_dim=8,
  d_ff=16,
  max_length=32,
)
SETTINGS = engine_settings.EngineSettings(
  slots=4,
  page_size=4,
  min_copied_ids=1,
  row_buckets=(2, 4),
  chunk_buckets=(2, 6),
  prefill_tokens=8,
  steps_per_dispatch=3,
  batching_delay_s=0.004,
  bias_slots=2,
  compile_ahead=True,
)


@dataclasses.dataclass
class Served(engines_under_test.Served):
  """A running built-in engine; its weights are placed once."""

  engine: builtin_engine.BuiltinEngine
  ready: dict[int, definition.Params] = dataclasses.field(default_factory=dict)

  def is_greedy(
    self,
    prompt: Sequence[int],
    tokens: Sequence[int],
    version: int | None = None,
  ) -> bool:
    """Whether `greedy` says the same: each id is the best of its place."""
    ids = [*map(int, prompt), *map(int, tokens)]
    best = self.logits(ids[:-1], version).argmax(-1).tolist()
    return best[len(prompt) - 1 :] == ids[len(prompt) :]

  @contextlib.asynccontextmanager
  async def held(self, dispatches: int):
    """Keeps the device busy; so many dispatches have queued up behind that."""
    goal, go = self.engine.stats().dispatches + dispatches, threading.Event()
    self.thread.submit("hold", go.wait, 60)
    try:
      await self.until(lambda stats: stats.dispatches >= goal)
      yield
    finally:
      go.set()

  def placed(self, version: int) -> definition.Params:
    if version % 5 not in self.ready:
      self.ready[version % 5] = super().placed(version)
    return self.ready[version % 5]

  def check(self) -> None:
    """No page has two holders; when nothing is asked, nothing is held."""
    queue, stats = self.engine._queue, self.engine.stats()
    page_holders.check_queue(queue)
    if not queue.requests:
      assert (stats.running, stats.waiting) == (0, 0)
      assert stats.free_pages + queue.blocks.num_idle == stats.pages
      assert len(queue._free_slots) == self.engine._shapes.slots
      assert not queue.biases._users.total()


def mixture(served: Served, count: int) -> list[contract.DecodeRequest]:
  """Returns requests with seeds, temperatures and filters of all kinds."""
  rng = np.random.default_rng(0)
  bias = np.where(np.arange(24) % 5 == 0, -np.inf, 0).astype(np.float32)
  kinds: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5, "top_k": 5},
    {"top_p": 0.8},
    {"temperature": 2.0, "min_p": 0.05},
    {"bias": bias},
    {"temperature": 0.0},
    {"top_k": 9, "top_p": 0.9, "min_p": 0.01, "bias": bias},
  ]
  return [
    served.request(
      rng.integers(24, size=rng.integers(1, 18)).tolist(),
      int(rng.integers(2, 14)),
      **{"temperature": 1.0, "seed": seed - 4, **kinds[seed % len(kinds)]},
    )
    for seed in range(count)
  ]


def serve(
  data: int = 1,
  expert: int = 1,
  tensor: int = 1,
  config: config_lib.ModelConfig = CONFIG,
  **changes: Any,
):
  """Starts an engine of its own; `changes` are to `SETTINGS`."""
  spec = placement.MeshSpec(
    data=data, expert=expert, tensor=tensor, rules=sharding.DECODE
  )
  return engines_under_test.running(
    Served,
    dataclasses.replace(SETTINGS, **changes),
    config,
    placement.Placement(decode=spec, colocated=True),
  )
