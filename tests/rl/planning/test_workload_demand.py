"""The demand of tasks, worked out by hand."""

import numpy as np
import pytest

from rl.planning import workload_demand
from rl.schedule import overlap
from rl.simulation import distributions, workload
from tests.helpers import planned_fleets

PLAIN = overlap.Redundancy()
TASK = dict(
  turns=distributions.Fixed(2.0),
  prompt_tokens=distributions.Fixed(20.0),
  answer_tokens=distributions.Fixed(30.0),
  reply_tokens=distributions.Fixed(5.0),
  start_s=distributions.Fixed(0.5),
  step_s=distributions.Fixed(1.0),
  reward_s=distributions.Fixed(0.25),
)


def needs(redundancy=PLAIN, **faults):
  problem = planned_fleets.question(
    workloads=(workload.Workload(**TASK, **faults),)
  )
  return workload_demand.of(problem, redundancy)


def close(number):
  return pytest.approx(number, abs=1e-4)


def test_a_member_needs_its_tokens_its_context_and_its_waits():
  found = needs()
  # One warm-up round, two of staleness and 4 that count, of 4 groups.
  assert found.tokens.shape == (7 * 4, 2)
  assert (found.tokens == 60.0).all()
  assert (found.context == 25.0).all()
  assert (found.trained == 85.0).all()
  assert not found.broken.any()
  assert found.wait_s == close(0.5 + 2 * 1.0)
  assert found.reward_s == close(0.25)


def test_redundancy_asks_for_more_members_and_groups():
  found = needs(overlap.Redundancy(extra_groups=1, extra_members=1))
  assert found.tokens.shape == (7 * 5, 3)


def test_a_reward_that_always_fails_leaves_nothing_to_train():
  found = needs(reward_fault=1.0)
  assert (found.trained == 0.0).all()
  # As any other, it is among the first members that end.
  assert not found.broken.any()
  # Three calls, and 0.5 and 1 s between them.
  assert found.reward_s == close(3 * 0.25 + 0.5 + 1.0)


def test_a_reward_that_fails_at_first_takes_longer_and_is_trained():
  found = needs(reward_fault=0.5)
  took = {0.25: 0, 1.0: 1, 2.25: 2}  # By failures before it.
  graded = found.trained > 0
  assert set(np.round(found.reward_s[graded], 4)) == set(took)
  # One in 8 of 56 is never graded.
  assert 1 <= (~graded).sum() <= 14
  assert found.reward_s[~graded] == close(2.25)


def test_a_broken_episode_is_neither_trained_nor_graded():
  found = needs(step_fault=1.0)
  assert found.broken.all()
  assert (found.trained == 0.0).all()
  assert (found.reward_s == 0.0).all()
  assert found.wait_s == close(1.5)
