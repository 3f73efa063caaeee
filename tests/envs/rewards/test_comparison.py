"""Tests of the rewards that compare the members of a group."""

import asyncio

import pytest

from envs import base, mixture
from envs.rewards import comparison, rewards

TASK = base.Task("sum/train/0", 0, "train", 0, answer="4")
SHORTEST = comparison.Shortest(among=rewards.NumericMatch())


def said(text, **fields):
  return base.Transcript([base.Message("assistant", text, **fields)], [0.5])


def values(reward, *transcripts):
  grades = asyncio.run(reward(TASK, transcripts))
  return [grade.value for grade in grades]


def test_good_answers_are_ranked_by_length_and_equal_ones_share_their_rank():
  group = [said("it is 4"), said("4"), said("5"), said("= 4"), said("4 =")]
  # Of four good ones: 7 characters, 1, 3 and 3; three others to be longer.
  # The two of 3 have one longer and one equal: (1 + 1/2) / 3.
  assert values(SHORTEST, *group) == [0.0, 1.0, 0.0, 0.5, 0.5]


def test_reasoning_and_tool_calls_count_as_length():
  call = base.ToolCall("add", '{"a": 2, "b": 2}')
  thought, called = said("4", reasoning="2 + 2"), said("4", tool_calls=(call,))
  assert values(SHORTEST, called, thought, said("4")) == [0.0, 0.5, 1.0]


def test_the_only_good_answer_is_the_shortest():
  assert values(SHORTEST, said("4, I think"), said("5")) == [1.0, 0.0]


@pytest.mark.parametrize(
  "wrap",
  [
    lambda reward: rewards.Weighted(
      (
        rewards.Criterion("right", rewards.NumericMatch(), weight=0.8),
        rewards.Criterion("short", reward, weight=0.2),
      )
    ),
    lambda reward: mixture.ByTask((mixture.RewardRule("sum", reward),)),
  ],
  ids=["weighted", "by_task"],
)
def test_a_reward_made_of_one_that_compares_compares(wrap):
  reward = wrap(SHORTEST)
  assert base.compares(reward)
  # Without a group the good answer has its whole value again.
  assert values(base.alone(reward), said("so it is 4")) == [1.0]
  assert not base.compares(wrap(rewards.NumericMatch()))


def test_a_sum_adds_the_rank_to_what_each_member_earned():
  reward = rewards.Weighted(
    (
      rewards.Criterion("right", rewards.NumericMatch(), weight=0.8),
      rewards.Criterion("short", SHORTEST, weight=0.2),
    )
  )
  grades = asyncio.run(reward(TASK, [said("4"), said("four, or 4"), said("")]))
  assert [grade.value for grade in grades] == [1.0, 0.8, 0.0]
  assert grades[1].parts == {"right": 1.0, "short": 0.0}


def test_a_reward_that_compares_must_say_how_it_grades_one_alone():
  class Silent:
    stateless = compares = True

    async def __call__(self, task, transcripts):
      return []

  with pytest.raises(ValueError, match=r"Silent compares .* attribute alone"):
    base.alone(Silent())
