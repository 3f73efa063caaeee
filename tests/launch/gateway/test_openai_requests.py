"""Bodies of requests: read in full, or refused by the name of the field."""

import json

import pytest

from envs import base
from launch.gateway import openai_requests
from launch.http import json_fields
from rl.data import trajectory

USER = {"role": "user", "content": "go"}
ADD = {"type": "function", "function": {"name": "add"}}
CALL = {
  "id": "call_0",
  "type": "function",
  "function": {"name": "add", "arguments": "{}"},
}


INTEGERS = {"type": "object", "properties": {"a": {"type": "integer"}}}


def tool(name, **fields):
  return {"type": "function", "function": {"name": name, **fields}}


def allowed(mode, *names):
  tools = [tool(name) for name in names]
  return {
    "type": "allowed_tools",
    "allowed_tools": {"mode": mode, "tools": tools},
  }


def chat(**body):
  return openai_requests.chat_query({"messages": [USER]} | body)


def text(**body):
  return openai_requests.text_query({"prompt": "go"} | body)


def test_what_is_left_out_or_null_has_its_default():
  every = chat(temperature=None, tools=None, stop=None, seed=None)
  assert every == chat()
  sampling = every.sampling
  assert (sampling.temperature, sampling.max_tokens) == (None, None)
  assert (sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 0, 0.0)
  assert (sampling.choices, sampling.stop, sampling.seed) == (1, (), None)
  flags = (sampling.stream, sampling.include_usage, sampling.logprobs)
  assert not any((*flags, every.calls, every.one_call))


@pytest.mark.parametrize("thought", ["reasoning_content", "reasoning"])
def test_messages_keep_all_that_a_model_is_shown(thought):
  parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
  said = [
    {"role": "developer", "content": "be kind"},
    {"role": "user", "content": parts, "name": "ann"},
    {
      "role": "assistant",
      "content": None,
      "tool_calls": [CALL],
      "refusal": None,
      "annotations": [],
      # As litellm and vLLM have them.
      "provider_specific_fields": {"refusal": None},
      thought: "hm",
    },
    {"role": "tool", "content": "2", "tool_call_id": "call_0"},
  ]
  call = base.ToolCall("add", "{}", "call_0")
  assert chat(messages=said).messages == (
    base.Message("system", "be kind"),
    base.Message("user", "ab", name="ann"),
    base.Message("assistant", "", (call,), reasoning="hm"),
    base.Message("tool", "2", tool_call_id="call_0"),
  )


@pytest.mark.parametrize(
  ("body", "read"),
  [
    ({"stop": "x"}, {"stop": ("x",)}),
    ({"stop": ["x", "y"]}, {"stop": ("x", "y")}),
    ({"temperature": 1}, {"temperature": 1.0}),
    ({"logit_bias": {"7": -3, "0": 2.5}}, {"bias": {7: -3.0, 0: 2.5}}),
    ({"max_tokens": 9, "max_completion_tokens": 4}, {"max_tokens": 4}),
    ({"logprobs": True, "top_logprobs": 0}, {"logprobs": True}),
    ({"logprobs": True, "top_logprobs": 20}, {"top_logprobs": 20}),
    (
      {"stream": True, "stream_options": {"include_usage": True}},
      {"stream": True, "include_usage": True},
    ),
  ],
)
def test_options_are_read(body, read):
  sampling = chat(**body).sampling
  assert {name: getattr(sampling, name) for name in read} == read


@pytest.mark.parametrize(
  "harmless",
  [
    {"user": "u", "safety_identifier": "s"},
    {"frequency_penalty": 0, "presence_penalty": 0.0},
    {"response_format": {"type": "text"}, "modalities": ["text"]},
    {"service_tier": "auto", "store": False},
    {"stream": True, "stream_options": {"include_obfuscation": False}},
    {"return_token_ids": True, "prompt_cache_key": "p"},
    {"metadata": {"a": "b"}},
    {"top_k": -1, "repetition_penalty": 1.0, "min_tokens": 0},
    {"skip_special_tokens": True, "include_stop_str_in_output": False},
    {"ignore_eos": False, "spaces_between_special_tokens": False},
    {"tool_choice": "auto", "parallel_tool_calls": True},
  ],
)
def test_options_that_change_nothing_are_taken(harmless):
  stream = harmless.get("stream", False)
  assert chat(**harmless) == chat(stream=stream)


@pytest.mark.parametrize(
  ("body", "param", "words"),
  [
    ({"temprature": 1}, "temprature", "did you mean temperature?"),
    ({"prompt": "go"}, "prompt", "is unknown"),
    ({"frequency_penalty": 0.5}, "frequency_penalty", "not supported"),
    ({"store": True}, "store", "not supported"),
    ({"store": 0}, "store", "not supported"),
    ({"best_of": True}, "best_of", "not supported"),
    ({"audio": {"voice": "b"}}, "audio", "is unknown"),
    ({"functions": [ADD]}, "functions", "is unknown"),
    ({"response_format": "text"}, "response_format", "of type object"),
    (
      {"response_format": {"type": "xml"}},
      "response_format.type",
      '"xml": use',
    ),
    (
      {"response_format": {"type": "json_schema"}},
      "response_format.json_schema",
      "missing",
    ),
    (
      {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x"}}
      },
      "response_format.json_schema.schema",
      "missing",
    ),
    ({"model": 5}, "model", "must be of type text"),
    ({"messages": []}, "messages", "empty"),
    ({"messages": None}, "messages", "missing"),
    ({"messages": "go"}, "messages", '"go" must be of type array'),
    ({"messages": ["go"]}, "messages[0]", "JSON text"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
    ({"messages": [{"role": "bot"}]}, "messages[0].role", "use system"),
    ({"messages": [USER | {"tool_calls": [CALL]}]}, "messages[0]", "of user"),
    ({"messages": [USER | {"audio": 1}]}, "messages[0].audio", "cannot be"),
    ({"messages": [USER | {"reasoning": "hm"}]}, "messages[0].reasoning", "be"),
    (
      {"messages": [USER | {"content": [{"type": "image_url"}]}]},
      "messages[0].content",
      '"image_url": only text parts',
    ),
    ({"tools": [{"type": "custom"}]}, "tools[0]", "only functions"),
    (
      {"tools": [{"type": "function", "function": {}}]},
      "tools[0].function.name",
      "missing",
    ),
    (
      {"tools": [tool("add", strict=1)]},
      "tools[0].function.strict",
      "1 must be of type boolean",
    ),
    (
      {"tools": [tool("add", strict=True, parameters={"type": "array"})]},
      "tools[0].function.parameters",
      'type="array": arguments are an object',
    ),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    (
      {"tool_choice": tool("ad"), "tools": [ADD]},
      "tool_choice",
      "did you mean add?",
    ),
    ({"tool_choice": "any", "tools": [ADD]}, "tool_choice", "is unknown; use"),
    ({"tool_choice": {}, "tools": [ADD]}, "tool_choice", "is unknown; use"),
    (
      {"tool_choice": {"type": "allowed_tools"}, "tools": [ADD]},
      *("tool_choice.allowed_tools", "missing"),
    ),
    (
      {"tool_choice": allowed("auto", "ad"), "tools": [ADD]},
      *("tool_choice", '"ad" is none of the tools; did you mean add?'),
    ),
    (
      {"tool_choice": allowed("auto"), "tools": [ADD]},
      *("tool_choice.allowed_tools.tools", "name one or more"),
    ),
    (
      {"tool_choice": allowed("any", "add"), "tools": [ADD]},
      *("tool_choice.allowed_tools.mode", "use auto or required"),
    ),
    ({"return_token_ids": 1}, "return_token_ids", "not supported"),
    ({"n": 0}, "n", "must be in [1, 128]"),
    ({"n": True}, "n", "true must be of type integer"),
    ({"n": 1.0}, "n", "1.0 must be of type integer"),
    ({"temperature": "hot"}, "temperature", "must be of type number"),
    ({"temperature": 2**53}, "temperature", "must be of type number"),
    ({"stop": 0}, "stop", "must be of type text or array"),
    ({"stop": ["a", ""]}, "stop", "none of them empty"),
    ({"stop": ["a"] * 17}, "stop", "up to 16"),
    ({"top_logprobs": 5}, "top_logprobs", "needs logprobs=true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "in [0, 20]"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "in [0, 20]"),
    ({"logprobs": 1}, "logprobs", "must be of type boolean"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "map ids"),
    ({"logit_bias": {"01": 1}}, "logit_bias", "map ids"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "[-100, 100]"),
    ({"logit_bias": {"5": None}}, "logit_bias", "map ids"),
    ({"stream_options": {"x": 1}}, "stream_options", "needs stream=true"),
    (
      {"stream": True, "stream_options": {"include_obfuscation": True}},
      "stream_options.include_obfuscation",
      "is not supported",
    ),
  ],
)
def test_what_is_wrong_or_not_to_be_had_is_refused_by_name(body, param, words):
  with pytest.raises(json_fields.BadRequest) as error:
    chat(**body)
  assert error.value.param == param
  assert words in str(error.value)


STRICT = tool("sum", strict=True, parameters=INTEGERS)
FORMAT = {"type": "json_schema", "json_schema": {"schema": INTEGERS}}
ONE = {"tool_choice": "required", "parallel_tool_calls": False}


@pytest.mark.parametrize(
  ("body", "functions", "content", "call", "one_call"),
  [
    ({"tools": [STRICT, ADD]}, "sum add", "", False, False),
    ({"tools": [ADD], "tool_choice": "required"}, "add", "", True, False),
    ({"tools": [ADD], **ONE}, "add", "", True, True),
    ({"tools": [STRICT, ADD], "tool_choice": ADD}, "add", "", True, True),
    (
      {"tools": [STRICT, ADD], "tool_choice": allowed("auto", "add")},
      *("add", "", False, False),
    ),
    (
      {
        "tools": [STRICT, ADD],
        "tool_choice": allowed("required", "add", "sum"),
      },
      *("sum add", "", True, False),
    ),
    ({"response_format": {"type": "json_object"}}, "", "any", False, False),
    ({"response_format": FORMAT}, "", "integers", False, False),
    (
      {"response_format": FORMAT, "tools": [STRICT], "tool_choice": "none"},
      *("", "integers", False, False),
    ),
    (
      {"response_format": FORMAT, "tools": [ADD]},
      *("add", "integers", False, False),
    ),
  ],
)
def test_an_answer_has_the_form_that_is_asked_for(
  body, functions, content, call, one_call
):
  form = chat(**body).grammar
  assert form is not None
  assert [name for name, _ in form.functions] == functions.split()
  integers, anything = json.dumps(INTEGERS), '{"type": "object"}'
  for name, schema in form.functions:
    # Only strict functions have their own schema.
    assert schema.text == (integers if name == "sum" else anything)
  texts = {"any": anything, "integers": integers}
  assert (form.content and form.content.text) == texts.get(content)
  assert (form.call, form.one_call) == (call, one_call)


@pytest.mark.parametrize(
  "body",
  [
    {"tools": [ADD]},
    {"tools": [STRICT], "tool_choice": "none"},
    {"tools": [ADD], "tool_choice": allowed("auto", "add")},
    {"response_format": {"type": "text"}},
  ],
)
def test_other_answers_are_free(body):
  assert chat(**body).grammar is None


def test_a_strict_function_without_parameters_takes_none():
  form = chat(tools=[tool("go", strict=True)]).grammar
  assert form is not None
  assert '"additionalProperties": false' in form.functions[0][1].text


@pytest.mark.parametrize(
  ("prompt", "read"),
  [
    ("go", "go"),
    (["go"], "go"),
    ([3], (3,)),
    ([3, 4], (3, 4)),
    ([[3, 4]], (3, 4)),
  ],
)
def test_a_prompt_is_one_text_or_the_ids_of_one(prompt, read):
  assert text(prompt=prompt).prompt == read


@pytest.mark.parametrize(
  ("body", "param"),
  [
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ["go", "on"]}, "prompt"),
    ({"prompt": [[3], [4]]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [2**31]}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"echo": True}, "echo"),
    ({"suffix": "on"}, "suffix"),
    ({"best_of": 2}, "best_of"),
    ({"messages": [USER]}, "messages"),
  ],
)
def test_a_completion_refuses_what_it_cannot_do(body, param):
  with pytest.raises(json_fields.BadRequest) as error:
    text(**body)
  assert error.value.param == param


def test_an_ending_is_that_of_a_trajectory():
  ending = openai_requests.ending(
    {"reward": 1, "parts": {"style": 0.5}, "task_id": "t", "index": 2}
  )
  assert (ending.reward, ending.parts) == (1.0, {"style": 0.5})
  assert (ending.task_id, ending.group_id, ending.index) == ("t", 0, 2)
  assert openai_requests.ending({}).status is trajectory.Status.COMPLETED
  for body in ({"reward": 10**40}, {"parts": {"x": "y"}}, {"index": "1"}):
    with pytest.raises(json_fields.BadRequest):
      openai_requests.ending(body)


def test_values_are_shown_in_short():
  assert json_fields.shown("x" * 200) == f'"{"x" * 76}...'
  deep = value = []
  for _ in range(100_000):
    value.append([])
    value = value[0]
  assert json_fields.shown(deep) == "array nested too deeply"
