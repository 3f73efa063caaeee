"""Masks over the ids of a real tokenizer: what they let through, and refuse."""

import dataclasses
import json
import re
import sys

import numpy as np
import pytest

from models.chat import answer_grammar, hf_chat, tool_calls
from tests.helpers import chat_messages
from tests.helpers.chat_messages import GOLDEN

CHAT = hf_chat.HfChat.load(GOLDEN, {"enable_thinking": False})
SIZE = CHAT.vocab_size + 30
CITY = answer_grammar.Schema(
  text=json.dumps(
    {
      "type": "object",
      "properties": {"city": {"enum": ["Ulm", "Bergen"]}},
      "required": ["city"],
      "additionalProperties": False,
    }
  ),
  name="tools[0].function.parameters",
)
ANY = answer_grammar.ANY_OBJECT
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}'
END = "\n</tool_call>"


class Opened(hf_chat.HfChat):
  """A chat whose prompt ends with <think>."""

  thinks = True  # pyright: ignore[reportAssignmentType]


def grammar(**fields):
  functions = (("weather", CITY), ('p "1"', ANY))
  return answer_grammar.AnswerGrammar(**{"functions": functions, **fields})


def accepts(form, text, chat=CHAT):
  """Whether a text is a whole answer, id by id as the tokenizer spells it."""
  matcher = answer_grammar.compiled(chat, form, SIZE).deep_copy()
  ids = chat.text_ids(text)
  return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def walked(form, seed, steps=300, chat=CHAT):
  """A random answer: each id is any of those that the mask allows."""
  matcher = answer_grammar.compiled(chat, form, SIZE).deep_copy()
  rng, ids = np.random.default_rng(seed), []
  for _ in range(steps):
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
    assert allowed.max() < chat.vocab_size
    ids.append(int(rng.choice(allowed)))
    if ids[-1] in chat.stop_ids:
      return chat.decode(ids)
    assert matcher.consume_token(ids[-1])
  raise AssertionError(f"no end after {steps} ids")


OLMO = dataclasses.replace(
  CHAT,
  template=dataclasses.replace(
    CHAT.template, source=chat_messages.chat_of_form("olmo").template.source
  ),
)


@pytest.mark.parametrize("chat", [CHAT, OLMO], ids=["hermes", "olmo"])
@pytest.mark.parametrize("seed", range(4))
def test_what_must_be_a_call_is_read_as_one(seed, chat):
  form = grammar(functions=(("weather", CITY),), call=True)
  text = walked(form, seed, chat=chat)
  answer = tool_calls.parse(text, call_format=chat.call_format)
  assert answer.content == ""
  assert answer.tool_calls
  for call in answer.tool_calls:
    assert call.name == "weather"
    assert json.loads(call.arguments)["city"] in ("Ulm", "Bergen")


@pytest.mark.parametrize(
  ("fields", "text", "fits"),
  [
    ({"call": True}, f"{CALL}{END}", True),
    ({"call": True}, f"{CALL}{END}\n{CALL}{END}", True),
    ({"call": True, "one_call": True}, f"{CALL}{END}\n{CALL}{END}", False),
    ({"call": True}, f"Sure: {CALL}{END}", False),
    ({"call": True}, CALL.replace("Ulm", "Rome") + END, False),
    ({"call": True}, "", False),
    # The name is quoted as JSON does it, and any object goes.
    (
      {"call": True},
      f'<tool_call>\n{{"name": "p \\"1\\"", "arguments": {{}}}}{END}',
      True,
    ),
    ({}, "", True),
    ({}, "It is cold.", True),
    ({}, f"Let me look.\n{CALL}{END}\n{CALL}{END}", True),
    ({}, f"It is cold.\n{CALL.replace('city', 'town')}{END}", False),
    ({}, CALL, False),
    ({"one_call": True}, f"{CALL}{END}\n{CALL}{END}", False),
    ({"content": CITY}, '{ "city":\n"Ulm"}', True),
    ({"content": CITY}, f"{CALL}{END}", True),
    ({"content": CITY}, "It is cold.", False),
    ({"content": CITY, "functions": ()}, f"{CALL}{END}", False),
  ],
)
def test_a_grammar_takes_answers_of_its_form_only(fields, text, fits):
  assert accepts(grammar(**fields), text) is fits


def test_thinking_comes_first_where_the_prompt_leaves_room_for_it():
  free = hf_chat.HfChat.load(GOLDEN)
  assert (free.thinking, CHAT.thinking) == ("possible", "none")
  form, thought = grammar(call=True), "<think>\nHm, {</think>\n\n"
  assert accepts(form, f"{thought}{CALL}{END}", free)
  assert accepts(form, f"{CALL}{END}", free)
  assert not accepts(form, thought, free)
  assert not accepts(form, f"{thought}{CALL}{END}")
  opened = Opened.load(GOLDEN)
  assert accepts(form, f"Hm, {{</think>\n{CALL}{END}", opened)
  assert not accepts(form, f"{CALL}{END}", opened)


@pytest.mark.parametrize("form", ["hermes", *chat_messages.FORMS])
def test_what_is_written_for_a_policy_to_imitate_fits(form):
  chat = CHAT if form == "hermes" else chat_messages.chat_of_form(form)

  def fits(*arguments, name="weather", content="", **fields):
    calls = tuple([tool_calls.Call(name, text) for text in arguments])
    answer = tool_calls.Answer(content, calls)
    text = tool_calls.write(answer, chat.call_format)
    return accepts(grammar(**fields), text, chat)

  ulm, rome = '{"city": "Ulm"}', '{"city": "Rome"}'
  assert fits(ulm, ulm, call=True)
  assert not fits(ulm, ulm, call=True, one_call=True)
  assert not fits(rome, call=True)
  assert not fits("{}", call=True)
  assert fits(ulm, content="So {x}:")
  assert not fits(rome, content="So {x}:")
  assert fits(rome, name='p "1"', call=True)


@pytest.mark.parametrize("space", [False, True])
def test_text_that_the_tokenizer_would_change_is_written_as_it_is(space):
  byte_level = {"type": "ByteLevel", "add_prefix_space": space}
  settings = json.loads(CHAT.tokenizer)
  settings["pre_tokenizer"] = byte_level | {"trim_offsets": True}
  chat = dataclasses.replace(CHAT, tokenizer=json.dumps(settings))
  # NFC makes one code point of the second's two.
  for text in ("Ulm is warm", "e\u0301"):
    content = answer_grammar.Schema(text=json.dumps({"const": text}), name="s")
    form = answer_grammar.AnswerGrammar(content=content)
    assert json.loads(walked(form, 0, chat=chat)) == text


TYPED = {
  "type": "object",
  "properties": {
    "text": {"type": "string"},
    "n": {"type": "integer"},
    "mode": {"type": "string", "enum": ["a", "b"]},
    "kind": {"type": "string", "const": "cat"},
    "at": {"type": "array", "items": {"$ref": "#/$defs/at"}},
  },
  "required": ["text", "n"],
  "$defs": {"at": {"type": "integer"}},
}


def tagged(schema):
  text = json.dumps(schema)
  arguments = answer_grammar.Schema(text=text, name="tools[0]")
  return grammar(functions=(("f", arguments),), call=True)


@pytest.mark.parametrize(
  ("changes", "fits"),
  [
    ({}, True),
    ({"text": "</parameter> {\n"}, True),
    ({"mode": "b", "at": [1, 2]}, True),
    ({"n": "one"}, False),
    ({"n": None}, False),
    ({"mode": "c"}, False),
    ({"kind": "cat"}, True),
    ({"kind": "cats"}, False),
    ({"at": ["x"]}, False),
    ({"other": "x"}, False),
  ],
)
@pytest.mark.parametrize("form", ["qwen_coder", "olmo"])
def test_arguments_one_by_one_follow_their_schema(changes, fits, form):
  chat = chat_messages.chat_of_form(form)
  assert accepts_call({"text": "so", "n": 1} | changes, TYPED, chat) is fits


def accepts_call(arguments, schema, chat):
  call = tool_calls.Call("f", json.dumps(arguments))
  text = tool_calls.write(tool_calls.Answer("", (call,)), chat.call_format)
  return accepts(tagged(schema), text, chat)


@pytest.mark.parametrize("required", ["", "b", "c", "bd"])
@pytest.mark.parametrize("given", ["", "a", "b", "d", "bc", "bd", "abcd"])
def test_commas_are_between_the_arguments_of_python_that_are_there(
  required, given
):
  schema = {
    "properties": {key: {"type": "integer"} for key in "abcd"},
    "required": [*required],
  }
  fits = set(required) <= set(given)
  assert accepts_call(dict.fromkeys(given, 1), schema, OLMO) is fits


def test_too_many_optional_arguments_of_python_are_refused():
  schema: dict = {"properties": {f"a{i}": {} for i in range(1000)}}
  # Unless one of them is required.
  last = {"required": ["a999"]}
  assert accepts_call({"a0": 1, "a999": 2}, schema | last, OLMO)
  with pytest.raises(ValueError, match="over 32 optional arguments"):
    answer_grammar.compiled(OLMO, tagged(schema), SIZE)


@pytest.mark.parametrize(
  ("schema", "words"),
  [
    ({"minProperties": 1}, 'tools[0]: Unimplemented keys in calls .*"minP'),
    ({"properties": {"x": {"type": "string", "pattern": "a"}}}, '"pattern"'),
    ({"properties": {"x": {"type": ["string", "integer"]}}}, "integer or str"),
    (
      {"properties": {"x": {"anyOf": [{"enum": ["a"]}, {"type": "null"}]}}},
      '"enum"',
    ),
    ({"properties": {}, "required": ["x"]}, 'required in calls .*"x"'),
  ],
)
def test_a_schema_that_tags_cannot_follow_is_refused(schema, words):
  chat = chat_messages.chat_of_form("qwen_coder")
  with pytest.raises(ValueError, match=words.replace("[0]", r"\[0\]")):
    answer_grammar.compiled(chat, tagged(schema), SIZE)


@pytest.mark.parametrize(
  ("schema", "words"),
  [
    ({"not": {"type": "string"}}, 'Unimplemented keys: ["not"]'),
    ({"type": "text"}, "Invalid type: text"),
    ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    ({"$ref": "#/$defs/x"}, "'/$defs/x' does not exist"),
    (
      {"oneOf": [{"type": "integer"}, {"type": "number"}]},
      "oneOf constraints are not supported; use anyOf",
    ),
    ({"type": "integer", "minimum": 2, "maximum": 1}, "nsatisfiable"),
    ({"enum": ["x" * 120_000]}, "at most 120000"),
    # Options of the library are not for clients.
    (
      {"not": {}, "x-guidance": {"lenient": True}},
      'Unimplemented keys: ["not"',
    ),
  ],
  ids=str,
)
def test_a_schema_that_cannot_be_followed_is_refused_by_its_keyword(
  schema, words
):
  bad = answer_grammar.Schema(text=json.dumps(schema), name="tools[1]")
  form = answer_grammar.AnswerGrammar(functions=(("a", CITY), ("b", bad)))
  with pytest.raises(ValueError, match=re.escape(words)) as error:
    answer_grammar.compiled(CHAT, form, SIZE)
  assert ("tools[1]: " in str(error.value)) is ("at most" not in words)


@pytest.mark.parametrize(
  ("pattern", "text", "fits"),
  [
    ('^[^"]+$', "a\nb", True),
    ('^[^"]+$', 'a"b', False),
    (r"^[^\\/]+$", "a\\b", False),
    ('^[^-a"]+$', "+", True),
    ('^[^-a"]+$', "-", False),
    (r"^\\[^a]$", "\\b", True),
  ],
)
def test_a_pattern_is_followed_to_the_letter(pattern, text, fits):
  inner = {"type": "string", "pattern": pattern}
  only = {"type": "object", "additionalProperties": False}
  for schema, value in (
    (inner, text),
    ({**only, "properties": {"pattern": inner}}, {"pattern": text}),
    ({**only, "patternProperties": {pattern: {"const": inner}}}, {text: inner}),
  ):
    content = answer_grammar.Schema(text=json.dumps(schema), name="s")
    form = grammar(functions=(), content=content)
    assert accepts(form, json.dumps(value)) is fits


def test_a_schema_that_nothing_satisfies_is_refused():
  schema = answer_grammar.Schema(text='{"$ref": "#"}', name="loop")
  form = answer_grammar.AnswerGrammar(content=schema)
  with pytest.raises(ValueError, match="loop: nothing satisfies it"):
    answer_grammar.compiled(CHAT, form, SIZE)


def test_without_its_package_the_error_says_how_to_get_it(monkeypatch):
  monkeypatch.setitem(sys.modules, "llguidance", None)
  form = answer_grammar.AnswerGrammar(content=CITY, one_call=True)
  with pytest.raises(
    ValueError, match=r"pip install 'twinmesh\[constrained\]'"
  ):
    answer_grammar.compiled(CHAT, form, SIZE)
