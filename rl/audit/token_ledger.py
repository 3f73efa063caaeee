"""The token ledger: the fate of every sampled token, and selection bias.

  sampled = trained + masked + dropped (by reason) + in flight

Different events fill the columns: `ended` and `aborted` count sampled tokens,
`trained` and `dropped` say where they went. So an error other than 0 means that
tokens were lost or counted twice.
"""

import collections
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from rl.audit import event_log, lifecycle, snapshot

UNKNOWN = "unknown"
"""Source of groups that were restored without their history."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ledger:
  """Sampled tokens by their fate.

  Attributes:
    masked: of members of trained groups that are not trained themselves.
    causes: masked tokens by cause: "faults", "not finite" (a skipped update),
      "truncated" (see `mask_truncated`), "no advantage" (a group of zero
      variance, or a singleton), "unknown" (a restored group).
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
    accounted = self.trained + self.masked + sum(self.dropped.values())
    return self.sampled - accounted - self.in_flight

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
  text = ", ".join(f"{n:,} {why}" for why, n in parts.items() if n)
  return f" ({text})" if text else ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpisodeTotals:
  """A count of episodes, their ids and their sources.

  Attributes:
    length: ids of all of them together.
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
    """The share of each source in the episodes."""
    return {
      source: count / self.episodes
      for source, count in sorted(self.by_source.items())
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectionBias:
  """The difference between the episodes launched and those trained.

  A schedule that prefers quick groups trains shorter episodes than it plays.
  Masked members, as those with a fault, are launched but not trained. Aborted
  episodes count with the length that they had, so `launched` is a lower bound.
  """

  launched: EpisodeTotals
  trained: EpisodeTotals


def of_attempt(attempt: lifecycle.AttemptRecord) -> Ledger:
  """Returns the ledger of one attempt so far."""
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
  attempt: lifecycle.AttemptRecord, trained: event_log.Event
) -> dict[str, int]:
  """Returns the masked tokens of a trained group by cause."""
  if attempt.restored:
    return {UNKNOWN: trained["masked"]} if trained["masked"] else {}
  causes: collections.Counter[str] = collections.Counter()
  for i in set(trained["members"]) - set(attempt.used):
    member = attempt.members.get(i, lifecycle.MemberRecord())
    if member.outcome == "fault":
      cause = "faults"
    elif trained.get("skipped"):
      cause = "not finite"
    elif i in trained.get("cut", ()):
      cause = "truncated"
    else:
      cause = "no advantage"
    causes[cause] += member.sampled
  return dict(causes)


class LedgerBuilder:
  """Builds the ledger of a log event by event, in flat memory.

  Call `observe` with every event; it may be a listener of the log.
  """

  def __init__(self):
    # Members that never began have no tokens to wait for.
    self._lifecycle = lifecycle.Lifecycle(0, self._close)
    self._closed: dict[str, Ledger] = {}
    self._launched = _Tally()
    self._trained = _Tally()

  def observe(self, event: event_log.Event) -> None:
    """Takes one event into account."""
    if misplaced := self._lifecycle.observe(event):
      self.note(event, misplaced)

  def follow(self, other: lifecycle.Lifecycle) -> None:
    """Takes the attempts of a lifecycle that someone else has observe a log.

    Whoever does calls `note` in the place of `observe`, from the first event.
    """
    self._lifecycle = other
    other.on_close.append(self._close)

  def to_host(self) -> dict[str, Any]:
    """Returns its state as JSON data, without attempts under way.

    Those are in the state of the lifecycle that it follows.
    """
    return snapshot.of(self, ("_lifecycle",))

  def restore(self, state: Mapping[str, Any]) -> None:
    """Goes on from a state; see `snapshot.restore` for errors."""
    snapshot.restore(self, state, Ledger, without=("_lifecycle",))

  def note(
    self, event: event_log.Event, misplaced: lifecycle.Misplaced
  ) -> None:
    """Takes into account an event that breaks the order."""
    if misplaced.ignored and event["kind"] in _MOVES:
      self._record(UNKNOWN, _stray(event))

  def by_source(self) -> dict[str, Ledger]:
    """Returns the ledger of each source of tasks."""
    ledgers = dict(self._closed)
    for attempt in self._lifecycle.under_way:
      source = attempt.source or UNKNOWN
      ledgers[source] = ledgers.get(source, Ledger()) + of_attempt(attempt)
    return ledgers

  def ledger(self) -> Ledger:
    """Returns the ledger of all tokens so far."""
    return sum(self.by_source().values(), Ledger())

  def selection_bias(self) -> SelectionBias:
    """Returns the bias of the attempts that are over."""
    return SelectionBias(
      launched=self._launched.totals(), trained=self._trained.totals()
    )

  def _record(self, source: str, ledger: Ledger) -> None:
    self._closed[source] = self._closed.get(source, Ledger()) + ledger

  def _close(self, attempt: lifecycle.AttemptRecord) -> None:
    source = attempt.source or UNKNOWN
    self._record(source, of_attempt(attempt))
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

  def totals(self) -> EpisodeTotals:
    return EpisodeTotals(
      episodes=self._by_source.total(),
      length=self._length,
      by_source=dict(self._by_source),
    )


_MOVES = ("ended", "aborted", "dropped", "trained")


def _stray(event: event_log.Event) -> Ledger:
  """Returns the one-sided entry of a misplaced event."""
  if event["kind"] == "dropped":
    return Ledger(dropped={event["reason"]: event["tokens"]})
  if event["kind"] == "trained":
    causes = {"unknown": event["masked"]}
    return Ledger(
      trained=event["tokens"], masked=event["masked"], causes=causes
    )
  return Ledger(sampled=event["tokens"])


def build(log: Iterable[event_log.Event]) -> LedgerBuilder:
  """Returns a builder that has observed a whole log.

  Args:
    log: without the events that a restart supersedes: `event_log.surviving`.
  """
  builder = LedgerBuilder()
  for event in log:
    builder.observe(event)
  return builder


def of(log: Iterable[event_log.Event]) -> Ledger:
  """Returns the ledger of a whole log."""
  return build(log).ledger()
