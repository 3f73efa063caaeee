"""The form of an invariant: a promise, and the events that can break it."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

from rl.audit import snapshot
from rl.schedule import overlap

Handler = Callable[[Any], None]
ROUNDING_S = 1e-5
"""By so much the times of two events may be in the wrong order."""


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

  Attributes:
    RECORDS: dataclasses in its state.
  """

  RECORDS: ClassVar[tuple[type, ...]] = ()

  def __init__(self, context: Context):
    self.schedule, self.group_size, self.report = context

  def handler(self, key: str) -> Handler | None:
    """Returns the method `_on_KEY`, if there is one."""
    return getattr(self, f"_on_{key}", None)

  def to_host(self) -> dict[str, Any]:
    """Returns its state as JSON data."""
    return snapshot.of(self, Context._fields)

  def restore(self, state: Mapping[str, Any]) -> None:
    """Goes on from a state; see `snapshot.restore` for errors."""
    snapshot.restore(self, state, *self.RECORDS, without=Context._fields)

  @staticmethod
  def binds(schedule: overlap.Overlap) -> bool:
    """Returns True for schedules that make this promise; most do."""
    del schedule
    return True
