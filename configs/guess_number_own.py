"""Your own algorithm: a loss and an advantage that the library lacks.

python -m launch.train --config=configs/guess_number_own.py --workdir=DIR

Both are frozen dataclasses, so their fields are flags:
--config.algorithm.loss.bound=0.1, or --config.algorithm.loss='spo(bound=0.1)'

Hardware: two CPU cores. Duration: as `guess_number_moe.py`, about five minutes.
Expected: success on held-out seeds from about 30 % after the warm start to 85 %
or more.
"""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from configs import guess_number_moe
from rl import experiment
from rl.algorithms import (
  advantages,
  algorithm,
  loss_aggregation,
  losses,
  packed_row,
  returns,
)
from rl.settings import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spo:
  """-(r A - |A| (r - 1)^2 / (2 bound)): a pull back where others clip.

  Attributes:
    bound: of |r - 1|; the gradient of a good token is 0 at 1 + bound.

  Source: Simple Policy Optimization, arXiv 2401.16025.
  """

  bound: float = 0.2
  aggregate: loss_aggregation.Aggregate = loss_aggregation.TokenMean()
  # The ratio is against `row.old`; no weight of its own corrects the rest.
  has_ratio = True
  own_weight = False

  def validate(self) -> None:
    """Raises ValueError on a bound that is not above 0."""
    checks.above(self, 0, "bound")

  def __call__(self, row: packed_row.Row) -> losses.Terms:
    """Returns the loss; clipped are tokens that are pulled back."""
    ratio = packed_row.bounded_exp(
      packed_row.log_ratio(row.logprobs, row.old, row)
    )
    # Whatever stands where nothing was sampled, even nan, must not count.
    gain = jnp.where(row.sampled, row.advantages, 0.0)
    price = jnp.abs(gain) * (ratio - 1) ** 2 / (2 * self.bound)
    return losses.Terms(price - ratio * gain, jnp.abs(ratio - 1) > self.bound)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ranked(advantages.Estimator):
  """The share of the group that is worse, less the share that is better.

  What rewards are worth beside each other does not count, so one that is far
  off does not drown the others.
  """

  def __call__(
    self, members: Sequence[returns.EpisodeReturnInputs]
  ) -> advantages.Estimate:
    """Returns the same number, from -1 to 1, for all tokens of a member."""
    rewards = np.array([member.reward for member in members])
    ranks = np.sign(rewards[:, None] - rewards).mean(axis=1)
    return advantages.Estimate(
      [
        np.full(len(member.turns), rank)
        for member, rank in zip(members, ranks, strict=True)
      ]
    )


def get_config() -> experiment.Experiment:
  """Returns the run of guess_number_moe with another algorithm."""
  return dataclasses.replace(
    guess_number_moe.get_config(),
    algorithm=algorithm.Algorithm(
      loss=Spo(), advantage=Ranked(), entropy_bonus=0.003
    ),
  )
