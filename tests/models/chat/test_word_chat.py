import dataclasses

import numpy as np
import pytest

from models.chat import word_chat


@dataclasses.dataclass(frozen=True)
class GoldenMessage:
  role: str
  content: str


@pytest.fixture
def chat():
  return word_chat.WordChat(("guess", "higher", "lower", "1", "2"))


def test_a_conversation_is_the_pieces_in_order(chat):
  first = chat.open(
    [GoldenMessage("system", "guess"), GoldenMessage("user", "1  2\n")]
  )
  answer = chat.encode_answer("2")
  more = chat.append([GoldenMessage("user", "lower")])
  # <pad> <end> <agent> are 0 1 2; guess higher lower 1 2 are 3 to 7.
  assert first.tolist() == [3, 6, 7, word_chat.AGENT]
  assert answer.tolist() == [7, word_chat.END]
  assert more.tolist() == [5, word_chat.AGENT]
  assert {x.dtype for x in (first, answer, more)} == {np.dtype(np.int32)}
  assert answer[-1] in chat.stop_ids
  assert max(map(max, (first, answer, more))) < chat.vocab_size == 8


def test_an_answer_survives_the_round_trip(chat):
  assert chat.decode(chat.encode_answer("guess 1 2")) == "guess 1 2"
  assert chat.decode(chat.encode_answer("")) == ""


def test_an_unknown_word_may_be_several_without_spaces_between_them():
  chat = word_chat.WordChat(("a", "b", "c"))
  assert len(chat.encode_answer("c a b")) == 3 + 1  # the end of the turn
  with pytest.raises(ValueError, match=r"'cab' .* are separated by spaces"):
    chat.encode_answer("cab")


def test_special_tokens_are_printed_but_are_not_part_of_the_text(chat):
  ids = [word_chat.AGENT, 4, word_chat.END, word_chat.PAD]
  assert [chat.token(i) for i in ids] == ["<agent>", "higher", "<end>", "<pad>"]
  assert chat.decode(ids) == "higher"


def test_an_unknown_word_is_named_with_the_nearest_known_one(chat):
  with pytest.raises(ValueError, match=r"'hihger' .* nearest is 'higher'"):
    chat.open([GoldenMessage("user", "guess hihger")])
  with pytest.raises(ValueError, match=r"'zz' .* known ones; words are"):
    chat.open([GoldenMessage("user", "guess zz")])
  # Text cannot end a turn: special tokens are not words.
  with pytest.raises(ValueError, match="'<end>' is not among the 5 known"):
    chat.encode_answer("1 <end>")


@pytest.mark.parametrize(
  ("words", "message"),
  [
    (("a", "b", "a"), "word 'a' already has an id"),
    (("a", "<agent>"), "word '<agent>' already has an id"),
    (("a b",), "word 'a b' is not one word"),
    (("",), "word '' is not one word"),
  ],
)
def test_a_list_that_cannot_be_told_apart_is_refused(words, message):
  with pytest.raises(ValueError, match=message):
    word_chat.WordChat(words)


def test_an_id_past_the_words_is_shown_as_what_it_is(chat):
  # Ids are 0 to 7; a model with a padded vocabulary may sample 42.
  assert chat.token(42) == "<id 42>"
  assert chat.decode([3, 8, word_chat.END]) == "guess <id 8>"
  with pytest.raises(ValueError, match="id -1 is below 0"):
    chat.token(-1)
