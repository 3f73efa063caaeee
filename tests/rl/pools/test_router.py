"""Tests of the router: sessions, aborts, lost engines and weight updates."""

import asyncio
import dataclasses
import random

import pytest

from models.chat import word_chat
from rl.audit import event_log
from rl.engine import contract
from rl.pools import affinity, placement, router
from rl.testing import scripted_engine
from tests.helpers import pools_under_test as pools

pytestmark = pytest.mark.virtual_time

FAST = placement.EngineInfo("fast", "compute")
WIDE = placement.EngineInfo("wide", "bandwidth")


async def answered(pooled, streamed, *args):
  """Returns an answer, as a whole or from the end of its stream."""
  request = pools.request(*args)
  if not streamed:
    return await pooled.generate(request)
  return [delta async for delta in pooled.stream(request)][-1].completion


@pytest.mark.parametrize("streamed", [False, True])
async def test_requests_spread_and_come_back_to_what_is_cached(streamed):
  pooled, engines = pools.pool(3, 0.01)
  names = [f"s{i}" for i in range(6)]
  first = [
    asyncio.create_task(answered(pooled, streamed, name, name))
    for name in names
  ]
  for _ in range(3):
    await asyncio.sleep(0)
  assert pools.busy(engines) == [2, 2, 2]
  await asyncio.gather(*first)
  again = [
    await answered(
      pooled, streamed, "next", name, (3, 1, 5, word_chat.END, 4, 1)
    )
    for name in reversed(names)
  ]
  assert pooled.describe()["engines_lost"] == 0.0
  # 2 ids and the first that was sampled; the last one is never fed.
  assert [answer.cached_tokens for answer in again] == [3] * 6


async def test_requests_of_an_engine_that_stops_are_answered_by_another():
  pooled, engines = pools.pool(2, 0.02)
  answers = [await pools.begun(pooled, name, seed=1) for name in "abc"]
  assert pools.busy(engines) == [2, 1]
  await engines[0].close()
  later = await pools.begun(pooled, "d")
  assert pools.busy(engines) == [0, 4]
  alone = pools.engine()
  expected = (await alone.generate(pools.request(seed=1))).tokens.tolist()
  assert (await later).stop == "stop"
  found = [(await one).tokens.tolist() == expected for one in answers]
  assert found == [True] * 3


async def test_when_all_have_stopped_the_pool_has():
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
    with pytest.raises(contract.EngineClosed, match="all 2 engines have stop"):
      await ask


async def test_a_stream_moves_before_its_first_delta_and_ends_behind_it():
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
  third = pools.engine((5,), 0.05)
  pooled = router.Router([third, pools.engine((5,))])
  begun = pooled.stream(pools.request())
  await anext(begun)
  await third.close()
  # Its tokens are told already: the other engine is not asked.
  with pytest.raises(contract.EngineClosed, match="was closed"):
    await anext(begun)


async def test_whoever_gives_up_leaves_nothing_behind():
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
  assert [await pooled.begin(name, "") for name in "de"] == [0, 1]


async def test_an_abort_and_a_look_reach_the_engine_of_their_request():
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
  for _ in range(2):
    pooled.abort("b")
  stops = [(await answers[1]).stop]
  assert pools.busy(engines) == [2, 0]
  pooled.abort(None)
  assert [*stops, *[(await answers[i]).stop for i in (0, 2)]] == ["abort"] * 3


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_abort_reaches_a_request_that_waits_for_an_engine(streamed):
  pooled, engines = pools.pool()
  await pooled.begin("a", "")
  engines[0].version = 1
  await pooled.generate(pools.request("a"))
  await engines[0].close()
  # The other has not been given that version yet.
  waiting = asyncio.create_task(answered(pooled, streamed, "again", "a"))
  await asyncio.sleep(4)
  assert not waiting.done()
  pooled.abort("again")
  answer = await waiting
  assert pools.busy(engines) == [0, 0]
  with pytest.raises(ValueError, match="request again is not in flight"):
    pooled.abort("again")
  assert (answer.stop, len(answer.tokens), answer.decode_s) == ("abort", 0, 4.0)


async def test_an_abort_of_all_reaches_what_is_between_two_engines():
  pooled, engines = pools.pool(delay_s=5.0)
  answers = [await pools.begun(pooled, name) for name in "ab"]
  await engines[0].close()
  pooled.abort(None)
  # Of "b" an engine knew, and it had begun.
  found = [((await one).stop, len((await one).tokens)) for one in answers]
  assert found == [("abort", 0), ("abort", 1)]


async def test_a_conversation_ends_when_nobody_has_its_version_any_more():
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
  assert await pools.episode(pooled, "c", turns=1) == (0, [2, 2])


async def test_an_engine_that_has_no_weights_yet_is_told_without_a_version():
  pooled, (engine,) = pools.pool(1, 0.01)
  engine.version = -1
  (line,) = pooled.roll()
  assert line.endswith(", version none")


async def test_what_is_flushed_is_flushed_everywhere():
  pooled, engines = pools.pool(3)
  for name in "abc":
    await pools.begun(pooled, name)
  await asyncio.sleep(0.01)
  await engines[1].close()
  await pooled.flush_cache()
  longer = (3, 1, 5, word_chat.END, 4)
  answers = [await pooled.generate(pools.request(n, ids=longer)) for n in "abc"]
  assert [answer.cached_tokens for answer in answers] == [0, 0, 0]


async def test_all_are_closed_even_when_one_cannot_be():
  class Stuck(scripted_engine.ScriptedEngine):
    async def close(self):
      raise OSError("the device hangs")

  class Slow(scripted_engine.ScriptedEngine):
    async def close(self):
      await asyncio.sleep(0.02)
      await super().close()

  other = pools.engine((5,), 5.0, Slow)
  pooled = router.Router([other, pools.engine((5,), kind=Stuck)])
  answer = await pools.begun(pooled)
  with pytest.raises(OSError, match="the device hangs"):
    await pooled.close()
  assert other._closed
  # It does not move to the one that is not closed.
  with pytest.raises(contract.EngineClosed):
    await answer
  with pytest.raises(contract.EngineClosed, match="pool was closed"):
    await pooled.generate(pools.request("b"))


async def test_an_engine_comes_back_with_the_newest_weights_or_not_at_all():
  pooled, engines = pools.pool(delay_s=1.0)
  await engines[1].close()
  await pooled.flush_cache()  # So that the router knows.
  await pools.publish(pooled, 3)
  back = pools.engine((5,))
  with pytest.raises(ValueError, match=r"with version 0, but version 3 is"):
    pooled.recover(1, back)
  await back.update_weights(3, None)
  other = pools.engine((5,))
  other.version = 3
  other.capabilities = dataclasses.replace(other.capabilities, vocab_size=8)
  with pytest.raises(ValueError, match="vocabularies"):
    pooled.recover(1, other)
  pooled.recover(1, back)
  assert pooled.engines == (engines[0], back)
  await pools.publish(pooled, 4)
  assert [one.stats().version for one in pooled.engines] == [4, 4]


async def test_what_is_measured_moves_each_domain_to_its_better_pool():
  class Machine(scripted_engine.ScriptedEngine):
    """Takes `swift` for one domain, known by its priority, and 3 s for others.

    The first id comes at once, so all of it is decoding.
    """

    def __init__(self, swift):
      self.swift = swift
      super().__init__(lambda request: (5, word_chat.END), self.seconds)

    def seconds(self, request, i):
      return i * (1.0 if request.priority == (self.swift,) else 3.0)

  engines = [Machine(0), Machine(1)]
  learning = affinity.Routing(learn=True)
  pooled = router.Router(engines, infos=[FAST, WIDE], routing=learning)

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
  described = pooled.describe()
  # A few tries, and each 16th.
  assert before[0][-24:].count(0) >= 20
  assert before[1][-24:].count(1) >= 20
  assert after[0][-64:].count(1) >= 58
  assert after[1][-64:].count(0) >= 58
  # The worse pool is seldom tried, and so not all of its past is forgotten.
  assert described["session_s/wide/0"] == pytest.approx(1.0, abs=0.01)
  assert described["session_s/fast/0"] > 2.5


async def test_the_answer_to_what_was_never_sent_has_no_token():
  await asyncio.sleep(7)
  answer = router.unsent(4.0)
  assert (answer.stop, answer.decode_s) == ("abort", 3.0)
  delta = contract.whole_delta(answer)
  assert delta.completion is answer
  for ids in (answer.tokens, answer.logprobs, answer.versions, delta.tokens):
    assert len(ids) == 0


async def test_a_signal_wakes_all_who_wait_and_nobody_who_comes_later():
  signal = router.Signal()
  signal.fire()  # Nobody waits yet.
  waiters = [asyncio.create_task(signal.wait()) for _ in range(3)]
  await asyncio.sleep(1)
  assert not any(one.done() for one in waiters)
  signal.fire()
  later = asyncio.create_task(signal.wait())
  await asyncio.sleep(1)
  done = [one.done() for one in (*waiters, later)]
  signal.fire()
  await later
  assert done == [True, True, True, False]


class Narrow(scripted_engine.ScriptedEngine):
  """Serves one request at a time."""

  def __init__(self, *args, **kwargs):
    super().__init__(*args, **kwargs)
    self._slot = asyncio.Semaphore(1)

  async def generate(self, request):
    async with self._slot:
      return await super().generate(request)


@pytest.mark.parametrize("count", [1, 2, 3])
async def test_drains_end_with_more_episodes_in_flight_than_can_run(count):
  engines = [
    pools.engine(delay_s=1.0, kind=Narrow, update_s=2.0) for _ in range(count)
  ]
  pooled = router.Router(engines)
  rooms = asyncio.Semaphore(4)

  async def play(number):
    async with rooms:
      return await pools.episode(pooled, f"s{number}", turns=1 + number % 4)

  plays = [asyncio.create_task(play(i)) for i in range(24)]
  await asyncio.sleep(0.1)
  for version in (1, 2):
    await pools.publish(pooled, version)
    assert [one.version for one in engines] == [version] * count
  played = await asyncio.gather(*plays)
  # Two tokens a turn, and all of an episode under one version.
  assert [len(v) for _, v in played] == [2 + 2 * (i % 4) for i in range(24)]
  assert all(len(set(versions)) == 1 for _, versions in played)
  assert {versions[0] for _, versions in played} == {0, 1, 2}


async def test_an_engine_that_drains_is_filled_again_while_another_decodes():
  pooled, engines = pools.pool(delay_s=1.0)
  # At 0 one turn of 1.5 s, at 1 four of them.
  first = asyncio.create_task(pools.episode(pooled, "a", turns=1))
  second = asyncio.create_task(pools.episode(pooled, "b", turns=4))
  await asyncio.sleep(0.1)
  published = pools.publish(pooled, 1)
  third = asyncio.create_task(pools.episode(pooled, "c", turns=1))
  await asyncio.sleep(1.8)  # 1.9 s: 0 has the new weights since 1.5 s.
  seen = [one.version for one in engines], first.done(), second.done()
  await published
  third = await third
  second = await second
  time_s = asyncio.get_running_loop().time()
  assert seen == ([1, 0], True, False)
  assert third == (0, [1, 1])
  assert second == (1, [0] * 8)
  assert time_s == pytest.approx(6.0)


@pytest.mark.parametrize("mode", ["recompute", "keep_kv", "abort"])
async def test_other_modes_do_not_wait_for_sessions(mode):
  pooled, _ = pools.pool(delay_s=1.0, count=1)
  play = asyncio.create_task(pools.episode(pooled, "a"))
  await asyncio.sleep(0.1)
  await pools.publish(pooled, 1, mode)
  published_s = asyncio.get_running_loop().time()
  _, versions = await play
  assert published_s == pytest.approx(0.1)
  assert versions[0] == 0
  assert versions[-1] == 1


async def test_sessions_that_never_began_are_not_waited_for():
  pooled, _ = pools.pool(delay_s=1.0, count=1)
  answer = await pools.begun(pooled, "a")
  await pools.publish(pooled, 1)
  # The engine lets what runs finish; what comes then is under the new ones.
  versions = (await answer).versions.tolist()
  versions += (await pooled.generate(pools.request("b"))).versions.tolist()
  assert versions == [0, 0, 1, 1]


async def test_an_engine_opens_again_when_its_update_fails_or_is_cancelled():
  class Broken(scripted_engine.ScriptedEngine):
    async def update_weights(
      self,
      version,
      params,
      in_flight="recompute",
      on_step=contract.ignore_step,
    ):
      raise ValueError("another model's")

  pooled = router.Router([pools.engine(kind=Broken)])
  await pooled.begin("a", "")
  failing = asyncio.ensure_future(pools.publish(pooled, 1))
  later = asyncio.create_task(pooled.begin("b", ""))
  await asyncio.sleep(1)
  assert not later.done()
  pooled.end("a")
  with pytest.raises(ValueError, match="another model's"):
    await failing
  assert await later == 0
  cancelled = asyncio.ensure_future(pools.publish(pooled, 2))
  last = asyncio.create_task(pooled.begin("c", ""))
  await asyncio.sleep(1)
  cancelled.cancel()
  assert await last == 0


async def test_one_update_at_a_time_drains_an_engine():
  pooled, _ = pools.pool(delay_s=1.0, count=1)
  await pooled.begin("a", "")
  first = asyncio.ensure_future(pools.publish(pooled, 1))
  await asyncio.sleep(1)
  with pytest.raises(ValueError, match="engine 0 is draining, not open"):
    await pools.publish(pooled, 2)
  pooled.end("a")
  await first


async def test_an_engine_lost_while_it_drains_holds_up_nobody():
  log = event_log.EventLog()
  pooled, engines = pools.pool(delay_s=1.0, log=log)
  plays = [
    asyncio.create_task(pools.episode(pooled, name, turns=2)) for name in "ab"
  ]
  await asyncio.sleep(0.1)
  published = asyncio.ensure_future(pools.publish(pooled, 1))
  await asyncio.sleep(0.1)
  await engines[1].close()
  await published
  assert engines[0].version == 1
  assert [pooled.lost(i) for i in (0, 1)] == [False, True]
  # An update goes on without the lost engine, ...
  await pools.publish(pooled, 2)
  assert engines[0].version == 2
  with pytest.raises(contract.EngineClosed):
    await pooled.checksum(1)
  # ... until nothing is left to serve.
  await engines[0].close()
  with pytest.raises(contract.EngineClosed, match="all 2 engines have stopped"):
    await pools.publish(pooled, 3)
  played = await asyncio.gather(*plays)
  # "b" moved to where the old weights still were, and 0 waited for it.
  assert played == [(0, [0] * 4), (1, [0] * 4)]
  kinds = [(event["kind"], event["engine"]) for event in log.events]
  assert kinds == [("engine_lost", 1), ("moved", 0), ("engine_lost", 0)]
  assert log.events[0]["reason"] == "the scripted engine was closed"


async def test_who_loses_the_newest_weights_waits_until_another_has_them():
  pooled, engines = pools.pool(delay_s=1.0)
  held = asyncio.create_task(pools.episode(pooled, "a", turns=1))
  long = asyncio.create_task(pools.episode(pooled, "b", turns=4))
  await asyncio.sleep(0.1)
  published = asyncio.ensure_future(pools.publish(pooled, 1))
  await held
  await asyncio.sleep(0)
  late = asyncio.create_task(pools.episode(pooled, "c", turns=2))
  await asyncio.sleep(1.2)  # It has an answer of version 1.
  await engines[0].close()
  await published
  late = await late
  long = await long
  time_s = asyncio.get_running_loop().time()
  # The other engine serves version 0 until "b" ends, at 6 s.
  assert late == (0, [1] * 4)
  assert long == (1, [0] * 8)
  assert time_s == pytest.approx(7.5)


async def test_an_engine_lost_while_it_takes_weights_is_left_without():
  engines = [pools.engine((5,), update_s=1.0) for _ in "ab"]
  pooled = router.Router(engines)
  published = asyncio.ensure_future(pools.publish(pooled, 1))
  await asyncio.sleep(0.5)
  await engines[0].close()
  await published
  assert pooled.lost(0)
  assert await pooled.begin("a", "") == 1


async def test_an_engine_that_comes_back_while_it_drains_needs_no_weights():
  pooled, engines = pools.pool(delay_s=1.0)
  for name in "ab":
    await pooled.begin(name, "")
  published = asyncio.ensure_future(pools.publish(pooled, 1))
  await asyncio.sleep(0.1)
  await engines[1].close()
  back = pools.engine((5,))
  await back.update_weights(1, None)
  # Both at once, so that the update sees only that it is another.
  pooled._lose(1, pooled.engines[1], "it was closed")
  pooled.recover(1, back)
  assert await pooled.begin("c", "") == 1
  pooled.end("a")
  pooled.end("b")
  await published
  assert [one.stats().version for one in pooled.engines] == [1, 1]


async def test_a_begin_that_is_cancelled_leaves_no_session():
  pooled, _ = pools.pool(delay_s=1.0, count=1)
  await pooled.begin("a", "")
  published = asyncio.ensure_future(pools.publish(pooled, 1))
  await asyncio.sleep(0)
  given_up = asyncio.create_task(pooled.begin("b", ""))
  kept = asyncio.create_task(pooled.begin("c", ""))
  await asyncio.sleep(1)
  given_up.cancel()
  pooled.end("a")
  await published
  assert await kept == 0
  pooled.end("c")
  # Nothing is left that this would wait for.
  await pools.publish(pooled, 2)
  assert pooled.counts.sessions == {("decode", ""): 2}


async def test_who_waits_for_an_engine_is_told_when_none_is_left():
  pooled, _ = pools.pool(delay_s=1.0, count=1)
  await pooled.begin("a", "")
  published = asyncio.ensure_future(pools.publish(pooled, 1))
  late = asyncio.create_task(pooled.begin("b", ""))
  await asyncio.sleep(1)
  await pooled.close()
  for waiter in (late, published):
    with pytest.raises(contract.EngineClosed, match="the pool was closed"):
      await waiter


@pytest.mark.parametrize("mode", ["drain", "recompute"])
@pytest.mark.parametrize("seed", range(8))
async def test_engines_that_come_and_go_between_publishes_stop_nobody(
  seed, mode
):
  chance, sent, ends = random.Random(seed), [0], []

  log = event_log.EventLog()
  pooled, _ = pools.pool(3, 1.0, log=log)

  async def play(number):
    await asyncio.sleep(20 * chance.random())
    turns = chance.randrange(1, 5)
    try:
      return await pools.episode(pooled, f"s{number}", turns=turns)
    except ValueError as error:  # No engine has its version any more.
      ends.append(str(error))
      return number, []

  async def fail():
    for _ in range(4):
      await asyncio.sleep(5 * chance.random())
      number = chance.randrange(3)
      await pooled.engines[number].close()
      await asyncio.sleep(3 * chance.random())
      if pooled.lost(number):
        back = pools.engine(delay_s=1.0)
        back.version = sent[-1]
        pooled.recover(number, back)

  async def update():
    for version in range(1, 4):
      await asyncio.sleep(5 * chance.random())
      sent.append(version)
      await pools.publish(pooled, version, mode)

  plays = [asyncio.create_task(play(i)) for i in range(40)]
  await asyncio.gather(fail(), update())
  played = await asyncio.gather(*plays)
  assert len(played) == 40
  assert all(versions == sorted(versions) for _, versions in played)
  mixed = sum(len(set(versions)) > 1 for _, versions in played)
  assert mode != "drain" or not mixed
  assert mode == "drain" or not ends
  assert all("which no engine that is left serves" in end for end in ends)
  assert any(event["kind"] == "engine_back" for event in log.events)
