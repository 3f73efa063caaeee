"""The staleness gate: admits groups within the bound. No clock, no task."""

from rl.schedule import overlap as overlap_lib


class StalenessGate:
  """Admits a group while fewer than (version + eta + 1) * R are admitted.

  With consumption in submission order group i trains at version i // R, so its
  staleness never exceeds eta, however long it waits in a queue.
  `redundancy.extra_groups` come on top; cancelled groups no longer count.

  `version` is that which every engine serves, not the newest trained. A group
  of round v + eta that began while version v is trained but still travels has
  tokens of v - 1, and trains at v + eta: it would break the bound by one. So
  the time of a transfer is part of the way round, hidden or not: eta + 1 rounds
  take a rollout, a training and a transfer, or longer.

  The producer calls `may_admit`, `admit` and `cancel`, and `release` once every
  engine serves the new version, not before.

  Args:
    total: groups that the whole run will train.
    admitted, next_group, version: state of a resumed run.
  """

  def __init__(
    self,
    schedule: overlap_lib.Overlap,
    total: int,
    admitted: int = 0,
    version: int = 0,
    next_group: int | None = None,
  ):
    self._round = schedule.groups_per_round
    self._eta = schedule.max_staleness
    self._extra = schedule.redundancy.extra_groups
    self._total = total
    self._cancelled = 0
    self.admitted = admitted
    self.next_group = admitted if next_group is None else next_group
    self.version = version

  @property
  def limit(self) -> int:
    """Groups that may have been admitted by now, without the cancelled."""
    if self.version * self._round >= self._total:
      return self._total
    window = (self.version + self._eta + 1) * self._round
    return min(window, self._total) + self._extra - self._cancelled

  def may_admit(self) -> bool:
    """Returns True if one more group keeps the bound."""
    return self.admitted < self.limit

  def admit(self) -> int:
    """Returns the id of the next group.

    Raises:
      RuntimeError: it would break the bound.
    """
    if not self.may_admit():
      raise RuntimeError(
        f"group {self.next_group} is beyond the limit of {self.limit}"
      )
    self.admitted += 1
    self.next_group += 1
    return self.next_group - 1

  def cancel(self, version: int) -> None:
    """Forgets one admitted group that its version does not need.

    No group takes its place while that version lasts.
    """
    self.admitted -= 1
    if version == self.version:
      self._cancelled += 1

  def release(self, version: int) -> None:
    """Opens the window for a version that every engine serves."""
    if version != self.version + 1:
      raise RuntimeError(
        f"version {version} was released after version {self.version}"
      )
    self.version = version
    self._cancelled = 0

  def too_old(self, first_version: int, trained_version: int) -> bool:
    """Returns True if training a group now would break the bound."""
    return trained_version - first_version > self._eta

  def check(
    self, first_version: int, trained_version: int, group_id: int
  ) -> None:
    """Raises RuntimeError when a group is staler than the bound."""
    staleness = trained_version - first_version
    if not 0 <= staleness <= self._eta:
      raise RuntimeError(
        f"group {group_id}: trained at version {trained_version}, first "
        f"token from version {first_version}; the bound is {self._eta}"
      )
