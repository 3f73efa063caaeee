"""Tests of the router: who serves whom, and who takes over."""

import asyncio
import dataclasses

import pytest

from models.chat import word_chat
from rl.audit import event_log
from rl.data import trajectory
from rl.engine import contract
from rl.pools import affinity, router
from rl.testing import fake_engine
from tests.helpers import pools_under_test as pools


@pytest.mark.parametrize("streamed", [False, True])
def test_requests_spread_and_come_back_to_what_is_cached(streamed):
  async def ask(pooled, *args):
    if not streamed:
      return await pooled.generate(pools.request(*args))
    return [d async for d in pooled.stream(pools.request(*args))][-1].completion

  async def scenario():
    pooled, engines = pools.pool(3, 0.01)
    names = [f"s{i}" for i in range(6)]
    first = [asyncio.create_task(ask(pooled, name, name)) for name in names]
    for _ in range(3):
      await asyncio.sleep(0)
    assert pools.busy(engines) == [2, 2, 2]
    await asyncio.gather(*first)
    again = [
      await ask(pooled, "next", name, (3, 1, 5, word_chat.END, 4, 1))
      for name in reversed(names)
    ]
    assert pooled.describe()["engines_lost"] == 0.0
    return [answer.cached_tokens for answer in again]

  # 2 ids and the first that was sampled; the last one is never fed.
  assert pools.run(scenario()) == [3] * 6


def test_requests_of_an_engine_that_stops_are_answered_by_another():
  async def scenario():
    pooled, engines = pools.pool(2, 0.02)
    answers = [await pools.begun(pooled, name, seed=1) for name in "abc"]
    assert pools.busy(engines) == [2, 1]
    await engines[0].close()
    later = await pools.begun(pooled, "d")
    assert pools.busy(engines) == [0, 4]
    alone = fake_engine.FakeEngine((5, 6), word_chat.END)
    expected = (await alone.generate(pools.request(seed=1))).tokens.tolist()
    assert (await later).stop == "stop"
    return [(await one).tokens.tolist() == expected for one in answers]

  assert pools.run(scenario()) == [True] * 3


def test_when_all_have_stopped_the_pool_has():
  async def scenario():
    pooled, engines = pools.pool(2, 0.02)
    answers = [await pools.begun(pooled, name) for name in "ab"]
    for one in engines:
      await one.close()
    for answer in answers:
      with pytest.raises(contract.EngineClosed):
        await answer
    for ask in (
      pooled.generate(pools.request()),
      anext(pooled.stream(pools.request())),
      pooled.flush_cache(),
    ):
      with pytest.raises(
        contract.EngineClosed, match="all 2 engines have stop"
      ):
        await ask

  pools.run(scenario())


def test_a_stream_moves_before_its_first_delta_and_ends_behind_it():
  async def scenario():
    pooled, engines = pools.pool(2, 0.05)
    await engines[0].pause()
    waiting = pooled.stream(pools.request())
    first = asyncio.create_task(anext(waiting))
    await asyncio.sleep(0.01)
    assert pools.busy(engines) == [1, 0]
    await engines[0].close()
    assert (await first).completion is None
    assert pools.busy(engines) == [0, 1]
    await engines[1].close()
    with pytest.raises(contract.EngineClosed, match="was closed"):
      await anext(waiting)
    third = fake_engine.FakeEngine((5,), word_chat.END, lambda _: 0.05)
    pooled = router.Router(
      pools.members([third, fake_engine.FakeEngine((5,), 1)])
    )
    begun = pooled.stream(pools.request())
    await anext(begun)
    await third.close()
    # Its tokens are told already: the other engine is not asked.
    with pytest.raises(contract.EngineClosed, match="was closed"):
      await anext(begun)

  pools.run(scenario())


def test_whoever_gives_up_leaves_nothing_behind():
  async def scenario():
    pooled, engines = pools.pool(2, 5.0)
    answers = [await pools.begun(pooled, name) for name in "ab"]
    stream = pooled.stream(pools.request("c"))
    await anext(stream)
    assert pools.busy(engines) == [2, 1]
    for answer in answers:
      answer.cancel()
    await asyncio.wait(answers)
    await stream.aclose()
    assert pools.busy(engines) == [0, 0]
    # None of them counts as load any more.
    return [await pooled.begin(name, "") for name in "de"]

  assert pools.run(scenario()) == [0, 1]


def test_an_abort_and_a_look_reach_the_engine_of_their_request():
  async def scenario():
    pooled, engines = pools.pool(2, 5.0)
    answers = [await pools.begun(pooled, name) for name in "abc"]
    with pytest.raises(ValueError, match="request d is not in flight"):
      pooled.abort("d")
    # Other sessions, and so perhaps another engine, but the same name.
    with pytest.raises(ValueError, match="request a is already in flight"):
      await pooled.generate(pools.request("a", "z"))
    with pytest.raises(ValueError, match="request d is not in flight"):
      pooled.begun("d")
    assert pooled.begun("a") == 0
    assert pooled.begun("b") == 0
    pooled.abort("b")
    stops = [(await answers[1]).stop]
    assert pools.busy(engines) == [2, 0]
    pooled.abort(None)
    return [*stops, *[(await answers[i]).stop for i in (0, 2)]]

  assert pools.run(scenario()) == ["abort"] * 3


@pytest.mark.parametrize("streamed", [False, True])
def test_an_abort_reaches_a_request_that_waits_for_an_engine(streamed):
  async def ask(pooled):
    again = pools.request("again", "a")
    if not streamed:
      return await pooled.generate(again)
    return [delta async for delta in pooled.stream(again)][-1].completion

  async def scenario():
    pooled, engines = pools.pool()
    await pooled.begin("a", "")
    engines[0].version = trajectory.PolicyVersion(1)
    await pooled.generate(pools.request("a"))
    await engines[0].close()
    # The other has not been given that version yet.
    waiting = asyncio.create_task(ask(pooled))
    await asyncio.sleep(4)
    assert not waiting.done()
    pooled.abort("again")
    answer = await waiting
    assert pools.busy(engines) == [0, 0]
    with pytest.raises(ValueError, match="request again is not in flight"):
      pooled.abort("again")
    return answer.stop, len(answer.tokens), answer.decode_s

  assert pools.run(scenario()) == ("abort", 0, 4.0)


def test_an_abort_of_all_reaches_what_is_between_two_engines():
  async def scenario():
    pooled, engines = pools.pool(delay_s=5.0)
    answers = [await pools.begun(pooled, name) for name in "ab"]
    await engines[0].close()
    pooled.abort(None)
    return [((await one).stop, len((await one).tokens)) for one in answers]

  # Of "b" an engine knew, and it had begun.
  assert pools.run(scenario()) == [("abort", 0), ("abort", 1)]


def test_a_conversation_ends_when_nobody_has_its_version_any_more():
  async def scenario():
    pooled, engines = pools.pool(delay_s=1.0)
    held = asyncio.create_task(pools.episode(pooled, "a", turns=1))
    long = asyncio.create_task(pools.episode(pooled, "b", turns=4))
    await asyncio.sleep(0.1)
    published = asyncio.ensure_future(pools.publish(pooled, 1))
    assert await held == (0, [0, 0])
    await asyncio.sleep(0.1)
    assert [one.version for one in engines] == [1, 0]
    await engines[1].close()
    with pytest.raises(ValueError, match="session b has tokens of version 0"):
      await long
    await published
    # Nobody waits for what has ended.
    await pools.publish(pooled, 2)
    return await pools.episode(pooled, "c", turns=1)

  assert pools.run(scenario()) == (0, [2, 2])


def test_what_is_flushed_is_flushed_everywhere():
  async def scenario():
    pooled, engines = pools.pool(3)
    for name in "abc":
      await pools.begun(pooled, name)
    await asyncio.sleep(0.01)
    await engines[1].close()
    await pooled.flush_cache()
    longer = (3, 1, 5, word_chat.END, 4)
    answers = [
      await pooled.generate(pools.request(n, ids=longer)) for n in "abc"
    ]
    return [answer.cached_tokens for answer in answers]

  assert pools.run(scenario()) == [0, 0, 0]


def test_all_are_closed_even_when_one_cannot_be():
  class Stuck(fake_engine.FakeEngine):
    async def close(self):
      raise OSError("the device hangs")

  class Slow(fake_engine.FakeEngine):
    async def close(self):
      await asyncio.sleep(0.02)
      await super().close()

  async def scenario():
    other = Slow((5,), word_chat.END, lambda _: 5.0)
    pooled = router.Router(pools.members([other, Stuck((5,), word_chat.END)]))
    answer = await pools.begun(pooled)
    with pytest.raises(OSError, match="the device hangs"):
      await pooled.close()
    assert other._closed
    # It does not move to the one that is not closed.
    with pytest.raises(contract.EngineClosed):
      await answer
    with pytest.raises(contract.EngineClosed, match="pool was closed"):
      await pooled.generate(pools.request("b"))

  pools.run(scenario())


def test_a_mapped_domain_falls_back_within_a_dispatch_and_returns():
  async def scenario():
    log = event_log.EventLog()
    pooled, engines = pools.pool(
      delay_s=1.0,
      log=log,
      routing={"prefer": {"math": "wide"}},
      seats=[("fast", "compute", 2.85), ("wide", "bandwidth", 1.0)],
    )
    play = asyncio.create_task(pools.episode(pooled, "a", "math"))
    await asyncio.sleep(0.1)
    await engines[1].close()
    number, versions = await play
    assert (number, versions) == (1, [0] * 6)
    assert await pooled.begin("b", "math") == 0
    with pytest.raises(ValueError, match="engine 0 is open, not lost"):
      pooled.recover(0, fake_engine.FakeEngine((5,), word_chat.END))
    pooled.recover(1, fake_engine.FakeEngine((5,), word_chat.END))
    assert await pooled.begin("c", "math") == 1
    assert (await pooled.generate(pools.request("r", "c"))).tokens[0] == 5
    return log.events, pooled.describe()

  told, described = pools.run(scenario())
  assert [{k: v for k, v in e.items() if k != "t"} for e in told] == [
    {
      "kind": "engine_lost",
      "engine": 1,
      "reason": "the fake engine was closed",
    },
    {"kind": "fallback", "session": "a", "wanted": "wide", "engine": 0},
    {"kind": "fallback", "session": "b", "wanted": "wide", "engine": 0},
    {"kind": "engine_back", "engine": 1},
  ]
  assert described["route_fallbacks"] == 2.0
  assert described["route_returns"] == 1.0
  assert described["sessions_moved"] == 1.0
  assert described["sessions/wide/math"] == 2.0


def test_an_engine_comes_back_with_the_newest_weights_or_not_at_all():
  async def scenario():
    pooled, engines = pools.pool(delay_s=1.0)
    await engines[1].close()
    await pooled.flush_cache()  # So that the router knows.
    await pools.publish(pooled, 3)
    back = fake_engine.FakeEngine((5,), word_chat.END)
    with pytest.raises(ValueError, match=r"with version 0, but version 3 is"):
      pooled.recover(1, back)
    await back.update_weights(trajectory.PolicyVersion(3), None)
    other = fake_engine.FakeEngine((5,), word_chat.END)
    other.version = trajectory.PolicyVersion(3)
    other.capabilities = dataclasses.replace(other.capabilities, vocab_size=8)
    with pytest.raises(ValueError, match="vocabularies"):
      pooled.recover(1, other)
    pooled.recover(1, back)
    assert pooled.engines == (engines[0], back)
    await pools.publish(pooled, 4)
    return [one.stats().version for one in pooled.engines]

  assert pools.run(scenario()) == [4, 4]


def test_what_is_measured_moves_each_domain_to_its_better_pool():
  class Machine(fake_engine.FakeEngine):
    """Takes `swift` for one domain, known by its priority, and 3 s for others.

    The first id comes at once, so all of it is decoding.
    """

    def __init__(self, swift):
      self.swift = swift
      super().__init__((5, 6), word_chat.END, self.seconds)

    def seconds(self, priority):
      return 1.0 if priority == (self.swift,) else 3.0

  async def scenario():
    engines = [Machine(0), Machine(1)]
    seats = [("fast", "compute"), ("wide", "bandwidth")]
    learning = affinity.Routing(learn=True)
    pooled = router.Router(pools.members(engines, *seats), learning)

    async def play(domain, count):
      chosen = []
      for i in range(count):
        name = f"{domain}/{i}"
        chosen.append(await pooled.begin(name, str(domain)))
        await pooled.generate(pools.request(name, priority=(domain,)))
        pooled.end(name)
      return chosen

    before = await asyncio.gather(play(0, 40), play(1, 40))
    engines[0].swift, engines[1].swift = 1, 0
    after = await asyncio.gather(play(0, 600), play(1, 600))
    return before, after, pooled.describe()

  before, after, described = pools.run(scenario())
  # A few tries, and each 16th.
  assert before[0][-24:].count(0) >= 20
  assert before[1][-24:].count(1) >= 20
  assert after[0][-64:].count(1) >= 58
  assert after[1][-64:].count(0) >= 58
  # The worse pool is seldom tried, and so not all of its past is forgotten.
  assert described["session_s/wide/0"] == pytest.approx(1.0, abs=0.01)
  assert described["session_s/fast/0"] > 2.5
