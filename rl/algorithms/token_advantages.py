"""Advantages that differ between the turns or tokens of an episode.

Bias is stated as in `advantages`, and without a discount: one below 1 counts
late rewards less, and is biased by that.
"""

import collections
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float, Float64

from rl.algorithms import advantages as advantages_lib
from rl.algorithms import returns as returns_lib
from rl.settings import checks

Over = Literal["tokens", "members"]
AtLimit = Literal["bootstrap", "end"]
_Members = advantages_lib.Members
_PerTurn = list[Float64[np.ndarray, " _"]]


def whiten(
  advantages: Sequence[Float[np.ndarray, " _"]], *, over: Over, eps: float
) -> list[Float64[np.ndarray, " _"]]:
  """Returns (x - mean) / (std + eps), with mean and std of all tokens.

  Args:
    advantages: of the tokens of each member. All 0 comes out if all are equal.
      The deviation has no degree of freedom taken off.
    over: "tokens" count the same each, or "members", however long.
  """
  lengths = np.array([len(own) for own in advantages], np.int64)
  if not lengths.any():
    return [own.astype(np.float64) for own in advantages]
  values = np.concatenate(advantages).astype(np.float64)
  if returns_lib.same(values):
    return [np.zeros(length) for length in lengths]
  weights = np.ones(len(values))
  if over == "members":
    weights = np.repeat(1 / np.maximum(lengths, 1), lengths)
  centred = values - np.average(values, weights=weights)
  std = np.sqrt(np.average(centred**2, weights=weights))
  return np.split(centred / (std + eps), np.cumsum(lengths)[:-1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlus(advantages_lib.Estimator):
  """Discounted return of each token, whitened over all tokens of an update.

  Each token's penalty is subtracted from its reward. An update in which nothing
  varies gets advantages of exactly 0.

  Biased by the whitening: its deviation and its mean have a share of each
  member's own return. Bias: 2 % aside of the gradient on policy. Before
  whitening it is unbiased, times (G - 1) / G with a group's mean subtracted.

  Attributes:
    baseline: "group" subtracts the mean reward of the group first, so that a
      group that varies little stays small. The zeros of one that does not
      vary at all are in no deviation.
    discount: a token.
    over: what has mean 0 and deviation 1; see `whiten`.
    eps: added to the standard deviation.

  Source: arXiv 2501.03262, section 3; "group" is its REINFORCE++-baseline.
  """

  baseline: Literal["none", "group"] = "none"
  discount: float = 1.0
  over: Over = "tokens"
  eps: float = 1e-8
  short_name = "reinforce_pp"

  validate = checks.fields(
    (checks.in_unit, "discount"), (checks.finite_at_least, 0, "eps")
  )

  @property
  def scope(self) -> advantages_lib.Scope:
    """All groups of an update have one mean and one deviation."""
    return "batch"

  @property
  def min_group_size(self) -> int:
    """With a baseline two: a single reward is its own mean."""
    return 1 if self.baseline == "none" else 2

  def zero_variance(self, members: _Members) -> bool:
    """Without a baseline never: groups are compared with each other.

    With one, members of equal rewards may have earned them in other turns.
    """
    if self.baseline == "none":
      return False
    return not any(own.any() for own in self(members).advantages)

  def __call__(self, members: _Members) -> advantages_lib.Estimate:
    """Returns the returns of tokens, not yet whitened."""
    rewards = np.array([m.reward for m in members], np.float64)
    if self.baseline == "group":
      rewards = advantages_lib.centred(rewards)
    # What was earned on the way is a part of the reward: the rest changes.
    return advantages_lib.Estimate(
      [
        returns_lib.to_go(
          returns_lib.of_tokens(member._replace(reward=reward)), self.discount
        )
        for member, reward in zip(members, rewards.tolist(), strict=True)
      ]
    )

  def over_batch(
    self, advantages: Sequence[Float[np.ndarray, " _"]]
  ) -> list[Float[np.ndarray, " _"]]:
    """Returns them whitened."""
    return whiten(advantages, over=self.over, eps=self.eps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distillation(advantages_lib.Estimator):
  """Advantages from a teacher's log-probabilities; rewards do not count.

  The advantage of a token is minus its penalty: with a KL of estimator k1 in
  the reward, weight x (log teacher - log policy). Later tokens have no part in
  it, so it is the gradient of KL(policy, teacher) of each token where the
  policy goes, not of where it goes.

  Source: MiniLLM, arXiv 2306.08543, eq. 3 without the return; GKD, 2306.13649.
  """

  @property
  def min_group_size(self) -> int:
    """One: members are not compared."""
    return 1

  def zero_variance(self, members: _Members) -> bool:
    """Never, as rewards do not count."""
    return False

  def __call__(self, members: _Members) -> advantages_lib.Estimate:
    """Returns minus the penalties; 0 where there are none."""
    return advantages_lib.Estimate(
      [
        np.zeros(len(member.turns))
        if member.penalties is None
        else -member.penalties.astype(np.float64)
        for member in members
      ]
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gae(advantages_lib.Estimator):
  """Generalised advantage estimation with a critic.

  The returns that the critic learns are advantage + value. Only sampled tokens
  are steps.

  Unbiased for lambda_ = 1, whatever the critic says, before whitening. Below 1
  it is biased by as much as the critic is wrong, as it is for any lambda_ where
  an episode was cut.

  Attributes:
    discount, lambda_: a token.
    at_limit: what follows an episode that a limit of turns or tokens cut off.
      "bootstrap": what the critic expects of the state that it was cut in, as
      if it had gone on. "end": nothing, as of any other; right where the limit
      is a part of the task, so that being slow has to cost something.
    whitened: whitens over the tokens of an update, which needs all its groups
      at once.
    eps: added to the deviation then.

  Source: arXiv 1506.02438, eq. 16; limits of time, 1712.00378.
  """

  discount: float = 1.0
  lambda_: float = 0.95
  at_limit: AtLimit = "bootstrap"
  whitened: bool = False
  eps: float = 1e-8

  validate = checks.fields(
    (checks.in_unit, "discount", "lambda_"), (checks.finite_at_least, 0, "eps")
  )

  @property
  def scope(self) -> advantages_lib.Scope:
    """A group is enough unless it is whitened."""
    return "batch" if self.whitened else "group"

  @property
  def min_group_size(self) -> int:
    """One: members are compared with the critic."""
    return 1

  @property
  def needs_values(self) -> bool:
    """Always: advantages are rewards less these values."""
    return True

  def zero_variance(self, members: _Members) -> bool:
    """Never: members are compared with the critic."""
    return False

  def __call__(self, members: _Members) -> advantages_lib.Estimate:
    """Returns advantages, not yet whitened, and returns.

    Raises:
      ValueError: a member has no values.
    """
    found = advantages_lib.Estimate([], [])
    assert found.returns is not None
    for member in members:
      if member.values is None:
        raise ValueError(
          "Gae: values=None; give the policy a value head, or use an estimator "
          "without a critic such as rloo"
        )
      own = returns_lib.gae(
        returns_lib.of_tokens(member),
        member.values,
        discount=self.discount,
        lambda_=self.lambda_,
        bootstrap=member.bootstrap if self.at_limit == "bootstrap" else 0.0,
      )
      found.advantages.append(own)
      found.returns.append(own + member.values)
    return found

  def over_batch(
    self, advantages: Sequence[Float[np.ndarray, " _"]]
  ) -> list[Float[np.ndarray, " _"]]:
    """Returns them whitened."""
    return whiten(advantages, over="tokens", eps=self.eps)


class _Turns(advantages_lib.Estimator):
  """One advantage a turn, from what all members earned in theirs."""

  def of_turns(self, members: _Members) -> _PerTurn:
    """Returns one advantage for each turn of each member."""
    raise NotImplementedError

  def zero_variance(self, members: _Members) -> bool:
    """Returns True if no token is in a turn that did better than another."""
    return not any(own.any() for own in self(members).advantages)

  def __call__(self, members: _Members) -> advantages_lib.Estimate:
    """Returns each turn's advantage for all of its tokens."""
    return advantages_lib.Estimate(
      [
        own[member.turns]
        for member, own in zip(members, self.of_turns(members), strict=True)
      ]
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepGroups(_Turns):
  """The episode's advantage, plus that of each turn among its likes (GiGPO).

  The returns of turns that are alike are compared, at whatever place and of
  whatever member of the group. A turn without its like has only the episode's
  advantage.

  Biased, even by means alone and without a discount: a turn's own return is in
  the mean of its step group, whose size depends on what was done before.
  Bias: 14 % aside of the gradient on policy. With a KL in the reward members
  that did equally well are told apart by that alone, as in `Grpo`.

  Attributes:
    alike: turns before which the environment wrote the same ids, its last
      "observation"; right where that says all about its state. Else turns
      before which everything was the same, the whole "history".
    weight: of the steps' part.
    discount: a turn, of the steps' part.
    normalise: over the "std" too (of ddof 1), or by the "mean" alone.
    eps: added to the standard deviation.

  Source: GiGPO, arXiv 2505.10978, eq. 3, 6, 7 and 8.
  """

  alike: Literal["observation", "history"] = "observation"
  weight: float = 1.0
  discount: float = 0.95
  normalise: Literal["std", "mean"] = "std"
  eps: float = 1e-6

  validate = checks.fields(
    (checks.in_unit, "discount"), (checks.finite_at_least, 0, "eps", "weight")
  )

  def of_turns(self, members: _Members) -> _PerTurn:
    """Returns the sum of both parts."""
    totals = np.array([returns_lib.total(m) for m in members], np.float64)
    lengths = [len(m.turn_rewards) for m in members]
    sums = np.repeat(self._compare(totals), lengths)
    earned = np.concatenate(_earned(members, self.discount))
    alike: dict[bytes, list[int]] = collections.defaultdict(list)
    by_history = self.alike == "history"
    keys = [m.histories if by_history else m.observations for m in members]
    for place, key in enumerate(itertools.chain.from_iterable(keys)):
      alike[key].append(place)
    for places in alike.values():
      sums[places] += self.weight * self._compare(earned[places])
    return np.split(sums, np.cumsum(lengths)[:-1])

  def _compare(self, rewards: advantages_lib.Rewards) -> advantages_lib.Rewards:
    if self.normalise == "mean":
      return advantages_lib.centred(rewards)
    return advantages_lib.Grpo(eps=self.eps).of_rewards(rewards)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TurnReturns(_Turns):
  """Return of each turn, less that of the others at the same turn.

  The baseline is a mean over the other members that got so far; where none
  did, over all others at their last turn. So an episode of one turn is trained
  as by `advantages.Rloo`.

  Unbiased, as the baseline knows nothing of the member itself.

  Attributes:
    discount: a turn.

  Source: rewards to go, Sutton et al. 2000, theorem 1, with the baseline of
  Kool et al. 2019 at each turn.
  """

  discount: float = 1.0

  validate = checks.fields((checks.in_unit, "discount"))

  def of_turns(self, members: _Members) -> _PerTurn:
    """Returns one advantage for each turn of each member."""
    earned = _earned(members, self.discount)
    found = [np.zeros_like(own) for own in earned]
    for turn in range(max(len(own) for own in earned)):
      here = [i for i, own in enumerate(earned) if turn < len(own)]
      if len(here) > 1:
        own = np.array([earned[i][turn] for i in here])
        values = advantages_lib.Rloo().of_rewards(own)
      else:
        last = np.array([own[min(turn, len(own) - 1)] for own in earned])
        values = advantages_lib.Rloo().of_rewards(last)[here]
      for i, value in zip(here, values.tolist(), strict=True):
        found[i][turn] = value
    return found


def _earned(members: _Members, discount: float) -> _PerTurn:
  return [returns_lib.to_go(returns_lib.of_turns(m), discount) for m in members]
