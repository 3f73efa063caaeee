"""Engines that join a running run and leave it, in virtual time."""

import asyncio
import random
from typing import Any

import pytest

from rl.audit import event_log
from rl.engine import contract
from rl.loop import coordinator
from rl.pools import membership, placement
from rl.runtime import checksum
from rl.schedule import overlap
from rl.simulation import learner as simulated_learner
from rl.testing import scripted_engine
from tests.helpers import pools_under_test as pools
from tests.helpers import virtual_run

pytestmark = pytest.mark.virtual_time

INFO = placement.EngineInfo()
TIMES = 200


def check(played):
  assert played.violations() == []
  assert played.ledger.error == 0
  assert not played.of("fault")


def story(log):
  """Returns (kind, engine) of all that come and go."""
  kinds = ("lost", "joined", "leaving", "left", "back", "given_up")
  return [
    (event["kind"].removeprefix("engine_"), event["engine"])
    for event in log.events
    if event["kind"].removeprefix("engine_") in kinds
  ]


@pytest.mark.parametrize("lost_share", [0.0, 0.2], ids=["", "some lost"])
def test_two_hundred_engines_join_and_leave_and_every_promise_holds(lost_share):
  chance = random.Random(0)

  async def come_and_go(run):
    leaves = []

    def leave(number):
      if number and chance.random() < lost_share:
        leaves.append(asyncio.create_task(run.router.engines[number].close()))
      else:
        leaves.append(asyncio.create_task(run.members.leave(number)))
      told.add(number)

    told = set()
    for _ in range(TIMES):
      run.members.join(run.build_more, INFO)
      await asyncio.sleep(chance.uniform(0, 2))
      staying = [i for i in run.router.serving if i not in told]
      if len(staying) > chance.randrange(1, 4):
        leave(chance.choice(staying))
    while run.members.joined < TIMES:
      await asyncio.sleep(0.1)
    for number in [i for i in run.router.serving if i not in told][1:]:
      leave(number)
    await asyncio.wait(leaves)
    while len(run.router.serving) > 1:
      await asyncio.sleep(0.1)
    run.loop.stop()

  played = pools.run(
    overlap.in_flight(4, 1, 2),
    rounds=10_000,
    transfer_s=0.2,
    disturb=come_and_go,
  )
  with pytest.raises(coordinator.Stopped):
    played.start()
  check(played)
  # All but one of the 200, and the one that was there.
  assert played.members.describe() == {
    "engines_joined": TIMES,
    "engines_left": TIMES,
  }
  assert bool(played.of("engine_lost")) == bool(lost_share)
  assert len(played.of("engine_left")) == TIMES
  # Some at each stage of a publish.
  assert {"engine_joined", "engine_left"} <= inside_publishes(played.log)
  assert played.of("moved")


def inside_publishes(log):
  """Returns the kinds of events between begin and end of a publish."""
  kinds, inside = set(), False
  for event in log.events:
    inside = event["kind"] == "publish_start" or inside
    inside = event["kind"] != "published" and inside
    if inside:
      kinds.add(event["kind"])
  return kinds


def test_an_engine_that_leaves_already_is_not_asked_again():
  async def twice(run):
    await asyncio.sleep(0.3)
    await asyncio.gather(run.members.leave(0), run.members.leave(0))

  played = pools.run(overlap.sync(4), num_engines=2, disturb=twice).start()
  check(played)
  assert len(played.of("engine_leaving")) == len(played.of("engine_left")) == 1
  assert played.members.describe()["engines_left"] == 1


@pytest.mark.parametrize("name", ["sync", "one step off", "keep kv"])
def test_an_engine_joins_and_leaves_under_any_schedule(name):
  async def come_and_go(run):
    for _ in range(4):
      number = run.members.join(run.build_more, INFO)
      while number not in run.router.serving:
        await asyncio.sleep(0.3)
      await asyncio.sleep(2.0)
      await run.members.leave(number - 1)

  played = pools.run(virtual_run.SCHEDULES[name], disturb=come_and_go).start()
  check(played)
  assert len(played.observer.rounds) == 5
  assert len(played.of("engine_joined")) > 1
  # What drains has one version a session, so nothing moves.
  drains = virtual_run.SCHEDULES[name].on_publish == "drain"
  assert not (drains and played.of("moved"))


class Verified(simulated_learner.SimulatedTransfer):
  """Weights without a leaf, which are compared all the same."""

  def checksum(self, params) -> Any:
    return checksum.of(params)


class Pool(pools.Pool):
  """One engine beside which others may come."""

  def __init__(self, **settings):
    super().__init__(transfer=Verified(1.0), **settings)
    self.told = []
    self.members = membership.Membership(
      self.router,
      self.publisher,
      start_s=20.0,
      on_lost=self.router.give_up,
      report=self.told.append,
    )

  async def join(self, engine=None, info=INFO):
    """Returns the number of an engine that has joined."""
    number = self.members.join(lambda number: engine or pools.starting(), info)
    await asyncio.sleep(3.1)
    return number


async def test_the_last_engine_serves_until_another_has_joined():
  pool = Pool()
  leaving = asyncio.create_task(pool.members.leave(0))
  await asyncio.sleep(5.0)
  number, versions = await pools.episode(pool.router, "a")
  assert number == 0
  assert versions
  assert not leaving.done()
  await pool.join()
  await leaving
  assert (await pools.episode(pool.router, "b"))[0] == 1
  with pytest.raises(contract.EngineClosed):
    await pool.engines[0].checksum()
  events = story(pool.log)
  assert events == [("leaving", 0), ("joined", 1), ("left", 0)]
  assert pool.told == [
    "engine 0 is to leave: it gets no new session while another engine serves",
    "engine 1 has joined pool decode, with version 0",
    "engine 0 has left",
  ]


async def test_a_session_moves_between_two_requests_and_an_answer_is_finished():
  pool = Pool()
  await pool.join()
  # One that is asked, and one that thinks.
  assert await pool.router.begin("a", "") == 0
  assert await pool.router.begin("b", "") == 1
  answer = await pools.begun(pool.router, "a/0", "a")
  leaving = asyncio.create_task(pool.members.leave(0))
  await asyncio.sleep(0.5)
  assert not leaving.done()
  assert await pool.router.begin("c", "") == 1
  assert len((await answer).tokens) == 2
  await leaving
  await pool.router.generate(pools.request("a/1", "a"))
  events = story(pool.log)
  moved = list(event_log.of_kind(pool.log.events, "moved"))
  assert events == [("joined", 1), ("leaving", 0), ("left", 0)]
  assert [(e["session"], e["engine"]) for e in moved] == [("a", 1)]


async def test_where_engines_drain_the_sessions_end_first():
  pool = Pool()
  await pool.join()
  await pool.publisher.publish(1, None, "drain")
  playing = asyncio.create_task(pools.episode(pool.router, "a", turns=3))
  await asyncio.sleep(0.1)
  await pool.members.leave(0)
  assert playing.done()
  (number, versions) = playing.result()
  moved = list(event_log.of_kind(pool.log.events, "moved"))
  assert (number, set(versions), moved) == (0, {1}, [])


# It joins after 1 + 2 s; the copies of the publish take 1 s.
@pytest.mark.parametrize(("wait_s", "version"), [(0.5, 1), (1.9, 1), (2.5, 0)])
async def test_one_that_joins_in_a_publish_serves_what_is_published(
  wait_s, version
):
  pool = Pool()
  pool.members.join(lambda number: pools.starting(), INFO)
  await asyncio.sleep(wait_s)
  await pool.publisher.publish(1, None, "recompute")
  await asyncio.sleep(10.0)
  (joined,) = event_log.of_kind(pool.log.events, "engine_joined")
  assert joined["version"] == version
  assert [one.stats().version for one in pool.router.engines] == [1, 1]


async def test_a_publish_asks_nothing_of_an_engine_that_is_still_starting():
  pool = Pool()
  pool.members.join(lambda number: pools.starting(start_s=10.0), INFO)
  await asyncio.sleep(2.0)
  # Its weights are compared, and it has none.
  stall_s = await pool.publisher.publish(1, None, "recompute")
  assert pool.router.serving == [0]
  await asyncio.sleep(15.0)
  await pool.publisher.publish(2, None, "recompute")
  found = stall_s, [one.stats().version for one in pool.router.engines]
  assert found == (0.0, [2, 2])


async def test_a_guest_that_is_lost_has_left_and_its_sessions_move():
  pool = Pool()
  number = await pool.join()
  assert await pool.router.begin("a", "") == 0
  assert await pool.router.begin("b", "") == number
  await pool.lose(number)
  await pool.router.generate(pools.request("b/0", "b"))
  assert pool.router.describe()["engines_lost"] == 0
  assert pool.members.describe()["engines_left"] == 1
  # The last one ends it all, as nobody could start it again.
  number = await pool.join()
  await pool.lose(0)
  with pytest.raises(
    contract.EngineClosed,
    match="all 3 engines have stopped, engine 2 because",
  ):
    await pool.lose(number)
  assert story(pool.log) == [
    ("joined", 1),
    ("lost", 1),
    ("left", 1),
    ("joined", 2),
    ("lost", 0),
    ("lost", 2),
    ("left", 2),
  ]


@pytest.mark.parametrize(
  ("kind", "why"),
  [
    (scripted_engine.UnstartableEngine, "RuntimeError('no memory')"),
    (
      scripted_engine.HangingEngine,
      "it took longer than recovery.start_s=20 s",
    ),
  ],
)
async def test_an_engine_that_does_not_start_has_never_been_there(kind, why):
  pool = Pool()
  engine = pools.starting(kind)
  await pool.join(engine)
  await asyncio.sleep(20.0)
  assert engine._closed
  assert await pool.join() == 2
  events = story(pool.log)
  counts = pool.members.describe()
  assert events == [("joined", 2)]
  assert pool.told[0] == f"engine 1 could not join pool decode: {why}"
  assert counts == {"engines_joined": 1.0, "engines_left": 0.0}


class Told(scripted_engine.ScriptedEngine):
  """Can be told to leave, by the event `word`."""

  def __init__(self, *args, **settings):
    super().__init__(*args, **settings)
    self.word = asyncio.Event()

  async def told_to_leave(self):
    await self.word.wait()
    self._check_open()


async def test_an_engine_that_is_told_to_leave_does():
  pool = Pool()
  engine = pools.starting(Told)
  number = await pool.join(engine)
  engine.word.set()
  await asyncio.sleep(0.1)
  assert engine._closed
  assert number not in pool.router.serving
  # One that is closed before it is told leaves nothing behind.
  engine = pools.starting(Told)
  await pool.lose(await pool.join(engine))
  engine.word.set()
  await asyncio.sleep(0.1)
  events = story(pool.log)
  tasks = pool.members._tasks
  assert events == [
    ("joined", 1),
    ("leaving", 1),
    ("left", 1),
    ("joined", 2),
    ("lost", 2),
    ("left", 2),
  ]
  assert not tasks


@pytest.mark.parametrize("after_s", [0.5, 1.5], ids=["copy", "start"])
async def test_closing_in_a_join_leaves_no_task_and_no_engine(after_s):
  pool = Pool()
  engine = pools.starting()
  pool.members.join(lambda number: engine, INFO)
  await asyncio.sleep(after_s)
  await pool.members.close()
  with pytest.raises(ValueError, match="about to end"):
    pool.members.join(lambda number: pools.starting(), INFO)
  await pool.router.close()
  assert engine._closed
  assert asyncio.all_tasks() - {asyncio.current_task()} == set()


async def test_what_is_preferred_may_join_and_leave():
  fast = placement.EngineInfo("fast", "compute")
  wide = placement.EngineInfo("wide", "bandwidth")
  pool = Pool(infos=[fast], routing={"prefer": {"math": "fast"}})
  number = await pool.join(info=wide)
  # All that is there before the last engine of its pool leaves.
  assert await pool.router.begin("a", "math") == 0
  pool.router.end("a")
  await pool.members.leave(0)
  assert await pool.router.begin("b", "math") == number
  assert await pool.join(info=fast) == 2
  assert await pool.router.begin("c", "math") == 2
  described = pool.router.describe()
  roll = pool.router.roll()
  events = pool.log.events
  assert described["route_fallbacks"] == described["route_returns"] == 1.0
  assert roll == [
    "engine 1 (wide): open, 1 sessions, version 0",
    "engine 2 (fast): open, 1 sessions, version 0",
  ]
  pooled = event_log.of_kind(events, "engine_pool")
  assert [e["pool"] for e in pooled] == ["fast", "wide", "fast"]
