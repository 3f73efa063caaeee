"""Every promise about rounds and publishes, broken by itself."""

import math

import pytest

from rl.audit import event_log
from tests.helpers import event_logs as logs

_SYNC, _IN_FLIGHT = logs.run(logs.SYNC), logs.run(logs.IN_FLIGHT)
_RESUMED_T = _IN_FLIGHT[logs.place(_IN_FLIGHT, "decode_resumed")]["t"]


def _published(log, version):
  t = log[-1]["t"] + 1
  return [
    *log,
    {"t": t, "kind": "publish_start", "version": version},
    {"t": t, "kind": "published", "version": version},
  ]


BROKEN = {
  "time that falls": (
    logs.change(_IN_FLIGHT, "published", t=1.0),
    logs.IN_FLIGHT,
    [f"published at 1.0 s came after {_RESUMED_T} s"],
  ),
  "a round that begins to train while one of its groups plays": (
    logs.change(_SYNC, "update", start=2.0),
    logs.SYNC,
    [
      "round 0 began to train at 2.0 s, its last group was ready at "
      f"{_SYNC[logs.place(_SYNC, 'ready', group=1)]['t']} s"
    ],
  ),
  "an update that is left out": (
    logs.without(logs.run(logs.SYNC_TWO), "update", at=1),
    logs.SYNC_TWO,
    ["publishing 1 began after updates [0], not 2 of them"],
  ),
  "an update too many": (
    logs.change(logs.run(logs.STRICT), "update", at=1, version=0, number=1),
    logs.STRICT,
    [
      "publishing 2 began after updates [], not 1 of them",
    ],
  ),
  "updates that tell the wrong lag": (
    logs.change(
      logs.change(logs.run(logs.SYNC_TWO, 1), "update", number=1),
      "update",
      at=1,
      number=0,
    ),
    logs.SYNC_TWO,
    ["publishing 1 began after updates [1, 0], not 2 of them"],
  ),
  "updates of unequal size": (
    logs.change(logs.run(logs.SYNC_TWO, 1), "trained", at=1, update=0),
    logs.SYNC_TWO,
    ["publishing 1 began with groups by update {0: 2}, not {0: 1, 1: 1}"],
  ),
  "an update inside another": (
    logs.change(_IN_FLIGHT, "update", at=1, start=40.0),
    logs.IN_FLIGHT,
    ["update 0 of round 1 began inside the one before"],
  ),
  "an update that ends before it begins": (
    logs.change(_IN_FLIGHT, "update", end=1.0),
    logs.IN_FLIGHT,
    ["update 0 of round 0 ended before it began"],
  ),
  "an update without an end": (
    logs.change(_IN_FLIGHT, "update", end=math.nan),
    logs.IN_FLIGHT,
    [
      "update 0 of round 0 ended before it began",
      "update 0 of round 0 was told before it ended",
    ],
  ),
  "a publish before the last group of its round": (
    [
      e
      for e in logs.run(logs.STRICT, rounds=1)
      if (e["kind"], e.get("group")) != ("trained", 1)
    ],
    logs.STRICT,
    ["publishing 1 began with groups by update {0: 1}, not {0: 2}"],
  ),
  "a publish inside an update": (
    logs.change(logs.run(logs.STRICT, rounds=1), "update", end=99.0),
    logs.STRICT,
    [
      "update 0 of round 0 was told before it ended",
      "publishing 1 began before the last update of its round had ended",
    ],
  ),
  "a publish that was never begun": (
    logs.without(logs.run(logs.STRICT, rounds=1), "publish_start"),
    logs.STRICT,
    [
      *(
        f"engine 0: {step} of version 1 while nothing is published"
        for step in ("staged", *event_log.OF_SWITCH)
      ),
      "version 1 was published but never begun",
    ],
  ),
  "a publish inside another": (
    logs.without(_IN_FLIGHT, "published"),
    logs.IN_FLIGHT,
    ["publishing 2 began inside 1", "version 2 was published after 0"],
  ),
  "a version that is left out": (
    _published(logs.run(logs.STRICT, rounds=1), 3),
    logs.STRICT,
    [
      "publishing 3 began after updates [], not 1 of them",
      "publishing 3 began with groups by update {}, not {0: 2}",
      "version 3 was published after 1",
      "engine 0: version 3 was published after nothing",
    ],
  ),
  "a token of a version that is not published": (
    logs.sampled(
      logs.run(logs.IN_FLIGHT, rounds=1), {"group": 0, "index": 0}, 0, 1
    ),
    logs.IN_FLIGHT,
    [
      "group 0 member 0: sampled by version 1, which is not published; 0 is",
      "group 0 member 0: 5 tokens are of version 1 or newer, but at most 0 "
      "were sampled after the switch to it",
    ],
  ),
  "a member admitted at a version that is not published": (
    logs.change(_IN_FLIGHT, "admitted", version=9),
    logs.IN_FLIGHT,
    [
      "group 0 member 0: admitted at version 9, which is not published; 0 is",
      "group 0 member 0: admitted at version 9 by engine 0, which serves 0",
    ],
  ),
  "a group that is ready at a version that is not published": (
    logs.change(_IN_FLIGHT, "ready", version=9),
    logs.IN_FLIGHT,
    ["group 0: ready at version 9, which is not published; 0 is"],
  ),
  "an event of an unknown kind": (
    [*_IN_FLIGHT, {"t": 1e3, "kind": "zzz"}],
    logs.IN_FLIGHT,
    ["an event of unknown kind 'zzz'"],
  ),
  "an end of an unknown status": (
    logs.change(_IN_FLIGHT, "ended", status="zzz"),
    logs.IN_FLIGHT,
    ["group 0 member 0: ended with unknown status 'zzz'"],
  ),
  "a group admitted at a version that is not published": (
    logs.change(_IN_FLIGHT, "submitted", version=1),
    logs.IN_FLIGHT,
    ["group 0: submitted at version 1, which is not published; 0 is"],
  ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_promise_is_found_and_named(name):
  log, schedule, expected = BROKEN[name]
  assert logs.broken(log, schedule) == expected


@pytest.mark.parametrize(
  ("name", "schedule"),
  [
    ("a round that begins to train while one of its groups plays", logs.WHOLE),
  ],
)
def test_a_schedule_is_held_only_to_its_own_promises(name, schedule):
  log, _, _ = BROKEN[name]
  assert logs.broken(log, schedule) == []
