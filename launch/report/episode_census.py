"""Counts the episodes of a log: lengths, faults by culprit, trained members."""

import collections
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rl.audit import event_log, token_ledger

CULPRITS = {
  "env_fault": "environment",
  "reward_fault": "reward",
  "engine_fault": "engine",
}
"""The part of a run that each status of a fault blames."""

_MAX_KINDS = 200
_MAX_GROUPS = 100_000
_MAX_TEXT = 300
_NUM_BINS = 24

Place = tuple[int, int]
"""A group and an attempt at it."""


class FaultKind(NamedTuple):
  """Faults that differ in numbers only.

  Attributes:
    culprit: see `CULPRITS`; the status itself of an unknown one.
    what: message of the first of them.
  """

  culprit: str
  source: str
  what: str
  episodes: int


class EpisodeCensus:
  """Lengths, faults and trained members; call `observe` with every event.

  Memory is flat: that of groups under way, of a bounded number of kinds of
  faults, and of the newest groups' members.

  Attributes:
    launched, trained: episodes by their length in ids, context included.
    used: indices of the trained members, by group; the newest groups only.
  """

  def __init__(self):
    self.launched: collections.Counter[int] = collections.Counter()
    self.trained: collections.Counter[int] = collections.Counter()
    self.used: dict[int, Sequence[int]] = {}
    self._lengths: dict[Place, dict[int, int]] = {}
    self._sources: dict[Place, str] = {}
    self._faults: collections.Counter[tuple[str, str, str]] = (
      collections.Counter()
    )
    self._first: dict[tuple[str, str, str], str] = {}

  def observe(self, event: event_log.Event) -> None:
    """Takes one event into account."""
    kind = event["kind"]
    if kind not in _SEEN:
      return
    place = event["group"], event["attempt"]
    match kind:
      case "submitted":
        self._sources[place] = event["source"]
      case "ended" | "aborted":
        self._lengths.setdefault(place, {})[event["index"]] = event["length"]
        self.launched[event["length"]] += 1
      case "fault":
        self._add_fault(event, self._sources.get(place, token_ledger.UNKNOWN))
      case "trained":
        lengths = self._lengths.get(place, {})
        self.trained.update(
          lengths[index] for index in event["used"] if index in lengths
        )
        self._keep_used(event)
        self._forget(place)
      case "dropped":
        self._forget(place)

  def _add_fault(self, event: event_log.Event, source: str) -> None:
    culprit = CULPRITS.get(event["status"], str(event["status"]))
    what = str(event["what"])[:_MAX_TEXT]
    key = culprit, source, re.sub(r"\d+", "0", what)
    if key not in self._faults and len(self._faults) >= _MAX_KINDS:
      key, what = (culprit, source, "other faults"), "other faults"
    self._faults[key] += 1
    self._first.setdefault(key, what)

  def _keep_used(self, event: event_log.Event) -> None:
    self.used[event["group"]] = event["used"]
    if len(self.used) > _MAX_GROUPS:
      del self.used[next(iter(self.used))]

  def _forget(self, place: Place) -> None:
    self._lengths.pop(place, None)
    self._sources.pop(place, None)

  @property
  def faults(self) -> list[FaultKind]:
    """Kinds of faults, the most frequent first."""
    return [
      FaultKind(culprit, source, self._first[culprit, source, pattern], count)
      for (culprit, source, pattern), count in self._faults.most_common()
    ]

  def lengths(self) -> list[tuple[int, int, int, int]]:
    """Returns bins of equal width: from, to, launched and trained episodes."""
    return _bins(self.launched, self.trained)


_SEEN = frozenset(
  {"submitted", "ended", "aborted", "fault", "trained", "dropped"}
)


def _bins(
  launched: Mapping[int, int], trained: Mapping[int, int]
) -> list[tuple[int, int, int, int]]:
  if not launched:
    return []
  low, high = min(launched), max(launched)
  width = max(1, -(-(high - low + 1) // _NUM_BINS))
  counts: list[list[Any]] = [
    [start, start + width - 1, 0, 0] for start in range(low, high + 1, width)
  ]
  for column, lengths in ((2, launched), (3, trained)):
    for length, count in lengths.items():
      if low <= length <= high:
        counts[(length - low) // width][column] += count
  return [tuple(row) for row in counts]
