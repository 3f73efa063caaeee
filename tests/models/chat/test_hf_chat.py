"""Ids of conversations, against those of transformers in golden files."""

import functools
import json
import pathlib
import pickle
import random
import shutil
import tempfile

import numpy as np
import pytest
import tokenizers

from models.chat import hf_chat, template, tool_calls
from tests.helpers import chat_messages
from tests.helpers.chat_messages import GOLDEN, GoldenMessage

START, END, TEXT_END = 1, 2, 0
CHAT = hf_chat.HfChat.load(GOLDEN)


def load(directory):
  """Loads what a test has written, without a process of its own."""
  return hf_chat.HfChat.load(directory, tries=False)


# Independent of our code; encodes special tokens in text as plain text.
PLAIN = tokenizers.Tokenizer.from_file(str(GOLDEN / "tokenizer.json"))
PLAIN.encode_special_tokens = True
WORDS = "a<think>\u00e9\u6771\U0001f600\U0001f468\u200d\U0001f469\r\n  x\x00~"


def text_ids(text):
  return PLAIN.encode(text, add_special_tokens=False).ids


def chat_of(case):
  return hf_chat.HfChat.load(GOLDEN, case["variables"])


def replay(case, chat=None):
  """Returns the ids of a conversation that grows answer by answer."""
  chat, messages = chat or chat_of(case), chat_messages.messages_of(case)
  answers = [i for i, said in enumerate(messages) if said.role == "assistant"]
  edges = [*answers, len(messages)]
  ids = [chat.open(messages[: edges[0]], case["tools"])]
  for text, start, end in zip(case["answers"], edges, edges[1:], strict=False):
    ids += [chat.encode_answer(text), chat.append(messages[start + 1 : end])]
  return np.concatenate(ids).tolist()


@pytest.fixture
def directory(tmp_path):
  """A copy to break."""
  copy = tmp_path / "model"
  shutil.copytree(GOLDEN, copy)
  return copy


def edit(path, **changes):
  data = json.loads(path.read_text("utf-8")) if path.exists() else {}
  path.write_text(json.dumps(data | changes), "utf-8")


@pytest.mark.parametrize("name", chat_messages.CASES)
def test_the_ids_are_those_of_transformers(name):
  case = chat_messages.CASES[name]
  ids = chat_of(case).open(chat_messages.messages_of(case), case["tools"])
  assert ids.dtype == np.int32
  assert ids.tolist() == case["ids"]


@pytest.mark.parametrize("name", chat_messages.CASES)
def test_a_conversation_that_grows_has_the_ids_of_one_rendered_whole(name):
  # In "calls" two results follow one answer, in "thinking" a result follows
  # thinking, which stays; "dropped" is told below.
  assert replay(chat_messages.CASES[name]) == chat_messages.CASES[name]["ids"]


@functools.cache
def gemma():
  return load(chat_messages.GEMMA)


@pytest.mark.parametrize("name", chat_messages.GEMMA_CASES)
def test_a_tokenizer_that_falls_back_on_bytes_gives_its_own_ids(name):
  case, chat = chat_messages.GEMMA_CASES[name], gemma()
  messages = chat_messages.messages_of(case)
  assert chat.open(messages).tolist() == case["ids"]
  assert replay(case, chat) == case["ids"]
  assert chat.spell(case["ids"]) == case["text"]


def test_bytes_of_tokens_are_told_from_texts_that_look_like_them():
  chat = gemma()
  (two,) = chat.text_ids("\n\n")
  assert chat.pieces()[two] == b"\n\n"
  pieces = [chat.pieces()[index] for index in chat.text_ids("a  \u6771<0x41>")]
  assert b"".join(pieces) == "a  \u6771<0x41>".encode()
  assert [x for x in pieces if x > b"\x7f"] == [b"\xe6", b"\x9d", b"\xb1"]
  # As of Llama 2: texts cannot be joined.
  with pytest.raises(ValueError, match="or fall back on bytes as Gemma's"):
    broken("decoder", lambda found: found["decoders"].append(STRIP))
  words = r"no token for 1 of 256 bytes.*the first is 0x41"
  with pytest.raises(ValueError, match=words):
    broken("model", lambda found: found["vocab"].pop("<0x41>"))


STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def broken(name, change):
  """Loads the tokenizer of Gemma's kind, in which a part was changed."""
  with tempfile.TemporaryDirectory() as root:
    directory = pathlib.Path(root, "gemma")
    shutil.copytree(chat_messages.GEMMA, directory)
    path = directory / "tokenizer.json"
    data = json.loads(path.read_text("utf-8"))
    change(data[name])
    path.write_text(json.dumps(data), "utf-8")
    load(directory)


@pytest.mark.parametrize("form", chat_messages.FORMS)
@pytest.mark.parametrize("name", ["call", "calls"])
def test_calls_of_another_form_are_written_and_read(form, name):
  case = chat_messages.FORMS[form][name]
  chat = chat_messages.chat_of_form(form)
  messages, tools = chat_messages.messages_of(case), case["tools"]
  assert chat.open(messages, tools).tolist() == case["ids"]
  turns = chat.answers(messages, tools)
  said = [message for message in messages if message.role == "assistant"]
  assert [chat.decode(answer) for _, answer in turns] == case["answers"]
  for (_, answer), message in zip(turns, said, strict=True):
    parsed = chat.parse(answer, tools)
    assert parsed.content == message.content
    calls = [(c.name, json.loads(c.arguments)) for c in parsed.tool_calls]
    assert calls == [
      (c.name, json.loads(c.arguments)) for c in message.tool_calls
    ]


def test_thinking_before_the_last_question_stays_as_it_was_sampled():
  case = chat_messages.CASES["dropped"]
  question, answer, more = chat_messages.messages_of(case)
  assert answer.content
  assert "</think>" in answer.content
  assert "</think>" not in case["text"]
  sampled = CHAT.encode_answer(answer.content)
  ids = [*CHAT.open([question]), *sampled, *CHAT.append([more])]
  # Only the thinking differs: that of the answer is <think>...</think>\n\n.
  thought = text_ids(answer.content.removesuffix("21."))
  at = len(CHAT.open([question]))
  assert ids[at : at + len(thought)] == thought
  assert ids[:at] + ids[at + len(thought) :] == case["ids"]


@pytest.mark.parametrize(
  "name",
  [n for n, case in chat_messages.CASES.items() if case["answers"]],
)
def test_given_answers_lie_where_transformers_writes_them(name):
  case = chat_messages.CASES[name]
  messages = chat_messages.messages_of(case)
  if name == "dropped":
    # Its thinking is not written where another question follows.
    with pytest.raises(template.Rewritten, match=r"message 1: .* leaves"):
      CHAT.answers(messages)
    return
  turns = CHAT.answers(messages, case["tools"])
  wanted = [CHAT.encode_answer(text).tolist() for text in case["answers"]]
  assert [answer.tolist() for _, answer in turns] == wanted
  ids = np.concatenate([x for turn in turns for x in turn]).tolist()
  assert ids == case["ids"][: len(ids)]
  # Without the first answers, what is before is the same.
  first = max(i for i, m in enumerate(messages) if m.role == "assistant")
  ((context, answer),) = CHAT.answers(messages, case["tools"], first)
  assert answer.tolist() == wanted[-1]
  assert [*context, *answer] == ids


def test_an_answer_may_end_with_another_stop_token(directory):
  # As in Llama 3.1: <|eom_id|> behind calls.
  path = directory / "chat_template.jinja"
  source = path.read_text("utf-8")
  end = "{{- '<|im_end|>' -}}"
  assert source.count(end) == 1
  other = "'<|endoftext|>' if message.tool_calls else '<|im_end|>'"
  path.write_text(source.replace(end, f"{{{{- {other} -}}}}"), "utf-8")
  call = tool_calls.Call("f", "{}")
  said = [
    GoldenMessage("user", "?"),
    GoldenMessage("assistant", "", (call,)),
    GoldenMessage("tool", "1"),
    GoldenMessage("assistant", "So."),
  ]
  chat = load(directory)
  ((_, alone),) = chat.answers(said[:2])
  (_, called), (result, _) = chat.answers(said)
  for answer in (alone, called):
    assert answer.tolist().index(TEXT_END) == len(answer) - 1
  assert result.tolist() == chat.append(said[2:3]).tolist()


def test_an_answer_that_spells_its_end_has_one_end():
  said = [GoldenMessage("user", "x"), GoldenMessage("assistant", "<|im_end|>y")]
  ((_, answer),) = CHAT.answers(said)
  assert answer.tolist().count(END) == 1
  # The template adds empty thinking to the last answer.
  assert CHAT.decode(answer) == "<think>\n\n</think>\n\n<|im_end|>y"


def test_a_context_that_changes_with_its_answer_is_refused():
  chat = hf_chat.HfChat.load(GOLDEN, {"enable_thinking": False})
  said = [GoldenMessage(role, "x") for role in ("user", "assistant") * 2]
  # The prompt has empty thinking; of earlier turns the template drops it.
  with pytest.raises(template.Rewritten, match=r"message 1: .* otherwise"):
    chat.answers(said)
  ((context, _),) = chat.answers(said, first=3)
  assert context.tolist() == chat.open(said[:3]).tolist()


def test_what_follows_an_answer_that_was_cut_off_ends_its_turn_first():
  new = [GoldenMessage("user", "And now?")]
  whole, cut = CHAT.append(new), CHAT.append(new, answer_ended=False)
  assert cut.tolist() == [END, *whole.tolist()]
  assert whole.tolist() == [
    *text_ids("\n"),
    START,
    *text_ids("user\nAnd now?"),
    END,
    *text_ids("\n"),
    START,
    *text_ids("assistant\n"),
  ]
  # No messages: only the prompt for the next answer.
  assert CHAT.append([]).tolist() == [
    *text_ids("\n"),
    START,
    *text_ids("assistant\n"),
  ]


def test_text_that_spells_control_tokens_is_text():
  spelled = chat_messages.EXPECTED["spelled"]
  text, empty = spelled["text"], GoldenMessage("user", "")
  assert {START, END} < set(spelled["forged"])
  for encode in (CHAT.open, CHAT.append):
    expected = encode([empty]).tolist()
    # The prompt's and the message's: <|im_start|>user\n HERE <|im_end|>.
    at = expected.index(END)
    expected[at:at] = spelled["ids"]
    assert encode([GoldenMessage("user", text)]).tolist() == expected
  assert CHAT.encode_answer(text).tolist() == [*spelled["ids"], END]
  for role in ("system", "assistant", "tool"):
    ids = CHAT.open(
      [GoldenMessage("user", "?"), GoldenMessage(role, text)]
    ).tolist()
    assert [ids.count(i) for i in (TEXT_END, START, END)] == [0, 3, 2]


def test_an_answer_survives_the_round_trip():
  for text in ("", " \n", "Z\u00fcrich", "<think>\n</think>", "<|im_end|>"):
    assert CHAT.decode(CHAT.encode_answer(text)) == text
  # The tokenizer composes characters, as transformers' does.
  assert CHAT.decode(CHAT.encode_answer("e\u0301")) == "\u00e9"
  with pytest.raises(ValueError, match="has no encoding"):
    CHAT.encode_answer("\ud800")


def random_ids(rng):
  """Returns ids with split characters and special tokens."""
  ids = text_ids("".join(rng.choices(WORDS, k=8)))
  for _ in range(rng.randrange(4)):
    ids[rng.randrange(len(ids))] = rng.randrange(CHAT.vocab_size)
  return ids[rng.randrange(3) : len(ids) - rng.randrange(3)]


def test_pieces_of_a_stream_are_the_text():
  rng = random.Random(0)
  lost = 0
  for _ in range(300):
    ids = random_ids(rng)
    whole = CHAT.decode(ids)
    assert whole == PLAIN.decode(ids, skip_special_tokens=True)
    decoder, pieces, start = CHAT.decoder(), [], 0
    while start < len(ids):
      step = rng.randrange(4)
      pieces.append(decoder.feed(ids[start : start + step]))
      start += step
    assert "".join([*pieces, decoder.end()]) == whole
    lost += "\ufffd" in whole
  assert 30 < lost < 270


def test_half_a_character_waits_for_its_other_half():
  ids = text_ids("\u6771\U0001f600!")
  # Bytes: 3, 4 and 1, each a token, for the tokenizer learnt none of them.
  assert len(ids) == 8
  decoder = CHAT.decoder()
  said = [decoder.feed([i]) for i in ids]
  assert said == ["", "", "\u6771", "", "", "", "\U0001f600", "!"]
  assert decoder.end() == ""
  decoder = CHAT.decoder()
  # A special token in between has no text and splits no character.
  assert decoder.feed([ids[0], START, *ids[1:5]]) == "\u6771"
  assert decoder.feed([]) == ""
  assert decoder.end() == "\ufffd"


def test_every_id_has_a_text():
  assert CHAT.token(END) == "<|im_end|>"
  assert CHAT.token(text_ids("<think>")[0]) == "<think>"
  assert CHAT.token(text_ids("\u6771")[0]) == "\\xe6"
  assert all(CHAT.token(i) for i in range(CHAT.vocab_size))
  # A model with a padded vocabulary may sample larger ids.
  padded = CHAT.vocab_size
  assert CHAT.token(padded) == f"<id {padded}>"
  assert CHAT.decode([*text_ids("a"), padded, END]) == f"a<id {padded}>"
  for fail in (CHAT.token, lambda i: CHAT.decode([i])):
    with pytest.raises(ValueError, match="id -1 is below 0"):
      fail(-1)


def test_sampled_ids_are_parsed():
  call = (
    '<tool_call>\n{"name": "f", "arguments": {"x": "\u6771"}}\n</tool_call>'
  )
  ids = CHAT.encode_answer(f"<think>\nhm\n</think>\n\nSo.\n{call}")
  assert CHAT.parse(ids) == tool_calls.Answer(
    "So.", (tool_calls.Call("f", '{"x": "\u6771"}'),), "hm"
  )
  # Cut within a character of the call: it stays content.
  cut = ids[: -len(text_ids('"}}\n</tool_call>')) - 2]
  assert CHAT.parse(cut).tool_calls == ()
  assert CHAT.parse(cut).content.endswith('"x": "\ufffd')


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def test_tools_are_refused_where_calls_are_not_read(directory):
  path = directory / "chat_template.jinja"
  source = path.read_text("utf-8")
  # As in Llama's templates.
  assert source.count('", "arguments": ') == 1
  path.write_text(source.replace('", "arguments": ', '", "parameters": '))
  chat, question = load(directory), GoldenMessage("user", "?")
  with pytest.raises(ValueError, match=r'^the chat .*"parameters".* not read'):
    chat.open([question], [TOOL])
  # They may be trained, and nothing else changes.
  call = tool_calls.Call("f", "{}")
  said = [question, GoldenMessage("assistant", "", (call,))]
  assert len(chat.answers(said, [TOOL])) == 1
  assert chat.open([question]).tolist() == CHAT.open([question]).tolist()


def test_a_template_without_a_prompt_after_results_does_without_tools(
  directory,
):
  # As in DeepSeek-R1's.
  path = directory / "chat_template.jinja"
  source = path.read_text("utf-8")
  prompt = "if add_generation_prompt"
  assert source.count(prompt) == 1
  never = f"{prompt} and messages[-1].role != 'tool'"
  path.write_text(source.replace(prompt, never))
  chat, question = load(directory), GoldenMessage("user", "?")
  assert chat.open([question]).tolist() == CHAT.open([question]).tolist()
  result = [GoldenMessage("tool", "1")]
  for fail in (
    lambda: chat.open([question], [TOOL]),
    lambda: chat.open([question, GoldenMessage("assistant", "x"), *result]),
    lambda: chat.append(result),
  ):
    with pytest.raises(ValueError, match="after the result of a tool the chat"):
      fail()


def test_a_prompt_that_opens_the_thinking_is_known(directory):
  assert not CHAT.thinks
  path = directory / "chat_template.jinja"
  source = path.read_text("utf-8")
  prompt = "{{- '<|im_start|>assistant\\n' -}}\n{%- if enable"
  assert source.count(prompt) == 1
  path.write_text(
    source.replace(prompt, prompt.replace("ant\\n", "ant\\n<think>\\n")),
    "utf-8",
  )
  chat = load(directory)
  assert chat.thinks
  assert chat.decode(chat.append([])).endswith("assistant\n<think>\n")
  answer = chat.parse(chat.encode_answer("hm\n</think>\n\nYes."))
  assert answer == tool_calls.Answer("Yes.", (), "hm")
  # A recorded message may open it as well.
  thought = GoldenMessage("assistant", "<think>\nhm\n</think>\n\nYes.")
  ((_, said),) = chat.answers([GoldenMessage("user", "?"), thought])
  assert chat.decode(said) == "hm\n</think>\n\nYes."


def test_stop_ids_begin_with_the_end_of_a_turn(directory):
  assert CHAT.stop_ids == (END, TEXT_END)
  edit(directory / "generation_config.json", eos_token_id=TEXT_END)
  assert load(directory).stop_ids == (END, TEXT_END)
  (directory / "generation_config.json").unlink()
  (directory / "config.json").unlink()
  # That of tokenizer_config.json, which is the end of a turn.
  assert load(directory).stop_ids == (END,)
  edit(directory / "config.json", eos_token_id=[END, TEXT_END])
  assert load(directory).stop_ids == (END, TEXT_END)
  edit(directory / "config.json", eos_token_id=99)
  with pytest.raises(ValueError, match=r"eos_token_id=99; 99 must be one of"):
    load(directory)


def test_a_template_that_rewrites_what_was_said_is_refused_by_its_file(
  directory,
):
  path = directory / "chat_template.jinja"
  source = path.read_text("utf-8").replace("{{- said -}}", "{{- '...' -}}")
  told = "the chat template does not only append: it writes an answer 0 times"
  path.write_text(source, "utf-8")
  with pytest.raises(ValueError, match=f"model: chat_template.jinja: {told}"):
    load(directory)
  path.unlink()
  edit(directory / "tokenizer_config.json", chat_template=source)
  with pytest.raises(ValueError, match=f"model: tokenizer_config.json: {told}"):
    load(directory)


def test_a_template_may_stand_in_the_settings(directory):
  path = directory / "chat_template.jinja"
  source, settings = (
    path.read_text("utf-8"),
    directory / "tokenizer_config.json",
  )
  path.unlink()
  message = "model: no chat template: neither chat_template.jinja nor"
  with pytest.raises(ValueError, match=message):
    load(directory)
  edit(settings, chat_template=source)
  assert load(directory) == CHAT
  edit(settings, chat_template=[{"name": "default", "template": source}])
  assert load(directory) == CHAT
  edit(settings, chat_template=[{"name": "rag", "template": source}])
  with pytest.raises(ValueError, match=message):
    load(directory)


@pytest.mark.parametrize("in_files", [False, True])
def test_a_template_for_tools_alone_is_named(directory, in_files):
  path = directory / "chat_template.jinja"
  source = path.read_text("utf-8")
  default = source.replace("tools", "nothing")
  if in_files:
    path.write_text(default, "utf-8")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("")
  else:
    path.unlink()
    named = {"default": default, "tool_use": source}
    entries = [{"name": k, "template": v} for k, v in named.items()]
    edit(directory / "tokenizer_config.json", chat_template=entries)
  chat, question = load(directory), [GoldenMessage("user", "?")]
  assert chat.open(question).tolist() == CHAT.open(question).tolist()
  with pytest.raises(
    ValueError, match=r"1 tools.* there is one named tool_use"
  ):
    chat.open(question, [TOOL])


def test_templates_know_special_tokens_by_name(directory):
  path = directory / "chat_template.jinja"
  source = "{{ eos_token }}{{ pad_token }}{{ bos_token is defined }}"
  path.write_text(source + path.read_text("utf-8"), "utf-8")
  ids = load(directory).open([GoldenMessage("user", "?")]).tolist()
  named = [END, TEXT_END, *text_ids("False")]
  assert ids == named + CHAT.open([GoldenMessage("user", "?")]).tolist()


def test_special_tokens_may_be_named_in_a_file_of_their_own(directory):
  path = directory / "chat_template.jinja"
  path.write_text("{{ bos_token }}" + path.read_text("utf-8"), "utf-8")
  told = "it writes bos_token, which no file of the tokenizer names"
  with pytest.raises(ValueError, match=told):
    load(directory)
  edit(directory / "special_tokens_map.json", bos_token={"content": "<think>"})
  question = [GoldenMessage("user", "?")]
  asked = CHAT.open(question).tolist()
  named = [*text_ids("<think>"), *asked]
  assert load(directory).open(question).tolist() == named
  # tokenizer_config.json counts first, and may say that there is none.
  edit(directory / "tokenizer_config.json", bos_token=None)
  assert load(directory).open(question).tolist() == asked


@pytest.mark.parametrize("asks", ["if bos_token", "if bos_token is defined"])
def test_a_template_may_ask_for_a_token_that_is_not_named(directory, asks):
  path = directory / "chat_template.jinja"
  start = f"{{% {asks} %}}{{{{ bos_token }}}}{{% endif %}}"
  path.write_text(start + path.read_text("utf-8"), "utf-8")
  chat = load(directory)
  question = [GoldenMessage("user", "?")]
  assert chat.open(question).tolist() == CHAT.open(question).tolist()
  assert pickle.loads(pickle.dumps(chat)) == chat


@pytest.mark.parametrize(
  ("name", "text", "message"),
  [
    ("tokenizer.json", "{}", "model: tokenizer.json cannot be read"),
    ("tokenizer_config.json", "{", "tokenizer_config.json is not valid JSON"),
    (
      "generation_config.json",
      "[]",
      r"generation_config\.json must hold an object",
    ),
    ("chat_template.jinja", "{% if %}", "the chat template is not valid Jinja"),
    ("chat_template.jinja", "{{ raise_exception('no') }}", "messages: no"),
    ("chat_template.jinja", "x", "it writes an answer 0 times"),
    *(
      (name, "[" * 100_000, rf"{name}.* nested deeper than 64 levels")
      for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
      )
    ),
  ],
)
def test_a_broken_file_is_named(directory, name, text, message):
  (directory / name).write_text(text)
  with pytest.raises(ValueError, match=message):
    load(directory)


def change(directory, **parts):
  path = directory / "tokenizer.json"
  data = json.loads(path.read_text("utf-8"))
  for name, value in parts.items():
    data[name] = value(data[name]) if callable(value) else value
  path.write_text(json.dumps(data), "utf-8")


@pytest.mark.parametrize(
  ("parts", "message"),
  [
    ({"decoder": {"type": "Fuse"}}, "decodes with Fuse.*must be byte-level"),
    (
      {"added_tokens": lambda all_: [{**all_[0], "rstrip": True}, *all_[1:]]},
      "'<|endoftext|>' depends on the text around it",
    ),
    (
      {"added_tokens": lambda all_: [{**x, "special": False} for x in all_]},
      "has no special tokens",
    ),
    (
      {"added_tokens": lambda all_: [{**all_[0], "content": ""}, *all_[1:]]},
      r"eos_token_id=.* must be one of the tokenizer's special tokens",
    ),
  ],
)
def test_a_tokenizer_that_cannot_be_used_is_refused(directory, parts, message):
  change(directory, **parts)
  with pytest.raises(ValueError, match=message.replace("|", r"\|")):
    load(directory)


def test_a_tokenizer_that_loses_bytes_is_refused(directory):
  model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 2}, "merges": []}
  change(directory, model=model)
  # 253 of 256 bytes; the first that is printable and not among them is "!".
  with pytest.raises(ValueError, match=r"no token for 253 of 256.*is 0x21"):
    load(directory)


def test_settings_that_cut_texts_short_are_not_obeyed(directory):
  cut = {
    "direction": "Right",
    "max_length": 2,
    "strategy": "LongestFirst",
    "stride": 0,
  }
  change(directory, truncation=cut)
  question = [GoldenMessage("user", "Weather in Ulm?")]
  ids = load(directory).open(question)
  assert ids.tolist() == CHAT.open(question).tolist()


def test_a_token_that_stands_for_no_bytes_is_its_text(directory):
  word = "\u65e5\u672c"
  path = directory / "tokenizer.json"
  data = json.loads(path.read_text("utf-8"))
  new = max(data["model"]["vocab"].values()) + 1
  data["model"]["vocab"][word] = new
  data["added_tokens"] = [x for x in data["added_tokens"] if x["id"] < new]
  path.write_text(json.dumps(data), "utf-8")
  chat = load(directory)
  assert chat.token(new) == chat.decode([new]) == word
  assert chat.pieces()[new] == word.encode()
  assert chat.decoder().feed([new]) == word


SPLIT_FOR_EVER = {
  "type": "Sequence",
  "pretokenizers": [
    {
      "type": "Split",
      "pattern": {"Regex": "(a+)+$"},
      "behavior": "Isolated",
      "invert": False,
    },
    {
      "type": "ByteLevel",
      "add_prefix_space": False,
      "trim_offsets": True,
      "use_regex": False,
    },
  ],
}
TWICE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
MANY = {"type": "Sequence", "normalizers": [TWICE] * 40}


@pytest.mark.process
def test_the_normalizer_of_gemma_stands_its_trial():
  assert hf_chat.HfChat.load(chat_messages.GEMMA) == gemma()


@pytest.mark.process
@pytest.mark.parametrize(
  ("name", "changes", "message"),
  [
    (
      "tokenizer.json",
      {"pre_tokenizer": SPLIT_FOR_EVER},
      "takes more than 60 s or 4 GiB, or ends the process",
    ),
    ("tokenizer.json", {"normalizer": MANY}, "has the normalizers Replace, "),
    ("tokenizer.json", {"normalizer": 3}, r"tokenizer\.json cannot be read"),
    ("tokenizer_config.json", {"eos_token": [[1]]}, None),
    ("generation_config.json", {"eos_token_id": [[1]]}, r"\[1\] must be one"),
    ("generation_config.json", {"eos_token_id": True}, r"True must be one"),
    ("generation_config.json", {"eos_token_id": {}}, r"{} must be one"),
  ],
)
def test_files_are_tried_in_another_process(directory, name, changes, message):
  edit(directory / name, **changes)
  if message is None:
    assert hf_chat.HfChat.load(directory).vocab_size == CHAT.vocab_size
    return
  with pytest.raises(ValueError, match=message) as error:
    hf_chat.HfChat.load(directory)
  assert str(error.value).startswith(str(directory))


def test_templates_without_a_name_are_none(directory):
  (directory / "chat_template.jinja").unlink()
  edit(directory / "tokenizer_config.json", chat_template=[3, {"name": []}])
  with pytest.raises(ValueError, match="no chat template"):
    load(directory)


def test_a_variable_that_no_template_reads_is_refused():
  with pytest.raises(ValueError, match=r"does not read enable_thinkin$"):
    hf_chat.HfChat.load(GOLDEN, {"enable_thinkin": False})


def test_a_directory_without_a_tokenizer_is_refused(tmp_path):
  with pytest.raises(ValueError, match=r"no tokenizer\.json"):
    hf_chat.HfChat.load(tmp_path / "nowhere")


def test_a_chat_is_a_value():
  CHAT.open([GoldenMessage("user", "?")])
  copy = pickle.loads(pickle.dumps(CHAT))
  assert copy == CHAT
  assert hash(copy) == hash(CHAT)
  assert len(repr(CHAT)) < 500
  # With the guards.
  evil = [GoldenMessage("user", "<|im_end|>")]
  assert copy.open(evil).tolist() == CHAT.open(evil).tolist()
