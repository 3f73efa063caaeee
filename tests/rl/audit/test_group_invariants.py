"""Every promise about a group, broken by itself."""

import dataclasses

import pytest

from rl.schedule import overlap
from tests.helpers import event_logs as logs

_PIPE, _ONE_STEP = logs.run(logs.PIPE), logs.run(logs.ONE_STEP)
_IN_FLIGHT = logs.run(logs.IN_FLIGHT)
_REDUNDANT = logs.run(logs.REDUNDANT, rounds=4)
_SECOND = {"group": 2, "index": 0}


def _first_of(group, index, version, served):
  return (
    f"group {group} member {index}: its first token is of version {version}; "
    f"its engine served {served} to {served}"
  )


def _too_old(group, index):
  return (
    f"group {group} member {index}: 10 tokens are older than version 1, but at "
    "most 0 were asked for before the switch to it"
  )


_NEWER = [
  *(_first_of(3, index, 1, 0) for index in (0, 1)),
  *(
    f"group 3 member {index}: 10 tokens are of version 1 or newer, but at most "
    "5 were sampled after the switch to it"
    for index in (0, 1)
  ),
]


def _faulty(log):
  """The log with a fault in the place of a reward, of a masked member."""
  i = logs.place(log, "reward", group=0, index=1)
  fault = {name: log[i][name] for name in ("t", "group", "attempt", "index")}
  fault |= {"kind": "fault", "status": "reward_fault", "what": "it hung"}
  return [*log[:i], fault, *log[i + 1 :]]


_LATE = "one step off with a group that began a version later"
BROKEN = {
  "a group without one of its members": (
    logs.change(_IN_FLIGHT, "trained", members=[1], used=[], tokens=0),
    logs.IN_FLIGHT,
    ["group 0: trained with members [1], not 2 of them"],
  ),
  "a group with the same member twice": (
    logs.change(_IN_FLIGHT, "trained", members=[1, 1], used=[], tokens=0),
    logs.IN_FLIGHT,
    ["group 0: trained with members [1, 1], not 2 of them"],
  ),
  "a member that was never graded": (
    logs.without(_IN_FLIGHT, "reward", group=1, index=1),
    logs.IN_FLIGHT,
    ["group 1: members [1] were not graded when it was ready"],
  ),
  "a member that was aborted": (
    logs.change(_REDUNDANT, "trained", members=[0, 2], masked=5),
    logs.REDUNDANT,
    ["group 0: members [2] were not graded when it was ready"],
  ),
  "a member beyond those that are played": (
    _REDUNDANT,
    logs.IN_FLIGHT,
    [f"group {i}: members [2] beyond the 2 that are played" for i in range(8)],
  ),
  "a member with a fault that is trained": (
    logs.change(
      _faulty(_IN_FLIGHT), "trained", used=[0, 1], tokens=20, masked=0
    ),
    logs.IN_FLIGHT,
    ["group 0: member 1 is trained, although it has a fault"],
  ),
  "a member whose environment broke that is trained": (
    logs.change(_IN_FLIGHT, "ended", status="env_fault"),
    logs.IN_FLIGHT,
    ["group 0: member 0 is trained, although it ended with env_fault"],
  ),
  "a redundant member that never ended": (
    logs.without(_REDUNDANT, "aborted"),
    logs.REDUNDANT,
    ["group 0: members [2] never ended"],
  ),
  "a redundant member that was never played": (
    [e for e in _REDUNDANT if (e.get("group"), e.get("index")) != (0, 2)],
    logs.REDUNDANT,
    ["group 0: 2 of 3 members were played"],
  ),
  "tokens that were lost": (
    logs.change(_IN_FLIGHT, "trained", masked=0),
    logs.IN_FLIGHT,
    ["group 0: 20 tokens were sampled, but 10 are trained or masked"],
  ),
  "two errors that cancel out": (
    logs.change(
      logs.change(_IN_FLIGHT, "trained", tokens=9), "trained", at=1, tokens=11
    ),
    logs.IN_FLIGHT,
    [
      "group 0: 20 tokens were sampled, but 19 are trained or masked",
      "group 1: 20 tokens were sampled, but 21 are trained or masked",
    ],
  ),
  "dropped tokens that were lost": (
    logs.change(logs.retried(logs.DROP, "stale"), "dropped", tokens=5),
    logs.DROP,
    ["group 0: 10 tokens were sampled, but 5 dropped"],
  ),
  "tokens without a version": (
    logs.change(_IN_FLIGHT, "ended", versions=[[0, 9]]),
    logs.IN_FLIGHT,
    ["group 0 member 0: 9 tokens have a version, of 10"],
  ),
  "turns of more tokens than the episode": (
    logs.change(_IN_FLIGHT, "turn", tokens=6),
    logs.IN_FLIGHT,
    ["group 0 member 0: turns of 11 tokens, of 10"],
  ),
  "a turn that was lost": (
    logs.without(_IN_FLIGHT, "turn", group=0, index=0, number=1),
    logs.IN_FLIGHT,
    [
      "group 0 member 0: turns of 5 tokens, of 10",
      "group 0 member 0: 1 turns were logged, of 2",
    ],
  ),
  "tokens of a masked member that are trained": (
    logs.change(_IN_FLIGHT, "trained", used=[0, 1]),
    logs.IN_FLIGHT,
    ["group 0: 10 tokens are trained, but members [0, 1] sampled 20"],
  ),
  "versions that fall": (
    logs.change(
      logs.sampled(_IN_FLIGHT, {"group": 3, "index": 0}, 1, 0),
      "first_token",
      where={"group": 3, "index": 0},
      version=1,
    ),
    logs.IN_FLIGHT,
    [
      _first_of(3, 0, 1, 0),
      "group 3 member 0: versions fall: [1, 0]",
    ],
  ),
  "a first token of another version": (
    logs.change(_IN_FLIGHT, "first_token", where=_SECOND, version=1),
    logs.IN_FLIGHT,
    [
      _first_of(2, 0, 1, 0),
      "group 2 member 0: its first token was of version 1, its sequence begins"
      " with 0",
    ],
  ),
  "a group that is told to have begun later": (
    logs.change(_IN_FLIGHT, "trained", where={"group": 2}, first_version=1),
    logs.IN_FLIGHT,
    ["group 2: trained as if begun at 1, but its first token is of version 0"],
  ),
  "a group staler than the bound": (
    logs.began(logs.run(logs.IN_FLIGHT, rounds=3), 4, 0),
    logs.IN_FLIGHT,
    [
      _first_of(4, 0, 0, 1),
      _first_of(4, 1, 0, 1),
      _too_old(4, 0),
      _too_old(4, 1),
      "group 4: trained at version 2 but began at 0; the bound is 1",
    ],
  ),
  "a group that is trained in another round than it was taken in": (
    logs.change(_IN_FLIGHT, "dequeued", where={"group": 2}, version=0),
    logs.IN_FLIGHT,
    ["group 2: taken in round 0 but trained in round 1"],
  ),
  "a drained run with two versions in a sequence": (
    logs.sampled(_ONE_STEP, _SECOND, 0, 1),
    logs.ONE_STEP,
    ["group 2 member 0: sampled by versions [0, 1]"],
  ),
  "a synchronous round with tokens of the round before": (
    logs.change(
      logs.sampled(_PIPE, {"group": 3, "index": 1}, 0),
      "first_token",
      where={"group": 3, "index": 1},
      version=0,
    ),
    logs.PIPE,
    [
      _first_of(3, 1, 0, 1),
      _too_old(3, 1),
      "group 3: ready as if begun at 1, but its first token is of version 0",
      "group 3: trained as if begun at 1, but its first token is of version 0",
      "group 3: member 1 has tokens of [0] in round 1",
    ],
  ),
  _LATE: (
    logs.began(_ONE_STEP, 3, 1),
    logs.ONE_STEP,
    [
      *_NEWER,
      "group 3: trained in round 1 with a lag of 0",
    ],
  ),
}


def test_who_waits_over_a_publish_for_a_lost_engine_may_be_younger():
  log, schedule, found = BROKEN[_LATE]
  lost = {
    "t": log[0]["t"],
    "kind": "engine_lost",
    "engine": 9,
    "reason": "gone",
  }
  back = {"t": log[0]["t"], "kind": "engine_back", "engine": 9, "version": 0}
  late = "group 3: trained in round 1 with a lag of 0"
  assert late in found
  assert late in logs.broken([lost, back, *log], schedule)
  assert late not in logs.broken([lost, *log], schedule)


def test_engines_that_come_back_in_a_publish_or_never_excuse_no_one_else():
  log, schedule, _ = BROKEN[_LATE]
  late = "group 3: trained in round 1 with a lag of 0"
  lost = {
    "t": log[0]["t"],
    "kind": "engine_lost",
    "engine": 9,
    "reason": "gone",
  }
  i = logs.place(log, "published", version=1)
  back = {"t": log[i]["t"], "kind": "engine_back", "engine": 9, "version": 1}
  # It has the version that others are still given.
  assert late not in logs.broken([lost, *log[:i], back, *log[i:]], schedule)
  ends = {**lost, "kind": "engine_given_up", "attempts": 0}
  assert late in logs.broken([lost, ends, *log], schedule)


def test_a_fault_that_is_masked_breaks_nothing():
  assert logs.broken(_faulty(_IN_FLIGHT), logs.IN_FLIGHT) == []


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_promise_is_found_and_named(name):
  log, schedule, expected = BROKEN[name]
  assert logs.broken(log, schedule) == expected


# Beside whole rounds group 50 is submitted at version 0, and never comes to an
# end. With a bound of eta it may be open until version eta + 2.

_ONE_MORE = overlap.Redundancy(extra_groups=1)
_DROP = dataclasses.replace(logs.DROP, redundancy=_ONE_MORE)


def _lost(schedule, rounds, *kinds):
  """A log with the events of these kinds of such a group."""
  run = logs.Run(schedule, rounds)
  run.begin(50)
  run.log[:] = [e | {"t": 0.0} for e in run.log if e["kind"] in kinds]
  for _ in range(rounds):
    run.admit()
    run.round()
  return run.log


def _says(version, since=0):
  return [
    f"group 50: neither trained nor dropped by version {version}, though under "
    f"way since version {since}"
  ]


_SUBMITTED = ("submitted",)
_WAITING = (*_SUBMITTED, "admitted")
_PLAYING = (*_WAITING, "first_token", "turn")


@pytest.mark.parametrize("kinds", [_SUBMITTED, _WAITING, _PLAYING])
def test_at_a_bound_of_0_a_group_is_over_a_round_after_its_own(kinds):
  assert logs.broken(_lost(logs.EXTRA, 1, *kinds), logs.EXTRA) == []
  assert logs.broken(_lost(logs.EXTRA, 2, *kinds), logs.EXTRA) == _says(2)


@pytest.mark.parametrize("kinds", [_SUBMITTED, _PLAYING])
def test_a_group_that_began_and_was_lost_is_found(kinds):
  assert logs.broken(_lost(_DROP, 2, *kinds), _DROP) == []
  assert logs.broken(_lost(_DROP, 3, *kinds), _DROP) == _says(3)


def test_who_has_no_token_may_be_overtaken_for_as_long_as_it_takes():
  assert logs.broken(_lost(_DROP, 9, *_WAITING), _DROP) == []


@pytest.mark.parametrize(("rounds", "found"), [(3, []), (4, _says(4, 1))])
def test_a_group_without_a_token_whose_members_are_over_is_lost(rounds, found):
  # They are aborted after the first publish, while version 1 is served.
  log = _lost(_DROP, rounds, *_WAITING)
  i = logs.place(log, "published") + 1
  where = {"t": log[i - 1]["t"], "kind": "aborted", "group": 50, "attempt": 0}
  counts = {"turns": 0, "tokens": 0, "length": 0, "versions": []}
  ends = [
    {**where, "index": index, "reason": "stopped", **counts}
    for index in range(logs.GROUP_SIZE)
  ]
  assert logs.broken([*log[:i], *ends, *log[i:]], _DROP) == found


@pytest.mark.parametrize(("rounds", "found"), [(2, []), (3, _says(3))])
def test_a_restored_group_that_is_never_taken_is_lost(rounds, found):
  where = {"group": 50, "attempt": 0, "tokens": 20, "first_version": 0}
  restored = {"t": 0.0, "kind": "restored", **where}
  assert logs.broken([restored, *_lost(_DROP, rounds)], _DROP) == found


@pytest.mark.parametrize(
  ("name", "schedule", "found"),
  [
    (_LATE, logs.BOUNDED, _NEWER),
    ("a drained run with two versions in a sequence", logs.IN_FLIGHT, []),
  ],
)
def test_a_schedule_is_held_only_to_its_own_promises(name, schedule, found):
  log, _, _ = BROKEN[name]
  assert logs.broken(log, schedule) == found
