"""Tests of playing groups and their faults."""

import asyncio
import dataclasses
import itertools
import math
from typing import Any, cast

import numpy as np
import pytest

from envs import base
from models.chat import word_chat
from rl.algorithms import reward_shaping
from rl.data import trajectory
from rl.engine import contract
from rl.rollout import episode, group_rollout
from rl.runtime import virtual_clock
from rl.runtime import watchdog as watchdog_lib
from rl.testing import fake_engine, fakes
from tests.helpers import players_under_test as players


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

  class Recording(fake_engine.FakeEngine):
    async def generate(self, request):
      seen.append(request.tokens.tolist())
      return await super().generate(request)

  recording = Recording((players.YES,), word_chat.END)
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


def test_the_turn_limit_truncates_and_still_grades():
  limits = dataclasses.replace(players.LIMITS, max_turns=2)
  group = players.play_group(fakes.Counting(turns=4), limits=limits)
  ended = group.trajectories[0]
  assert ended.status is trajectory.Status.TRUNCATED
  assert len(ended.turns) == 2
  assert ended.reward == pytest.approx(0.5)  # two of four answers


def test_the_token_limit_truncates_before_it_is_passed():
  # Turns take 4 ids: two whole turns fit 9, the third has room for no answer.
  limits = dataclasses.replace(players.LIMITS, max_tokens=9, max_turns=9)
  group = players.play_group(fakes.Counting(turns=9), limits=limits)
  ended = group.trajectories[0]
  assert ended.status is trajectory.Status.TRUNCATED
  assert len(ended.ids) == 8


def test_an_answer_that_is_nearly_too_long_is_worth_less():
  # 4 sampled ids where 2 are free and 4 more are not: half the penalty of 1.
  overlong = reward_shaping.Overlong(max_tokens=6, buffer=4)
  limits = dataclasses.replace(players.ONE, overlong=overlong)

  async def run():
    playing = players.player(fakes.Counting(turns=2), limits=limits)
    group = await players.begin(playing).run()
    return group.trajectories[0].reward, players.of_kind(playing, "reward")

  reward, (event,) = virtual_clock.run(run())
  assert reward == event["value"] == pytest.approx(0.5)


def test_the_log_tells_the_way_of_a_member_and_when():
  async def run():
    served = players.fake(delay_s=lambda priority: 0.5)
    playing = players.player(
      fakes.Counting(turns=1), served, limits=players.ONE
    )
    await served.pause()
    play = asyncio.create_task(players.begin(playing).run())
    await asyncio.sleep(2)
    served.resume()
    await play
    return playing.log.events

  log = virtual_clock.run(run())
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
  assert (turn["number"], turn["tokens"], turn["decode_s"]) == (0, 2, 2.5)
  assert (ended["turns"], ended["tokens"], ended["length"]) == (1, 2, 4)
  assert ended["versions"] == [(0, 2)]


@pytest.mark.parametrize(
  ("fault", "words"),
  [
    ("start", "start raised OSError: no such game"),
    ("step", "step raised OSError: the game broke"),
    ("nan", "reward nan is not a finite number"),
    ("text", "reward 'won' is not a finite number"),
    ("hang", "step took over 0.2 s"),
    ("word", "its message cannot be read"),
  ],
)
def test_a_fault_of_the_environment_is_data(fault, words):
  group = players.play_group(fakes.Counting(fault=fault))
  for member in group.trajectories:
    assert member.status is trajectory.Status.ENV_FAULT
    assert words in member.fault
    assert member.reward is None


def test_an_engine_that_closes_leaves_the_sampled_tokens_in_the_log():
  class Closing(fake_engine.FakeEngine):
    async def generate(self, request):
      if request.request_id.endswith("/2"):
        raise contract.EngineClosed("stopped")
      return await super().generate(request)

  async def run():
    closing = Closing((players.YES,), word_chat.END)
    playing = players.player(
      fakes.Counting(turns=3), closing, limits=players.ONE
    )
    with pytest.raises(ExceptionGroup) as raised:
      await players.begin(playing).run()
    assert raised.group_contains(contract.EngineClosed)
    return players.of_kind(playing, "aborted")

  (event,) = virtual_clock.run(run())
  assert (event["tokens"], event["versions"]) == (4, [(0, 4)])
  assert event["reason"] == "error"


def test_a_member_cancelled_hard_logs_the_answer_that_was_being_stepped():
  async def run():
    source = players.Kept(fault="hang")
    playing = players.player(source)
    with pytest.raises(TimeoutError):
      await asyncio.wait_for(players.begin(playing).run(), 0.05)
    await players.closed(playing)
    assert all(environment.closed for environment in source.kept)
    return players.of_kind(playing, "aborted")

  aborted = virtual_clock.run(run())
  assert [e["tokens"] for e in aborted] == [2] * 4
  assert {e["reason"] for e in aborted} == {"stopped"}


def test_the_watchdog_names_who_is_waited_for():
  async def table(source, delay_s=0.0, reward=None):
    watchdog = watchdog_lib.Watchdog()
    playing = players.player(
      source, players.fake(delay_s=lambda _: delay_s), reward, watchdog
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


def test_one_hanging_environment_does_not_hold_up_the_others():
  source = fakes.Counting(fault="hang", faulty=lambda index: index == 0)
  done: dict[int, float] = {}

  async def run():
    playing = players.player(
      source, limits=dataclasses.replace(players.LIMITS, step_s=1.0)
    )

    async def one(index):
      task = source.task(index, "train")
      version = trajectory.PolicyVersion(0)
      await group_rollout.GroupRollout(
        playing, task, group_id=index, seed=0, admitted=version
      ).run()
      done[index] = asyncio.get_running_loop().time()

    await asyncio.gather(*(one(i) for i in range(8)))

  virtual_clock.run(run())
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

  def __call__(self, task, transcripts):
    if self.how == "sync":
      raise OSError("no such judge")
    return self.graded()

  async def graded(self):
    if self.how == "raise":
      raise ConnectionError("judge is down")
    if self.how == "cancel":
      raise asyncio.CancelledError
    if self.how == "exit":
      raise SystemExit(2)
    if self.how == "hang":
      await asyncio.sleep(60)
    if self.how == "inf":
      return [base.Grade(float("inf"), {})]
    return self.how


@pytest.mark.parametrize(
  ("how", "words"),
  [
    ("raise", "reward raised ConnectionError: judge is down"),
    ("hang", "reward took over 0.1 s"),
    ("inf", "reward inf is not a finite number"),
    ("sync", "reward raised OSError: no such judge"),
    ("cancel", "reward raised CancelledError"),
    ("exit", "reward raised SystemExit: 2"),
    ([base.Grade(1.0, {})] * 2, "not a list of one Grade"),
    ([1.0], "reward returned float in place of a Grade"),
    (1.0, "reward returned 1.0, not a list of one Grade"),
    (None, "reward returned None, not a list of one Grade"),
    ([base.Grade(1e39, {})], "reward 1e+39 is not a finite number"),
    ([base.Grade(1.0, cast(Any, None))], "reward returned parts=None"),
    ([base.Grade(1.0, {"a": math.nan})], "part 'a' of the reward nan is not"),
  ],
)
def test_a_reward_that_fails_is_a_fault_and_never_zero(how, words):
  group = players.play_group(fakes.Counting(), reward=Broken(how))
  for member in group.trajectories:
    assert member.status is trajectory.Status.REWARD_FAULT
    assert member.reward is None
    assert words in member.fault


def test_grading_starts_while_other_members_still_play():
  async def run():
    # Member 3 answers after 0.5 s, the others at once.
    served = players.fake(delay_s=lambda priority: 0.5 * (priority[1] == 3))
    playing = players.player(fakes.Counting(turns=1), served)
    await players.begin(playing).run()
    return [(e["index"], e["t"]) for e in players.of_kind(playing, "reward")]

  assert virtual_clock.run(run()) == [(0, 0.0), (1, 0.0), (2, 0.0), (3, 0.5)]


def test_a_request_that_the_engine_refuses_is_an_engine_fault():
  class Refusing(fake_engine.FakeEngine):
    async def generate(self, request):
      raise ValueError("request does not fit")

  group = players.play_group(
    fakes.Counting(), Refusing((players.YES,), word_chat.END)
  )
  member = group.trajectories[0]
  assert member.status is trajectory.Status.ENGINE_FAULT
  assert "does not fit" in member.fault


def test_json_keeps_a_trajectory_exactly():
  group = players.play_group(
    fakes.Counting(turns=3), players.fake((players.YES, players.NO))
  )
  again = trajectory.group_from_json(trajectory.group_to_json(group))
  assert (again.task, again.attempt) == (group.task, group.attempt)
  for before, after in zip(group.trajectories, again.trajectories, strict=True):
    assert np.array_equal(before.ids, after.ids)
    for one, two in zip(before.turns, after.turns, strict=True):
      assert one.logprobs.tobytes() == two.logprobs.tobytes()
      assert np.array_equal(one.versions, two.versions)
    assert (before.reward, before.status) == (after.reward, after.status)
