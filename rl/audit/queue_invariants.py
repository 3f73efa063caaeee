"""What must hold on the way of groups through gate and buffer.

The classes are as those of `run_invariants`.
"""

from collections.abc import Iterator

from rl.audit import event_log, invariant, lifecycle
from rl.schedule import overlap


class Slots(invariant.Invariant):
  """The attempts at a group follow one another, at tasks of one source.

  A task that is too slow for the bound, and so replaced, may give way to one of
  any source.
  """

  def __init__(self, schedule: overlap.Overlap):
    self._recycles = schedule.consume == "recycle"
    self._begun: dict[int, event_log.Event] = {}
    self._dropped: dict[int, event_log.Event] = {}
    self._too_slow: set[str] = set()
    self._over = _Ids()

  def submitted(self, event: event_log.Event) -> Iterator[str]:
    """Compares with the attempt before."""
    group = event["group"]
    before = self._begun.get(group)
    where = lifecycle.name(group, event["attempt"])
    if group in self._over:
      yield f"{where}: submitted although the group is trained or cancelled"
    elif before is None:
      if event["attempt"]:
        yield f"{where}: submitted without the attempts before it"
    else:
      yield from self._follows(before, event, where)
    self._begun[group] = event
    self._dropped.pop(group, None)

  def source_too_slow(self, event: event_log.Event) -> Iterator[str]:
    """What follows on this task is another one."""
    self._too_slow.add(event["task"])
    yield from ()

  def _follows(
    self, before: event_log.Event, event: event_log.Event, where: str
  ) -> Iterator[str]:
    dropped = self._dropped.get(event["group"])
    if event["attempt"] != before["attempt"] + 1:
      yield f"{where}: submitted after attempt {before['attempt']}"
    elif dropped is None:
      yield f"{where}: submitted before the attempt before it was dropped"
    elif before.get("task") in self._too_slow:
      self._too_slow.remove(before["task"])
    elif event["source"] != before.get("source", event["source"]):
      yield (
        f"{where}: a task of {event['source']} in the place of one of "
        f"{before['source']}"
      )
    elif self._recycles and dropped["reason"] == "stale":
      yield from _same_task(before, event, where)

  def restored(self, event: event_log.Event) -> Iterator[str]:
    """An attempt whose beginning is not in the log."""
    self._begun[event["group"]] = event
    self._dropped.pop(event["group"], None)
    yield from ()

  def dropped(self, event: event_log.Event) -> Iterator[str]:
    """A redundant group is not played again."""
    self._dropped[event["group"]] = event
    if event["reason"] == "redundant":
      self._end(event["group"])
    yield from ()

  def trained(self, event: event_log.Event) -> Iterator[str]:
    """A group is trained once, whatever the attempt."""
    group = event["group"]
    if group in self._over:
      yield f"{lifecycle.name(group, event['attempt'])}: trained once more"
    self._end(group)

  def _end(self, group: int) -> None:
    self._begun.pop(group, None)
    self._dropped.pop(group, None)
    self._over.add(group)


def _same_task(
  before: event_log.Event, event: event_log.Event, where: str
) -> Iterator[str]:
  if event["task"] != before.get("task", event["task"]):
    yield (
      f"{where}: task {event['task']} in the place of {before['task']}, which "
      "is to be recycled"
    )


class _Ids:
  """A set of ids that fills up from 0: what is below a mark costs nothing."""

  def __init__(self):
    self._mark = 0
    self._above: set[int] = set()

  def add(self, number: int) -> None:
    self._above.add(number)
    while self._mark in self._above:
      self._above.remove(self._mark)
      self._mark += 1

  def __contains__(self, number: int) -> bool:
    return number < self._mark or number in self._above


class Admission(invariant.Invariant):
  """Group i is admitted when i < (version + eta + 1) R, and redundant ones.

  Cancelled groups do not count in i.
  """

  def __init__(self, schedule: overlap.Overlap):
    self._round = schedule.groups_per_round
    self._window = schedule.max_staleness + 1
    self._extra = schedule.redundancy.extra_groups
    self._under_way: set[int] = set()
    self._admitted = 0

  def submitted(self, event: event_log.Event) -> Iterator[str]:
    """Compares a new group with the gate."""
    group, version = event["group"], event["version"]
    if group in self._under_way:
      return
    limit = (version + self._window) * self._round + self._extra
    if self._admitted >= limit:
      yield (
        f"group {group}: admitted at version {version} after "
        f"{self._admitted} others; the gate ends at {limit}"
      )
    self._admit(group)

  def restored(self, event: event_log.Event) -> Iterator[str]:
    """It was admitted before the restart."""
    if event["group"] not in self._under_way:
      self._admit(event["group"])
    yield from ()

  def _admit(self, group: int) -> None:
    self._under_way.add(group)
    self._admitted += 1

  def dropped(self, event: event_log.Event) -> Iterator[str]:
    """A cancelled group gives its place back."""
    if event["reason"] == "redundant" and event["group"] in self._under_way:
      self._under_way.remove(event["group"])
      self._admitted -= 1
    yield from ()

  def trained(self, event: event_log.Event) -> Iterator[str]:
    """It keeps its place and is followed no longer."""
    self._under_way.discard(event["group"])
    yield from ()


class HardFrontier(invariant.Invariant):
  """No more unfinished groups are played than the frontier holds."""

  def __init__(self, schedule: overlap.Overlap):
    self._most = schedule.frontier_groups
    self._playing: set[int] = set()

  @staticmethod
  def binds(schedule: overlap.Overlap) -> bool:
    """Those with a hard frontier."""
    return schedule.admission == "hard_frontier"

  def admitted(self, event: event_log.Event) -> Iterator[str]:
    """A member plays, and so its group does."""
    group = event["group"]
    if group in self._playing:
      return
    self._playing.add(group)
    if len(self._playing) > self._most:
      yield (
        f"group {group}: played with {len(self._playing) - 1} others; the "
        f"frontier holds {self._most}"
      )

  def ready(self, event: event_log.Event) -> Iterator[str]:
    """It is finished."""
    self._playing.discard(event["group"])
    yield from ()

  dropped = ready


class SubmitOrder(invariant.Invariant):
  """Groups are taken in the order of submission; none but cancelled ones miss.

  It is what makes admission alone a bound on staleness.
  """

  def __init__(self, schedule: overlap.Overlap):
    del schedule
    self._next = 0
    self._cancelled: set[int] = set()

  @staticmethod
  def binds(schedule: overlap.Overlap) -> bool:
    """Those that consume in this order."""
    return schedule.consume == "submit"

  def dropped(self, event: event_log.Event) -> Iterator[str]:
    """A cancelled group is passed over."""
    if event["reason"] == "redundant":
      self._cancelled.add(event["group"])
    yield from ()

  def dequeued(self, event: event_log.Event) -> Iterator[str]:
    """Compares with the next group that was not cancelled."""
    while self._next in self._cancelled:
      self._cancelled.remove(self._next)
      self._next += 1
    if event["group"] != self._next:
      yield f"group {event['group']} was taken when {self._next} was next"
    self._next = event["group"] + 1


class WholeRounds(invariant.Invariant):
  """A round is taken only when all of its groups are ready."""

  def __init__(self, schedule: overlap.Overlap):
    self._size = schedule.groups_per_round
    self._waiting: set[int] = set()
    self._taken = 0

  @staticmethod
  def binds(schedule: overlap.Overlap) -> bool:
    """Those that wait for a round."""
    return schedule.wait_for_round

  def ready(self, event: event_log.Event) -> Iterator[str]:
    """One more waits."""
    self._waiting.add(event["group"])
    yield from ()

  restored = ready

  def dropped(self, event: event_log.Event) -> Iterator[str]:
    """One less waits."""
    self._waiting.discard(event["group"])
    yield from ()

  def dequeued(self, event: event_log.Event) -> Iterator[str]:
    """Looks at what the round still needs."""
    missing = self._size - self._taken % self._size
    if len(self._waiting) < missing:
      yield (
        f"group {event['group']} was taken with {len(self._waiting)} of "
        f"{missing} groups ready"
      )
    self._waiting.discard(event["group"])
    self._taken += 1


INVARIANTS = (Slots, Admission, HardFrontier, SubmitOrder, WholeRounds)
