"""Agents played through a session: their trajectories and faults."""

import asyncio

import pytest

from envs import base
from models.chat import word_chat
from rl.agents import answer_stream, served_agent, sessions
from rl.data import trajectory
from rl.engine import contract
from rl.rollout import episode
from rl.testing import scripted_engine

CHAT = word_chat.WordChat(("go", "yes"))
TASK = base.Task("game/train/4", 4, "train", 4)
EPISODE = episode.Episode(TASK, group_id=9, index=3, seed=1)


class Server:
  """A server without HTTP."""

  def __init__(self):
    self.engine = scripted_engine.ScriptedEngine(lambda request: [4, 1])
    self.kept = []
    self.sessions = sessions.Sessions(CHAT, keep=self.kept.append)

  async def ask(self, name):
    session = self.sessions.open(name)
    opening = session.begin([base.Message("user", "go")])
    request = contract.DecodeRequest(
      request_id=f"{name}/{session.number}",
      session=name,
      tokens=opening.tokens,
      max_tokens=4,
      stop_ids=CHAT.stop_ids,
      seed=opening.seed,
      priority=session.priority,
    )
    parser = answer_stream.AnswerParser(CHAT)
    try:
      done = await answer_stream.sample_answer(self.engine, request, parser)
    except contract.EngineClosed:
      session.engine_closed = True
      raise
    text = base.Message("assistant", parser.answer().content)
    session.record(opening, done, text)

  def play(self, agent, deadline_s=20.0):
    played = served_agent.play(
      self.sessions, EPISODE, agent, deadline_s=deadline_s
    )
    return asyncio.run(played)


def answering(value, times=1):
  async def agent(server, name):
    for _ in range(times):
      await server.ask(name)
    return value

  return agent


def play(agent, **settings):
  server = Server()
  left = server.play(lambda name: agent(server, name), **settings)
  assert server.kept == [left]
  assert len(server.sessions) == 0
  return server, left


def test_an_episode_has_the_names_the_reward_and_the_priority_of_its_task():
  server, (left,) = play(answering(2))
  assert (left.task_id, left.group_id, left.index) == ("game/train/4", 9, 3)
  assert (left.reward, left.status) == (2.0, trajectory.Status.COMPLETED)
  assert left.num_sampled == 2
  assert [request.priority for request in server.engine.requests] == [(9, 3)]


def test_the_same_episode_has_the_same_seeds_and_another_session():
  requests = [play(answering(0.0, times=2))[0].engine.requests for _ in "ab"]
  seeds = [[request.seed for request in each] for each in requests]
  assert seeds[0] == seeds[1]
  assert len(set(seeds[0])) == 2
  assert requests[0][0].session != requests[1][0].session


def test_every_conversation_of_an_agent_gets_its_reward():
  _, left = play(answering(0.5, times=2))
  assert [one.reward for one in left] == [0.5, 0.5]


def test_an_agent_that_others_grade_has_no_reward_yet():
  _, (left,) = play(answering(None))
  assert (left.reward, left.status) == (None, trajectory.Status.COMPLETED)


async def crash(server, name):
  await server.ask(name)
  raise OSError("the game is gone")


async def hang(server, name):
  await server.ask(name)
  await asyncio.sleep(60)


async def silent(server, name):
  return 1.0


@pytest.mark.parametrize(
  ("agent", "words", "num_sampled"),
  [
    (crash, "agent raised OSError: the game is gone", 2),
    (hang, "agent took over 0.05 s", 2),
    (answering("well"), "reward 'well' is not a finite number", 2),
    (answering(float("nan")), "reward nan is not a finite number", 2),
    (answering(True), "reward True is not a finite number", 2),
    (silent, "the agent asked for no answer", 0),
  ],
)
def test_a_fault_of_an_agent_is_data_without_a_reward(
  agent, words, num_sampled
):
  _, (left,) = play(agent, deadline_s=0.05 if agent is hang else 20.0)
  assert left.status is trajectory.Status.ENV_FAULT
  assert left.reward is None
  assert words in left.fault
  assert left.num_sampled == num_sampled


def test_what_is_no_coroutine_is_a_fault_too():
  _, (left,) = play(lambda server, name: 5)
  assert "agent raised TypeError" in left.fault


def test_an_engine_that_closes_is_no_fault_of_the_agent():
  server = Server()

  async def agent(name):
    await server.ask(name)
    await server.engine.close()
    await server.ask(name)

  with pytest.raises(contract.EngineClosed):
    server.play(agent)
  ((left,),) = server.kept
  assert left.status is trajectory.Status.ENGINE_FAULT
  assert left.num_sampled == 2


def test_what_a_cancelled_agent_sampled_is_kept():
  server = Server()

  async def scenario():
    begun = asyncio.Event()

    async def agent(name):
      await server.ask(name)
      begun.set()
      await asyncio.sleep(60)

    playing = asyncio.create_task(
      served_agent.play(server.sessions, EPISODE, agent, deadline_s=60.0)
    )
    await begun.wait()
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
      await playing

  asyncio.run(scenario())
  ((left,),) = server.kept
  assert (left.num_sampled, left.fault) == (2, "cancelled")
