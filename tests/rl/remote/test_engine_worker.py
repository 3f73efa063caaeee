"""Keys and values between workers of two hosts, in one process here."""

import asyncio
import gc

import numpy as np
import pytest

from rl.engine.builtin import settings as engine_settings
from rl.pools import placement
from rl.remote import engine_worker, weight_store, weight_stream
from tests.helpers import tiny_engine

SETTINGS = engine_settings.EngineSettings(
  slots=4, page_size=4, pages=40, row_buckets=(4,), chunk_buckets=(8,)
)


def given(prefix):
  """Returns the fields of a prefix as a message has them."""
  addresses, stream = prefix.pages
  return (*prefix[:4], (tuple(map(tuple, addresses)), stream))


@pytest.mark.compiled
def test_a_worker_of_another_host_reads_pages_over_tcp():
  # Where weights come over a stream, so do keys and values.
  far = weight_stream.StreamAddress(host="127.0.0.1", port=1, token="")
  task = engine_worker.EngineTask(
    model=tiny_engine.DENSE,
    engine=SETTINGS,
    mesh=placement.Placement().decode,
    stream=far,
  )
  params = tiny_engine.engines_under_test.weights(0, tiny_engine.DENSE)
  ids = np.random.default_rng(0).integers(24, size=18, dtype=np.int32)

  async def scenario():
    encodes, takes = (engine_worker.EngineWorker(task) for _ in range(2))
    for worker in (encodes, takes):
      worker._host = "127.0.0.1"
      await worker._engine.start(params, 0)
    try:
      prefix = await encodes._export_prefix("a", ids, 0, ())
      assert len(prefix.ids) == 17
      free = takes._engine.stats().free_pages
      assert await takes._import_prefix(given(prefix)) == ""
      assert free - takes._engine.stats().free_pages == 5
      # Once it is released nobody can read it.
      encodes._release_prefix("a")
      encodes._release_prefix("never kept")
      await takes._engine.flush_cache()
      gc.collect()
      with pytest.raises(weight_store.DamagedFile, match="is free by now"):
        await takes._import_prefix(given(prefix))
    finally:
      for worker in (encodes, takes):
        await worker.close()
    with pytest.raises(ValueError, match="out of reach"):
      engine_worker._read_pages(*given(prefix)[4])

  asyncio.run(scenario())


def test_pages_are_read_from_the_memory_of_this_host_as_they_were():
  values = [np.arange(24, dtype=np.float32).reshape(2, 3, 4), np.zeros(0)]
  kept = weight_store.keep(values)
  addresses = [tensor.address for tensor in kept]
  for found, value in zip(
    engine_worker._read_pages(addresses, None), values, strict=True
  ):
    np.testing.assert_array_equal(found, value)
    assert found.dtype == value.dtype
