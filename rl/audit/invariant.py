"""The form of an invariant: a promise, and the events that can break it."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rl.schedule import overlap

EVERY_EVENT = "every event"
ATTEMPT_OVER = "attempt over"

Handler = Callable[[Any], None]


class Context(NamedTuple):
  """The run that is checked.

  Attributes:
    group_size: G.
    report: is given a sentence for each violation.
  """

  schedule: overlap.Overlap
  group_size: int
  report: Callable[[str], None]


class Invariant:
  """A promise of a schedule, stated by the first line of its docstring.

  A subclass keeps a few numbers, or the state of groups under way, so its
  memory does not grow with the log.

  Attributes:
    handles: methods by the kind of event that each is called with. Two keys
      stand for more: an `EVERY_EVENT` method is called with all events, an
      `ATTEMPT_OVER` method with each `lifecycle.AttemptRecord` that is over.
  """

  handles: Mapping[str, Handler]

  def __init__(self, context: Context):
    self.schedule, self.group_size, self.report = context

  @staticmethod
  def binds(schedule: overlap.Overlap) -> bool:
    """Returns True for schedules that make this promise; most do."""
    del schedule
    return True
