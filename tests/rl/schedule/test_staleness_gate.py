"""The bound T - F <= eta: its formula, its edges, and that it holds."""

import numpy as np
import pytest

from rl.schedule import overlap, staleness_gate


def _gate(eta=2, per_round=4, total=10**9, extra=0, **resumed):
  schedule = overlap.Overlap(
    groups_per_round=per_round,
    groups_per_microbatch=1,
    max_staleness=eta,
    on_publish="recompute",
    redundancy=overlap.Redundancy(extra_groups=extra),
  )
  return staleness_gate.StalenessGate(schedule, total, **resumed)


def _fill(gate):
  """Admits all that may be admitted; returns their ids."""
  ids = []
  while gate.may_admit():
    ids.append(gate.admit())
  return ids


# AReaL, tests/test_staleness_manager.py: (v + eta + 1) R with eta 2 and R 4,
# (0 + 3) 4 = 12 and (5 + 3) 4 = 32.
@pytest.mark.parametrize(("version", "limit"), [(0, 12), (5, 32)])
def test_the_window_has_the_published_size(version, limit):
  gate = _gate(version=version)
  assert gate.limit == limit
  assert _fill(gate) == list(range(limit))


def test_what_is_admitted_takes_its_place_in_the_window():
  # AReaL, the same file: 5 of 12 are accepted, so 7 are left.
  gate = _gate()
  assert [gate.admit() for _ in range(5)] == [0, 1, 2, 3, 4]
  assert len(_fill(gate)) == 7


def test_without_staleness_a_round_waits_for_its_weights():
  gate = _gate(eta=0)
  assert _fill(gate) == [0, 1, 2, 3]
  gate.release(1)
  assert _fill(gate) == [4, 5, 6, 7]


def test_no_group_is_admitted_beyond_the_run():
  assert _fill(_gate(total=5)) == [0, 1, 2, 3, 4]


def test_admission_beyond_the_window_is_an_error():
  gate = _gate()
  _fill(gate)
  with pytest.raises(RuntimeError, match="group 12 is beyond the limit of 12"):
    gate.admit()
  assert gate.admitted == 12


@pytest.mark.parametrize("version", [0, 2])
def test_versions_are_released_one_after_the_other(version):
  gate = _gate()
  with pytest.raises(RuntimeError, match=f"version {version} was released"):
    gate.release(version)
  assert gate.version == 0


def test_a_resumed_gate_goes_on_with_ids_and_window():
  # Version 3 of R 4 and eta 2 admits 24; 20 were submitted before.
  gate = _gate(admitted=20, version=3)
  assert _fill(gate) == [20, 21, 22, 23]


def test_ids_go_on_where_cancelled_groups_left_off():
  gate = _gate(admitted=20, next_group=23, version=3)
  assert _fill(gate) == [23, 24, 25, 26]


def test_a_redundant_group_is_admitted_once_a_version_and_leaves_no_room():
  gate = _gate(eta=0, total=8, extra=2)
  assert _fill(gate) == [0, 1, 2, 3, 4, 5]
  gate.cancel(0)
  gate.cancel(0)
  assert _fill(gate) == []
  gate.release(1)
  assert _fill(gate) == [6, 7, 8, 9, 10, 11]
  gate.cancel(1)
  gate.cancel(1)
  gate.release(2)
  assert _fill(gate) == []


def test_a_redundant_group_that_ends_late_costs_the_next_version_nothing():
  gate = _gate(eta=0, total=8, extra=2)
  _fill(gate)
  gate.release(1)
  # Two of version 0 are still under way, and so there is room for four.
  assert _fill(gate) == [6, 7, 8, 9]
  gate.cancel(0)
  gate.cancel(0)
  assert _fill(gate) == [10, 11]


@pytest.mark.parametrize(("first", "old"), [(3, False), (2, True)])
def test_what_began_too_long_ago_can_no_longer_be_trained(first, old):
  assert _gate().too_old(first, trained_version=5) == old


@pytest.mark.parametrize("first", [3, 4, 5])
def test_a_group_within_the_bound_passes_the_check(first):
  _gate().check(first, trained_version=5, group_id=0)


# Three versions late, and from a version that does not exist yet.
@pytest.mark.parametrize("first", [2, 6])
def test_a_group_outside_the_bound_fails_the_check(first):
  with pytest.raises(RuntimeError, match=f"group 9: .* version {first}; .* 2"):
    _gate().check(first, trained_version=5, group_id=9)


def _lags(seed, eta, per_round, num_groups, consume):
  """Returns T - F of every group of a run in which everything is random.

  A step admits one group, gives one its first token, finishes one, trains a
  round, or releases a version that was trained some time before. Nothing is
  done in a preferred order, except that a round is `per_round` finished
  groups: the oldest ids for consume="submit", the first done for "ready".
  """
  draws = np.random.default_rng(seed)
  # Some seeds train slowly, some finish late, some publish late.
  rates = draws.dirichlet(np.ones(5))
  gate = _gate(eta, per_round, total=num_groups)
  admitted: list[int] = []
  started: list[int] = []
  done: list[int] = []
  first: dict[int, int] = {}
  lags: list[int] = []
  trained = 0
  while len(lags) < num_groups:
    for action in draws.choice(5, size=256, p=rates):
      if action == 0 and gate.may_admit():
        admitted.append(gate.admit())
      elif action == 1 and admitted:
        group = admitted.pop(int(draws.integers(len(admitted))))
        first[group] = gate.version
        started.append(group)
      elif action == 2 and started:
        done.append(started.pop(int(draws.integers(len(started)))))
      elif action == 3:
        ids = list(range(len(lags), len(lags) + per_round))
        taken = ids if consume == "submit" else done[:per_round]
        if len(taken) == per_round and set(taken) <= set(done):
          done = [group for group in done if group not in taken]
          lags += [trained - first[group] for group in taken]
          trained += 1
      elif action == 4 and gate.version < trained:
        gate.release(gate.version + 1)
  return lags


SCHEDULES = [(0, 4), (1, 1), (1, 4), (2, 3), (4, 2)]


@pytest.mark.parametrize(("eta", "per_round"), SCHEDULES)
def test_in_submission_order_admission_alone_bounds_staleness(eta, per_round):
  # 8 seeds of 600 groups on each of 5 schedules: 24,000 groups.
  lags = [
    lag
    for seed in range(8)
    for lag in _lags(seed, eta, per_round, 600, consume="submit")
  ]
  assert len(lags) == 4800
  assert min(lags) >= 0
  # Equal, not only below: the bound is reached and so could not be tighter.
  assert max(lags) == eta


@pytest.mark.parametrize(("eta", "per_round"), [(1, 4), (2, 3), (4, 2)])
def test_in_completion_order_admission_is_no_bound(eta, per_round):
  # A straggler keeps its place in the window while later groups overtake it.
  lags = [
    lag
    for seed in range(8)
    for lag in _lags(seed, eta, per_round, 600, consume="ready")
  ]
  assert max(lags) > eta
