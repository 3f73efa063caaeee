"""The server as the real `openai` client sees it."""

import asyncio
import dataclasses
import json
import pathlib
import threading
from typing import Any

import numpy as np
import openai
import pytest

from launch.gateway import app as openai_app
from launch.gateway import openai_replies, session_record
from launch.http import access, admission
from models.chat import hf_chat
from rl.agents import answer_stream, sessions
from rl.data import trajectory
from rl.engine import contract
from rl.testing import scripted_engine
from tests.helpers import (
  chat_messages,
  machine_speed,
  markdown,
  openai_server,
)
from tests.helpers.openai_server import (
  ADD,
  AGENT,
  CALL,
  END,
  GO,
  HF,
  NO,
  ON,
  WORDS,
  YES,
)

# OpenAI's words, by which clients know a full context.
FULL = "this model's maximum context length is"
GUIDE = pathlib.Path(__file__).parents[3] / "docs/guides/serving.md"


@pytest.fixture(scope="module")
def tools():
  with openai_server.serve(HF) as server:
    yield server


@pytest.fixture(autouse=True)
def fresh(request):
  """Lets the engines answer "yes" at the start of every test."""
  for name in ("words", "tools"):
    if name in request.fixturenames:
      request.getfixturevalue(name).text = "yes"


def test_a_reply_has_the_ids_logprobs_and_versions_that_were_sampled(words):
  words.engine.version = 7
  reply = words.ask("go", client=words.client("plain"), logprobs=True)
  words.engine.version = 0
  assert reply.object == "chat.completion"
  assert reply.model == "tiny"
  assert reply.prompt_token_ids == [GO, AGENT]
  assert (reply.session, reply.temperature) == ("plain", 1.0)
  (choice,) = reply.choices
  assert (choice.message.content, choice.finish_reason) == ("yes", "stop")
  assert choice.token_ids == [YES, END]
  assert choice.token_logprobs == [-0.125, -0.25]
  assert choice.versions == [7, 7]
  told = [(entry.token, entry.logprob) for entry in choice.logprobs.content]
  assert told == [("yes", -0.125), ("<end>", -0.25)]
  usage = reply.usage
  assert (usage.prompt_tokens, usage.completion_tokens) == (2, 2)
  assert words.ask("go").choices[0].logprobs is None


def test_options_reach_the_engine(words):
  words.ask(
    *("go",),
    temperature=0.5,
    top_p=0.75,
    max_completion_tokens=3,
    max_tokens=4,
    seed=2**63 - 5,
    logit_bias={"5": -100, "6": 2},
    user="someone",
    frequency_penalty=0.0,
    extra_body={"top_k": 4, "min_p": 0.25},
  )
  request = words.engine.requests[-1]
  assert (request.temperature, request.top_p) == (0.5, 0.75)
  assert (request.top_k, request.min_p) == (4, 0.25)
  assert (request.max_tokens, request.seed) == (3, -5)
  assert request.bias is not None
  assert np.flatnonzero(request.bias).tolist() == [5, 6]
  assert request.bias[[5, 6]].tolist() == [-100.0, 2.0]
  assert request.stop_ids == (END,)


STRICT = {"type": "function", "function": {**ADD["function"], "strict": True}}


@pytest.fixture
def constrained(tools):
  """A server whose engine takes constraints, though it plays its script."""
  able = tools.engine.capabilities
  tools.engine.capabilities = dataclasses.replace(
    able, constraints=True, vocab_size=HF.vocab_size
  )
  yield tools
  tools.engine.capabilities = able


def test_a_forced_call_reaches_the_engine_as_a_mask(constrained):
  options = {"tools": [STRICT], "tool_choice": "required"}
  constrained.ask("go", **options)
  constraint = constrained.engine.requests[-1].constraint
  bits = np.frombuffer(constraint.compute_bitmask(), np.uint8)
  allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
  # The model may also think first.
  texts = {HF.token(int(i)) for i in allowed}
  assert {"<think>", "<tool_call>"} <= texts
  assert all("<think>".startswith(t) or t == "<tool_call>" for t in texts)
  constrained.ask("go", tools=[ADD])
  assert constrained.engine.requests[-1].constraint is None


@pytest.mark.parametrize(
  ("options", "param", "why"),
  [
    (
      {
        "tools": [
          {
            "type": "function",
            "function": {
              **STRICT["function"],
              "parameters": {"type": "object", "not": {}},
            },
          }
        ]
      },
      "tools",
      'tools[0].function.parameters: Unimplemented keys: ["not"]',
    ),
    (
      {"response_format": {"type": "json_object"}, "logit_bias": {"5": 1}},
      "logit_bias",
      "may forbid what",
    ),
  ],
)
def test_a_form_that_cannot_be_kept_is_refused(
  constrained, options, param, why
):
  with pytest.raises(openai.BadRequestError) as error:
    constrained.ask("go", **options)
  assert error.value.param == param
  assert why in error.value.message


@pytest.mark.parametrize(
  ("options", "param"),
  [
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"tools": [ADD], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [STRICT]}, "tools"),
  ],
)
def test_an_engine_without_masks_refuses_the_field_that_needs_them(
  tools, options, param
):
  with pytest.raises(openai.BadRequestError, match="this engine") as error:
    tools.ask("go", **options)
  assert error.value.param == param


def test_without_options_a_request_gets_all_the_room_and_a_seed_of_its_own(
  words,
):
  for _ in range(2):
    words.ask("go")
  one, two = words.engine.requests[-2:]
  assert one.max_tokens == words.engine.capabilities.max_length - 2
  assert one.seed != two.seed
  assert one.session != two.session
  assert one.bias is None


def test_a_stream_says_the_same_as_a_whole_reply(words):
  words.text = "yes no yes"
  stream = words.ask(
    *("go",),
    client=words.client("streamed"),
    stream=True,
    logprobs=True,
    stream_options={"include_usage": True},
  )
  *chunks, usage = list(stream)
  text = "".join(c.choices[0].delta.content or "" for c in chunks)
  assert text == "yes no yes"
  assert chunks[0].choices[0].delta.role == "assistant"
  last = chunks[-1]
  assert last.choices[0].finish_reason == "stop"
  assert last.choices[0].token_ids == [YES, NO, YES, END]
  assert last.choices[0].versions == [0] * 4
  assert last.prompt_token_ids == [GO, AGENT]
  assert last.session == "streamed"
  told = [
    entry.logprob
    for chunk in chunks
    if chunk.choices[0].logprobs
    for entry in chunk.choices[0].logprobs.content
  ]
  assert told == last.choices[0].token_logprobs == [-0.125, -0.25, -0.375, -0.5]
  assert len({chunk.id for chunk in chunks}) == 1
  assert usage.choices == []
  assert usage.usage.completion_tokens == 4


def _listed(content):
  return [
    [(other.token, other.logprob) for other in entry.top_logprobs]
    for entry in content
  ]


# See `ScriptedEngine`: beside each id those below it; the end is id 1.
TOP = [
  [("yes", -0.125), ("on", -1.125), ("go", -2.125)],
  [("no", -0.25), ("yes", -1.25), ("on", -2.25)],
  [("<end>", -0.375), ("<pad>", -1.375)],
]


def test_the_most_probable_tokens_are_listed_beside_each_one(words):
  words.text = "yes no"
  asked = {"logprobs": True, "top_logprobs": 3}
  reply = words.ask("go", **asked)
  assert _listed(reply.choices[0].logprobs.content) == TOP
  entries = [
    entry
    for chunk in words.ask("go", stream=True, **asked)
    if chunk.choices[0].logprobs
    for entry in chunk.choices[0].logprobs.content
  ]
  assert _listed(entries) == TOP
  (stopped,) = words.ask("go", stop="no", **asked).choices
  assert _listed(stopped.logprobs.content) == TOP[:2]
  create = words.client().completions.create
  for count in (1, 3):
    reply = create(model="any", prompt="go", logprobs=count)
    (choice,) = reply.choices
    listed = [list(top.items()) for top in choice.logprobs.top_logprobs]
    assert listed == [top[:count] for top in TOP]


def test_a_completion_lists_the_sampled_token_too_and_one_of_each_text(words):
  reply_format = openai_replies.ReplyFormat(
    name="one",
    chat=False,
    model="tiny",
    session="s",
    prompt=np.array([GO], np.int32),
    temperature=1.0,
    logprobs=True,
    codec=WORDS,
  )
  top = contract.TopLogprobs(
    ids=np.array([[NO, NO]], np.int32),
    logprobs=np.array([[-0.5, -1.0]], np.float32),
  )
  sampled = np.array([YES], np.int32), np.array([-2.0], np.float32)
  delta = answer_stream.AnswerDelta("yes", "", *sampled, top)
  event = json.loads(reply_format.chunk(0, delta).removeprefix(b"data: "))
  told = event["choices"][0]["logprobs"]
  assert told["top_logprobs"] == [{"no": -0.5, "yes": -2.0}]


def test_an_engine_that_lists_no_tokens_says_so(words):
  able = words.engine.capabilities
  words.engine.capabilities = dataclasses.replace(able, top_logprobs=0)
  with pytest.raises(openai.BadRequestError, match=r"must be in \[0, 0\]"):
    words.ask("go", logprobs=True, top_logprobs=1)
  words.engine.capabilities = able


def test_choices_are_sampled_apart_and_are_branches_of_the_session(words):
  client = words.client("choices")
  reply = words.ask("go", client=client, n=3)
  assert [choice.index for choice in reply.choices] == [0, 1, 2]
  assert len({r.seed for r in words.engine.requests[-3:]}) == 3
  assert reply.usage.completion_tokens == 6
  chunks = list(words.ask("go", client=client, n=2, stream=True))
  ends = [c.choices[0] for c in chunks if c.choices[0].finish_reason]
  assert sorted(choice.index for choice in ends) == [0, 1]
  _, told = words.send("GET", "/sessions/choices")
  assert len(told["trajectories"]) == 5
  assert (told["requests"], told["running"]) == (2, 0)


def test_an_agent_goes_on_with_the_message_it_was_given(words):
  client = words.client("turns")
  history = [{"role": "user", "content": "go"}]
  for _ in range(3):
    message = words.ask(*history, client=client).choices[0].message
    history += [message, {"role": "user", "content": "on"}]
  ids = words.engine.requests[-1].tokens.tolist()
  assert ids == [GO, AGENT, *[YES, END, ON, AGENT] * 2]
  status, left = words.send(
    "POST", "/sessions/turns/finish", {"reward": 0.5, "task_id": "t/1"}
  )
  assert status == 200
  (told,) = left["trajectories"]
  read = trajectory.trajectory_from_json(told)
  assert read.ids.tolist() == [*ids, YES, END]
  assert (read.reward, read.task_id, len(read.turns)) == (0.5, "t/1", 3)
  assert words.kept[-1].ids.tolist() == read.ids.tolist()
  with pytest.raises(openai.APIStatusError, match="finished") as error:
    words.ask("go", client=client)
  assert error.value.status_code == 410


def test_the_client_of_the_guide_plays_a_session(words):
  code = markdown.block(GUIDE, "openai.OpenAI")
  names: dict[str, Any] = {
    "address": words.address,
    "messages": [{"role": "user", "content": "go"}],
  }
  exec(code, names)
  assert names["reply"].session == "game-7"
  assert words.kept[-1].reward == 1


def test_a_header_names_the_session_too(words):
  headers = {"x-session-id": "headed"}
  for said in (("go",), ("go", "yes", "on")):
    reply = words.ask(*said, extra_headers=headers)
    assert reply.session == "headed"
  assert reply.prompt_token_ids == [GO, AGENT, YES, END, ON, AGENT]
  with pytest.raises(openai.BadRequestError, match="path names session other"):
    words.ask("go", client=words.client("other"), extra_headers=headers)


def test_stop_texts_cut_the_text_and_leave_the_ids_as_sampled(words):
  words.text = "yes no yes"
  client = words.client("stopped")
  for stream in (False, True):
    reply = words.ask("go", client=client, stop=["no"], stream=stream)
    if stream:
      chunks = [chunk.choices[0] for chunk in reply]
      text = "".join(choice.delta.content or "" for choice in chunks)
      choice = chunks[-1]
    else:
      (choice,) = reply.choices
      text = choice.message.content
    assert (text, choice.finish_reason) == ("yes ", "stop")
    assert choice.token_ids == [YES, NO]
  reply = words.ask("go", "yes ", "on", client=client)
  assert reply.prompt_token_ids == [GO, AGENT, YES, NO, ON, AGENT]


def test_a_length_that_is_reached_is_the_reason(words):
  words.text = "yes no"
  (choice,) = words.ask("go", max_tokens=1).choices
  assert (choice.finish_reason, choice.token_ids) == ("length", [YES])


def test_completions_go_on_with_text_or_ids(words):
  client = words.client("texts")
  create = client.completions.create
  reply = create(model="any", prompt="go on", logprobs=0)
  assert reply.object == "text_completion"
  (choice,) = reply.choices
  assert reply.prompt_token_ids == choice.prompt_token_ids == [GO, ON]
  assert choice.text == "yes"
  assert choice.logprobs.tokens == ["yes", "<end>"]
  assert choice.logprobs.token_logprobs == [-0.125, -0.25]
  ids = [*reply.prompt_token_ids, *choice.token_ids, GO]
  again = create(model="any", prompt=ids)
  assert again.prompt_token_ids == ids
  chunks = list(create(model="any", prompt=[ids], stream=True))
  assert "".join(chunk.choices[0].text for chunk in chunks) == "yes"
  assert chunks[-1].choices[0].token_ids == [YES, END]
  _, told = words.send("GET", "/sessions/texts")
  first, second = told["trajectories"]
  assert [turn["context"] for turn in first["turns"]] == [[GO, ON], [GO]]
  assert len(second["turns"]) == 1


def test_tools_are_shown_called_and_answered(tools):
  client = tools.client("tools")
  tools.text = f"<think>\nhm\n</think>\n\nwell {CALL}"
  reply = tools.ask("1 + 1?", client=client, tools=[ADD])
  (choice,) = reply.choices
  assert "Adds two numbers" in HF.decode(reply.prompt_token_ids)
  assert choice.finish_reason == "tool_calls"
  message = choice.message
  assert (message.content, message.reasoning_content) == ("well", "hm")
  (call,) = message.tool_calls
  assert (call.type, call.function.name) == ("function", "add")
  assert json.loads(call.function.arguments) == {"a": 1}
  result = {"role": "tool", "tool_call_id": call.id, "content": "2"}
  history = ({"role": "user", "content": "1 + 1?"}, message, result)
  tools.text = "two"
  more = tools.ask(*history, client=client, tools=[ADD])
  sampled = [*reply.prompt_token_ids, *choice.token_ids]
  assert more.prompt_token_ids[: len(sampled)] == sampled
  assert more.choices[0].message.content == "two"
  assert more.choices[0].finish_reason == "stop"
  _, told = tools.send("GET", "/sessions/tools")
  assert [len(t["turns"]) for t in told["trajectories"]] == [2]


def test_calls_without_tags_are_read_where_tools_are_shown():
  text = '{"name": "add", "parameters": {"a": 1}}'
  with openai_server.serve(chat_messages.chat_of_form("llama")) as server:
    server.text = text
    called = server.ask("go", tools=[ADD]).choices[0].message
    assert called.tool_calls[0].function.arguments == '{"a": 1}'
    assert called.content is None
    assert server.ask("go").choices[0].message.content == text


def test_streamed_calls_are_those_of_a_whole_reply(tools):
  tools.text = f"well {CALL}{CALL}"
  asked = {"client": tools.client("calls"), "tools": [ADD], "seed": 7}
  chunks = list(tools.ask("go", **asked, stream=True))
  text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
  assert text.strip() == "well"
  last = chunks[-1].choices[0]
  assert last.finish_reason == "tool_calls"
  names = [(c.index, c.function.name) for c in last.delta.tool_calls]
  assert names == [(0, "add"), (1, "add")]
  whole = tools.ask("go", **asked, n=2)
  calls = [call for one in whole.choices for call in one.message.tool_calls]
  assert len({call.id for call in (*calls, *last.delta.tool_calls)}) == 6


def test_tool_choice_and_parallel_calls(tools):
  tools.text = f"{CALL}{CALL}"
  none = tools.ask("go", tools=[ADD], tool_choice="none").choices[0]
  assert none.message.tool_calls is None
  assert none.message.content == tools.text
  one = tools.ask("go", tools=[ADD], parallel_tool_calls=False).choices[0]
  assert len(one.message.tool_calls) == 1
  assert HF.decode(one.token_ids).endswith("</tool_call>")


def test_ids_and_text_can_be_asked_for_as_of_vllm(words, tools):
  asked = {"model": "any", "messages": [{"role": "user", "content": "go on"}]}
  status, told = words.send("POST", "/sessions/any/tokenize", asked)
  assert (status, told["tokens"]) == (200, [GO, ON, AGENT])
  assert (told["count"], told["max_model_len"]) == (3, 1 << 16)
  assert (
    words.send("GET", "/sessions/any")[0] == 404
  )  # Nothing was asked in it.
  assert words.send("POST", "/tokenize", {"prompt": "no"})[1]["tokens"] == [NO]
  back = words.send("POST", "/detokenize", {"tokens": [GO, ON, END]})
  assert back == (200, {"prompt": "go on"})
  # With the chat of a model special tokens have their text.
  question = {**asked, "tools": [ADD]}
  _, whole = tools.send("POST", "/tokenize", question)
  assert whole["tokens"] == tools.ask("go on", tools=[ADD]).prompt_token_ids
  without = {**question, "add_generation_prompt": False}
  _, said = tools.send("POST", "/tokenize", without)
  opened = whole["tokens"][: said["count"]], whole["tokens"][said["count"] :]
  assert opened[0] == said["tokens"]
  _, back = tools.send("POST", "/detokenize", {"tokens": opened[1]})
  assert back == {"prompt": "<|im_start|>assistant\n"}


@pytest.mark.parametrize(
  ("path", "body", "told"),
  [
    ("tokenize", {}, "prompt is missing"),
    ("tokenize", {"prompt": ["go"]}, "must be of type text"),
    ("tokenize", {"prompt": "maybe"}, "'maybe'"),
    ("tokenize", {"messages": []}, "messages is empty"),
    ("tokenize", {"prompt": "go", "messages": []}, "prompt is unknown"),
    ("tokenize", {"prompt": "go", "add_special_tokens": True}, "not supported"),
    (
      "tokenize",
      {
        "messages": [{"role": "user", "content": "go"}],
        "add_generation_prompt": False,
      },
      "needs the chat template of a model",
    ),
    ("detokenize", {"tokens": [1, -1]}, "no id in [0, 262144)"),
    ("detokenize", {"tokens": [1 << 18]}, "no id in [0, 262144)"),
    ("detokenize", {"tokens": [True]}, "no id in [0, 262144)"),
    ("detokenize", {"tokens": [1], "skip": True}, "skip is unknown"),
  ],
)
def test_what_has_no_ids_or_no_text_is_a_bad_request(words, path, body, told):
  status, answer = words.send("POST", f"/{path}", body)
  assert status == 400
  assert told in answer["error"]["message"]


def test_the_model_and_the_health_can_be_asked_for(words):
  client = words.client()
  assert [model.id for model in client.models.list()] == ["tiny"]
  assert client.models.retrieve("any/name").id == "any/name"
  assert words.send("GET", "/health") == (200, {"status": "ok", "version": 0})


@pytest.fixture(scope="module")
def slow():
  """Takes five seconds per token, beyond its deadline for answers."""
  with openai_server.serve(WORDS, step_s=5.0, answer_s=0.3) as server:
    yield server


@pytest.mark.parametrize(
  ("options", "words_of_it", "param"),
  [
    ({"temperature": -1}, "temperature=-1.0 must be 0 or in", None),
    ({"top_p": 0}, "top_p=0.0 must be in (0, 1]", None),
    ({"max_tokens": 0}, "max_tokens=0 is below 1", None),
    ({"max_tokens": 1 << 16}, "leaves room for 65534", "messages"),
    ({"logit_bias": {"262144": 1}}, "must be below 262144", "logit_bias"),
    ({"tools": [ADD]}, "has no tools", "messages"),
  ],
)
def test_what_the_engine_or_the_chat_cannot_do_is_a_bad_request(
  words, options, words_of_it, param
):
  with pytest.raises(openai.BadRequestError) as error:
    words.ask("go", **options)
  body: Any = error.value.body
  assert words_of_it in body["message"]
  assert body["type"] == "invalid_request_error"
  assert body["param"] == param
  with pytest.raises(openai.BadRequestError):
    words.ask("go", stream=True, **options)
  assert words.ask("go").choices


@pytest.mark.parametrize(
  ("options", "out"), [({}, ""), ({"max_tokens": 1}, ", or lower max_tokens=1")]
)
def test_a_conversation_without_room_is_told_what_it_may_shorten(
  words, monkeypatch, options, out
):
  able = dataclasses.replace(words.engine.capabilities, max_length=2)
  monkeypatch.setattr(words.engine, "capabilities", able)
  with pytest.raises(openai.BadRequestError) as error:
    words.ask("go", **options)
  body: Any = error.value.body
  assert body["message"] == (
    f"{FULL} 2 tokens, and a conversation of 2 leaves room for 0; shorten "
    f"it{out}"
  )
  assert body["param"] == "messages"
  with pytest.raises(openai.BadRequestError) as error:
    words.client().completions.create(model="any", prompt=[GO, ON], **options)
  assert error.value.param == "prompt"


def test_words_without_an_id_are_a_bad_request(words):
  with pytest.raises(openai.BadRequestError, match="nearest is 'yes'"):
    words.ask("yess")


@pytest.mark.parametrize(
  ("method", "path", "body", "status", "text"),
  [
    ("POST", "/v1/chat/completions", b"{", 400, "not JSON"),
    ("POST", "/v1/chat/completions", b"[]", 400, "JSON array"),
    ("POST", "/v1/chat/completions", b"\xff", 400, "not JSON"),
    ("POST", "/v1/chat/completions", b"[" * 99_999, 400, "over 85536 values"),
    ("POST", "/v1/chat/completions", b'{"n": NaN}', 400, "NaN"),
    ("POST", "/v1/chat/completions", b'{"model":"\\ud800"}', 400, "not JSON"),
    ("POST", "/v1/embeddings", b"{}", 404, "Not Found"),
    ("GET", "/v1/completions", b"", 405, "Not Allowed"),
    ("GET", "/sessions/none", b"", 404, "no session none"),
    ("POST", "/sessions/none/finish", b"{}", 404, "no session none"),
    ("POST", "/sessions/x/finish", {"reward": "1"}, 400, "of type number"),
    ("POST", "/sessions/x/finish", {"status": "won"}, 400, "use completed"),
    ("POST", "/sessions/x/finish", {"rewrd": 1}, 400, "did you mean reward"),
    (
      *("POST", "/sessions/x/finish"),
      *({"reward": 1, "status": "env_fault"}, 400, "no reward"),
    ),
  ],
)
def test_errors_have_the_form_of_openai(
  words, method, path, body, status, text
):
  got, reply = words.send(method, path, body)
  assert got == status
  assert text in reply["error"]["message"]
  assert set(reply["error"]) == {"message", "type", "param", "code"}


def test_a_body_that_is_too_long_is_refused():
  with (
    openai_server.serve(WORDS, max_body=100) as server,
    pytest.raises(openai.APIStatusError, match="over 100 bytes") as error,
  ):
    server.ask("go " * 100)
  assert error.value.status_code == 413


class Spied(hf_chat.HfChat):
  """The chat of a model that keeps each text that it encodes."""

  encoded = []  # noqa: RUF012

  def text_ids(self, text):
    self.encoded.append(text)
    return super().text_ids(text)


@pytest.fixture(scope="module")
def short():
  """A server of conversations of 512 tokens."""
  chat = Spied(HF.tokenizer, HF.template, HF.stop_ids)
  with openai_server.serve(chat, max_length=512) as server:
    yield server


def _asking(content="go", **fields):
  said = {"role": "user", "content": content}
  return {"model": "any", "messages": [said], **fields}


LONG = 15_000_000
GONE = {"role": "user", "content": ""}


@pytest.mark.parametrize(
  ("path", "body", "status", "text"),
  [
    ("chat/completions", _asking(" " * LONG), 413, "over 163840 bytes"),
    ("completions", {"model": "m", "prompt": [1] * 5_000_000}, 413, "bytes"),
    # 512 tokens of 20 characters, and a space each.
    (
      *("chat/completions", _asking(" " * 20_000), 400),
      f"{FULL} 512 tokens, which have 10752 characters at most",
    ),
    (
      *("completions", {"model": "m", "prompt": "<" * 20_000}, 400),
      "shorten prompt",
    ),
    (
      *("chat/completions", _asking(messages=[{}] * 5000), 400),
      "messages has 5000 entries; send 4096 or fewer",
    ),
    (
      *("chat/completions", _asking(messages=[GONE] * 513), 400),
      f"{FULL} 512 tokens, which 513 messages cannot fit",
    ),
    (
      *("chat/completions", _asking(tools=[{}] * 600), 400),
      "tools has 600 entries; send 512 or fewer",
    ),
    (
      *("chat/completions", _asking(messages=[[]] * 30_000), 400),
      "over 20512 values",
    ),
    (
      *("chat/completions", _asking() | {"x" * 99_999: 1}, 400),
      f"{'x' * 253}... is unknown",
    ),
  ],
)
def test_a_request_that_cannot_fit_is_refused_before_it_is_encoded(
  short, path, body, status, text
):
  short.chat.encoded.clear()
  got, reply = short.send("POST", f"/v1/{path}", body)
  assert (got, short.chat.encoded) == (status, [])
  assert text in reply["error"]["message"]
  assert len(reply["error"]["message"]) <= 1000
  assert not len(short.sessions)


@pytest.mark.parametrize("field", ["name", "tool_call_id"])
def test_a_long_name_is_refused_and_opens_no_session(short, field):
  said = {"role": "tool", "content": "2", field: "x" * 100_000}
  body = _asking(messages=[said])
  status, reply = short.send("POST", "/v1/chat/completions", body)
  assert (status, reply["error"]["param"]) == (400, f"messages[0].{field}")
  assert "has 100000 characters; use 256 or fewer" in reply["error"]["message"]
  assert not len(short.sessions)


class Waiting(hf_chat.HfChat):
  """The chat of a model that encodes a text only when it may."""

  may = threading.Event()

  def text_ids(self, text):
    assert self.may.wait(machine_speed.scaled(20))
    return super().text_ids(text)


def test_others_are_served_while_a_text_is_encoded():
  chat = Waiting(HF.tokenizer, HF.template, HF.stop_ids)
  chat.may.set()
  with openai_server.serve(chat) as server:
    chat.may.clear()
    replies = []
    asking = threading.Thread(target=lambda: replies.append(server.ask("go")))
    asking.start()
    server.until(lambda: len(server.sessions) == 1)
    assert server.send("GET", "/health")[0] == 200
    assert not replies
    chat.may.set()
    asking.join(machine_speed.scaled(20))
    assert replies[0].choices


def test_encoding_has_the_deadline_of_the_answer_and_is_for_a_client():
  chat = Waiting(HF.tokenizer, HF.template, HF.stop_ids)
  chat.may.set()
  with openai_server.serve(chat, answer_s=0.3) as server:
    chat.may.clear()
    with pytest.raises(openai.InternalServerError, match=r"over 0\.3 s"):
      server.ask("go", client=server.client("late"))
    assert server.sessions.get("late").running == 0
    assert not server.engine.requests
    chat.may.set()
  with openai_server.serve(chat) as server:
    chat.may.clear()
    with pytest.raises(openai.APITimeoutError):
      server.ask("go", client=server.client("gone", timeout=0.2))
    server.until(lambda: not server.sessions.get("gone").running)
    chat.may.set()


def test_a_body_that_never_comes_is_refused_in_time():
  with (
    openai_server.serve(WORDS, body_s=0.05) as server,
    server.connect() as link,
  ):
    link.putrequest("POST", "/v1/completions")
    link.putheader("content-type", "application/json")
    link.putheader("content-length", "10")
    link.endheaders(b"{")
    reply = link.getresponse()
    assert reply.status == 408
    assert b"took over 0.05 s" in reply.read()


KEYS = ("first-key-of-sixteen", "second-key-of-sixteen")


@pytest.fixture(scope="module")
def keyed(tmp_path_factory):
  """A server that needs one of two keys."""
  path = tmp_path_factory.mktemp("keys") / "keys"
  path.write_text("\n".join(KEYS))
  rules = access.Access(keys=access.read_keys(path))
  with openai_server.serve(WORDS, rules=rules) as server:
    yield server


def test_a_session_belongs_to_the_key_that_opened_it(keyed):
  mine, other = (keyed.client("mine", api_key=key) for key in KEYS)
  assert keyed.ask("go", client=mine).session == "mine"
  with pytest.raises(openai.NotFoundError, match="no session mine is open"):
    keyed.ask("go", client=other)
  for method, path in (("GET", ""), ("POST", "/finish")):
    for key, status in ((KEYS[1], 404), (KEYS[0], 200)):
      sent = {"authorization": f"Bearer {key}"}
      got, _ = keyed.send(method, f"/sessions/mine{path}", {}, **sent)
      assert got == status
  # Nor is another told that it is over.
  with pytest.raises(openai.NotFoundError):
    keyed.ask("go", client=other)
  with pytest.raises(openai.APIStatusError, match="is finished"):
    keyed.ask("go", client=mine)


def test_without_a_key_nothing_is_answered_but_probes(keyed):
  with pytest.raises(openai.AuthenticationError) as error:
    keyed.ask("go", client=keyed.client(api_key="wrong"))
  assert error.value.code == "invalid_api_key"
  assert keyed.send("GET", "/v1/models")[0] == 401
  assert keyed.send("GET", "/health")[0] == 200
  status, told = keyed.send("POST", "/v1/messages", {})
  assert (status, told["type"]) == (401, "error")
  assert told["error"]["type"] == "authentication_error"


@pytest.mark.parametrize(
  ("headers", "status"),
  [
    ({"content-type": "text/plain"}, 415),
    ({"origin": "http://evil.test"}, 403),
    ({"host": "evil.test"}, 421),
    ({"host": "["}, 421),
  ],
)
def test_what_a_page_of_others_makes_a_browser_send_is_refused(
  words, headers, status
):
  before = len(words.engine.requests)
  got, _ = words.send("POST", "/v1/chat/completions", _asking(), **headers)
  assert (got, len(words.engine.requests)) == (status, before)


def test_a_session_that_cannot_be_recorded_stays_open(tmp_path):
  def full(branches):
    raise session_record.Unrecorded("no space")

  with openai_server.serve(WORDS) as server:
    server.ask("go", client=server.client("kept"))
    keep, server.sessions._keep = server.sessions._keep, full
    status, told = server.send("POST", "/sessions/kept/finish", {})
    assert (status, told["error"]["code"]) == (507, "unrecorded")
    server.sessions._keep = keep
    assert server.send("POST", "/sessions/kept/finish", {})[0] == 200


def test_a_stream_that_cannot_be_recorded_ends_with_an_error(monkeypatch):
  def full(*answer):
    raise session_record.Unrecorded("no space left")

  with openai_server.serve(WORDS) as server:
    monkeypatch.setattr(server.sessions, "record", full)
    with pytest.raises(openai.APIError, match="no space left"):
      list(server.ask("go", stream=True))


def test_more_answers_than_may_be_are_refused_and_may_be_tried_again():
  admitted = admission.Admission(max_answers=4)
  with openai_server.serve(WORDS, admitted=admitted, step_s=30.0) as server:
    client = server.client(timeout=machine_speed.scaled(60.0))
    asking = threading.Thread(target=server.ask, args=("go",), kwargs={"n": 3})
    asking.start()
    server.until(lambda: server.engine.stats().running == 3)
    # The request itself is the fourth.
    with pytest.raises(openai.RateLimitError, match="1 more must") as error:
      server.ask("go", client=client, n=2)
    assert int(error.value.response.headers["retry-after"]) > 0
    assert server.send("GET", "/health")[0] == 200
    server.engine.abort(None)
    asking.join(machine_speed.scaled(20))
    server.until(lambda: not admitted.running)


def test_a_server_that_drains_refuses_requests_and_grades_sessions():
  with openai_server.serve(WORDS) as server:
    server.ask("go", client=server.client("over"))
    assert server.send("GET", "/ready") == (200, {"status": "ready"})
    server.admitted.draining = True
    assert server.send("GET", "/ready")[0] == 503
    with pytest.raises(
      openai.InternalServerError, match="server ends"
    ) as error:
      server.ask("go")
    assert error.value.status_code == 503
    assert server.send("GET", "/sessions/over")[0] == 200
    assert server.send("POST", "/sessions/over/finish", {})[0] == 200


def test_metrics_are_counted(words):
  words.ask("go")
  with words.connect() as link:
    link.request("GET", "/metrics")
    reply = link.getresponse()
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    text = reply.read().decode()
  assert 'requests_total{path="/v1/chat/completions",status="200"}' in text
  assert "twinmesh_draining 0" in text


def test_answers_have_a_deadline(slow):
  for stream in (False, True):
    with pytest.raises(openai.InternalServerError, match=r"over 0\.3 s"):
      slow.ask("go", stream=stream)
    slow.until(lambda: slow.engine.stats().running == 0)
  assert not slow.kept


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_aborts_its_request(stream):
  with openai_server.serve(WORDS, step_s=30.0) as server:
    client = server.client("gone", timeout=0.2)
    with pytest.raises(openai.APITimeoutError):
      server.ask("go", client=client, n=2, stream=stream)
    server.until(lambda: server.engine.stats().running == 0)
    assert len(server.engine.requests) == 2
    _, told = server.send("GET", "/sessions/gone")
    assert (told["running"], told["trajectories"]) == (0, [])


def test_an_answer_that_the_engine_gives_up_is_a_fault_of_the_trajectory():
  with openai_server.serve(WORDS, step_s=30.0) as server:
    client, replies = server.client("ended"), []
    asking = threading.Thread(
      target=lambda: replies.append(server.ask("go", client=client))
    )
    asking.start()
    server.until(lambda: server.engine.stats().running)
    server.engine.abort(None)
    asking.join(machine_speed.scaled(10))
    assert replies[0].choices[0].finish_reason == "abort"
    _, left = server.send("POST", "/sessions/ended/finish", {"reward": 1.0})
    (told,) = left["trajectories"]
    assert (told["status"], told["reward"]) == ("engine_fault", None)


def test_a_session_that_is_finished_meanwhile_takes_no_answer():
  with openai_server.serve(WORDS, step_s=0.3) as server:
    for name, stream in (("over.1", False), ("over.2", True)):
      errors = []

      def ask(name=name, stream=stream, errors=errors):
        try:
          reply = server.ask("go", client=server.client(name), stream=stream)
          list(reply)
        except openai.APIError as error:
          errors.append(error)

      asking = threading.Thread(target=ask)
      asking.start()
      server.until(lambda: server.engine.stats().running)
      status, _ = server.send("POST", f"/sessions/{name}/finish", {})
      assert status == 200
      asking.join(machine_speed.scaled(10))
      assert "finished before its answer" in errors[0].message


def test_a_closed_engine_is_unavailable_and_not_asked_again():
  with openai_server.serve(WORDS) as server:
    asyncio.run(server.engine.close())
    with pytest.raises(openai.InternalServerError) as error:
      server.ask("go", client=server.client(max_retries=5))
    assert error.value.status_code == 503
    body: Any = error.value.body
    assert body["code"] == "engine_closed"


def test_one_temperature_may_be_that_of_all():
  with openai_server.serve(
    WORDS, temperature=0.5, one_temperature=True
  ) as server:
    for options in ({}, {"temperature": 0.9}):
      assert server.ask("go", **options).temperature == 0.5
      assert server.engine.requests[-1].temperature == 0.5


def test_an_engine_that_cannot_stop_where_answers_end_is_refused():
  one = scripted_engine.ScriptedEngine(lambda request: [])
  one.capabilities = dataclasses.replace(one.capabilities, max_stop_ids=0)
  with pytest.raises(ValueError, match="end with 1 ids; the engine takes 0"):
    openai_app.app(one, sessions.Sessions(WORDS))


@pytest.mark.parametrize(
  "how", [{"temperature": float("nan")}, {"answer_s": 0.0}, {"max_body": 0}]
)
def test_settings_that_cannot_work_are_refused(how):
  with pytest.raises(ValueError, match=next(iter(how))):
    openai_app.Serving(**how)
