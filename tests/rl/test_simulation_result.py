"""Parts of a result, worked out by hand."""

import pytest

from rl import simulation_result


def test_the_on_policy_bound_is_the_tail_and_the_last_batch():
  # Groups are ready at 1, 2, 3 and 50 s; two batches of 4 s, an update of 1 s.
  work = [("accumulate", 4.0), ("accumulate", 4.0), ("update", 1.0)]
  bound = simulation_result.on_policy_s([1.0, 2.0, 3.0, 50.0], work, 2)
  assert bound == pytest.approx(50.0 + 4.0 + 1.0)


def test_the_on_policy_bound_is_the_first_batch_and_all_work():
  work = [("accumulate", 40.0), ("update", 1.0)] * 2
  bound = simulation_result.on_policy_s([1.0, 2.0, 3.0, 5.0], work, 2)
  # Nothing can begin before 2 s, and 82 s of work follow.
  assert bound == pytest.approx(2.0 + 82.0)


def test_an_engine_is_in_a_state_until_the_next_or_the_end():
  states = [(0.0, "gate"), (1.0, "decode"), (3.0, "gate"), (4.0, "decode")]
  assert simulation_result.in_state(states, 9.0, "decode") == [
    (1.0, 3.0),
    (4.0, 9.0),
  ]
  assert simulation_result.in_state(states, 9.0, "publish") == []
