"""The event log and what must hold of it: invariants as pure functions.

Kinds of events and their fields, all with `t` seconds since the log began:
  submitted      group, version      the gate let a group in
  ended          group, index, status, turns, tokens, versions
  cancelled      group, index, tokens, versions      the run stopped
  reward         group, index, value
  fault          group, index, status, what
  ready          group, version      all members ended and graded
  resumed        trained             a restart goes on after so many rounds
  restored       group, tokens, first_version      finished before a restart
  dequeued       group               the learner took it
  trained        group, version, first_version, tokens, masked
  publish_start  version, moved_bytes      the learner copied so much
  published      version             every engine serves it

`versions` are run lengths, [[version, tokens], ...], in the order of sampling.
"""

import collections
import contextlib
import dataclasses
import itertools
import json
import pathlib
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from rl import overlap as overlap_lib

Event = dict[str, Any]

_OF_PLAY = ("submitted", "ended", "reward", "fault", "ready")
_OF_PUBLISH = ("publish_start", "published")


class EventLog:
  """Appends events to memory and, buffered, to JSON lines on disk.

  All methods belong to the event loop; `flush` is called once a round.

  Args:
    path: appended to, so a resumed run keeps its history, and its times go on
      behind the last of them; None: memory only.

  Attributes:
    events: of this process.
  """

  def __init__(self, path: pathlib.Path | None = None):
    self.events: list[Event] = []
    self._origin = time.monotonic() - (_last_time(path) if path else 0.0)
    self._file = path.open("a") if path else None
    if self._file and self._file.tell():
      # A crash may have cut the last line; the next one must stay whole.
      self._file.write("\n")
    self._written = 0

  def emit(self, kind: str, **fields: Any) -> None:
    """Records one event now."""
    now = round(time.monotonic() - self._origin, 6)
    self.events.append({"t": now, "kind": kind, **fields})

  def flush(self) -> None:
    """Writes what was recorded since the last flush."""
    if self._file is None:
      return
    news = self.events[self._written :]
    self._file.writelines(json.dumps(event) + "\n" for event in news)
    self._file.flush()
    self._written = len(self.events)

  def close(self) -> None:
    """Flushes and closes the file."""
    self.flush()
    if self._file is not None:
      self._file.close()


def _last_time(path: pathlib.Path) -> float:
  """Returns `t` of the last whole line, 0 when there is none."""
  text = path.read_text("utf-8", "replace") if path.exists() else ""
  for line in reversed(text.split("\n")):
    with contextlib.suppress(json.JSONDecodeError):
      return float(json.loads(line)["t"])
  return 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ledger:
  """Where every sampled token went; the columns add up to `sampled`."""

  sampled: int
  trained: int
  masked: int
  untrained: int
  cancelled: int

  @property
  def error(self) -> int:
    """Tokens that are in no column or in two."""
    booked = self.trained + self.masked + self.untrained + self.cancelled
    return self.sampled - booked


def of_kind(events: Sequence[Event], kind: str) -> Iterator[Event]:
  """Yields the events of one kind."""
  return (event for event in events if event["kind"] == kind)


def surviving(events: Sequence[Event]) -> list[Event]:
  """Returns the log as if its run had never been interrupted.

  A resume after N rounds supersedes what is older and belongs to no trained
  group of these rounds: it is played, trained and published again. Only the
  play of a group that was finished and saved stays, and takes the place of
  the event that restores it.
  """
  starts = [i for i, e in enumerate(events) if e["kind"] == "resumed"]
  kept = list(events[: starts[0]] if starts else events)
  for start, end in itertools.pairwise([*starts, len(events)]):
    news = events[start + 1 : end]
    restored = {event["group"] for event in of_kind(news, "restored")}
    kept = _before_resume(kept, events[start]["trained"], restored)
    ready = {event["group"] for event in of_kind(kept, "ready")}
    kept += [
      event
      for event in news
      if event["kind"] != "restored" or event["group"] not in ready
    ]
  return kept


def _before_resume(
  events: Sequence[Event], rounds: int, restored: Collection[int]
) -> list[Event]:
  """Returns what a resume after so many rounds leaves of an older log."""
  trained = of_kind(events, "trained")
  done = {event["group"] for event in trained if event["version"] < rounds}
  ready = {event["group"] for event in of_kind(events, "ready")}
  # A kill can fall between the two events of a publish.
  published = {event["version"] for event in of_kind(events, "published")}

  def stays(event: Event) -> bool:
    if event["kind"] in _OF_PUBLISH:
      return event["version"] <= rounds and event["version"] in published
    group = event["group"]
    played = event["kind"] in _OF_PLAY and group in restored and group in ready
    return group in done or played

  return [event for event in events if stays(event)]


def ledger(events: Sequence[Event]) -> Ledger:
  """Returns the balance of tokens of a log."""
  sampled = _sampled(events)
  cancelled = sum(event["tokens"] for event in of_kind(events, "cancelled"))
  trained = list(of_kind(events, "trained"))
  done = {event["group"] for event in trained}
  return Ledger(
    sampled=sum(sampled.values()) + cancelled,
    cancelled=cancelled,
    trained=sum(event["tokens"] for event in trained),
    masked=sum(event["masked"] for event in trained),
    untrained=sum(n for group, n in sampled.items() if group not in done),
  )


def _sampled(events: Sequence[Event]) -> collections.Counter[int]:
  """Returns the number of tokens of each group's finished members."""
  sampled: collections.Counter[int] = collections.Counter()
  for kind in ("ended", "restored"):
    for event in of_kind(events, kind):
      sampled[event["group"]] += event["tokens"]
  return sampled


def staleness(events: Sequence[Event]) -> list[int]:
  """Returns T - F of every trained group."""
  return [e["version"] - e["first_version"] for e in of_kind(events, "trained")]


def violations(
  events: Sequence[Event], schedule: overlap_lib.Overlap, group_size: int
) -> list[str]:
  """Returns every way in which a log breaks the promises of its schedule."""
  return [
    *_admission(events, schedule),
    *_staleness(events, schedule),
    *_whole_groups(events, group_size),
    *_submission_order(events),
    *_versions_rise(events),
    *_publishes(events),
    *_synchronous(events, schedule),
    *_whole_rounds(events, schedule),
    *_balance(events),
  ]


def _admission(
  events: Sequence[Event], schedule: overlap_lib.Overlap
) -> Iterator[str]:
  window = schedule.max_staleness + 1
  for event in of_kind(events, "submitted"):
    limit = (event["version"] + window) * schedule.groups_per_round
    if event["group"] >= limit:
      yield (
        f"group {event['group']} was admitted at version {event['version']}; "
        f"the gate ends at {limit}"
      )


def _staleness(
  events: Sequence[Event], schedule: overlap_lib.Overlap
) -> Iterator[str]:
  for event in of_kind(events, "trained"):
    lag = event["version"] - event["first_version"]
    if not 0 <= lag <= schedule.max_staleness:
      yield (
        f"group {event['group']} trained at version {event['version']} but"
        f" began at {event['first_version']}; the bound is "
        f"{schedule.max_staleness}"
      )


def _whole_groups(events: Sequence[Event], group_size: int) -> Iterator[str]:
  ended = collections.defaultdict(list)
  for event in of_kind(events, "ended"):
    ended[event["group"]].append(event["index"])
  restored = {event["group"] for event in of_kind(events, "restored")}
  trained = collections.Counter(e["group"] for e in of_kind(events, "trained"))
  for group, times in trained.items():
    if times != 1:
      yield f"group {group} was trained {times} times"
    members = sorted(ended[group])
    if group not in restored and members != list(range(group_size)):
      yield f"group {group} was trained with members {members}"


def _submission_order(events: Sequence[Event]) -> Iterator[str]:
  order = [event["group"] for event in of_kind(events, "dequeued")]
  for before, after in itertools.pairwise(order):
    if after != before + 1:
      yield f"group {after} was taken after group {before}"


def _versions_rise(events: Sequence[Event]) -> Iterator[str]:
  for event in events:
    if event["kind"] in ("ended", "cancelled"):
      versions = [version for version, _ in event["versions"]]
      if versions != sorted(versions):
        yield f"group {event['group']} member {event['index']}: versions fall"


def _publishes(events: Sequence[Event]) -> Iterator[str]:
  last, open_version = None, None
  for event in events:
    if event["kind"] == "publish_start":
      if open_version is not None:
        yield f"publishing {event['version']} began inside {open_version}"
      open_version = event["version"]
    elif event["kind"] == "published":
      if event["version"] != open_version:
        yield f"version {event['version']} was published but never begun"
      if last is not None and event["version"] != last + 1:
        yield f"version {event['version']} was published after {last}"
      last, open_version = event["version"], None


def _synchronous(
  events: Sequence[Event], schedule: overlap_lib.Overlap
) -> Iterator[str]:
  """With a bound of 0 every token of round k has version k."""
  if schedule.max_staleness:
    return
  for event in of_kind(events, "ended"):
    round_ = event["group"] // schedule.groups_per_round
    if any(version != round_ for version, _ in event["versions"]):
      yield f"group {event['group']} of round {round_} mixes versions"


def _whole_rounds(
  events: Sequence[Event], schedule: overlap_lib.Overlap
) -> Iterator[str]:
  """With `wait_for_round` a round is taken only when all of it is ready."""
  if not schedule.wait_for_round:
    return
  ready: collections.Counter[int] = collections.Counter()
  for event in events:
    round_ = event.get("group", 0) // schedule.groups_per_round
    if event["kind"] in ("ready", "restored"):
      ready[round_] += 1
    missing = schedule.groups_per_round - ready[round_]
    if event["kind"] == "dequeued" and missing:
      yield f"group {event['group']} was taken before its round was ready"


def _balance(events: Sequence[Event]) -> Iterator[str]:
  """Group by group, so that two errors cannot cancel out."""
  sampled = _sampled(events)
  booked: collections.Counter[int] = collections.Counter()
  for event in of_kind(events, "trained"):
    booked[event["group"]] += event["tokens"] + event["masked"]
  for group, tokens in booked.items():
    if tokens != sampled[group]:
      yield (
        f"group {group}: {sampled[group]} tokens were sampled, but {tokens} "
        "are trained or masked"
      )
