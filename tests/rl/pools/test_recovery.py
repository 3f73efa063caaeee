"""Engines that are lost and come back, in virtual time."""

import asyncio
import dataclasses
import functools
import math

import pytest

from rl.audit import event_log
from rl.engine import contract
from rl.pools import placement, recovery
from rl.runtime import watchdog as watchdog_lib
from rl.schedule import overlap
from rl.testing import scripted_engine
from tests.helpers import pools_under_test as pools
from tests.helpers import virtual_run

pytestmark = pytest.mark.virtual_time

QUICK = recovery.Recovery(first_wait_s=1.0, start_s=20.0)
"""Waits of 1, 2 and 4 s before the restarts."""
run = functools.partial(pools.run, num_engines=2, recovery=QUICK)


def lose(*times_s, number=0):
  """Closes the engine in a place, at these times."""

  async def disturb(run):
    loop = asyncio.get_running_loop()
    for time_s in times_s:
      await asyncio.sleep(time_s - loop.time())
      await run.router.engines[number].close()

  return disturb


def told(run, *kinds):
  """Returns the events of the restarts, without their reasons and times."""
  kinds = kinds or ("lost", "restarting", "back", "given_up")
  return [
    {k: v for k, v in event.items() if k not in ("t", "reason")}
    for event in run.log.events
    if event["kind"].removeprefix("engine_") in kinds
  ]


def test_an_engine_that_is_lost_in_a_round_comes_back_and_plays_on():
  played = run(
    overlap.in_flight(4, 1, 2), transfer_s=0.0, disturb=lose(4.25)
  ).start()
  assert told(played) == [
    {"kind": "engine_lost", "engine": 0},
    {"kind": "engine_restarting", "engine": 0, "attempt": 1, "wait_s": 1.0},
    {"kind": "engine_back", "engine": 0, "version": 2},
  ]
  (lost,) = played.of("engine_lost")
  (back,) = played.of("engine_back")
  # 1 s of wait, and 2 s to start.
  assert back["t"] - lost["t"] == pytest.approx(3.0)
  assert any(e["t"] > back["t"] for e in played.of("admitted", engine=0))
  assert played.violations() == []
  assert played.ledger.error == 0
  assert not played.of("fault")
  assert played.restarts is not None
  assert played.restarts.describe() == {
    "engine_restarts": 1.0,
    "engines_given_up": 0.0,
  }


@pytest.mark.parametrize(
  "name",
  [
    pytest.param("sync", marks=pytest.mark.slow),
    pytest.param("bounded", marks=pytest.mark.slow),
    "in flight, 1",
  ],
)
def test_an_engine_lost_at_any_time_of_a_publish_has_the_newest_weights(name):
  schedule, seen = virtual_run.SCHEDULES[name], set()
  whole = run(schedule).start()
  (start,) = whole.of("publish_start", version=2)
  (end,) = whole.of("published", version=2)
  # Restarts end before, in and after the publish.
  first_s, length_s = start["t"] - 4.0, end["t"] - start["t"] + 4.0
  for i in range(12):
    lost_s = first_s + (i + 0.5) / 12 * length_s
    played = run(schedule, disturb=lose(lost_s, number=i % 2)).start()
    assert played.violations() == []
    assert played.ledger.error == 0
    (back,) = played.of("engine_back")
    # The last engine serves what all others do.
    assert {x.stats().version for x in played.router.engines} == {5}
    seen.add(back["version"])
  assert len(seen) > 1


def test_without_any_engine_sessions_wait_for_the_only_one():
  alone = run(overlap.in_flight(4, 1, 2), num_engines=1, disturb=lose(4.25, 14))
  played = alone.start()
  assert [e["kind"] for e in told(played)] == [
    "engine_lost",
    "engine_restarting",
    "engine_back",
  ] * 2
  # The second loss of an engine is its second failure.
  waits = [event["wait_s"] for event in played.of("engine_restarting")]
  assert waits == [1.0, 2.0]
  assert played.violations() == []
  assert not played.of("fault")
  assert len(played.observer.rounds) == 5


def test_a_publish_that_finds_no_engine_is_served_by_the_one_that_comes():
  async def disturb(run):
    while not run.of("publish_start"):
      await asyncio.sleep(0.01)
    await run.router.engines[0].close()

  played = run(overlap.sync(4, 2, 2), num_engines=1, disturb=disturb).start()
  assert [e["version"] for e in played.of("engine_back")] == [1]
  assert not played.of("switched", version=1)
  assert played.violations() == []


class Dying(scripted_engine.ScriptedEngine):
  """Starts, and stops at its first request."""

  async def generate(self, request):
    await self.close()
    return await super().generate(request)


@pytest.mark.parametrize(
  ("kind", "reason", "seconds"),
  [
    (
      scripted_engine.UnstartableEngine,
      r"its restart raised RuntimeError\('no memory'\)",
      7 + 3,
    ),
    (
      scripted_engine.HangingEngine,
      "its restart took longer than recovery.start_s=20 s",
      7 + 3 * 20,
    ),
    (Dying, "the scripted engine was closed", 7 + 3),
  ],
)
def test_an_engine_that_stops_again_and_again_is_given_up(
  kind, reason, seconds
):
  def build():
    return pools.starting(kind, start_s=0.0)

  broken = run(
    overlap.in_flight(4, 1, 2),
    num_engines=1,
    build_again=build,
    disturb=lose(4.25),
  )
  with pytest.raises(
    contract.EngineClosed,
    match=f"^all 1 engines have stopped, engine 0 because {reason}; "
    "recovery.attempts=4 allows no further start$",
  ):
    broken.start()
  attempts = [e["attempt"] for e in broken.of("engine_restarting")]
  assert attempts == [1, 2, 3]
  (end,) = broken.of("engine_given_up")
  assert end["attempts"] == 3
  (lost, *_) = broken.of("engine_lost")
  # Waits of 1, 2 and 4 s, and for weights of 1 s if the attempt gets beyond it.
  assert end["t"] - lost["t"] == pytest.approx(seconds)
  assert broken.violations() == []
  assert all(engine._closed for engine in broken.engines)


def test_a_run_goes_on_without_an_engine_that_was_given_up():
  played = run(
    overlap.in_flight(4, 1, 2),
    build_again=lambda: pools.starting(scripted_engine.UnstartableEngine),
    disturb=lose(4.25),
  ).start()
  assert [e["engine"] for e in played.of("engine_given_up")] == [0]
  assert played.violations() == []
  assert len(played.observer.rounds) == 5


class Pool(pools.Pool):
  """Engines with restarts."""

  def __init__(
    self,
    settings=QUICK,
    build=pools.starting,
    count=2,
    watchdog=watchdog_lib.UNHEARD,
    place_s=0.0,
    **routing,
  ):
    super().__init__(count, **routing)
    self.restarts = recovery.Restarts(
      settings,
      self.router,
      self.publisher,
      lambda number: build(),
      self.log,
      watchdog=watchdog,
      place_s=place_s,
    )


async def test_a_domain_returns_to_its_pool_once_its_engine_is_back():
  fast = placement.EngineInfo("fast", "compute")
  wide = placement.EngineInfo("wide", "bandwidth")
  pool = Pool(infos=[fast, wide], routing={"prefer": {"math": "wide"}})
  assert await pool.router.begin("a", "math") == 1
  await pool.lose(1)
  assert await pool.router.begin("b", "math") == 0
  await asyncio.sleep(3.9)
  assert pool.router.lost(1)
  await asyncio.sleep(0.2)
  # Also the session that has lost its engine and asked for nothing since.
  assert await pool.router.begin("c", "math") == 1
  await pool.router.generate(pools.request("a/0", "a"))
  assert pool.router.engines[1].stats().sampled_tokens
  told = [
    event_log.of_kind(pool.log.events, x) for x in ("preference", "fallback")
  ]
  (preferred,), (fallback,) = told
  assert (preferred["source"], preferred["wanted"]) == ("math", "wide")
  assert (fallback["session"], fallback["engine"]) == ("b", 0)
  described = pool.router.describe()
  assert described["route_fallbacks"] == 1.0
  assert described["route_returns"] == 1.0
  assert described["engines_lost"] == 0.0


async def test_weights_that_are_published_while_an_engine_starts_come_first():
  pool = Pool(build=lambda: pools.starting(start_s=10.0))
  await pool.lose(1)
  await asyncio.sleep(3.0)
  await pool.publisher.publish(1, None, "drain")
  await pool.publisher.publish(2, None, "drain")
  assert pool.router.lost(1)
  await asyncio.sleep(12.0)
  versions = [x.stats().version for x in pool.router.engines]
  events = pool.log.events
  assert versions == [2, 2]
  (back,) = event_log.of_kind(events, "engine_back")
  assert back["version"] == 2
  switched = event_log.of_kind(events, "switched")
  assert {event["engine"] for event in switched} == {0}


async def test_an_engine_back_before_the_copies_are_made_switches_as_well():
  # It is back 1 + 1 + 2 s after its loss, the first copy 3.5 + 1 s after it.
  pool = Pool()
  await pool.lose(1)
  await asyncio.sleep(3.5)
  publish = asyncio.ensure_future(pool.publisher.publish(1, None, "drain"))
  await asyncio.sleep(0.25)
  assert pool.router.lost(1)
  await publish
  versions = [x.stats().version for x in pool.router.engines]
  events = pool.log.events
  assert versions == [1, 1]
  story = [
    (event["kind"], event.get("engine"), event.get("version"))
    for event in events
    if event["kind"] in ("publish_start", "staged", "engine_back", "switched")
  ]
  assert story == [
    ("publish_start", None, 1),
    ("engine_back", 1, 0),
    ("staged", 0, 1),
    ("staged", 1, 1),
    ("switched", 0, 1),
    ("switched", 1, 1),
  ]


@pytest.mark.parametrize("place_s", [0.0, 60.0])
async def test_a_restart_waits_for_a_place_as_the_first_start_does(place_s):
  # It is ready after 50 s, most of them in the queue of a cluster.
  slow = functools.partial(pools.starting, start_s=50.0)
  settings = dataclasses.replace(QUICK, attempts=2)
  pool = Pool(settings, build=slow, place_s=place_s)
  await pool.lose(0)
  pool.router._lose(0, pool.router.engines[0], "its host is gone")
  await asyncio.sleep(90)
  found = pool.restarts.restarts, pool.restarts.given_up
  assert found == (1, int(not place_s))


async def test_an_engine_that_is_given_up_at_once_is_closed():
  pool = Pool(recovery.Recovery(attempts=1))
  (lost, _), ended = pool.engines, []

  async def close():
    ended.append(lost)

  lost.close = close
  pool.router._lose(0, pool.router.engines[0], "it is silent")
  await asyncio.sleep(1)
  assert (ended == [lost], pool.restarts.given_up) == (True, 1)


@pytest.mark.parametrize(
  "after_s", [0.5, 1.5, 3.0], ids=["wait", "copy", "start"]
)
async def test_closing_in_a_restart_leaves_no_task_and_no_engine(after_s):
  built = []

  def build():
    built.append(pools.starting())
    return built[-1]

  pool = Pool(build=build, count=1)
  await pool.router.engines[0].close()
  waiting = asyncio.create_task(pool.router.generate(pools.request("r")))
  await asyncio.sleep(after_s)
  assert not waiting.done()
  await pool.restarts.close()
  await pool.router.close()
  with pytest.raises(contract.EngineClosed, match="the pool was closed"):
    await waiting
  assert asyncio.all_tasks() - {asyncio.current_task()} == set()
  assert len(built) == (after_s > 1)
  assert all(engine._closed for engine in built)


@pytest.mark.parametrize(
  ("steady_s", "attempts"),
  # A fifth loss of an engine that is given up is none.
  [(90.0, [1] * 5), (math.inf, [1, 2, 3])],
)
async def test_an_engine_that_has_served_long_has_all_its_attempts_again(
  steady_s, attempts
):
  pool = Pool(dataclasses.replace(QUICK, steady_s=steady_s))
  for _ in range(5):
    await pool.lose(1)
    await asyncio.sleep(100.0)
  restarts = event_log.of_kind(pool.log.events, "engine_restarting")
  assert [event["attempt"] for event in restarts] == attempts


async def test_who_waits_for_what_is_in_the_table_of_waits():
  watchdog = watchdog_lib.Watchdog(clock=asyncio.get_running_loop().time)
  pool = Pool(watchdog=watchdog)
  await pool.lose(1)
  await asyncio.sleep(0.5)
  # 1 s of wait and 20 s to start.
  assert "engine 1  restart 1 of 3   0.5 s    21.0 s" in watchdog.dump()


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"attempts": 0}, "recovery.attempts=0 must be at least 1"),
    ({"start_s": 0.0}, "recovery.start_s=0.0 must be a finite number above 0"),
    ({"start_s": math.inf}, "recovery.start_s=inf"),
    ({"steady_s": 0.0}, "recovery.steady_s=0.0 must be above 0"),
    ({"first_wait_s": -1.0}, "recovery.first_wait_s=-1.0"),
  ],
)
def test_settings_that_allow_no_restart_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    recovery.Recovery(**changes).validate()
