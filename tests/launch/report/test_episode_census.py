"""Lengths, culprits and trained members of a small log."""

from launch.report import episode_census
from rl.schedule import overlap
from tests.helpers import event_logs


def place(**fields):
  return {"t": 0.0, "group": 1, "attempt": 0, **fields}


def census(*events):
  found = episode_census.EpisodeCensus()
  for event in events:
    found.observe(event)
  return found


def ended(index, length):
  return place(kind="ended", index=index, length=length)


def test_episodes_are_counted_by_length_as_launched_and_as_trained():
  found = census(
    place(kind="submitted", source="maths"),
    ended(0, 10),
    ended(1, 12),
    place(kind="aborted", index=2, length=30),
    place(kind="trained", used=[1]),
  )
  assert dict(found.launched) == {10: 1, 12: 1, 30: 1}
  assert dict(found.trained) == {12: 1}
  assert found.used == {1: [1]}
  # 21 lengths from 10 to 30 fit bins of 1.
  bins = {low: (a, b) for low, high, a, b in found.lengths() if a or b}
  assert bins == {10: (1, 0), 12: (1, 1), 30: (1, 0)}


def test_bins_are_wide_enough_for_all_lengths():
  found = census(ended(0, 1), ended(1, 240))
  bins = found.lengths()
  # 240 lengths in 24 bins of 10.
  assert len(bins) == 24
  assert (bins[0], bins[-1]) == ((1, 10, 1, 0), (231, 240, 1, 0))


def test_faults_are_told_by_culprit_and_messages_that_differ_in_numbers_once():
  fault = place(kind="fault", index=0, status="env_fault")
  found = census(
    place(kind="submitted", source="maths"),
    fault | {"what": "step 3 took 10 s"},
    fault | {"what": "step 4 took 11 s"},
    fault | {"what": "broken", "status": "engine_fault"},
    place(kind="fault", group=7, index=0, status="reward_fault", what="late"),
  )
  assert found.faults == [
    ("environment", "maths", "step 3 took 10 s", 2),
    ("engine", "maths", "broken", 1),
    ("reward", "unknown", "late", 1),
  ]


def test_memory_is_that_of_a_bounded_number_of_kinds():
  fault = place(kind="fault", index=0, status="env_fault")
  found = census(*(fault | {"what": "x" * i} for i in range(1, 300)))
  assert len(found.faults) == 201
  assert found.faults[0] == ("environment", "unknown", "other faults", 99)


def test_a_real_log_leaves_nothing_behind():
  log = event_logs.run(overlap.in_flight(4, 1, 1), 3)
  found = census(*log)
  # 3 rounds of 4 groups.
  assert len(found.used) == 12
  assert found.launched.total() == 12 * event_logs.GROUP_SIZE
  assert not found.faults
