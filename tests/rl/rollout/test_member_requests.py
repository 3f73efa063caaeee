"""Members that were cut off, and go on from what a checkpoint kept of them."""

import asyncio
import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from envs import base
from models.chat import word_chat
from rl.audit import lifecycle
from rl.data import trajectory
from rl.rollout import group_rollout, member_requests
from rl.runtime import virtual_clock
from rl.testing import fakes, scripted_engine
from tests.helpers import players_under_test as players

pytestmark = pytest.mark.virtual_time

LIMITS = dataclasses.replace(players.LIMITS, group_size=2, turn_tokens=4)


def three_words(request):
  """Answers three words and an end, also one that has some of them."""
  words = players.YES, players.NO
  ids = request.tokens.tolist()
  while sum(id_ in words for id_ in ids[-3:]) < 3:
    ids.append(words[(request.seed + len(ids)) % 2])
  return [*ids[len(request.tokens) :], word_chat.END]


def player(source, version=0, **fields):
  engine = scripted_engine.ScriptedEngine(
    three_words, lambda request, i: 1.0, experts=(2, 1)
  )
  engine.version = version
  limits = dataclasses.replace(LIMITS, record_experts=True)
  return players.player(source, engine, limits=limits, **fields)


def begin(playing, **fields):
  task = playing.source.task(0, "train")
  return group_rollout.GroupRollout(
    playing, task, group_id=3, seed=0, admitted=0, **fields
  )


def cut_off(source, at_s, *, hold=True, **fields):
  """Returns the members of a group that has played for some seconds."""

  async def run():
    own = member_requests.Hold()
    rollout = begin(player(source, **fields), hold=own)
    work = asyncio.create_task(rollout.run())
    await asyncio.sleep(at_s)
    if hold:
      own.close()
      rollout.hold()
      await asyncio.sleep(0.01)
    saved = json.dumps(trajectory.open_group_to_json(rollout.open_group))
    rollout.abort("stopped")
    await work
    return trajectory.open_group_from_json(json.loads(saved)).members

  return virtual_clock.run(run())


def go_on(source, past=None, **fields):
  """Returns the group and what played it."""

  async def run():
    playing = player(source, **fields)
    return await begin(playing, past=past or {}).run(), playing

  return virtual_clock.run(run())


def said(group):
  """Returns what is trained of a group, but for its seconds."""
  return [
    (
      one.ids.tolist(),
      one.sampled.tolist(),
      one.versions,
      one.reward,
      one.metrics,
      np.asarray(one.experts).tolist(),
    )
    for one in group.trajectories
  ]


def sampled(playing):
  return playing.router.stats().sampled_tokens


# An answer takes 4 s: at 2.5 s two of its ids are there, at 6.5 s two of the
# second answer's.
@pytest.mark.parametrize(("at_s", "kept"), [(0.5, 0), (2.5, 2), (6.5, 6)])
def test_an_answer_goes_on_where_it_was_cut(at_s, kept):
  whole, _ = go_on(fakes.Counting())
  past = cut_off(fakes.Counting(), at_s)
  group, playing = go_on(fakes.Counting(), past)
  assert said(group) == said(whole)
  # Nothing is sampled again: of two members with two answers of four.
  assert sampled(playing) == 2 * (8 - kept)
  turns = [event["turns"] for event in players.of_kind(playing, "continued")]
  assert turns == [kept // 4] * 2


def test_ids_that_were_fed_before_a_cut_keep_their_experts():
  (whole, _), past = go_on(fakes.Counting()), cut_off(fakes.Counting(), 2.5)
  newer, _ = go_on(fakes.Counting(), past, version=5)
  for one, before in zip(newer.trajectories, whole.trajectories, strict=True):
    # Two ids were sampled, and the second was not fed yet.
    cut = np.flatnonzero(one.sampled)[1]
    assert one.versions[0][:1] == (0,)
    assert one.versions[-1][0] == 5
    experts, sampled_with = np.asarray(one.experts), np.asarray(before.experts)
    assert np.array_equal(experts[:cut], sampled_with[:cut])
    assert np.array_equal(experts[cut:-1], sampled_with[cut:-1] + 5)


def test_what_is_saved_beside_the_play_keeps_whole_answers():
  whole, _ = go_on(fakes.Counting())
  past = cut_off(fakes.Counting(), 6.5, hold=False)
  group, playing = go_on(fakes.Counting(), past)
  assert said(group) == said(whole)
  assert sampled(playing) == 2 * 4


def test_an_answer_without_a_reply_is_replied_to_and_not_sampled_again():
  source = fakes.Counting(delay_s=lambda index, step: 0.1)
  whole, _ = go_on(source)
  group, playing = go_on(source, cut_off(source, 4.05))
  assert said(group) == said(whole)
  assert sampled(playing) == 2 * 4
  # Its turn was never logged, so it is now.
  turns = [e["number"] for e in players.of_kind(playing, "turn")]
  assert sorted(turns) == [0, 0, 1, 1]


def test_graded_members_are_kept_and_others_graded_once_more():
  source = fakes.Counting()
  judge = fakes.Judge(delay_s=lambda index, call: (0.01, 1.0)[call])
  past = cut_off(source, 8.05, reward=judge)
  assert sorted(past[i].is_over for i in (0, 1)) == [False, True]
  again = fakes.Judge()
  group, playing = go_on(source, past, reward=again)
  assert said(group) == said(go_on(source)[0])
  assert sum(again.calls.values()) == 1
  assert sampled(playing) == 0
  assert len(players.of_kind(playing, "reward")) == 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Altered(fakes.Counting):
  """A source whose environments do something else than those of `Counting`."""

  what: str

  def __call__(self, task) -> Any:
    return _Altered(super().__call__(task), self.what)


@dataclasses.dataclass
class _Altered:
  environment: base.Environment
  what: str

  async def start(self):
    word = "on" if self.what == "start" else "go"
    return [base.Message("user", word)]

  async def step(self, answer):
    step = await self.environment.step(answer)
    match self.what:
      case "words":
        step = dataclasses.replace(step, messages=[base.Message("user", "go")])
      case "reward":
        step = dataclasses.replace(step, reward=7.0)
      case "done":
        step = dataclasses.replace(step, done=True)
      case "fault":
        raise OSError("the game broke")
    return step

  async def close(self):
    pass


@pytest.mark.parametrize(
  ("what", "reason"),
  [
    ("start", "something else before answer 1"),
    ("words", "something else before answer 2"),
    ("reward", "answer 1 got a reward of 7.0, not"),
    ("done", "ended it after 1 answers"),
    ("fault", "ended it after 1 answers"),
  ],
)
def test_an_environment_that_differs_is_played_anew_and_named(what, reason):
  source = Altered(what=what)
  anew, _ = go_on(source)
  group, playing = go_on(source, cut_off(fakes.Counting(), 6.5))
  events = players.of_kind(playing, "begun_anew")
  assert [event["tokens"] for event in events] == [6, 6]
  assert all(reason in event["reason"] for event in events)
  assert not players.of_kind(playing, "continued")
  assert said(group) == said(anew)


async def test_a_member_that_is_aborted_while_it_is_held_keeps_its_tokens():
  hold = member_requests.Hold()
  playing = player(fakes.Counting())
  rollout = begin(playing, hold=hold)
  work = asyncio.create_task(rollout.run())
  await asyncio.sleep(2.5)
  hold.close()
  rollout.hold()
  await asyncio.sleep(0.01)
  assert rollout.is_held
  rollout.abort("stale")
  group = await work
  assert group.num_sampled == sampled(playing) == 4


def test_a_log_of_members_that_go_on_is_one_of_a_whole_life():
  past = cut_off(fakes.Counting(), 6.5)
  _, playing = go_on(fakes.Counting(), past)
  follows = lifecycle.Lifecycle(2, lambda attempt: None)
  submitted = {
    "kind": "submitted",
    "t": 0.0,
    "version": 0,
    "source": "counting",
  }
  place = {"group": 3, "attempt": 0, "task": "counting/train/0"}
  log = [submitted | place, *playing.log.events]
  assert [follows.observe(event) for event in log] == [None] * len(log)


class Asking(fakes.Counting):
  """A source of agents that ask for nothing."""

  def __call__(self, task) -> Any:
    return _Agent()


class _Agent:
  async def run(self, endpoint):
    return base.AgentResult(1.0)

  async def close(self):
    pass


class PlaysAtOnce:
  """Runs agents without a server."""

  async def play(self, run, partial, requests, limits, priority):
    result = await run(base.Endpoint("", ""))
    partial.rewards.append(result.reward)
    return partial.end(trajectory.Status.COMPLETED)

  async def close(self):
    pass


def test_an_agent_is_played_anew_and_named():
  past = cut_off(fakes.Counting(), 6.5)
  group, playing = go_on(Asking(), past, agents=PlaysAtOnce())
  assert [one.reward for one in group.trajectories] == [1.0, 1.0]
  events = players.of_kind(playing, "begun_anew")
  assert ["agent" in event["reason"] for event in events] == [True] * 2
