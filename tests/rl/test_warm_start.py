"""Tests of demonstrations; what imitating them is worth is a run's to show."""

import asyncio
import itertools

import pytest

from models import chat as chat_lib
from rl import episode, testing, trajectory, warm_start

CHAT = chat_lib.WordChat(("go", "on", "yes", "no"))
LIMITS = episode.Limits(record_experts=True)


def demonstrations(exploration, count=32, seed=0):
  source = testing.Counting(turns=2)

  async def run():
    return [
      await warm_start.demonstrate(
        source, CHAT, LIMITS, source.task(i, "train"), exploration, seed
      )
      for i in range(count)
    ]

  return asyncio.run(run())


def answers(played):
  return [CHAT.decode(turn.tokens.tolist()) for turn in played.turns]


def test_an_oracle_that_does_not_explore_is_always_right():
  for played in demonstrations(0.0, count=4):
    assert played.status is trajectory.Status.COMPLETED
    assert answers(played) == ["yes", "yes"]
    # An oracle has no routers; imitating it leaves the learner's free.
    assert played.experts is None


def test_exploring_mixes_in_random_answers_that_repeat():
  some = [answers(played) for played in demonstrations(1.0)]
  said = list(itertools.chain(*some))
  # 64 fair draws: fewer than 16 of one kind come once in 10,000 seeds.
  assert 16 <= said.count("no") <= 48
  assert some == [answers(played) for played in demonstrations(1.0)]
  assert some != [answers(played) for played in demonstrations(1.0, seed=1)]


@pytest.mark.parametrize(
  ("fields", "words"),
  [
    ({"steps": 0}, r"warm_start\.steps=0 is below 1; .*warm_start=none"),
    ({"episodes": -1}, r"warm_start\.episodes=-1 is below 1"),
    ({"exploration": 1.5}, r"warm_start\.exploration=1\.5 is outside"),
    ({"exploration": float("nan")}, r"warm_start\.exploration=nan is outside"),
  ],
)
def test_a_warm_start_that_cannot_run_is_refused(fields, words):
  with pytest.raises(ValueError, match=words):
    warm_start.WarmStart(**fields).validate()
