"""Prompts that one process encodes for another, by way of shared memory."""

import asyncio
import contextlib
import dataclasses
import os
import pathlib
import signal
from typing import Any

import numpy as np
import pytest

from rl.backends import local
from rl.engine import contract
from rl.engine.builtin import settings as engine_settings
from rl.pools import affinity, placement, router
from rl.remote import engine_worker, remote_engine, weight_store, workers
from rl.runtime import mesh_thread, trace, watchdog
from tests.helpers import (
  counting_runs,
  machine_speed,
  processes,
  tiny_engine,
)

pytestmark = pytest.mark.process

INFOS = (
  placement.EngineInfo("decode"),
  placement.EngineInfo("encode", role="prefill"),
)
SETTINGS = engine_settings.EngineSettings(
  slots=4, page_size=4, pages=40, row_buckets=(4,), chunk_buckets=(8,)
)
WAIT_S = machine_speed.scaled(240)


@dataclasses.dataclass
class Phased:
  """Engines in two processes, of which the second encodes for the first."""

  runner: asyncio.Runner
  engines: list[remote_engine.RemoteEngine]
  names: int = 0

  def run(self, scenario):
    async def guarded():
      async with asyncio.timeout(WAIT_S):
        return await scenario

    return self.runner.run(guarded())

  def router(self):
    return router.Router(
      self.engines, infos=INFOS, routing=affinity.Routing(min_prefill_ids=8)
    )

  def request(self, ids, **fields):
    self.names += 1
    return contract.DecodeRequest(
      request_id=f"r{self.names}",
      session="s",
      tokens=np.asarray(ids, np.int32),
      max_tokens=5,
      seed=3,
      **fields,
    )

  async def publish(self, number, version):
    weights = tiny_engine.engines_under_test.weights(version, tiny_engine.DENSE)
    await self.engines[number].update_weights(version, weights)

  def kept(self):
    """Returns how many pieces of shared memory the second process holds."""
    pid = self.engines[1].pid
    held = []
    for handle in pathlib.Path(f"/proc/{pid}/fd").iterdir():
      with contextlib.suppress(OSError):
        held.append(weight_store.MEMORY in os.readlink(handle))
    return sum(held)


@pytest.fixture(scope="module")
def phased():
  thread = mesh_thread.MeshThread("host", trace.Trace(None))
  place = placement.Placement()
  task = engine_worker.EngineTask(
    model=tiny_engine.DENSE, engine=SETTINGS, mesh=place.decode
  )
  params = tiny_engine.engines_under_test.weights(0, tiny_engine.DENSE)
  with asyncio.Runner() as runner:
    remote = remote_engine.RemoteEngines(
      dict.fromkeys(INFOS, task),
      None,
      thread,
      trace.Trace(None),
      backend=local.Local(),
    )
    engines = [remote.build(i, info) for i, info in enumerate(INFOS)]
    phased = Phased(runner, engines)

    async def start():
      await asyncio.gather(*(engine.start(params, 0) for engine in engines))

    phased.run(start())
    yield phased

    async def close():
      for engine in engines:
        await engine.close()
      await remote.close()

    phased.run(close())
  thread.close()


def test_tokens_are_those_of_one_process_and_a_lost_one_costs_none(phased):
  decode, encode = phased.engines
  ids = np.random.default_rng(0).integers(24, size=23).tolist()
  free = decode.stats().free_pages

  async def scenario():
    serving = phased.router()
    alone = await decode.generate(phased.request(ids))
    await decode.flush_cache()
    await serving.begin("s", "")
    apart = await serving.generate(phased.request(ids))
    # 22 ids, in 6 pages of 4.
    assert (alone.cached_tokens, apart.cached_tokens) == (0, 22)
    assert serving.describe()["hand_over_bytes"] == 24 * 2 * 8 * 4
    # A publish between the two steps.
    ids[0] = (ids[0] + 1) % 24
    async with encode.export_prefix(np.asarray(ids, np.int32)) as prefix:
      assert phased.kept() == 1
      await phased.publish(0, 1)
      assert await decode.import_prefix(prefix) == "version"
    late = await serving.generate(phased.request(ids))
    await phased.publish(1, 1)
    await decode.flush_cache()
    serving.end("s")
    await serving.begin("s", "")
    again = await serving.generate(phased.request(ids))
    assert (late.cached_tokens, again.cached_tokens) == (0, 22)
    for one, other in ((alone, apart), (late, again)):
      assert one.tokens.tolist() == other.tokens.tolist()
      np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
    # Nothing is left of what was handed over, of the second process's own
    # memory and, once it is dropped, of pages.
    while phased.kept():
      await asyncio.sleep(0.01)
    await decode.flush_cache()
    while decode.stats().free_pages != free:
      await asyncio.sleep(0.01)
    # With the process its memory is gone, and the pages are not there.
    async with encode.export_prefix(np.asarray(ids, np.int32)) as prefix:
      os.kill(encode.pid, signal.SIGKILL)
      while processes.runs(encode.pid):
        await asyncio.sleep(0.01)
      with pytest.raises(ValueError, match="cannot be opened"):
        await decode.import_prefix(prefix)
    serving.end("s")
    await serving.begin("s", "")
    ids[0] = (ids[0] + 1) % 24
    alone = await serving.generate(phased.request(ids))
    assert alone.cached_tokens == 0
    return serving.describe()

  described = phased.run(scenario())
  assert described["prefills"] == 2.0
  assert described["prefills_missed/version"] == 1.0
  assert described["prefills_missed/lost"] == 1.0


def test_work_on_another_host_has_its_place_on_the_clock_of_this_one():
  now_s = iter([5.0, 10.5, 13.0])
  spans = trace.Trace(None, clock=lambda: next(now_s))  # From 5 s on.
  thread = mesh_thread.MeshThread("host", spans)
  task = engine_worker.EngineTask(
    model=tiny_engine.DENSE, engine=SETTINGS, mesh=placement.Placement().decode
  )
  with contextlib.closing(thread):
    engine = remote_engine.RemoteEngine(
      task,
      "engine 0",
      workers.Workers(None),
      weight_store.WeightStore(),
      thread,
      spans,
    )
  # The clock there is 1000 s ahead; the second message takes 1.5 s more.
  engine._hear_spans([("decode", "decode", 1008.0, 1009.0)], 1010.0)
  engine._hear_spans([("decode", "decode", 1010.0, 1010.5)], 1011.0)
  found = [(span.start, span.end) for span in spans.spans]
  assert found == [(3.5, 4.5), (5.5, 6.0)]


@pytest.mark.parametrize(("wait_s", "call_s"), [(100.0, 300.0), (4e3, 2e3)])
async def test_a_run_that_waits_longer_gives_its_engines_longer(wait_s, call_s):
  settings = counting_runs.experiment(
    tiny_engine.DENSE,
    progress_timeout_s=wait_s,
    placement=placement.Placement(decode_processes=1),
  )
  limits = []

  class Stream:
    async def call(self, method, *args, deadline_s):
      limits.append(deadline_s)

  with contextlib.closing(
    mesh_thread.MeshThread("host", trace.Trace(None))
  ) as t:
    remote = remote_engine.of_experiment(
      settings, None, t, trace.Trace(None), watchdog.UNHEARD
    )
    engine = remote.build(0, settings.placement.engine_infos[0])
    stream: Any = Stream()
    engine._stream = stream
    await engine.flush_cache()
  assert limits == [call_s]
