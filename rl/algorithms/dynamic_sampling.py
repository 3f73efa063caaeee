"""Which finished groups are not worth training: dynamic sampling."""

import dataclasses
from typing import Literal, Protocol, runtime_checkable

from rl.algorithms import advantage_estimation, advantages, reward_shaping
from rl.data import trajectory
from rl.settings import checks

Reason = Literal["faults", "zero_variance"]


@runtime_checkable
class Unfit(Protocol):
  """Says which groups to drop."""

  def __call__(self, group: trajectory.Group, refills: int) -> Reason | None:
    """Returns why a group is dropped; None when it is to be trained.

    Args:
      refills: attempts in its place that were dropped so before.
    """
    ...


def take_all(group: trajectory.Group, refills: int) -> None:
  """Drops nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicSampling:
  """Drops groups that teach nothing, so that others take their place.

  Attributes:
    max_refills: how often a place is filled again; what comes then is trained
      whatever it is like, so that every round ends. What was too old for the
      bound does not count.
    min_spread: rewards that differ by no more than this count as equal.

  Source: DAPO, arXiv 2503.14476, section 3.2.
  """

  max_refills: int = 4
  min_spread: float = 0.0

  def validate(self) -> None:
    """Raises ValueError on a number below its bound."""
    out = "use algorithm.sampling=none to train every group"
    checks.at_least(self, 1, "max_refills", out=out)
    checks.finite_at_least(self, 0, "min_spread")

  def reason(
    self, group: trajectory.Group, estimator: advantages.Estimator
  ) -> Reason | None:
    """Returns why a group should not be trained; None when it should.

    Rewards count as they were graded, before shaping. What an estimator learns
    from equal rewards too, as from turns, is asked of it.
    """
    graded = [
      (advantage_estimation.played(member), reward)
      for member, used in zip(
        group.trajectories, advantage_estimation.usable(group), strict=True
      )
      if used and (reward := reward_shaping.unshaped(member)) is not None
    ]
    if len(graded) < max(estimator.min_group_size, 1):
      return "faults"
    rewards = [reward for _, reward in graded]
    if max(rewards) - min(rewards) > self.min_spread:
      return None
    equal = [member._replace(reward=rewards[0]) for member, _ in graded]
    return "zero_variance" if estimator.flat(equal) else None


def unfit(
  sampling: DynamicSampling | None, estimator: advantages.Estimator
) -> Unfit:
  """Returns what drops a group as long as its place has refills left.

  Args:
    sampling: None drops nothing.
  """
  if sampling is None:
    return take_all

  def reason(group: trajectory.Group, refills: int) -> Reason | None:
    if refills >= sampling.max_refills:
      return None
    return sampling.reason(group, estimator)

  return reason
