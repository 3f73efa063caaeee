"""The buffer keeps every group until an optimizer step holds it."""

import random

import numpy as np
import pytest

from envs import base
from rl.data import trajectory
from rl.schedule import group_buffer


def _task(index):
  return base.Task(f"game/train/{index}", index, "train", seed=index)


def _group(group_id, lengths=(), status=trajectory.Status.COMPLETED):
  """Returns a group with members of so many ids."""
  turns = [
    trajectory.Turn(
      context=np.zeros(length - 1, np.int32),
      tokens=np.zeros(1, np.int32),
      logprobs=np.zeros(1, np.float32),
      versions=np.zeros(1, np.int32),
      stop="stop",
    )
    for length in lengths
  ]
  return trajectory.Group(
    group_id=group_id,
    trajectories=[
      trajectory.Trajectory("t", group_id, i, [turn], status)
      for i, turn in enumerate(turns)
    ],
    admitted=0,
  )


def _attempt(index):
  return group_buffer.Attempt(_task(index))


def _filled(count, done=(), in_order=True):
  """Returns a buffer of `count` submitted groups, some of them finished."""
  groups = group_buffer.GroupBuffer(in_order=in_order)
  for i in range(count):
    groups.submit(i, _attempt(i))
  for i in done:
    groups.put(_group(i))
  return groups


def _ids(groups):
  return [group.group_id for group in groups]


def test_groups_leave_in_the_order_of_submission_not_of_completion():
  groups = _filled(4, done=[3, 1, 0, 2])
  assert _ids(groups.take(3)) == [0, 1, 2]
  assert _ids(groups.take(1)) == [3]


def test_groups_leave_in_the_order_of_completion_when_they_may():
  groups = _filled(4, done=[3, 1], in_order=False)
  assert groups.missing(3) == [0, 2]
  assert _ids(groups.take(1)) == [3]
  groups.put(_group(0))
  assert not groups.has(3)
  assert _ids(groups.take(2)) == [1, 0]


@pytest.mark.parametrize("group_id", [0, 1])
def test_a_group_that_is_withdrawn_is_gone(group_id):
  groups = _filled(2, done=[0], in_order=False)
  groups.withdraw(group_id)
  left = {**groups.ready, **groups.in_flight}
  assert sorted(left) == [1 - group_id]
  groups.submit(group_id, group_buffer.Attempt(_task(7), 1))
  assert groups.in_flight[group_id].number == 1


def test_a_straggler_holds_back_what_was_finished_after_it():
  groups = _filled(4, done=[0, 2, 3])
  assert groups.has(1)
  assert not groups.has(2)
  assert groups.missing(4) == [1]
  groups.put(_group(1))
  assert groups.has(4)
  assert groups.missing(4) == []


@pytest.mark.parametrize(
  ("tokens", "most", "expected"),
  [
    (1, 4, 1),  # Group 0, of 5 ids, is larger than the budget: alone.
    (11, 4, 1),
    (12, 4, 2),  # 5 + 7.
    (12, 1, 1),  # An update needs no more.
    (99, 4, 2),  # Group 2 is not ready, so 3 has to wait.
  ],
)
def test_a_budget_takes_the_longest_prefix_that_fits(tokens, most, expected):
  groups = _filled(4)
  for i, lengths in ((0, (2, 3)), (1, (3, 4)), (3, (1,))):
    groups.put(_group(i, lengths))
  assert groups.fitting(most, tokens) == expected


def test_nothing_fits_while_the_first_group_is_not_ready():
  assert _filled(2, done=[1]).fitting(2, 100) == 0


def test_members_with_a_fault_use_no_budget():
  groups = _filled(2)
  groups.put(_group(0, (50,), trajectory.Status.ENV_FAULT))
  groups.put(_group(1, (5,)))
  assert groups.fitting(2, 5) == 2


@pytest.mark.parametrize("seed", range(20))
def test_a_budget_parts_an_update_into_whole_groups_in_their_order(seed):
  draw = random.Random(seed)
  in_order, budget = draw.random() < 0.5, draw.randint(1, 40)
  groups = _filled(12, in_order=in_order)
  done = draw.sample(range(12), 12)
  order = list(range(12)) if in_order else done
  sizes = [draw.randint(1, 20) for _ in range(12)]
  taken, ready = [], []
  while len(taken) < 12:
    for i in done[len(ready) : len(ready) + draw.randint(0, 4)]:
      groups.put(_group(i, (sizes[i],)))
      ready.append(i)
    if not (count := groups.fitting(12 - len(taken), budget)):
      continue
    part = _ids(groups.take(count))
    taken += part
    used = sum(sizes[i] for i in part)
    assert count == 1 or used <= budget
    for following in order[len(taken) : len(taken) + 1]:
      assert following not in ready or used + sizes[following] > budget
  assert taken == order


def test_taking_a_group_that_is_not_ready_takes_nothing():
  groups = _filled(2, done=[0])
  with pytest.raises(RuntimeError, match="of 2 groups only \\[0\\]"):
    groups.take(2)
  assert _ids(groups.take(1)) == [0]


def test_what_was_taken_is_untrained_until_it_is_committed():
  groups = _filled(3, done=[0, 1])
  groups.take(1)
  assert sorted(groups.untrained) == [0, 1]
  assert groups.in_flight == {2: _attempt(2)}
  groups.commit()
  assert sorted(groups.untrained) == [1]


def test_commit_forgets_only_what_was_taken():
  groups = _filled(2, done=[0, 1])
  groups.commit()
  assert sorted(groups.untrained) == [0, 1]


@pytest.mark.parametrize("when", ["never submitted", "twice", "after training"])
def test_a_group_is_put_once(when):
  groups = _filled(1, done=[0])
  if when == "after training":
    groups.take(1)
    groups.commit()
  group_id = 5 if when == "never submitted" else 0
  with pytest.raises(RuntimeError, match=f"group {group_id} is not in flight"):
    groups.put(_group(group_id))


def test_a_restart_goes_on_where_the_last_commit_was():
  before = _filled(4, done=[0, 1, 3])
  before.take(1)
  before.commit()
  before.take(1)
  # Group 1 was taken and never trained, so it comes back; 2 is played again.
  after = group_buffer.GroupBuffer(min(before.untrained))
  for group in before.untrained.values():
    after.restore(group)
  for group_id, attempt in before.in_flight.items():
    after.submit(group_id, attempt)
  assert after.missing(3) == [2]
  after.put(_group(2))
  assert _ids(after.take(3)) == [1, 2, 3]


def test_the_views_are_snapshots():
  groups = _filled(2, done=[0])
  untrained, in_flight = groups.untrained, groups.in_flight
  groups.put(_group(1))
  assert sorted(untrained) == [0]
  assert sorted(in_flight) == [1]
