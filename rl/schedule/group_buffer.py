"""The buffer between rollout and learner.

submit -> in flight -> put -> ready -> take -> taken -> commit -> forgotten
"""

import dataclasses
import itertools
from collections.abc import Mapping

from envs import base
from rl.data import trajectory


@dataclasses.dataclass(frozen=True, slots=True)
class Attempt:
  """A task played in the place of a group, and the number of the attempt.

  Attributes:
    number: attempts dropped there before.
    stale: how many of the last of them, in a row, were too old.
    refills: how many of them were not worth training.
    past: its members so far, of one that was in flight before a restart.
  """

  task: base.Task
  number: int = 0
  stale: int = 0
  refills: int = 0
  past: trajectory.OpenGroup | None = None


class GroupBuffer:
  """Hands groups out, in the order of submission or of completion.

  Pure bookkeeping: the producer calls `submit`, `put` and `withdraw`, the
  learner's loop `take` and, once an optimizer step holds the groups, `commit`.
  Groups that are taken but not committed are still here for a checkpoint.

  Args:
    next_group: first in the order of submission.
    in_order: hand out in the order of submission, not of completion.
  """

  def __init__(self, next_group: int = 0, *, in_order: bool = True):
    self._next = next_group
    self._in_order = in_order
    self._attempts: dict[int, Attempt] = {}
    self._ready: dict[int, trajectory.Group] = {}
    self._taken: dict[int, trajectory.Group] = {}

  def submit(self, group_id: int, attempt: Attempt) -> None:
    """Adds a group whose rollout starts now."""
    self._attempts[group_id] = attempt

  def put(self, group: trajectory.Group) -> None:
    """Adds a finished group with its rewards.

    Raises:
      RuntimeError: it was never submitted, or it was put before.
    """
    if group.group_id not in self._attempts:
      raise RuntimeError(f"group {group.group_id} is not in flight")
    del self._attempts[group.group_id]
    self._ready[group.group_id] = group

  def restore(self, group: trajectory.Group) -> None:
    """Adds a group that was finished before a restart."""
    self._ready[group.group_id] = group

  def withdraw(self, group_id: int) -> None:
    """Forgets a group that is in flight or ready: it will not be trained."""
    self._attempts.pop(group_id, None)
    self._ready.pop(group_id, None)

  def _prefix(self, most: int) -> list[int]:
    """Returns ids of the next groups, as far as they are ready."""
    if not self._in_order:
      return list(self._ready)[:most]
    following = range(self._next, self._next + most)
    return list(itertools.takewhile(self._ready.__contains__, following))

  def has(self, count: int) -> bool:
    """Returns True if the next `count` groups are all ready."""
    return len(self._prefix(count)) == count

  def fitting(self, most: int, tokens: int) -> int:
    """Returns the number of next groups for a budget of `tokens`.

    They are the longest ready prefix that fits, or the first group alone when
    it is larger than the budget. 0: it is not ready.
    """
    chosen = self._prefix(most)
    sizes = (self._ready[i].num_trainable_ids for i in chosen)
    fit = sum(total <= tokens for total in itertools.accumulate(sizes))
    return max(fit, min(len(chosen), 1))

  def missing(self, count: int) -> list[int]:
    """Returns ids of groups that the next `count` may still wait for."""
    if not self._in_order:
      return sorted(self._attempts)
    following = range(self._next, self._next + count)
    return [i for i in following if i not in self._ready]

  def take(self, count: int) -> list[trajectory.Group]:
    """Returns the next `count` groups, which must be ready."""
    chosen = self._prefix(count)
    if len(chosen) < count:
      raise RuntimeError(f"of {count} groups only {chosen} are ready")
    groups = [self._ready.pop(i) for i in chosen]
    self._taken |= {group.group_id: group for group in groups}
    self._next += count
    return groups

  def commit(self) -> None:
    """Forgets the taken groups: an optimizer step has used them."""
    self._taken.clear()

  @property
  def ready(self) -> Mapping[int, trajectory.Group]:
    """Finished groups that are not taken, in the order of completion."""
    return dict(self._ready)

  @property
  def untrained(self) -> Mapping[int, trajectory.Group]:
    """Finished groups that no optimizer step has used yet."""
    return self._taken | self._ready

  @property
  def in_flight(self) -> Mapping[int, Attempt]:
    """Attempts that are being played."""
    return dict(self._attempts)
