"""A group's prompt is encoded once, however many engines a pool has."""

import asyncio
import contextlib
import dataclasses

import jax
import numpy as np
import pytest

from models import policy as policy_lib
from rl.engine import contract
from rl.pools import placement, router
from rl.runtime import mesh_thread, trace
from tests.helpers import engines_under_test, tiny_engine

GROUPS, MEMBERS = 4, 3
SETTINGS = dataclasses.replace(
  tiny_engine.SETTINGS,
  row_buckets=(4,),
  chunk_buckets=(6,),
  compile_ahead=False,
)


async def play(engines):
  """Plays groups of one answer each; returns the router."""
  pooled = router.Router(engines)
  rng = np.random.default_rng(0)
  prompts = rng.integers(24, size=(GROUPS, 13), dtype=np.int32)

  async def member(group, index):
    name = f"{group}/{index}"
    await pooled.begin(name, "", group=str(group))
    await pooled.generate(
      contract.DecodeRequest(
        request_id=name,
        session=name,
        tokens=prompts[group],
        max_tokens=3,
        seed=index,
      )
    )
    pooled.end(name)

  places = [(g, i) for g in range(GROUPS) for i in range(MEMBERS)]
  await asyncio.gather(*(member(*place) for place in places))
  return pooled


@pytest.mark.slow
@pytest.mark.compiled
def test_four_engines_encode_no_more_than_one_does():
  config = tiny_engine.DENSE
  _, layout = placement.Placement(colocated=True).layouts()

  async def scenario(stack):
    engines = []
    for _ in range(4):
      thread = mesh_thread.MeshThread("decode", trace.Trace(None))
      stack.callback(thread.close)
      engines.append(SETTINGS.build(config, layout, thread))
      params = engines_under_test.weights(0, config)
      axes = policy_lib.of(config).axes
      await engines[-1].start(jax.device_put(params, layout.tree(axes)), 0)
      stack.push_async_callback(engines[-1].close)
    (first, *_), counts = engines, []
    for some in ([first], engines):
      await first.flush_cache()
      before = sum(one.stats().prefilled_tokens for one in some)
      pooled = await play(some)
      counts.append(pooled.stats().prefilled_tokens - before)
      assert pooled.describe()["prompts_shared"] == GROUPS * (MEMBERS - 1)
      assert pooled.describe()["prompts_repeated"] == 0
    return [one.stats().prefilled_tokens for one in engines], counts

  async def main():
    async with contextlib.AsyncExitStack() as stack:
      return await scenario(stack)

  each, (one, four) = asyncio.run(main())
  assert one == four
  assert min(each) > 0  # Groups spread.
