"""Rows of the cache: one owner each, idle ones evicted oldest first."""

import numpy as np
import pytest

from rl import slots


def _row(rows, session):
  """Returns the row of a session for which there must be one."""
  found = rows.acquire(session)
  assert found is not None
  return found[0]


def test_a_session_comes_back_to_its_row_with_its_cache():
  rows = slots.Slots(2)
  row = _row(rows, "a")
  rows.rest("a")
  assert rows.acquire("a") == (row, True)


def test_a_new_session_takes_a_free_row_before_an_idle_one():
  rows = slots.Slots(2)
  first = _row(rows, "a")
  rows.rest("a")
  assert rows.acquire("b") == (1 - first, False)
  assert rows.acquire("a") == (first, True)


def test_the_session_that_idles_longest_loses_its_row():
  rows = slots.Slots(3)
  owned = {name: _row(rows, name) for name in "abc"}
  for name in "bac":
    rows.rest(name)
  rows.acquire("b")
  # b runs again, so a has idled longest.
  assert rows.acquire("d") == (owned["a"], False)
  assert rows.acquire("e") == (owned["c"], False)


def test_an_evicted_session_starts_over():
  rows = slots.Slots(1)
  rows.acquire("a")
  rows.rest("a")
  rows.acquire("b")
  rows.rest("a")
  assert rows.acquire("a") is None
  rows.rest("b")
  assert rows.acquire("a") == (0, False)


def test_a_running_session_is_never_evicted():
  rows = slots.Slots(2)
  rows.acquire("a")
  rows.acquire("b")
  assert rows.acquire("c") is None
  rows.rest("b")
  assert rows.acquire("c") is not None


@pytest.mark.parametrize("idle", [False, True])
def test_the_row_of_a_session_that_ended_is_free_at_once(idle):
  rows = slots.Slots(1)
  rows.acquire("a")
  if idle:
    rows.rest("a")
  assert rows.num_free == 0
  rows.release("a")
  assert rows.num_free == 1
  assert rows.acquire("a") == (0, False)


def test_ending_an_unknown_session_frees_nothing():
  rows = slots.Slots(1)
  rows.acquire("a")
  rows.release("b")
  rows.rest("b")
  assert rows.num_free == 0
  assert rows.acquire("b") is None


@pytest.mark.parametrize("seed", range(5))
def test_no_row_ever_has_two_owners(seed):
  draws = np.random.default_rng(seed)
  rows = slots.Slots(4)
  cached: dict[str, int] = {}
  running: set[str] = set()
  for _ in range(2000):
    name = "abcdefgh"[draws.integers(8)]
    action = draws.integers(3)
    if action == 0 and name not in running:
      found = rows.acquire(name)
      if found is None:
        assert len(running) == 4
        continue
      row, kept = found
      assert kept == (name in cached)
      if kept:
        assert cached[name] == row
      assert all(cached[other] != row for other in running)
      # Whoever idled there has lost it.
      cached = {other: r for other, r in cached.items() if r != row}
      cached[name] = row
      running.add(name)
    elif action == 1 and name in running:
      rows.rest(name)
      running.remove(name)
    elif action == 2:
      rows.release(name)
      cached.pop(name, None)
      running.discard(name)
    assert rows.num_free == 4 - len(cached)
