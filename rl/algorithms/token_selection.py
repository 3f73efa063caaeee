"""Selects tokens of a micro-batch, by their entropy or by their covariance.

The covariance of a token is (log pi - mean) (A - mean), with means over the
sampled tokens of the micro-batch, where groups that teach nothing are left out.
A step along the policy gradient lowers the entropy in proportion to the mean
covariance, to which a few tokens add most: likely ones that did well.

Letters: B rows, L row length.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rl.algorithms import losses, packed_row
from rl.settings import checks

_Rows = packed_row.Row
"""Here of [B, L]."""


class CovarianceSums(NamedTuple):
  """Sums over tokens: of the covariance, and of those that were selected."""

  covariance: Float[Array, ""]
  selected: Float[Array, ""]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClipCov:
  """Clip-Cov: leaves tokens out of the loss that cost much entropy.

  They are drawn at random from those whose covariance is between the bounds and
  that no bound of the ratio clips, and stay in the divisor of the loss. The
  draw follows from the batch, and is the same in every epoch.

  Attributes:
    share: of the sampled tokens, at least one; fewer if no more are between the
      bounds.
    low, high: bounds of the covariance.

  Source: arXiv 2505.22617, eq. 10 to 12; the numbers: section 4.3.
  """

  share: float = 2e-4
  low: float = 1.0
  high: float = 5.0

  def validate(self) -> None:
    """Raises ValueError on a share or bounds that select nothing."""
    checks.above(self, 0, "share")
    checks.in_unit(self, "share")
    checks.finite(self, "low")
    checks.above(self, self.low, "high")

  def __call__(
    self, terms: losses.Terms, rows: _Rows
  ) -> tuple[losses.Terms, CovarianceSums]:
    """Returns terms in which the selected tokens have no loss."""
    found = covariances(rows)
    within = (found >= self.low) & (found <= self.high) & ~terms.clipped
    # Bits of what was recorded: the same on every mesh, in whatever order.
    bits = jax.lax.bitcast_convert_type(rows.behaviour, jnp.uint32)
    seed = jnp.where(rows.sampled, bits, 0).sum(dtype=jnp.uint32)
    noise = jax.random.uniform(jax.random.key(seed), found.shape)
    drawn = within & highest(
      self.share, jnp.where(within, noise, -1.0), rows.sampled
    )
    loss = jnp.where(drawn, 0.0, terms.loss)
    return losses.Terms(loss, terms.clipped | drawn), _sums(found, drawn)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KlCov:
  """KL-Cov: adds weight |log pi / old| to the loss of costly tokens.

  These are the tokens with the highest covariance. The paper's penalty is the
  KL of old and pi, of which its listing 1 takes this estimate: the gradient is
  of full size however little a token has moved, be it by rounding. It is
  aggregated and corrected as the loss that it is added to; the paper's clips
  nothing: `ClippedSurrogate(clip_low=1.0, clip_high=inf)`.

  Attributes:
    share: of the sampled tokens, at least one; the paper takes 2e-3 for a model
      of 7B and 2e-4 for one of 32B.
    weight: price of a nat.

  Source: arXiv 2505.22617, eq. 10, 13 and 14; the numbers: section 4.3.
  """

  share: float = 2e-4
  weight: float = 1.0

  validate = checks.fields(
    (checks.above, 0, "share"),
    (checks.in_unit, "share"),
    (checks.finite_above, 0, "weight"),
  )

  def __call__(
    self, terms: losses.Terms, rows: _Rows
  ) -> tuple[losses.Terms, CovarianceSums]:
    """Returns terms in which the selected tokens are penalised."""
    found = covariances(rows)
    costly = highest(self.share, found, rows.sampled)
    moved = jnp.abs(jnp.where(rows.sampled, rows.logprobs - rows.old, 0.0))
    loss = terms.loss + jnp.where(costly, self.weight * moved, 0.0)
    return terms._replace(loss=loss), _sums(found, costly)


def covariances(rows: _Rows) -> Float[Array, "B L"]:
  """Returns the covariance of each sampled token, without gradient; else 0."""
  sampled = rows.sampled
  count = jnp.maximum(sampled.sum(), 1)

  def centred(values: Float[Array, "B L"]) -> Float[Array, "B L"]:
    values = jnp.where(sampled, values, 0.0)
    return jnp.where(sampled, values - values.sum() / count, 0.0)

  found = centred(rows.logprobs) * centred(rows.advantages)
  return jax.lax.stop_gradient(found)


def highest(
  share: float, scores: Float[Array, "B L"], sampled: Bool[Array, "B L"]
) -> Bool[Array, "B L"]:
  """Returns a mask of the share of the sampled tokens with the highest scores.

  Of equal scores the first count as higher, so that no more are chosen.
  """
  scores = jnp.where(sampled, jax.lax.stop_gradient(scores), -jnp.inf)
  num_kept = jnp.maximum(jnp.round(share * sampled.sum()).astype(jnp.int32), 1)
  order = jnp.argsort(scores, axis=None, descending=True)
  ranks = jnp.zeros_like(order).at[order].set(jnp.arange(order.size))
  return sampled & (ranks.reshape(scores.shape) < num_kept)


def _sums(
  found: Float[Array, "B L"], which: Bool[Array, "B L"]
) -> CovarianceSums:
  return CovarianceSums(found.sum(), which.sum().astype(jnp.float32))
