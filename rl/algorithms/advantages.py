"""Advantages of the members of a group, one for all tokens of a member.

Estimators that tell turns or tokens apart are in `token_advantages`;
`group_selection` calls both.

Bias is stated on policy, for losses that add up tokens over a constant
(`loss_aggregation.Constant`): then the mean over members of the sum of
A_t grad log pi_t estimates the gradient of the expected reward, times the
factor named. A biased estimate has a part aside of that gradient besides, as
`benchmarks/estimator_bias.py` measures it on a small task with a known one. All
that is for members of one conversation: where they lead several, the loss
divides by the number of conversations.

Letters: G members, T sampled tokens.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Float64

from rl.algorithms import returns as returns_lib
from rl.settings import checks

Scope = Literal["group", "batch"]
Pool = Literal["group", "task"]
Members = Sequence[returns_lib.EpisodeReturnInputs]
Rewards = Float64[np.ndarray, " G"]


class Estimate(NamedTuple):
  """Advantages of the T sampled tokens of some members.

  Attributes:
    advantages: one array a member.
    returns: targets of the critic, likewise; None without a critic.
  """

  advantages: list[Float[np.ndarray, " _"]]
  returns: list[Float[np.ndarray, " _"]] | None = None


@runtime_checkable
class Estimator(Protocol):
  """Frozen callable from the members of a group to their advantages.

  By default it compares groups of at least two, each on its own, by their
  rewards alone.
  """

  @property
  def scope(self) -> Scope:
    """The groups needed at once: one, or all of an update.

    The advantages of scope "batch" are unknown until the last group of the
    update is there, so no gradient can be accumulated before.
    """
    return "group"

  @property
  def pool(self) -> Pool:
    """The members compared: a group or, with scope "batch", a task."""
    return "group"

  @property
  def min_group_size(self) -> int:
    """Fewest members for which the estimate means anything, at least 1."""
    return 2

  @property
  def needs_values(self) -> bool:
    """True if it needs `EpisodeReturnInputs.values`."""
    return False

  def validate(self) -> None:
    """Raises ValueError on settings that cannot work."""

  def zero_variance(self, members: Members) -> bool:
    """Returns True if they did equally well, so that nothing is learned."""
    return returns_lib.same(np.array([m.reward for m in members], np.float64))

  def __call__(self, members: Members) -> Estimate:
    """Returns the estimate for all these members, in float64."""
    ...

  def over_batch(
    self, advantages: Sequence[Float[np.ndarray, " _"]]
  ) -> list[Float[np.ndarray, " _"]]:
    """Returns the advantages of all members of an update, maybe whitened."""
    return list(advantages)


class _Outcome(Estimator):
  """One advantage a member, from the rewards of all."""

  def of_rewards(self, rewards: Rewards) -> Rewards:
    """Returns one advantage a member."""
    raise NotImplementedError

  def __call__(self, members: Members) -> Estimate:
    """Returns `of_rewards` of the rewards less their penalties."""
    rewards = np.array([returns_lib.total(m) for m in members], np.float64)
    values = self.of_rewards(rewards)
    return Estimate(
      [
        np.full(len(member.turns), value)
        for member, value in zip(members, values, strict=True)
      ]
    )


def centred(rewards: Rewards) -> Rewards:
  """Returns rewards less their mean: exactly 0 where all are the same."""
  if returns_lib.same(rewards):
    return np.zeros_like(rewards)
  return rewards - rewards.mean()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grpo(_Outcome):
  """Reward minus the group's mean, over the group's standard deviation.

  Biased, as each task is weighted by one over its deviation. Bias: 7 % aside of
  the gradient on policy. A penalty in the reward is divided by the deviation
  too, however small the rest of the spread. A singleton is masked, where verl
  takes its reward for the advantage.

  Attributes:
    ddof: 1 divides the variance by G - 1, as most implementations do.
    eps: added to the standard deviation.

  Source: DeepSeekMath, arXiv 2402.03300, section 4.1.
  """

  ddof: int = 1
  eps: float = 1e-6

  validate = checks.fields(
    (checks.one_of, (0, 1), "ddof"), (checks.finite_at_least, 0, "eps")
  )

  def of_rewards(self, rewards: Rewards) -> Rewards:
    """Returns (r - mean) / (std + eps)."""
    values = centred(rewards)
    if not values.any():
      return values
    return values / (rewards.std(ddof=self.ddof) + self.eps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrGrpo(_Outcome):
  """Reward minus the group's mean.

  Unbiased times (G - 1) / G, as a member's own reward is in the mean.

  Source: Understanding R1-Zero-like training, arXiv 2503.20783, section 3.2.
  """

  def of_rewards(self, rewards: Rewards) -> Rewards:
    """Returns r - mean."""
    return centred(rewards)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rloo(_Outcome):
  """Reward minus the mean of the others' rewards: leave one out.

  Unbiased.

  Attributes:
    others: those of its "group", or all that played the same "task" in this
      update, in whatever group: more of them where the prompts repeat a task.

  Source: arXiv 2402.14740, section 3.3; Kool et al. 2019.
  """

  others: Pool = "group"

  @property
  def scope(self) -> Scope:
    """The groups of one task may lie anywhere in an update."""
    return "batch" if self.others == "task" else "group"

  @property
  def pool(self) -> Pool:
    """As set."""
    return self.others

  def of_rewards(self, rewards: Rewards) -> Rewards:
    """Returns r - mean of the others; 0 for one that is alone."""
    return centred(rewards) * (len(rewards) / max(len(rewards) - 1, 1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reinforce(_Outcome):
  """Reward minus a constant: needs no group, and has more variance.

  Unbiased.

  Source: Williams 1992, with a fixed baseline.
  """

  baseline: float = 0.0

  validate = checks.fields((checks.finite, "baseline"))

  @property
  def min_group_size(self) -> int:
    """One: members are not compared."""
    return 1

  def zero_variance(self, members: Members) -> bool:
    """Never: equal rewards teach as much as others."""
    return False

  def of_rewards(self, rewards: Rewards) -> Rewards:
    """Returns r - baseline."""
    return rewards - self.baseline


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassAtK(_Outcome):
  """Gain of a member to the best of k: trains pass@k instead of pass@1.

  k times the mean, over all sets of k members with it, of how much their best
  reward falls without it. The worst member gets 0 and no member less. For k =
  1, where nothing is left without it, it is `Rloo`.

  Unbiased for the gradient of the expected best reward of k episodes.

  Attributes:
    k: from 1 to the size of a group; a group in which faults leave fewer is
      not trained.

  Source: PKPO, arXiv 2505.15201, eq. 33, times G.
  """

  k: int

  validate = checks.fields((checks.at_least, 1, "k"))

  @property
  def min_group_size(self) -> int:
    """The k of a set, and two to compare."""
    return max(self.k, 2)

  def of_rewards(self, rewards: Rewards) -> Rewards:
    """Returns the closed form, from ascending rewards; 0 of fewer than k."""
    if self.k == 1:
      return Rloo().of_rewards(rewards)
    count, order = len(rewards), np.argsort(rewards)
    ascending = rewards[order]
    # Without the best of a set, its second is the one at place j; the k - 2
    # others come from the j below. A member that is not best changes nothing.
    sets = max(math.comb(count - 1, self.k - 1), 1)
    weights = [math.comb(j, self.k - 2) / sets for j in range(count)]
    above = np.tril(ascending[:, None] - ascending[None, :])
    gains = np.empty_like(rewards)
    gains[order] = self.k * (above @ np.array(weights))
    return gains
