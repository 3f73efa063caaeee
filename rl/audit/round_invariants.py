"""What must hold between rounds and publishes, event by event.

Each invariant is a small class that is built with the schedule. Its methods
are named for the kinds of events that they are given and yield a sentence for
every way in which it is broken. Its state is that of what is under way, or a
few numbers: it does not grow with the log.
"""

import collections
import dataclasses
from collections.abc import Iterator

from rl.audit import event_log, invariant, lifecycle
from rl.data import trajectory
from rl.schedule import overlap

_STATUSES = frozenset(status.value for status in trajectory.Status)


class Time(invariant.Invariant):
  """Time never falls; a first token may be told later than it was sampled."""

  def __init__(self, schedule: overlap.Overlap):
    del schedule
    self._last = 0.0

  def every(self, event: event_log.Event) -> Iterator[str]:
    """Compares with the event before."""
    if event["kind"] == "first_token":
      return
    if event["t"] < self._last:
      yield f"{event['kind']} at {event['t']} s came after {self._last} s"
    self._last = max(self._last, event["t"])


class Publishes(invariant.Invariant):
  """Publishes do not overlap, and each version is one above the last."""

  def __init__(self, schedule: overlap.Overlap):
    del schedule
    self._open: int | None = None
    self._last = 0

  def publish_start(self, event: event_log.Event) -> Iterator[str]:
    """Compares with the publish before."""
    version = event["version"]
    if self._open is not None:
      yield f"publishing {version} began inside {self._open}"
    self._open = version

  def published(self, event: event_log.Event) -> Iterator[str]:
    """Compares with what was begun."""
    version = event["version"]
    if version != self._open:
      yield f"version {version} was published but never begun"
    if version != self._last + 1:
      yield f"version {version} was published after {self._last}"
    self._last, self._open = version, None


class KnownWords(invariant.Invariant):
  """Every event is of a kind, and every end of a status, that there is."""

  def __init__(self, schedule: overlap.Overlap):
    del schedule

  def every(self, event: event_log.Event) -> Iterator[str]:
    """Looks at the kind."""
    if event["kind"] not in event_log.KINDS:
      yield f"an event of kind {event['kind']!r}, which there is not"

  def ended(self, event: event_log.Event) -> Iterator[str]:
    """Looks at the status."""
    if event["status"] not in _STATUSES:
      yield (
        f"{_member(event)}: ended with status "
        f"{event['status']!r}, which there is not"
      )

  fault = ended


class KnownVersions(invariant.Invariant):
  """Nothing is sampled by, or admitted at, a version that is not there yet."""

  def __init__(self, schedule: overlap.Overlap):
    del schedule
    self._newest = 0

  def publish_start(self, event: event_log.Event) -> Iterator[str]:
    """From here on the first engines may serve it."""
    self._newest = max(self._newest, event["version"])
    yield from ()

  def submitted(self, event: event_log.Event) -> Iterator[str]:
    """Looks at the gate's version."""
    yield from self._early(
      f"{_name(event)}: {event['kind']} at", event["version"]
    )

  ready = dropped = submitted

  def admitted(self, event: event_log.Event) -> Iterator[str]:
    """Looks at the engine's version."""
    yield from self._early(f"{_member(event)}: admitted at", event["version"])

  def ended(self, event: event_log.Event) -> Iterator[str]:
    """Looks at the version of each token."""
    last = max((version for version, _ in event["versions"]), default=0)
    yield from self._early(f"{_member(event)}: sampled by", last)

  aborted = ended

  def _early(self, what: str, version: int) -> Iterator[str]:
    if version > self._newest:
      yield (
        f"{what} version {version}, which is not published; {self._newest} is"
      )


def _member(event: event_log.Event) -> str:
  return f"{_name(event)} member {event['index']}"


def _name(event: event_log.Event) -> str:
  return lifecycle.name(event["group"], event["attempt"])


@dataclasses.dataclass
class _Round:
  """What a round has trained so far; `ready_t` is of the last group."""

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

  def __init__(self, schedule: overlap.Overlap):
    self._updates = schedule.updates_per_round
    self._groups = schedule.groups_per_update
    self._rounds: dict[int, _Round] = collections.defaultdict(_Round)
    self._end = 0.0

  def trained(self, event: event_log.Event) -> Iterator[str]:
    """Counts the groups of an update."""
    self._rounds[event["version"]].groups[event["update"]] += 1
    yield from ()

  def update(self, event: event_log.Event) -> Iterator[str]:
    """Compares with the update before."""
    this = self._rounds[event["version"]]
    this.updates.append(event["number"])
    this.end = max(this.end, event["end"])
    which = f"update {event['number']} of round {event['version']}"
    if event["end"] < event["start"]:
      yield f"{which} ended before it began"
    if event["start"] < self._end:
      yield f"{which} began inside the one before"
    self._end = max(self._end, event["end"])

  def publish_start(self, event: event_log.Event) -> Iterator[str]:
    """Looks at the round that the version rests on."""
    version = event["version"]
    this = self._rounds.pop(version - 1, _Round())
    for late in [v for v in self._rounds if v < version]:
      del self._rounds[late]
    start = f"publishing {version} began "
    if this.updates != list(range(self._updates)):
      yield start + f"after updates {this.updates}, not {self._updates} of them"
    wanted = dict.fromkeys(range(self._updates), self._groups)
    if dict(this.groups) != wanted:
      counts = dict(sorted(this.groups.items()))
      yield start + f"with groups by update {counts}, not {wanted}"
    if event["t"] < this.end:
      yield start + "before the last update of its round had ended"


class TrainingApart(invariant.Invariant):
  """A round trains in no moment in which one of its groups still plays."""

  def __init__(self, schedule: overlap.Overlap):
    del schedule
    self._ready: dict[int, float] = {}
    self._rounds: dict[int, _Round] = collections.defaultdict(_Round)

  @staticmethod
  def binds(schedule: overlap.Overlap) -> bool:
    """Those that wait for a round."""
    return schedule.wait_for_round

  def ready(self, event: event_log.Event) -> Iterator[str]:
    """It plays no longer."""
    self._ready[event["group"]] = event["t"]
    yield from ()

  def dropped(self, event: event_log.Event) -> Iterator[str]:
    """It is of no round."""
    self._ready.pop(event["group"], None)
    yield from ()

  def trained(self, event: event_log.Event) -> Iterator[str]:
    """It is of this round."""
    this = self._rounds[event["version"]]
    this.ready_t = max(this.ready_t, self._ready.pop(event["group"], 0.0))
    yield from ()

  def update(self, event: event_log.Event) -> Iterator[str]:
    """The first one begins the training of a round."""
    this = self._rounds[event["version"]]
    if this.start is None or event["start"] < this.start:
      this.start = event["start"]
    yield from ()

  def publish_start(self, event: event_log.Event) -> Iterator[str]:
    """Compares both ends of the round."""
    this = self._rounds.pop(event["version"] - 1, _Round())
    if this.start is not None and this.start < this.ready_t:
      yield (
        f"round {event['version'] - 1} began to train at {this.start} s, "
        f"its last group was ready at {this.ready_t} s"
      )


INVARIANTS = (KnownWords, Time, Publishes, KnownVersions, Rounds, TrainingApart)
