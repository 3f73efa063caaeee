"""Groups between rollout and learner: in flight -> ready -> taken -> gone."""

from collections.abc import Mapping

from envs import base
from rl import trajectory


class GroupBuffer:
  """Hands groups out in the order in which they were submitted.

  Pure bookkeeping: the producer calls `submit`, each rollout `put`, the
  learner's loop `take` and, once an optimizer step holds them, `commit`. What
  was taken but not committed is still here for a checkpoint.
  """

  def __init__(self, next_group: int = 0):
    self._next = next_group
    self._committed = next_group
    self._tasks: dict[int, base.Task] = {}
    self._ready: dict[int, trajectory.Group] = {}

  def submit(self, group_id: int, task: base.Task) -> None:
    """Notes a group whose rollout starts now."""
    self._tasks[group_id] = task

  def put(self, group: trajectory.Group) -> None:
    """Notes a finished group, rewards and all.

    Raises:
      RuntimeError: it was never submitted, or it was put before.
    """
    if group.group_id not in self._tasks:
      raise RuntimeError(f"group {group.group_id} is not in flight")
    del self._tasks[group.group_id]
    self._ready[group.group_id] = group

  def restore(self, group: trajectory.Group) -> None:
    """Takes a group that was finished before a restart."""
    self._ready[group.group_id] = group

  def has(self, count: int) -> bool:
    """Whether the next `count` groups in order are all ready."""
    wanted = range(self._next, self._next + count)
    return all(i in self._ready for i in wanted)

  def missing(self, count: int) -> list[int]:
    """Ids of the next `count` groups that are not ready."""
    wanted = range(self._next, self._next + count)
    return [i for i in wanted if i not in self._ready]

  def take(self, count: int) -> list[trajectory.Group]:
    """Returns the next `count` groups, which must be ready."""
    groups = [self._ready[self._next + i] for i in range(count)]
    self._next += count
    return groups

  def commit(self) -> None:
    """Forgets the taken groups: an optimizer step holds them now."""
    for i in range(self._committed, self._next):
      del self._ready[i]
    self._committed = self._next

  @property
  def untrained(self) -> Mapping[int, trajectory.Group]:
    """Finished groups that no optimizer step holds yet."""
    return dict(self._ready)

  @property
  def in_flight(self) -> Mapping[int, base.Task]:
    """Tasks of the groups whose rollout goes on."""
    return dict(self._tasks)
