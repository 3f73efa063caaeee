"""Tests of what becomes of a group that ends before its episodes do."""

import asyncio
import dataclasses

import pytest

from models.chat import word_chat
from rl.audit import event_log
from rl.data import trajectory
from rl.pools import router
from rl.runtime import virtual_clock
from rl.testing import fake_engine, fakes
from tests.helpers import players_under_test as players

STATUS = trajectory.Status


def booked(playing, *names):
  """Returns those fields of every event "aborted", in order."""
  aborted = players.of_kind(playing, "aborted")
  return [tuple(event[name] for name in names) for event in aborted]


async def aborted(play, after_s, reason="stale"):
  """Plays for so long, then ends it; returns the group and when it came."""
  loop = asyncio.get_running_loop()
  running = asyncio.create_task(play.run())
  await asyncio.sleep(after_s)
  play.abort(reason)
  return await running, loop.time()


def slow(seconds, *indices):
  """Returns how long the answers of members take: all others none."""
  return lambda priority: seconds * (priority[1] in indices)


def test_a_member_that_decodes_comes_back_with_what_it_has():
  async def run():
    served = players.fake(delay_s=lambda _: 10.0)
    playing = players.player(fakes.Counting(turns=3), served)
    # 10 s for the first answer of two ids; the second has one at 15 s.
    group, end = await aborted(players.begin(playing), 15.0)
    assert served.stats().sampled_tokens == group.num_sampled
    return group, end, booked(playing, "reason", "turns", "tokens", "versions")

  group, end, told = virtual_clock.run(run())
  assert end == 15.0
  assert told == [("stale", 2, 3, [(0, 3)])] * 4
  for member in group.trajectories:
    assert (member.status, member.fault) == (STATUS.STALE, "stale")
    assert [turn.stop for turn in member.turns] == ["stop", "abort"]
    assert member.reward is None
  # go <agent> yes <end> | on <agent> yes
  assert len(group.trajectories[0].ids) == 7


def test_an_answer_that_ends_at_the_moment_of_the_abort_is_not_stepped():
  class Last(fake_engine.FakeEngine):
    """Has an answer whole although it is to be aborted."""

    def abort(self, request_id):
      pass

  async def run():
    served = Last((players.YES,), word_chat.END, lambda _: 10.0)
    source = players.Kept()
    playing = players.player(source, served, limits=players.ONE)
    group, end = await aborted(players.begin(playing), 5.0)
    (environment,) = source.kept
    return group.trajectories[0], end, environment, booked(playing, "tokens")

  member, end, environment, told = virtual_clock.run(run())
  assert (member.status, end) == (STATUS.STALE, 10.0)
  assert (environment.steps, environment.closed) == (0, True)
  assert told == [(member.num_sampled,)] == [(2,)]


def test_an_answer_that_is_on_its_way_to_the_member_is_booked():
  class Far(fake_engine.FakeEngine):
    """Has forgotten an answer for a second when it arrives."""

    async def generate(self, request):
      answer = await super().generate(request)
      await asyncio.sleep(1)
      return answer

  async def run():
    far = Far((players.YES,), word_chat.END)
    playing = players.player(fakes.Counting(), far, limits=players.ONE)
    group, end = await aborted(players.begin(playing), 0.5)
    assert far.stats().sampled_tokens == group.num_sampled
    return group.trajectories[0].status, end, booked(playing, "tokens")

  assert virtual_clock.run(run()) == (STATUS.STALE, 1.0, [(2,)])


def test_a_step_of_an_environment_is_cancelled_and_the_environment_closed():
  async def run():
    source = players.Kept(fault="hang")
    playing = players.player(source, limits=players.ONE)
    group, end = await aborted(players.begin(playing), 0.1, "redundant")
    (environment,) = source.kept
    return (
      group.trajectories[0],
      end,
      environment.closed,
      booked(playing, "reason", "turns", "tokens"),
    )

  member, end, closed, told = virtual_clock.run(run())
  # Not at 0.2 s, where the step would have been late.
  assert (member.status, end, closed) == (STATUS.REDUNDANT, 0.1, True)
  assert told == [("redundant", 1, 2)]
  assert member.num_sampled == 2


@pytest.mark.parametrize(
  ("fault", "closed_s"), [("hang_start", 1.0), ("hang_close", 21.0)]
)
def test_neither_a_start_nor_a_close_that_hangs_holds_up_an_abort(
  fault, closed_s
):
  async def run():
    # A step takes 5 s, so that what does not start is aborted while it does.
    source = players.Kept(fault=fault, delay_s=lambda index, step: 5.0)
    limits = dataclasses.replace(players.ONE, step_s=20.0)
    playing = players.player(source, limits=limits)
    group, end = await aborted(players.begin(playing), 1.0)
    closed = await players.closed(playing)
    assert [environment.closed for environment in source.kept] == [True]
    told = booked(playing, "reason")
    return group.trajectories[0].status, end, closed, told

  # A start is cancelled; a close has its deadline of 20 s, and nobody waits.
  expected = STATUS.STALE, 1.0, closed_s, [("stale",)]
  assert virtual_clock.run(run()) == expected


def test_who_waits_for_an_engine_that_drains_waits_no_longer():
  async def run():
    source = fakes.Counting(delay_s=lambda index, step: 4.0)
    limits = dataclasses.replace(players.LIMITS, group_size=2, step_s=60.0)
    playing = players.player(source, limits=limits)
    assert isinstance(playing.router, router.Router)
    loop = asyncio.get_running_loop()
    first = asyncio.create_task(players.begin(playing).run())
    await asyncio.sleep(1)
    version = trajectory.PolicyVersion(1)
    update = asyncio.create_task(
      playing.router.update_weights(0, version, {}, "drain")
    )
    await asyncio.sleep(0)
    group, end = await aborted(players.begin(playing, 4), 1.0)
    await update
    # The engine is whose it was: its sessions end, and then others begin.
    updated = loop.time()
    after = await players.begin(playing, 5).run()
    return group, (end, updated), await first, after, playing.log.events

  group, times, first, after, log = virtual_clock.run(run())
  # Two steps of 4 s make an episode.
  assert times == (2.0, 8.0)
  assert [t.status for t in group.trajectories] == [STATUS.STALE] * 2
  assert group.num_sampled == 0
  of_4 = [e for e in log if e.get("group") == 4]
  assert [e["kind"] for e in of_4] == ["aborted"] * 2
  assert [e["tokens"] for e in of_4] == [0, 0]
  for whole, version in ((first, 0), (after, 1)):
    assert {t.status for t in whole.trajectories} == {STATUS.COMPLETED}
    assert [t.versions for t in whole.trajectories] == [[(version, 4)]] * 2


def test_a_play_that_is_aborted_before_it_is_run_samples_nothing():
  async def run():
    source = players.Kept()
    playing = players.player(source)
    play = players.begin(playing)
    play.abort("stopped")
    group = await play.run()
    assert not source.kept
    return group, booked(playing, "reason", "tokens")

  group, told = virtual_clock.run(run())
  assert (group.num_sampled, told) == (0, [("stopped", 0)] * 4)
  assert {t.status for t in group.trajectories} == {STATUS.ENGINE_FAULT}


def test_the_first_reason_is_the_one_that_counts():
  async def run():
    playing = players.player(fakes.Counting(fault="hang"))
    play = players.begin(playing)
    running = asyncio.create_task(play.run())
    await asyncio.sleep(0.1)
    play.abort("stale")
    play.abort("stopped")
    await running
    return play.aborted, booked(playing, "reason")

  assert virtual_clock.run(run()) == ("stale", [("stale",)] * 4)


def test_to_abort_what_has_ended_changes_nothing():
  async def run():
    playing = players.player(fakes.Counting())
    play = players.begin(playing)
    group, before = await play.run(), list(playing.log.events)
    play.abort("stale")
    assert playing.log.events == before
    return group, booked(playing, "index")

  group, told = virtual_clock.run(run())
  assert told == []
  assert {t.status for t in group.trajectories} == {STATUS.COMPLETED}
  assert [t.reward for t in group.trajectories] == [1.0] * 4


def test_a_member_that_is_graded_keeps_its_grade_when_redundant_ones_go():
  async def run():
    # All are graded from 0 s to 0.08 s but member 1, which decodes until 9 s.
    served = players.fake(delay_s=slow(9.0, 1))
    judge = fakes.Judge(delay_s=lambda index, call: 0.08)
    source = fakes.Counting(turns=1)
    playing = players.player(source, served, judge, extra_members=1)
    group = await players.begin(playing).run()
    return group, booked(playing, "index"), players.of_kind(playing, "reward")

  group, told, rewards = virtual_clock.run(run())
  assert told == [(1,)]
  assert [e["index"] for e in rewards] == [0, 2, 3, 4]
  assert [t.reward for t in group.trajectories] == [1.0] * 4


def test_an_abort_ends_the_grading_and_books_what_was_sampled_once():
  async def run():
    judge = fakes.Judge(delay_s=lambda index, call: 0.08)
    playing = players.player(fakes.Counting(turns=1), reward=judge)
    group, end = await aborted(players.begin(playing), 0.04, "redundant")
    ended = [e["tokens"] for e in players.of_kind(playing, "ended")]
    assert playing.graders.stats().in_flight == 0
    return group, end, ended, booked(playing, "index"), playing.log.events

  group, end, ended, told, log = virtual_clock.run(run())
  assert (end, ended, told) == (0.04, [2] * 4, [])
  assert group.num_sampled == sum(ended)
  assert [t.reward for t in group.trajectories] == [None] * 4
  assert {e["kind"] for e in log}.isdisjoint(("reward", "fault"))


def test_an_environment_that_is_only_closed_belongs_to_a_whole_episode():
  async def run():
    source = fakes.Counting(turns=1, fault="hang_close")
    judge = fakes.Judge(delay_s=lambda index, call: 0.05)
    playing = players.player(source, reward=judge, limits=players.ONE)
    group = await players.begin(playing).run()
    end = asyncio.get_running_loop().time()
    closed = await players.closed(playing)
    return group.trajectories[0], end, closed, booked(playing, "index")

  member, end, closed, told = virtual_clock.run(run())
  # It has its 0.2 s to close; the reward was called meanwhile.
  assert (end, closed) == (pytest.approx(0.05), 0.2)
  assert (member.status, member.reward, told) == (STATUS.COMPLETED, 1.0, [])


def test_an_episode_that_is_over_is_whole_before_anybody_has_looked():
  plays = []

  class Late(fakes.Counting):
    """Its environments are closed at once, and abort their group then."""

    def __call__(self, task):
      environment = super().__call__(task)

      async def close():
        plays[0].abort("stale")

      vars(environment)["close"] = close
      return environment

  async def run():
    playing = players.player(Late(turns=1), limits=players.ONE)
    plays.append(players.begin(playing))
    group = await plays[0].run()
    return group.trajectories[0], plays[0].aborted, booked(playing, "index")

  member, reason, told = virtual_clock.run(run())
  # Only its grading is given up: nobody wants its group.
  assert (member.status, member.reward) == (STATUS.COMPLETED, None)
  assert (reason, told) == ("stale", [])


def test_redundant_members_are_aborted_when_as_many_as_needed_have_ended():
  async def run():
    served = players.fake(delay_s=slow(9.0, 1, 3))
    playing = players.player(fakes.Counting(), served, extra_members=2)
    group = await players.begin(playing).run()
    return (
      group,
      asyncio.get_running_loop().time(),
      booked(playing, "index", "reason", "tokens"),
      served.stats().sampled_tokens,
    )

  group, end, told, sampled = virtual_clock.run(run())
  assert end == 0.0
  assert [t.index for t in group.trajectories] == [0, 2, 4, 5]
  assert {t.status for t in group.trajectories} == {STATUS.COMPLETED}
  assert told == [(1, "redundant", 1), (3, "redundant", 1)]
  # Four whole members of two answers, two ids each.
  assert group.redundant_tokens == 2
  assert group.num_sampled == sampled == 18


def test_a_group_without_redundancy_ends_with_its_slowest_member():
  async def run():
    served = players.fake(delay_s=slow(9.0, 1))
    playing = players.player(fakes.Counting(turns=1), served)
    group = await players.begin(playing).run()
    return group, asyncio.get_running_loop().time(), booked(playing, "index")

  group, end, told = virtual_clock.run(run())
  assert (end, told, group.redundant_tokens) == (9.0, [], 0)
  assert [t.index for t in group.trajectories] == [0, 1, 2, 3]


def test_a_member_with_a_fault_makes_room_for_a_redundant_one():
  async def run():
    source = fakes.Counting(fault="step", member=lambda member: member == 0)
    playing = players.player(source, extra_members=1)
    group = await players.begin(playing).run()
    return group, booked(playing, "index")

  group, told = virtual_clock.run(run())
  assert [t.index for t in group.trajectories] == [1, 2, 3, 4]
  assert {t.status for t in group.trajectories} == {STATUS.COMPLETED}
  # It had sampled an answer before its environment broke.
  assert (group.redundant_tokens, told) == (2, [])


def test_members_with_faults_fill_a_group_that_has_too_few_without():
  async def run():
    source = fakes.Counting(fault="start", member=lambda member: member < 3)
    playing = players.player(source, extra_members=1)
    return await players.begin(playing).run()

  group = virtual_clock.run(run())
  assert [t.index for t in group.trajectories] == [0, 1, 3, 4]
  faults = [t.status is STATUS.ENV_FAULT for t in group.trajectories]
  assert faults == [True, True, False, False]


def test_what_ends_after_its_group_is_whole_is_not_graded():
  async def run():
    # All five end at once: whoever is the last is not needed.
    playing = players.player(fakes.Counting(), extra_members=1)
    group = await players.begin(playing).run()
    kinds = event_log.of_kind(playing.log.events, "grading")
    return group, [e["index"] for e in kinds], playing.log.events

  group, graded, log = virtual_clock.run(run())
  assert [t.index for t in group.trajectories] == graded == [0, 1, 2, 3]
  assert group.redundant_tokens > 0
  last = [e for e in log if e.get("index") == 4][-1]
  assert last["kind"] in ("ended", "aborted")
  assert last["tokens"] == group.redundant_tokens


def test_how_old_a_group_is_can_be_told_while_it_decodes():
  async def run():
    served = players.fake(delay_s=lambda _: 2.0)
    playing = players.player(fakes.Counting(turns=3), served)
    play = players.begin(playing)
    await served.pause()
    running = asyncio.create_task(play.run())
    await asyncio.sleep(1)
    told = [play.first_version]
    await served.update_weights(trajectory.PolicyVersion(3), {})
    served.resume()
    await asyncio.sleep(1)
    told.append(play.first_version)
    await served.update_weights(trajectory.PolicyVersion(4), {})
    await asyncio.sleep(3)
    told.append(play.first_version)
    await running
    return told

  # Nothing is sampled yet, then a first answer is, then the second.
  assert virtual_clock.run(run()) == [None, 3, 3]
