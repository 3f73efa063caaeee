"""The event log: every transition of a run, and what a restart leaves of it.

Kinds of events and their fields, all with `t` seconds since the log began:
  submitted    group, attempt, version, source, task      the gate let it in;
               `replayed` when it was in flight before a restart
  admitted     group, attempt, index, engine, version     a member has an engine
  continued    group, attempt, index, turns, tokens, first_version, versions
               it goes on after these turns of before a restart, which has
               their events; `first_version` counts what it has of an answer
  begun_anew   group, attempt, index, tokens, reason      it does not; so many
               tokens of before the restart are lost
  first_token  group, attempt, index, version             t: when it was sampled
  turn         group, attempt, index, number, tokens, decode_s, queue_s, env_s
  ended        group, attempt, index, status, turns, tokens, length, versions
  aborted      group, attempt, index, reason, turns, tokens, length, versions
  grading      group, attempt, index                      its reward was called
  reward       group, attempt, index, value
  fault        group, attempt, index, status, what
  ready        group, attempt, version, first_version     G members are graded
  dropped      group, attempt, reason, version, tokens    it is not trained
  dequeued     group, attempt, version, microbatch, length  the learner took it
  trained      group, attempt, version, first_version, update, tokens, masked,
               members, used                              an update holds it
  update       version, number, start, end                an optimizer step
  publish_start  version                  the learner begins to send it
  staged         version, engine, moved_bytes, buckets   it lies at the engine,
                 beside the weights that are served
  decode_suspended  version, engine       decoding stops for the switch
  switched       version, engine          the engine serves it
  decode_resumed  version, engine         without a switch, if that failed
  published      version                  every engine serves it; `restarted`
                 when a restart serves it from its start
  publishing_held  version, reason        later weights are not published
  publishing_resumed  version             all of them are, the newest
  engine_pool    engine, pool, hardware   where sources have a preference,
  preference     source, wanted           "" for those that none names
  engine_lost    engine, reason
  engine_restarting  engine, attempt, wait_s, reason     begins after so long
  engine_back    engine, version; `restarted` when the run was
  engine_given_up  engine, attempts, reason               it stays lost
  engine_joined  engine, version          one more, which was started elsewhere
  engine_leaving  engine                  no new session while another serves
  engine_left    engine                   for good; `restarted` of it and of
                 engine_joined: when the run was, with its own engines alone
  moved          session, engine          its engine was lost
  fallback       session, wanted, engine  served by hardware of another kind;
                 right before its session is admitted or moved
  prefill_missed  session, engine, reason  that engine should have encoded a
                 request, and its own does
  source_too_slow  group, attempt, source, task, attempts  too old, too often
  resumed        trained, next_group, engines            a restart goes on after
               so many rounds, with so many engines of its own
  restored       group, attempt, tokens, first_version    ready before a restart

A group is a place in the order of submission, and attempts at it follow one
another. `version` is the newest that every engine serves or, of what the
learner's events, the number of rounds trained before. `tokens` were sampled,
`length` counts all ids. `versions` are run lengths, [[version, tokens], ...],
in the order of sampling; `members` the indices that make up the group, `used`
the trained ones: they have `tokens`, the others `masked`, and of these `cut`
names those that a limit cut and `mask_truncated` leaves out. An update that was
not finite is `skipped`: none of its members is trained. `microbatch` counts
those of a round, and the `length` of a group is that of members without fault.
"""

import collections
import contextlib
import json
import math
import pathlib
import re
import time
from collections.abc import (
  Callable,
  Collection,
  Iterable,
  Iterator,
  Mapping,
  Sequence,
)
from typing import Any

from rl.audit import snapshot
from rl.runtime import line_file, segments

Event = dict[str, Any]
Runs = Sequence[Sequence[int]]
"""Run lengths [version, tokens] of sampled tokens, in order."""

OF_MEMBER = frozenset(
  {
    "admitted",
    "continued",
    "begun_anew",
    "first_token",
    "turn",
    "ended",
    "aborted",
    "grading",
    "reward",
    "fault",
  }
)
OF_ATTEMPT = OF_MEMBER | {
  "submitted",
  "ready",
  "dropped",
  "dequeued",
  "trained",
  "restored",
}
OF_SWITCH = ("decode_suspended", "switched", "decode_resumed")
OF_PUBLISH = ("publish_start", "staged", *OF_SWITCH, "published")

KINDS = OF_ATTEMPT | {
  "update",
  "publishing_held",
  "publishing_resumed",
  *OF_PUBLISH,
  "engine_pool",
  "preference",
  "engine_lost",
  "engine_restarting",
  "engine_back",
  "engine_given_up",
  "engine_joined",
  "engine_leaving",
  "engine_left",
  "moved",
  "fallback",
  "prefill_missed",
  "source_too_slow",
  "resumed",
}

# An attempt begins with one of these, also once more after a restart.
_NOTED = (OF_ATTEMPT - OF_MEMBER) | {"resumed"}

_OF_LEARNER = (
  "dequeued",
  "trained",
  "update",
  "publishing_held",
  "publishing_resumed",
)
_OF_DROP = ("dropped", "source_too_slow")
_BACK = ("engine_back", "engine_joined")

# At 4 us each a flush keeps the event loop for no longer than 4 ms.
_FLUSH_EVERY = 1000
# Without an engine a round may not end, and who reads the log wants to know.
_FLUSHED_AT_ONCE = frozenset({"engine_lost", "engine_given_up"})
_MOST_CUT = 1000
_parse = json.JSONDecoder().raw_decode
# Events are never circular, so the encoder need not look for circles.
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


class EventLog:
  """Records events and appends them, buffered, to JSON lines on disk.

  All methods belong to one event loop. Its owner calls `flush` once a round;
  a long round is flushed on the way, so memory stays flat, and so is the loss
  of an engine.

  Args:
    path: appended to, so a resumed run keeps its history, and its times go on
      after the last of them; None: memory only.
    clock: of the event loop, in seconds.
    left_out: kinds that only listeners get.
    segment_bytes: of the file on disk, from which on it is compressed; see
      `segments`.

  Attributes:
    events: of this process; with a path only those since the last flush.
    listeners: called with each event when it is emitted.
    file: on disk; None without a path.
  """

  def __init__(
    self,
    path: pathlib.Path | None = None,
    clock: Callable[[], float] = time.monotonic,
    left_out: Collection[str] = (),
    segment_bytes: int = segments.MAX_BYTES,
  ):
    self.events: list[Event] = []
    self.listeners: list[Callable[[Event], None]] = []
    self._clock = clock
    self._left_out = left_out
    self._origin = clock() - (_last_time(path) if path else 0.0)
    self.file: line_file.LineFile | None = (
      segments.SegmentedFile(path, segment_bytes) if path else None
    )

  def emit(self, kind: str, *, t: float | None = None, **fields: Any) -> None:
    """Records one event.

    Args:
      t: when it happened, as `since` returns it; now by default.
    """
    if t is None:
      t = self.since(self._clock())
    event = {"t": t, "kind": kind, **fields}
    if kind not in self._left_out:
      self.events.append(event)
    for listener in self.listeners:
      listener(event)
    if self.file is None or (
      len(self.events) < _FLUSH_EVERY and kind not in _FLUSHED_AT_ONCE
    ):
      return
    if self.file.try_append(map(_encode, self.events)):
      self.events.clear()

  def since(self, reading: float) -> float:
    """Returns a reading of the clock as seconds since the log began, to 1 us.

    Every time in the log goes through here, so that they can be compared.
    """
    return round(reading - self._origin, 6)

  def flush(self) -> None:
    """Writes the events since the last flush, and forgets them."""
    if self.file is not None:
      self.file.append(map(_encode, self.events))
      self.events.clear()


class LogFile:
  """The events of a log on disk, read anew by each iteration.

  Memory is that of one line. An iteration raises `segments.Damaged` where a
  part of the log is missing.

  Args:
    first, last: numbers of the segments to begin and to end with, as in
      `segments.lines`.

  Attributes:
    num_cut: lines that the last iteration left out because they are not JSON,
      as a crash leaves the last one.
    num_garbled: those of them that no crash has cut, because the log goes on
      after them without a restart.
  """

  def __init__(
    self, path: pathlib.Path, first: int = 1, last: int | None = None
  ):
    self._path, self._first, self._last = path, first, last
    self.num_cut = self.num_garbled = 0

  def __iter__(self) -> Iterator[Event]:
    self.num_cut = self.num_garbled = 0
    waiting = 0
    for line in self._lines():
      event = _event(line)
      if event is None:
        waiting += bool(line.strip())
        self.num_cut += bool(line.strip())
        continue
      self.num_garbled += waiting * (event["kind"] != "resumed")
      waiting = 0
      yield event

  def only(self, kinds: Collection[str]) -> Iterator[Event]:
    """Yields the events of some kinds, and parses hardly any others."""
    named = re.compile(f'"(?:{"|".join(kinds)})"').search
    for line in self._lines():
      if named(line) and (event := _event(line)) and event["kind"] in kinds:
        yield event

  def _lines(self) -> Iterator[str]:
    return segments.lines(self._path, first=self._first, last=self._last)


def _event(line: str) -> Event | None:
  """Returns the event of a line; None if it is cut short, or no event."""
  text = line.strip()
  try:
    # json.loads takes twice as long around the same parser.
    event, end = _parse(text)
    is_event = (
      end == len(text) and isinstance(event["kind"], str) and event["t"] >= 0
    )
  except (ValueError, TypeError, LookupError, RecursionError):
    return None
  return event if is_event else None


def _last_time(path: pathlib.Path) -> float:
  """Returns the time at which a log ends, 0 when it is empty.

  A first token is logged later than it was sampled, so its `t` is ignored.
  """
  # Several, as a crash may have cut the last one. The file is empty where a
  # kill came right after a segment was closed.
  newest: collections.deque[str] = collections.deque(maxlen=_MOST_CUT)
  with contextlib.suppress(segments.Damaged, FileNotFoundError):
    for line in segments.lines(path, newest=1):
      if '"first_token"' not in line:
        newest.append(line)
  found = (event for line in reversed(newest) if (event := _event(line)))
  return float(next(found, {"t": 0.0})["t"])


def member(event: Event) -> tuple[int, int, int]:
  """Returns the (group, attempt, index) of a member's event."""
  return event["group"], event["attempt"], event["index"]


def of_kind(events: Iterable[Event], kind: str) -> Iterator[Event]:
  """Yields the events of one kind."""
  return (event for event in events if event["kind"] == kind)


def staleness(events: Iterable[Event]) -> list[int]:
  """Returns T - F of every trained group."""
  return [e["version"] - e["first_version"] for e in of_kind(events, "trained")]


class _Stretch:
  """The groups and (group, attempt)s of a log between two restarts.

  Attributes:
    rounds: trained when it began.
    begun: first attempt at each group.
    trained: version and attempt at which a group was trained.
    dropped: version at which an attempt was; None unless its group was
      cancelled with it.
  """

  def __init__(self, rounds: int = 0):
    self.rounds = rounds
    self.begun: dict[int, int] = {}
    self.ready: set[tuple[int, int]] = set()
    self.restored: set[tuple[int, int]] = set()
    self.trained: dict[int, tuple[int, int]] = {}
    self.dropped: dict[tuple[int, int], int | None] = {}

  def note(self, event: Event) -> None:
    kind = event["kind"]
    if kind not in _NOTED:
      return
    group, attempt = event["group"], event["attempt"]
    self.begun.setdefault(group, attempt)
    if kind == "ready":
      self.ready.add((group, attempt))
    elif kind == "restored":
      self.restored.add((group, attempt))
    elif kind == "trained":
      self.trained[group] = event["version"], attempt
    elif kind == "dropped":
      cancelled = event["reason"] == "redundant"
      self.dropped[group, attempt] = event["version"] if cancelled else None

  @property
  def is_empty(self) -> bool:
    """True when it knows of no group."""
    return not (self.begun or self.restored or self.trained or self.dropped)

  def forget_but(self, groups: Collection[int]) -> None:
    """Forgets all groups but some."""
    for each in (self.begun, self.trained):
      for group in each.keys() - groups:
        del each[group]
    for places in (self.ready, self.restored):
      places -= {place for place in places if place[0] not in groups}
    for place in [place for place in self.dropped if place[0] not in groups]:
      del self.dropped[place]


class _Engines:
  """The engines of a run that a restart changes.

  Attributes:
    lost: they come back.
    guests: that have joined; they are gone.
    leaving: of the run itself, to leave or gone; they serve again.
  """

  def __init__(self):
    self.lost: set[int] = set()
    self.guests: set[int] = set()
    self.leaving: set[int] = set()

  def note(self, event: Event) -> None:
    engine = event.get("engine", -1)
    match event["kind"]:
      case "engine_lost":
        self.lost.add(engine)
        self.leaving.discard(engine)
      case "engine_back":
        self.lost.discard(engine)
      case "engine_joined":
        self.guests.add(engine)
      case "engine_left" if engine in self.guests:
        self.guests.discard(engine)
        self.lost.discard(engine)
      case "engine_leaving" | "engine_left" if engine not in self.guests:
        self.leaving.add(engine)

  def restart(self) -> Iterator[Event]:
    """Yields the changes of a restart, without their times."""
    self.lost -= self.guests
    for kind, engines in (
      ("engine_left", self.guests),
      ("engine_back", self.lost),
      ("engine_joined", self.leaving),
    ):
      for engine in sorted(engines):
        yield {"kind": kind, "engine": engine, "restarted": True}
      engines.clear()


class Survivors:
  """Tells the events of a log that later restarts do not supersede.

  Call `note` with every event of the log, and then `take` with each again. One
  may be noted right before it is taken where no restart comes after it.

  Attributes:
    floor: rounds from which on a restart may go on: one that goes further back
      would supersede events that are no longer there.
    too_far_back: rounds from which one went on nevertheless.
  """

  def __init__(self):
    self.floor = 0
    self.too_far_back: list[int] = []
    self._num_known = 0  # Restarts before the floor was set.
    self._stretches = [_Stretch()]
    self._number = self._begun = self._served = 0
    self._is_held = False
    self._engines = _Engines()

  def note(self, event: Event) -> None:
    """Takes a few numbers of an event."""
    if event["kind"] == "resumed":
      self._stretches.append(_Stretch(event["trained"]))
      self._num_known -= 1
      if self._num_known < 0 and event["trained"] < self.floor:
        self.too_far_back.append(event["trained"])
    else:
      self._stretches[-1].note(event)

  def take(self, event: Event) -> Iterator[Event]:
    """Yields what stands for an event as if there had been no restart."""
    kind = event["kind"]
    if kind == "resumed":
      yield from self._restart(event)
    elif _stays(self._stretches, self._number, event):
      if kind in _BACK:  # With weights that are trained once more.
        floor = _floor(self._stretches[self._number + 1 :])
        event = event | {"version": min(event["version"], floor)}
      match kind:
        case "publish_start":
          self._begun = event["version"]
        case "published":
          self._served = event["version"]
        case "publishing_held" | "publishing_resumed":
          self._is_held = kind == "publishing_held"
      self._engines.note(event)
      yield event

  def _restart(self, event: Event) -> Iterator[Event]:
    self._number += 1
    version = min(one.rounds for one in self._stretches[self._number :])
    at = {"t": event["t"], "version": version}
    if self._is_held:
      self._is_held = False
      yield {**at, "kind": "publishing_resumed", "version": version - 1}
    if self._served < version == event["trained"]:
      # Cut off or held back before it was published, and served from the start.
      for each in range(self._served + 1, version + 1):
        if self._begun < each:
          yield {**at, "kind": "publish_start", "version": each}
        yield {**at, "kind": "published", "version": each, "restarted": True}
      self._begun = self._served = version
    yield from (at | one for one in self._engines.restart())
    if "engines" in event:  # Logs of before have no such field.
      yield event | {"trained": version}

  def to_host(self, groups: Collection[int], floor: int) -> dict[str, Any]:
    """Returns its state as JSON data; `Survivors` of it take the rest.

    What was noted and not taken has to be noted again.

    Args:
      groups: of which more may come; the others are forgotten.
      floor: see the attribute.
    """
    num_known = len(self._stretches) - 1 - self._number
    del self._stretches[self._number + 1 :]
    for stretch in self._stretches:
      stretch.forget_but(groups)
    while self._number and self._stretches[0].is_empty:
      del self._stretches[0]
      self._number -= 1
    return {
      "floor": floor,
      "num_known": num_known,
      "stretches": [snapshot.of(stretch) for stretch in self._stretches],
      "begun": self._begun,
      "served": self._served,
      "is_held": self._is_held,
      "engines": snapshot.of(self._engines),
    }

  def restore(self, state: Mapping[str, Any]) -> None:
    """Goes on from a state; see `snapshot.restore` for errors."""
    self._stretches = []
    for data in state["stretches"]:
      self._stretches.append(_Stretch())
      snapshot.restore(self._stretches[-1], data)
    self._number = len(self._stretches) - 1
    self.floor, self._num_known = state["floor"], state["num_known"]
    self._begun, self._served = state["begun"], state["served"]
    self._is_held = state["is_held"]
    snapshot.restore(self._engines, state["engines"])


def surviving(
  log: Iterable[Event], survivors: Survivors | None = None
) -> Iterator[Event]:
  """Yields the log as if its run had never been interrupted.

  A resume after N rounds supersedes older events, except those of groups that
  were trained in these rounds: the others are played, trained and published
  again. The restart stays, as its engines may be others, and two kinds stay
  beside what it supersedes: the play of a group that was finished and
  saved, in the place of the event that restores it, and attempts that were
  dropped for good.

  Args:
    log: is iterated over several times. With a resume a few numbers for each
      group are kept in memory, without one nothing.
    survivors: of the part of the log before this one; None: it is whole.
  """
  if not _is_resumed(log):
    yield from log
    return
  survivors = survivors or Survivors()
  for event in _only(log, _NOTED):
    survivors.note(event)
  for event in log:
    yield from survivors.take(event)


def _is_resumed(log: Iterable[Event]) -> bool:
  return any(event["kind"] == "resumed" for event in _only(log, ("resumed",)))


def _only(log: Iterable[Event], kinds: Collection[str]) -> Iterable[Event]:
  """Returns the events of some kinds; others, too, if they are in memory."""
  return log.only(kinds) if isinstance(log, LogFile) else log


def _stays(stretches: Sequence[_Stretch], number: int, event: Event) -> bool:
  """True when an event of a stretch survives every later restart."""
  kind = event["kind"]
  if number + 1 == len(stretches) and kind != "restored":
    return True  # There is none: most events come after the last restart.
  later = stretches[number + 1 :]
  floor = _floor(later)
  if kind in OF_PUBLISH:
    return event["version"] <= floor
  if kind in _OF_LEARNER:
    return event["version"] < floor
  if kind not in OF_ATTEMPT and kind != "source_too_slow":
    return True
  place = event["group"], event["attempt"]
  if kind in _OF_DROP and any(place in stretch.restored for stretch in later):
    # Dropped after the checkpoint that held it, so the restored one never was.
    return False
  if kind != "restored":
    return _play_stays(stretches, number, place)
  played = any(
    place in stretches[i].ready
    and _play_stays(stretches[: number + 1], i, place)
    for i in range(number)
  )
  return not played and all(
    _is_trained(stretches[number : i + 1], place)
    for i in range(number + 1, len(stretches))
  )


def _floor(later: Sequence[_Stretch]) -> float:
  """Returns the rounds that all of these go on from."""
  return min((stretch.rounds for stretch in later), default=math.inf)


def _play_stays(
  stretches: Sequence[_Stretch], number: int, place: tuple[int, int]
) -> bool:
  """True when the play of a stretch counts after every later one."""
  return all(
    _is_trained(stretches[number : i + 1], place)
    or _is_kept(stretches[number : i + 1], place)
    for i in range(number + 1, len(stretches))
  )


def _is_trained(stretches: Sequence[_Stretch], place: tuple[int, int]) -> bool:
  """True when a group is trained before the last of these stretches begins.

  Either this attempt was trained, or a later one.
  """
  group, attempt = place
  for i, stretch in enumerate(stretches[:-1]):
    version, last = stretch.trained.get(group, (math.inf, attempt))
    floor = min(later.rounds for later in stretches[i + 1 :])
    if version < floor and attempt <= last:
      return True
  return False


def _is_kept(stretches: Sequence[_Stretch], place: tuple[int, int]) -> bool:
  """True when the last of these stretches goes on after an attempt."""
  group, attempt = place
  *before, last = stretches
  if place in last.restored:
    return any(place in stretch.ready for stretch in before)
  for stretch in before:
    if place in stretch.dropped:
      cancelled = stretch.dropped[place]
      if cancelled is not None:
        return cancelled < last.rounds
      return attempt < last.begun.get(group, math.inf)
  return False
