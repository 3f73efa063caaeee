"""How much better each member of a group did: rewards -> advantages."""

import dataclasses
from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float32, Int

from rl import trajectory

Scope = Literal["group", "batch"]


@runtime_checkable
class Estimator(Protocol):
  """Frozen callable from the rewards of a group to advantages.

  One of scope "batch" is `Batchwise` as well.
  """

  @property
  def scope(self) -> Scope:
    """What is compared: a group, or all groups of an update.

    The advantages of scope "batch" are unknown until the last group of the
    update is there, so no gradient can be accumulated before.
    """
    ...

  @property
  def min_group_size(self) -> int:
    """Fewest members for which the estimate means anything."""
    ...

  def __call__(
    self, rewards: Float32[np.ndarray, " G"]
  ) -> Float32[np.ndarray, " G"]:
    """Returns one advantage a member."""
    ...


@runtime_checkable
class Batchwise(Estimator, Protocol):
  """An estimator that goes on from what it made of each group."""

  def over_batch(
    self, values: Float32[np.ndarray, " N"], tokens: Int[np.ndarray, " N"]
  ) -> Float32[np.ndarray, " N"]:
    """Returns the advantages of all trained members of an update.

    Args:
      values: what calling the estimator gave, group after group.
      tokens: sampled by each of them, at least 1.
    """
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
  def scope(self) -> Scope:
    """A group is compared with itself alone."""
    return "group"

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
  def scope(self) -> Scope:
    """Nothing is compared, so a group is enough."""
    return "group"

  @property
  def min_group_size(self) -> int:
    """One: members are not compared."""
    return 1

  def __call__(
    self, rewards: Float32[np.ndarray, " G"]
  ) -> Float32[np.ndarray, " G"]:
    """Returns r - baseline."""
    return (rewards - np.float32(self.baseline)).astype(np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Whitened:
  """Reward minus the group's mean, whitened over all groups of an update.

  A group that varies little stays small, as no deviation of its own divides
  it. An update in which nothing varies gets advantages of exactly 0.

  Attributes:
    over: mean and variance are over sampled "tokens", each with the value of
      its member, or over "members".
    eps: added to the standard deviation.

  Source: REINFORCE++ with baseline, arXiv 2501.03262.
  """

  over: Literal["tokens", "members"] = "tokens"
  eps: float = 1e-8

  def validate(self) -> None:
    """Raises ValueError unless eps is a number >= 0."""
    if not 0 <= self.eps < np.inf:
      raise ValueError(f"Whitened: eps={self.eps} must be at least 0")

  @property
  def scope(self) -> Scope:
    """All groups of an update have one mean and one deviation."""
    return "batch"

  @property
  def min_group_size(self) -> int:
    """Two: a single reward is its own mean."""
    return 2

  def __call__(
    self, rewards: Float32[np.ndarray, " G"]
  ) -> Float32[np.ndarray, " G"]:
    """Returns r - mean."""
    if np.all(rewards == rewards[0]):
      return np.zeros_like(rewards)
    wide = rewards.astype(np.float64)
    return (wide - wide.mean()).astype(np.float32)

  def over_batch(
    self, values: Float32[np.ndarray, " N"], tokens: Int[np.ndarray, " N"]
  ) -> Float32[np.ndarray, " N"]:
    """Returns (x - mean) / (std + eps), with mean and std of the update."""
    if np.all(values == values[0]):
      return np.zeros_like(values)
    weights = tokens if self.over == "tokens" else None
    wide = values.astype(np.float64)
    centred = wide - np.average(wide, weights=weights)
    std = np.sqrt(np.average(centred**2, weights=weights))
    return (centred / (std + self.eps)).astype(np.float32)


def usable(group: trajectory.Group) -> Bool[np.ndarray, " G"]:
  """Returns which members have a reward to compare and a token to train."""
  return np.array(
    [
      t.status.trainable and t.reward is not None and t.num_sampled > 0
      for t in group.trajectories
    ],
    bool,
  )


def of_groups(
  groups: Sequence[trajectory.Group], estimator: Estimator
) -> list[tuple[Float32[np.ndarray, " _"], Bool[np.ndarray, " _"]]]:
  """Returns (advantages, trained) of each group of an update.

  Args:
    groups: all of the update if the estimator's scope is "batch"; else it does
      not matter how many.

  Raises:
    TypeError: the scope is "batch", but the estimator is not `Batchwise`.
  """
  pairs = [of_group(group, estimator) for group in groups]
  if estimator.scope == "group":
    return pairs
  if not isinstance(estimator, Batchwise):
    raise TypeError(
      f"{type(estimator).__name__} has scope batch, but no method over_batch"
    )
  if not any(trained.any() for _, trained in pairs):
    return pairs
  sampled = [[t.num_sampled for t in g.trajectories] for g in groups]
  trained = np.concatenate([trained for _, trained in pairs])
  values = np.concatenate([values for values, _ in pairs])
  values[trained] = estimator.over_batch(
    values[trained], np.concatenate(sampled)[trained]
  )
  ends = np.cumsum([len(group.trajectories) for group in groups])[:-1]
  wholes = np.split(values, ends)
  return [(whole, used) for whole, (_, used) in zip(wholes, pairs, strict=True)]


def of_group(
  group: trajectory.Group, estimator: Estimator
) -> tuple[Float32[np.ndarray, " G"], Bool[np.ndarray, " G"]]:
  """Returns (advantages, trained) of a group's members.

  A member that ended in a fault has no reward: it counts in no mean and is not
  trained. When fewer than `min_group_size` members are left none is.

  What an estimator of scope "batch" gives here is not final: see `of_groups`.
  """
  trained = usable(group)
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
