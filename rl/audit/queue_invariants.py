"""Promises about the way of groups through gate and buffer."""

from rl.audit import event_log, invariant, lifecycle
from rl.schedule import overlap


class AttemptOrder(invariant.Invariant):
  """The attempts at a group follow one another, at tasks of one source.

  A task that was too slow for the bound may give way to one of any source.
  """

  def __init__(self, context: invariant.Context):
    super().__init__(context)
    self._begun: dict[int, event_log.Event] = {}
    self._dropped: dict[int, event_log.Event] = {}
    self._too_slow: set[str] = set()
    self._over = _Ids()

  def _on_submitted(self, event: event_log.Event) -> None:
    group = event["group"]
    before = self._begun.get(group)
    where = lifecycle.name(group, event["attempt"])
    if group in self._over:
      self.report(
        f"{where}: submitted although the group is trained or cancelled"
      )
    elif before is not None:
      self._compare(before, event, where)
    elif event["attempt"]:
      self.report(f"{where}: submitted without the attempts before it")
    self._begun[group] = event
    self._dropped.pop(group, None)

  def _compare(
    self, before: event_log.Event, event: event_log.Event, where: str
  ) -> None:
    dropped = self._dropped.get(event["group"])
    if event["attempt"] != before["attempt"] + 1:
      self.report(f"{where}: submitted after attempt {before['attempt']}")
    elif dropped is None:
      self.report(
        f"{where}: submitted before the attempt before it was dropped"
      )
    elif before.get("task") in self._too_slow:
      self._too_slow.remove(before["task"])
    elif event["source"] != before.get("source", event["source"]):
      self.report(
        f"{where}: a task of {event['source']} in the place of one of "
        f"{before['source']}"
      )
    elif self._is_recycled(dropped) and event["task"] != before.get(
      "task", event["task"]
    ):
      self.report(
        f"{where}: task {event['task']} in the place of {before['task']}, "
        "which is to be recycled"
      )

  def _is_recycled(self, dropped: event_log.Event) -> bool:
    return self.schedule.consume == "recycle" and dropped["reason"] == "stale"

  def _on_source_too_slow(self, event: event_log.Event) -> None:
    self._too_slow.add(event["task"])

  def _on_restored(self, event: event_log.Event) -> None:
    # The beginning of a restored attempt is not in the log.
    self._begun[event["group"]] = event
    self._dropped.pop(event["group"], None)

  def _on_dropped(self, event: event_log.Event) -> None:
    self._dropped[event["group"]] = event
    if event["reason"] == "redundant":
      self._end(event["group"])

  def _on_trained(self, event: event_log.Event) -> None:
    group = event["group"]
    if group in self._over:
      self.report(
        f"{lifecycle.name(group, event['attempt'])}: trained once more"
      )
    self._end(group)

  def _end(self, group: int) -> None:
    self._begun.pop(group, None)
    self._dropped.pop(group, None)
    self._over.add(group)


class _Ids:
  """A set of ids that fills up from 0: those below a mark cost nothing."""

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


class AdmissionWindow(invariant.Invariant):
  """Group i is admitted when i < (version + eta + 1) R, redundant groups apart.

  Cancelled groups do not count in i.
  """

  def __init__(self, context: invariant.Context):
    super().__init__(context)
    self._under_way: set[int] = set()
    self._admitted = 0

  def _on_submitted(self, event: event_log.Event) -> None:
    group, version = event["group"], event["version"]
    if group in self._under_way:
      return
    rounds = version + self.schedule.max_staleness + 1
    extra = self.schedule.redundancy.extra_groups
    limit = rounds * self.schedule.groups_per_round + extra
    if self._admitted >= limit:
      self.report(
        f"group {group}: admitted at version {version} after "
        f"{self._admitted} others; the gate ends at {limit}"
      )
    self._admit(group)

  def _on_restored(self, event: event_log.Event) -> None:
    if event["group"] not in self._under_way:
      self._admit(event["group"])

  def _admit(self, group: int) -> None:
    self._under_way.add(group)
    self._admitted += 1

  def _on_dropped(self, event: event_log.Event) -> None:
    if event["reason"] == "redundant" and event["group"] in self._under_way:
      self._under_way.remove(event["group"])
      self._admitted -= 1

  def _on_trained(self, event: event_log.Event) -> None:
    self._under_way.discard(event["group"])


class HardFrontier(invariant.Invariant):
  """No more unfinished groups are played than the frontier holds."""

  def __init__(self, context: invariant.Context):
    super().__init__(context)
    self._playing: set[int] = set()

  @staticmethod
  def binds(schedule: overlap.Overlap) -> bool:
    """Those with a hard frontier."""
    return schedule.admission == "hard_frontier"

  def _on_admitted(self, event: event_log.Event) -> None:
    group, limit = event["group"], self.schedule.frontier_groups
    if group in self._playing:
      return
    self._playing.add(group)
    if len(self._playing) > limit:
      self.report(
        f"group {group}: played with {len(self._playing) - 1} others; the "
        f"frontier holds {limit}"
      )

  def _on_ready(self, event: event_log.Event) -> None:
    self._playing.discard(event["group"])

  _on_dropped = _on_ready


class SubmitOrder(invariant.Invariant):
  """Groups are taken in the order of submission; only cancelled ones miss.

  This order makes admission alone a bound on staleness.
  """

  def __init__(self, context: invariant.Context):
    super().__init__(context)
    self._next = 0
    self._cancelled: set[int] = set()

  @staticmethod
  def binds(schedule: overlap.Overlap) -> bool:
    """Those that consume in this order."""
    return schedule.consume == "submit"

  def _on_dropped(self, event: event_log.Event) -> None:
    if event["reason"] == "redundant":
      self._cancelled.add(event["group"])

  def _on_dequeued(self, event: event_log.Event) -> None:
    while self._next in self._cancelled:
      self._cancelled.remove(self._next)
      self._next += 1
    if event["group"] != self._next:
      self.report(
        f"group {event['group']} was taken when {self._next} was next"
      )
    self._next = event["group"] + 1


class WholeRounds(invariant.Invariant):
  """A round is taken only when all of its groups are ready."""

  def __init__(self, context: invariant.Context):
    super().__init__(context)
    self._waiting: set[int] = set()
    self._taken = 0

  @staticmethod
  def binds(schedule: overlap.Overlap) -> bool:
    """Those that wait for a round."""
    return schedule.wait_for_round

  def _on_ready(self, event: event_log.Event) -> None:
    self._waiting.add(event["group"])

  _on_restored = _on_ready

  def _on_dropped(self, event: event_log.Event) -> None:
    self._waiting.discard(event["group"])

  def _on_dequeued(self, event: event_log.Event) -> None:
    size = self.schedule.groups_per_round
    missing = size - self._taken % size
    if len(self._waiting) < missing:
      self.report(
        f"group {event['group']} was taken with {len(self._waiting)} of "
        f"{missing} groups ready"
      )
    self._waiting.discard(event["group"])
    self._taken += 1


class Microbatches(invariant.Invariant):
  """A micro-batch has its number of groups, or fits its budget of tokens.

  A group that is larger than the budget is a micro-batch of its own.
  """

  def __init__(self, context: invariant.Context):
    super().__init__(context)
    self._at = 0, 0
    self._lengths: list[int] = []

  def _on_dequeued(self, event: event_log.Event) -> None:
    at = event["version"], event["microbatch"]
    if at != self._at:
      self._end()
    self._at = at
    self._lengths.append(event["length"])

  def _on_update(self, event: event_log.Event) -> None:
    del event
    self._end()

  def _end(self) -> None:
    lengths, self._lengths = self._lengths, []
    if not lengths:
      return
    which = "micro-batch {1} of round {0}".format(*self._at)
    budget = self.schedule.tokens_per_microbatch
    number = self.schedule.groups_per_batch
    if budget is None and len(lengths) != number:
      self.report(f"{which} has {len(lengths)} groups, not {number}")
    if budget is not None and len(lengths) > 1 and sum(lengths) > budget:
      counts = f"{len(lengths)} groups of {sum(lengths)} tokens"
      self.report(f"{which} has {counts}; the budget is {budget}")


INVARIANTS = (
  AttemptOrder,
  AdmissionWindow,
  HardFrontier,
  SubmitOrder,
  WholeRounds,
  Microbatches,
)
