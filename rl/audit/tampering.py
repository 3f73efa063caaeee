"""Tampered logs: a test of the checks, event by event and field by field.

Each change leaves out one event, or gives one field of it another value. The
promises that a log is checked for should make most of them impossible.
"""

import collections
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rl.audit import checker, event_log, token_ledger
from rl.schedule import overlap

_FAR_S = 1000.0


class Change(NamedTuple):
  """The kind of event that is changed, and the field; "" is all of it."""

  kind: str
  field: str


class Noticed(NamedTuple):
  """A number of changes, and those of them that broke a promise."""

  found: int
  tried: int


def changes(
  log: Sequence[event_log.Event], most: int | None = None
) -> Iterator[tuple[Change, list[event_log.Event]]]:
  """Yields every tampered log of one change.

  Args:
    most: events of a kind that are changed, spread over the log; None is all.
  """
  places: dict[str, list[int]] = collections.defaultdict(list)
  for i, event in enumerate(log):
    places[event["kind"]].append(i)
  for kind, found in sorted(places.items()):
    stride = -(-len(found) // most) if most else 1
    for i in found[::stride]:
      before, event, after = log[:i], log[i], log[i + 1 :]
      yield Change(kind, ""), [*before, *after]
      for field in event:
        changed = event | {field: _other(event[field])}
        yield Change(kind, field), [*before, changed, *after]


def _other(value: Any) -> Any:
  """Returns another value of the same type."""
  match value:
    case bool():
      return not value
    case int():
      return value + 1
    case float():
      return value + _FAR_S
    case str():
      return f"{value}x"
    case [[version, count], *rest]:
      return [[version + 1, count], *rest]
    case [_, *rest]:
      return rest
  return [0]


def notice(
  log: Sequence[event_log.Event],
  schedule: overlap.Overlap,
  group_size: int,
  most: int | None = None,
) -> dict[Change, Noticed]:
  """Returns how many changes of each sort the checks of a log find.

  Args:
    log: breaks no promise itself.
  """
  counts: dict[Change, Noticed] = collections.defaultdict(lambda: Noticed(0, 0))
  for change, tampered in changes(log, most):
    found, tried = counts[change]
    is_found = _is_noticed(tampered, schedule, group_size)
    counts[change] = Noticed(found + is_found, tried + 1)
  return dict(counts)


def _is_noticed(
  log: Sequence[event_log.Event], schedule: overlap.Overlap, group_size: int
) -> bool:
  try:
    kept = list(event_log.surviving(log))
    broken = checker.violations(kept, schedule, group_size)
    return bool(broken or token_ledger.of(kept).error)
  except LookupError:  # A reader says that the log cannot be one.
    return True
