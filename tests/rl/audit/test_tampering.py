"""The mutation test of all invariants, and the four logs that once passed."""

import collections

import pytest

from rl.audit import event_log, tampering
from tests.helpers import event_logs as logs

UNNOTICED = {
  ("turn", "decode_s"): "seconds that nothing else tells",
  ("turn", "queue_s"): "seconds that nothing else tells",
  ("turn", "env_s"): "seconds that nothing else tells",
  ("ended", "length"): "ids of contexts are in no other event",
  ("dequeued", "length"): "ids of contexts are in no other event",
  ("aborted", "length"): "ids of contexts are in no other event",
  ("reward", "value"): "told once",
  ("publishing_held", "reason"): "told once",
  ("submitted", "source"): "told once, unless an attempt follows another",
  ("moved", ""): "its session is heard of again only by its turns",
  ("moved", "session"): "one that is not trained may have moved",
  ("prefill_missed", ""): "the session goes on either way",
  ("prefill_missed", "session"): "the session goes on either way",
  ("prefill_missed", "engine"): "it has no session",
  ("prefill_missed", "reason"): "free text",
  ("engine_pool", "hardware"): "the preference is for a pool by its name",
  ("resumed", ""): "a restart is taken out of a log before it is checked",
  ("staged", "moved_bytes"): "told once",
  ("staged", "buckets"): "told once",
  ("begun_anew", ""): "all that it tells is of before the restart",
  ("begun_anew", "tokens"): "of before the restart",
  ("begun_anew", "reason"): "free text",
  ("fault", "what"): "free text",
  ("engine_lost", "reason"): "free text",
  ("engine_restarting", "reason"): "free text",
  ("engine_given_up", "reason"): "free text",
  ("engine_given_up", ""): "a run may end in the middle of a restart",
  ("aborted", "reason"): "the ledger files tokens under any word",
  ("source_too_slow", "group"): "a report of counts",
  ("source_too_slow", "attempt"): "a report of counts",
  ("source_too_slow", "attempts"): "a report of counts",
  ("source_too_slow", "source"): "a report of counts",
  ("resumed", "next_group"): "of the checkpoint, not of the log",
  ("resumed", "engines"): "more of them may never be heard of",
}
"""Changes that no promise makes impossible, and why."""

QUIET = {"wait_s": 0.0, "reason": "it broke"}


def routed():
  """Mazes prefer the pool of engine 0, which is lost, and comes back.

  Engine 1 is lost in the last publish, and given up.
  """
  log = logs.run(logs.IN_FLIGHT, rounds=3)
  # Both engines switch: what one tells is told of the other as well.
  both = event_log.OF_PUBLISH[1:-1]
  log = [
    one
    for event in log
    for one in (event, event | {"engine": 1})[: 1 + (event["kind"] in both)]
  ]
  pools = [
    {"kind": "engine_pool", "engine": i, "pool": pool, "hardware": "compute"}
    for i, pool in enumerate(("big", "small"))
  ]
  begun = [*pools, {"kind": "preference", "source": "maze", "wanted": "big"}]
  i = logs.place(log, "turn", group=1, index=1)
  t = {"t": log[i]["t"]}
  word = {"session": "train/1/0/1", "wanted": "big", "engine": 1}
  moves = [
    {"kind": "engine_lost", "engine": 0, "reason": "it broke"},
    {"kind": "fallback", **word},
    {"kind": "moved", "session": "train/1/0/1", "engine": 1},
    {
      "kind": "prefill_missed",
      "session": "train/1/0/1",
      "engine": 2,
      "reason": "version",
    },
    {"kind": "engine_restarting", "engine": 0, "attempt": 1, **QUIET},
    {"kind": "engine_restarting", "engine": 0, "attempt": 2, **QUIET},
    {"kind": "engine_back", "engine": 0, "version": 0},
  ]
  log[i:i] = [t | event for event in moves]
  t = {"t": log[-1]["t"], "engine": 1}
  ends = [
    {"kind": "engine_lost", "reason": "it broke"},
    {"kind": "engine_restarting", "attempt": 1, **QUIET},
    {"kind": "engine_given_up", "attempts": 1, "reason": "it broke again"},
  ]
  log[-1:-1] = [t | event for event in ends]
  return [*({"t": 0.0, **event} for event in begun), *log]


def joined():
  """Engine 1 joins in round 1, admits two members, and leaves in round 3."""
  log = logs.run(logs.IN_FLIGHT, rounds=4)
  start = logs.place(log, "published", version=1) + 1
  end = logs.place(log, "published", version=3) + 1
  # It takes part in all publishes between the two.
  both = event_log.OF_PUBLISH[1:-1]
  log = [
    one
    for i, event in enumerate(log)
    for one in (event, event | {"engine": 1})[
      : 1 + (event["kind"] in both and start < i < end)
    ]
  ]
  i = logs.place(log, "published", version=1) + 1
  came = {"t": log[i]["t"], "kind": "engine_joined", "engine": 1, "version": 1}
  for index in range(2):
    first = logs.place(log, "admitted", group=4, index=index)
    log[first] = log[first] | {"engine": 1}
  log.insert(i, came)
  i = logs.place(log, "published", version=3) + 1
  gone = {"t": log[i]["t"], "engine": 1}
  log[i:i] = [gone | {"kind": f"engine_{word}"} for word in ("leaving", "left")]
  return log


def slow():
  """A group is dropped as too slow, and one of another source trains."""
  log = logs.retried(logs.DROP, "stale")
  log = [event for event in log if event["kind"] != "update"]
  i = logs.place(log, "submitted", attempt=1)
  where = {"t": log[i]["t"], "group": 0, "attempt": 0, "source": "maze"}
  told = {**where, "kind": "source_too_slow", "task": "maze/0", "attempts": 3}
  log[i] = log[i] | {"source": "other"}
  return [*log[:i], told, *log[i:]]


def faulty():
  """The second member of each group has no reward but a fault."""
  fault = {"kind": "fault", "status": "reward_fault", "what": "it hung"}
  names = ("t", "group", "attempt", "index")
  return [
    {name: event[name] for name in names} | fault
    if event["kind"] == "reward" and event["index"] == 1
    else event
    for event in logs.run(logs.SYNC)
  ]


def restored():
  """A run goes on after a restart that found groups 2 and 3 finished."""
  log = logs.run(logs.SYNC)
  start = logs.place(log, "submitted", group=2)
  where = {"t": log[start]["t"], "attempt": 0, "tokens": 20, "first_version": 1}
  begun = {"t": where["t"], "kind": "resumed", "trained": 1, "next_group": 4}
  begun["engines"] = 1
  again = [where | {"kind": "restored", "group": group} for group in (2, 3)]
  rest = log[logs.place(log, "dequeued", group=2) :]
  return [*log[:start], begun, *again, *rest]


def continued():
  """A run goes on after a restart: one member of group 2 anew, one not."""
  log = logs.run(logs.SYNC)
  start = logs.place(log, "submitted", group=2)
  begun = {
    "t": log[start]["t"],
    "kind": "resumed",
    "trained": 1,
    "next_group": 4,
  }
  first = logs.place(log, "first_token", group=2, index=0)
  place = {name: log[first][name] for name in ("t", "group", "attempt")}
  past = {"turns": 1, "tokens": 5, "first_version": 1, "versions": [[1, 5]]}
  goes_on = {**place, "kind": "continued", "index": 0, **past}
  # In the place of the first token and the first turn.
  log[first : first + 2] = [goes_on]
  anew = logs.place(log, "admitted", group=2, index=1) + 1
  lost = {"kind": "begun_anew", "index": 1, "tokens": 5, "reason": "it differs"}
  log.insert(anew, {**place, "t": log[anew]["t"], **lost})
  log.insert(start, begun)
  return log


def held():
  """Publishing is held back after round 0, and goes on after round 2."""
  run = logs.Run(logs.IN_FLIGHT, 4)
  run.admit()
  run.round()
  run.emit("publishing_held", version=0, reason="a metric left its bound")
  run.admit()
  for index, groups in ((1, (2, 3)), (2, (4, 5))):
    for group in groups:
      run.finish(group)
    run.version = index  # Of the learner; the engines serve 1.
    run.train(groups)
    run.version = 1
  run.emit("publishing_resumed", version=2)
  run.publish()
  run.publish()
  run.admit()
  run.round()
  return run.log


LOGS = {
  "held": (held(), logs.IN_FLIGHT),
  "routed": (routed(), logs.IN_FLIGHT),
  "joined": (joined(), logs.IN_FLIGHT),
  "slow": (slow(), logs.DROP),
  "faulty": (faulty(), logs.SYNC),
  "restored": (restored(), logs.SYNC),
  "continued": (continued(), logs.SYNC),
  "redundant": (logs.run(logs.REDUNDANT), logs.REDUNDANT),
  "cancelled": (logs.cancelled(), logs.EXTRA),
}


@pytest.mark.parametrize("name", LOGS)
def test_the_logs_that_are_tampered_with_break_nothing(name):
  log, schedule = LOGS[name]
  assert logs.broken(event_log.surviving(log), schedule) == []


@pytest.mark.parametrize("most", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_every_change_of_a_log_is_noticed_but_those_that_nothing_can_notice(
  most,
):
  found, tried = collections.Counter(), set()
  for log, schedule in LOGS.values():
    noticed = tampering.notice(log, schedule, 2, most)
    for change, (seen, _) in noticed.items():
      found[change] += seen
      tried.add(change)
  assert {kind for kind, _ in tried} == event_log.KINDS
  assert {change for change in tried if not found[change]} == set(UNNOTICED)


# The four logs of an audit that had no violation.


def test_a_fault_that_is_booked_as_trained_is_found():
  log = faulty()
  i = logs.place(log, "trained", group=0)
  log[i] = log[i] | {"used": [0, 1], "tokens": 20, "masked": 0}
  assert logs.broken(log, logs.SYNC) == [
    "group 0: member 1 is trained, although it has a fault"
  ]


def test_engines_that_go_on_with_the_version_before_are_found():
  # All of it fits: admissions, first tokens, versions, and the bound of 2.
  log = logs.run(logs.BOUNDED, rounds=4)
  start = logs.place(log, "published", version=1)
  for i, event in enumerate(log[start:], start):
    stale = dict(event)
    if event["kind"] in ("admitted", "first_token"):
      stale["version"] = 0 if event["version"] == 1 else event["version"]
    if event.get("first_version") == 1:
      stale["first_version"] = 0
    if "versions" in event:
      stale["versions"] = [
        [0 if v == 1 else v, n] for v, n in event["versions"]
      ]
    log[i] = stale
  found = logs.broken(log, logs.BOUNDED)
  # Groups 6 and 7 begin under version 1, with two members each.
  late = [text for text in found if "by engine 0, which serves 1" in text]
  assert len(late) == 4


def test_sessions_in_the_wrong_pool_without_a_word_are_found():
  log = [event for event in routed() if event["kind"] != "fallback"]
  assert logs.broken(log, logs.IN_FLIGHT) == [
    "group 1 member 1: on engine 1 although maze prefers big; no word of it"
  ]
  elsewhere = [
    event | {"engine": 1} if event["kind"] == "admitted" else event
    for event in log
  ]
  found = logs.broken(elsewhere, logs.IN_FLIGHT)
  # Two members of six groups, and the one that moves.
  assert sum("no word of it" in text for text in found) == 12 + 1


def test_a_switch_that_nothing_suspends_is_found():
  log = [
    event
    for event in logs.run(logs.IN_FLIGHT, rounds=1)
    if event["kind"] not in ("decode_suspended", "decode_resumed")
  ]
  assert logs.broken(log, logs.IN_FLIGHT) == [
    "engine 0: switched of version 1 after staged",
    "engine 0: version 1 was published after staged, switched",
  ]
