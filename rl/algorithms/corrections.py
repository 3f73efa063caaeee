"""Corrections for tokens that another policy sampled: weights and masks.

Between sampling (mu, `behaviour`) and training lie other kernels, other
precision and, where rollout overlaps training, other weights. A correction
multiplies the loss of each token; it has no gradient. A masked token keeps its
place in every denominator: the loss is not scaled up for it.

rho = old / mu. In bypass mode old is mu and rho is 1: a correction that
compares old does nothing there, so a ratio in the loss is not multiplied twice.

Bias, as `losses` defines it, is the rest of that of `losses.Reinforce` with old
scored again by the trained policy or, for corrections that do not compare old,
of unclipped token ratios. `SequenceTruncated(cap=inf)` and
`SequenceMasked(low=0, high=inf)` leave none, at any lag and in any mixture, of
members of one conversation: the products are over a conversation, and others of
the member are not in them.

Letters: L row length.
"""

import dataclasses
import math
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rl.algorithms import packed_row
from rl.settings import checks


class Weights(NamedTuple):
  """Factors of the loss of each token.

  Attributes:
    weights: without gradient; 0 where masked, 1 where nothing was sampled.
    truncated: where the weight is less than the ratio that it stands for.
    masked: sampled tokens that teach nothing.
  """

  weights: Float[Array, " L"]
  truncated: Bool[Array, " L"]
  masked: Bool[Array, " L"]


@runtime_checkable
class Correction(Protocol):
  """Frozen callable over one row; on policy its weights are exactly 1."""

  @property
  def compares_old(self) -> bool:
    """True if it compares `Row.old` with the policy that sampled.

    Then there is nothing to correct in bypass mode. Else it compares
    `Row.logprobs`, the policy of this very update.
    """
    ...

  @property
  def weighs(self) -> bool:
    """True if it gives importance weights, rather than only 0 and 1."""
    ...

  def __call__(self, row: packed_row.Row) -> Weights:
    """Returns the weights by token."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenTruncated:
  """Weight min(rho_t, cap): truncated importance sampling, token by token.

  Bias: 9 % at lag 1, 17 % at lag 4, 14 % mixed.

  Attributes:
    cap: highest weight; inf cuts nothing.

  Source: Yao et al. 2025, "Your efficient RL framework secretly brings you
  off-policy RL training"; without a cap: decoupled PPO, arXiv 2110.00641.
  """

  cap: float = 2.0
  compares_old = True
  weighs = True

  validate = checks.fields((checks.at_least, 1, "cap"))

  def __call__(self, row: packed_row.Row) -> Weights:
    """Returns the weights by token."""
    return _truncated(_log_rho(row), self.cap)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceTruncated:
  """Weight min(product of rho over the trajectory, cap), for all its tokens.

  Bias: 0 % at lag 1, 13 % at lag 4, 2 % mixed.

  Attributes:
    cap: highest weight; inf cuts nothing.

  Source: Liu, Li et al. 2025, "When speed kills stability"; verl.
  """

  cap: float = 2.0
  compares_old = True
  weighs = True

  validate = checks.fields((checks.at_least, 1, "cap"))

  def __call__(self, row: packed_row.Row) -> Weights:
    """Returns the weights by token."""
    return _truncated(packed_row.totals(_log_rho(row), row), self.cap)


@dataclasses.dataclass(frozen=True, kw_only=True)
class IcePop:
  """Weight rho_t within [low, high], else 0: masked importance sampling.

  Bias: 9 % at lag 1, 17 % at lag 4, 14 % mixed.

  Attributes:
    low, high: bounds of a token's ratio that is believed.

  Source: IcePop, arXiv 2510.18855, whose bounds these are; as token-level
  masked importance sampling: Liu, Li et al. 2025, "When speed kills
  stability".
  """

  low: float = 0.5
  high: float = 5.0
  compares_old = True
  weighs = True

  validate = checks.fields(
    (checks.in_unit, "low"), (checks.at_least, 1, "high")
  )

  def __call__(self, row: packed_row.Row) -> Weights:
    """Returns the weights by token."""
    return _banded(_log_rho(row), self.low, self.high)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceMasked:
  """Weight product of rho within [low, high], else 0, for all its tokens.

  Bias: 0 % at lag 1, 46 % at lag 4, 15 % mixed.

  Attributes:
    low, high: bounds of a trajectory's ratio that is believed.

  Source: sequence-level masked importance sampling, Liu, Li et al. 2025,
  "When speed kills stability"; the bounds: verl's.
  """

  low: float = 0.5
  high: float = 2.0
  compares_old = True
  weighs = True

  validate = checks.fields(
    (checks.in_unit, "low"), (checks.at_least, 1, "high")
  )

  def __call__(self, row: packed_row.Row) -> Weights:
    """Returns the weights by token."""
    return _banded(packed_row.totals(_log_rho(row), row), self.low, self.high)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeometricRejection:
  """Masks trajectories whose geometric mean of rho leaves [low, high].

  Bias: 99 % at lag 1, 100 % at lag 4, 100 % mixed.

  Attributes:
    low, high: bounds of the mean, which does not grow with the length.

  Source: arXiv 2512.23075; Liu, Li et al. 2025, "When speed kills stability".
  """

  low: float = 0.999
  high: float = 1.001
  compares_old = True
  weighs = False

  validate = checks.fields(
    (checks.in_unit, "low"), (checks.at_least, 1, "high")
  )

  def __call__(self, row: packed_row.Row) -> Weights:
    """Returns the weights by token, 0 or 1."""
    mean = packed_row.bounded_exp(packed_row.means(_log_rho(row), row))
    return _without((mean < self.low) | (mean > self.high), row)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Veto:
  """Masks trajectories with a token that old would hardly have sampled.

  Bias: 11 % at lag 1, 32 % at lag 4, 24 % mixed.

  Attributes:
    least: lowest rho_t that is believed.

  Source: Liu, Li et al. 2025, "When speed kills stability"; verl.
  """

  least: float = 1e-4
  compares_old = True
  weighs = False

  def validate(self) -> None:
    """Raises ValueError unless the bound is between 0 and 1."""
    least = math.exp(-packed_row.MAX_LOG_RATIO)
    if not least < self.least < 1:
      why = f"ratios are clipped to {least:.1g}; use more, and less than 1"
      checks.refuse(self, "least", why=why)

  def __call__(self, row: packed_row.Row) -> Weights:
    """Returns the weights by token, 0 or 1."""
    is_low = packed_row.bounded_exp(_log_rho(row)) < self.least
    return _without(packed_row.totals(is_low.astype(jnp.float32), row) > 0, row)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffPolicySequenceMask:
  """Masks bad tokens (A < 0) of trajectories that pi has moved away from.

  That is where mean_t log(mu / pi) is above `delta`. Both sources of a gap
  count, the engine's and the lag, because mu is the engine's.
  Bias: 37 % at lag 1, 49 % at lag 4, 47 % mixed.

  Attributes:
    delta: nats a token.

  Source: DeepSeek-V3.2, arXiv 2512.02556, section 3.1; it gives no number,
  slime takes 1e-4.
  """

  delta: float
  compares_old = False
  weighs = False

  def validate(self) -> None:
    """Raises ValueError on a bound, in nats, that is below 0 or infinite."""
    out = "use correction=none to mask nothing"
    checks.finite_at_least(self, 0, "delta", out=out)

  def __call__(self, row: packed_row.Row) -> Weights:
    """Returns the weights by token, 0 or 1."""
    gap = packed_row.log_ratio(row.behaviour, row.logprobs, row)
    is_far = packed_row.means(gap, row) > self.delta
    return _without(is_far & (row.advantages < 0), row)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DppoMask:
  """Masks tokens that moved too far and would be pushed further.

  Far is |pi - mu| of the sampled token's probability above `bound`, the total
  variation of "this token or another"; further is A > 0 where pi > mu, or
  A < 0 where pi < mu. DPPO is this with a loss that clips nothing of pi / mu:
  `ClippedSurrogate(clip_low=1.0, clip_high=inf)` in bypass mode.
  Bias: 9 % at lag 1, 44 % at lag 4, 18 % mixed.

  Attributes:
    bound: of a probability; 0.2 is prime-rl's.

  Source: DPPO, arXiv 2602.04879, eq. 11 to 13.
  """

  bound: float = 0.2
  compares_old = False
  weighs = False

  validate = checks.fields(
    (checks.above, 0, "bound"), (checks.in_unit, "bound")
  )

  def __call__(self, row: packed_row.Row) -> Weights:
    """Returns the weights by token, 0 or 1."""
    now = jnp.exp(jnp.where(row.sampled, row.logprobs, 0.0))
    moved = now - jnp.exp(jnp.where(row.sampled, row.behaviour, 0.0))
    is_pushed_on = jnp.where(row.sampled, row.advantages, 0.0) * moved > 0
    return _without((jnp.abs(moved) > self.bound) & is_pushed_on, row)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Both:
  """Two corrections at once: the product of weights, the union of masks.

  A use: `Both(first=TokenTruncated(), second=Veto())`.
  """

  first: Correction
  second: Correction

  @property
  def compares_old(self) -> bool:
    """True if either part does, as that part needs it scored."""
    return self.first.compares_old or self.second.compares_old

  @property
  def weighs(self) -> bool:
    """True if either part does."""
    return self.first.weighs or self.second.weighs

  def validate(self) -> None:
    """Raises ValueError where both give importance weights."""
    if self.first.weighs and self.second.weighs:
      why = "rho would count twice; let one of them only mask"
      checks.refuse(self, "first", "second", why=why)

  def __call__(self, row: packed_row.Row) -> Weights:
    """Returns the weights by token."""
    first, second = self.first(row), self.second(row)
    return Weights(
      first.weights * second.weights,
      first.truncated | second.truncated,
      first.masked | second.masked,
    )


def _log_rho(row: packed_row.Row) -> Float[Array, " L"]:
  return packed_row.log_ratio(row.old, row.behaviour, row)


def _truncated(log_weights: Float[Array, " L"], cap: float) -> Weights:
  ratios = _constant(packed_row.bounded_exp(log_weights))
  nowhere = jnp.zeros(ratios.shape, bool)
  return Weights(jnp.minimum(ratios, cap), ratios > cap, nowhere)


def _banded(
  log_weights: Float[Array, " L"], low: float, high: float
) -> Weights:
  ratios = _constant(packed_row.bounded_exp(log_weights))
  masked = (ratios < low) | (ratios > high)
  nowhere = jnp.zeros(ratios.shape, bool)
  return Weights(jnp.where(masked, 0.0, ratios), nowhere, masked)


def _without(masked: Bool[Array, " L"], row: packed_row.Row) -> Weights:
  """Returns weights of 0 and 1."""
  masked = masked & row.sampled
  weights = _constant(jnp.where(masked, 0.0, 1.0))
  return Weights(weights, jnp.zeros(masked.shape, bool), masked)


def _constant(x: Float[Array, " L"]) -> Float[Array, " L"]:
  return jax.lax.stop_gradient(x)
