"""Recorded conversations in ids; what a template writes is tested with it."""

import numpy as np
import pytest

from envs import base
from models.chat import hf_chat, word_chat
from rl.rollout import recordings
from tests.helpers import chat_messages

WORDS = word_chat.WordChat(("go", "on", "yes", "no"))
PAD, END, AGENT = 0, 1, 2
GO, ON, YES, NO = 3, 4, 5, 6


def chat(*words, first=0, tools=(), place="chats.jsonl:3"):
  """A conversation of words, which the user begins."""
  roles = ("user", "assistant") * len(words)
  messages = [
    base.Message(role, word) for role, word in zip(roles, words, strict=False)
  ]
  return base.Recording(place, messages, tools, first)


class Source:
  """Recorded examples, the same for both splits."""

  paired = False

  def __init__(self, *examples):
    self._examples = examples

  def examples(self, split):
    return iter(self._examples)


def test_answers_are_sampled_and_nothing_else():
  found = recordings.encode(WORDS, chat("go on", "yes", "on", "no"), 7, 1)
  assert found.ids.tolist() == [GO, ON, AGENT, YES, END, ON, AGENT, NO, END]
  assert found.sampled.tolist() == [False] * 3 + [True] * 2 + [False] * 2 + [
    *(True, True)
  ]
  assert (found.group_id, found.index) == (7, 1)
  assert found.status.trainable


def test_earlier_answers_may_be_context():
  found = recordings.encode(WORDS, chat("go", "yes", "on", "no", first=3), 0, 0)
  assert found.ids.tolist() == [GO, AGENT, YES, END, ON, AGENT, NO, END]
  assert found.sampled.tolist() == [False] * 6 + [True] * 2


def test_the_chat_of_a_model_writes_them_as_its_template_does():
  chats = hf_chat.HfChat.load(chat_messages.GOLDEN)
  found = recordings.encode(chats, chat("go", "<|im_end|>"), 0, 0)
  ((context, answer),) = chats.answers(chat("go", "<|im_end|>").messages)
  np.testing.assert_array_equal(found.ids, [*context, *answer])
  assert chats.decode(found.ids[found.sampled]).endswith("<|im_end|>")


@pytest.mark.parametrize(
  ("recording", "told"),
  [
    (chat("go", "maybe"), "word 'maybe' is not among the 4 known ones"),
    (chat("go", "yes", tools=({},)), "1 tools cannot be shown in a list of"),
  ],
)
def test_a_conversation_without_an_encoding_is_named(recording, told):
  with pytest.raises(ValueError, match=rf"^chats\.jsonl:3: {told}"):
    recordings.encode(WORDS, recording, 0, 0)


def test_what_a_template_rewrites_is_told_the_way_out():
  chats = hf_chat.HfChat.load(chat_messages.GOLDEN)
  said = chat("go", "<think>hm</think>on", "go", "on")
  with pytest.raises(ValueError, match=r":3: message 1: .*each_answer=true"):
    recordings.encode(chats, said, 0, 0)
  # An example of its own has but the last answer, so that is no way out of it.
  chats = hf_chat.HfChat.load(chat_messages.GOLDEN, {"enable_thinking": False})
  said = chat("go", "<think>hm</think>on")
  with pytest.raises(ValueError, match="use another template") as caught:
    recordings.encode(chats, said, 0, 0)
  assert "each_answer" not in str(caught.value)


def load(source, length, max_length=8, **settings):
  return recordings.load(
    source, WORDS, "eval", length=length, max_length=max_length, **settings
  )


def test_examples_that_are_too_long_are_refused_or_counted():
  # Of 4, 5 and, as a pair, 8 tokens.
  short, long = chat("go", "yes"), chat("go on", "yes")
  source = Source((short,), (long,), (short, short))
  with pytest.raises(ValueError, match=r":3: its 5 .*batch\.length=4; raise"):
    load(source, 4)
  with pytest.raises(
    ValueError, match=r":3: its 5 .*model\.max_length=4; raise"
  ):
    load(source, 8, 4)
  found = load(source, 4, too_long="drop")
  assert (len(found.examples), found.dropped) == (1, 2)
  found = load(source, 8)
  assert [[t.index for t in x] for x in found.examples] == [[0], [0], [0, 1]]
  assert len(load(source, 8, most=2).examples) == 2


def test_a_row_that_holds_none_is_unusable_as_well():
  class Broken(Source):
    def examples(self, split):
      yield from super().examples(split)
      raise ValueError("chats[4]: no field 'messages'")

  with pytest.raises(recordings.UnusableRow, match=r"^chats\[4\]: no field"):
    load(Broken((chat("go", "yes"),)), 8)


def test_a_split_without_examples_is_told_apart_from_long_ones():
  with pytest.raises(
    ValueError, match=r"^there are no examples for eval; .*held_out=0"
  ):
    load(Source(), 8)


def test_no_example_at_all_is_refused():
  source = Source((chat("go", "yes"),))
  with pytest.raises(
    ValueError, match=r"none of 1 examples for eval fits: .*:3"
  ):
    load(source, 3, too_long="drop")
