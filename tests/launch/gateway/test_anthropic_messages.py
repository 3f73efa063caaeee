"""The Messages API, asked by an unchanged client of the `anthropic` package."""

import importlib
from typing import Any

import pytest

from launch.gateway import anthropic_messages
from launch.http import json_fields
from tests.helpers import openai_server

pytestmark = pytest.mark.process  # Its server listens on a port.
HF, CALL = openai_server.HF, openai_server.CALL
ADD = {
  "name": "add",
  "description": "Adds.",
  "input_schema": {"type": "object"},
}


def package():
  """Returns `anthropic`: two seconds of imports, left to who runs this file."""
  return importlib.import_module("anthropic")


@pytest.fixture(scope="module")
def served():
  with openai_server.serve(HF) as server:
    yield server


def client(server, session="", **settings):
  path = f"/sessions/{session}" if session else ""
  return package().Anthropic(
    base_url=server.address + path,
    api_key="none",
    **{"max_retries": 0, "timeout": 20.0, **settings},
  )


def ask(server, *messages, session="", **fields):
  """Returns the reply to turns of the user and the assistant."""
  roles = ("user", "assistant")
  said = [{"role": roles[i % 2], "content": m} for i, m in enumerate(messages)]
  fields = {"model": "any", "max_tokens": 200, "messages": said, **fields}
  return client(server, session).messages.create(**fields)


def test_an_answer_has_its_text_its_ids_and_its_reason(served):
  served.text = "Paris."
  reply = ask(served, "Capital?", system="Be brief.")
  assert [block.to_dict() for block in reply.content] == [
    {"type": "text", "text": "Paris."}
  ]
  assert (reply.stop_reason, reply.stop_sequence) == ("end_turn", None)
  assert reply.token_ids == HF.encode_answer("Paris.").tolist()
  request = served.engine.requests[-1]
  assert reply.prompt_token_ids == request.tokens.tolist()
  assert reply.usage.output_tokens == len(reply.token_ids)
  assert reply.usage.input_tokens == len(request.tokens)
  shown = "".join(map(HF.token, reply.prompt_token_ids))
  assert "Be" in shown


def test_a_tool_is_called_and_its_result_goes_on_in_the_same_branch(served):
  served.text = f"<think>\nAdd.\n</think>\n\nLet me see.\n{CALL}"
  reply = ask(served, "1+1?", session="tools", tools=[ADD])
  thought, text, call = reply.content
  assert (thought.type, thought.thinking) == ("thinking", "Add.")
  assert (text.type, text.text) == ("text", "Let me see.")
  assert (call.type, call.name, call.input) == ("tool_use", "add", {"a": 1})
  assert reply.stop_reason == "tool_use"
  result = {"type": "tool_result", "tool_use_id": call.id, "content": "2"}
  served.text = "Two."
  last = ask(
    served,
    "1+1?",
    reply.content,
    [result, {"type": "text", "text": "So?"}],
    session="tools",
    tools=[ADD],
  )
  # What was sampled is followed by the new messages, and is not encoded anew.
  before = reply.prompt_token_ids + reply.token_ids
  assert last.prompt_token_ids[: len(before)] == before
  assert last.content[0].text == "Two."
  assert len(served.sessions.get("tools")._heads) == 1


def test_a_stream_adds_up_to_the_whole_answer(served):
  served.text = f"<think>\nHm.\n</think>\n\nSee:\n{CALL}\n{CALL}"
  asked = {
    "model": "any",
    "max_tokens": 200,
    "messages": [{"role": "user", "content": "1+1?"}],
    "tools": [ADD],
  }
  whole = client(served).messages.create(**asked)
  with client(served).messages.stream(**asked) as stream:
    kinds = [event.type for event in stream]
    final = stream.get_final_message()
  assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")

  def without_ids(message):
    return [
      {k: str(v).rstrip() for k, v in block.to_dict().items() if k != "id"}
      for block in message.content
    ]

  assert [block.type for block in whole.content] == [
    *("thinking", "text"),
    *("tool_use", "tool_use"),
  ]
  # White space before a call is streamed before the call is seen.
  assert without_ids(final) == without_ids(whole)
  assert final.stop_reason == "tool_use"
  assert final.usage.output_tokens == whole.usage.output_tokens


def test_a_stop_sequence_and_the_limit_of_tokens_are_told(served):
  served.text = "one two three"
  reply = ask(served, "Count.", stop_sequences=["three", " two"])
  assert reply.content[0].text == "one"
  assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", " two")
  reply = ask(served, "Count.", max_tokens=1)
  assert reply.stop_reason == "max_tokens"


@pytest.mark.parametrize(
  ("fields", "words"),
  [
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "no tools of its"),
    ({"tool_choice": {"type": "some"}}, "use auto, any, none or tool"),
    ({"extra_body": {"max_token": 3}}, "max_token is unknown.*max_tokens"),
    ({"system": [{"type": "image"}]}, r"system\[0\].*only text"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "use user or assistant"),
    ({"messages": []}, "messages is empty"),
  ],
)
def test_what_cannot_be_done_is_refused_by_name(served, fields, words):
  with pytest.raises(package().BadRequestError, match=words) as caught:
    ask(served, "Hi", **fields)
  body: Any = caught.value.body
  assert body["type"] == "error"


@pytest.mark.parametrize("begun", ["Par", [{"type": "text", "text": "Par"}]])
def test_an_answer_that_was_begun_is_refused_not_dropped(served, begun):
  before = len(served.engine.requests)
  with pytest.raises(
    package().BadRequestError, match="end with a message of the user"
  ) as caught:
    ask(served, "Capital?", begun)
  body: Any = caught.value.body
  assert body["error"]["param"] == "messages[1].role"
  assert len(served.engine.requests) == before


@pytest.mark.parametrize(
  ("content", "where"),
  [
    ([{"type": "image", "source": {}}], r"content\[0\]"),
    ([{"type": "tool_result"}], "tool_use_id"),
    ([{"type": 3}], "type=3"),
    (["text"], "is a JSON text; send an object"),
    (None, "content is missing"),
  ],
)
def test_blocks_that_are_wrong_are_named(content, where):
  body = {"model": "m", "max_tokens": 1, "messages": []}
  body["messages"] = [{"role": "user", "content": content}]
  with pytest.raises(json_fields.BadRequest, match=where):
    anthropic_messages.chat_body(body)


def test_choices_of_tools_are_those_of_the_other_api():
  def asked(**choice):
    body = {"model": "m", "max_tokens": 1, "tools": [ADD], "messages": []}
    body = anthropic_messages.chat_body(body | {"tool_choice": choice})
    return body["tool_choice"], body["parallel_tool_calls"]

  assert asked(type="any") == ("required", True)
  assert asked(type="auto", disable_parallel_tool_use=True) == ("auto", False)
  named = {"type": "function", "function": {"name": "add"}}
  assert asked(type="tool", name="add") == (named, True)
