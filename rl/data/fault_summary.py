"""The most frequent fault of many episodes, in one line."""

import collections
from collections.abc import Iterable
from typing import NamedTuple

from rl.data import trajectory

_MAX_MESSAGE, _MAX_END = 160, 60


class FaultSummary(NamedTuple):
  """The most frequent fault.

  Attributes:
    status: as in the metric `faults/<status>`.
    episodes: number of episodes with this status.
    message: the most frequent one, in one line of ASCII.
  """

  status: str
  episodes: int
  message: str

  def __str__(self) -> str:
    return f"{self.status}: {self.message}" if self.message else self.status


def most_frequent(
  members: Iterable[trajectory.Trajectory],
) -> FaultSummary | None:
  """Returns the most frequent fault; None without faults."""
  messages: collections.defaultdict[str, list[str]] = collections.defaultdict(
    list
  )
  for member in members:
    if member.status.is_fault:
      messages[member.status.value].append(member.fault)
  if not messages:
    return None
  status, told = max(messages.items(), key=lambda item: len(item[1]))
  ((message, _),) = collections.Counter(told).most_common(1)
  return FaultSummary(status, len(told), _one_line(message))


def _one_line(message: str) -> str:
  line = " ".join(message.split()).encode("ascii", "backslashreplace").decode()
  if len(line) <= _MAX_MESSAGE:
    return line
  # The end tells the place.
  return f"{line[: _MAX_MESSAGE - _MAX_END - 3]}...{line[-_MAX_END:]}"
