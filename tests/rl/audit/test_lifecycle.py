"""The order of transitions, and the state kept of attempts under way."""

import dataclasses

import pytest

from rl.audit import lifecycle
from rl.schedule import overlap
from tests.helpers import event_logs as logs

IN_FLIGHT = overlap.in_flight(2, 1)
REDUNDANT = dataclasses.replace(
  IN_FLIGHT, redundancy=overlap.Redundancy(extra_members=1)
)


def follow(log, launched=logs.GROUP_SIZE):
  """Returns what is misplaced, what is under way and what is over."""
  over = []
  found = lifecycle.Lifecycle(launched, over.append)
  misplaced = [wrong.violation for e in log if (wrong := found.observe(e))]
  return misplaced, found.under_way, over


def _again(log, kind, **where):
  """The log with an event told twice."""
  i = logs.place(log, kind, **where)
  return [*log[: i + 1], log[i], *log[i + 1 :]]


def _dropped(log, after):
  """A log whose group 0 is dropped, and then has one more event of `log`."""
  writer = logs.Run(IN_FLIGHT, 1)
  writer.begin(0)
  i = logs.place(writer.log, "turn", index=1)
  drop = {"reason": "stale", "version": 0, "tokens": 10}
  event = {"t": 9.0, "kind": "dropped", "group": 0, "attempt": 0, **drop}
  return [*writer.log[: i + 1], event, log[logs.place(log, after, group=0)]]


_LOG = logs.run(IN_FLIGHT)
_SECOND_TURN = {"group": 0, "index": 0, "number": 1}

MISPLACED = {
  "admitted before it was submitted": (
    logs.moved(_LOG[:2], "admitted", 0),
    ["group 0: admitted, but it is not under way"],
  ),
  "submitted twice": (
    _again(_LOG, "submitted", group=0),
    ["group 0: submitted again"],
  ),
  "admitted twice": (
    _again(_LOG, "admitted"),
    ["group 0 member 0: admitted again"],
  ),
  "a first token before an engine": (
    logs.without(_LOG, "admitted", group=1, index=1),
    [
      "group 1 member 1: first_token before it was admitted",
      "group 1 member 1: ended with tokens but before it was admitted",
    ],
  ),
  "a first token sampled before an engine": (
    logs.change(_LOG, "first_token", t=0.5),
    ["group 0 member 0: first_token before it was admitted"],
  ),
  "a turn before its first token": (
    logs.without(_LOG, "first_token")[: logs.place(_LOG, "ended")],
    ["group 0 member 0: turn before its first token"] * 2,
  ),
  "a first token twice": (
    _again(_LOG, "first_token"),
    ["group 0 member 0: first_token after other tokens"],
  ),
  "a turn that ends before its first token": (
    logs.change(_LOG, "first_token", t=3.5),
    ["group 0 member 0: turn before its first token was sampled"],
  ),
  "a turn left out at the start": (
    logs.without(_LOG, "turn", group=0, index=0, number=0),
    ["group 0 member 0: turn number 1 is its first"],
  ),
  "a turn left out": (
    logs.change(_LOG, "turn", where=_SECOND_TURN, number=2),
    ["group 0 member 0: turn number 2 after number 0"],
  ),
  "a turn behind the end": (
    logs.moved(
      _LOG, "turn", logs.place(_LOG, "ended", group=0), **_SECOND_TURN
    ),
    ["group 0 member 0: turn after it had ended"],
  ),
  "an end told twice": (
    _again(_LOG, "ended"),
    ["group 0 member 0: ended after it had ended"],
  ),
  "an end after an abort": (
    _again(logs.change(_LOG, "ended", kind="aborted", reason="x"), "aborted"),
    [
      "group 0 member 0: aborted after it had been aborted",
      "group 0 member 0: grading before it had ended",
    ],
  ),
  "a reward called before the end": (
    logs.moved(
      _LOG, "grading", logs.place(_LOG, "ended", group=0, index=0), group=0
    ),
    ["group 0 member 0: grading before it had ended"],
  ),
  "a reward called twice": (
    _again(_LOG, "grading"),
    ["group 0 member 0: grading again"],
  ),
  "a reward that came twice": (
    _again(_LOG, "reward"),
    ["group 0 member 0: reward after its reward"],
  ),
  "a reward and a fault": (
    _again(logs.change(_LOG, "reward", kind="fault"), "fault"),
    ["group 0 member 0: fault after its fault"],
  ),
  "a fault before the end": (
    logs.moved(
      logs.change(_LOG, "reward", kind="fault"),
      "fault",
      logs.place(_LOG, "ended", group=0, index=0),
    ),
    ["group 0 member 0: fault before it had ended"],
  ),
  "ready twice": (
    _again(_LOG, "ready"),
    ["group 0: ready again"],
  ),
  "taken before it was ready": (
    logs.without(_LOG, "ready", group=3),
    ["group 3: dequeued before it was ready"],
  ),
  "taken twice": (
    _again(_LOG, "dequeued"),
    ["group 0: dequeued again"],
  ),
  "trained before it was taken": (
    logs.without(_LOG, "dequeued", group=3),
    ["group 3: trained before it was dequeued"],
  ),
  "trained twice": (
    _again(_LOG, "trained"),
    ["group 0: trained, but it is not under way"],
  ),
  "a turn of a dropped attempt": (
    _dropped(_LOG, "turn"),
    ["group 0 member 0: turn after it was dropped"],
  ),
  "a reward of a dropped attempt": (
    _dropped(_LOG, "reward"),
    ["group 0 member 0: reward after it was dropped"],
  ),
  "training of a dropped attempt": (
    _dropped(_LOG, "dequeued"),
    ["group 0: dequeued after it was dropped"],
  ),
}


@pytest.mark.parametrize("name", MISPLACED)
def test_an_event_out_of_its_place_is_named(name):
  log, expected = MISPLACED[name]
  assert follow(log)[0] == expected


def test_a_drop_of_what_the_learner_took_is_out_of_place():
  log = _LOG[: logs.place(_LOG, "dequeued") + 1]
  where = {"group": 0, "attempt": 0, "version": 0}
  drop = {"t": 99.0, "kind": "dropped", **where, "tokens": 20, "reason": "x"}
  assert follow([*log, drop])[0] == ["group 0: dropped after it was dequeued"]


@pytest.mark.parametrize("log", [_LOG, logs.run(REDUNDANT), []])
def test_a_run_in_order_has_nothing_out_of_place(log):
  launched = 3 if len(log) > len(_LOG) else 2
  misplaced, under_way, _ = follow(log, launched)
  assert misplaced == []
  assert under_way == []


def test_memory_is_that_of_the_groups_in_flight():
  # A bound of 1 and rounds of 2: 4 groups at most, of 200.
  most = 0
  found = lifecycle.Lifecycle(2, lambda attempt: None)
  for event in logs.run(IN_FLIGHT, rounds=100):
    found.observe(event)
    most = max(most, len(found.under_way))
  assert most == 4


def test_an_attempt_is_over_when_its_redundant_members_are():
  log = logs.run(REDUNDANT)
  late = log[logs.place(log, "aborted", group=0)]
  trained = logs.place(log, "trained", group=0)
  log = logs.without(log, "aborted", group=0)[:trained]
  _, under_way, over = follow(log, launched=3)
  assert str(under_way[0]) == "group 0"
  assert over == []
  _, _, over = follow([*log, late], launched=3)
  assert [str(x) for x in over] == ["group 0"]
  assert over[0].members[2].reason == "redundant"


def test_members_that_never_end_are_given_up_after_two_publishes():
  log = logs.without(logs.run(REDUNDANT, rounds=4), "aborted", group=0)
  publishes = [i for i, e in enumerate(log) if e["kind"] == "published"]
  # Trained before the first publish, so it is given up at the second.
  _, under_way, _ = follow(log[: publishes[1]], launched=3)
  assert 0 in [x.group for x in under_way]
  _, under_way, over = follow(log[: publishes[1] + 1], launched=3)
  assert 0 not in [x.group for x in under_way]
  assert [x.overdue for x in over if x.group == 0] == [True]
  assert [x.open for x in over if x.group == 0] == [[2]]


def test_who_waited_for_an_engine_may_be_aborted_after_its_attempt_is_over():
  writer = logs.Run(IN_FLIGHT, 1)
  writer.begin(0)
  writer.drop(0, 0, "stale")
  late = writer.log[logs.place(writer.log, "aborted")]
  waited = late | {"index": 2, "tokens": 0, "versions": []}
  assert follow([*writer.log, waited])[0] == []
  assert follow([*writer.log, late])[0] == [
    "group 0: aborted, but it is not under way"
  ]


def test_an_environment_that_fails_at_once_ends_before_an_engine():
  writer = logs.Run(IN_FLIGHT, 1)
  writer.begin(0)
  log = [writer.log[0]]
  fields = {"status": "env_fault", "turns": 0, "tokens": 0, "length": 0}
  where = {"t": 1.0, "group": 0, "attempt": 0, "index": 1}
  log.append({"kind": "ended", **where, **fields, "versions": []})
  log.append({"kind": "fault", **where, "status": "env_fault", "what": "x"})
  misplaced, under_way, _ = follow(log)
  assert misplaced == []
  assert under_way[0].members[1].outcome == "fault"


def test_a_later_attempt_is_named_with_its_number():
  assert lifecycle.name(3, 0) == "group 3"
  assert lifecycle.name(3, 2) == "group 3 attempt 2"
