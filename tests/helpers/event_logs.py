"""Logs of runs that keep every promise, for tests to break one of them.

A second passes with each event. A round of R groups of two members; a member
samples ten tokens in two turns. The first member is trained, the second masked.
"""

import dataclasses
from collections.abc import Sequence

from rl.audit import checker, event_log
from rl.schedule import overlap

GROUP_SIZE = 2

SYNC = overlap.sync(2, groups_per_microbatch=1)
SYNC_TWO = overlap.sync(2, updates_per_round=2, groups_per_microbatch=1)
STRICT = overlap.strict_pipeline(2, groups_per_microbatch=1)
WHOLE = overlap.strict_pipeline(2, groups_per_microbatch=2)
PIPE = overlap.rollout_pipe(2, 2, 1)
TOKENS = dataclasses.replace(
  STRICT, groups_per_microbatch=None, tokens_per_microbatch=50
)
HARD = overlap.rollout_pipe(2, 2, 1, frontier_groups=2, hard=True)
ONE_STEP = overlap.one_step_off(2, 1)
BOUNDED = overlap.bounded(2, 2, 1)
IN_FLIGHT = overlap.in_flight(2, 1, 1)
KEEP_KV = overlap.in_flight(2, 2, 1, on_publish="keep_kv")
DROP = dataclasses.replace(IN_FLIGHT, consume="drop")
RECYCLE = dataclasses.replace(IN_FLIGHT, consume="recycle")
IN_ORDER = dataclasses.replace(STRICT, consume="submit")
REDUNDANT = dataclasses.replace(
  IN_FLIGHT, redundancy=overlap.Redundancy(extra_members=1)
)
EXTRA = dataclasses.replace(
  STRICT, redundancy=overlap.Redundancy(extra_groups=1)
)
SCHEDULES = {
  "sync": SYNC,
  "sync, two updates": SYNC_TWO,
  "strict pipeline": STRICT,
  "rollout pipe": PIPE,
  "by tokens": TOKENS,
  "hard frontier": HARD,
  "one step off": ONE_STEP,
  "bounded": BOUNDED,
  "in flight": IN_FLIGHT,
  "keep kv": KEEP_KV,
  "drop": DROP,
  "recycle": RECYCLE,
  "submitted": IN_ORDER,
  "redundant members": REDUNDANT,
  "redundant groups": EXTRA,
}


class Run:
  """Writes the log of a run, one transition after another."""

  def __init__(self, schedule: overlap.Overlap, rounds: int):
    self.schedule = schedule
    self.rounds = rounds
    self.log: list[event_log.Event] = []
    self.version = 0
    self.next_group = 0
    self._began: dict[int, int] = {}
    self._end = 0.0

  @property
  def launched(self) -> range:
    return range(GROUP_SIZE + self.schedule.redundancy.extra_members)

  def emit(self, kind: str, **fields) -> None:
    self.log.append({"t": float(len(self.log)), "kind": kind, **fields})

  def member(self, kind: str, group: int, attempt: int, index: int, **fields):
    self.emit(kind, group=group, attempt=attempt, index=index, **fields)

  def begin(self, group: int, attempt: int = 0) -> None:
    """Submits an attempt; each member samples its first turn."""
    self._began[group] = self.version
    task = f"maze/{group}" + "'" * attempt
    where = {"group": group, "attempt": attempt, "version": self.version}
    self.emit("submitted", **where, source="maze", task=task)
    for index in self.launched:
      place = group, attempt, index
      self.member("admitted", *place, engine=0, version=self.version)
      self.member("first_token", *place, version=self.version)
      self.turn(*place, number=0)

  def turn(self, group: int, attempt: int, index: int, number: int) -> None:
    times = {"tokens": 5, "decode_s": 0.5, "queue_s": 0.0, "env_s": 0.1}
    self.member("turn", group, attempt, index, number=number, **times)

  def abort(
    self, group: int, attempt: int, indices: Sequence[int], reason: str
  ) -> None:
    counts = {"turns": 1, "tokens": 5, "length": 20}
    for index in indices:
      runs = [[self._began[group], 5]]
      where = {"group": group, "attempt": attempt, "index": index}
      self.emit("aborted", **where, reason=reason, **counts, versions=runs)

  def finish(self, group: int, attempt: int = 0) -> None:
    """Plays G members to their end and grades them: ready."""
    first = self._began[group]
    whole = self.schedule.on_publish == "drain" or first == self.version
    runs = [[first, 10]] if whole else [[first, 5], [self.version, 5]]
    counts = {"turns": 2, "tokens": 10, "length": 30}
    for index in range(GROUP_SIZE):
      place = group, attempt, index
      self.turn(*place, number=1)
      self.member("ended", *place, status="completed", **counts, versions=runs)
      self.member("grading", *place)
      self.member("reward", *place, value=1.0)
    where = {"group": group, "attempt": attempt, "version": self.version}
    self.emit("ready", **where, first_version=first)
    self.abort(group, attempt, self.launched[GROUP_SIZE:], "redundant")

  def drop(self, group: int, attempt: int, reason: str) -> None:
    """Aborts every member of an attempt: 5 tokens each."""
    self.abort(group, attempt, self.launched, reason)
    fields = {"version": self.version, "tokens": 5 * len(self.launched)}
    self.emit("dropped", group=group, attempt=attempt, reason=reason, **fields)

  def train(self, groups: Sequence[int], number: int = 0, attempt: int = 0):
    """One update, from the first group that it takes."""
    start = float(len(self.log))
    size = self.schedule.groups_per_batch
    before = number * self.schedule.groups_per_update
    for i, group in enumerate(groups, before):
      where = {"group": group, "attempt": attempt, "version": self.version}
      self.emit("dequeued", **where, microbatch=i // size, length=60)
    end = float(len(self.log))
    at = {"version": self.version, "number": number}
    self.emit("update", **at, start=start, end=end)
    for group in groups:
      where = {"group": group, "attempt": attempt, "version": self.version}
      began = {"first_version": self._began[group], "update": number}
      used = {"tokens": 10, "masked": 10, "members": [0, 1], "used": [0]}
      self.emit("trained", **where, **began, **used)

  def publish(self) -> None:
    self.version += 1
    at = {"version": self.version, "engine": 0}
    self.emit("publish_start", version=self.version)
    self.emit("staged", **at, moved_bytes=8, buckets=1)
    for step in event_log.OF_SWITCH:
      self.emit(step, **at)
    self.emit("published", version=self.version)

  def admit(self) -> None:
    """Lets in what the gate does."""
    window = self.version + self.schedule.max_staleness + 1
    limit = min(window, self.rounds) * self.schedule.groups_per_round
    while self.next_group < limit:
      self.begin(self.next_group)
      self.next_group += 1

  def round(self) -> None:
    """Plays, trains and publishes the groups of one round in order."""
    first = self.version * self.schedule.groups_per_round
    groups = range(first, first + self.schedule.groups_per_round)
    per_update = self.schedule.groups_per_update
    for group in groups:
      self.finish(group)
    for number in range(self.schedule.updates_per_round):
      start = number * per_update
      self.train(groups[start : start + per_update], number)
    self.publish()


def run(schedule: overlap.Overlap, rounds: int = 2) -> list[event_log.Event]:
  """Returns the log of a whole run."""
  writer = Run(schedule, rounds)
  for _ in range(rounds):
    writer.admit()
    writer.round()
  return writer.log


def place(
  log: Sequence[event_log.Event], kind: str, at: int = 0, **fields
) -> int:
  """Returns where the event number `at` of those with these fields is."""
  wanted = {"kind": kind, **fields}.items()
  places = [i for i, event in enumerate(log) if wanted <= event.items()]
  return places[at]


def change(log, kind, /, *, at=0, where=None, **fields):
  """Returns the log with other fields in one event."""
  i = place(log, kind, at, **(where or {}))
  return [*log[:i], log[i] | fields, *log[i + 1 :]]


def without(log, kind, at=0, **where):
  """Returns the log without one event."""
  i = place(log, kind, at, **where)
  return [*log[:i], *log[i + 1 :]]


def moved(log, kind, to, at=0, **where):
  """Returns the log with one event in the place `to`, and its time."""
  i = place(log, kind, at, **where)
  rest = [*log[:i], *log[i + 1 :]]
  rest.insert(to, log[i])
  return [
    event if event["kind"] == "first_token" else event | {"t": float(t)}
    for t, event in enumerate(rest)
  ]


def broken(log, schedule):
  return checker.violations(log, schedule, GROUP_SIZE)


def retried(schedule, reason, **submitted):
  """Group 0 is dropped once and trains in its second attempt."""
  run = Run(schedule, 1)
  run.begin(0)
  run.begin(1)
  run.drop(0, 0, reason)
  run.begin(0, attempt=1)
  run.log[place(run.log, "submitted", attempt=1)] |= submitted
  run.finish(1)
  run.finish(0, attempt=1)
  run.train([1])
  run.train([0], attempt=1)
  return run.log


def cancelled():
  """Of three groups the first two to be ready train; group 1 is cancelled."""
  run = Run(EXTRA, 2)
  for group in range(3):
    run.begin(group)
  run.finish(2)
  run.finish(0)
  run.drop(1, 0, "redundant")
  run.train([2, 0])
  run.publish()
  # Two of three count, so the second round may begin three more: 3, 4, 5.
  for group in (3, 4, 5):
    run.begin(group)
  return run.log


def sampled(log, where, *versions):
  """The log with one member's ten tokens sampled by these versions."""
  runs = [[version, 10 // len(versions)] for version in versions]
  return change(log, "ended", where=where, versions=runs)


def began(log, group, version):
  """The log with a group whose members began under another version."""
  for index in range(GROUP_SIZE):
    where = {"group": group, "index": index}
    log = sampled(log, where, version)
    log = change(log, "first_token", where=where, version=version)
  for kind in ("ready", "trained"):
    log = change(log, kind, where={"group": group}, first_version=version)
  return log
