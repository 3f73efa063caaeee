"""The curriculum: skips tasks by their recent pass rates."""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from envs import base
from rl.settings import checks

_Plays = tuple[tuple[int, int], ...]  # (passed, graded) of each, oldest first


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassRate:
  """Skips tasks that are too easy or too hard at present.

  A new task is taken. A task whose pass rate over its last `window` groups is
  outside [low, high] is skipped when it comes again, except every `revisit`-th
  time: the policy may have changed.

  Attributes:
    success: an episode passes when its reward is at least this.
    max_skips: tasks skipped in a row; the next is taken whatever its rate.
    max_tasks: remembered tasks; the one played longest ago is forgotten first.
  """

  low: float = 0.05
  high: float = 0.95
  window: int = 2
  revisit: int = 4
  success: float = 1.0
  max_skips: int = 100
  max_tasks: int = 100_000

  def validate(self) -> None:
    """Raises ValueError on an empty range or a count that filters nothing."""
    if not 0 <= self.low <= self.high <= 1:
      checks.refuse(self, "low", "high", why="needs 0 <= low <= high <= 1")
    out = "for no filter set curriculum=none"
    checks.at_least(self, 1, "window", "max_skips", "max_tasks", out=out)
    checks.at_least(self, 2, "revisit", out=out)
    checks.not_nan(self, "success")


class Curriculum:
  """Pass rates of the tasks played so far. Pure bookkeeping.

  The stream of tasks calls `choose` for each draw, and `learned` when a group
  was graded; `state` and `restore` go through a checkpoint.
  """

  def __init__(self, settings: PassRate):
    self._settings = settings
    # The one played longest ago is first.
    self._plays: collections.OrderedDict[str, _Plays] = (
      collections.OrderedDict()
    )
    self._skipped: dict[str, int] = {}

  def choose(self, draw: Callable[[], base.Task]) -> base.Task:
    """Returns the first task drawn that is worth playing.

    After `max_skips` skipped tasks the next one is taken.
    """
    for _ in range(self._settings.max_skips):
      task = draw()
      if not self._skips(task.id):
        break
    else:
      task = draw()
    self._skipped.pop(task.id, None)
    return task

  def _skips(self, task_id: str) -> bool:
    """Returns True if a drawn task is skipped, and counts it then."""
    rate = self.rate(task_id)
    if rate is None or self._settings.low <= rate <= self._settings.high:
      return False
    count = self._skipped.get(task_id, 0) + 1
    self._skipped[task_id] = count
    return count < self._settings.revisit

  def rate(self, task_id: str) -> float | None:
    """Returns the recent pass rate of a task; None if it was never graded."""
    plays = self._plays.get(task_id)
    if plays is None:
      return None
    return sum(passed for passed, _ in plays) / sum(count for _, count in plays)

  def learned(self, task_id: str, rewards: Sequence[float | None]) -> None:
    """Adds the rewards of a group; None, of a faulty member, is ignored."""
    graded = [reward for reward in rewards if reward is not None]
    if not graded:
      return
    passed = sum(reward >= self._settings.success for reward in graded)
    plays = (*self._plays.pop(task_id, ()), (passed, len(graded)))
    self._plays[task_id] = plays[-self._settings.window :]
    if len(self._plays) > self._settings.max_tasks:
      oldest, _ = self._plays.popitem(last=False)
      self._skipped.pop(oldest, None)

  @property
  def state(self) -> dict[str, Any]:
    """JSON data; the order of the tasks in it counts."""
    return {"plays": dict(self._plays), "skipped": dict(self._skipped)}

  def restore(self, state: Mapping[str, Any]) -> None:
    """Takes over a saved state, under the present settings."""
    self._plays = collections.OrderedDict(
      (task_id, tuple((passed, count) for passed, count in plays))
      for task_id, plays in state["plays"].items()
    )
    self._skipped = dict(state["skipped"])
