"""Tests of playing, grading and their faults."""

import asyncio
import dataclasses
import itertools
import math
import time
from typing import Any, cast

import numpy as np
import pytest

from envs import base, rewards
from models import chat as chat_lib
from rl import (
  engine,
  episode,
  events,
  rollout,
  testing,
  trajectory,
  watchdog,
)

LIMITS = rollout.Rollout(
  group_size=4, max_turns=4, turn_tokens=2, max_tokens=32, step_s=0.2
)
CHAT = chat_lib.WordChat(("go", "on", "yes", "no"))
YES, NO = 5, 6


def player(source, reward=None, limits=LIMITS, answers=(YES,), **kwargs):
  return rollout.Player(
    source=source,
    engine=testing.FakeEngine(answers, chat_lib.END, **kwargs),
    chat=CHAT,
    reward=reward or rewards.Outcome(),
    limits=limits,
    log=events.EventLog(),
  )


def play_group(playing, index=0):
  task = playing.source.task(index, "train")

  async def run():
    return await playing.group(task, 3, 0, trajectory.PolicyVersion(0))

  return asyncio.run(run())


def test_a_trajectory_holds_the_ids_exactly_as_sampled():
  # go <agent> | yes <end> | on <agent> | yes <end>
  group = play_group(player(testing.Counting(turns=2)))
  first = group.trajectories[0]
  expected = [3, chat_lib.AGENT, YES, chat_lib.END]
  expected += [4, chat_lib.AGENT, YES, chat_lib.END]
  assert first.ids.tolist() == expected
  assert first.sampled.tolist() == [False, False, True, True] * 2
  assert first.status is trajectory.Status.COMPLETED
  assert first.reward == pytest.approx(1.0)
  assert [t.index for t in group.trajectories] == [0, 1, 2, 3]


def test_each_request_begins_with_every_id_before_it():
  seen = []

  class Recording(testing.FakeEngine):
    async def generate(self, request):
      seen.append(request.tokens.tolist())
      return await super().generate(request)

  playing = dataclasses.replace(
    player(testing.Counting(turns=3)),
    engine=Recording((YES,), chat_lib.END),
    limits=dataclasses.replace(LIMITS, group_size=1),
  )
  play_group(playing)
  assert len(seen) == 3
  for before, after in itertools.pairwise(seen):
    answered = [*before, YES, chat_lib.END]
    assert after[: len(answered)] == answered


def test_members_of_a_group_have_noise_of_their_own_that_repeats():
  task = testing.Counting().task(0, "train")
  noise = [episode.Episode(task, 5, i, 0).noise for i in range(64)]
  assert len(set(noise)) == 64
  assert noise == [episode.Episode(task, 5, i, 0).noise for i in range(64)]
  assert noise[0] != episode.Episode(task, 5, 0, 1).noise
  held_out = testing.Counting().task(0, "eval")
  assert noise[0] != episode.Episode(held_out, 5, 0, 0).noise


def test_the_turn_limit_truncates_and_still_grades():
  limits = dataclasses.replace(LIMITS, max_turns=2)
  group = play_group(player(testing.Counting(turns=4), limits=limits))
  ended = group.trajectories[0]
  assert ended.status is trajectory.Status.TRUNCATED
  assert len(ended.turns) == 2
  assert ended.reward == pytest.approx(0.5)  # two of four answers


def test_the_token_limit_truncates_before_it_is_passed():
  # Turns take 4 ids: two whole turns fit 9, the third has room for no answer.
  limits = dataclasses.replace(LIMITS, max_tokens=9, max_turns=9)
  group = play_group(player(testing.Counting(turns=9), limits=limits))
  ended = group.trajectories[0]
  assert ended.status is trajectory.Status.TRUNCATED
  assert len(ended.ids) == 8


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
  group = play_group(player(testing.Counting(fault=fault)))
  for member in group.trajectories:
    assert member.status is trajectory.Status.ENV_FAULT
    assert words in member.fault
    assert member.reward is None


def cancelled_events(playing):
  return [e for e in playing.log.events if e["kind"] == "cancelled"]


def test_an_engine_that_closes_leaves_the_sampled_tokens_in_the_log():
  class Closing(testing.FakeEngine):
    async def generate(self, request):
      if request.request_id.endswith("/2"):
        raise engine.EngineClosed("stopped")
      return await super().generate(request)

  playing = dataclasses.replace(
    player(
      testing.Counting(turns=3),
      limits=dataclasses.replace(LIMITS, group_size=1),
    ),
    engine=Closing((YES,), chat_lib.END),
  )
  with pytest.raises(ExceptionGroup) as raised:
    play_group(playing)
  assert raised.group_contains(engine.EngineClosed)
  (event,) = cancelled_events(playing)
  assert (event["tokens"], event["versions"]) == (4, [(0, 4)])


def test_a_cancelled_member_logs_the_answer_that_was_being_stepped():
  playing = player(testing.Counting(fault="hang"))
  task = playing.source.task(0, "train")

  async def run():
    group = playing.group(task, 3, 0, trajectory.PolicyVersion(0))
    await asyncio.wait_for(group, 0.05)

  with pytest.raises(TimeoutError):
    asyncio.run(run())
  assert [e["tokens"] for e in cancelled_events(playing)] == [2] * 4


def test_the_watchdog_names_the_environment_and_the_reward_waited_for():
  dog = watchdog.Watchdog()

  async def table(playing):
    watched = dataclasses.replace(playing, dog=dog)
    task = playing.source.task(0, "train")
    play = asyncio.create_task(
      watched.group(task, 3, 0, trajectory.PolicyVersion(0))
    )
    await asyncio.sleep(0.05)
    play.cancel()
    lines = dog.dump().splitlines()[1:]
    await asyncio.wait([play])
    return sorted(lines)

  hanging = testing.Counting(fault="hang")
  for playing, what in [
    (player(hanging), "step of the environment"),
    (player(testing.Counting(), Broken("hang")), "reward"),
  ]:
    lines = asyncio.run(table(playing))
    assert len(lines) == 4
    for index, line in enumerate(lines):
      assert line.startswith(f"episode train/3/{index}  {what}  ")
    assert dog.dump() == "nobody waits"


def test_a_source_that_cannot_build_its_environment_is_data():
  class Broken(testing.Counting):
    def __call__(self, task):
      raise KeyError("no such map")

  group = play_group(player(Broken()))
  assert all(
    t.status is trajectory.Status.ENV_FAULT and "no such map" in t.fault
    for t in group.trajectories
  )


def test_one_hanging_environment_does_not_hold_up_the_others():
  source = testing.Counting(fault="hang", faulty=lambda index: index == 0)
  playing = player(source, limits=dataclasses.replace(LIMITS, step_s=1.0))
  done: dict[int, float] = {}

  async def one(index):
    await playing.group(
      source.task(index, "train"), index, 0, trajectory.PolicyVersion(0)
    )
    done[index] = time.monotonic()

  async def run():
    await asyncio.gather(*(one(i) for i in range(8)))

  asyncio.run(run())
  # The frozen one ends at its deadline of 1 s, all others long before.
  assert min(done[0] - done[i] for i in range(1, 8)) > 0.5


def test_environments_are_closed_on_every_path():
  closed = []

  class Closing(testing.Counting):
    def __call__(self, task):
      environment = super().__call__(task)
      closed.append(environment)
      return environment

  for fault in ("", "start", "step", "hang", "word"):
    play_group(player(Closing(fault=fault)))
  assert len(closed) == 20
  assert all(environment.closed for environment in closed)


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
  limits = dataclasses.replace(LIMITS, reward_s=0.1)
  group = play_group(player(testing.Counting(), Broken(how), limits))
  for member in group.trajectories:
    assert member.status is trajectory.Status.REWARD_FAULT
    assert member.reward is None
    assert words in member.fault


def test_grading_starts_while_other_members_still_play():
  source = testing.Counting(turns=1)
  log = []

  @dataclasses.dataclass(frozen=True)
  class Timed:
    stateless: bool = True

    async def __call__(self, task, transcripts):
      log.append(time.monotonic())
      return [base.Grade(1.0, {})]

  # Member 3 answers after 0.5 s, the others at once.
  playing = player(
    source, Timed(), delay_s=lambda priority: 0.5 * (priority[1] == 3)
  )
  play_group(playing)
  assert log[3] - log[2] > 0.4


def test_a_request_that_the_engine_refuses_is_an_engine_fault():
  class Refusing(testing.FakeEngine):
    async def generate(self, request):
      raise ValueError("request does not fit")

  playing = dataclasses.replace(
    player(testing.Counting()), engine=Refusing((YES,), chat_lib.END)
  )
  member = play_group(playing).trajectories[0]
  assert member.status is trajectory.Status.ENGINE_FAULT
  assert "does not fit" in member.fault


def test_json_keeps_a_trajectory_exactly():
  group = play_group(player(testing.Counting(turns=3), answers=(YES, NO)))
  again = trajectory.group_from_json(trajectory.group_to_json(group))
  for before, after in zip(group.trajectories, again.trajectories, strict=True):
    assert np.array_equal(before.ids, after.ids)
    for one, two in zip(before.turns, after.turns, strict=True):
      assert one.logprobs.tobytes() == two.logprobs.tobytes()
      assert np.array_equal(one.versions, two.versions)
    assert (before.reward, before.status) == (after.reward, after.status)
