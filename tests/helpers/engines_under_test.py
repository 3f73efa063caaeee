"""Engines that really decode, and the plain model they must agree with."""

import asyncio
import contextlib
import dataclasses
import functools
import importlib.util
import os
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import config as config_lib
from models import definition, logprobs, sharding
from models import policy as policy_lib
from rl.engine import contract
from rl.engine.builtin import settings as engine_settings
from rl.engine.sglang.settings import SglangSettings
from rl.pools import placement
from rl.remote import engine_worker, remote_engine, weight_store, workers
from rl.runtime import mesh_thread, trace
from tests.helpers import machine_speed, slow_engine

CONFIG = config_lib.tiny_moe(
  vocab_size=24,
  num_layers=2,
  d_model=32,
  head_dim=8,
  d_ff=32,
  d_expert=32,
  max_length=96,
  compute=config_lib.Compute(moe_block=4),
)
_SIZES: dict[str, Any] = {
  "slots": 4,
  "page_size": 4,
  "row_buckets": (4,),
  "chunk_buckets": (8,),
  "prefill_tokens": 32,
  "steps_per_dispatch": 2,
}
SETTINGS: dict[str, contract.EngineSpec] = {
  "built_in": engine_settings.EngineSettings(**_SIZES),
  "sglang": SglangSettings(slots=4, row_buckets=(4,), token_buckets=(32,)),
}
SETTINGS["remote"] = slow_engine.SlowSettings(**_SIZES)
SETTINGS["remote_sglang"] = SETTINGS["sglang"]
# Float32: sums in other orders differ by some 1e-6 in log-probabilities.
CLOSE = 1e-4
LONG = 60
SGLANG_PYTHON = ".venv-sglang/bin/python"
_WAIT_S = machine_speed.scaled(180)


def check_shape(done: contract.Completion, count: int) -> None:
  """Asserts that there are so many tokens, and as much of the rest."""
  lengths = {len(done.tokens), len(done.logprobs), len(done.versions)}
  assert lengths == {count}


def parameters() -> list[Any]:
  """The engines to test, for a parametrised fixture.

  TWINMESH_ENGINES names those that must be tested; without it one that is not
  installed is skipped.
  """
  wanted = os.environ.get("TWINMESH_ENGINES", "").split()
  installed = importlib.util.find_spec("sgl_jax") is not None
  skip = pytest.mark.skipif(not (installed or wanted), reason="not installed")
  process = [pytest.mark.process]
  marks = {"sglang": [skip], "remote": process, "remote_sglang": process}
  names = wanted or ["built_in", "sglang", "remote"]
  return [pytest.param(name, marks=marks.get(name, [])) for name in names]


@functools.cache
def weights(
  seed: int, config: config_lib.ModelConfig = CONFIG
) -> definition.Params:
  """Large and without structure, so that answers vary."""
  leaves, tree = jax.tree.flatten(policy_lib.of(config).init(jax.random.key(0)))
  rng = np.random.default_rng(seed)
  noisy = [
    leaf + rng.normal(scale=0.4, size=leaf.shape).astype(leaf.dtype)
    for leaf in leaves
  ]
  return jax.tree.unflatten(tree, noisy)


@functools.partial(jax.jit, static_argnums=2)
def _forward(params: Any, tokens: Any, config: config_lib.ModelConfig) -> Any:
  positions = jnp.arange(tokens.shape[1])[None]
  model = policy_lib.of(config).bind(params)
  hidden, _ = model.hidden(tokens, positions, jnp.ones_like(tokens))
  return logprobs.logits(model.terms(hidden))[0]


def _logits(
  ids: Sequence[int], seed: int, config: config_lib.ModelConfig
) -> np.ndarray:
  padded = np.zeros((1, config.max_length), np.int32)
  padded[0, : len(ids)] = ids
  return np.asarray(_forward(weights(seed, config), padded, config))[: len(ids)]


@functools.cache
def _greedy(
  ids: tuple[int, ...], seed: int, config: config_lib.ModelConfig
) -> int:
  """The most probable next id; tests, and engines, ask for the same ones."""
  return int(_logits(ids, seed, config)[-1].argmax())


@dataclasses.dataclass
class Served:
  """A running engine, the event loop on which it lives, and its weights.

  Version v serves `weights(v % 5)`.

  Attributes:
    kept_kv: versions that went on with the keys and values of those before.
  """

  runner: asyncio.Runner
  engine: Any
  config: config_lib.ModelConfig
  layout: sharding.Layout
  thread: mesh_thread.MeshThread
  names: int = 0
  kept_kv: set[int] = dataclasses.field(default_factory=set)

  @property
  def version(self) -> int:
    return self.engine.stats().version

  def run(self, scenario: Coroutine[Any, Any, Any]) -> Any:
    async def guarded():
      async with asyncio.timeout(_WAIT_S):
        return await scenario

    return self.runner.run(guarded())

  def name(self) -> str:
    """Returns a new one for a request or a session."""
    self.names += 1
    return f"name {self.names}"

  def logits(
    self, ids: Sequence[int], version: int | None = None
  ) -> np.ndarray:
    """Those of a plain forward pass over whole conversations."""
    version = self.version if version is None else version
    return _logits(ids, version % 5, self.config)

  def greedy(
    self, prompt: Sequence[int], count: int, version: int | None = None
  ) -> list[int]:
    """The most probable answer, by a forward pass for each token."""
    version = self.version if version is None else version
    ids = [*map(int, prompt)]
    for _ in range(count):
      ids.append(_greedy(tuple(ids), version % 5, self.config))
    return ids[len(prompt) :]

  def logprobs(
    self, prompt: Sequence[int], tokens: Sequence[int], temperature: float
  ) -> np.ndarray:
    """What a forward pass says of an answer; 0 is the plain distribution."""
    ids = [*prompt, *tokens]
    scaled = self.logits(ids) / (temperature or 1.0)
    # Not by jax, which compiles programs for each length.
    scaled -= scaled.max(-1, keepdims=True)
    all_ = scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))
    return all_[np.arange(len(prompt) - 1, len(ids) - 1), np.asarray(tokens)]

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

  async def first_token(self, request: contract.DecodeRequest) -> int:
    """Returns the version of a request's first token, once there is one."""
    await asyncio.sleep(0)  # Until then its task has not asked the engine.
    while (version := self.engine.begun(request.request_id)) is None:
      await asyncio.sleep(0.001)
    return version

  def placed(self, version: int) -> definition.Params:
    """Returns the weights of a version where the engine wants them."""
    axes = policy_lib.of(self.config).axes
    params = weights(version % 5, self.config)
    return jax.device_put(params, self.layout.tree(axes))

  async def publish(self, in_flight: contract.InFlight = "recompute") -> int:
    """Serves the next version; returns it."""
    version = self.version + 1
    await self.engine.update_weights(version, self.placed(version), in_flight)
    if in_flight == "keep_kv":
      self.kept_kv.add(version)
    return version


_S = TypeVar("_S", bound=Served)


@contextlib.contextmanager
def running(
  kind: type[_S],
  settings: contract.EngineSpec,
  config: config_lib.ModelConfig,
  where: placement.Placement,
) -> Iterator[_S]:
  """Starts an engine of its own on the decode mesh of a placement."""
  _, layout = where.layouts()
  thread = mesh_thread.MeshThread("decode", trace.Trace(None))
  with asyncio.Runner() as runner:
    engine = settings.build(config, layout, thread)
    served = kind(runner, engine, config, layout, thread)
    served.run(engine.start(served.placed(0), 0))
    yield served
    served.run(engine.close())
  thread.close()


@contextlib.contextmanager
def in_a_process(
  settings: contract.EngineSpec,
  config: config_lib.ModelConfig,
  where: placement.Placement,
  python: str | None = None,
) -> Iterator[Served]:
  """Starts an engine in a process of its own, run by a Python of its own."""
  _, layout = where.layouts()
  thread = mesh_thread.MeshThread("host", trace.Trace(None))
  task = engine_worker.EngineTask(
    model=config, engine=settings, mesh=where.decode, python=python
  )
  with asyncio.Runner() as runner:
    others = workers.Workers(None)
    store = weight_store.WeightStore()
    spans = trace.Trace(None)
    engine = remote_engine.RemoteEngine(
      task, "engine 0", others, store, thread, spans
    )
    served = Served(runner, engine, config, layout, thread)
    served.run(engine.start(served.placed(0), 0))
    yield served
    served.run(engine.close())
    served.run(others.close())
  thread.close()


def serve(
  name: str,
  config: config_lib.ModelConfig = CONFIG,
  settings: contract.EngineSpec | None = None,
  tensor: int = 1,
):
  """Starts an engine of its own, on devices behind the first."""
  decode = placement.MeshSpec(tensor=tensor, rules=sharding.DECODE)
  where = placement.Placement(decode=decode)
  settings = settings or SETTINGS[name]
  if name == "remote":
    return in_a_process(settings, config, where)
  if name == "remote_sglang":
    return in_a_process(settings, config, where, SGLANG_PYTHON)
  return running(Served, settings, config, where)
