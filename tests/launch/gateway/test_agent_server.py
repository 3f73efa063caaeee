"""Agents written against the `openai` package, played over HTTP."""

import asyncio
import contextlib
import dataclasses
import http.client
import urllib.parse
from typing import Any

import openai
import pytest

from envs import base
from launch.gateway import agent_server, deadline
from rl import experiment
from rl.agents import agent_player
from rl.data import trajectory
from tests.helpers import agents_under_test as agents
from tests.helpers import machine_speed
from tests.helpers import players_under_test as players

pytestmark = pytest.mark.process  # Its server listens on a port.
LIMITS = dataclasses.replace(players.LIMITS, group_size=2, step_s=20.0)


def play_group(play, served=None, **limits):
  """Plays a group of agents over HTTP, in real time."""

  async def run():
    source = agents.Source(play=play)
    playing = players.player(
      source, served, limits=dataclasses.replace(LIMITS, **limits)
    )
    plays = agent_player.AgentPlayer(
      playing.router, players.CHAT, agent_server.listen
    )
    playing = dataclasses.replace(playing, agents=plays)
    try:
      group = await players.begin(playing).run()
      await players.closed(playing)
      return group.trajectories
    finally:
      await plays.close()

  return asyncio.run(run())


@contextlib.asynccontextmanager
async def client(endpoint, **settings):
  url, key = endpoint.openai_url, endpoint.key
  async with openai.AsyncOpenAI(base_url=url, api_key=key, **settings) as one:
    yield one


async def talker(_, endpoint, task):
  """Asks twice, with its whole history as text, the second time in a stream."""
  async with client(endpoint) as one:
    said: list[Any] = [{"role": "user", "content": "go"}]
    create = one.chat.completions.create
    reply: Any = await create(model="gpt-4o", messages=said, temperature=0.3)
    # Whatever it asks for, it is told the temperature of the run.
    assert reply.temperature == LIMITS.temperature
    said += [reply.choices[0].message, {"role": "user", "content": "on"}]
    stream = await create(model="gpt-4o", messages=said, stream=True)
    text = "".join(
      [chunk.choices[0].delta.content or "" async for chunk in stream]
    )
  return float(text == "yes")


def test_an_unchanged_agent_is_played_token_for_token():
  for played in play_group(talker):
    assert (played.reward, played.fault) == (1.0, "")
    assert played.ids.tolist() == [3, 2, 5, 1, 4, 2, 5, 1]


def test_an_answer_has_at_least_the_time_that_the_run_waits(monkeypatch):
  asked, after = [], deadline.Deadline.after
  monkeypatch.setattr(
    *(deadline.Deadline, "after"),
    lambda answer_s: asked.append(answer_s) or after(answer_s),
  )
  play_group(talker)
  assert len(asked) == 4
  assert min(asked) > experiment.Experiment.progress_timeout_s


def test_a_refused_answer_is_an_error_that_the_client_knows():
  async def too_often(_, endpoint, task):
    said: Any = [{"role": "user", "content": "go"}]
    async with client(endpoint, max_retries=0) as one:
      ask = one.chat.completions.create
      await ask(model="m", messages=said)
      with pytest.raises(openai.BadRequestError, match="has 1 answers"):
        await ask(model="m", messages=said)
    return 0.0

  for played in play_group(too_often, max_turns=1):
    assert played.status is trajectory.Status.TRUNCATED


def test_a_conversation_that_cannot_fit_cuts_the_episode():
  async def too_long(_, endpoint, task):
    said: Any = [{"role": "user", "content": "go"}]
    async with client(endpoint, max_retries=0) as one:
      ask = one.chat.completions.create
      await ask(model="m", messages=said)
      for length in (50_000, 1_000_000):
        said[0]["content"] = "go " * length
        with pytest.raises(openai.APIStatusError):
          await ask(model="m", messages=said)
    return 1.0

  for played in play_group(too_long):
    assert played.status is trajectory.Status.TRUNCATED
    assert played.num_sampled == 2


def post(url, body):
  """Returns the status and the text of a reply, whatever is sent."""
  where = urllib.parse.urlsplit(url)
  link = http.client.HTTPConnection(
    where.netloc, timeout=machine_speed.scaled(20)
  )
  with contextlib.closing(link):
    link.request("POST", f"{where.path}/v1/chat/completions", body)
    reply = link.getresponse()
    return reply.status, reply.read().decode()


async def junk(_, endpoint, task):
  """Sends what no client sends."""
  for body in (b"", b"{", b"[]", b"\xff", b'{"messages": 1}', b"[" * 10**5):
    status, _ = await asyncio.to_thread(post, endpoint.url, body)
    assert status == 400
  body = b'{"model": "m", "messages": [{"role": "user", "content": "go"}]}'
  other = endpoint.url.replace(endpoint.key, "other")
  status, text = await asyncio.to_thread(post, other, body)
  assert (status, "no agent plays" in text) == (400, True)
  status, _ = await asyncio.to_thread(post, endpoint.url, body)
  assert status == 200
  return 0.5


def test_junk_is_refused_and_harms_nobody():
  for played in play_group(junk):
    assert (played.reward, played.fault) == (0.5, "")
    assert played.num_sampled == 2


async def leaves_in_the_middle(_, endpoint, task):
  """Hangs up while its answer is sampled, and ends."""
  async with client(endpoint, timeout=0.3, max_retries=0) as one:
    ask = one.chat.completions.create
    said: Any = [{"role": "user", "content": "go"}]
    with pytest.raises(openai.APITimeoutError):
      await ask(model="m", messages=said)
  return 1.0


def test_an_agent_that_hangs_up_has_no_answer():
  slow = players.engine(delay_s=lambda priority: 30.0)
  for played in play_group(leaves_in_the_middle, slow):
    assert played.status is trajectory.Status.ENV_FAULT
    assert "asked for no answer" in played.fault


def test_without_a_server_an_agent_is_a_fault_that_says_so():
  async def run():
    playing = players.player(agents.Source(play=talker), limits=LIMITS)
    return (await players.begin(playing).run()).trajectories

  for played in asyncio.run(run()):
    assert played.status is trajectory.Status.ENV_FAULT
    assert "needs a run's server" in played.fault


def test_the_endpoint_is_where_clients_look():
  endpoint = base.Endpoint("http://127.0.0.1:1/sessions/me", "me")
  assert endpoint.openai_url == "http://127.0.0.1:1/sessions/me/v1"
