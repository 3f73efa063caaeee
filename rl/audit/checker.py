"""Checks in one pass that a log keeps the promises of its schedule.

  event --> lifecycle (order of transitions) --> group_invariants
    |       when an attempt is over
    +--> queue_invariants (gate, buffer), round_invariants (rounds, publishes),
         engine_invariants (switches, versions, sessions)

A log may end anywhere: unfinished work breaks no promise.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from rl.audit import (
  engine_invariants,
  event_log,
  group_invariants,
  invariant,
  lifecycle,
  queue_invariants,
  round_invariants,
  token_ledger,
)
from rl.schedule import overlap

_MAX_KEPT = 1000
_INVARIANTS: tuple[type[invariant.Invariant], ...] = (
  *group_invariants.INVARIANTS,
  *queue_invariants.INVARIANTS,
  *round_invariants.INVARIANTS,
  *engine_invariants.INVARIANTS,
)
_ORDER = "Transitions come in their order, and none twice."


class Checker:
  """Takes a log event by event and keeps the violations.

  Memory is that of the groups under way and of the first 1,000 violations.
  Call `observe` with every event, by hand or as a listener of the log, and
  `finish` once.

  Args:
    schedule: its promises are checked.
    group_size: G.
    ledger: built beside, for less than if it observed the log as well.
  """

  def __init__(
    self,
    schedule: overlap.Overlap,
    group_size: int,
    ledger: token_ledger.LedgerBuilder | None = None,
  ):
    self._lifecycle = lifecycle.Lifecycle(
      group_size + schedule.redundancy.extra_members, self._check_attempt
    )
    self._ledger = ledger
    if ledger is not None:
      ledger.follow(self._lifecycle)
    self._violations: list[str] = []
    self._num_violations = 0
    context = invariant.Context(schedule, group_size, self._report)
    self._invariants = [x(context) for x in _INVARIANTS if x.binds(schedule)]
    self._of_attempts = self._handlers("attempt_over")
    self._of_unknown = self._handlers("unknown", "event")
    self._of_kind = {k: self._handlers("event", k) for k in event_log.KINDS}

  @property
  def checks(self) -> list[str]:
    """The promises that are checked, a line each."""
    documented = (type(one).__doc__ or "" for one in self._invariants)
    return [_ORDER, *(text.split("\n")[0] for text in documented)]

  def observe(self, event: event_log.Event) -> None:
    """Checks one event."""
    if misplaced := self._lifecycle.observe(event):
      if self._ledger is not None:
        self._ledger.note(event, misplaced)
      self._report(misplaced.violation)
    for handle in self._of_kind.get(event["kind"], self._of_unknown):
      handle(event)

  @property
  def under_way(self) -> list[lifecycle.AttemptRecord]:
    """Attempts of which more may come."""
    return self._lifecycle.under_way

  def to_host(self) -> dict[str, Any]:
    """Returns its state as JSON data, with that of its ledger."""
    return {
      "lifecycle": self._lifecycle.to_host(),
      "invariants": {type(x).__name__: x.to_host() for x in self._invariants},
      "violations": [*self._violations],
      "num_violations": self._num_violations,
      "ledger": self._ledger and self._ledger.to_host(),
    }

  def restore(self, state: Mapping[str, Any]) -> None:
    """Goes on from a state of a checker of the same schedule and group size.

    Raises:
      LookupError, TypeError, ValueError, AttributeError: it is of another.
    """
    self._lifecycle.restore(state["lifecycle"])
    for one in self._invariants:
      one.restore(state["invariants"][type(one).__name__])
    self._violations = [str(line) for line in state["violations"]]
    self._num_violations = int(state["num_violations"])
    if self._ledger is not None:
      self._ledger.restore(state["ledger"])

  def finish(self) -> list[str]:
    """Returns all violations, in the order in which they were found."""
    for attempt in self._lifecycle.under_way:
      self._check_attempt(attempt)
    more = self._num_violations - len(self._violations)
    return self._violations + [f"and {more:,} more"] * (more > 0)

  def _handlers(self, *keys: str) -> list[invariant.Handler]:
    found = (one.handler(key) for one in self._invariants for key in keys)
    return [handle for handle in found if handle]

  def _check_attempt(self, attempt: lifecycle.AttemptRecord) -> None:
    for handle in self._of_attempts:
      handle(attempt)

  def _report(self, violation: str) -> None:
    self._num_violations += 1
    if self._num_violations <= _MAX_KEPT:
      self._violations.append(violation)


def violations(
  log: Iterable[event_log.Event], schedule: overlap.Overlap, group_size: int
) -> list[str]:
  """Returns every way in which a log breaks the promises of its schedule.

  Args:
    log: without the events that a restart supersedes: `event_log.surviving`.
  """
  checker = Checker(schedule, group_size)
  for event in log:
    checker.observe(event)
  return checker.finish()
