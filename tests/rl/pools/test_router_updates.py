"""Tests of doors: weights wait for sessions, and nothing waits for ever."""

import asyncio
import random

import pytest

from models.chat import word_chat
from rl.audit import event_log
from rl.data import trajectory
from rl.engine import contract
from rl.pools import router
from rl.testing import fake_engine
from tests.helpers import pools_under_test as pools


class Narrow(fake_engine.FakeEngine):
  """Serves one request at a time."""

  def __init__(self, *args, **kwargs):
    super().__init__(*args, **kwargs)
    self._slot = asyncio.Semaphore(1)

  async def generate(self, request):
    async with self._slot:
      return await super().generate(request)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_drains_end_with_more_episodes_in_flight_than_can_run(count):
  async def scenario():
    engines = [
      Narrow((5, 6), word_chat.END, lambda _: 1.0, update_s=2.0)
      for _ in range(count)
    ]
    pooled = router.Router(pools.members(engines))
    rooms = asyncio.Semaphore(4)

    async def play(number):
      async with rooms:
        return await pools.episode(pooled, f"s{number}", turns=1 + number % 4)

    plays = [asyncio.create_task(play(i)) for i in range(24)]
    await asyncio.sleep(0.1)
    for version in (1, 2):
      await pools.publish(pooled, version)
      assert [one.version for one in engines] == [version] * count
    return await asyncio.gather(*plays)

  played = pools.run(scenario())
  # Two tokens a turn, and all of an episode under one version.
  assert [len(v) for _, v in played] == [2 + 2 * (i % 4) for i in range(24)]
  assert all(len(set(versions)) == 1 for _, versions in played)
  assert {versions[0] for _, versions in played} == {0, 1, 2}


def test_an_engine_that_drains_is_filled_again_while_another_decodes():
  async def scenario():
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
    return seen, await third, await second, asyncio.get_running_loop().time()

  seen, third, second, time_s = pools.run(scenario())
  assert seen == ([1, 0], True, False)
  assert third == (0, [1, 1])
  assert second == (1, [0] * 8)
  assert time_s == pytest.approx(6.0)


@pytest.mark.parametrize("mode", ["recompute", "keep_kv", "abort"])
def test_other_modes_do_not_wait_for_sessions(mode):
  async def scenario():
    pooled, _ = pools.pool(delay_s=1.0, count=1)
    play = asyncio.create_task(pools.episode(pooled, "a"))
    await asyncio.sleep(0.1)
    await pools.publish(pooled, 1, mode)
    published_s = asyncio.get_running_loop().time()
    _, versions = await play
    return published_s, versions

  published_s, versions = pools.run(scenario())
  assert published_s == pytest.approx(0.1)
  assert versions[0] == 0
  assert versions[-1] == 1


def test_sessions_that_never_began_are_not_waited_for():
  async def scenario():
    pooled, _ = pools.pool(delay_s=1.0, count=1)
    answer = await pools.begun(pooled, "a")
    await pools.publish(pooled, 1)
    # The engine lets what runs finish; what comes then is under the new ones.
    versions = (await answer).versions.tolist()
    return (
      versions + (await pooled.generate(pools.request("b"))).versions.tolist()
    )

  assert pools.run(scenario()) == [0, 0, 1, 1]


def test_an_engine_opens_again_when_its_update_fails_or_is_cancelled():
  class Broken(fake_engine.FakeEngine):
    async def update_weights(self, version, params, in_flight="recompute"):
      raise ValueError("another model's")

  async def scenario():
    pooled = router.Router(pools.members([Broken((5, 6), word_chat.END)]))
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
    return await last

  assert pools.run(scenario()) == 0


def test_one_update_at_a_time_drains_an_engine():
  async def scenario():
    pooled, _ = pools.pool(delay_s=1.0, count=1)
    await pooled.begin("a", "")
    first = asyncio.ensure_future(pools.publish(pooled, 1))
    await asyncio.sleep(1)
    with pytest.raises(ValueError, match="engine 0 is draining, not open"):
      await pools.publish(pooled, 2)
    pooled.end("a")
    await first

  pools.run(scenario())


def test_an_engine_lost_while_it_drains_holds_up_nobody():
  async def scenario():
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
    assert [door.lost for door in pooled.doors] == [False, True]
    # The door of what is lost stays passable, ...
    await pools.publish(pooled, 2)
    assert engines[0].version == 2
    with pytest.raises(contract.EngineClosed):
      await pooled.doors[1].checksum()
    # ... until nothing is left to serve.
    await engines[0].close()
    with pytest.raises(
      contract.EngineClosed, match="all 2 engines have stopped"
    ):
      await pools.publish(pooled, 3)
    return await asyncio.gather(*plays), log.events

  played, told = pools.run(scenario())
  # "b" moved to where the old weights still were, and 0 waited for it.
  assert played == [(0, [0] * 4), (1, [0] * 4)]
  kinds = [(event["kind"], event["engine"]) for event in told]
  assert kinds == [("engine_lost", 1), ("engine_lost", 0)]
  assert told[0]["reason"] == "the fake engine was closed"


def test_who_loses_the_newest_weights_waits_until_another_has_them():
  async def scenario():
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
    return await late, await long, asyncio.get_running_loop().time()

  late, long, time_s = pools.run(scenario())
  # The other engine serves version 0 until "b" ends, at 6 s.
  assert late == (0, [1] * 4)
  assert long == (1, [0] * 8)
  assert time_s == pytest.approx(7.5)


def test_an_engine_lost_while_it_takes_weights_is_left_without():
  async def scenario():
    engines = [
      fake_engine.FakeEngine((5,), word_chat.END, update_s=1.0) for _ in "ab"
    ]
    pooled = router.Router(pools.members(engines))
    published = asyncio.ensure_future(pools.publish(pooled, 1))
    await asyncio.sleep(0.5)
    await engines[0].close()
    await published
    assert pooled.doors[0].lost
    return await pooled.begin("a", "")

  assert pools.run(scenario()) == 1


def test_an_engine_that_comes_back_while_its_door_drains_needs_no_weights():
  async def scenario():
    pooled, engines = pools.pool(delay_s=1.0)
    for name in "ab":
      await pooled.begin(name, "")
    published = asyncio.ensure_future(pools.publish(pooled, 1))
    await asyncio.sleep(0.1)
    await engines[1].close()
    back = fake_engine.FakeEngine((5,), word_chat.END)
    await back.update_weights(trajectory.PolicyVersion(1), None)
    # Both at once, so that its door sees only that it is another.
    pooled._lose(1, "it was closed")
    pooled.recover(1, back)
    assert await pooled.begin("c", "") == 1
    pooled.end("a")
    pooled.end("b")
    await published
    return [one.stats().version for one in pooled.engines]

  assert pools.run(scenario()) == [1, 1]


def test_a_begin_that_is_cancelled_leaves_no_session():
  async def scenario():
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
    return pooled.counts.sessions

  assert pools.run(scenario()) == {("decode", ""): 2}


def test_who_waits_for_an_engine_is_told_when_none_is_left():
  async def scenario():
    pooled, _ = pools.pool(delay_s=1.0, count=1)
    await pooled.begin("a", "")
    published = asyncio.ensure_future(pools.publish(pooled, 1))
    late = asyncio.create_task(pooled.begin("b", ""))
    await asyncio.sleep(1)
    await pooled.close()
    for waiter in (late, published):
      with pytest.raises(contract.EngineClosed, match="the pool was closed"):
        await waiter

  pools.run(scenario())


@pytest.mark.parametrize("mode", ["drain", "recompute"])
@pytest.mark.parametrize("seed", range(8))
def test_engines_that_come_and_go_between_publishes_stop_nobody(seed, mode):
  chance, sent, ends = random.Random(seed), [0], []

  async def scenario():
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
        if pooled.doors[number].lost:
          back = fake_engine.FakeEngine((5, 6), word_chat.END, lambda _: 1.0)
          back.version = trajectory.PolicyVersion(sent[-1])
          pooled.recover(number, back)

    async def update():
      for version in range(1, 4):
        await asyncio.sleep(5 * chance.random())
        sent.append(version)
        await pools.publish(pooled, version, mode)

    plays = [asyncio.create_task(play(i)) for i in range(40)]
    await asyncio.gather(fail(), update())
    played = await asyncio.gather(*plays)
    return played, log.events

  played, told = pools.run(scenario())
  assert len(played) == 40
  assert all(versions == sorted(versions) for _, versions in played)
  mixed = sum(len(set(versions)) > 1 for _, versions in played)
  assert mode != "drain" or not mixed
  assert mode == "drain" or not ends
  assert all("which no engine that is left serves" in end for end in ends)
  assert any(event["kind"] == "engine_back" for event in told)
