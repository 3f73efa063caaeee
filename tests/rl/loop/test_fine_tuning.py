"""The order of examples, their batches, and sources that do not fit."""

import asyncio
import collections
import itertools

import numpy as np
import pytest

from envs import base
from models.chat import word_chat
from rl.algorithms import preference_loss
from rl.loop import fine_tuning
from rl.testing import fakes

WORDS = ("a", "b", "c", "d", "e")
CHAT = word_chat.WordChat(WORDS)
DPO = preference_loss.Dpo()


class Recorded:
  """Five examples, each with an answer of its own."""

  name = "recorded"

  def __init__(self, paired=False):
    self.paired = paired

  def examples(self, split):
    for i, word in enumerate(WORDS):
      answers = (word, WORDS[i - 1]) if self.paired else (word,)
      yield tuple(
        base.Recording(
          f"x.jsonl:{i}",
          [base.Message("user", "a"), base.Message("assistant", said)],
        )
        for said in answers
      )


def supervision(source, **settings):
  return fine_tuning.supervision(
    fine_tuning.FineTuning(**settings),
    source,
    CHAT,
    lambda text: None,
    rows=2,
    length=8,
    max_length=8,
    seed=0,
  )


def answers(batch):
  """Returns the word of each answer: the first of its two sampled tokens."""
  found = []
  for tokens, sampled in zip(batch.tokens, batch.sampled, strict=True):
    found += [CHAT.token(i) for i in tokens[sampled][::2].tolist()]
  return found


def trained(found):
  """Returns the answers of each step."""
  return [
    [word for batch in asyncio.run(found.batches(i)) for word in answers(batch)]
    for i in range(found.steps)
  ]


def test_an_epoch_has_each_example_once_in_an_order_of_its_own():
  first = fine_tuning.order(50, range(50), 3)
  second = fine_tuning.order(50, range(50, 100), 3)
  assert sorted(first) == sorted(second) == list(range(50))
  assert first != second
  assert first != fine_tuning.order(50, range(50), 4)
  # A step may end an epoch and begin the next.
  assert fine_tuning.order(50, range(48, 53), 3) == first[48:] + second[:3]


def test_steps_are_those_of_the_epochs_or_as_many_as_asked_for():
  # Two epochs of 5 examples are 10: 4, 4 and 2.
  found = supervision(Recorded(), epochs=2, examples=4)
  steps = trained(found)
  assert [len(step) for step in steps] == [4, 4, 2]
  assert collections.Counter(itertools.chain(*steps)) == dict.fromkeys(WORDS, 2)
  assert trained(supervision(Recorded(), epochs=2, examples=4)) == steps
  found = supervision(Recorded(), steps=7, examples=4)
  assert [len(step) for step in trained(found)] == [4] * 7


def test_pairs_lie_side_by_side_the_preferred_answer_first():
  found = supervision(Recorded(paired=True), loss=DPO, examples=5)
  (batches,) = (asyncio.run(found.batches(i)) for i in range(found.steps))
  seen = 0
  for batch in batches:
    for tokens, sampled, segments, signs in zip(
      batch.tokens,
      batch.sampled,
      batch.segments,
      batch.advantages,
      strict=True,
    ):
      for chosen in range(1, segments.max(), 2):
        won, lost = (sampled & (segments == s) for s in (chosen, chosen + 1))
        assert signs[won].tolist() == [1, 1]
        assert signs[lost].tolist() == [-1, -1]
        words = [CHAT.token(int(tokens[x][0])) for x in (won, lost)]
        assert words[1] == WORDS[WORDS.index(words[0]) - 1]
        seen += 1
      assert not np.asarray(signs)[~sampled].any()
  assert seen == 5


def test_held_out_examples_are_measured_up_to_a_number():
  found = supervision(Recorded(), held_out=3)
  held_out = itertools.chain(*map(answers, found.held_out))
  assert sorted(held_out) == [*"abc"]
  assert not supervision(Recorded(), held_out=0).held_out


@pytest.mark.parametrize(
  ("source", "settings", "told"),
  [
    (fakes.Counting(turns=2), {}, "has no recorded conversations for"),
    (Recorded(), {"loss": DPO}, r"loss=dpo: it is of pairs.*recordings\.Pairs"),
    (
      Recorded(paired=True),
      {},
      r"negative_log_likelihood: it is of conversations.*recordings\.Chats",
    ),
  ],
)
def test_a_source_that_has_none_is_refused(source, settings, told):
  with pytest.raises(ValueError, match=told):
    fine_tuning.recorded(source, fine_tuning.FineTuning(**settings))


@pytest.mark.parametrize(
  ("fields", "told"),
  [
    ({"epochs": 0}, r"warm_start\.epochs=0 must be at least 1"),
    ({"steps": 0}, r"warm_start\.steps=0 must be at least 1"),
    ({"held_out": -1}, r"warm_start\.held_out=-1 must be at least 0"),
  ],
)
def test_counts_that_cannot_work_are_refused(fields, told):
  with pytest.raises(ValueError, match=told):
    fine_tuning.FineTuning(**fields).validate()
