"""Every promise about engines, broken by itself."""

import pytest

from tests.helpers import event_logs as logs

_IN_FLIGHT = logs.run(logs.IN_FLIGHT)
_LONG = logs.run(logs.IN_FLIGHT, rounds=3)
_ONE_STEP = logs.run(logs.ONE_STEP, rounds=3)


def members(*events):
  """A run of three rounds in which these happen after version 1."""
  i = logs.place(_LONG, "published", version=1) + 1
  fresh = [{"t": _LONG[i]["t"], **event} for event in events]
  return [*_LONG[:i], *fresh, *_LONG[i:]], logs.IN_FLIGHT


def joins(engine, version=1):
  return {"kind": "engine_joined", "engine": engine, "version": version}


def leaves(engine, *words):
  return [{"kind": f"engine_{word}", "engine": engine} for word in words]


def begins(engine, group=9):
  where = {"group": group, "attempt": 0, "index": 0}
  return {"kind": "admitted", "engine": engine, "version": 1, **where}


_LOST = {"kind": "engine_lost", "engine": 1, "reason": "x"}
_MOVED = {"kind": "moved", "session": "train/9/0/0", "engine": 1}
_GONE = leaves(1, "leaving", "left")

BROKEN = {
  "an engine that joins twice": (
    *members(joins(1), joins(1), *_GONE),
    ["engine 1 joined, but was there"],
  ),
  "an engine that joins with older weights": (
    *members(joins(1, version=0), *_GONE),
    ["engine 1 joined with version 0, although 1 is the newest"],
  ),
  "an engine that joins and takes no part in publishes": (
    *members(joins(1)),
    [
      "engine 1: version 2 was published after nothing",
      "engine 1: version 3 was published after nothing",
    ],
  ),
  "an engine that leaves without a word": (
    *members(joins(1), *leaves(1, "left")),
    ["engine 1 left, but was neither to leave nor lost"],
  ),
  "an engine that is to leave twice": (
    *members(joins(1), *leaves(1, "leaving"), *_GONE),
    ["engine 1 is to leave, but is lost or leaves already"],
  ),
  "an engine that is lost after it left": (
    *members(joins(1), *_GONE, _LOST),
    ["engine 1 was lost after it had left"],
  ),
  "a session that begins on an engine that is to leave": (
    *members(joins(1), *leaves(1, "leaving"), begins(1), *leaves(1, "left")),
    [
      "group 9: admitted, but it is not under way",
      "group 9 member 0: admitted by engine 1, which is to leave, although "
      "engine 0 serves",
    ],
  ),
  "a session that begins on an engine that has left": (
    *members(joins(1), *_GONE, begins(1)),
    [
      "group 9: admitted, but it is not under way",
      "group 9 member 0: admitted by an engine that has left",
      "engine 1: version 2 was published after nothing",
      "engine 1: version 3 was published after nothing",
    ],
  ),
  "a session that moves to an engine that has left": (
    *members(joins(1), *_GONE, _MOVED),
    ["session train/9/0/0 moved to an engine that has left"],
  ),
  "a token of an engine that has left": (
    *members(
      joins(1),
      begins(1),
      *_GONE,
      {
        "kind": "first_token",
        "version": 1,
        "t": 1e6,
        "group": 9,
        "attempt": 0,
        "index": 0,
      },
    ),
    [
      "group 9: admitted, but it is not under way",
      "group 9: first_token, but it is not under way",
      "group 9 member 0: its first token is of an engine that left",
    ],
  ),
  "an engine that switches after it has left": (
    *members(
      joins(1),
      *_GONE,
      {"kind": "staged", "version": 2, "engine": 1, "moved_bytes": 0},
    ),
    [
      "engine 1: staged of version 2 while nothing is published",
      "engine 1: staged after it left",
      "engine 1: version 2 was published after nothing",
      "engine 1: version 3 was published after nothing",
    ],
  ),
  "a switch that nothing encloses": (
    logs.without(
      logs.without(_IN_FLIGHT, "decode_suspended"), "decode_resumed"
    ),
    logs.IN_FLIGHT,
    [
      "engine 0: switched of version 1 after staged",
      "engine 0: version 1 was published after staged, switched",
    ],
  ),
  "an engine that is never resumed": (
    logs.without(_IN_FLIGHT, "decode_resumed"),
    logs.IN_FLIGHT,
    [
      "engine 0: version 1 was published after staged, decode_suspended, "
      "switched"
    ],
  ),
  "an engine that switches before it has the weights": (
    logs.without(_IN_FLIGHT, "staged"),
    logs.IN_FLIGHT,
    [
      "engine 0: decode_suspended of version 1 after nothing",
      "engine 0: switched of version 1 after decode_suspended",
      "engine 0: decode_resumed of version 1 after decode_suspended, switched",
      "engine 0: version 1 was published after decode_suspended, switched, "
      "decode_resumed",
    ],
  ),
  "an engine that switches after the publish": (
    logs.moved(_IN_FLIGHT, "published", logs.place(_IN_FLIGHT, "switched") - 1),
    logs.IN_FLIGHT,
    [
      "engine 0: version 1 was published after staged",
      "engine 0: decode_suspended of version 1 while nothing is published",
      "engine 0: switched of version 1 while nothing is published",
      "engine 0: decode_resumed of version 1 while nothing is published",
    ],
  ),
  "an engine that switches twice": (
    [
      *_IN_FLIGHT[: logs.place(_IN_FLIGHT, "switched")],
      _IN_FLIGHT[logs.place(_IN_FLIGHT, "switched")],
      *_IN_FLIGHT[logs.place(_IN_FLIGHT, "switched") :],
    ],
    logs.IN_FLIGHT,
    [
      "engine 0: switched of version 1 after staged, decode_suspended, "
      "switched",
      "engine 0: decode_resumed of version 1 after staged, decode_suspended, "
      "switched, switched",
      "engine 0: version 1 was published after staged, decode_suspended, "
      "switched, switched, decode_resumed",
    ],
  ),
  "an episode that begins below a published version": (
    logs.change(
      _ONE_STEP, "admitted", where={"group": 4, "index": 0}, version=0
    ),
    logs.ONE_STEP,
    [
      "group 4 member 0: admitted at version 0 by engine 0, which serves 1",
    ],
  ),
  "a token that follows the switch to the next version": (
    # Its second turn of 5 tokens was asked for under version 0 or later.
    logs.sampled(_LONG, {"group": 4, "index": 0}, 0, 1),
    logs.IN_FLIGHT,
    [
      "group 4 member 0: 5 tokens are older than version 1, but at most 0 were "
      "asked for before the switch to it",
      "group 4 member 0: its first token was of version 1, its sequence begins "
      "with 0",
      "group 4: ready as if begun at 1, but its first token is of version 0",
      "group 4: trained as if begun at 1, but its first token is of version 0",
    ],
  ),
  "tokens of a version that nobody served yet": (
    logs.change(
      _LONG,
      "ended",
      where={"group": 2, "index": 0},
      versions=[[0, 4], [1, 6]],
    ),
    logs.IN_FLIGHT,
    [
      "group 2 member 0: 6 tokens are of version 1 or newer, but at most 5 "
      "were sampled after the switch to it"
    ],
  ),
}


@pytest.mark.parametrize(
  "events",
  [
    [joins(1), begins(1), *_GONE, _MOVED | {"engine": 0}],
    [joins(1), _LOST, *leaves(1, "left")],
    [joins(1), *leaves(0, "leaving"), begins(1), *_GONE],
    # The last one takes what there is, and the number is free again.
    [*leaves(0, "leaving"), begins(0)],
    [joins(1), *_GONE, joins(1), *_GONE],
    # Engine 1 may be one that only encodes prompts.
    [joins(1), *leaves(0, "leaving"), begins(0), *_GONE],
  ],
)
def test_engines_may_come_and_go(events):
  log, schedule = members(*events)
  found = logs.broken(log, schedule)
  # Group 9 is there only to begin somewhere.
  assert [x for x in found if "group 9: admitted" not in x] == []


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_promise_is_found_and_named(name):
  log, schedule, expected = BROKEN[name]
  assert logs.broken(log, schedule) == expected


def test_a_switch_that_fails_is_no_violation_until_it_is_published():
  log = logs.without(_IN_FLIGHT, "switched")
  whole = logs.place(log, "published")
  assert logs.broken(log[:whole], logs.IN_FLIGHT) == []
  assert logs.broken(log[: whole + 1], logs.IN_FLIGHT) == [
    "engine 0: version 1 was published after staged, decode_suspended, "
    "decode_resumed"
  ]


def test_a_lost_engine_takes_no_part_and_comes_back_with_the_weights():
  one = logs.run(logs.IN_FLIGHT, rounds=1)
  start = logs.place(one, "staged")
  at = {"t": one[start]["t"], "engine": 1}
  lost = {**at, "kind": "engine_lost", "reason": "x"}
  *log, published = [*one[:start], {**one[start], "engine": 1}, *one[start:]]
  assert logs.broken([*log, published], logs.IN_FLIGHT) == [
    "engine 1: version 1 was published after staged"
  ]
  gone = [*log[:start], lost, *log[start:]]
  assert logs.broken([*gone, published], logs.IN_FLIGHT) == []
  back = {"t": published["t"], "kind": "engine_back", "engine": 1}
  whole = [*gone, back | {"version": 1, "restarted": True}, published]
  assert logs.broken(whole, logs.IN_FLIGHT) == []
  stale = [*gone, back | {"version": 0, "restarted": True}, published]
  assert logs.broken(stale, logs.IN_FLIGHT) == [
    "engine 1 came back with version 0, although 1 is the newest",
    "engine 1: version 1 was published after staged",
  ]


def test_an_engine_that_comes_back_with_older_weights_is_found():
  i = logs.place(_LONG, "admitted", group=4, index=0)
  at = {"t": _LONG[i]["t"], "engine": 0}
  lost = at | {"kind": "engine_lost", "reason": "x"}
  begun = at | {"kind": "engine_restarting", "attempt": 1, "wait_s": 0.0}
  back = at | {"kind": "engine_back", "version": 1}

  def broken(*told, stale=()):
    log = [*_LONG[:i], *told, *_LONG[i:]]
    for event in log[i:]:
      if event["kind"] in stale and event["group"] == 4:
        log[log.index(event)] = event | {"version": 0}
    return logs.broken(log, logs.IN_FLIGHT)

  assert broken(lost, begun, back) == []
  assert broken(lost, begun, back | {"version": 0})[0] == (
    "engine 0 came back with version 0, although 1 is the newest"
  )
  assert broken(lost, begun, back | {"version": 2})[0] == (
    "engine 0 came back with version 2, although 1 is the newest"
  )
  # It says that it serves the newest, and does not.
  assert broken(lost, begun, back, stale=("admitted", "first_token"))[:2] == [
    "group 4 member 0: admitted at version 0 by engine 0, which serves 1",
    "group 4 member 0: its first token is of version 0; its engine served 1 "
    "to 1",
  ]


def test_restarts_follow_a_loss_and_each_other():
  i = logs.place(_LONG, "admitted", group=4, index=0)
  at = {"t": _LONG[i]["t"], "engine": 0}
  lost = at | {"kind": "engine_lost", "reason": "x"}
  first = at | {"kind": "engine_restarting", "attempt": 1, "wait_s": 0.0}
  third = first | {"attempt": 3}
  back = at | {"kind": "engine_back", "version": 1}
  ends = at | {"kind": "engine_given_up", "attempts": 2, "reason": "x"}

  def broken(*told):
    log = [*_LONG[:i], *told, *_LONG[i:]]
    return logs.broken(log, logs.IN_FLIGHT)

  assert broken(lost, back) == ["engine 0 came back, but was not restarted"]
  assert broken(first) == ["engine 0 is restarted, but was not lost"]
  assert broken(lost, first, third, back) == ["engine 0: restart 3 after 1"]
  late = first | {"wait_s": 7.0}
  time = at["t"]
  assert broken(lost, late, back) == [
    f"engine 0: engine_back at {time:g} s, but its restart begins at "
    f"{time + 7:g} s"
  ]
  assert broken(lost, first, ends, back) == [
    "engine 0 is given up after 2 restarts; there were 1",
    "engine 0 came back, but was not restarted",
  ]


# Routes: mazes prefer the pool of engine 0.


def _routed(number, **told):
  """A log with one member on an engine; `told` changes its fallback, or ""."""
  # Before the first publish: a second engine need not switch yet.
  log = _IN_FLIGHT[: logs.place(_IN_FLIGHT, "publish_start")]
  pools = [
    {"kind": "engine_pool", "engine": i, "pool": name, "hardware": kind}
    for i, (name, kind) in enumerate([("big", "compute"), ("small", "any")])
  ]
  begun = [*pools, {"kind": "preference", "source": "maze", "wanted": "big"}]
  i = logs.place(log, "admitted", group=2, index=0)
  word = {"kind": "fallback", "session": "train/2/0/0", "wanted": "big"}
  word |= {"t": log[i]["t"], "engine": number} | told
  return [
    *({"t": 0.0, **event} for event in begun),
    *log[:i],
    *([word] if word["session"] else []),
    log[i] | {"engine": number},
    *log[i + 1 :],
  ]


@pytest.mark.parametrize(
  ("engine", "told", "found"),
  [
    (1, {}, ""),
    (0, {"session": ""}, ""),
    (1, {"session": ""}, "engine 1 although maze prefers big; no word of it"),
    (1, {"session": "train/9/0/0"}, "although maze prefers big; no word of it"),
    (0, {}, "on engine 0 a fallback is told, which it is not"),
    (1, {"wanted": "small"}, "the fallback tells of 1 for small"),
    (1, {"engine": 0}, "the fallback tells of 0 for big"),
  ],
)
def test_a_session_is_where_its_source_prefers_or_a_fallback_is_told(
  engine, told, found
):
  violations = logs.broken(_routed(engine, **told), logs.IN_FLIGHT)
  assert len(violations) == bool(found)
  assert found in " ".join(violations)


def test_a_fallback_before_a_restart_tells_of_no_session_after_it():
  log = _routed(0)
  i = logs.place(log, "fallback") + 1
  again = {"t": log[i]["t"], "kind": "preference", "source": "maze"}
  log.insert(i, again | {"wanted": "big"})
  assert logs.broken(log, logs.IN_FLIGHT) == []


def test_a_session_that_moves_follows_its_preference_as_well():
  log = _routed(0, session="")
  i = logs.place(log, "turn", group=2, index=0)
  moved = {"t": log[i]["t"], "kind": "moved", "session": "train/2/0/0"}
  moved["engine"] = 1
  word = moved | {"kind": "fallback", "wanted": "big"}
  lost = {"t": log[i]["t"], "kind": "engine_lost", "engine": 0, "reason": "x"}

  def broken(*told):
    return logs.broken([*log[:i], *told, *log[i:]], logs.IN_FLIGHT)

  back = {"t": lost["t"], "kind": "engine_back", "engine": 0, "version": 0}
  back["restarted"] = True
  assert broken(lost, word, moved, back) == []
  assert broken(word, moved) == ["session train/2/0/0 moved from 0 to 1"]
  assert broken(lost, moved, back) == [
    "group 2 member 0: on engine 1 although maze prefers big; no word of it"
  ]


def test_a_lost_engine_takes_no_session():
  i = logs.place(_LONG, "admitted", group=4, index=0)
  lost = {"t": _LONG[i]["t"], "kind": "engine_lost", "engine": 0, "reason": "x"}
  back = {"t": lost["t"], "kind": "engine_back", "engine": 0, "version": 1}
  back["restarted"] = True
  log = [*_LONG[:i], lost, _LONG[i], back, *_LONG[i + 1 :]]
  assert logs.broken(log, logs.IN_FLIGHT) == [
    "group 4 member 0: admitted by an engine that is lost"
  ]
  again = [*_LONG[:i], lost, lost, back, back, *_LONG[i:]]
  assert logs.broken(again, logs.IN_FLIGHT) == [
    "engine 0 was lost again",
    "engine 0 came back, but was not lost",
  ]
