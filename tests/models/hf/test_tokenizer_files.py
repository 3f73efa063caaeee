"""A tokenizer as files; that transformers reads them is checked by interop."""

import json

import pytest

from models.chat import word_chat
from models.hf import tokenizer_files

CHAT = word_chat.WordChat(("guess", "2", "\u00fcber"))


def read(directory, name):
  return json.loads((directory / name).read_text("utf-8"))


def test_every_id_of_the_words_is_in_the_file(tmp_path):
  ids = tokenizer_files.write(CHAT, tmp_path)
  data = read(tmp_path, "tokenizer.json")
  expected = {CHAT.token(i): i for i in range(CHAT.vocab_size)}
  assert data["model"]["vocab"] == expected
  assert data["pre_tokenizer"] == {"type": "WhitespaceSplit"}
  # No word has a space: what is not in the list stays without an id.
  assert " " in data["model"]["unk_token"]
  special = {token["content"]: token["id"] for token in data["added_tokens"]}
  assert special == {CHAT.token(i): i for i in range(3)}
  assert ids == read(tmp_path, "generation_config.json")
  assert ids == {"eos_token_id": word_chat.END, "pad_token_id": word_chat.PAD}
  names = read(tmp_path, "tokenizer_config.json")
  assert (names["eos_token"], names["pad_token"]) == ("<end>", "<pad>")


def test_ids_are_counted_whatever_kind_of_tokenizer_it_is(tmp_path):
  assert tokenizer_files.num_ids(tmp_path) == 0
  tokenizer_files.write(CHAT, tmp_path)
  assert tokenizer_files.num_ids(tmp_path) == CHAT.vocab_size == 6
  path = tmp_path / "tokenizer.json"
  for model, added, expected in (
    # Added tokens may leave a hole, or lie within the vocabulary.
    ({"vocab": {"a": 0, "b": 1}}, [{"id": 7}], 8),
    ({"vocab": {"a": 0, "b": 1}}, [{"id": 0}], 2),
    # A list of pieces with their scores.
    ({"vocab": [["a", -1.0], ["b", -2.0], ["c", -3.0]]}, [], 3),
  ):
    path.write_text(json.dumps({"model": model, "added_tokens": added}))
    assert tokenizer_files.num_ids(tmp_path) == expected
  for text, message in (
    ("", "is not valid JSON"),
    ("[]", "must hold an object"),
    ("{}", "cannot be read as a tokenizer"),
    ('{"model": 3}', "cannot be read as a tokenizer"),
    ('{"model": {"vocab": {"a": "0"}}}', "has the id '0'"),
    ('{"model": {"vocab": {"a": true}}}', "has the id True"),
    ('{"model": {"vocab": {"a": 99999999}}}', "from 0 below 16,777,216"),
    ('{"model": {"vocab": {}}, "added_tokens": [3]}', "cannot be read"),
    (f'{{"model": {"[" * 9999}{"]" * 9999}}}', "deeper than 64 levels"),
  ):
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
      tokenizer_files.num_ids(tmp_path)


def test_a_tokenizer_is_another_one_unless_it_gives_the_same_ids(tmp_path):
  # Without one there is nothing that could differ.
  assert not tokenizer_files.is_other(CHAT, tmp_path)
  tokenizer_files.write(CHAT, tmp_path)
  assert not tokenizer_files.is_other(CHAT, tmp_path)
  other = word_chat.WordChat((*CHAT.words, "more"))
  assert tokenizer_files.is_other(other, tmp_path)
  (tmp_path / "tokenizer.json").write_text("{}")
  assert tokenizer_files.is_other(CHAT, tmp_path)
  (tmp_path / "tokenizer.json").rename(tmp_path / "vocab.json")
  assert tokenizer_files.is_other(CHAT, tmp_path)


def test_a_copy_returns_the_special_ids_of_the_config(tmp_path):
  source, target = tmp_path / "source", tmp_path / "target"
  source.mkdir()
  target.mkdir()
  with pytest.raises(ValueError, match="source holds no tokenizer"):
    tokenizer_files.copy(source, target)
  tokenizer_files.write(CHAT, source)
  assert tokenizer_files.copy(source, target) == {}
  config = {"eos_token_id": [5, 6], "pad_token_id": 5, "vocab_size": 9}
  (source / "config.json").write_text(json.dumps(config))
  ids = tokenizer_files.copy(source, target)
  assert ids == {"eos_token_id": [5, 6], "pad_token_id": 5}
  names = [path.name for path in source.iterdir()]
  assert sorted(path.name for path in target.iterdir()) == sorted(
    set(names) - {"config.json"}
  )


def test_a_word_that_holds_a_special_token_is_refused(tmp_path):
  words = word_chat.WordChat(("fine", "x<agent>"))
  with pytest.raises(ValueError, match=r"'x<agent>' holds .*rename"):
    tokenizer_files.write(words, tmp_path)
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("id_", ["a", -1, 2**24, 1.5, None, True])
@pytest.mark.parametrize("place", ["vocab", "added"])
def test_an_id_that_is_no_number_is_refused(tmp_path, place, id_):
  tokenizer_files.write(CHAT, tmp_path)
  data = read(tmp_path, "tokenizer.json")
  if place == "vocab":
    data["model"]["vocab"]["odd"] = id_
  else:
    data["added_tokens"][0]["id"] = id_
  (tmp_path / "tokenizer.json").write_text(json.dumps(data))
  with pytest.raises(ValueError, match=r"has the id .*; ids are numbers"):
    tokenizer_files.num_ids(tmp_path)


@pytest.mark.parametrize("odd", [3, [3], [{"id": 0}, None]])
def test_added_tokens_that_are_none_are_refused(tmp_path, odd):
  tokenizer_files.write(CHAT, tmp_path)
  data = read(tmp_path, "tokenizer.json") | {"added_tokens": odd}
  (tmp_path / "tokenizer.json").write_text(json.dumps(data))
  with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read as a"):
    tokenizer_files.num_ids(tmp_path)


def test_a_copy_names_every_id_that_ends_an_answer(tmp_path):
  # A base model names the end of a text, 1, and not that of a turn, 5.
  source, name = tmp_path / "source", "generation_config.json"
  source.mkdir()
  ids = tokenizer_files.write(CHAT, source)

  def copied(place, stop_ids):
    (tmp_path / place).mkdir()
    assert tokenizer_files.copy(source, tmp_path / place, stop_ids) == ids
    return read(tmp_path / place, name)

  (source / "config.json").write_text(json.dumps(ids))
  assert copied("all known", (1,)) == ids == copied("as they are", ())
  assert copied("another", (5, 1)) == ids | {"eos_token_id": [1, 5]}
  (source / name).unlink()
  assert copied("of config.json", (5, 1)) == {"eos_token_id": [1, 5]}
