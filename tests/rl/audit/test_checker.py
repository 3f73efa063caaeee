"""The checker on logs that keep every promise, whole and cut off.

Broken logs are in the tests of the files that hold the invariants.
"""

import gc
import json
import types

import pytest

from rl.audit import checker as checker_lib
from rl.audit import token_ledger
from tests.helpers import event_logs as logs


@pytest.mark.parametrize("name", logs.SCHEDULES)
def test_a_run_that_keeps_its_promises_has_no_violation(name):
  logs.SCHEDULES[name].validate()
  log = logs.run(logs.SCHEDULES[name], rounds=4)
  assert len(log) > 100
  assert logs.broken(log, logs.SCHEDULES[name]) == []


@pytest.mark.parametrize("name", logs.SCHEDULES)
@pytest.mark.parametrize("share", range(0, 100, 7))
def test_a_run_that_was_cut_off_has_no_violation(name, share):
  log = logs.run(logs.SCHEDULES[name])
  assert logs.broken(log[: len(log) * share // 100], logs.SCHEDULES[name]) == []


@pytest.mark.parametrize("name", logs.SCHEDULES)
@pytest.mark.parametrize("broken", [False, True], ids=["whole", "broken"])
def test_a_ledger_beside_a_checker_is_that_of_the_log(name, broken):
  log = logs.run(logs.SCHEDULES[name], rounds=4)
  if broken:  # Two events are misplaced: one twice, one without a beginning.
    log = logs.without([*log, log[-1]], "submitted")
    log.insert(60, log[59])
  beside = token_ledger.LedgerBuilder()
  checker = checker_lib.Checker(
    logs.SCHEDULES[name], logs.GROUP_SIZE, ledger=beside
  )
  for event in log:
    checker.observe(event)
  assert beside.by_source() == token_ledger.build(log).by_source()
  alone = checker_lib.violations(log, logs.SCHEDULES[name], logs.GROUP_SIZE)
  assert checker.finish() == alone
  assert bool(alone) == broken


@pytest.mark.parametrize("name", logs.SCHEDULES)
@pytest.mark.parametrize("broken", [False, True], ids=["whole", "broken"])
def test_a_checker_goes_on_from_the_state_of_another(name, broken):
  log = logs.run(logs.SCHEDULES[name], rounds=3)
  if broken:  # Found in the second half, of what began in the first.
    log = logs.change(log, "trained", at=-1, masked=3)
    log.insert(len(log) // 2, log[len(log) // 2 - 1])
  checker, ledger = _checked(name, log)
  violations = checker.finish()
  assert bool(violations) == broken
  for cut in range(5, len(log), 23):
    before, _ = _checked(name, log[:cut])
    state = json.loads(json.dumps(before.to_host()))
    after, counted = _checked(name, log[cut:], state)
    assert after.finish() == violations
    assert counted.by_source() == ledger.by_source()
    assert counted.selection_bias() == ledger.selection_bias()


def _checked(name, log, state=None):
  """Returns a checker that has observed a log, and the ledger beside it."""
  ledger = token_ledger.LedgerBuilder()
  checker = checker_lib.Checker(
    logs.SCHEDULES[name], logs.GROUP_SIZE, ledger=ledger
  )
  if state is not None:
    checker.restore(state)
  for event in log:
    checker.observe(event)
  return checker, ledger


def test_a_dropped_attempt_is_followed_by_another():
  # Two updates of one group: the log is that of an unfinished round.
  log = [e for e in logs.retried(logs.DROP, "stale") if e["kind"] != "update"]
  assert logs.broken(log, logs.DROP) == []
  assert (
    logs.broken(
      logs.retried(logs.RECYCLE, "stale", task="maze/0"), logs.RECYCLE
    )
    == []
  )


def test_a_cancelled_group_gives_its_place_back():
  assert logs.broken(logs.cancelled(), logs.EXTRA) == []


def test_a_restored_group_needs_no_history():
  # Groups 0 and 1 were finished before the restart, 20 tokens each.
  log = logs.run(logs.SYNC)
  where = {"attempt": 0, "tokens": 20, "first_version": 0}
  restored = [
    {"t": 0.0, "kind": "restored", "group": group, **where} for group in (0, 1)
  ]
  rest = log[logs.place(log, "dequeued") :]
  assert logs.broken([*restored, *rest], logs.SYNC) == []


def test_an_event_between_two_others_may_tell_of_an_earlier_token():
  log = logs.change(logs.run(logs.IN_FLIGHT), "first_token", t=1.5)
  assert logs.broken(log, logs.IN_FLIGHT) == []


def test_a_transition_out_of_its_place_is_named():
  # All of them are in test_lifecycle.py.
  log = logs.without(logs.run(logs.DROP), "dequeued")
  assert logs.broken(log, logs.DROP) == [
    "group 0: trained before it was dequeued"
  ]


def test_a_checker_names_what_it_checks():
  checks = checker_lib.Checker(logs.SYNC, 2).checks
  assert "Time never falls" in " ".join(checks)
  assert all(line.endswith(".") for line in checks)
  assert len(checks) > len(checker_lib.Checker(logs.STRICT, 2).checks)


def test_of_very_many_violations_the_first_thousand_are_kept():
  checker = checker_lib.Checker(logs.SYNC, 2)
  for t in range(2000, 0, -1):
    checker.observe({"t": float(t), "kind": "engine_lost", "engine": t})
  found = checker.finish()
  # 1999 times time has fallen.
  assert len(found) == 1001
  assert found[-1] == "and 999 more"


def _reachable(*roots):
  """The number of objects that some objects keep alive, code apart."""
  seen, waiting = {}, list(roots)
  while waiting:
    found = waiting.pop()
    code = isinstance(found, type | types.FunctionType | types.ModuleType)
    if not code and id(found) not in seen:
      seen[id(found)] = found
      waiting += gc.get_referents(found)
  return len(seen)


@pytest.mark.parametrize("name", ["in flight", "redundant members", "sync"])
def test_memory_does_not_grow_with_the_log(name):
  log = logs.run(logs.SCHEDULES[name], rounds=40)
  checker = checker_lib.Checker(logs.SCHEDULES[name], logs.GROUP_SIZE)
  ledger = token_ledger.LedgerBuilder()
  sizes = []
  for event in log:
    checker.observe(event)
    ledger.observe(event)
    if event["kind"] == "published":
      sizes.append(_reachable(checker, ledger))
  # 58 groups more leave nothing behind; numbers above 256 are new objects.
  assert 100 < sizes[38] < sizes[9] + 10
