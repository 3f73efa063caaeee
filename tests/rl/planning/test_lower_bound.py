"""Bounds of one group a round, worked out by hand; with runs: test_search."""

import numpy as np
import pytest

from rl.planning import lower_bound, workload_demand
from rl.schedule import overlap
from rl.simulation import learner as simulated_learner
from rl.simulation import simulate

CLUSTER = simulate.Cluster(
  learner=simulated_learner.LearnerSpeed(token_s=0.01, update_s=0.0),
  pools=(simulate.EnginePool(engines=1),),
  transfer_s=0.0,
)


def bound(trained, broken, wait_s, reward_s, size=2):
  """Returns the bound of a synchronous round of one group, without decoding."""
  none = np.zeros((1, len(trained)))
  needs = workload_demand.WorkloadDemand(
    tokens=none,
    context=none,
    trained=np.array([trained], np.float64),
    broken=np.array([broken], bool),
    wait_s=np.array([wait_s], np.float64),
    reward_s=np.array([reward_s], np.float64),
  )
  return lower_bound.of_choice(needs, CLUSTER, overlap.sync(1), range(1), size)


@pytest.mark.parametrize(
  ("broken", "ids"),
  [
    # The first has ended like the others, and only its reward failed: it may be
    # one of the two.
    ([False, False, False], 0 + 80),
    # It broke: the others are the group.
    ([True, False, False], 80 + 90),
    # Only one has not broken.
    ([True, False, True], 80),
  ],
)
def test_the_learner_trains_at_least_the_shortest_that_may_be_chosen(
  broken, ids
):
  trained = np.where(broken, 0.0, [0.0, 80.0, 90.0])
  found = bound(trained, broken, [0.0] * 3, [0.0] * 3)
  assert found.parts["learner"] == pytest.approx(ids * 0.01)
  assert found.step_s == pytest.approx(ids * 0.01, rel=1e-4)


def test_a_group_waits_for_each_member_and_its_own_grading():
  # One breaks after 10 s and is not graded; the other, after 1 s, for 5 s.
  found = bound([0.0, 100.0], [True, False], [10.0, 1.0], [0.0, 5.0])
  assert found.parts["environments"] == pytest.approx(10.0)
  assert found.step_s == pytest.approx(10.0 + 1.0, rel=1e-4)
  # Both are graded, and the last to end takes the least.
  found = bound([100.0, 100.0], [False, False], [10.0, 6.0], [0.5, 5.0])
  assert found.step_s == pytest.approx(11.0 + 2.0, rel=1e-4)


def test_of_more_members_than_are_needed_the_slowest_may_be_left_out():
  found = bound([100.0] * 3, [False] * 3, [9.0, 2.0, 3.0], [1.0, 1.0, 4.0])
  assert found.step_s == pytest.approx(7.0 + 2.0, rel=1e-4)
