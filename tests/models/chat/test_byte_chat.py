"""Bytes and control tokens."""

import pytest

from envs import base
from models.chat import byte_chat, tool_calls

CHAT = byte_chat.ByteChat()


def text_of(ids):
  return "".join(CHAT.token(int(i)) for i in ids)


def test_a_conversation_is_bytes_between_control_tokens():
  said = [base.Message("system", "be"), base.Message("user", "a<end>")]
  # The <end> of a message is five bytes, not the control token.
  ids = CHAT.open(said)
  assert text_of(ids) == "<system>be<end><user>a<end><end><assistant>"
  assert (ids == CHAT.stop_ids[0]).sum() == 2
  rest = CHAT.append([base.Message("tool", "7")])
  assert text_of(rest) == "<tool>7<end><assistant>"
  cut = CHAT.append([base.Message("tool", "7")], answer_ended=False)
  assert text_of(cut) == "<end><tool>7<end><assistant>"


def test_tools_are_shown_first():
  tool = {"type": "function", "function": {"name": "add"}}
  shown = text_of(CHAT.open([base.Message("user", "a")], [tool]))
  assert shown.startswith('<system>[{"type": "function"')


@pytest.mark.parametrize("text", ["", "é\x00🙂", "<end>", "x" * 10_000])
def test_any_answer_comes_back(text):
  ids = CHAT.encode_answer(text)
  assert ids[-1] in CHAT.stop_ids
  assert ids.max() < CHAT.vocab_size
  assert CHAT.decode(ids) == text
  assert CHAT.parse(ids) == tool_calls.Answer(text)


def test_half_a_character_is_shown_as_a_byte():
  assert CHAT.token("é".encode()[0]) == "\\xc3"
  assert CHAT.decode("é".encode()[:1]) == "\ufffd"
