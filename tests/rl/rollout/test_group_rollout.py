"""Tests of group rollouts: playing, faults, aborts, misbehaving code."""

import asyncio
import dataclasses
import itertools
import math
from typing import Any, cast

import pytest

from envs import base
from envs.rewards import rewards
from models.chat import word_chat
from rl.algorithms import reward_shaping
from rl.audit import event_log
from rl.data import trajectory
from rl.engine import contract
from rl.pools import router
from rl.rollout import episode, group_rollout
from rl.runtime import virtual_clock
from rl.runtime import watchdog as watchdog_lib
from rl.schedule import overlap
from rl.testing import fakes, scripted_engine
from tests.helpers import players_under_test as players
from tests.helpers import virtual_run

pytestmark = pytest.mark.virtual_time


def test_a_trajectory_holds_the_ids_exactly_as_sampled():
  # go <agent> | yes <end> | on <agent> | yes <end>
  group = players.play_group(fakes.Counting(turns=2))
  first = group.trajectories[0]
  expected = [3, word_chat.AGENT, players.YES, word_chat.END]
  expected += [4, word_chat.AGENT, players.YES, word_chat.END]
  assert first.ids.tolist() == expected
  assert first.sampled.tolist() == [False, False, True, True] * 2
  assert first.status is trajectory.Status.COMPLETED
  assert first.reward == pytest.approx(1.0)
  assert [t.index for t in group.trajectories] == [0, 1, 2, 3]


def test_each_request_begins_with_every_id_before_it():
  seen = []

  class Recording(scripted_engine.ScriptedEngine):
    async def generate(self, request):
      seen.append(request.tokens.tolist())
      return await super().generate(request)

  recording = players.engine(kind=Recording)
  players.play_group(fakes.Counting(turns=3), recording, limits=players.ONE)
  assert len(seen) == 3
  for before, after in itertools.pairwise(seen):
    answered = [*before, players.YES, word_chat.END]
    assert after[: len(answered)] == answered


def test_members_of_a_group_have_noise_of_their_own_that_repeats():
  task = fakes.Counting().task(0, "train")
  noise = [episode.Episode(task, 5, i, 0).noise for i in range(64)]
  assert len(set(noise)) == 64
  assert noise == [episode.Episode(task, 5, i, 0).noise for i in range(64)]
  assert noise[0] != episode.Episode(task, 5, 0, 1).noise
  held_out = fakes.Counting().task(0, "eval")
  assert noise[0] != episode.Episode(held_out, 5, 0, 0).noise
  again = episode.Episode(task, 5, 0, 0, attempt=1)
  assert again.name == "train/5/1/0"
  assert again.noise not in noise


# Turns take 4 ids: two whole turns fit 9, the third has room for no answer.
@pytest.mark.parametrize(
  "limit", [{"max_turns": 2}, {"max_tokens": 9, "max_turns": 9}], ids=str
)
def test_a_limit_truncates_before_it_is_passed_and_still_grades(limit):
  limits = dataclasses.replace(players.LIMITS, **limit)
  group = players.play_group(fakes.Counting(turns=4), limits=limits)
  ended = group.trajectories[0]
  assert ended.status is trajectory.Status.TRUNCATED
  assert (len(ended.turns), len(ended.ids)) == (2, 8)
  assert ended.reward == pytest.approx(0.5)  # two of four answers


async def test_an_answer_that_is_nearly_too_long_is_worth_less():
  # 4 sampled ids where 2 are free and 4 more are not: half the penalty of 1.
  overlong = reward_shaping.Overlong(max_tokens=6, buffer=4)
  limits = dataclasses.replace(players.ONE, overlong=overlong)

  playing = players.player(fakes.Counting(turns=2), limits=limits)
  group = await players.begin(playing).run()
  reward = group.trajectories[0].reward
  (event,) = players.of_kind(playing, "reward")
  assert reward == event["value"] == pytest.approx(0.5)


async def test_the_log_tells_the_way_of_a_member_and_when():
  served = players.engine(delay_s=lambda priority: 0.5)
  playing = players.player(fakes.Counting(turns=1), served, limits=players.ONE)
  await served.pause()
  play = asyncio.create_task(players.begin(playing).run())
  await asyncio.sleep(2)
  served.resume()
  await play
  log = playing.log.events
  # It waits for 2 s until the engine goes on; an answer takes 0.5 s.
  assert [(e["kind"], e["t"]) for e in log] == [
    ("admitted", 0.0),
    ("first_token", 2.0),
    ("turn", 2.5),
    ("ended", 2.5),
    ("grading", 2.5),
    ("reward", 2.5),
  ]
  for event in log:
    assert (event["group"], event["attempt"], event["index"]) == (3, 0, 0)
  turn, ended = log[2], log[3]
  assert (turn["number"], turn["tokens"]) == (0, 2)
  assert (turn["decode_s"], turn["queue_s"]) == (2.5, 2.0)
  assert (ended["turns"], ended["tokens"], ended["length"]) == (1, 2, 4)
  assert ended["versions"] == [(0, 2)]


async def test_an_engine_that_closes_leaves_the_sampled_tokens_in_the_log():
  class Closing(scripted_engine.ScriptedEngine):
    async def generate(self, request):
      if request.request_id.endswith("/2"):
        raise contract.EngineClosed("stopped")
      return await super().generate(request)

  closing = players.engine(kind=Closing)
  playing = players.player(fakes.Counting(turns=3), closing, limits=players.ONE)
  with pytest.raises(ExceptionGroup) as raised:
    await players.begin(playing).run()
  assert raised.group_contains(contract.EngineClosed)
  (event,) = players.of_kind(playing, "aborted")
  assert (event["tokens"], event["versions"]) == (4, [(0, 4)])
  assert event["reason"] == "error"


async def test_a_member_cancelled_hard_logs_the_answer_that_was_being_stepped():
  source = players.Kept(fault="hang")
  playing = players.player(source)
  with pytest.raises(TimeoutError):
    await asyncio.wait_for(players.begin(playing).run(), 0.05)
  await players.closed(playing)
  assert all(environment.closed for environment in source.kept)
  aborted = players.of_kind(playing, "aborted")
  assert [e["tokens"] for e in aborted] == [2] * 4
  assert {e["reason"] for e in aborted} == {"stopped"}


def test_the_watchdog_names_who_is_waited_for():
  async def table(source, delay_s=0.0, reward=None):
    watchdog = watchdog_lib.Watchdog()
    playing = players.player(
      source, players.engine(delay_s=lambda _: delay_s), reward, watchdog
    )
    play = asyncio.create_task(players.begin(playing).run())
    await asyncio.sleep(0.05)
    lines = watchdog.dump().splitlines()[1:]
    play.cancel()
    await asyncio.wait([play])
    assert watchdog.dump() == "nobody waits"
    return sorted(line.split("  ")[:2] for line in lines)

  one = fakes.Counting(turns=1)
  hanging = table(fakes.Counting(fault="hang"))
  step = "step of the environment"
  assert virtual_clock.run(hanging) == [
    [f"episode train/3/0/{i}", step] for i in range(4)
  ]
  assert virtual_clock.run(table(one, 60.0)) == [
    [f"episode train/3/0/{i}", "an answer of the engine"] for i in range(4)
  ]
  assert virtual_clock.run(table(one, reward=Broken("hang"))) == [
    [f"episode train/3/0/{i}", "reward"] for i in range(4)
  ]


@pytest.mark.parametrize("error", [KeyError, SystemExit])
def test_a_source_that_cannot_build_its_environment_is_data(error):
  class Broken(fakes.Counting):
    def __call__(self, task):
      raise error("no such map")

  group = players.play_group(Broken())
  assert all(
    t.status is trajectory.Status.ENV_FAULT and "no such map" in t.fault
    for t in group.trajectories
  )


async def test_one_hanging_environment_does_not_hold_up_the_others():
  source = fakes.Counting(fault="hang", faulty=lambda index: index == 0)
  done: dict[int, float] = {}

  playing = players.player(
    source, limits=dataclasses.replace(players.LIMITS, step_s=1.0)
  )

  async def one(index):
    task = source.task(index, "train")
    await group_rollout.GroupRollout(
      playing, task, group_id=index, seed=0, admitted=0
    ).run()
    done[index] = asyncio.get_running_loop().time()

  await asyncio.gather(*(one(i) for i in range(8)))
  # The frozen one ends at its deadline of 1 s, all others at once.
  assert done == pytest.approx({0: 1.0} | dict.fromkeys(range(1, 8), 0.0))


def test_environments_are_closed_on_every_path():
  closed = []
  for fault in ("", "start", "step", "hang", "word"):
    source = players.Kept(fault=fault)
    players.play_group(source)
    closed += [environment.closed for environment in source.kept]
  assert closed == [True] * 20


@dataclasses.dataclass(frozen=True)
class Broken:
  """A reward that fails in the way of a name, or returns what is no name."""

  how: Any
  stateless: bool = True

  async def __call__(self, task, transcripts):
    if self.how == "exit":
      raise SystemExit(2)
    if self.how == "hang":
      await asyncio.sleep(60)
    return self.how


@pytest.mark.parametrize(
  ("how", "words"),
  [
    ("hang", "reward took over 0.1 s"),
    ("exit", "reward raised SystemExit: 2"),
    ([base.Grade(1.0, {})] * 2, "not a list of one Grade"),
    ([1.0], "reward returned float in place of a Grade"),
    (1.0, "reward returned 1.0, not a list of one Grade"),
    (None, "reward returned None, not a list of one Grade"),
    ([base.Grade(1e39, {})], "reward 1e+39 is not a finite number"),
    ([base.Grade(1.0, cast(Any, None))], "reward returned parts=None"),
    ([base.Grade(1.0, {"a": math.nan})], "part 'a' of the reward nan is not"),
    ([base.Grade.single("a", math.nan)], "part 'a' of the reward nan is not"),
  ],
)
def test_a_reward_that_fails_is_a_fault_and_never_zero(how, words):
  group = players.play_group(fakes.Counting(), reward=Broken(how))
  for member in group.trajectories:
    assert member.status is trajectory.Status.REWARD_FAULT
    assert member.reward is None
    assert words in member.fault


async def test_grading_starts_while_other_members_still_play():
  # Member 3 answers after 0.5 s, the others at once.
  served = players.engine(delay_s=lambda priority: 0.5 * (priority[1] == 3))
  playing = players.player(fakes.Counting(turns=1), served)
  await players.begin(playing).run()
  found = [(e["index"], e["t"]) for e in players.of_kind(playing, "reward")]
  assert found == [(0, 0.0), (1, 0.0), (2, 0.0), (3, 0.5)]


# Groups that end before their episodes do.


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


async def test_a_member_that_decodes_comes_back_with_what_it_has():
  served = players.engine(delay_s=lambda _: 10.0)
  playing = players.player(fakes.Counting(turns=3), served)
  # 10 s for the first answer of two ids; the second has one at 15 s.
  group, end = await aborted(players.begin(playing), 15.0)
  assert served.stats().sampled_tokens == group.num_sampled
  told = booked(playing, "reason", "turns", "tokens", "versions")
  assert end == 15.0
  assert told == [("stale", 2, 3, [(0, 3)])] * 4
  for member in group.trajectories:
    assert (member.status, member.fault) == (STATUS.STALE, "stale")
    assert [turn.stop for turn in member.turns] == ["stop", "abort"]
    assert member.reward is None
  # go <agent> yes <end> | on <agent> yes
  assert len(group.trajectories[0].ids) == 7


async def test_an_answer_that_ends_at_the_moment_of_the_abort_is_not_stepped():
  class Last(scripted_engine.ScriptedEngine):
    """Has an answer whole although it is to be aborted."""

    def abort(self, request_id):
      pass

  served = players.engine(delay_s=lambda _: 10.0, kind=Last)
  source = players.Kept()
  playing = players.player(source, served, limits=players.ONE)
  group, end = await aborted(players.begin(playing), 5.0)
  (environment,) = source.kept
  member = group.trajectories[0]
  told = booked(playing, "tokens")
  assert (member.status, end) == (STATUS.STALE, 10.0)
  assert (environment.steps, environment.closed) == (0, True)
  assert told == [(member.num_sampled,)] == [(2,)]


async def test_an_answer_that_is_on_its_way_to_the_member_is_booked():
  class Far(scripted_engine.ScriptedEngine):
    """Has forgotten an answer for a second when it arrives."""

    async def generate(self, request):
      answer = await super().generate(request)
      await asyncio.sleep(1)
      return answer

  far = players.engine(kind=Far)
  playing = players.player(fakes.Counting(), far, limits=players.ONE)
  group, end = await aborted(players.begin(playing), 0.5)
  assert far.stats().sampled_tokens == group.num_sampled
  found = group.trajectories[0].status, end, booked(playing, "tokens")
  assert found == (STATUS.STALE, 1.0, [(2,)])


async def test_a_step_is_cancelled_and_its_environment_closed():
  source = players.Kept(fault="hang")
  playing = players.player(source, limits=players.ONE)
  group, end = await aborted(players.begin(playing), 0.1, "redundant")
  (environment,) = source.kept
  member = group.trajectories[0]
  told = booked(playing, "reason", "turns", "tokens")
  # Not at 0.2 s, where the step would have been late.
  assert (member.status, end, environment.closed) == (
    STATUS.REDUNDANT,
    0.1,
    True,
  )
  assert told == [("redundant", 1, 2)]
  assert member.num_sampled == 2


@pytest.mark.parametrize(
  ("fault", "closed_s"), [("hang_start", 1.0), ("hang_close", 21.0)]
)
async def test_neither_a_start_nor_a_close_that_hangs_holds_up_an_abort(
  fault, closed_s
):
  # A start is cancelled; a close has its deadline of 20 s, and nobody waits.
  expected = STATUS.STALE, 1.0, closed_s, [("stale",)]
  # A step takes 5 s, so that what does not start is aborted while it does.
  source = players.Kept(fault=fault, delay_s=lambda index, step: 5.0)
  limits = dataclasses.replace(players.ONE, step_s=20.0)
  playing = players.player(source, limits=limits)
  group, end = await aborted(players.begin(playing), 1.0)
  closed = await players.closed(playing)
  assert [environment.closed for environment in source.kept] == [True]
  told = booked(playing, "reason")
  assert (group.trajectories[0].status, end, closed, told) == expected


async def test_who_waits_for_an_engine_that_drains_waits_no_longer():
  source = fakes.Counting(delay_s=lambda index, step: 4.0)
  limits = dataclasses.replace(players.LIMITS, group_size=2, step_s=60.0)
  playing = players.player(source, limits=limits)
  assert isinstance(playing.router, router.Router)
  loop = asyncio.get_running_loop()
  first = asyncio.create_task(players.begin(playing).run())
  await asyncio.sleep(1)
  update = asyncio.create_task(playing.router.update_weights(0, 1, {}, "drain"))
  await asyncio.sleep(0)
  group, end = await aborted(players.begin(playing, 4), 1.0)
  await update
  # The engine is whose it was: its sessions end, and then others begin.
  updated = loop.time()
  after = await players.begin(playing, 5).run()
  times = (end, updated)
  first = await first
  log = playing.log.events
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


async def test_a_play_that_is_aborted_before_it_is_run_samples_nothing():
  source = players.Kept()
  playing = players.player(source)
  play = players.begin(playing)
  play.abort("stopped")
  group = await play.run()
  assert not source.kept
  told = booked(playing, "reason", "tokens")
  assert (group.num_sampled, told) == (0, [("stopped", 0)] * 4)
  assert {t.status for t in group.trajectories} == {STATUS.ENGINE_FAULT}


async def test_the_first_reason_is_the_one_that_counts():
  playing = players.player(fakes.Counting(fault="hang"))
  play = players.begin(playing)
  running = asyncio.create_task(play.run())
  await asyncio.sleep(0.1)
  play.abort("stale")
  play.abort("stopped")
  await running
  found = play.aborted, booked(playing, "reason")
  assert found == ("stale", [("stale",)] * 4)


async def test_to_abort_what_has_ended_changes_nothing():
  playing = players.player(fakes.Counting())
  play = players.begin(playing)
  group, before = await play.run(), list(playing.log.events)
  play.abort("stale")
  assert playing.log.events == before
  told = booked(playing, "index")
  assert told == []
  assert {t.status for t in group.trajectories} == {STATUS.COMPLETED}
  assert [t.reward for t in group.trajectories] == [1.0] * 4


async def test_a_member_that_is_graded_keeps_its_grade_when_redundant_ones_go():
  # All are graded from 0 s to 0.08 s but member 1, which decodes until 9 s.
  served = players.engine(delay_s=slow(9.0, 1))
  judge = fakes.Judge(delay_s=lambda index, call: 0.08)
  source = fakes.Counting(turns=1)
  playing = players.player(source, served, judge, extra_members=1)
  group = await players.begin(playing).run()
  told = booked(playing, "index")
  rewards = players.of_kind(playing, "reward")
  assert told == [(1,)]
  # In any order, as they are graded at one and the same instant.
  assert sorted(e["index"] for e in rewards) == [0, 2, 3, 4]
  assert [t.reward for t in group.trajectories] == [1.0] * 4


async def test_an_abort_ends_the_grading_and_books_what_was_sampled_once():
  judge = fakes.Judge(delay_s=lambda index, call: 0.08)
  playing = players.player(fakes.Counting(turns=1), reward=judge)
  group, end = await aborted(players.begin(playing), 0.04, "redundant")
  ended = [e["tokens"] for e in players.of_kind(playing, "ended")]
  assert playing.graders.stats().in_flight == 0
  told = booked(playing, "index")
  log = playing.log.events
  assert (end, ended, told) == (0.04, [2] * 4, [])
  assert group.num_sampled == sum(ended)
  assert [t.reward for t in group.trajectories] == [None] * 4
  assert {e["kind"] for e in log}.isdisjoint(("reward", "fault"))


async def test_an_environment_that_is_only_closed_belongs_to_a_whole_episode():
  source = fakes.Counting(turns=1, fault="hang_close")
  judge = fakes.Judge(delay_s=lambda index, call: 0.05)
  playing = players.player(source, reward=judge, limits=players.ONE)
  group = await players.begin(playing).run()
  end = asyncio.get_running_loop().time()
  closed = await players.closed(playing)
  member = group.trajectories[0]
  told = booked(playing, "index")
  # It has its 0.2 s to close; the reward was called meanwhile.
  assert (end, closed) == (pytest.approx(0.05), 0.2)
  assert (member.status, member.reward, told) == (STATUS.COMPLETED, 1.0, [])


async def test_an_episode_that_is_over_is_whole_before_anybody_has_looked():
  plays = []

  class Late(fakes.Counting):
    """Its environments are closed at once, and abort their group then."""

    def __call__(self, task):
      environment = super().__call__(task)

      async def close():
        plays[0].abort("stale")

      vars(environment)["close"] = close
      return environment

  playing = players.player(Late(turns=1), limits=players.ONE)
  plays.append(players.begin(playing))
  group = await plays[0].run()
  member = group.trajectories[0]
  reason = plays[0].aborted
  told = booked(playing, "index")
  # Only its grading is given up: nobody wants its group.
  assert (member.status, member.reward) == (STATUS.COMPLETED, None)
  assert (reason, told) == ("stale", [])


async def test_redundant_members_are_aborted_once_as_many_as_needed_ended():
  served = players.engine(delay_s=slow(9.0, 1, 3))
  playing = players.player(fakes.Counting(), served, extra_members=2)
  group = await players.begin(playing).run()
  end = asyncio.get_running_loop().time()
  told = booked(playing, "index", "reason", "tokens")
  sampled = served.stats().sampled_tokens
  assert end == 0.0
  assert [t.index for t in group.trajectories] == [0, 2, 4, 5]
  assert {t.status for t in group.trajectories} == {STATUS.COMPLETED}
  assert told == [(1, "redundant", 1), (3, "redundant", 1)]
  # Four whole members of two answers, two ids each.
  assert group.redundant_tokens == 2
  assert group.num_sampled == sampled == 18


async def test_a_group_without_redundancy_ends_with_its_slowest_member():
  served = players.engine(delay_s=slow(9.0, 1))
  playing = players.player(fakes.Counting(turns=1), served)
  group = await players.begin(playing).run()
  end = asyncio.get_running_loop().time()
  told = booked(playing, "index")
  assert (end, told, group.redundant_tokens) == (9.0, [], 0)
  assert [t.index for t in group.trajectories] == [0, 1, 2, 3]


async def test_a_member_with_a_fault_makes_room_for_a_redundant_one():
  source = fakes.Counting(fault="step", member=lambda member: member == 0)
  playing = players.player(source, extra_members=1)
  group = await players.begin(playing).run()
  told = booked(playing, "index")
  assert [t.index for t in group.trajectories] == [1, 2, 3, 4]
  assert {t.status for t in group.trajectories} == {STATUS.COMPLETED}
  # It had sampled an answer before its environment broke.
  assert (group.redundant_tokens, told) == (2, [])


async def test_members_with_faults_fill_a_group_that_has_too_few_without():
  source = fakes.Counting(fault="start", member=lambda member: member < 3)
  playing = players.player(source, extra_members=1)
  group = await players.begin(playing).run()
  assert [t.index for t in group.trajectories] == [0, 1, 3, 4]
  faults = [t.status is STATUS.ENV_FAULT for t in group.trajectories]
  assert faults == [True, True, False, False]


async def test_what_ends_after_its_group_is_whole_is_not_graded():
  # All five end at once: whoever is the last is not needed.
  playing = players.player(fakes.Counting(), extra_members=1)
  group = await players.begin(playing).run()
  kinds = event_log.of_kind(playing.log.events, "grading")
  graded = [e["index"] for e in kinds]
  log = playing.log.events
  assert [t.index for t in group.trajectories] == graded == [0, 1, 2, 3]
  assert group.redundant_tokens > 0
  last = [e for e in log if e.get("index") == 4][-1]
  assert last["kind"] in ("ended", "aborted")
  assert last["tokens"] == group.redundant_tokens


async def test_how_old_a_group_is_can_be_told_while_it_decodes():
  served = players.engine(delay_s=lambda _: 2.0)
  playing = players.player(fakes.Counting(turns=3), served)
  play = players.begin(playing)
  await served.pause()
  running = asyncio.create_task(play.run())
  await asyncio.sleep(1)
  told = [play.first_version]
  await served.update_weights(3, {})
  served.resume()
  await asyncio.sleep(1)
  told.append(play.first_version)
  await served.update_weights(4, {})
  await asyncio.sleep(3)
  told.append(play.first_version)
  await running
  # Nothing is sampled yet, then a first answer is, then the second.
  assert told == [None, 3, 3]


# Environments and engines that misbehave.


ON = base.Step([base.Message("user", "on")], 0.0, False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stubborn(players.Kept):
  """Environments whose step catches its cancellation, and takes 30 s."""

  def __call__(self, task):
    environment = super().__call__(task)

    async def step(answer):
      loop = asyncio.get_running_loop()
      environment.steps += 1
      end_s = loop.time() + 30
      while (left_s := end_s - loop.time()) > 0:
        try:
          await asyncio.sleep(left_s)
        except asyncio.CancelledError:
          continue
      return ON

    vars(environment)["step"] = step
    return environment


@pytest.mark.parametrize(
  ("abort_s", "status"), [(None, STATUS.ENV_FAULT), (0.1, STATUS.STALE)]
)
async def test_a_step_that_catches_its_cancellation_is_left_behind(
  abort_s, status
):
  loop, source = asyncio.get_running_loop(), Stubborn(turns=3)
  playing = players.player(source, limits=players.ONE)
  play = players.begin(playing)
  if abort_s is not None:
    loop.call_later(abort_s, play.abort, "stale")
  group, end_s = await play.run(), loop.time()
  (environment,) = source.kept
  await players.closed(playing)
  seen = [(loop.time() - end_s, len(playing.late), environment.closed)]
  await asyncio.wait(playing.late)
  seen.append((loop.time(), len(playing.late), environment.closed))
  assert environment.steps == 1
  member = group.trajectories[0]
  # A step may take 0.2 s, and so may what comes behind it.
  assert (member.status, end_s) == (status, abort_s or 0.2)
  assert member.num_sampled == 2
  # It is closed when the step has ended, and counted until then.
  assert seen == [(pytest.approx(0.2), 1, False), (30.0, 0, True)]


def faults(run):
  members = [t for group in run.groups for t in group.trajectories]
  return [t.fault for t in members if not t.status.trainable]


def count(run, wanted):
  """Returns how many of the tasks that were trained are wanted; some are."""
  found = sum(wanted(group.task.index) for group in run.groups)
  assert found
  return found


def test_a_run_ends_although_its_environments_never_do():
  @dataclasses.dataclass(frozen=True, kw_only=True)
  class Endless(fakes.Counting):
    def __call__(self, task):
      environment = super().__call__(task)

      async def step(answer):
        while True:
          try:
            await asyncio.sleep(3600)
          except asyncio.CancelledError:
            continue

      if task.index % 3 == 0:
        vars(environment)["step"] = step
      return environment

  run = virtual_run.Run(overlap.sync(4), rounds=2, source=Endless(), step_s=5.0)
  run.start()
  assert not run.violations()
  assert run.ledger.error == 0
  assert faults(run) == ["step took over 5 s"] * 2 * count(
    run, lambda index: index % 3 == 0
  )


def test_an_environment_that_leaves_the_process_is_data():
  @dataclasses.dataclass(frozen=True, kw_only=True)
  class Leaving(fakes.Counting):
    def __call__(self, task):
      environment = super().__call__(task)

      async def step(answer):
        raise SystemExit("quit()")

      if task.index % 3 == 0:
        vars(environment)["step"] = step
      return environment

  run = virtual_run.Run(overlap.sync(4), rounds=2, source=Leaving()).start()
  starts = [fault.partition(" (test_")[0] for fault in faults(run)]
  assert starts == ["step raised SystemExit: quit()"] * 2 * count(
    run, lambda index: index % 3 == 0
  )


async def test_what_is_aborted_between_two_answers_asks_for_no_other():
  served = players.engine()
  playing = players.player(fakes.Counting(turns=3), served, limits=players.ONE)
  play = players.begin(playing)
  # It is told of the turn, and aborts, before the member goes on.
  playing.log.listeners.append(
    lambda event: event["kind"] == "turn" and play.abort("stale")
  )
  group = await play.run()
  sampled = served.stats().sampled_tokens
  assert group.num_sampled == sampled == 2
  assert group.trajectories[0].status is STATUS.STALE


async def test_an_engine_that_cancels_by_itself_loses_no_group():
  class Cancelling(scripted_engine.ScriptedEngine):
    """Cancels its answers to member 1."""

    async def generate(self, request):
      if request.priority[1] == 1:
        nobody = asyncio.get_running_loop().create_future()
        nobody.cancel()
        await nobody
      return await super().generate(request)

  served = players.engine(kind=Cancelling)
  playing = players.player(fakes.Counting(), served)
  group = await players.begin(playing).run()
  (fault,) = players.of_kind(playing, "fault")
  statuses = [t.status for t in group.trajectories]
  assert (
    statuses == [STATUS.COMPLETED, STATUS.ENGINE_FAULT] + [STATUS.COMPLETED] * 2
  )
  assert (fault["index"], fault["what"]) == (1, group.trajectories[1].fault)
  assert "the engine cancelled" in fault["what"]


# The other engine begins it anew, at 4 s, and has sampled a first token by 8 s.
@pytest.mark.parametrize(("later_s", "sampled"), [(4.0, 1), (0.0, 0)])
async def test_an_abort_reaches_a_request_whose_engine_was_lost(
  later_s, sampled
):
  engines = [players.engine(delay_s=lambda _: 10.0) for _ in range(2)]
  playing = players.player(fakes.Counting(), limits=players.ONE)
  playing = dataclasses.replace(playing, router=router.Router(engines))
  play = players.begin(playing)
  running = asyncio.create_task(play.run())
  await asyncio.sleep(4)
  await engines[0].close()
  if later_s:
    await asyncio.sleep(later_s)
  play.abort("stale")
  group = await running
  assert asyncio.get_running_loop().time() == 4.0 + later_s
  assert group.num_sampled == engines[1].stats().sampled_tokens == sampled
  assert group.trajectories[0].status is STATUS.STALE


@pytest.mark.parametrize("lost_s", [6.5, 14.5, 31.5])
def test_a_trajectory_has_one_version_when_an_engine_is_lost_that_drains(
  lost_s,
):
  async def disturb(run):
    await asyncio.sleep(lost_s)
    await run.engines[0].close()

  def delay_s(priority):
    return 6.0 if priority[0] % 2 == 0 and priority[1] == 0 else 1.0

  run = virtual_run.Run(
    overlap.bounded(4, 2, 1),
    rounds=6,
    num_engines=2,
    source=fakes.Counting(turns=4),
    delay_s=delay_s,
    disturb=disturb,
  ).start()
  assert not run.violations()
  assert run.ledger.error == 0
  members = [t for group in run.groups for t in group.trajectories]
  assert all(len(t.versions) <= 1 for t in members)
  lost = [t for t in members if t.status is STATUS.ENGINE_FAULT]
  assert all("which no engine that is left serves" in t.fault for t in lost)
  # At 31.5 s the other engine has newer weights already.
  assert bool(lost) == (lost_s == 31.5)


@dataclasses.dataclass(eq=False)
class Ranked:
  """Grades the members of a group by their place; keeps what it was given."""

  takes_s: float = 0.0
  fails: bool = False
  stateless: bool = True
  compares: bool = True
  alone: Any = dataclasses.field(default_factory=rewards.Outcome)
  seen: list[int] = dataclasses.field(default_factory=list)

  async def __call__(self, task, transcripts):
    self.seen.append(len(transcripts))
    await asyncio.sleep(self.takes_s)
    if self.fails:
      raise OSError("no judge")
    return [base.Grade.single("rank", i) for i in range(len(transcripts))]


async def test_a_reward_that_compares_is_called_once_when_all_have_ended():
  reward = Ranked()

  served = players.engine(delay_s=lambda priority: 0.1)
  # Members take 0, 0.05 s... longer: the last ends after the others.
  source = fakes.Counting(turns=1, lag_s=lambda index, member: member / 20)
  playing = players.player(source, served, reward)
  group = await players.begin(playing).run()
  log = playing.log.events
  assert reward.seen == [4]
  assert [t.reward for t in group.trajectories] == [0.0, 1.0, 2.0, 3.0]
  kinds = [e["kind"] for e in log]
  assert kinds[-9:] == ["ended"] + ["grading"] * 4 + ["reward"] * 4


def test_a_member_with_a_fault_is_not_compared():
  reward = Ranked()
  source = fakes.Counting(fault="step", member=lambda member: member == 1)
  group = players.play_group(source, reward=reward)
  assert reward.seen == [3]
  assert [t.reward for t in group.trajectories] == [0.0, None, 1.0, 2.0]


def test_the_last_member_has_nothing_to_be_compared_with():
  reward = Ranked()
  source = fakes.Counting(fault="step", member=lambda member: member > 0)
  first, *others = players.play_group(source, reward=reward).trajectories
  assert not reward.seen
  assert first.status is trajectory.Status.REWARD_FAULT
  assert "no other member" in first.fault
  assert {t.status for t in others} == {trajectory.Status.ENV_FAULT}


def test_a_comparison_that_fails_is_a_fault_of_each_member():
  group = players.play_group(fakes.Counting(), reward=Ranked(fails=True))
  for member in group.trajectories:
    assert member.status is trajectory.Status.REWARD_FAULT
    assert member.fault.startswith("reward raised OSError: no judge (")
    assert member.reward is None


async def test_an_abort_ends_a_comparison():
  playing = players.player(fakes.Counting(), reward=Ranked(takes_s=0.05))
  attempt = players.begin(playing)
  play = asyncio.create_task(attempt.run())
  await asyncio.sleep(0.01)
  attempt.abort("stale")
  group = await play
  time = asyncio.get_running_loop().time()
  assert time == 0.01
  assert [t.reward for t in group.trajectories] == [None] * 4


async def test_an_episode_without_a_group_is_graded_alone():
  playing = players.player(fakes.Counting(), reward=Ranked())
  task = playing.source.task(0, "eval")
  found = await playing.play_alone(episode.Episode(task, 0, 0, 0))
  assert found.parts == {"outcome": 1.0}
