"""Losses of pairs of answers to one prompt, of which one is preferred.

They are of recorded conversations (`rl.loop.fine_tuning`), not of groups.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rl.algorithms import loss_aggregation, packed_row
from rl.settings import checks


class PairTerms(NamedTuple):
  """The loss at each token of a pair; 0 and False where nothing was sampled.

  Attributes:
    loss: of the pair that the token belongs to, in nats.
    clipped: nowhere.
    margin: of that pair: the log odds that the preferred answer is the better.
  """

  loss: Float[Array, " L"]
  clipped: Bool[Array, " L"]
  margin: Float[Array, " L"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dpo:
  """-log sigmoid(m), m = beta (log r(chosen) - log r(rejected)): preferences.

  r = pi / reference of a whole answer; the reference is `old`. The segments 2k
  - 1 and 2k of a row are a pair, in which A is 1 on the preferred answer and -1
  on the other. Where pi is the reference the loss is ln 2.

  Attributes:
    beta: how far the policy may go from the reference: less is farther.
    label_smoothing: share of pairs whose answers are taken to be swapped.

  Source: DPO, arXiv 2305.18290, eq. 7; label smoothing: cDPO, Mitchell 2023.
  """

  beta: float = 0.1
  label_smoothing: float = 0.0
  aggregate: loss_aggregation.Aggregate = loss_aggregation.SequenceMean()
  own_weight = False
  has_ratio = True

  def validate(self) -> None:
    """Raises ValueError unless beta is above 0, and smoothing below a half."""
    checks.finite_above(self, 0, "beta")
    checks.below(self, 0.5, "label_smoothing")

  def __call__(self, row: packed_row.Row) -> PairTerms:
    """Returns the loss of its pair at each token; nothing is clipped."""
    pairs = row._replace(segments=(row.segments + 1) // 2)
    gap = packed_row.log_ratio(row.logprobs, row.old, row)
    signed = jnp.where(row.sampled, row.advantages, 0.0) * gap
    margin = self.beta * packed_row.totals(signed, pairs)
    swapped = self.label_smoothing
    loss = (1 - swapped) * jax.nn.softplus(-margin)
    loss += swapped * jax.nn.softplus(margin)
    nothing = jnp.zeros(margin.shape, bool)
    return PairTerms(jnp.where(row.sampled, loss, 0.0), nothing, margin)
