"""Tests of a pool: who serves whom, what happens to those who lose theirs."""

import asyncio
import dataclasses
import random

import numpy as np
import pytest

from models import chat as chat_lib
from rl import engine, replicas, testing, trajectory


def test_a_session_stays_and_a_new_one_goes_where_the_least_is_to_do():
  homes = replicas.Homes(3, 100)
  # The first of equals; then 2 requests at 0 and one at each other.
  assert [homes.begin(name) for name in "abcd"] == [0, 1, 2, 0]
  homes.end(1)
  assert [homes.begin(name) for name in "ae"] == [0, 1]
  homes.lose(1)
  assert [homes.begin(name) for name in "bef"] == [2, 2, 0]
  homes.lose(0)
  homes.lose(2)
  assert homes.begin("a") is None


def test_the_session_not_seen_for_longest_is_forgotten():
  homes = replicas.Homes(2, 2)
  # At 0, at 1, again at 0; "c" goes to 1, and "b" is the one to go.
  assert [homes.begin(name) for name in "abac"] == [0, 1, 0, 1]
  homes.end(0)
  assert homes.num_sessions == 2
  assert homes.begin("b") == 0


def test_no_order_of_events_breaks_the_rules():
  chance = random.Random(0)
  homes = replicas.Homes(4, 8)
  load, seen, busy = [0] * 4, {}, []
  for step in range(5000):
    if step in (1000, 3000):
      homes.lose(lost := chance.choice(homes.open))
      seen = {name: home for name, home in seen.items() if home != lost}
    if busy and chance.random() < 0.5:
      home = busy.pop(chance.randrange(len(busy)))
      homes.end(home)
      load[home] -= 1
      continue
    name = f"s{chance.randrange(12)}"
    least = min(homes.open, key=lambda i: load[i])
    home = homes.begin(name)
    assert home is not None
    assert home == seen.pop(name, least)
    seen[name] = home
    # Those of a lost replica are remembered until they come or are too many.
    if len(seen) > 8:
      del seen[next(iter(seen))]
    load[home] += 1
    busy.append(home)
    assert homes.num_sessions <= 8


def request(name="a", session=None, ids=(3, 1), **fields):
  return engine.DecodeRequest(
    request_id=name,
    session=session or name,
    tokens=np.array(ids, np.int32),
    max_tokens=2,
    **fields,
  )


def pool(count=2, delay_s=0.0, **kwargs):
  engines = [
    testing.FakeEngine((5, 6), chat_lib.END, lambda _: delay_s, **kwargs)
    for _ in range(count)
  ]
  return replicas.Replicas(engines), engines


async def begun(pooled, *args, **kwargs):
  answer = asyncio.create_task(pooled.generate(request(*args, **kwargs)))
  await asyncio.sleep(0)
  return answer


def run(scenario):
  async def guarded():
    async with asyncio.timeout(10):
      return await scenario

  return asyncio.run(guarded())


def busy(engines):
  return [one.stats().running + one.stats().waiting for one in engines]


@pytest.mark.parametrize("streamed", [False, True])
def test_requests_spread_and_come_back_to_what_is_cached(streamed):
  async def ask(pooled, *args):
    if not streamed:
      return await pooled.generate(request(*args))
    return [d async for d in pooled.stream(request(*args))][-1].completion

  async def scenario():
    pooled, engines = pool(3, 0.01)
    names = [f"s{i}" for i in range(6)]
    first = [asyncio.create_task(ask(pooled, name, name)) for name in names]
    for _ in range(3):
      await asyncio.sleep(0)
    assert busy(engines) == [2, 2, 2]
    await asyncio.gather(*first)
    again = [
      await ask(pooled, "next", name, (3, 1, 5, chat_lib.END, 4, 1))
      for name in reversed(names)
    ]
    assert not pooled._requests
    return [answer.cached_tokens for answer in again]

  # 2 ids and the first that was sampled; the last one is never fed.
  assert run(scenario()) == [3] * 6


def test_requests_of_a_replica_that_stops_are_answered_by_another():
  async def scenario():
    pooled, engines = pool(2, 0.02)
    answers = [await begun(pooled, name, seed=1) for name in "abc"]
    assert busy(engines) == [2, 1]
    await engines[0].close()
    later = await begun(pooled, "d")
    assert busy(engines) == [0, 4]
    alone = testing.FakeEngine((5, 6), chat_lib.END)
    expected = (await alone.generate(request(seed=1))).tokens.tolist()
    assert (await later).stop == "stop"
    return [(await one).tokens.tolist() == expected for one in answers]

  assert run(scenario()) == [True] * 3


def test_when_all_have_stopped_the_pool_has():
  async def scenario():
    pooled, engines = pool(2, 0.02)
    answers = [await begun(pooled, name) for name in "ab"]
    for one in engines:
      await one.close()
    for answer in answers:
      with pytest.raises(engine.EngineClosed):
        await answer
    for ask in (
      pooled.generate(request()),
      anext(pooled.stream(request())),
      pooled.flush_cache(),
    ):
      with pytest.raises(engine.EngineClosed, match="all 2 replicas have stop"):
        await ask

  run(scenario())


def test_a_stream_moves_before_its_first_delta_and_ends_behind_it():
  async def scenario():
    pooled, engines = pool(2, 0.05)
    await engines[0].pause()
    waiting = pooled.stream(request())
    first = asyncio.create_task(anext(waiting))
    await asyncio.sleep(0.01)
    assert busy(engines) == [1, 0]
    await engines[0].close()
    assert (await first).completion is None
    assert busy(engines) == [0, 1]
    await engines[1].close()
    with pytest.raises(engine.EngineClosed, match="was closed"):
      await anext(waiting)
    third = testing.FakeEngine((5,), chat_lib.END, lambda _: 0.05)
    pooled = replicas.Replicas([third, testing.FakeEngine((5,), 1)])
    begun = pooled.stream(request())
    await anext(begun)
    await third.close()
    # Its tokens are told already: the other replica is not asked.
    with pytest.raises(engine.EngineClosed, match="was closed"):
      await anext(begun)

  run(scenario())


def test_whoever_gives_up_leaves_nothing_behind():
  async def scenario():
    pooled, engines = pool(2, 5.0)
    answers = [await begun(pooled, name) for name in "ab"]
    stream = pooled.stream(request("c"))
    await anext(stream)
    assert busy(engines) == [2, 1]
    for answer in answers:
      answer.cancel()
    await asyncio.wait(answers)
    await stream.aclose()
    assert busy(engines) == [0, 0]
    # None of them counts as load any more.
    return [pooled._homes.begin(name) for name in "de"]

  assert run(scenario()) == [0, 1]


def test_an_abort_reaches_the_replica_of_its_request():
  async def scenario():
    pooled, engines = pool(2, 5.0)
    answers = [await begun(pooled, name) for name in "abc"]
    with pytest.raises(ValueError, match="request d is not in flight"):
      pooled.abort("d")
    # Other sessions, and so perhaps another replica, but the same name.
    with pytest.raises(ValueError, match="request a is already in flight"):
      await pooled.generate(request("a", "z"))
    pooled.abort("b")
    stops = [(await answers[1]).stop]
    assert busy(engines) == [2, 0]
    pooled.abort(None)
    return [*stops, *[(await answers[i]).stop for i in (0, 2)]]

  assert run(scenario()) == ["abort"] * 3


def test_counters_are_sums_and_the_version_is_the_lowest_that_serves():
  async def scenario():
    pooled, engines = pool(2)
    for name in "ab":
      await pooled.generate(request(name))
    third = await begun(pooled, "c")
    await engines[1].update_weights(trajectory.PolicyVersion(3), None)
    stats = [pooled.stats()]
    await third
    await engines[0].close()
    await pooled.flush_cache()  # So that the pool knows.
    return [*stats, pooled.stats(), engines[1].stats().paused_s]

  before, after, paused_s = run(scenario())
  assert (before.version, before.running, before.waiting) == (0, 1, 0)
  assert (after.version, after.running) == (3, 0)
  # Three answers of two tokens to requests of two ids.
  assert (after.sampled_tokens, after.prefilled_tokens) == (6, 6)
  assert after.paused_s == paused_s


def test_the_pool_can_do_what_each_of_them_can():
  _, engines = pool(2)
  engines[0].capabilities = dataclasses.replace(
    engines[0].capabilities, max_length=7, experts=True, bias=True
  )
  engines[1].capabilities = dataclasses.replace(
    engines[1].capabilities, in_flight=frozenset({"drain"}), experts=True
  )
  able = replicas.Replicas(engines).capabilities
  assert (able.max_length, able.experts, able.bias) == (7, True, False)
  assert able.in_flight == {"drain"}


def test_a_pool_of_nothing_or_of_two_models_is_refused():
  with pytest.raises(ValueError, match="0 engines"):
    replicas.Replicas([])
  _, engines = pool(2)
  engines[0].capabilities = dataclasses.replace(
    engines[0].capabilities, vocab_size=8
  )
  with pytest.raises(ValueError, match=r"vocabularies \[8, 1048576\]"):
    replicas.Replicas(engines)


def test_what_is_flushed_is_flushed_everywhere():
  async def scenario():
    pooled, engines = pool(3)
    for name in "abc":
      await begun(pooled, name)
    await asyncio.sleep(0.01)
    await engines[1].close()
    await pooled.flush_cache()
    longer = (3, 1, 5, chat_lib.END, 4)
    answers = [await pooled.generate(request(n, ids=longer)) for n in "abc"]
    return [answer.cached_tokens for answer in answers], pooled._homes.open

  assert run(scenario()) == ([0, 0, 0], [0, 2])


def test_all_are_closed_even_when_one_cannot_be():
  class Stuck(testing.FakeEngine):
    async def close(self):
      raise OSError("the device hangs")

  class Slow(testing.FakeEngine):
    async def close(self):
      await asyncio.sleep(0.02)
      await super().close()

  async def scenario():
    other = Slow((5,), chat_lib.END, lambda _: 5.0)
    pooled = replicas.Replicas([other, Stuck((5,), chat_lib.END)])
    answer = await begun(pooled)
    with pytest.raises(OSError, match="the device hangs"):
      await pooled.close()
    assert other._closed
    # It does not move to the one that is not closed.
    with pytest.raises(engine.EngineClosed):
      await answer
    with pytest.raises(engine.EngineClosed, match="pool was closed"):
      await pooled.generate(request("b"))

  run(scenario())
