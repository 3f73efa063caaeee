import json
import time

import pytest

from models.chat import call_formats, tool_calls
from tests.helpers import machine_speed

KINDS = {
  "city": {"type": "string"},
  "x": {"type": "array"},
  "y": {"anyOf": [{"type": "string"}, {"type": "null"}]},
  "n": {"type": "number"},
  "ok": {"type": "boolean"},
  "mode": {"enum": [1, 2]},
  "one": {"const": 1},
}
TOOLS = [
  {
    "type": "function",
    "function": {"name": name, "parameters": {"properties": KINDS}},
  }
  for name in ("weather", "f")
]


def block(text):
  return f"<tool_call>\n{text}\n</tool_call>"


def call(name, **arguments):
  return json.dumps({"name": name, "arguments": arguments})


def test_an_answer_is_taken_apart():
  answer = tool_calls.parse(
    "<think>\nwarm?\n</think>\n\nBoth.\n"
    + block(call("weather", city="Ulm"))
    + "\n"
    + block('{"arguments": {"x": [1, 2.5, null], "y": "\\u00e9"}, "name": "f"}')
  )
  assert answer.reasoning == "warm?"
  assert answer.content == "Both."
  # Arguments are JSON again, of the values that were read.
  assert answer.tool_calls == (
    tool_calls.Call("weather", '{"city": "Ulm"}'),
    tool_calls.Call("f", '{"x": [1, 2.5, null], "y": "\u00e9"}'),
  )
  assert {found.id for found in answer.tool_calls} == {None}


@pytest.mark.parametrize(
  "answer",
  [
    tool_calls.Answer("Both."),
    tool_calls.Answer("", (tool_calls.Call("f", "{}"),)),
    tool_calls.Answer("", (tool_calls.Call("f", "{}"),), "hm"),
    tool_calls.Answer(
      "Both.",
      (
        tool_calls.Call(
          "weather", '{"city": "Ulm </tool_call>", "z": "</function_calls>"}'
        ),
        tool_calls.Call("f", '{"x": [1, 2.5, null], "y": "\u00e9"}'),
      ),
      "warm?\nyes",
    ),
  ],
)
@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("form", call_formats.FORMATS)
def test_a_written_answer_is_read_as_it_was(answer, thinking, form):
  text = tool_calls.write(answer, form)
  text = tool_calls.after_prompt(text, thinking=thinking)
  read = tool_calls.parse(
    text, thinking=thinking, call_format=form, tools=TOOLS
  )
  assert read == answer


def test_an_answer_closes_the_thinking_that_its_prompt_has_opened():
  for text, wanted in [
    ("5", "\n</think>\n\n5"),
    ("<think>\nhm\n</think>\n\n5", "hm\n</think>\n\n5"),
  ]:
    assert tool_calls.after_prompt(text, thinking=True) == wanted
    assert tool_calls.after_prompt(text, thinking=False) == text


def test_a_call_is_written_as_models_write_it():
  call = tool_calls.Call("f", '{"x": 1}')
  answer = tool_calls.Answer("a", (call, call))
  written = [tool_calls.write(answer, form) for form in call_formats.FORMATS]
  hermes = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
  llama = '{"name": "f", "parameters": {"x": 1}}'
  coder = (
    "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n"
    "</tool_call>"
  )
  assert written == [
    f"a\n{hermes}\n{hermes}",
    f"a\n{llama}; {llama}",
    f"a\n{coder}\n{coder}",
    "a\n<function_calls>f(x=1)\nf(x=1)</function_calls>",
  ]


def llama(text, tools=TOOLS):
  return tool_calls.parse(text, call_format=call_formats.LLAMA, tools=tools)


def test_an_object_without_tags_is_a_call_where_there_are_tools():
  text = '{\n  "name": "f", "parameters": {"x": {"name": "g"}}\n} ;'
  call = tool_calls.Call("f", '{"x": {"name": "g"}}')
  assert llama(f"So: {text} ") == tool_calls.Answer("So:", (call,))
  assert llama(text, ()) == tool_calls.Answer(text)
  for other in (
    '{"name": "f"}',
    '{"name": "f", "parameters": 3}',
    "{1: 2",
    "{",
  ):
    assert llama(other) == tool_calls.Answer(other)


def tagged(**arguments):
  pieces = [
    f"<parameter={name}>\n{text}\n</parameter>\n"
    for name, text in arguments.items()
  ]
  text = (
    f"<tool_call>\n<function=f>\n{''.join(pieces)}</function>\n</tool_call>"
  )
  answer = tool_calls.parse(
    text, call_format=call_formats.QWEN_CODER, tools=TOOLS
  )
  return json.loads(answer.tool_calls[0].arguments)


def test_arguments_in_tags_have_the_types_of_their_schema():
  texts = {"city": "5", "x": "[1]", "y": "null", "n": "1.5", "ok": "True"}
  values = {"city": "5", "x": [1], "y": None, "n": 1.5, "ok": True}
  assert tagged(**texts, mode="2", one="1") == values | {"mode": 2, "one": 1}
  # What has another type than its schema is for the function to refuse.
  assert tagged(y="5", n="many", ok="0") == {"y": "5", "n": "many", "ok": 0}
  # No schema: text, unless it can only be JSON.
  assert tagged(z="5", code="{", o='{"a": 1}') == {
    "z": "5",
    "code": "{",
    "o": {"a": 1},
  }
  assert tagged(city="\n a\n</parameter> b\n") == {
    "city": "\n a\n</parameter> b\n"
  }


@pytest.mark.parametrize(
  "text",
  [
    "<tool_call>\n<function=f>\n</function>",
    "<tool_call>\n<function=f>\n<parameter=x>\n1\n</function>\n</tool_call>",
    "<tool_call>\n<function=>\n</function>\n</tool_call>",
    '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
  ],
)
def test_broken_tags_stay_content(text):
  read = tool_calls.parse(text, call_format=call_formats.QWEN_CODER)
  assert read == tool_calls.Answer(text)


def olmo(inside, end="</function_calls>"):
  text = f"<function_calls>{inside}{end}"
  answer = tool_calls.parse(text, call_format=call_formats.OLMO)
  assert answer.content == ("" if answer.tool_calls else text)
  return [(c.name, json.loads(c.arguments)) for c in answer.tool_calls]


def test_calls_as_in_python_are_read_with_the_words_of_python_and_json():
  first = ("f", {"x": None, "y": True, "z": [1.5, {"a": ")"}]})
  text = 'f(x=None, y=true, z=[1.5, {"a": ")"}])'
  assert olmo(text) == [first]
  assert olmo(f'\n {text}\n g.h-1( y = "\\n" )\n') == [
    first,
    ("g.h-1", {"y": "\n"}),
  ]
  assert olmo("f()") == [("f", {})]


@pytest.mark.parametrize(
  "inside",
  ["", "f", "f(", "f(1)", "f(x=)", "f(x=y)", "f(x=1) g", "f(x=NaN)", "f(x=1"],
)
def test_what_is_no_call_of_python_stays_content(inside):
  assert not olmo(inside)
  assert not olmo("f(x=1)", end="</function_call>")


@pytest.mark.parametrize("arguments", ["", "[1]", "3", "{"])
def test_a_call_whose_arguments_are_no_object_cannot_be_written(arguments):
  answer = tool_calls.Answer("", (tool_calls.Call("f", arguments),))
  with pytest.raises(ValueError, match="arguments of f"):
    tool_calls.write(answer)


@pytest.mark.parametrize("text", ["", " plain\n", "a </think> b", "x<think>y"])
def test_text_without_either_stays_byte_for_byte(text):
  assert tool_calls.parse(text) == tool_calls.Answer(text)


@pytest.mark.parametrize(
  "inside",
  [
    "",
    "{",
    "[]",
    "null",
    '{"name": "f"}',
    '{"arguments": {}}',
    '{"name": "", "arguments": {}}',
    '{"name": 3, "arguments": {}}',
    '{"name": "f", "arguments": "{}"}',
    '{"name": "f", "arguments": null}',
    '{"name": "f", "arguments": {"x": NaN}}',
    # A float of this size is infinite, which JSON cannot express.
    '{"name": "f", "arguments": {"x": 1e999}}',
    '{"name": "f", "arguments": {}} and more',
    '{"name": "f", "arguments": {"x": "\\ud800"}}',
    '{"name": "\\udfff", "arguments": {}}',
    '{"name": "f", "arguments": {"x": %s}}' % ("9" * 5000),
    "[" * 100_000,
    '{"name": "f", "arguments": {"x": ' + "[" * 5000 + "]" * 5000 + "}}",
  ],
)
def test_what_is_no_call_stays_content(inside):
  text = f"before {block(inside)} after\n"
  assert tool_calls.parse(text) == tool_calls.Answer(text)


def test_a_call_that_was_cut_off_is_content_and_those_before_it_are_calls():
  cut = "<tool_call>\n" + call("g")
  answer = tool_calls.parse(block(call("f")) + cut)
  assert [found.name for found in answer.tool_calls] == ["f"]
  assert answer.content == cut


def test_tags_within_a_string_end_nothing():
  inner = block(call("inner"))
  answer = tool_calls.parse("a" + block(call("outer", text=inner)) + "b")
  assert [found.name for found in answer.tool_calls] == ["outer"]
  assert json.loads(answer.tool_calls[0].arguments) == {"text": inner}
  assert answer.content == "ab"


def test_a_broken_block_does_not_hide_the_next():
  answer = tool_calls.parse("<tool_call>oops " + block(call("f")))
  assert answer.content == "<tool_call>oops"
  assert [found.name for found in answer.tool_calls] == ["f"]


def test_calls_that_are_only_thought_of_are_not_made():
  thought = f"maybe {block(call('f'))}"
  closed = tool_calls.parse(f"<think>{thought}</think>No.")
  assert closed == tool_calls.Answer("No.", (), thought)
  # Cut while thinking, before the answer.
  cut = tool_calls.parse(f"\n<think>\n{thought}")
  assert cut == tool_calls.Answer("", (), thought)


def test_a_prompt_may_have_opened_the_thinking():
  text = "so\n</think>\n\nYes."
  assert tool_calls.parse(text, thinking=True) == tool_calls.Answer(
    "Yes.", (), "so"
  )
  assert tool_calls.parse("so", thinking=True) == tool_calls.Answer(
    "", (), "so"
  )
  # Opened by the prompt and again by the model.
  assert tool_calls.parse(f"<think>{text}", thinking=True).reasoning == "so"


@pytest.mark.parametrize(
  ("form", "opening"),
  [
    (call_formats.QWEN_CODER, "<tool_call>\n<function=f>\n<parameter=x>\n"),
    (call_formats.OLMO, '<function_calls>f(x="a"'),
    (call_formats.OLMO, "<function_calls>f"),
  ],
)
def test_calls_that_are_opened_again_and_again_are_read_in_no_time(
  form, opening
):
  text = opening * 4000
  start_s = time.thread_time()
  read = tool_calls.parse(text, call_format=form)
  assert read == tool_calls.Answer(text)
  assert time.thread_time() - start_s < machine_speed.scaled(1)
