"""A served model plays an environment."""

import asyncio

import pytest

from envs import base
from launch.gateway import player
from rl.rollout import environment_trial
from tests.helpers import openai_server

TASK = base.Task("sum/train/0", 0, "train", 0)
SAID = [base.Message("user", "1 + 2?")]


def answer(server, messages, tools=()):
  respond = player.player(f"{server.address}/v1", "", "none", max_tokens=60)
  question = environment_trial.Question(TASK, messages, tools, seed=3)

  async def ask():
    return await respond(question)

  return asyncio.run(ask())


@pytest.fixture(scope="module")
def server():
  with openai_server.serve(openai_server.HF) as server:
    yield server


def test_text_and_tool_calls_come_back(server):
  server.text = "three"
  assert answer(server, SAID) == base.Message("assistant", "three")
  server.text = openai_server.CALL
  said = answer(server, SAID, [openai_server.ADD])
  assert said == base.calling("add", a=1)


def test_the_server_is_shown_the_tools_and_the_whole_conversation(server):
  server.text = "three"
  call = base.ToolCall("add", '{"a": 1}')
  messages = [
    *SAID,
    base.Message("assistant", "", (call,)),
    base.Message("tool", "it is 3", name="add"),
  ]
  answer(server, messages, [openai_server.ADD])
  request = server.engine.requests[-1]
  shown = openai_server.HF.decode(request.tokens)
  assert "Adds two numbers." in shown
  assert '{"name": "add", "arguments": {"a": 1}}' in shown
  assert shown.index("1 + 2?") < shown.index("it is 3")
  assert (request.max_tokens, request.seed) == (60, 3)


def test_results_answer_calls_in_order_and_keep_ids_of_their_own():
  calls = (base.ToolCall("a", "{}"), base.ToolCall("b", "{}", id="own"))
  shown = player.conversation(
    [
      base.Message("assistant", "", calls),
      base.Message("tool", "1"),
      base.Message("tool", "2"),
      base.Message("tool", "3", tool_call_id="given"),
    ]
  )
  assert [call["id"] for call in shown[0]["tool_calls"]] == ["call_0_0", "own"]
  ids = [message["tool_call_id"] for message in shown[1:]]
  assert ids == ["call_0_0", "own", "given"]
