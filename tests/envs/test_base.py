"""What a source may leave out, and who says so."""

import dataclasses
import json

import pytest

from envs import base, delayed, mixture
from envs.suites import textarena


@dataclasses.dataclass(frozen=True)
class Plain:
  """A source that neither lists its words nor demonstrates anything."""

  name: str = "plain"

  def task(self, index, split):
    return base.Task(f"{self.name}/{split}/{index}", index, split, index)

  def __call__(self, task):
    raise NotImplementedError


GAME = textarena.GuessTheNumber()
SLOW = delayed.Delayed(source=Plain())
MIXED = mixture.Mixture((mixture.Part(GAME), mixture.Part(SLOW)))


def test_a_source_needs_neither_words_nor_demonstrations():
  assert isinstance(Plain(), base.Source)
  assert not isinstance(Plain(), base.WordList | base.Demonstrates)


@pytest.mark.parametrize("source", [Plain(), SLOW, MIXED])
def test_a_source_without_words_needs_a_tokenizer(source):
  with pytest.raises(ValueError, match=r"plain has no list of words.*chat=hf"):
    base.words(source)


@pytest.mark.parametrize("source", [Plain(), SLOW])
def test_a_source_without_an_oracle_cannot_demonstrate(source):
  message = "plain has no demonstrations.*warm_start=none"
  with pytest.raises(ValueError, match=message):
    base.demonstrator(source)


def test_a_wrapped_source_keeps_what_it_can_do():
  slow = delayed.Delayed(source=GAME)
  assert base.words(slow) == GAME.words
  task = GAME.task(0, "train")
  assert base.demonstrator(slow).oracle(task, []) == GAME.oracle(task, [])


def test_splits_share_no_beginning():
  # 50 beginnings, about 10 of them for eval.
  begin = "start {}".format
  seeds = {
    split: {
      base.first_seed("x", split, i, lambda s: begin(s % 50)) % 50
      for i in range(200)
    }
    for split in ("train", "eval")
  }
  assert not seeds["train"] & seeds["eval"]
  assert 5 <= len(seeds["eval"]) <= 15
  assert len(seeds["train"]) + len(seeds["eval"]) == 50


def test_a_split_without_a_task_is_an_error():
  with pytest.raises(ValueError, match=r"1000 tasks of x is for eval.*larger"):
    base.first_seed("x", "eval", 0, lambda seed: "the same")


def _raised(call):
  with pytest.raises(ValueError, match=r"\w") as caught:
    call()
  return base.reason(caught.value)


def test_the_reason_of_an_error_ends_with_the_place_in_code_of_the_users():
  def load():
    return json.loads("{")  # Fails in a file of Python's.

  line = load.__code__.co_firstlineno + 1
  words = _raised(load)
  assert words.startswith("JSONDecodeError: Expecting property name")
  assert words.endswith(f" (test_base.py:{line}, in load)")


def test_an_error_of_nobodys_code_has_no_place():
  assert base.reason(OSError("no such game")) == "OSError: no such game"


def test_the_reason_of_an_error_is_bounded_and_keeps_its_place():
  def fail():
    raise ValueError("x" * 100_000)

  words = _raised(fail)
  assert len(words) < 4100
  assert words.endswith(", in fail)")
