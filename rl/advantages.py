"""How much better each member of a group did: rewards -> advantages."""

import dataclasses
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float32

from rl import trajectory


@runtime_checkable
class Estimator(Protocol):
  """Frozen callable from the rewards of a group to advantages."""

  @property
  def min_group_size(self) -> int:
    """Fewest members for which the estimate means anything."""
    ...

  def __call__(
    self, rewards: Float32[np.ndarray, " G"]
  ) -> Float32[np.ndarray, " G"]:
    """Returns one advantage a member."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grpo:
  """Reward minus the group's mean, over the group's standard deviation.

  A group whose rewards are all equal gets advantages of exactly 0.

  Attributes:
    ddof: 1 divides the variance by G - 1, as most implementations do.
    eps: added to the standard deviation.

  Source: DeepSeekMath, arXiv 2402.03300, section 4.1.
  """

  ddof: int = 1
  eps: float = 1e-6

  def validate(self) -> None:
    """Raises ValueError unless ddof is 0 or 1 and eps is a number >= 0."""
    if self.ddof not in (0, 1) or not 0 <= self.eps < np.inf:
      raise ValueError(
        f"Grpo: ddof={self.ddof} must be 0 or 1 and eps={self.eps} at least 0"
      )

  @property
  def min_group_size(self) -> int:
    """Two: a single reward has no deviation."""
    return 2

  def __call__(
    self, rewards: Float32[np.ndarray, " G"]
  ) -> Float32[np.ndarray, " G"]:
    """Returns (r - mean) / (std + eps)."""
    if np.all(rewards == rewards[0]):
      return np.zeros_like(rewards)
    wide = rewards.astype(np.float64)
    centred = wide - wide.mean()
    scaled = centred / (wide.std(ddof=self.ddof) + self.eps)
    return scaled.astype(np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reinforce:
  """Reward minus a constant: needs no group, and has more variance.

  Source: Williams 1992, with a fixed baseline.
  """

  baseline: float = 0.0

  @property
  def min_group_size(self) -> int:
    """One: members are not compared."""
    return 1

  def __call__(
    self, rewards: Float32[np.ndarray, " G"]
  ) -> Float32[np.ndarray, " G"]:
    """Returns r - baseline."""
    return (rewards - np.float32(self.baseline)).astype(np.float32)


def of_group(
  group: trajectory.Group, estimator: Estimator
) -> tuple[Float32[np.ndarray, " G"], Bool[np.ndarray, " G"]]:
  """Returns (advantages, trained) of a group's members.

  A member that ended in a fault has no reward: it counts in no mean and is not
  trained. When fewer than `min_group_size` members are left none is.
  """
  trained = np.array(
    [t.status.trainable and t.num_sampled > 0 for t in group.trajectories]
  )
  advantages = np.zeros(len(trained), np.float32)
  if trained.sum() < estimator.min_group_size:
    return advantages, np.zeros_like(trained)
  rewards = [
    member.reward
    for member, used in zip(group.trajectories, trained, strict=True)
    if used
  ]
  advantages[trained] = estimator(np.asarray(rewards, np.float32))
  return advantages, trained
