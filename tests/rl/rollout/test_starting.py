"""Starts that fail and are tried again, in virtual time."""

import asyncio
import dataclasses

import pytest

from envs import base, delayed, mixture
from rl.data import trajectory
from rl.rollout import episode, starting
from rl.runtime import isolation, virtual_clock
from rl.runtime import watchdog as watchdog_lib
from rl.testing import fakes
from tests.helpers import players_under_test as players

pytestmark = pytest.mark.virtual_time

TASK = base.Task("shop/train/0", 0, "train", 0)
SHOP = fakes.Counting(name="shop", restarts=True)
QUICK = starting.Starting(first_wait_s=1.0, max_wait_s=4.0, breaker=3)


def now():
  return asyncio.get_running_loop().time()


class Server:
  """A start that fails until `up_s`, and takes `start_s`."""

  def __init__(self, up_s=0.0, start_s=0.5):
    self.up_s, self.start_s = up_s, start_s
    self.begun: list[float] = []

  async def start(self):
    self.begun.append(now())
    await asyncio.sleep(self.start_s)
    if now() < self.up_s:
      raise isolation.Fault("connection refused")
    return now()


async def outcome(starts, server, source=SHOP):
  """Returns the time of the start, or the words of the fault."""
  try:
    return await starts.run(source, TASK, server.start)
  except isolation.Fault as fault:
    return str(fault)


def play(source, **fields):
  """Plays one episode; returns it and the seconds that it took."""

  async def run():
    playing = players.player(source, **fields)
    one = episode.Episode(source.task(0, "train"), 0, 0, 0)
    graded = await playing.play_alone(one)
    seconds = now()
    await players.closed(playing)
    return graded, seconds, playing.starts

  return virtual_clock.run(run())


def test_a_failed_start_is_tried_again_in_a_fresh_environment():
  source = players.Kept(fault="start", member=lambda i: i < 2, restarts=True)
  graded, seconds, starts = play(source)
  assert graded.status is trajectory.Status.COMPLETED
  assert graded.reward == 1.0
  # Waits of 1 s and of 2 s.
  assert seconds == pytest.approx(3.0)
  assert len(source.kept) == 3
  assert all(one.closed for one in source.kept)
  assert starts.describe() == {
    "retries": 2, "faults": 0, "refused": 0, "breakers_open": 0
  }  # fmt: skip


def test_a_start_that_hangs_is_tried_again_after_its_deadline():
  source = players.Kept(fault="hang_start", member=lambda i: i < 1)
  source = dataclasses.replace(source, restarts=True)
  graded, seconds, _ = play(source)
  assert graded.status is trajectory.Status.COMPLETED
  assert seconds == pytest.approx(players.LIMITS.step_s + 1.0)


def test_a_source_that_does_not_say_so_is_started_once():
  source = players.Kept(fault="start")
  graded, seconds, starts = play(source)
  assert graded.status is trajectory.Status.ENV_FAULT
  assert graded.fault == "start raised OSError: no such game"
  assert (seconds, len(source.kept)) == (0.0, 1)
  assert starts.describe()["faults"] == 0


def test_exhausted_attempts_are_a_fault_and_no_reward():
  source = players.Kept(fault="start", restarts=True)
  graded, _, starts = play(source)
  assert graded.status is trajectory.Status.ENV_FAULT
  assert graded.reward is None
  assert graded.fault == (
    "start raised OSError: no such game, after 3 attempts"
  )
  assert len(source.kept) == 3
  assert (starts.retries, starts.faults) == (2, 1)


def test_a_fault_after_the_start_is_not_started_again():
  source = players.Kept(fault="step", restarts=True)
  graded, _, starts = play(source)
  assert graded.status is trajectory.Status.ENV_FAULT
  assert (len(source.kept), starts.retries) == (1, 0)


async def test_an_abort_ends_the_wait_for_another_start():
  source = players.Kept(fault="start", restarts=True)
  playing = players.player(source)
  group = players.begin(playing)
  running = asyncio.create_task(group.run())
  await asyncio.sleep(0.5)
  group.abort("stale")
  members = (await running).trajectories
  await players.closed(playing)
  statuses = {one.status for one in members}
  seconds = now()
  assert statuses == {trajectory.Status.STALE}
  assert seconds == 0.5
  assert len(source.kept) == players.LIMITS.group_size
  assert all(one.closed for one in source.kept)


def test_a_breaker_opens_after_so_many_failures_in_a_row():
  breaker = starting.Breaker()
  for _ in range(2):
    breaker.fail("refused", 10.0, QUICK, is_trial=False)
  breaker.succeed()
  for _ in range(2):
    breaker.fail("refused", 10.0, QUICK, is_trial=False)
  assert breaker.until_s is None
  breaker.fail("refused", 10.0, QUICK, is_trial=False)
  # What began before says nothing new.
  breaker.fail("refused", 10.5, QUICK, is_trial=False)
  assert (breaker.failures, breaker.until_s) == (3, 11.0)
  waits = []
  for _ in range(4):
    breaker.fail("refused", 20.0, QUICK, is_trial=True)
    waits.append(breaker.until_s)
  # Twice as long each time, up to 4 s.
  assert waits == [22.0, 24.0, 24.0, 24.0]
  breaker.succeed()
  assert breaker == starting.Breaker(fault="refused")


async def test_a_source_that_is_down_is_tried_one_start_at_a_time():
  # Never up: three starts at once open the breaker at 0.5 s.
  starts, server = starting.Starts(QUICK), Server(up_s=1e6)
  first = [outcome(starts, server) for _ in range(3)]
  begun = [asyncio.create_task(one) for one in first]
  await asyncio.sleep(1.0)
  late = [asyncio.create_task(outcome(starts, server)) for _ in range(20)]
  told = await asyncio.gather(*begun, *late)
  begun = server.begun
  assert begun[:3] == [0.0] * 3
  # The breaker opened at 0.5 s, for 1 s, 2 s, 4 s: trials at 1.5, 4 and 8.5 s.
  assert begun[3:6] == [1.5, 4.0, 8.5]
  assert len(begun) < 10
  assert all("connection refused" in text for text in told)
  refused = [text for text in told if text.startswith("not started: ")]
  assert len(refused) == starts.refused >= 19
  assert "starts of shop in a row have failed, the last with: " in refused[0]
  assert starts.faults == 23
  assert starts.describe()["breakers_open"] == 1


async def test_a_source_that_is_up_again_is_started_as_before():
  starts, server = starting.Starts(QUICK), Server(up_s=1.8)
  told = await asyncio.gather(*(outcome(starts, server) for _ in range(8)))
  # All fail at 0.5 s; the trial at 1.5 s succeeds at 2 s; the others follow
  # side by side, and none is lost.
  assert server.begun == [0.0] * 8 + [1.5] + [2.0] * 7
  assert told == [2.0] + [2.5] * 7
  assert starts.describe() == {
    "retries": 8, "faults": 0, "refused": 0, "breakers_open": 0
  }  # fmt: skip


async def test_an_open_breaker_is_told_once_until_it_has_closed():
  starts, server = starting.Starts(QUICK), Server(up_s=1.8)
  waiting = [asyncio.create_task(outcome(starts, server)) for _ in range(3)]
  told = [starts.warnings()]
  await asyncio.sleep(1.0)
  told += [starts.warnings(), starts.warnings()]
  await asyncio.gather(*waiting)
  told.append(starts.warnings())
  server.up_s = 1e6
  await asyncio.gather(*(outcome(starts, server) for _ in range(3)))
  before, opened, again, closed, reopened = [*told, starts.warnings()]
  assert before == again == closed == []
  assert opened == [
    "the last 3 starts of shop have failed, the last with: connection refused; "
    "it is tried one start at a time"
  ]
  assert len(reopened) == 1


async def test_one_source_that_is_down_holds_up_no_other():
  starts, down, up = starting.Starts(QUICK), Server(up_s=1e6), Server()
  failing = [asyncio.create_task(outcome(starts, down)) for _ in range(3)]
  await asyncio.sleep(1.0)
  other = dataclasses.replace(TASK, id="school/train/0")
  school = dataclasses.replace(SHOP, name="school")
  found = await starts.run(school, other, up.start)
  for one in failing:
    one.cancel()
  assert found == 1.5


async def test_a_cancelled_trial_leaves_the_next_one_to_another():
  once = dataclasses.replace(QUICK, attempts=1)
  starts, server = starting.Starts(once), Server(up_s=1.0)
  await asyncio.gather(*(outcome(starts, server) for _ in range(3)))
  first, second = (
    asyncio.create_task(outcome(starts, server)) for _ in range(2)
  )
  await asyncio.sleep(0.1)
  first.cancel()
  # The breaker opened at 0.5 s, for 1 s.
  assert await second == 2.0


async def test_waits_for_another_start_are_listed():
  watchdog = watchdog_lib.Watchdog(clock=now)
  starts, server = starting.Starts(QUICK, watchdog), Server(up_s=1e6)
  waiting = asyncio.create_task(
    starts.run(SHOP, TASK, server.start, "episode 7")
  )
  await asyncio.sleep(1.0)
  listed = watchdog.dump()
  waiting.cancel()
  assert "episode 7  another start of its env" in listed


def test_a_mixture_and_a_wrapper_say_what_their_source_says():
  plain = fakes.Counting(name="plain")
  both = mixture.Mixture((mixture.Part(SHOP), mixture.Part(plain)))
  assert base.restarts(both, "shop")
  assert not base.restarts(both, "plain")
  assert base.restarts(delayed.Delayed(source=SHOP), "shop")


@pytest.mark.parametrize(
  ("fields", "words"),
  [
    ({"attempts": 0}, "rollout.starting.attempts=0 must be at least 1"),
    ({"breaker": 0}, "rollout.starting.breaker=0 must be at least 1"),
    ({"first_wait_s": 20.0}, "starting.max_wait_s=10.0 must be .* 20.0"),
  ],
  ids=str,
)
def test_settings_that_cannot_work_are_refused(fields, words):
  with pytest.raises(ValueError, match=words):
    starting.Starting(**fields).validate()
