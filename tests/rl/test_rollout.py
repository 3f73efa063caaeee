"""Tests of playing, grading and their faults."""

import asyncio
import dataclasses
import itertools
import time

import numpy as np
import pytest

from envs import base, rewards
from models import chat as chat_lib
from rl import episode, events, rollout, testing, trajectory

LIMITS = rollout.Rollout(
  group_size=4, max_turns=4, turn_tokens=2, max_tokens=32, step_s=0.2
)
CHAT = chat_lib.WordChat(("go", "on", "yes", "no"))
YES, NO = 5, 6


def player(source, reward=None, limits=LIMITS, answers=(YES,), **engine):
  return rollout.Player(
    source=source,
    engine=testing.FakeEngine(answers, chat_lib.END, **engine),
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
  """A reward that fails in one of several ways."""

  how: str
  stateless: bool = True

  async def __call__(self, task, transcripts):
    if self.how == "raise":
      raise ConnectionError("judge is down")
    if self.how == "hang":
      await asyncio.sleep(60)
    if self.how == "two":
      return [base.Grade(1.0, {}), base.Grade(1.0, {})]
    return [base.Grade(float("inf"), {})]


@pytest.mark.parametrize(
  ("how", "words"),
  [
    ("raise", "reward raised ConnectionError: judge is down"),
    ("hang", "reward took over 0.1 s"),
    ("two", "too many values to unpack"),
    ("inf", "reward inf is not a finite number"),
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
