"""A tiny engine that really decodes, and the plain model it must agree with."""

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import Coroutine, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import config as config_lib
from models import sharding, transformer
from rl import dispatch, engine_jax, engine_plan, placement, trace, trajectory
from rl import engine as engine_lib

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
SETTINGS = engine_plan.EngineSettings(
  slots=4,
  row_buckets=(2,),
  chunk_buckets=(2, 6),
  steps_per_dispatch=3,
  linger_s=0.004,
)


@functools.cache
def weights(seed: int) -> transformer.Params:
  """Large and without structure, so that answers vary."""
  leaves, tree = jax.tree.flatten(transformer.init(jax.random.key(0), CONFIG))
  rng = np.random.default_rng(seed)
  noisy = [
    leaf + rng.normal(scale=0.4, size=leaf.shape).astype(np.float32)
    for leaf in leaves
  ]
  return jax.tree.unflatten(tree, noisy)


@jax.jit
def _forward(params, tokens):
  positions = jnp.arange(CONFIG.max_length)[None]
  hidden, _ = transformer.hidden(
    params, CONFIG, tokens, positions, jnp.ones_like(tokens)
  )
  return transformer.head(params, CONFIG, hidden)[0]


@dataclasses.dataclass
class Served:
  """A running engine, the event loop on which it lives, and its weights.

  Version v serves `weights(v % 5)`.
  """

  runner: asyncio.Runner
  engine: engine_jax.JaxEngine
  shardings: transformer.Params
  names: int = 0

  @property
  def version(self) -> int:
    return self.engine.stats().version

  def run(self, scenario: Coroutine[Any, Any, Any]) -> Any:
    async def guarded():
      async with asyncio.timeout(30):
        return await scenario

    return self.runner.run(guarded())

  def name(self) -> str:
    self.names += 1
    return f"name {self.names}"

  def greedy(
    self, prompt: Sequence[int], count: int, version: int | None = None
  ) -> list[int]:
    """The most probable answer by one whole forward pass a token."""
    version = self.version if version is None else version
    ids = np.zeros((1, CONFIG.max_length), np.int32)
    ids[0, : len(prompt)] = prompt
    for at in range(len(prompt), len(prompt) + count):
      ids[0, at] = _forward(weights(version % 5), ids)[at - 1].argmax()
    return ids[0, len(prompt) : len(prompt) + count].tolist()

  def request(
    self, prompt: Sequence[int], max_tokens: int, **kwargs: Any
  ) -> engine_lib.DecodeRequest:
    """A greedy request under new names, unless `kwargs` say otherwise."""
    names = {"request_id": self.name(), "session": self.name()}
    return engine_lib.DecodeRequest(
      tokens=np.asarray(prompt, np.int32),
      max_tokens=max_tokens,
      **{**names, "temperature": 0.0, **kwargs},
    )

  async def answer(self, *args: Any, **kwargs: Any) -> engine_lib.Completion:
    return await self.engine.generate(self.request(*args, **kwargs))

  def begin(
    self, *args: Any, **kwargs: Any
  ) -> tuple[engine_lib.DecodeRequest, asyncio.Task[engine_lib.Completion]]:
    """A request and the task that waits for its answer."""
    request = self.request(*args, **kwargs)
    return request, asyncio.create_task(self.engine.generate(request))

  async def begun(self, count: int) -> None:
    """Returns when `count` more tokens have been sampled."""
    goal = self.engine.stats().sampled_tokens + count
    while self.engine.stats().sampled_tokens < goal:
      await asyncio.sleep(0)

  def placed(self, version: int) -> transformer.Params:
    return jax.device_put(weights(version % 5), self.shardings)

  async def publish(self, mode: engine_lib.OnPublish) -> None:
    version = trajectory.PolicyVersion(self.version + 1)
    await self.engine.pause(mode)
    await self.engine.update_weights(version, self.placed(version))
    self.engine.resume()


@contextlib.contextmanager
def serve(data: int = 1, expert: int = 1, **changes: Any):
  """Starts an engine of its own; `changes` are to `SETTINGS`."""
  spec = placement.MeshSpec(data=data, expert=expert, rules=sharding.DECODE)
  place = placement.Placement(decode=spec, colocated=True)
  _, layout = place.layouts()
  thread = dispatch.MeshThread("decode", trace.Trace(None))
  settings = dataclasses.replace(SETTINGS, **changes)
  with asyncio.Runner() as runner:
    served = Served(
      runner,
      engine_jax.JaxEngine(CONFIG, settings, layout, thread),
      layout.tree(transformer.logical_axes(CONFIG)),
    )
    start = served.engine.start(served.placed(0), trajectory.PolicyVersion(0))
    served.run(start)
    yield served
    served.run(served.engine.close())
  thread.close()


@pytest.fixture(scope="session")
def config():
  return CONFIG


@pytest.fixture(scope="session")
def params():
  return weights(0)


@pytest.fixture(scope="session")
def served():
  """Shared by tests, which leave it open and give new names to all."""
  with serve() as served:
    yield served


@pytest.fixture
def breakable():
  """For one test alone; a single row, so that all but one request wait."""
  with serve(slots=1, row_buckets=(1,), chunk_buckets=(4,)) as served:
    yield served


@pytest.fixture
def sharded():
  """On a mesh of 2 by 2 devices."""
  with serve(2, 2, row_buckets=(4,), chunk_buckets=(4,)) as served:
    yield served


@pytest.fixture(scope="session")
def one_device():
  return placement.Placement(colocated=True).layouts()[1]


@pytest.fixture
def spans():
  return trace.Trace(None)


@pytest.fixture
def thread(spans):
  thread = dispatch.MeshThread("learner", spans)
  yield thread
  thread.close()
