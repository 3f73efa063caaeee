"""Dynamic sampling and other filters of the groups that are trained."""

import dataclasses
from collections.abc import Callable
from typing import Literal

from rl.algorithms import advantages, group_selection
from rl.data import trajectory
from rl.settings import checks

Dropped = Literal["faults", "zero_variance"]
GroupFilter = Callable[[trajectory.Group, int], Dropped | None]
"""(group, refills) -> the reason to drop it, or None to train it; `refills`
counts the attempts in its place that were dropped before."""


def keep_all(group: trajectory.Group, refills: int) -> None:
  """Drops nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicSampling:
  """Drops groups that teach nothing, so that others take their place.

  Attributes:
    max_refills: how often a place is filled again; the group after that is
      trained whatever it is like, so that every round ends. Groups that were
      too old for the bound do not count.
    min_spread: rewards that differ by no more than this count as equal.

  Source: DAPO, arXiv 2503.14476, section 3.2.
  """

  max_refills: int = 4
  min_spread: float = 0.0

  def validate(self) -> None:
    """Raises ValueError on a number below its bound."""
    out = "use algorithm.dynamic_sampling=none to train every group"
    checks.at_least(self, 1, "max_refills", out=out)
    checks.finite_at_least(self, 0, "min_spread")

  def reason(
    self, group: trajectory.Group, estimator: advantages.Estimator
  ) -> Dropped | None:
    """Returns the reason not to train a group, or None.

    Rewards count as they were graded, before shaping. The estimator is asked if
    it learns from equal rewards all the same, as from turns.
    """
    graded = [
      (group_selection.return_inputs(member), reward)
      for member, used in zip(
        group.trajectories, group_selection.usable(group), strict=True
      )
      if used and (reward := member.graded_reward) is not None
    ]
    if len(graded) < max(estimator.min_group_size, 1):
      return "faults"
    rewards = [reward for _, reward in graded]
    if max(rewards) - min(rewards) > self.min_spread:
      return None
    equal = [member._replace(reward=rewards[0]) for member, _ in graded]
    return "zero_variance" if estimator.zero_variance(equal) else None


def group_filter(
  sampling: DynamicSampling | None, estimator: advantages.Estimator
) -> GroupFilter:
  """Returns a filter that drops a group while its place has refills left.

  Args:
    sampling: None drops nothing.
  """
  if sampling is None:
    return keep_all

  def reason(group: trajectory.Group, refills: int) -> Dropped | None:
    if refills >= sampling.max_refills:
      return None
    return sampling.reason(group, estimator)

  return reason
