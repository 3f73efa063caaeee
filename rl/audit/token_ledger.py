"""The token ledger: where every sampled token went, and what was chosen.

  sampled = trained + masked + dropped (by reason) + in flight

Columns are filled by different events: `ended` and `aborted` say what was
sampled, `trained` and `dropped` where it went. So an error other than 0 means
that tokens were lost or counted twice.
"""

import collections
import dataclasses
from collections.abc import Iterable, Mapping

from rl.audit import event_log, lifecycle

UNKNOWN = "unknown"
"""Source of what was restored without its history."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ledger:
  """Where sampled tokens went.

  Attributes:
    masked: of members of trained groups that are not trained.
    causes: of what is masked: "not finite" is a skipped update, "no advantage"
      a group that is flat or of one, "unknown" what was restored.
    dropped: by reason; "redundant" holds the redundant members of trained
      groups too.
    in_flight: of attempts that are neither trained nor dropped.
  """

  sampled: int = 0
  trained: int = 0
  masked: int = 0
  causes: Mapping[str, int] = dataclasses.field(default_factory=dict)
  dropped: Mapping[str, int] = dataclasses.field(default_factory=dict)
  in_flight: int = 0

  @property
  def error(self) -> int:
    """Tokens that are in no column; negative when some are in two."""
    booked = self.trained + self.masked + sum(self.dropped.values())
    return self.sampled - booked - self.in_flight

  def __add__(self, other: "Ledger") -> "Ledger":
    causes = collections.Counter(self.causes)
    causes.update(other.causes)
    dropped = collections.Counter(self.dropped)
    dropped.update(other.dropped)
    return Ledger(
      sampled=self.sampled + other.sampled,
      trained=self.trained + other.trained,
      masked=self.masked + other.masked,
      causes=dict(causes),
      dropped=dict(dropped),
      in_flight=self.in_flight + other.in_flight,
    )

  def __str__(self) -> str:
    dropped = sum(self.dropped.values())
    return (
      f"{self.sampled:,} tokens sampled = {self.trained:,} trained"
      f" + {self.masked:,} masked{_split(self.causes)}"
      f" + {dropped:,} dropped{_split(self.dropped)}"
      f" + {self.in_flight:,} in flight; error {self.error:,}"
    )


def _split(parts: Mapping[str, int]) -> str:
  """Returns " (3 of this, 4 of that)", or nothing."""
  told = ", ".join(f"{n:,} {why}" for why, n in parts.items() if n)
  return f" ({told})" if told else ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chosen:
  """Some episodes: how many, how long, from where.

  Attributes:
    length: ids in all of them.
    by_source: episodes of each source.
  """

  episodes: int = 0
  length: int = 0
  by_source: Mapping[str, int] = dataclasses.field(default_factory=dict)

  @property
  def mean_length(self) -> float:
    """Ids of an episode, context included; 0 without episodes."""
    return self.length / self.episodes if self.episodes else 0.0

  @property
  def shares(self) -> dict[str, float]:
    """Part of the episodes that each source has."""
    return {
      source: count / self.episodes
      for source, count in sorted(self.by_source.items())
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
  """How what is trained differs from what was launched.

  A schedule that prefers quick groups trains shorter episodes than it plays.
  Members that are masked, as those with a fault, are launched but not trained.
  Aborted episodes count with the length that they had, so `launched` is a
  lower bound.
  """

  launched: Chosen
  trained: Chosen

  @property
  def length_ratio(self) -> float:
    """Mean length of trained episodes by that of launched ones; 1 if none."""
    if not self.trained.episodes or not self.launched.length:
      return 1.0
    return self.trained.mean_length / self.launched.mean_length


def of_attempt(attempt: lifecycle.Attempt) -> Ledger:
  """Returns where the tokens of one attempt went so far."""
  sampled = attempt.sampled
  if attempt.dropped:
    tokens, reason = attempt.dropped["tokens"], attempt.dropped["reason"]
    return Ledger(sampled=sampled, dropped={reason: tokens})
  if not attempt.trained:
    return Ledger(sampled=sampled, in_flight=sampled)
  dropped: collections.Counter[str] = collections.Counter()
  in_flight, chosen = 0, set(attempt.trained["members"])
  for i, member in attempt.members.items():
    if i in chosen:
      continue
    if member.over:
      dropped[member.reason or "redundant"] += member.sampled
    else:
      in_flight += member.sampled
  return Ledger(
    sampled=sampled,
    trained=attempt.trained["tokens"],
    masked=attempt.trained["masked"],
    causes=_causes(attempt, attempt.trained),
    dropped=dict(dropped),
    in_flight=in_flight,
  )


def _causes(
  attempt: lifecycle.Attempt, trained: event_log.Event
) -> dict[str, int]:
  """Returns why members of a trained group are masked, in tokens."""
  if attempt.restored:
    return {"unknown": trained["masked"]}
  causes: collections.Counter[str] = collections.Counter()
  for i in set(trained["members"]) - set(attempt.used):
    member = attempt.members.get(i, lifecycle.Member())
    if member.outcome == "fault":
      cause = "faults"
    else:
      cause = "not finite" if trained.get("skipped") else "no advantage"
    causes[cause] += member.sampled
  return dict(causes)


class Books:
  """Keeps the ledger of a log, event by event, in flat memory.

  Call `feed` with every event; it may be a listener of the log.
  """

  def __init__(self):
    # It waits for no member that never began: that has no tokens.
    self._attempts = lifecycle.Attempts(0, self._settle)
    self._of: dict[str, Ledger] = {}
    self._launched = _Tally()
    self._trained = _Tally()

  def feed(self, event: event_log.Event) -> None:
    """Books one event."""
    misplaced = self._attempts.feed(event)
    if misplaced and misplaced.ignored and event["kind"] in _MOVES:
      self._add(UNKNOWN, _stray(event))

  def by_source(self) -> dict[str, Ledger]:
    """Returns the ledger of each source of tasks."""
    books = dict(self._of)
    for attempt in self._attempts.under_way:
      source = attempt.source or UNKNOWN
      books[source] = books.get(source, Ledger()) + of_attempt(attempt)
    return books

  def ledger(self) -> Ledger:
    """Returns the ledger of all tokens so far."""
    return sum(self.by_source().values(), Ledger())

  def selection(self) -> Selection:
    """Returns what was trained beside what was launched, as far as over."""
    return Selection(
      launched=self._launched.chosen(), trained=self._trained.chosen()
    )

  def _add(self, source: str, ledger: Ledger) -> None:
    self._of[source] = self._of.get(source, Ledger()) + ledger

  def _settle(self, attempt: lifecycle.Attempt) -> None:
    source = attempt.source or UNKNOWN
    self._add(source, of_attempt(attempt))
    for i, member in attempt.members.items():
      self._launched.add(source, member.length)
      if i in attempt.used:
        self._trained.add(source, member.length)


class _Tally:
  """Counts episodes and their ids."""

  def __init__(self):
    self._length = 0
    self._by_source: collections.Counter[str] = collections.Counter()

  def add(self, source: str, length: int) -> None:
    self._length += length
    self._by_source[source] += 1

  def chosen(self) -> Chosen:
    return Chosen(
      episodes=self._by_source.total(),
      length=self._length,
      by_source=dict(self._by_source),
    )


_MOVES = ("ended", "aborted", "dropped", "trained")


def _stray(event: event_log.Event) -> Ledger:
  """Returns what an event out of its place adds to one side only."""
  if event["kind"] == "dropped":
    return Ledger(dropped={event["reason"]: event["tokens"]})
  if event["kind"] == "trained":
    causes = {"unknown": event["masked"]}
    return Ledger(
      trained=event["tokens"], masked=event["masked"], causes=causes
    )
  return Ledger(sampled=event["tokens"])


def books(log: Iterable[event_log.Event]) -> Books:
  """Returns the books of a whole log; see `event_log.surviving`."""
  kept = Books()
  for event in log:
    kept.feed(event)
  return kept


def of(log: Iterable[event_log.Event]) -> Ledger:
  """Returns the ledger of a whole log."""
  return books(log).ledger()


def selection(log: Iterable[event_log.Event]) -> Selection:
  """Returns what a log trained beside what it launched."""
  return books(log).selection()
