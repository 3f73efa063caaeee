"""How many groups may be under way: pure accounting, no clock, no task."""

from rl import overlap as overlap_lib
from rl import trajectory


class StalenessGate:
  """Admits group i while i < (version + eta + 1) * R.

  With consumption in submission order group i trains at version i // R, so its
  staleness never exceeds eta, however long it waits in a queue.

  The producer calls `may_admit` and `admit`; the publisher's caller calls
  `release` once every engine serves the new version, and not before.

  Args:
    total: groups of the whole run; none is admitted beyond them.
    submitted, version: where a resumed run goes on.
  """

  def __init__(
    self,
    schedule: overlap_lib.Overlap,
    total: int,
    submitted: int = 0,
    version: int = 0,
  ):
    self._round = schedule.groups_per_round
    self._eta = schedule.max_staleness
    self._total = total
    self.submitted = submitted
    self.version = trajectory.PolicyVersion(version)

  @property
  def limit(self) -> int:
    """Groups that may have been submitted by now."""
    window = (self.version + self._eta + 1) * self._round
    return min(window, self._total)

  def may_admit(self) -> bool:
    """Whether one more group keeps the bound."""
    return self.submitted < self.limit

  def admit(self) -> int:
    """Returns the id of the next group.

    Raises:
      RuntimeError: it would break the bound.
    """
    if not self.may_admit():
      raise RuntimeError(
        f"group {self.submitted} is beyond the limit of {self.limit}"
      )
    self.submitted += 1
    return self.submitted - 1

  def release(self, version: trajectory.PolicyVersion) -> None:
    """Opens the window for a version that every engine acknowledged."""
    if version != self.version + 1:
      raise RuntimeError(
        f"version {version} was released after version {self.version}"
      )
    self.version = version

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
