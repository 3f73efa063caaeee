"""A tiny engine that really decodes, and the plain model it must agree with."""

import asyncio
import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models import config as config_lib
from models import logprobs, sharding
from models import policy as policy_lib
from rl.engine import contract
from rl.engine.builtin import engine as builtin_engine
from rl.engine.builtin import settings as engine_settings
from rl.pools import placement
from rl.runtime import mesh_thread, trace
from tests.helpers import page_holders

CONFIG = config_lib.tiny_moe(
  vocab_size=24,
  num_layers=2,
  d_model=32,
  head_dim=8,
  d_ff=32,
  d_expert=32,
  max_length=32,
  compute=config_lib.Compute(moe_block=4),
)
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
  row_buckets=(2,),
  chunk_buckets=(2, 6),
  prefill_tokens=8,
  length_buckets=(32,),
  steps_per_dispatch=3,
  batching_delay_s=0.004,
  bias_slots=2,
)


@functools.cache
def weights(seed: int, config: config_lib.ModelConfig) -> policy_lib.Params:
  """Large and without structure, so that answers vary."""
  leaves, tree = jax.tree.flatten(policy_lib.of(config).init(jax.random.key(0)))
  rng = np.random.default_rng(seed)
  noisy = [
    leaf + rng.normal(scale=0.4, size=leaf.shape).astype(leaf.dtype)
    for leaf in leaves
  ]
  return jax.tree.unflatten(tree, noisy)


@functools.partial(jax.jit, static_argnums=0)
def _best(config, params, tokens):
  """The most probable next id at every position."""
  positions = jnp.arange(config.max_length)[None]
  model = policy_lib.of(config).bind(params)
  hidden, _ = model.hidden(tokens, positions, jnp.ones_like(tokens))
  return logprobs.logits(model.terms(hidden))[0].argmax(-1)


@dataclasses.dataclass
class Served:
  """A running engine, the event loop on which it lives, and its weights.

  Version v serves `weights(v % 5)`.
  """

  runner: asyncio.Runner
  engine: builtin_engine.BuiltinEngine
  config: config_lib.ModelConfig
  layout: sharding.Layout
  thread: mesh_thread.MeshThread
  names: int = 0
  ready: dict[int, policy_lib.Params] = dataclasses.field(default_factory=dict)

  @property
  def version(self) -> int:
    return self.engine.stats().version

  def run(self, scenario: Coroutine[Any, Any, Any]) -> Any:
    async def guarded():
      async with asyncio.timeout(180):
        return await scenario

    return self.runner.run(guarded())

  def name(self) -> str:
    self.names += 1
    return f"name {self.names}"

  def best(self, ids: Sequence[int], version: int | None = None) -> list[int]:
    """The most probable id behind each, by one whole forward pass."""
    version = self.version if version is None else version
    padded = np.zeros((1, self.config.max_length), np.int32)
    padded[0, : len(ids)] = ids
    params = weights(version % 5, self.config)
    return _best(self.config, params, padded)[: len(ids)].tolist()

  def greedy(
    self, prompt: Sequence[int], count: int, version: int | None = None
  ) -> list[int]:
    """The most probable answer by one whole forward pass a token."""
    ids = [*map(int, prompt)]
    for _ in range(count):
      ids.append(self.best(ids, version)[-1])
    return ids[len(prompt) :]

  def is_greedy(
    self,
    prompt: Sequence[int],
    tokens: Sequence[int],
    version: int | None = None,
  ) -> bool:
    """Whether `greedy` says the same: each id is the best of its place."""
    ids = [*map(int, prompt), *map(int, tokens)]
    return self.best(ids[:-1], version)[len(prompt) - 1 :] == ids[len(prompt) :]

  def request(
    self, prompt: Sequence[int], max_tokens: int, **kwargs: Any
  ) -> contract.DecodeRequest:
    """A greedy request under new names, unless `kwargs` say otherwise."""
    names = {"request_id": self.name(), "session": self.name()}
    return contract.DecodeRequest(
      tokens=np.asarray(prompt, np.int32),
      max_tokens=max_tokens,
      **{**names, "temperature": 0.0, **kwargs},
    )

  async def answer(self, *args: Any, **kwargs: Any) -> contract.Completion:
    return await self.engine.generate(self.request(*args, **kwargs))

  def begin(
    self, *args: Any, **kwargs: Any
  ) -> tuple[contract.DecodeRequest, asyncio.Task[contract.Completion]]:
    """A request and the task that waits for its answer."""
    request = self.request(*args, **kwargs)
    return request, asyncio.create_task(self.engine.generate(request))

  async def until(self, done: Callable[[contract.EngineStats], bool]) -> None:
    while not done(self.engine.stats()):
      await asyncio.sleep(0.0005)  # 0 would starve the device's thread.

  async def begun(self, count: int) -> None:
    """Returns when `count` more tokens have been sampled."""
    goal = self.engine.stats().sampled_tokens + count
    await self.until(lambda stats: stats.sampled_tokens >= goal)

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

  def placed(self, version: int) -> policy_lib.Params:
    """The weights of a version where the engine wants them."""
    if version % 5 not in self.ready:
      axes = policy_lib.of(self.config).axes
      params = weights(version % 5, self.config)
      self.ready[version % 5] = jax.device_put(params, self.layout.tree(axes))
    return self.ready[version % 5]

  async def publish(self, mode: contract.InFlight) -> None:
    version = self.version + 1
    await self.engine.update_weights(version, self.placed(version), mode)

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


@contextlib.contextmanager
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
  _, layout = placement.Placement(decode=spec, colocated=True).layouts()
  thread = mesh_thread.MeshThread("decode", trace.Trace(None))
  settings = dataclasses.replace(SETTINGS, **changes)
  with asyncio.Runner() as runner:
    engine = settings.build(config, layout, thread)
    served = Served(runner, engine, config, layout, thread)
    served.run(engine.start(served.placed(0), 0))
    yield served
    served.run(engine.close())
  thread.close()
