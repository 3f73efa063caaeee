"""Returns of an episode, by turn and by token: rewards -> returns.

Letters: T sampled tokens, K turns. All in float64.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float64, Int


class EpisodeReturnInputs(NamedTuple):
  """One episode as an estimator sees it; T and K are at least 1.

  Attributes:
    reward: as graded and shaped; of the episode as a whole.
    turns: turn of each sampled token, from 0 to K - 1; never decreases.
    turn_rewards: the environment's for each turn. A part of `reward`, not in
      addition to it: the rest, `reward - sum(turn_rewards)`, is earned by the
      end of the last turn. As exact as `reward`, or the rest is rounding.
    observations: the ids appended before each turn, as K keys.
    histories: all ids before each turn, as K keys.
    penalties: a KL to subtract from the reward of each token, weight included.
    values: the critic's, of the state before each sampled token.
    bootstrap: the critic's, of the state in which a limit cut the episode; 0
      of one that ended by itself.
  """

  reward: float
  turns: Int[np.ndarray, " T"]
  turn_rewards: Float64[np.ndarray, " K"]
  observations: Sequence[bytes]
  histories: Sequence[bytes]
  penalties: Float[np.ndarray, " T"] | None = None
  values: Float[np.ndarray, " T"] | None = None
  bootstrap: float = 0.0


def same(values: Float64[np.ndarray, " n"]) -> bool:
  """Returns True if all are equal, as far as float32 can tell.

  0.1 + 0.2 and 0.3 are one reward: sums of the same parts in another order must
  teach nothing.
  """
  narrow = values.astype(np.float32)
  return bool((narrow == narrow[:1]).all())


def total(member: EpisodeReturnInputs) -> float:
  """Returns the reward of the episode, less its penalties."""
  if member.penalties is None:
    return member.reward
  return member.reward - float(member.penalties.sum(dtype=np.float64))


def of_turns(member: EpisodeReturnInputs) -> Float64[np.ndarray, " K"]:
  """Returns each turn's reward, less its penalties; they sum to `total`."""
  rewards = member.turn_rewards.astype(np.float64)
  rewards[-1] += member.reward - rewards.sum()
  if member.penalties is not None:
    rewards -= np.bincount(member.turns, member.penalties, len(rewards))
  return rewards


def of_tokens(member: EpisodeReturnInputs) -> Float64[np.ndarray, " T"]:
  """Returns the reward of each sampled token; they sum to `total`.

  A turn's reward is that of its last token. Of a turn without tokens it goes
  to the last one before it, or to the first of all.
  """
  earned = of_turns(member._replace(penalties=None))
  ends = np.searchsorted(member.turns, np.arange(len(earned)), side="right") - 1
  rewards = np.zeros(len(member.turns))
  np.add.at(rewards, np.maximum(ends, 0), earned)
  if member.penalties is not None:
    rewards -= member.penalties
  return rewards


def to_go(
  rewards: Float64[np.ndarray, " n"], discount: float
) -> Float64[np.ndarray, " n"]:
  """Returns the sum of discount^(j - i) rewards[j] over j >= i, for each i."""
  sums, span, weight = rewards.copy(), 1, discount
  # Each pass doubles how far ahead an element has summed.
  while span < len(sums):
    sums[:-span] += weight * sums[span:]
    span, weight = 2 * span, weight * weight
  return sums


def gae(
  rewards: Float64[np.ndarray, " T"],
  values: Float[np.ndarray, " T"],
  *,
  discount: float,
  lambda_: float,
  bootstrap: float = 0.0,
) -> Float64[np.ndarray, " T"]:
  """Returns generalised advantage estimates of an episode.

  Args:
    values: of the state before each sampled token. The reply of an
      environment is not a step: after the last token of a turn comes the first
      of the next one.
    bootstrap: the value after the last of all: 0 where the episode has ended.

  Source: arXiv 1506.02438, eq. 16, as the recursion of PPO, 1707.06347, eq. 11;
  partial-episode bootstrapping, Pardo et al., 1712.00378.
  """
  wide = values.astype(np.float64)
  following = np.append(wide[1:], bootstrap)
  return to_go(rewards + discount * following - wide, discount * lambda_)
