"""Promises about rounds and publishes."""

import collections
import dataclasses

from rl.audit import event_log, invariant, lifecycle
from rl.data import trajectory
from rl.schedule import overlap

_STATUSES = frozenset(status.value for status in trajectory.Status)
_name = lifecycle.name_of


class KnownWords(invariant.Invariant):
  """Every event has a known kind, and every end a known status."""

  def _on_unknown(self, event: event_log.Event) -> None:
    self.report(f"an event of unknown kind {event['kind']!r}")

  def _on_ended(self, event: event_log.Event) -> None:
    if event["status"] not in _STATUSES:
      self.report(
        f"{_name(event)}: ended with unknown status {event['status']!r}"
      )

  _on_fault = _on_ended


class TimeRises(invariant.Invariant):
  """Time never falls; a first token may be logged later than it was sampled."""

  def __init__(self, context: invariant.Context):
    super().__init__(context)
    self._last = 0.0

  def _on_event(self, event: event_log.Event) -> None:
    if event["kind"] == "first_token":
      return
    if event["t"] < self._last:
      self.report(
        f"{event['kind']} at {event['t']} s came after {self._last} s"
      )
    else:
      self._last = event["t"]


class Publishes(invariant.Invariant):
  """Publishes do not overlap, and each version is one above the last."""

  def __init__(self, context: invariant.Context):
    super().__init__(context)
    self._open: int | None = None
    self._last = 0

  def _on_publish_start(self, event: event_log.Event) -> None:
    version = event["version"]
    if self._open is not None:
      self.report(f"publishing {version} began inside {self._open}")
    self._open = version

  def _on_published(self, event: event_log.Event) -> None:
    version = event["version"]
    if version != self._open:
      self.report(f"version {version} was published but never begun")
    if version != self._last + 1:
      self.report(f"version {version} was published after {self._last}")
    self._last, self._open = version, None


class HeldPublishes(invariant.Invariant):
  """Weights of rounds after the one that held publishing back are not sent.

  Those of that round itself are on their way.
  """

  def __init__(self, context: invariant.Context):
    super().__init__(context)
    self._is_held = False
    self._held_at = self._last = 0

  def _on_update(self, event: event_log.Event) -> None:
    self._last = event["version"]

  def _on_publishing_held(self, event: event_log.Event) -> None:
    round_, is_held = event["version"], event["kind"] == "publishing_held"
    if self._is_held == is_held:
      was = "was already" if is_held else "was not"
      self.report(f"{event['kind']} in round {round_}, but it {was} held back")
    if round_ != self._last:
      self.report(f"{event['kind']} in round {round_} came after {self._last}")
    self._is_held, self._held_at = is_held, round_

  _on_publishing_resumed = _on_publishing_held

  def _on_publish_start(self, event: event_log.Event) -> None:
    if self._is_held and event["version"] > self._held_at + 1:
      self.report(f"publishing {event['version']} began while it was held back")


class PublishedVersions(invariant.Invariant):
  """Only published versions sample tokens, or are those of an admission.

  From its first switch on an engine may serve a version.
  """

  def __init__(self, context: invariant.Context):
    super().__init__(context)
    self._newest = 0

  def _on_switched(self, event: event_log.Event) -> None:
    self._newest = max(self._newest, event["version"])

  _on_published = _on_engine_back = _on_engine_joined = _on_switched

  def _on_submitted(self, event: event_log.Event) -> None:
    self._compare(f"{_name(event)}: {event['kind']} at", event["version"])

  _on_ready = _on_dropped = _on_submitted

  def _on_admitted(self, event: event_log.Event) -> None:
    self._compare(f"{_name(event)}: admitted at", event["version"])

  def _on_ended(self, event: event_log.Event) -> None:
    newest = max((version for version, _ in event["versions"]), default=0)
    self._compare(f"{_name(event)}: sampled by", newest)

  _on_aborted = _on_ended

  def _compare(self, use: str, version: int) -> None:
    if version > self._newest:
      self.report(
        f"{use} version {version}, which is not published; {self._newest} is"
      )


@dataclasses.dataclass
class _Round:
  """The training of a round so far; `ready_t` is of its last group."""

  groups: collections.Counter[int] = dataclasses.field(
    default_factory=collections.Counter
  )
  updates: list[int] = dataclasses.field(default_factory=list)
  start: float | None = None
  end: float = 0.0
  ready_t: float = 0.0


class Rounds(invariant.Invariant):
  """A round is R groups in U equal updates, one after another, then a publish.

  So the data of update j is j updates old, and all of the round is in the
  weights that are published.
  """

  RECORDS = (_Round,)

  def __init__(self, context: invariant.Context):
    super().__init__(context)
    self._rounds: dict[int, _Round] = collections.defaultdict(_Round)
    self._end = 0.0

  def _on_trained(self, event: event_log.Event) -> None:
    self._rounds[event["version"]].groups[event["update"]] += 1

  def _on_update(self, event: event_log.Event) -> None:
    this = self._rounds[event["version"]]
    this.updates.append(event["number"])
    this.end = max(this.end, event["end"])
    which = f"update {event['number']} of round {event['version']}"
    # Neither holds of a NaN.
    if not event["start"] <= event["end"]:
      self.report(f"{which} ended before it began")
    if not event["end"] <= event["t"] + invariant.ROUNDING_S:
      self.report(f"{which} was told before it ended")
    if event["start"] < self._end:
      self.report(f"{which} began inside the one before")
    self._end = max(self._end, event["end"])

  def _on_publish_start(self, event: event_log.Event) -> None:
    version, updates = event["version"], self.schedule.updates_per_round
    this = self._rounds.pop(version - 1, _Round())
    for late in [v for v in self._rounds if v < version]:
      del self._rounds[late]
    start = f"publishing {version} began "
    if this.updates != list(range(updates)):
      self.report(f"{start}after updates {this.updates}, not {updates} of them")
    expected = dict.fromkeys(range(updates), self.schedule.groups_per_update)
    if dict(this.groups) != expected:
      counts = dict(sorted(this.groups.items()))
      self.report(f"{start}with groups by update {counts}, not {expected}")
    if event["t"] < this.end:
      self.report(start + "before the last update of its round had ended")


class TrainingApart(invariant.Invariant):
  """A round never trains while one of its groups still plays."""

  RECORDS = (_Round,)

  def __init__(self, context: invariant.Context):
    super().__init__(context)
    self._ready: dict[int, float] = {}
    self._rounds: dict[int, _Round] = collections.defaultdict(_Round)

  @staticmethod
  def binds(schedule: overlap.Overlap) -> bool:
    """Those that wait for a round."""
    return schedule.wait_for_round

  def _on_ready(self, event: event_log.Event) -> None:
    self._ready[event["group"]] = event["t"]

  def _on_dropped(self, event: event_log.Event) -> None:
    self._ready.pop(event["group"], None)

  def _on_trained(self, event: event_log.Event) -> None:
    this = self._rounds[event["version"]]
    this.ready_t = max(this.ready_t, self._ready.pop(event["group"], 0.0))

  def _on_update(self, event: event_log.Event) -> None:
    this = self._rounds[event["version"]]
    if this.start is None or event["start"] < this.start:
      this.start = event["start"]

  def _on_publish_start(self, event: event_log.Event) -> None:
    this = self._rounds.pop(event["version"] - 1, _Round())
    if this.start is not None and this.start < this.ready_t:
      self.report(
        f"round {event['version'] - 1} began to train at {this.start} s, "
        f"its last group was ready at {this.ready_t} s"
      )


INVARIANTS = (
  KnownWords,
  TimeRises,
  Publishes,
  HeldPublishes,
  PublishedVersions,
  Rounds,
  TrainingApart,
)
