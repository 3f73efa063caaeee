"""Tests of what several engines can do, and have done, as one."""

import asyncio
import dataclasses

import pytest

from rl.pools import pool_stats
from tests.helpers import pools_under_test as pools

pytestmark = pytest.mark.virtual_time


async def test_counters_are_sums_and_the_version_is_the_lowest_that_serves():
  engines = [
    pools.engine(delay_s=1.0, update_s=update_s) for update_s in (2.0, 0.0)
  ]
  for name in "ab":
    await engines[0].generate(pools.request(name))
  third = asyncio.create_task(engines[1].generate(pools.request("c")))
  await asyncio.sleep(0.5)
  await engines[0].update_weights(3, None)
  await engines[1].update_weights(1, None)
  both, first, none = (
    pool_stats.stats(engines, some) for some in ([0, 1], [0], [])
  )
  await third
  assert [both.version, first.version, none.version] == [1, 3, 1]
  assert (both.running, both.waiting) == (0, 0)
  # Three answers of two tokens to requests of two ids.
  assert (both.sampled_tokens, both.prefilled_tokens) == (6, 6)
  assert both.paused_s == 2.0


def test_a_pool_can_do_what_each_of_its_engines_can():
  _, engines = pools.pool(2)
  engines[0].capabilities = dataclasses.replace(
    engines[0].capabilities, max_length=7, experts=True
  )
  engines[1].capabilities = dataclasses.replace(
    engines[1].capabilities,
    in_flight=frozenset({"drain"}),
    experts=True,
    bias=False,
  )
  able = pool_stats.capabilities(engines)
  assert (able.max_length, able.experts, able.bias) == (7, True, False)
  assert able.in_flight == {"drain"}


def test_a_pool_of_nothing_or_of_two_models_is_refused():
  with pytest.raises(ValueError, match="0 engines"):
    pool_stats.capabilities([])
  _, engines = pools.pool(2)
  engines[0].capabilities = dataclasses.replace(
    engines[0].capabilities, vocab_size=8
  )
  with pytest.raises(ValueError, match=r"vocabularies \[8, 262144\]"):
    pool_stats.capabilities(engines)
