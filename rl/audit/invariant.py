"""The form of an invariant: a promise, and the events that can break it."""

from collections.abc import Callable
from typing import Any, NamedTuple

from rl.schedule import overlap

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

  Methods are called by name: `_on_KIND` with each event of that kind,
  `_on_event` with every event, `_on_unknown` with each of an unknown kind,
  `_on_attempt_over` with each `lifecycle.AttemptRecord` that is over.
  """

  def __init__(self, context: Context):
    self.schedule, self.group_size, self.report = context

  def handler(self, key: str) -> Handler | None:
    """Returns the method `_on_KEY`, if there is one."""
    return getattr(self, f"_on_{key}", None)

  @staticmethod
  def binds(schedule: overlap.Overlap) -> bool:
    """Returns True for schedules that make this promise; most do."""
    del schedule
    return True
