"""The life of a group: its transitions in order, followed event by event.

  member:   admitted -> first_token -> turn* -> ended -> grading -> reward
            (until it has ended: -> aborted)           (or -> fault)
            (after a restart continued stands for the events before it)
  attempt:  submitted -> ready -> dequeued -> trained
            (until it is dequeued: -> dropped)

Members play at the same time. An attempt is forgotten when it was trained or
dropped and all that was launched for it is over, so memory is that of the
groups in flight, however long the log.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from rl.audit import event_log, snapshot
from rl.data import trajectory

# Publishes that a cancelled member has to end in.
_PATIENCE = 2
_GIVEN = ("_launched", "on_close")
_FAULTS = frozenset(s.value for s in trajectory.Status if not s.trainable)


@dataclasses.dataclass(slots=True)
class MemberRecord:
  """One episode of an attempt.

  Attributes:
    number: of its last turn.
    turn_tokens: sampled in whole turns.
    tokens, length, versions, turns: as in its end event.
    reason: of an abort.
    over: the kind of its end event; "" while it plays.
    status: at its end.
  """

  admitted_t: float | None = None
  first_t: float | None = None
  first_version: int | None = None
  number: int | None = None
  num_turns: int = 0
  turn_tokens: int = 0
  over: Literal["", "ended", "aborted"] = ""
  reason: str = ""
  status: str = ""
  turns: int = 0
  tokens: int = 0
  length: int = 0
  versions: event_log.Runs = ()
  grading: bool = False
  outcome: Literal["", "reward", "fault"] = ""

  @property
  def sampled(self) -> int:
    """Tokens that it sampled, as far as logged."""
    return self.tokens if self.over else self.turn_tokens

  @property
  def fault(self) -> str:
    """The reason not to train it; "" if there is none."""
    if self.outcome == "fault":
      return "has a fault"
    if self.over == "aborted":
      return "was aborted"
    return f"ended with {self.status}" if self.status in _FAULTS else ""


_NOBODY = MemberRecord()
"""A member before its first event; never changed."""


@dataclasses.dataclass(slots=True)
class AttemptRecord:
  """One attempt at a group.

  Attributes:
    launched: members played of each group.
    begun_at: version served when it was submitted, or restored.
    ended_at: version served when a member last ended.
    open_at: newest version served while it was neither trained nor dropped.
    replayed: from its beginning, after a restart.
    graded: members that were graded when it was ready.
    ready, dequeued, trained, dropped, restored: the events, once they came.
    overdue: members still played long after it was over.
  """

  group: int
  number: int
  launched: int
  begun_at: int = 0
  ended_at: int = 0
  open_at: int = 0
  source: str = ""
  replayed: bool = False
  members: dict[int, MemberRecord] = dataclasses.field(default_factory=dict)
  graded: frozenset[int] = frozenset()
  ready: event_log.Event | None = None
  dequeued: event_log.Event | None = None
  trained: event_log.Event | None = None
  dropped: event_log.Event | None = None
  restored: event_log.Event | None = None
  overdue: bool = False
  over_at: int = 0

  def __str__(self) -> str:
    return name(self.group, self.number)

  @property
  def open(self) -> list[int]:
    """Members that are still playing."""
    return [i for i, member in self.members.items() if not member.over]

  @property
  def complete(self) -> bool:
    """True when no more can come of it."""
    if self.open:
      return False
    whole = self.restored or len(self.members) >= self.launched
    return bool(self.dropped or (self.trained and whole))

  @property
  def sampled(self) -> int:
    """Tokens that its members sampled, as far as logged."""
    if self.restored:
      return self.restored["tokens"]
    return sum(member.sampled for member in self.members.values())

  @property
  def chosen(self) -> int:
    """Tokens of the members that make up the group that was trained."""
    if self.restored or not self.trained:
      return self.sampled
    return self.sampled_by(self.trained["members"])

  @property
  def used(self) -> list[int]:
    """Trained members; a masked one only makes up the group."""
    if not self.trained:
      return []
    # A log without the field trains all of them.
    return self.trained.get("used", self.trained["members"])

  def sampled_by(self, members: Sequence[int]) -> int:
    """Returns the tokens that some members sampled, as far as logged."""
    return sum(m.sampled for i, m in self.members.items() if i in members)


def name(group: int, attempt: int) -> str:
  """Returns "group 3", or "group 3 attempt 1" of a later one."""
  return f"group {group}" + (f" attempt {attempt}" if attempt else "")


def name_of(event: event_log.Event) -> str:
  """Returns `name` of an event, with " member 2" if it has one."""
  member = f" member {event['index']}" if "index" in event else ""
  return name(event["group"], event["attempt"]) + member


def late(attempt: AttemptRecord, event: event_log.Event) -> str:
  """Returns why an event is late or a repetition; "" when it is neither."""
  kind = event["kind"]
  if attempt.dropped and kind not in _ENDS:
    return "after it was dropped"
  if kind in event_log.OF_MEMBER:
    return _late_of_member(attempt.members.get(event["index"], _NOBODY), kind)
  match kind:
    case "ready" if not (attempt.ready or attempt.restored):
      return ""
    case "dropped":
      return "after it was dequeued" if attempt.dequeued else ""
    case "dequeued" if not attempt.dequeued:
      return ""
    case "trained" if not attempt.trained:
      return ""
  return "again"


def _late_of_member(member: MemberRecord, kind: str) -> str:
  if member.over and kind not in _OF_GRADING:
    return "after it had " + _WORDS[member.over]
  match kind:  # Most are turns.
    case "turn":
      return ""
    case "admitted" if member.admitted_t is not None:
      return "again"
    case "continued" if member.num_turns or member.first_t is not None:
      return "after other tokens"
    case "first_token" if member.first_t is not None or member.num_turns:
      return "after other tokens"
    case "grading" if member.grading:
      return "again"
    case "reward" | "fault" if member.outcome:
      return f"after its {member.outcome}"
  return ""


def early(attempt: AttemptRecord, event: event_log.Event) -> str:
  """Returns which event is missing before one; "" when none is."""
  kind = event["kind"]
  if kind in event_log.OF_MEMBER:
    return _early_of_member(attempt.members.get(event["index"], _NOBODY), event)
  match kind:
    case "dequeued" if not (attempt.ready or attempt.restored):
      return "before it was ready"
    case "trained" if not attempt.dequeued:
      return "before it was dequeued"
  return ""


def _early_of_member(member: MemberRecord, event: event_log.Event) -> str:
  match event["kind"]:  # Most are turns.
    case "turn":
      if member.first_t is None and event["tokens"]:
        return "before its first token"
      if member.number is None and event["number"]:
        return f"number {event['number']} is its first"
      if member.number is not None and event["number"] != member.number + 1:
        return f"number {event['number']} after number {member.number}"
      return _before_first(member, event)
    case "first_token":
      if member.admitted_t is None or event["t"] < member.admitted_t:
        return "before it was admitted"
    case "ended" | "aborted":
      if event["tokens"] and member.admitted_t is None:
        return "with tokens but before it was admitted"
      return _before_first(member, event)
    case "grading" if member.over != "ended":
      return "before it had ended"
    case "reward" if not member.grading:
      return "before it was graded"
    case "fault" if not member.over:
      return "before it had ended"
  return ""


def _before_first(member: MemberRecord, event: event_log.Event) -> str:
  if member.first_t is not None and event["t"] < member.first_t:
    return "before its first token was sampled"
  return ""


_ENDS = ("ended", "aborted")
_OF_GRADING = ("grading", "reward", "fault")
_WORDS = {"ended": "ended", "aborted": "been aborted"}


class Misplaced(NamedTuple):
  """A violation of the order of transitions.

  Attributes:
    ignored: the event came too late or again, and changes nothing.
  """

  violation: str
  ignored: bool


class Lifecycle:
  """The attempts of a log that are under way, followed event by event.

  Args:
    launched: members of a group that are played, redundant ones included.

  Attributes:
    on_close: each of them is given each attempt that is over.
  """

  def __init__(self, launched: int, *on_close: Callable[[AttemptRecord], None]):
    self._launched = launched
    self.on_close = list(on_close)
    self._open: dict[tuple[int, int], AttemptRecord] = {}
    self._over: set[tuple[int, int]] = set()
    self._published = 0
    self._version = 0

  @property
  def under_way(self) -> list[AttemptRecord]:
    """Attempts of which more may come."""
    return list(self._open.values())

  def to_host(self) -> dict[str, Any]:
    """Returns its state as JSON data."""
    return snapshot.of(self, _GIVEN)

  def restore(self, state: Mapping[str, Any]) -> None:
    """Goes on from a state; see `snapshot.restore` for errors."""
    records = AttemptRecord, MemberRecord
    snapshot.restore(self, state, *records, without=_GIVEN)

  def observe(self, event: event_log.Event) -> Misplaced | None:
    """Applies an event; returns it as misplaced when it breaks the order."""
    kind = event["kind"]
    if kind == "published":
      self._publish(event["version"])
    if kind not in event_log.OF_ATTEMPT:
      return None
    place = event["group"], event["attempt"]
    attempt = self._open.get(place)
    if attempt is None:
      return self._begin(place, event)
    if wrong := late(attempt, event):
      return Misplaced(f"{name_of(event)}: {kind} {wrong}", ignored=True)
    wrong = early(attempt, event)
    _apply(attempt, event)
    if kind in _ENDS:
      attempt.ended_at = self._version
    if attempt.trained or attempt.dropped:
      self._close(place, attempt)
    if wrong:
      return Misplaced(f"{name_of(event)}: {kind} {wrong}", ignored=False)
    return None

  def _begin(
    self, place: tuple[int, int], event: event_log.Event
  ) -> Misplaced | None:
    kind = event["kind"]
    if kind not in ("submitted", "restored"):
      # A member without an engine when its attempt was dropped has no tokens.
      if kind == "aborted" and not event["tokens"]:
        return None
      violation = f"{name(*place)}: {kind}, but it is not under way"
      return Misplaced(violation, ignored=True)
    now = event.get("version", self._version)
    self._open[place] = attempt = AttemptRecord(
      *place, self._launched, begun_at=now, open_at=now
    )
    if kind == "submitted":
      attempt.source = event["source"]
      attempt.replayed = event.get("replayed", False)
    else:
      attempt.restored = event
    return None

  def _close(self, place: tuple[int, int], attempt: AttemptRecord) -> None:
    """Closes an attempt once no more can come of it."""
    if not attempt.complete:
      if place not in self._over:
        attempt.over_at = self._published
        self._over.add(place)
      return
    self._forget(place)

  def _forget(self, place: tuple[int, int]) -> None:
    self._over.discard(place)
    attempt = self._open.pop(place)
    for handle in self.on_close:
      handle(attempt)

  def _publish(self, version: int) -> None:
    self._version = version
    self._published += 1
    for place in list(self._over):
      attempt = self._open[place]
      if self._published - attempt.over_at >= _PATIENCE:
        attempt.overdue = True
        self._forget(place)
    for attempt in self._open.values():
      if not (attempt.trained or attempt.dropped):
        attempt.open_at = version


def _apply(attempt: AttemptRecord, event: event_log.Event) -> None:
  kind = event["kind"]
  if kind not in event_log.OF_MEMBER:
    setattr(attempt, kind, event)
    if kind == "ready":
      attempt.graded = frozenset(
        i for i, m in attempt.members.items() if m.over == "ended" and m.outcome
      )
    return
  member = attempt.members.get(event["index"])
  if member is None:
    member = attempt.members[event["index"]] = MemberRecord()
  match kind:  # Most are turns.
    case "turn":
      member.number = event["number"]
      member.num_turns += 1
      member.turn_tokens += event["tokens"]
    case "admitted":
      member.admitted_t = event["t"]
    case "continued":
      member.first_version = event["first_version"]
      if member.first_version is not None:
        member.first_t = event["t"]
      if member.admitted_t is None:  # It was over.
        member.admitted_t = event["t"]
      if event["turns"]:
        member.number = event["turns"] - 1
      member.num_turns, member.turn_tokens = event["turns"], event["tokens"]
    case "first_token":
      member.first_t, member.first_version = event["t"], event["version"]
    case "ended" | "aborted":
      member.over = kind
      member.reason = event.get("reason", "")
      member.status = event.get("status", "")
      for field in ("turns", "tokens", "length", "versions"):
        setattr(member, field, event[field])
    case "grading":
      member.grading = True
    case "reward" | "fault":
      member.outcome = kind
