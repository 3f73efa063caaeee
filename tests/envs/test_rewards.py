import asyncio

from envs import base, rewards


def test_the_outcome_is_the_sum_of_the_step_rewards():
  task = base.Task("x/train/0", 0, "train", 0)
  transcripts = [
    base.Transcript([], [0.0, 0.5, 1.0]),
    base.Transcript([], [-1.0]),
    base.Transcript([], []),
  ]
  reward: base.Reward = rewards.Outcome()
  grades = asyncio.run(reward(task, transcripts))
  assert [g.value for g in grades] == [1.5, -1.0, 0.0]
  assert [g.parts for g in grades] == [{"outcome": g.value} for g in grades]
  assert reward.stateless
