"""The log on disk, the token ledger, and every invariant kept and broken."""

import json

import pytest

from rl import events, overlap

# Two rounds of two groups of two members. In flight, group 2 began under
# version 0 and went on under version 1, which was published meanwhile.
IN_FLIGHT = overlap.in_flight(2, max_staleness=1, groups_per_microbatch=1)
PIPELINED = overlap.round_pipelined(2, groups_per_microbatch=1)
SYNC = overlap.sync(2, groups_per_microbatch=1)
GROUP_SIZE = 2


def _event(kind, **fields):
  return {"t": 0.0, "kind": kind, **fields}


def _ended(group, index, first, last):
  """Ten tokens, half of them sampled by each version."""
  versions = [[first, 10]] if first == last else [[first, 5], [last, 5]]
  return _event(
    "ended",
    group=group,
    index=index,
    status="completed",
    turns=2,
    tokens=10,
    versions=versions,
  )


def _played(group, first, last):
  """Two members: 2 * 10 = 20 tokens."""
  log = [_event("submitted", group=group, version=first)]
  for index in range(GROUP_SIZE):
    log += [
      _ended(group, index, first, last),
      _event("reward", group=group, index=index, value=1.0),
    ]
  return [*log, _event("ready", group=group, version=last)]


def _trained(group, version, first):
  kept = {"tokens": 15, "masked": 5}
  return _event(
    "trained", group=group, version=version, first_version=first, **kept
  )


def _taken(*groups):
  return [_event("dequeued", group=group) for group in groups]


def _published(version):
  return [
    _event("publish_start", version=version),
    _event("published", version=version),
  ]


def _in_flight():
  return [
    *_played(0, 0, 0),
    *_played(1, 0, 0),
    *_taken(0, 1),
    _trained(0, 0, 0),
    _trained(1, 0, 0),
    *_published(1),
    *_played(2, 0, 1),
    *_played(3, 1, 1),
    *_taken(2, 3),
    _trained(2, 1, 0),
    _trained(3, 1, 1),
    *_published(2),
  ]


def _sync():
  """The same run with every token of round 1 from version 1."""
  log = _in_flight()
  start = log.index(_played(2, 0, 1)[0])
  end = start + len(_played(2, 0, 1))
  log[start:end] = _played(2, 1, 1)
  return _change(log, "trained", 2, first_version=1)


def _change(log, kind, group, /, *, at=0, **fields):
  """Returns the log with other fields in one event of a group."""
  places = [
    i for i, e in enumerate(log) if (e["kind"], e.get("group")) == (kind, group)
  ]
  place = places[at]
  return [*log[:place], log[place] | fields, *log[place + 1 :]]


def _without(log, kind, at=0):
  place = [i for i, e in enumerate(log) if e["kind"] == kind][at]
  return [*log[:place], *log[place + 1 :]]


@pytest.mark.parametrize(
  ("log", "schedule"),
  [
    (_in_flight(), IN_FLIGHT),
    (_sync(), IN_FLIGHT),
    (_sync(), PIPELINED),
    (_sync(), SYNC),
    ([], SYNC),
  ],
)
def test_a_run_that_keeps_its_promises_has_no_violation(log, schedule):
  assert events.violations(log, schedule, GROUP_SIZE) == []


@pytest.mark.parametrize("length", range(0, len(_sync()), 5))
def test_a_run_that_was_cut_off_has_no_violation(length):
  assert events.violations(_sync()[:length], SYNC, GROUP_SIZE) == []


def test_a_restored_group_needs_no_history():
  # Groups 0 and 1 were finished before the restart, 20 tokens each.
  restored = [
    _event("restored", group=group, tokens=20, first_version=0)
    for group in (0, 1)
  ]
  rest = _sync()[len(_played(0, 0, 0)) + len(_played(1, 0, 0)) :]
  assert events.violations([*restored, *rest], SYNC, GROUP_SIZE) == []


BROKEN = {
  "a group staler than the bound": (
    _change(_in_flight(), "trained", 2, version=2),
    IN_FLIGHT,
    ["group 2 trained at version 2 but began at 0; the bound is 1"],
  ),
  "a group from a version that does not exist yet": (
    _change(_in_flight(), "trained", 0, first_version=1),
    IN_FLIGHT,
    ["group 0 trained at version 0 but began at 1; the bound is 1"],
  ),
  "a group trained twice": (
    [*_in_flight(), _trained(3, 1, 1)],
    IN_FLIGHT,
    [
      "group 3 was trained 2 times",
      "group 3: 20 tokens were sampled, but 40 are trained or masked",
    ],
  ),
  "a group without one of its members": (
    _without(_in_flight(), "ended"),
    IN_FLIGHT,
    [
      "group 0 was trained with members [1]",
      "group 0: 10 tokens were sampled, but 20 are trained or masked",
    ],
  ),
  "a group with the same member twice": (
    _change(_in_flight(), "ended", 0, index=1),
    IN_FLIGHT,
    ["group 0 was trained with members [1, 1]"],
  ),
  "groups taken out of order": (
    _change(
      _change(_in_flight(), "dequeued", 0, group=1),
      "dequeued",
      1,
      at=1,
      group=0,
    ),
    IN_FLIGHT,
    ["group 0 was taken after group 1", "group 2 was taken after group 0"],
  ),
  "versions that fall": (
    _change(_in_flight(), "ended", 3, versions=[[1, 5], [0, 5]]),
    IN_FLIGHT,
    ["group 3 member 0: versions fall"],
  ),
  "a group admitted beyond the window": (
    # At version 0 the window of a bound of 1 ends at (0 + 1 + 1) * 2 = 4.
    [*_in_flight(), _event("submitted", group=4, version=0)],
    IN_FLIGHT,
    ["group 4 was admitted at version 0; the gate ends at 4"],
  ),
  "a version that is left out": (
    [*_in_flight(), *_published(4)],
    IN_FLIGHT,
    ["version 4 was published after 2"],
  ),
  "a version that was never begun": (
    _without(_in_flight(), "publish_start"),
    IN_FLIGHT,
    ["version 1 was published but never begun"],
  ),
  "a publish inside another": (
    _without(_in_flight(), "published"),
    IN_FLIGHT,
    ["publishing 2 began inside 1"],
  ),
  "a synchronous round with tokens of two versions": (
    _change(_sync(), "ended", 2, versions=[[0, 5], [1, 5]]),
    PIPELINED,
    ["group 2 of round 1 mixes versions"],
  ),
  "a synchronous round with tokens of the next version": (
    _change(_sync(), "ended", 1, at=1, versions=[[0, 5], [1, 5]]),
    PIPELINED,
    ["group 1 of round 0 mixes versions"],
  ),
  "a round taken before all of it is ready": (
    [*_without(_sync(), "ready"), _event("ready", group=0, version=0)],
    SYNC,
    [
      "group 0 was taken before its round was ready",
      "group 1 was taken before its round was ready",
    ],
  ),
  "tokens that were lost": (
    _change(_in_flight(), "trained", 0, masked=0),
    IN_FLIGHT,
    ["group 0: 20 tokens were sampled, but 15 are trained or masked"],
  ),
  "two errors that cancel out": (
    _change(
      _change(_in_flight(), "trained", 0, tokens=14), "trained", 1, tokens=16
    ),
    IN_FLIGHT,
    [
      "group 0: 20 tokens were sampled, but 19 are trained or masked",
      "group 1: 20 tokens were sampled, but 21 are trained or masked",
    ],
  ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_promise_is_found_and_named(name):
  log, schedule, expected = BROKEN[name]
  assert events.violations(log, schedule, GROUP_SIZE) == expected


def test_only_a_schedule_that_waits_for_rounds_is_held_to_it():
  log, _, _ = BROKEN["a round taken before all of it is ready"]
  assert events.violations(log, PIPELINED, GROUP_SIZE) == []


def test_the_ledger_puts_every_token_in_one_column():
  # Four groups of 20, each 15 trained and 5 masked; a fifth of 20 waits, and
  # one of 7 was restored.
  log = [*_in_flight(), *_played(4, 2, 2)]
  log.append(_event("restored", group=5, tokens=7, first_version=1))
  # A member of group 6 had 4 when the run was stopped.
  log.append(_event("cancelled", group=6, index=0, tokens=4, versions=[[2, 4]]))
  book = events.ledger(log)
  assert (book.sampled, book.trained, book.masked) == (111, 60, 20)
  assert (book.untrained, book.cancelled) == (27, 4)
  assert book.error == 0


@pytest.mark.parametrize(("tokens", "error"), [(12, 3), (18, -3)])
def test_the_error_of_the_ledger_is_what_no_column_or_two_hold(tokens, error):
  # Of 15 tokens of group 0, 3 were lost or counted twice.
  log = _change(_in_flight(), "trained", 0, tokens=tokens)
  assert events.ledger(log).error == error


def test_staleness_is_trained_version_minus_first_version():
  assert events.staleness(_in_flight()) == [0, 0, 1, 0]


def _resumed(rounds, *restored):
  """A restart that finds these groups finished, of 20 tokens each."""
  return [
    _event("resumed", trained=rounds),
    *(
      _event("restored", group=group, tokens=20, first_version=1)
      for group in restored
    ),
  ]


_ROUND_1 = [
  *_taken(2, 3),
  _trained(2, 1, 1),
  _trained(3, 1, 1),
  *_published(2),
]


def _until_round_1():
  log = _sync()
  return log[: log.index(_taken(2)[0])]


def test_of_a_log_without_a_resume_everything_survives():
  assert events.surviving(_in_flight()) == _in_flight()
  assert events.surviving([]) == []


def test_a_round_trained_behind_the_checkpoint_counts_once():
  # Saved after round 0, killed after round 1: groups 2 and 3 are played anew.
  first = _sync()[: _sync().index(_played(2, 1, 1)[0])]
  again = [*_played(2, 1, 1), *_played(3, 1, 1), *_ROUND_1]
  log = [*_sync(), *_resumed(1), *again]
  assert len(events.staleness(log)) == 6
  assert events.surviving(log) == [*first, *again]
  assert events.violations(events.surviving(log), SYNC, GROUP_SIZE) == []


def test_a_restored_group_keeps_its_play_and_its_fault():
  # Group 2 was finished and saved, group 3 was not; both had been trained.
  fault = _event("fault", group=2, index=0, status="env_fault", what="x")
  lost = _event("fault", group=3, index=0, status="env_fault", what="y")
  log = [*_until_round_1(), fault, lost, *_ROUND_1]
  log += [*_resumed(1, 2), *_played(3, 1, 1), *_ROUND_1]
  kept = events.surviving(log)
  assert list(events.of_kind(kept, "fault")) == [fault]
  assert not list(events.of_kind(kept, "restored"))
  assert events.violations(kept, SYNC, GROUP_SIZE) == []
  # 4 groups of 20 tokens, each in one column: nothing is counted twice.
  assert events.ledger(kept).sampled == 80


def test_a_restored_group_whose_play_was_not_written_stays_restored():
  start = _until_round_1()
  start = start[: start.index(_played(2, 1, 1)[0])]
  log = [*start, *_resumed(1, 2, 3), *_resumed(1, 2, 3), *_ROUND_1]
  kept = events.surviving(log)
  assert [e["group"] for e in events.of_kind(kept, "restored")] == [2, 3]
  assert events.violations(kept, SYNC, GROUP_SIZE) == []


def test_a_second_resume_that_goes_further_back_supersedes_the_first():
  # The checkpoint of round 1 was damaged: all begins again after round 0.
  log = [*_sync(), *_resumed(1), *_ROUND_1, *_resumed(0), *_sync()]
  assert events.surviving(log) == _sync()


def test_a_publish_that_a_kill_cut_off_does_not_survive():
  log = [*_sync()[:-1], *_resumed(2)]
  assert events.surviving(log) == _sync()[:-2]


def test_the_time_of_a_resumed_log_goes_on_behind_a_cut_line(tmp_path):
  path = tmp_path / "events.jsonl"
  path.write_text('{"t": 40.5, "kind": "ready"}\n{"t": 41.0, "ki')
  log = events.EventLog(path)
  log.emit("resumed", trained=1)
  log.close()
  assert 40.5 <= log.events[0]["t"] < 100


def _lines(path):
  return [json.loads(line) for line in path.read_text().split("\n") if line]


def test_a_log_is_on_disk_up_to_the_last_flush(tmp_path):
  path = tmp_path / "events.jsonl"
  log = events.EventLog(path)
  log.emit("ready", group=0, version=0)
  log.flush()
  log.flush()
  log.emit("ready", group=1, version=0)
  assert _lines(path) == log.events[:1]
  log.close()
  assert _lines(path) == log.events
  assert [e["group"] for e in log.events] == [0, 1]
  assert 0 <= log.events[0]["t"] <= log.events[1]["t"]


def test_a_resumed_log_keeps_its_history_and_survives_a_cut_line(tmp_path):
  path = tmp_path / "events.jsonl"
  first = events.EventLog(path)
  first.emit("dequeued", group=0)
  first.close()
  with path.open("a") as file:
    file.write('{"t": 1.0, "ki')
  second = events.EventLog(path)
  second.emit("dequeued", group=1)
  second.close()
  kept, cut, new = [x for x in path.read_text().split("\n") if x]
  assert json.loads(kept) == first.events[0]
  assert cut == '{"t": 1.0, "ki'
  assert json.loads(new) == second.events[0]


def test_a_log_without_a_file_stays_in_memory():
  log = events.EventLog()
  log.emit("dequeued", group=0)
  log.flush()
  log.close()
  assert [e["kind"] for e in events.of_kind(log.events, "dequeued")] == [
    "dequeued"
  ]
