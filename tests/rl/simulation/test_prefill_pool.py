"""Prefill on engines of its own, and the hand-over, with numbers by hand."""

import dataclasses

import pytest

from rl.schedule import overlap
from rl.simulation import (
  distributions,
  prefill_pool,
  resources,
  simulate,
  workload,
)
from rl.simulation import processor as simulated_processor
from rl.simulation import result as simulation_result
from tests.helpers import simulated_runs
from tests.rl.simulation import test_processor

close = pytest.approx
# 1,000 ids take 1 s, and 0.5 s + 0.1 s on the way.
POOL = prefill_pool.PrefillPool(
  ids_per_s=1000.0,
  kv_bytes=1e3,
  link=resources.Link(bytes_per_s=2e6, latency_s=0.1),
)


def test_contexts_are_encoded_one_by_one_and_sent_meanwhile():
  queue = prefill_pool.PrefillQueue(POOL)
  # The second is encoded at 2 s, sent from then on; the third at 2.1 s, and its
  # link is free at 2.6 s.
  assert queue.submit(0.0, 1000) == close(1.6)
  assert queue.submit(0.5, 1000) == close(2.6)
  assert queue.submit(0.5, 100) == close(2.6 + 0.1 + 0.05)
  assert queue.submit(10.0, 100) == close(10.1 + 0.1 + 0.05)
  assert queue.busy_s == close(2.2)


def test_the_engine_that_is_free_first_encodes():
  queue = prefill_pool.PrefillQueue(dataclasses.replace(POOL, engines=2))
  found = [queue.submit(0.0, ids) for ids in (2000, 1000, 1000)]
  assert found == close([2.0 + 1.1, 1.0 + 0.6, 2.0 + 0.6])


def test_decoding_begins_when_keys_and_values_have_arrived():
  speed = simulated_processor.Speed(tau0_s=0.01, b0=1e18)
  processor = simulated_processor.Processor(
    speed, prefill_pool.PrefillQueue(POOL)
  )
  ends = test_processor.run_all(
    processor,
    [
      test_processor.job(100, tokens=1000),
      test_processor.job(50, tokens=1000, session="t"),
    ],
  )
  assert ends == {100: close(1.6 + 1.0), 50: close(2.6 + 0.5)}
  assert [state for _, state in processor.states] == ["prefill", "decode"]


def test_what_was_ended_on_its_way_is_not_begun():
  processor = simulated_processor.Processor(
    simulated_processor.Speed(), prefill_pool.PrefillQueue(POOL)
  )
  one = test_processor.job(100, tokens=1000)
  processor.submit(one)
  processor.settle()
  assert processor.wait_s() == close(1.6)
  assert processor.end(one) == 0
  processor.advance(2.0)
  assert not processor.settle()
  assert (processor.running, processor.decoding) == (0, 0)


def test_new_weights_encode_what_is_under_way_again():
  processor = simulated_processor.Processor(
    simulated_processor.Speed(tau0_s=0.01, b0=1e18),
    prefill_pool.PrefillQueue(POOL),
  )
  one = test_processor.job(100, tokens=1000)
  processor.submit(one)
  processor.settle()
  processor.advance(1.0)
  processor.version = 1
  processor.encode_again([one])
  # The engine is free, and the link at 1.6 s: 1 + 1 + 0.6 s.
  assert processor.wait_s() == close(1.6)
  processor.advance(2.6)
  processor.settle()
  assert (processor.decoding, one.oldest_kv) == (1, 1)


@pytest.mark.parametrize(
  ("interference", "end_s"),
  # The other one decodes 100 tokens of 0.01 s; 50 of them beside a prefill of
  # 0.5 s, in which it makes 50, 25 or none.
  [(0.0, 1.5), (0.5, 1.75), (1.0, 2.0)],
)
def test_prefill_takes_its_share_of_the_pace_of_decoding(interference, end_s):
  speed = simulated_processor.Speed(
    tau0_s=0.01, b0=1e18, prefill_per_s=1000.0, interference=interference
  )
  processor = simulated_processor.Processor(speed)
  first = test_processor.job(100, tokens=500)
  second = test_processor.job(300, tokens=500, session="t")
  ends = test_processor.run_all(processor, [first, second])
  assert ends[100] == close(end_s)
  # 0.5 s of prefill and 300 tokens more.
  assert ends[300] == close(1.0 + 3.0)


CONTEXTS = workload.Workload(
  prompt_tokens=distributions.Fixed(1000.0),
  answer_tokens=distributions.Fixed(100.0),
)


def test_a_run_with_a_prefill_pool_counts_it_and_its_use():
  plain = simulated_runs.settings(overlap.sync(2), CONTEXTS)
  (decode,) = plain.cluster.pools
  pool = dataclasses.replace(decode, prefill=POOL)
  chosen = dataclasses.replace(
    plain, cluster=dataclasses.replace(plain.cluster, pools=(pool,))
  )
  assert chosen.cluster.accelerators == plain.cluster.accelerators + 1
  without, found = (
    simulation_result.measure(simulate.simulate(one)) for one in (plain, chosen)
  )
  assert not found.violations
  # 4 contexts, one after the other: decoding begins 1.6 to 4.6 s later.
  assert without.step_s + 3.5 < found.step_s < without.step_s + 4.7
  assert found.prefill_use["decode"] == close(4.0 / found.step_s, rel=0.1)
  assert not without.prefill_use


@pytest.mark.parametrize(
  ("change", "words"),
  [
    ({"engines": 0}, r"cluster\.pools\.0\.prefill\.engines=0 must be"),
    ({"ids_per_s": 0.0}, r"prefill\.ids_per_s=0\.0 must be a finite"),
    ({"kv_bytes": -1.0}, r"prefill\.kv_bytes=-1\.0"),
  ],
)
def test_pools_that_cannot_encode_are_refused(change, words):
  pool = simulate.EnginePool(prefill=dataclasses.replace(POOL, **change))
  with pytest.raises(ValueError, match=words):
    simulate.Simulation(cluster=simulate.Cluster(pools=(pool,))).validate()
