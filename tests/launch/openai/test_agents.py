"""Agents written against the `openai` package, trained from their records.

They know nothing of this project; the engine is the real one, with a tiny
model.
"""

import asyncio
import functools
import threading
from typing import Any

import jax
import numpy as np
import openai
import pytest

from envs import base
from launch.openai import agents
from launch.openai import app as openai_app
from models.chat import word_chat
from rl.data import batch, trajectory
from rl.pools import placement
from rl.rollout import episode
from rl.testing import scripted_engine
from rl.train import learner
from tests.helpers import tiny_engine as tiny

pytestmark = pytest.mark.compiled

# 21 words and 3 special ids: every one of the 24 ids has a text.
CHAT = word_chat.WordChat(tuple("abcdefghijklmnopqrstu"))
TEMPERATURE = 0.7


def the_episode(index=0):
  task = base.Task(f"talk/train/{index}", index, "train", index)
  return episode.Episode(task, group_id=2, index=index, seed=11)


async def talker(base_url, task):
  """Asks three times with its whole history as text."""
  async with openai.AsyncOpenAI(base_url=base_url, api_key="none") as client:
    history: list = [{"role": "user", "content": f"a b {'cdefgh'[task.index]}"}]
    for number in range(3):
      reply = await client.chat.completions.create(
        model="gpt-4o", messages=history, max_tokens=3, stream=False
      )
      history.append(reply.choices[0].message)
      history.append({"role": "user", "content": "de"[number % 2]})
  return float(task.index)


def plain(base_url, task):
  """Not async, and streaming."""
  with openai.OpenAI(base_url=base_url, api_key="none") as client:
    stream = client.chat.completions.create(
      model="gpt-4o",
      messages=[{"role": "user", "content": "c d"}],
      max_tokens=4,
      stream=True,
    )
    said = [chunk.choices[0].delta.content or "" for chunk in stream]
  return float(len(said) > 0)


@pytest.fixture(scope="module")
def served():
  with tiny.serve() as served:
    yield served


def test_an_unchanged_agent_leaves_what_the_engine_sampled_and_can_be_trained(
  served,
):
  completions = []

  class Watched:
    """The engine, with a list of its completions."""

    def __getattr__(self, name):
      return getattr(served.engine, name)

    async def generate(self, request):
      done = await served.engine.generate(request)
      completions.append((request, done))
      return done

  async def scenario():
    how = openai_app.Serving(temperature=TEMPERATURE)
    watched: Any = Watched()
    async with agents.serving(watched, CHAT, how) as players:
      return await asyncio.gather(
        *(
          players.play(talker, the_episode(i), deadline_s=60.0)
          for i in range(6)
        )
      )

  played = served.run(scenario())
  assert [len(left) for left in played] == [1] * 6
  members = [left[0] for left in played]
  assert all(m.status is trajectory.Status.COMPLETED for m in members)
  assert [m.reward for m in members] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
  assert [m.task_id for m in members] == [f"talk/train/{i}" for i in range(6)]
  # Every turn is one answer of the engine to all ids before it, bit for bit.
  for member in members:
    at = 0
    for turn in member.turns:
      at += len(turn.context)
      asked = member.ids[:at].tolist()
      (done,) = [d for r, d in completions if r.tokens.tolist() == asked]
      for name in ("tokens", "logprobs", "versions"):
        assert np.array_equal(getattr(turn, name), getattr(done, name))
      at += len(turn.tokens)
    assert len(member.turns) == 3
  # A fresh forward pass of the learner agrees with the record.
  (packed,) = batch.pack(members, rows=6, length=32, version=0).batches
  assert packed.sampled.sum() == sum(len(d.tokens) for _, d in completions)
  _, layout = placement.Placement(colocated=True).layouts()
  score = functools.partial(
    learner.score_tokens,
    config=tiny.CONFIG,
    layout=layout,
    temperature=TEMPERATURE,
  )
  scored, *_ = jax.jit(score)(served.placed(0), None, packed)
  gap = np.abs(np.asarray(scored) - packed.behaviour)[packed.sampled]
  assert gap.max() < 1e-4  # 1e-5 is typical.


def test_the_same_episodes_are_played_again_the_same(served):
  async def scenario():
    async with agents.serving(served.engine, CHAT) as players:
      return [
        (await players.play(talker, the_episode(i), deadline_s=60.0))[0]
        for i in (1, 2, 1)
      ]

  one, other, again = served.run(scenario())
  assert one.ids.tolist() == again.ids.tolist()
  assert one.ids.tolist() != other.ids.tolist()


def test_weights_that_change_between_turns_are_told_token_by_token(served):
  async def agent(base_url, task):
    await talker(base_url, task)
    await served.publish("recompute")
    return await talker(base_url, task)

  before = served.version

  async def scenario():
    async with agents.serving(served.engine, CHAT) as players:
      return await players.play(agent, the_episode(), deadline_s=60.0)

  old, new = served.run(scenario())
  assert old.versions == [(before, old.num_sampled)]
  assert new.versions == [(before + 1, new.num_sampled)]


def test_an_agent_that_is_not_async_plays_in_a_thread(served):
  async def scenario():
    async with agents.serving(served.engine, CHAT) as players:
      plays = [
        players.play(plain, the_episode(i), deadline_s=60.0) for i in range(8)
      ]
      return await asyncio.gather(*plays)

  for (left,) in served.run(scenario()):
    assert (left.reward, left.fault) == (1.0, "")
    assert left.num_sampled > 0


def play(agent, deadline_s=20.0, step_s=0.0):
  async def scenario():
    engine = scripted_engine.ScriptedEngine(
      lambda request: [4, 1], lambda request, i: step_s
    )
    async with agents.serving(engine, CHAT) as players:
      left = await players.play(agent, the_episode(), deadline_s=deadline_s)
      return left, engine.stats()

  return asyncio.run(scenario())


def test_errors_of_the_client_are_faults_of_the_episode():
  async def agent(base_url, task):
    async with openai.AsyncOpenAI(base_url=base_url, api_key="x") as client:
      create = client.chat.completions.create
      user: list = [{"role": "user", "content": "a"}]
      await create(model="m", messages=user)
      await create(model="m", messages=user, temperature=-1.0)

  (left,), _ = play(agent)
  assert left.status is trajectory.Status.ENV_FAULT
  assert "agent raised BadRequestError" in left.fault
  assert left.num_sampled == 2


def test_an_agent_that_hangs_is_cut_off_and_its_request_aborted():
  (left,), stats = play(talker, deadline_s=0.5, step_s=30.0)
  assert left.status is trajectory.Status.ENV_FAULT
  assert "agent took over 0.5 s" in left.fault
  assert list(left.turns) == []
  assert stats.running <= 1  # The connection closes a moment later.


def test_a_thread_that_outlives_its_deadline_gets_no_more_answers():
  late, errors, over = threading.Event(), [], threading.Event()

  def agent(base_url, task):
    late.wait(20)
    try:
      plain(base_url, task)
    except openai.APIStatusError as error:
      errors.append(error.status_code)
    over.set()

  async def scenario():
    engine = scripted_engine.ScriptedEngine(lambda request: [4, 1])
    async with agents.serving(engine, CHAT) as players:
      (left,) = await players.play(agent, the_episode(), deadline_s=0.05)
      late.set()
      await asyncio.to_thread(over.wait, 20)
      return left, engine.requests

  left, requests = asyncio.run(scenario())
  assert "agent took over 0.05 s" in left.fault
  assert errors == [410]
  assert requests == []
