"""Every promise about gate and buffer, broken by itself."""

import dataclasses

import pytest

from tests.helpers import event_logs as logs

_SYNC, _IN_FLIGHT = logs.run(logs.SYNC), logs.run(logs.IN_FLIGHT)


def _swapped(log):
  """Group 1 is taken and trained before group 0."""
  log = logs.change(log, "dequeued", at=0, group=1)
  return logs.change(log, "dequeued", at=1, group=0)


def _twice():
  """Group 0 is trained, and a second attempt at it as well."""
  run = logs.Run(logs.DROP, 1)
  for attempt in (0, 1):
    run.begin(0, attempt)
    run.finish(0, attempt)
    run.train([0], attempt=attempt)
  return run.log


BROKEN = {
  "a group that is trained in two attempts": (
    _twice(),
    logs.DROP,
    [
      "group 0 attempt 1: submitted although the group is trained or cancelled",
      "group 0 attempt 1: trained once more",
    ],
  ),
  "a group admitted beyond the window": (
    # At version 0 the window of a bound of 1 ends at (0 + 1 + 1) * 2 = 4.
    logs.run(logs.BOUNDED, rounds=3),
    dataclasses.replace(logs.BOUNDED, max_staleness=1, consume="drop"),
    [
      "group 4: admitted at version 0 after 4 others; the gate ends at 4",
      "group 5: admitted at version 0 after 5 others; the gate ends at 4",
      "group 4: trained at version 2 but began at 0; the bound is 1",
      "group 5: trained at version 2 but began at 0; the bound is 1",
    ],
  ),
  "redundant groups beyond the extra ones": (
    logs.without(logs.cancelled(), "dropped"),
    logs.EXTRA,
    ["group 5: admitted at version 1 after 5 others; the gate ends at 5"],
  ),
  "an attempt out of order": (
    logs.retried(logs.DROP, "stale", attempt=2)[
      : logs.place(logs.retried(logs.DROP, "stale"), "submitted", attempt=1) + 1
    ],
    logs.DROP,
    ["group 0 attempt 2: submitted after attempt 0"],
  ),
  "an attempt that begins before the last one is dropped": (
    logs.without(logs.retried(logs.DROP, "faults"), "dropped"),
    logs.DROP,
    ["group 0 attempt 1: submitted before the attempt before it was dropped"],
  ),
  "an attempt without the one before it": (
    [e for e in logs.retried(logs.DROP, "stale") if e.get("attempt") == 1],
    logs.DROP,
    ["group 0 attempt 1: submitted without the attempts before it"],
  ),
  "an attempt at a task of another source": (
    logs.retried(logs.DROP, "stale", source="chess"),
    logs.DROP,
    ["group 0 attempt 1: a task of chess in the place of one of maze"],
  ),
  "another task where the same is to be recycled": (
    logs.retried(logs.RECYCLE, "stale", task="maze/7"),
    logs.RECYCLE,
    [
      "group 0 attempt 1: task maze/7 in the place of maze/0, which is to be "
      "recycled"
    ],
  ),
  "a group that is played again after its training": (
    [
      *logs.retried(logs.DROP, "stale"),
      _IN_FLIGHT[0] | {"t": 99.0, "attempt": 2, "group": 0},
    ],
    logs.DROP,
    ["group 0 attempt 2: submitted although the group is trained or cancelled"],
  ),
  "more groups than a hard frontier holds": (
    logs.run(logs.HARD, rounds=1),
    dataclasses.replace(logs.HARD, frontier_groups=1),
    ["group 1: played with 1 others; the frontier holds 1"],
  ),
  "groups taken out of order": (
    _swapped(logs.run(logs.IN_ORDER, rounds=1)),
    logs.IN_ORDER,
    [
      "group 1 was taken when 0 was next",
      "group 0 was taken when 2 was next",
    ],
  ),
  "a round taken before all of it is ready": (
    logs.moved(
      logs.run(logs.SYNC, rounds=1),
      "dequeued",
      logs.place(_SYNC, "ready", group=0) + 1,
    ),
    logs.SYNC,
    ["group 0 was taken with 1 of 2 groups ready"],
  ),
  "a micro-batch that is split": (
    logs.change(logs.run(logs.SYNC), "dequeued", at=1, microbatch=1),
    logs.SYNC,
    [
      "micro-batch 0 of round 0 has 1 groups, not 2",
      "micro-batch 1 of round 0 has 1 groups, not 2",
    ],
  ),
  "a micro-batch beyond its budget": (
    logs.change(logs.run(logs.TOKENS), "dequeued", at=1, microbatch=0),
    logs.TOKENS,
    # A group of 60 ids alone is larger than the budget too, but is not split.
    [
      "micro-batch 0 of round 0 has 2 groups of 120 tokens; the budget is 50",
    ],
  ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_promise_is_found_and_named(name):
  log, schedule, expected = BROKEN[name]
  assert logs.broken(log, schedule) == expected


@pytest.mark.parametrize(
  ("name", "schedule"),
  [
    ("groups taken out of order", logs.STRICT),
    ("a round taken before all of it is ready", logs.WHOLE),
    ("more groups than a hard frontier holds", logs.PIPE),
    ("another task where the same is to be recycled", logs.DROP),
  ],
)
def test_a_schedule_is_held_only_to_its_own_promises(name, schedule):
  log, _, _ = BROKEN[name]
  assert logs.broken(log, schedule) == []


def test_a_task_that_is_too_slow_may_give_way_to_one_of_another_source():
  log = logs.retried(logs.DROP, "stale", source="chess")
  i = logs.place(log, "submitted", attempt=1)
  place = {"source": "maze", "task": "maze/0", "attempts": 3}
  told = {"t": log[i]["t"], "kind": "source_too_slow", **place}
  assert logs.broken([*log[:i], told, *log[i:]], logs.DROP) == []
