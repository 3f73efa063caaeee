"""Whether a log keeps the promises of its schedule, in one pass.

  event --> attempts (the order of transitions) --> group_invariants
    |       when an attempt is over                 (pure functions of it)
    +-----> queue_invariants (gate, buffer), run_invariants (rounds, publishes)

A log may end anywhere: what is unfinished breaks nothing.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator

from rl.audit import (
  event_log,
  group_invariants,
  invariant,
  lifecycle,
  queue_invariants,
  round_invariants,
)
from rl.schedule import overlap

_MOST = 1000
_WATCHERS: tuple[type[invariant.Invariant], ...] = (
  *queue_invariants.INVARIANTS,
  *round_invariants.INVARIANTS,
)
_ORDER = "Transitions come in their order, and none twice."


class Checker:
  """Takes a log event by event and keeps what is broken.

  Memory is that of the groups under way and of the first 1,000 violations.
  Call `feed` with every event, by hand or as a listener of the log, and
  `finish` once.

  Args:
    schedule: its promises are checked.
    group_size: G.
  """

  def __init__(self, schedule: overlap.Overlap, group_size: int):
    self._schedule = schedule
    self._group_size = group_size
    self._attempts = lifecycle.Attempts(
      group_size + schedule.redundancy.extra_members, self._settle
    )
    self._rules = [r for r in group_invariants.RULES if r.binds(schedule)]
    self._found: list[str] = []
    self._num_found = 0
    self._watchers = [w(schedule) for w in _WATCHERS if w.binds(schedule)]
    self._of_kind: dict[str, list[_Watch]] = {}

  @property
  def checks(self) -> list[str]:
    """What is checked, a line each."""
    documented = [rule.broken for rule in self._rules] + [
      type(watcher) for watcher in self._watchers
    ]
    return [_ORDER, *((x.__doc__ or "").split("\n")[0] for x in documented)]

  def feed(self, event: event_log.Event) -> None:
    """Checks one event."""
    if misplaced := self._attempts.feed(event):
      self._note([misplaced.says])
    kind = event["kind"]
    if kind not in self._of_kind:
      self._of_kind[kind] = [*_watches(self._watchers, kind)]
    for watch in self._of_kind[kind]:
      self._note(watch(event))

  def finish(self) -> list[str]:
    """Returns all violations, in the order in which they were found."""
    for attempt in self._attempts.under_way:
      self._settle(attempt)
    more = self._num_found - len(self._found)
    return self._found + [f"and {more:,} more"] * (more > 0)

  def _settle(self, attempt: lifecycle.Attempt) -> None:
    for rule in self._rules:
      self._note(rule.broken(attempt, self._schedule, self._group_size))

  def _note(self, found: Iterable[str]) -> None:
    for violation in found:
      self._num_found += 1
      if self._num_found <= _MOST:
        self._found.append(violation)


_Watch = Callable[[event_log.Event], Iterator[str]]


def _watches(watchers: Iterable[object], kind: str) -> Iterator[_Watch]:
  for watcher, name in itertools.product(watchers, ("every", kind)):
    if hasattr(watcher, name):
      yield getattr(watcher, name)


def violations(
  log: Iterable[event_log.Event], schedule: overlap.Overlap, group_size: int
) -> list[str]:
  """Returns every way in which a log breaks the promises of its schedule.

  Args:
    log: without what a restart supersedes: `event_log.surviving`.
  """
  checker = Checker(schedule, group_size)
  for event in log:
    checker.feed(event)
  return checker.finish()
