"""Answers parsed piece by piece, with a real tokenizer and template."""

import asyncio
import dataclasses
import random

import numpy as np
import pytest

from models.chat import byte_chat, hf_chat, tool_calls, word_chat
from rl.agents import answer_stream
from rl.engine import contract
from rl.rollout import episode
from rl.testing import scripted_engine
from tests.helpers import chat_messages
from tests.helpers.chat_messages import GOLDEN

HF = hf_chat.HfChat.load(GOLDEN)
WORDS = word_chat.WordChat(("go", "on", "yes", "no"))
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
CALLED = (tool_calls.Call("add", '{"a": 1}'),)


def read(ids, pieces=None, chat: episode.Chat = HF, **how):
  """Returns the parser and every (content, reasoning) that it returned."""
  parser = answer_stream.AnswerParser(chat, **how)
  shown = []
  for size in pieces or [1] * len(ids):
    shown.append(parser.feed(np.array(ids[:size], np.int32)))
    ids = ids[size:]
  return parser, [*shown, parser.end()]


def said(text, **how):
  """Returns the parser and the shown content of a text without reasoning."""
  parser, shown = read(HF.encode_answer(text).tolist(), **how)
  assert not any(reasoning for _, reasoning in shown)
  return parser, "".join(content for content, _ in shown)


@pytest.mark.parametrize(
  ("text", "content", "reasoning", "calls"),
  [
    ("plain", "plain", "", ()),
    ("  plain \n", "  plain \n", "", ()),
    ("<think>\nhm\n</think>\n\nso", "so", "hm", ()),
    ("<think>never done", "", "never done", ()),
    ("<thin", "<thin", "", ()),
    (f"one {CALL}", "one", "", CALLED),
    (f"{CALL}\n{CALL}", "", "", CALLED * 2),
    (f"a {CALL} b", "a  b", "", CALLED),
    ("a <tool_call> b", "a <tool_call> b", "", ()),
    (f"<think>x {CALL}</think>so", "so", f"x {CALL}", ()),
    (f"<think>x</think>so {CALL}", "so", "x", CALLED),
  ],
)
def test_pieces_add_up_to_the_answer(text, content, reasoning, calls):
  ids = HF.encode_answer(text).tolist()
  rng = random.Random(0)
  for _ in range(5):
    sizes, left = [], len(ids)
    while left:
      sizes.append(rng.randint(1, left))
      left -= sizes[-1]
    parser, shown = read(ids, sizes, calls=True)
    assert "".join(piece for _, piece in shown) == reasoning
    # White space at the end may be shown before a call takes it away.
    assert "".join(piece for piece, _ in shown).rstrip() == content.rstrip()
    assert parser.answer() == tool_calls.Answer(content, calls, reasoning)
    assert parser.num_tokens == len(ids)


@pytest.mark.parametrize("form", chat_messages.FORMS)
def test_calls_of_another_form_end_the_content(form):
  chat = chat_messages.chat_of_form(form)
  text = tool_calls.write(
    tool_calls.Answer("a {x} <", CALLED), chat.call_format
  )
  ids = chat.encode_answer(text).tolist()
  schema = {"properties": {"a": {"type": "integer"}}}
  tools = [{"function": {"name": "add", "parameters": schema}}]
  how = {"chat": chat, "calls": True, "tools": tools}
  parser, shown = read(ids, **how)
  assert "".join(piece for piece, _ in shown).rstrip() == "a {x} <"
  assert parser.answer().tool_calls == CALLED
  parser, _ = read(ids[:-1] * 2, **how, one_call=True)
  assert parser.stopped
  assert parser.num_tokens == len(ids) - 1
  # Some forms close all calls at once.
  two = tool_calls.write(tool_calls.Answer("", CALLED * 2), chat.call_format)
  parser, _ = read(chat.encode_answer(two).tolist(), **how, one_call=True)
  assert parser.answer().tool_calls == CALLED


def test_text_is_shown_as_soon_as_it_is_certain():
  ids = HF.encode_answer("<think>a</think>\n\nb <tool_call>").tolist()
  _, shown = read(ids, calls=True)
  shown = [piece for piece in shown if any(piece)]
  # Thinking comes whole when it ends, a possible call only at the end.
  assert shown[0] == ("", "a")
  assert shown[1][0].startswith("b")
  assert shown[-1][0].endswith("<tool_call>")


def test_thinking_that_the_prompt_opened_is_none_of_the_content():
  opens = "{% if add_generation_prompt %}<think>\n{% endif %}"
  template = dataclasses.replace(HF.template, source=HF.template.source + opens)
  chat = dataclasses.replace(HF, template=template)
  assert chat.thinks
  ids = HF.encode_answer("hm\n</think>\n\nso").tolist()
  _, shown = read(ids, chat=chat)
  shown = [piece for piece in shown if any(piece)]
  assert shown[0] == ("", "hm")
  assert "".join(content for content, _ in shown) == "so"
  cut = read(ids[:1], chat=chat)[1]
  assert "".join(content for content, _ in cut) == ""


def test_half_a_character_is_never_shown():
  text = "é東\U0001f600"
  _, shown = read(HF.encode_answer(text).tolist())
  assert "".join(piece for piece, _ in shown) == text
  assert all("\ufffd" not in piece for piece, _ in shown)
  cut = HF.encode_answer("\U0001f600").tolist()[:1]
  assert read(cut)[1][-1] == ("\ufffd", "")


def test_calls_that_nobody_asked_for_are_content():
  parser, content = said(f"do {CALL}")
  assert content == f"do {CALL}"
  assert parser.answer().content == content
  thought = HF.encode_answer(f"<think>x</think>{CALL}").tolist()
  assert read(thought)[0].answer() == tool_calls.Answer(CALL, (), "x")


def test_raw_text_keeps_its_thinking():
  _, content = said("<think>x</think>y", raw=True)
  assert content == "<think>x</think>y"


def test_a_stop_text_ends_the_answer_and_is_never_shown():
  ids = HF.encode_answer("ab stop cd").tolist()
  for stops in (["stop"], ["cd", "stop"], ["never", "stop c", "stop"]):
    parser, shown = read(ids, stops=stops)
    assert parser.stopped
    assert "".join(piece for piece, _ in shown) == "ab "
    # The ids are those up to the one that completes it, as sampled.
    text = HF.decode(ids[: parser.num_tokens])
    assert "stop" in text
    assert "stop" not in HF.decode(ids[: parser.num_tokens - 1])


def test_what_might_have_been_a_stop_text_is_shown_at_the_end():
  parser, content = said("ab sto", stops=["stop"])
  assert not parser.stopped
  assert content == "ab sto"


def test_an_answer_may_end_behind_its_first_call():
  ids = HF.encode_answer(f"{CALL}{CALL}").tolist()
  parser, _ = read(ids, calls=True, one_call=True)
  assert parser.stopped
  assert parser.answer().tool_calls == CALLED
  assert HF.decode(ids[: parser.num_tokens]).count("</tool_call>") == 1


def test_words_are_shown_with_the_space_between_them():
  parser, shown = read([5, 6, 1], chat=WORDS)
  assert [piece for piece, _ in shown] == ["yes", " no", "", ""]
  assert parser.answer() == tool_calls.Answer("yes no")


@pytest.mark.parametrize("chat", [WORDS, byte_chat.ByteChat()])
def test_pieces_add_up_to_the_text_of_all_ids(chat):
  rng = random.Random(0)
  # Characters of four bytes and of three, half ones, and ids without text.
  parts = [*map(str.encode, "\U0001f600東")] * 2
  parts += [[0xE6], [0x9F, 0x98], [0], [1], [3, 4], [5], [6, 9], [256, 258]]
  lost = 0
  for _ in range(200):
    chosen = rng.choices(parts, k=rng.randrange(8))
    ids = [index for part in chosen for index in part]
    sizes = [rng.randrange(4) for _ in ids] + [len(ids)]
    parser, shown = read(ids, sizes, chat=chat)
    assert "".join(piece for piece, _ in shown) == chat.decode(ids)
    assert parser.answer().content == chat.decode(ids)
    lost += "\ufffd" in chat.decode(ids)
  assert lost < 150
  assert (lost > 50) == (chat is not WORDS)


def test_half_a_character_of_bytes_is_never_shown():
  ids = list("é东!".encode())
  _, shown = read(ids, chat=byte_chat.ByteChat())
  assert [piece for piece, _ in shown] == ["", "é", "", "", "东", "!", ""]
  assert read(ids[:3], chat=byte_chat.ByteChat())[1][-1] == ("\ufffd", "")


def test_an_id_is_decoded_once():
  decoded = []

  class Chat(word_chat.WordChat):
    def token(self, index):
      decoded.append(index)
      return super().token(index)

  ids = [3, 4, 5, 6] * 5
  read(ids, chat=Chat(WORDS.words))
  assert decoded == ids


def request(**changes):
  fields = {
    "request_id": "a",
    "session": "a",
    "tokens": np.array([3], np.int32),
    "max_tokens": 64,
    "stop_ids": HF.stop_ids,
  }
  return contract.DecodeRequest(**{**fields, **changes})


@pytest.mark.parametrize("whole", [True, False])
def test_the_engine_stops_where_the_text_does(whole):
  ids = HF.encode_answer("ab stop cd ef gh").tolist()
  one = scripted_engine.ScriptedEngine(lambda request: ids)
  parser = answer_stream.AnswerParser(HF, stops=["stop"])

  async def sample():
    if whole:
      return await answer_stream.sample_answer(one, request(), parser)
    pieces = [
      p async for p in answer_stream.stream_answer(one, request(), parser)
    ]
    tokens = np.concatenate([piece.tokens for piece in pieces])
    assert pieces[-1].completion is not None
    assert np.array_equal(tokens, pieces[-1].completion.tokens)
    assert "".join(piece.content for piece in pieces) == "ab "
    return pieces[-1].completion

  done = asyncio.run(sample())
  assert done is not None
  count = parser.num_tokens
  assert done.stop == "stop"
  assert done.tokens.tolist() == ids[:count]
  assert done.logprobs.tolist() == [-(i + 1) / 8 for i in range(count)]
  assert len(done.versions) == count
  # Aborted, after at most one more id.
  assert one.stats().sampled_tokens <= count + 1
  assert one.stats().running == 0


def test_experts_and_listed_ids_are_cut_with_the_tokens():
  experts = np.arange(6 * 2, dtype=np.int32).reshape(6, 1, 2)
  top = contract.TopLogprobs(
    ids=np.arange(6, dtype=np.int32).reshape(3, 2),
    logprobs=np.zeros((3, 2), np.float32),
  )
  done = contract.Completion(
    tokens=np.array([4, 5, 6], np.int32),
    logprobs=np.zeros(3, np.float32),
    versions=np.zeros(3, np.int32),
    stop="length",
    cached_tokens=0,
    decode_s=0.0,
    experts=experts,
    top=top,
  )
  cut = answer_stream.truncated(done, 1)
  # Three ids of context and one sampled.
  assert cut.experts is not None
  assert np.array_equal(cut.experts, experts[:4])
  assert (cut.tokens.tolist(), cut.stop) == ([4], "stop")
  assert cut.top is not None
  assert (cut.top.ids.tolist(), cut.top.logprobs.shape) == ([[0, 1]], (1, 2))


async def test_closing_early_aborts_the_request():
  one = scripted_engine.ScriptedEngine(lambda request: [4] * 9)

  pieces = answer_stream.stream_answer(
    one, request(), answer_stream.AnswerParser(HF)
  )
  await anext(pieces)
  assert one.stats().running == 1
  await pieces.aclose()
  assert one.stats().running == 0
