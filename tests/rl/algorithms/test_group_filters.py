"""Dynamic sampling: the groups that it drops, and when it stops."""

import numpy as np
import pytest

from rl.algorithms import advantages, group_filters, reward_shaping
from rl.data import trajectory
from tests.helpers import played_members

OK = trajectory.Status.COMPLETED
FAULT = trajectory.Status.ENV_FAULT


def _group(*members, attempt=0):
  """Returns a group of (reward, number of sampled tokens); None is a fault."""
  trajectories = [
    trajectory.Trajectory(
      task_id="game/train/0",
      group_id=0,
      index=index,
      turns=[
        trajectory.Turn(
          context=np.zeros(1, np.int32),
          tokens=np.zeros(tokens, np.int32),
          logprobs=np.zeros(tokens, np.float32),
          versions=np.zeros(tokens, np.int32),
          stop="stop",
        )
      ],
      status=FAULT if reward is None else OK,
      reward=reward,
    )
    for index, (reward, tokens) in enumerate(members)
  ]
  return trajectory.Group(
    group_id=0,
    trajectories=trajectories,
    admitted=0,
    attempt=attempt,
  )


@pytest.mark.parametrize(
  ("members", "expected"),
  [
    ([(1.0, 2), (0.0, 2)], None),
    ([(1.0, 2), (1.0, 2)], "zero_variance"),
    ([(1.0, 2), (1.0, 2), (None, 2)], "zero_variance"),
    # The only one that differs has no token to train.
    ([(1.0, 2), (1.0, 2), (0.0, 0)], "zero_variance"),
    ([(1.0, 2), (None, 2)], "faults"),
    ([(None, 0), (None, 2)], "faults"),
    ([(1.0, 2), (0.9, 2), (None, 2)], None),
  ],
)
def test_what_an_estimator_cannot_learn_from_has_a_reason(members, expected):
  group = _group(*members)
  got = group_filters.DynamicSampling().reason(group, advantages.Grpo())
  assert got == expected
  # The estimator agrees: no advantage, or nobody trained.
  values, _ = played_members.of_group(group, advantages.Grpo())
  assert bool(values.any()) == (expected is None)


def test_rewards_within_the_spread_count_as_equal():
  group = _group((1.0, 2), (0.9, 2))
  narrow = group_filters.DynamicSampling(min_spread=0.05)
  wide = group_filters.DynamicSampling(min_spread=0.2)
  assert narrow.reason(group, advantages.Grpo()) is None
  assert wide.reason(group, advantages.Grpo()) == "zero_variance"


def test_a_penalty_for_length_makes_no_variance():
  group = _group((1.0, 90), (1.0, 10))
  penalty = reward_shaping.Overlong(max_tokens=100, buffer=20)
  shaped = trajectory.Group(
    group_id=0,
    trajectories=[reward_shaping.apply(t, penalty) for t in group.trajectories],
    admitted=group.admitted,
  )
  assert [t.reward for t in shaped.trajectories] == [0.5, 1.0]
  got = group_filters.DynamicSampling().reason(shaped, advantages.Grpo())
  assert got == "zero_variance"


def test_an_estimator_that_compares_nobody_learns_from_equal_rewards():
  sampling, estimator = (
    group_filters.DynamicSampling(),
    advantages.Reinforce(),
  )
  assert sampling.reason(_group((1.0, 2), (1.0, 2)), estimator) is None
  assert sampling.reason(_group((1.0, 2)), estimator) is None
  assert sampling.reason(_group((None, 2)), estimator) == "faults"


def test_the_last_attempt_is_trained_whatever_it_is_like():
  sampling = group_filters.DynamicSampling(max_refills=2)
  why = group_filters.group_filter(sampling, advantages.Grpo())
  got = [why(_group((1.0, 2), (1.0, 2)), i) for i in range(4)]
  assert got == ["zero_variance", "zero_variance", None, None]


def test_without_dynamic_sampling_every_group_is_trained():
  why = group_filters.group_filter(None, advantages.Grpo())
  assert why(_group((None, 0)), 0) is None


@pytest.mark.parametrize(
  "bad", [{"max_refills": 0}, {"min_spread": -1.0}, {"min_spread": np.nan}]
)
def test_nonsense_is_refused(bad):
  with pytest.raises(ValueError, match=f"dynamic_sampling.{next(iter(bad))}="):
    group_filters.DynamicSampling(**bad).validate()
