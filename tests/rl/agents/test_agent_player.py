"""Agents in groups and in runs: their samples, limits, faults and aborts."""

import asyncio
import dataclasses
from typing import Any

import numpy as np
import pytest

from envs import base
from rl.data import trajectory
from rl.engine import contract
from rl.runtime import virtual_clock
from tests.helpers import agents_under_test as agents
from tests.helpers import players_under_test as players
from tests.helpers import virtual_run

pytestmark = pytest.mark.virtual_time

GO, ON = agents.GO, agents.ON
ONE = players.ONE
# OpenAI's words, by which clients know a full context.
FULL = "this model's maximum context length is"


async def begin(play, served=None, **fields):
  """Returns a started group of one agent, its source and its player."""
  source = agents.Source(play=play)
  playing = players.player(source, served, **{"limits": ONE, **fields})
  plays = agents.plays(source, playing.router)
  playing = dataclasses.replace(playing, agents=plays)
  return players.begin(playing), source, playing


def play_one(play, served=None, **fields) -> tuple[trajectory.Trajectory, Any]:
  """Plays an agent to its end, in virtual time."""

  async def run():
    group, source, playing = await begin(play, served, **fields)
    (played,) = (await group.run()).trajectories
    await players.closed(playing)
    assert source.closed == [played.task_id]
    assert not len(source.gateway.sessions)
    return played, playing

  return virtual_clock.run(run())


async def twice(server, endpoint, task):
  """Asks twice in one conversation."""
  answer = await server.ask(endpoint, GO)
  await server.ask(endpoint, GO, answer, ON)
  return 0.5


def test_an_agent_leaves_the_ids_as_sampled_and_its_reward():
  # go <agent> | yes <end> | on <agent> | yes <end>
  served = players.engine()
  played, playing = play_one(twice, served)
  assert played.ids.tolist() == [3, 2, 5, 1, 4, 2, 5, 1]
  assert played.sampled.tolist() == [False, False, True, True] * 2
  assert (played.reward, played.status.value) == (0.5, "completed")
  assert [turn.reward for turn in played.turns] == [0.0, 0.5]
  assert [r.priority for r in served.requests] == [(3, 0)] * 2
  assert {r.session for r in served.requests} == {"train/3/0/0"}
  assert len(players.of_kind(playing, "turn")) == 2


def test_a_reward_of_the_run_reads_the_last_conversation():
  class Judge:
    stateless = True

    async def __call__(self, task, transcripts):
      (said,) = transcripts
      seen.extend((m.role, m.content) for m in said.messages)
      return [base.Grade(0.25, {})]

  async def edits(server, endpoint, task):
    await twice(server, endpoint, task)
    await server.ask(endpoint, ON, base.Message("assistant", "no"), GO)
    return base.AgentResult(None, {"calls": 3})

  seen = []
  played, _ = play_one(edits, reward=Judge())
  assert (played.reward, played.metrics) == (0.25, {"calls": 3.0})
  assert seen == [
    ("user", "on"),
    ("assistant", "no"),
    ("user", "go"),
    ("assistant", "yes"),
  ]


def test_an_agent_without_a_reward_is_a_fault_where_the_run_reads_none():
  async def no_reward(server, endpoint, task):
    await server.ask(endpoint, GO)
    return base.AgentResult(None)

  played, _ = play_one(no_reward)
  assert played.status is trajectory.Status.REWARD_FAULT
  assert played.reward is None
  assert "no reward of its own" in played.fault


async def compacts(server, endpoint, task):
  """Leads one conversation, then two at a time with a shorter history."""
  await twice(server, endpoint, task)
  short = server.ask(endpoint, ON), server.ask(endpoint, ON, GO)
  await asyncio.gather(*short)
  return 1.0


def test_each_conversation_is_a_sample_of_the_one_member():
  played, _ = play_one(compacts)
  first, *others = played.conversations
  assert first.ids.tolist() == [3, 2, 5, 1, 4, 2, 5, 1]
  assert [one.ids.tolist() for one in others] == [
    [4, 2, 5, 1],
    [4, 3, 2, 5, 1],
  ]
  assert {one.reward for one in (first, *others)} == {1.0}
  assert played.num_sampled == 8
  again = trajectory.trajectory_to_json(played)
  again = trajectory.trajectory_from_json(again)
  assert [len(one.turns) for one in again.conversations] == [2, 1, 1]


BAD: Any = {"x": "y"}


async def crash(server, endpoint, task):
  await server.ask(endpoint, GO)
  raise OSError("the game is gone")


async def hang(server, endpoint, task):
  await server.ask(endpoint, GO)
  await asyncio.sleep(60)


async def nothing(server, endpoint, task):
  return 1.0


def ends_with(value):
  async def play(server, endpoint, task):
    await server.ask(endpoint, GO)
    return value

  return play


@pytest.mark.parametrize(
  ("play", "words", "num_sampled"),
  [
    (crash, "run raised OSError: the game is gone", 2),
    (hang, "took over 0.2 s without asking", 2),
    (ends_with("well"), "run returned str, not an AgentResult", 2),
    (ends_with(float("nan")), "reward nan is not a finite number", 2),
    (
      ends_with(base.AgentResult(1.0, BAD)),
      "metric 'x' is str, not a number",
      2,
    ),
    (nothing, "asked for no answer", 0),
  ],
)
def test_a_fault_of_an_agent_is_data_without_a_reward(play, words, num_sampled):
  played, _ = play_one(play)
  assert played.status is trajectory.Status.ENV_FAULT
  assert played.reward is None
  assert words in played.fault
  assert played.num_sampled == num_sampled


def test_time_in_which_the_engine_owes_an_answer_is_not_the_agents():
  # Each answer takes 5 s, and the agent has 0.2 s between two of them.
  served = players.engine(delay_s=lambda priority: 5.0)
  played, _ = play_one(twice, served)
  assert (played.reward, played.fault) == (0.5, "")


def until_refused(served, **limits):
  """Plays an agent that goes on until it is refused an answer."""

  async def play(server, endpoint, task):
    said, asked = [GO], {"temperature": 0.1, "bias": np.zeros(7, np.float32)}
    while True:
      try:
        said += [await server.ask(endpoint, *said, **asked), ON]
      except ValueError as error:
        errors.append(str(error))
        return 0.0

  errors = []
  limits = dataclasses.replace(ONE, **limits)
  played, _ = play_one(play, served, limits=limits)
  assert played.status is trajectory.Status.TRUNCATED
  assert played.reward == 0.0
  return played, errors


def test_an_agent_has_the_answers_tokens_and_temperature_of_the_run():
  served = players.engine()
  played, errors = until_refused(served, max_turns=3, temperature=0.7)
  assert len(played.turns) == 3
  assert errors == ["an episode has 3 answers (rollout.max_turns); end it"]
  assert {(r.max_tokens, r.temperature) for r in served.requests} == {(2, 0.7)}
  assert all(r.bias is None for r in served.requests)
  # Two turns of 4 ids; 1 of 11 is left for an answer after 2 of context.
  served = players.engine()
  played, errors = until_refused(served, max_turns=9, max_tokens=11)
  assert [r.max_tokens for r in served.requests] == [2, 2, 1]
  assert len(played.ids) == 11
  assert errors[0].startswith(f"{FULL} 11 tokens (rollout.max_tokens)")


def test_an_answer_that_a_text_of_the_agent_ends_is_no_fault():
  async def stopped(server, endpoint, task):
    first = await server.ask(endpoint, GO, stops=("yes",))
    await server.ask(endpoint, GO, first, ON)
    return 0.5

  # The engine is still to sample the stop id when it is aborted.
  served = players.engine(delay_s=lambda priority: 1.0)
  played, _ = play_one(stopped, served)
  assert (played.reward, played.fault) == (0.5, "")
  assert [turn.stop for turn in played.turns] == ["stop", "stop"]
  assert [turn.tokens.tolist() for turn in played.turns] == [[5], [5, 1]]


async def test_members_of_a_group_sample_apart_and_again_with_one_seed_too():
  async def seeded(server, endpoint, task):
    await server.ask(endpoint, GO, seed=7)
    return 0.5

  async def seeds():
    served = players.engine()
    group, *_ = await begin(seeded, served, limits=players.LIMITS)
    await group.run()
    return [request.seed for request in served.requests]

  found = await seeds()
  assert len(set(found)) == 4
  assert await seeds() == found


async def test_an_answer_that_was_asked_for_after_the_end_is_refused():
  late = []

  async def leaves(server, endpoint, task):
    await server.ask(endpoint, GO)

    async def asks_again():
      await asyncio.sleep(0.05)
      try:
        await server.ask(endpoint, GO)
      except Exception as error:
        late.append(type(error).__name__)

    keep.append(asyncio.create_task(asks_again()))
    return 1.0

  keep = []

  group, *_ = await begin(leaves)
  (played,) = (await group.run()).trajectories
  await asyncio.gather(*keep)
  assert played.num_sampled == 2
  assert late == ["FinishedSession"]


@pytest.mark.parametrize("at_s", [1.5, 2.5], ids=["between", "in an answer"])
async def test_an_aborted_agent_keeps_every_token_that_was_sampled(at_s):
  # One answer from 0 to 1 s, another from 2 to 5 s: its first id comes at once.
  async def play(server, endpoint, task):
    answer = await server.ask(endpoint, GO)
    await asyncio.sleep(1.0)
    await server.ask(endpoint, GO, answer, ON)
    await asyncio.sleep(30.0)  # It need not notice that it was cut off.
    return 1.0

  delays = iter([1.0, 3.0])

  served = players.engine(delay_s=lambda priority: next(delays))
  limits = dataclasses.replace(ONE, step_s=60.0)
  group, *_ = await begin(play, served, limits=limits)
  playing = asyncio.create_task(group.run())
  await asyncio.sleep(at_s)
  group.abort("stale")
  (played,) = (await playing).trajectories
  sampled = served.stats().sampled_tokens
  end_s = asyncio.get_running_loop().time()
  assert played.status is trajectory.Status.STALE
  assert played.num_sampled == sampled == (2 if at_s < 2 else 3)
  assert end_s == pytest.approx(at_s)


async def test_an_engine_that_closes_is_no_fault_of_the_agent():
  served = players.engine()

  async def play(server, endpoint, task):
    await server.ask(endpoint, GO)
    await served.close()
    await server.ask(endpoint, GO)

  group, *_ = await begin(play, served)
  with pytest.raises(ExceptionGroup) as caught:
    await group.run()
  assert caught.group_contains(contract.EngineClosed)


@pytest.mark.parametrize("name", virtual_run.SCHEDULES)
def test_agents_keep_the_promises_of_every_schedule(name):
  run = agents.Run(
    virtual_run.SCHEDULES[name],
    rounds=4,
    source=agents.Source(play=compacts),
    delay_s=lambda priority: 1.0 + sum(priority) % 5,
    num_engines=2,
  ).start()
  assert run.violations() == []
  assert run.ledger.error == 0
  assert run.ledger.sampled == run.sampled_by_engines
  trained = [t for group in run.groups for t in group.trajectories]
  assert {t.reward for t in trained} == {1.0}
  assert {len(t.conversations) for t in trained} == {3}
