"""The token ledger: every column by hand, and errors that it must find."""

import dataclasses

import pytest

from rl.audit import token_ledger
from rl.schedule import overlap
from tests.helpers import event_logs as logs

IN_FLIGHT = overlap.in_flight(2, 1)
REDUNDANT = dataclasses.replace(
  IN_FLIGHT, redundancy=overlap.Redundancy(extra_members=1)
)


def test_a_whole_run_is_trained_and_masked():
  # 2 rounds of 2 groups of 2 members of 10 tokens; one of two is masked.
  ledger = token_ledger.of(logs.run(IN_FLIGHT))
  assert (ledger.sampled, ledger.trained, ledger.masked) == (80, 40, 40)
  assert (dict(ledger.dropped), ledger.in_flight, ledger.error) == ({}, 0, 0)


@pytest.mark.parametrize("length", range(0, 78, 7))
def test_the_ledger_balances_wherever_a_log_is_cut(length):
  ledger = token_ledger.of(logs.run(IN_FLIGHT)[:length])
  assert ledger.error == 0
  assert ledger.sampled >= ledger.trained


def test_tokens_of_turns_are_in_flight_until_the_group_is_trained():
  # Four groups of two members have played one turn of 5 tokens each.
  writer = logs.Run(IN_FLIGHT, 2)
  writer.admit()
  assert token_ledger.of(writer.log).in_flight == 40
  writer.finish(0)
  # Group 0 has 20 tokens now, and no member is counted twice.
  assert token_ledger.of(writer.log).in_flight == 50


def test_redundant_members_are_dropped_as_redundant():
  # Of each of 4 groups the third member is aborted with 5 tokens.
  ledger = token_ledger.of(logs.run(REDUNDANT))
  assert (ledger.sampled, dict(ledger.dropped)) == (100, {"redundant": 20})
  assert ledger.error == 0


def test_a_redundant_member_that_plays_on_is_in_flight():
  log = logs.run(REDUNDANT)
  i = logs.place(log, "aborted", group=0)
  ledger = token_ledger.of([*log[:i], *log[i + 1 :]])
  assert (ledger.in_flight, dict(ledger.dropped)) == (5, {"redundant": 15})
  assert ledger.error == 0


def test_dropped_attempts_are_counted_by_reason():
  writer = logs.Run(IN_FLIGHT, 1)
  for group, reason in enumerate(("stale", "zero_variance", "stale")):
    writer.begin(group)
    writer.drop(group, 0, reason)
  ledger = token_ledger.of(writer.log)
  # Two members of 5 tokens each.
  assert dict(ledger.dropped) == {"stale": 20, "zero_variance": 10}
  assert (ledger.sampled, ledger.error) == (30, 0)


def test_a_restored_group_counts_what_it_was_restored_with():
  restored = {"group": 0, "attempt": 0, "tokens": 7, "first_version": 1}
  ledger = token_ledger.of([{"t": 0.0, "kind": "restored", **restored}])
  assert (ledger.sampled, ledger.in_flight, ledger.error) == (7, 7, 0)


@pytest.mark.parametrize(("tokens", "error"), [(7, 3), (14, -4)])
def test_the_error_is_what_no_column_or_two_hold(tokens, error):
  # 10 tokens of group 0 were trained; 3 were lost, or 4 counted twice.
  log = logs.change(logs.run(IN_FLIGHT), "trained", tokens=tokens)
  assert token_ledger.of(log).error == error


def test_a_group_that_is_trained_twice_is_an_error():
  log = logs.run(IN_FLIGHT)
  again = log[logs.place(log, "trained")]
  assert token_ledger.of([*log, again]).error == -20


def test_tokens_that_no_attempt_owns_are_an_error():
  log = logs.run(IN_FLIGHT)
  stray = log[logs.place(log, "ended")]
  assert token_ledger.of([*log, stray]).error == 10


def test_a_drop_that_tells_other_tokens_than_its_members_is_an_error():
  writer = logs.Run(IN_FLIGHT, 1)
  writer.begin(0)
  writer.drop(0, 0, "faults")
  log = logs.change(writer.log, "dropped", tokens=8)
  # 10 were sampled, 8 are accounted for.
  assert token_ledger.of(log).error == 2


def test_each_source_has_a_ledger_and_together_they_are_the_whole():
  log = logs.run(IN_FLIGHT)
  log = logs.change(log, "submitted", where={"group": 3}, source="chess")
  found = token_ledger.build(log).by_source()
  assert {name: ledger.sampled for name, ledger in found.items()} == {
    "maze": 60,
    "chess": 20,
  }
  assert sum(found.values(), token_ledger.Ledger()) == token_ledger.of(log)


def test_the_ledger_reads_as_a_sum():
  assert str(token_ledger.of(logs.run(REDUNDANT))) == (
    "100 tokens sampled = 40 trained + 40 masked (40 no advantage)"
    " + 20 dropped (20 redundant)"
    " + 0 in flight; error 0"
  )


def test_what_is_masked_is_told_by_its_cause():
  # Of 4 groups member 1 is masked. Of group 0 it has a fault, group 1 is of a
  # skipped update in which nobody is trained, in group 2 a limit cut it, and
  # the last has no advantage.
  log = logs.run(IN_FLIGHT)
  i = logs.place(log, "reward", group=0, index=1)
  fault = {"kind": "fault", "status": "env_fault", "what": "raised"}
  log = [*log[:i], log[i] | fault, *log[i + 1 :]]
  nobody = {"tokens": 0, "masked": 20, "used": [], "skipped": True}
  log = logs.change(log, "trained", where={"group": 1}, **nobody)
  log = logs.change(log, "trained", where={"group": 2}, cut=[1])
  ledger = token_ledger.of(log)
  assert dict(ledger.causes) == {
    "faults": 10,
    "not finite": 20,
    "truncated": 10,
    "no advantage": 10,
  }
  assert (ledger.masked, ledger.error) == (50, 0)
  assert (
    "50 masked (10 faults, 20 not finite, 10 truncated, 10 no advantage)"
    in str(ledger)
  )


def test_why_a_restored_group_is_masked_is_not_known():
  where = {"t": 0.0, "group": 0, "attempt": 0}
  log = [
    where | {"kind": "restored", "tokens": 9, "first_version": 0},
    where | {"kind": "dequeued", "version": 0},
    where
    | {"kind": "trained", "version": 0, "first_version": 0, "update": 0}
    | {"tokens": 4, "masked": 5, "members": [0, 1], "used": [0]},
  ]
  assert dict(token_ledger.of(log).causes) == {"unknown": 5}


def test_selection_tells_how_trained_episodes_differ_from_launched_ones():
  # Of group 0 of the maze member 0 of 30 ids is trained, and member 1 masked.
  # Group 1, of chess, is stale: 2 members of 20 ids so far.
  writer = logs.Run(IN_FLIGHT, 1)
  writer.begin(0)
  writer.begin(1)
  writer.finish(0)
  writer.train([0])
  writer.drop(1, 0, "stale")
  log = logs.change(writer.log, "submitted", where={"group": 1}, source="chess")
  found = token_ledger.build(log).selection_bias()
  assert (found.launched.episodes, found.launched.mean_length) == (4, 25.0)
  assert (found.trained.episodes, found.trained.mean_length) == (1, 30.0)
  assert found.launched.shares == {"chess": 0.5, "maze": 0.5}
  assert found.trained.shares == {"maze": 1.0}


def test_masked_members_are_not_among_those_that_are_selected():
  # Each of 4 groups trains member 0, of 30 ids, and masks member 1, of 60.
  log = [
    e | {"length": 60} if e["kind"] == "ended" and e["index"] == 1 else e
    for e in logs.run(IN_FLIGHT)
  ]
  found = token_ledger.build(log).selection_bias()
  assert (found.trained.episodes, found.trained.mean_length) == (4, 30.0)
  assert (found.launched.episodes, found.launched.mean_length) == (8, 45.0)
  assert found.trained.by_source == {"maze": 4}


def test_of_an_older_log_all_members_of_a_group_count_as_trained():
  log = [
    {k: v for k, v in e.items() if k != "used"} for e in logs.run(IN_FLIGHT)
  ]
  assert token_ledger.build(log).selection_bias().trained.episodes == 8


def test_of_a_run_that_trained_nothing_no_selection_can_be_told():
  found = token_ledger.build([]).selection_bias()
  assert (found.trained.mean_length, found.launched.mean_length) == (0.0, 0.0)
  assert found.trained.shares == {}
