"""The log on disk, and the part of it that survives a restart."""

import json

import pytest

from rl.audit import checker, event_log, token_ledger
from rl.schedule import overlap
from tests.helpers import event_logs as logs

SYNC = overlap.sync(2, groups_per_microbatch=1)
DROP = overlap.Overlap(
  groups_per_round=2,
  groups_per_microbatch=1,
  max_staleness=1,
  consume="drop",
  on_publish="recompute",
)


def _lines(path):
  return [json.loads(line) for line in path.read_text().split("\n") if line]


def test_a_log_is_on_disk_up_to_the_last_flush_and_the_rest_in_memory(tmp_path):
  path = tmp_path / "events.jsonl"
  log = event_log.EventLog(path)
  log.emit("ready", group=0, version=0)
  first = log.events[:]
  log.flush()
  log.flush()
  log.emit("ready", group=1, version=0)
  assert _lines(path) == first
  assert [e["group"] for e in log.events] == [1]
  log.flush()
  assert log.events == []
  assert [e["group"] for e in event_log.LogFile(path)] == [0, 1]


def test_the_loss_of_an_engine_is_on_disk_at_once(tmp_path):
  path = tmp_path / "events.jsonl"
  log = event_log.EventLog(path)
  log.emit("published", version=1)
  assert not list(event_log.LogFile(path))
  log.emit("engine_lost", engine=0, reason="it is silent")
  kinds = [event["kind"] for event in event_log.LogFile(path)]
  assert kinds == ["published", "engine_lost"]


def test_memory_is_flat_in_a_round_that_is_never_flushed(tmp_path):
  log = event_log.EventLog(tmp_path / "events.jsonl")
  most = 0
  for group in range(3500):
    log.emit("dequeued", group=group)
    most = max(most, len(log.events))
  assert most < 1000
  log.flush()
  found = [e["group"] for e in event_log.LogFile(tmp_path / "events.jsonl")]
  assert found == list(range(3500))


def test_a_log_without_a_file_stays_in_memory():
  log = event_log.EventLog()
  for group in range(3000):
    log.emit("dequeued", group=group)
  log.flush()
  log.flush()
  assert len(list(event_log.of_kind(log.events, "dequeued"))) == 3000
  assert not list(event_log.of_kind(log.events, "ready"))


def test_times_count_from_the_first_reading_of_the_clock():
  # The clock reads 10 s at first, then 12.5 s; an engine's token came at 11 s.
  readings = iter([10.0, 12.5])
  log = event_log.EventLog(clock=lambda: next(readings))
  log.emit("ready", group=0)
  log.emit("first_token", t=log.since(11.0), group=0)
  assert [e["t"] for e in log.events] == [2.5, 1.0]


def test_times_are_whole_microseconds_so_that_equal_ones_compare_equal():
  log = event_log.EventLog(clock=lambda: 1 / 3)
  assert log.since(1.0) == 0.666667


def test_a_listener_hears_every_event_at_once():
  log, heard = event_log.EventLog(), []
  log.listeners.append(heard.append)
  log.emit("dequeued", group=7)
  assert heard == log.events
  assert heard[0]["group"] == 7


def test_a_resumed_log_keeps_its_history_and_survives_a_cut_line(tmp_path):
  path = tmp_path / "events.jsonl"
  first = event_log.EventLog(path)
  first.emit("dequeued", group=0)
  first.flush()
  with path.open("a") as file:
    file.write('{"t": 1.0, "ki')
  second = event_log.EventLog(path)
  second.emit("dequeued", group=1)
  second.flush()
  kept, cut, new = [x for x in path.read_text().split("\n") if x]
  assert cut == '{"t": 1.0, "ki'
  assert [json.loads(x)["group"] for x in (kept, new)] == [0, 1]
  assert [e["group"] for e in event_log.LogFile(path)] == [0, 1]


def test_a_log_in_segments_is_read_as_one_and_its_time_goes_on(tmp_path):
  path = tmp_path / "events.jsonl"
  # An event has some 50 bytes, and a segment begins after each flush.
  log = event_log.EventLog(path, clock=lambda: 7.0, segment_bytes=1)
  for group in range(3):
    log.emit("dequeued", t=float(group), group=group)
    log.flush()
  assert path.read_text() == ""
  found = event_log.LogFile(path)
  assert [e["group"] for e in found] == [0, 1, 2]
  assert list(found.only({"dequeued"})) == list(found)
  assert not list(found.only({"resumed"}))
  again = event_log.EventLog(path, clock=lambda: 7.0)
  again.emit("resumed", trained=1)
  assert again.events[0]["t"] == 2.0


def test_only_the_events_of_some_kinds_can_be_read(tmp_path):
  path = tmp_path / "events.jsonl"
  lines = [
    '{"t":1,"kind":"ready","group":0}',
    '{"t": 2, "kind": "ready", "group": 1}',
    '{"t":3,"kind":"dropped","group":2,"reason":"ready"}',
    '{"t":4,"kind":"ready","gro',
    '{"t":5,"kind":"resumed"}{"t":6,"kind":"ready"}',
  ]
  path.write_text("\n".join(lines))
  log = event_log.LogFile(path)
  assert [event["group"] for event in log.only({"ready"})] == [0, 1]
  assert [event["group"] for event in log] == [0, 1, 2]
  assert not list(log.only({"resumed"}))


def test_lines_that_are_no_events_are_counted(tmp_path):
  path = tmp_path / "events.jsonl"
  event = b'{"t": 1.0, "kind": "dequeued", "group": 0}'
  bad = [b"null", b"[]", b'{"t": 1.0}', b'{"kind": "x", "t": "1"}', b"\xff"]
  path.write_bytes(b"\n".join([*bad, event, b"null\n"]))
  log = event_log.LogFile(path)
  assert [one["group"] for one in log] == [0]
  assert (log.num_cut, log.num_garbled) == (6, 5)
  # It goes on where the last event was.
  again = event_log.EventLog(path)
  again.emit("dequeued", group=1)
  again.flush()
  assert [one["t"] >= 1.0 for one in log] == [True, True]


@pytest.mark.parametrize("before", [0, 70_000, 140_000])
@pytest.mark.parametrize("cut", [0, 100_000])
def test_the_time_of_a_resumed_log_goes_on_behind_the_last_whole_line(
  tmp_path, before, cut
):
  # The line, or what a kill has cut behind it, may be longer than a block.
  path = tmp_path / "events.jsonl"
  last = json.dumps({"t": 40.5, "kind": "fault", "what": "x" * before})
  path.write_text(
    f'{{"t": 3.0, "kind": "ready"}}\n{last}\n{{"t": 41' + " " * cut
  )
  log = event_log.EventLog(path, clock=lambda: 7.0)
  log.emit("resumed", trained=1)
  assert log.events[0]["t"] == 40.5


def test_a_first_token_told_last_does_not_turn_back_the_time(tmp_path):
  # Its answer came at 60 s or later, but it was sampled at 15 s.
  path = tmp_path / "events.jsonl"
  told = [{"t": 60.0, "kind": "published"}, {"t": 15.0, "kind": "first_token"}]
  path.write_text("".join(json.dumps(event) + "\n" for event in told))
  log = event_log.EventLog(path, clock=lambda: 7.0)
  log.emit("resumed", trained=1)
  assert log.events[0]["t"] == 60.0


def test_the_time_of_a_log_of_nothing_but_a_cut_line_begins_anew(tmp_path):
  path = tmp_path / "events.jsonl"
  path.write_text('{"t": 41.0, "ki')
  log = event_log.EventLog(path, clock=lambda: 7.0)
  log.emit("submitted", group=0)
  assert log.events[0]["t"] == 0.0


def test_staleness_is_trained_version_minus_first_version():
  # In flight with a bound of 1: round 1 began under version 0.
  log = logs.run(overlap.in_flight(2, 1))
  assert event_log.staleness(log) == [0, 0, 1, 1]


# What a restart leaves. Two rounds of two groups, killed, and resumed.


def _surviving(log):
  return list(event_log.surviving(log))


def _served(version):
  """The publish that a restart adds when its weights had not been published."""
  at = {"t": 0.0, "version": version}
  return [
    {**at, "kind": "publish_start"},
    {**at, "kind": "published", "restarted": True},
  ]


def _resumed(rounds, *restored, attempt=0):
  """A restart that finds these groups finished, of 20 tokens each."""
  fields = {"attempt": attempt, "tokens": 20, "first_version": rounds}
  return [
    {"t": 0.0, "kind": "resumed", "trained": rounds, "next_group": 4},
    *(
      {"t": 0.0, "kind": "restored", "group": group, **fields}
      for group in restored
    ),
  ]


def _parts():
  """The log of two synchronous rounds: round 0, play of 1, training of 1."""
  log = logs.run(SYNC)
  play = logs.place(log, "submitted", group=2)
  train = logs.place(log, "dequeued", group=2)
  return log[:play], log[play:train], log[train:]


def _broken(log, schedule=SYNC):
  # Times of the parts are from one run, so they repeat.
  ledger = token_ledger.of(log)
  assert ledger.error == 0
  return [
    line
    for line in checker.violations(log, schedule, logs.GROUP_SIZE)
    if " s came after " not in line
  ]


def test_of_a_log_without_a_resume_everything_survives():
  assert _surviving(logs.run(SYNC)) == logs.run(SYNC)
  assert _surviving([]) == []


def test_a_round_trained_behind_the_checkpoint_counts_once():
  # Saved after round 0, killed after round 1: groups 2 and 3 are played anew.
  first, play, train = _parts()
  kept = _surviving([*first, *play, *train, *_resumed(1), *play, *train])
  assert kept == [*first, *play, *train]
  assert _broken(kept) == []


def test_a_restored_group_keeps_its_play_and_its_fault():
  # Group 2 was finished and saved, group 3 was not; both had been trained.
  first, play, train = _parts()
  again = play[logs.place(play, "submitted", group=3) :]
  again = [e for e in again if e["group"] == 3]
  lost = {"t": 0.0, "kind": "fault", "group": 3, "attempt": 0, "index": 0}
  log = [*first, *play, lost, *train, *_resumed(1, 2), *again, *train]
  kept = _surviving(log)
  assert [e for e in kept if e["kind"] in ("fault", "restored")] == []
  assert [e["group"] for e in event_log.of_kind(kept, "ready")] == [0, 1, 2, 3]
  assert _broken(kept) == []
  # 4 groups of 20 tokens, each in one column: nothing is counted twice.
  assert token_ledger.of(kept).sampled == 80


def test_a_restored_group_whose_play_was_not_written_stays_restored():
  first, _, train = _parts()
  kept = _surviving([*first, *_resumed(1, 2, 3), *_resumed(1, 2, 3), *train])
  assert [e["group"] for e in event_log.of_kind(kept, "restored")] == [2, 3]
  assert _broken(kept) == []


def test_a_second_resume_that_goes_further_back_supersedes_the_first():
  # The checkpoint of round 1 was damaged: all begins again after round 0.
  first, play, train = _parts()
  whole = [*first, *play, *train]
  log = [*whole, *_resumed(1), *play, *train, *_resumed(0), *whole]
  assert _surviving(log) == whole


def test_a_restart_that_is_killed_before_it_plays_leaves_no_trace():
  first, play, train = _parts()
  log = [*first, *play, *_resumed(1), *_resumed(1), *play, *train]
  assert _surviving(log) == [*first, *play, *train]


@pytest.mark.parametrize("cut", range(1, 6))
def test_a_publish_that_a_kill_cut_off_is_served_from_the_start(cut):
  # The restart says so.
  log = logs.run(SYNC)
  start = logs.place(log, "publish_start", version=2)
  begun = log[: start + cut]
  kept = _surviving([*begun, *_resumed(2)])
  assert kept == [*begun, _served(2)[1]]
  assert _broken(kept) == []


def _attempts():
  """Group 0 is dropped as stale in its first attempt; then a whole run."""
  run = logs.Run(DROP, 1)
  run.begin(0)
  run.begin(1)
  run.drop(0, 0, "stale")
  start = len(run.log)
  run.begin(0, attempt=1)
  run.finish(0, attempt=1)
  run.finish(1)
  ready = len(run.log)
  run.train([1])
  run.train([0], attempt=1)
  return run.log, start, ready


def test_attempts_that_were_dropped_before_the_one_that_trained_survive():
  log, _, _ = _attempts()
  assert _surviving([*log, *_resumed(1)]) == [*log, *_served(1)]


@pytest.mark.parametrize("restarts", [1, 2])
def test_an_attempt_behind_which_a_restart_goes_on_survives(restarts):
  # Saved with attempt 1 in flight, which is played again.
  log, start, _ = _attempts()
  before = [e for e in log[:start] if (e["group"], e["attempt"]) == (0, 0)]
  again = [*log, *(_resumed(0) * restarts), *log[start:]]
  assert _surviving(again) == [*before, *log[start:]]


def test_an_attempt_that_was_dropped_behind_the_checkpoint_does_not_survive():
  # Saved with attempt 0 in flight: what was dropped meanwhile never was.
  log, _, _ = _attempts()
  assert _surviving([*log, *_resumed(0), *log]) == log


def test_a_restored_attempt_leaves_those_before_it():
  log, _, ready = _attempts()
  again = [*log[:ready], *_resumed(0, 0, 1), *log[ready:]]
  again[logs.place(again, "restored", group=0)]["attempt"] = 1
  assert _surviving(again) == log


@pytest.mark.parametrize("reason", ["stale", "redundant"])
def test_a_ready_group_dropped_behind_its_checkpoint_never_was(reason):
  # Saved with both groups ready. Group 0 is dropped, and begun again, before
  # the kill; the restart has it ready as if nothing had happened.
  run = logs.Run(DROP, 1)
  for group in (0, 1):
    run.begin(group)
    run.finish(group)
  saved = len(run.log)
  where = {"group": 0, "attempt": 0}
  run.emit("dropped", **where, reason=reason, version=0, tokens=20)
  run.emit("source_too_slow", **where, source="maze", task="maze/0", attempts=1)
  run.begin(0, attempt=1)
  killed = len(run.log)
  run.train([0, 1])
  log = [*run.log[:killed], *_resumed(0, 0, 1), *run.log[killed:]]
  kept = _surviving(log)
  assert kept == [*run.log[:saved], *run.log[killed:]]
  assert _broken(kept, DROP) == []


def test_a_restored_group_that_is_dropped_after_all_is_dropped_once():
  # Both before and after the restart it grew too old.
  run = logs.Run(DROP, 1)
  run.begin(0)
  run.finish(0)
  played = run.log[:]
  drop = {"group": 0, "attempt": 0, "reason": "stale", "tokens": 20}
  run.emit("dropped", **drop, version=0)
  kept = _surviving([*run.log, *_resumed(0, 0), run.log[-1]])
  assert kept == [*played, run.log[-1]]
  assert _broken(kept, DROP) == []


def test_a_redundant_group_survives_with_the_round_that_cancelled_it():
  run = logs.Run(SYNC, 2)
  run.admit()
  run.begin(2)
  for group in (0, 1):
    run.finish(group)
  run.drop(2, 0, "redundant")
  run.train([0, 1])
  run.publish()
  assert _surviving([*run.log, *_resumed(1)]) == run.log
  kept = _surviving([*run.log, *_resumed(0)])
  assert kept == []


def test_a_restart_has_the_engines_of_the_run_again_and_no_others():
  at = {"t": 0.0, "version": 0}
  left, joined = {"kind": "engine_left"}, {"kind": "engine_joined"}
  told = {"t": 0.0, "kind": "engine_leaving"}
  own = [told | {"engine": 1}, {"t": 0.0, "engine": 1} | left]
  guest = [at | joined | {"engine": 2}]
  gone = [told | {"engine": 2}, {"t": 0.0, "engine": 2} | left]
  serves = at | joined | {"engine": 1, "restarted": True}
  ends = at | left | {"engine": 2, "restarted": True}
  # With or without the second of the two.
  assert _surviving([*own, *_resumed(0)]) == [*own, serves]
  assert _surviving([*own[:1], *_resumed(0)]) == [*own[:1], serves]
  assert _surviving([*guest, *_resumed(0)]) == [*guest, ends]
  assert _surviving([*guest, *gone, *_resumed(0)]) == [*guest, *gone]
  # Version 1 is trained once more, so it was none that is known.
  newer = guest[0] | {"version": 1}
  assert _surviving([newer, *_resumed(0)]) == [*guest, ends]
  lost = {"t": 0.0, "kind": "engine_lost", "engine": 2, "reason": "x"}
  assert _surviving([*guest, lost, *_resumed(0)]) == [*guest, lost, ends]


def test_an_engine_that_was_lost_comes_back_with_a_restart():
  lost = {"t": 0.0, "kind": "engine_lost", "engine": 1, "reason": "x"}
  back = {"t": 0.0, "kind": "engine_back", "engine": 1, "version": 0}
  with_all = back | {"restarted": True}
  assert _surviving([lost, *_resumed(0)]) == [lost, with_all]
  assert _surviving([lost, back, *_resumed(0)]) == [lost, back]
  # Version 1 is trained once more, so it was none that is known.
  newer = back | {"version": 1}
  assert _surviving([lost, newer, *_resumed(0)]) == [lost, back]
