"""The loss of a critic: squared errors of its values, and their metrics.

Letters: B rows, L row length.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from rl.data import batch as batch_lib
from rl.settings import checks

_ROUNDING = 1e-10
"""A variance below this share of the squared mean is rounding of float32."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValueLoss:
  """Half the squared error of the critic, clipped around its old values.

  0.5 * max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2): a value
  that has moved further than `clip` gets no gradient that takes it on.

  Attributes:
    weight: of this loss beside that of the policy.
    clip: None clips nothing.
    through_body: its gradient reaches the policy's layers, not the head alone.

  Source: PPO, arXiv 1707.06347, eq. 9; clipping: OpenAI baselines, ppo2.
  """

  weight: float = 0.5
  clip: float | None = 0.2
  through_body: bool = True

  validate = checks.fields((checks.finite_above, 0, "weight", "clip"))

  def __call__(
    self,
    values: Float[Array, "*any"],
    old: Float[Array, "*any"],
    returns: Float[Array, "*any"],
  ) -> Float[Array, "*any"]:
    """Returns the loss of each token, without the weight."""
    error = jnp.square(values - returns)
    if self.clip is not None:
      near = old + jnp.clip(values - old, -self.clip, self.clip)
      error = jnp.maximum(error, jnp.square(near - returns))
    return 0.5 * error


class Moments(NamedTuple):
  """A mean, and the sum of squared distances from it.

  In float32 a variance far below the squared mean is lost in sums of squares.
  """

  mean: Float[Array, ""]
  squares: Float[Array, ""]


class ValueSums(NamedTuple):
  """Of the loss, of the targets R and of the errors R - V, over tokens."""

  tokens: Float[Array, ""]
  loss: Float[Array, ""]
  targets: Moments
  errors: Moments


def zero() -> ValueSums:
  """Returns sums of nothing."""
  nothing = jnp.zeros(())
  moments = Moments(nothing, nothing)
  return ValueSums(nothing, nothing, moments, moments)


def add(one: ValueSums, other: ValueSums) -> ValueSums:
  """Returns the sums over the tokens of both.

  Source: Chan, Golub and LeVeque 1979, eq. 2.1.
  """
  tokens = one.tokens + other.tokens
  share = other.tokens / jnp.maximum(tokens, 1.0)

  def joined(a: Moments, b: Moments) -> Moments:
    apart = b.mean - a.mean
    between = jnp.square(apart) * one.tokens * share
    return Moments(a.mean + apart * share, a.squares + b.squares + between)

  return ValueSums(
    tokens=tokens,
    loss=one.loss + other.loss,
    targets=joined(one.targets, other.targets),
    errors=joined(one.errors, other.errors),
  )


def of_batch(
  loss: ValueLoss, values: Float[Array, "B L"], batch: batch_lib.Batch
) -> tuple[Float[Array, "B L"], ValueSums]:
  """Returns the loss of each sampled token, 0 elsewhere, and the sums.

  Args:
    values: those of now.
    batch: of jax arrays.

  Raises:
    ValueError: the batch has no values or returns to learn.
  """
  if batch.values is None or batch.returns is None:
    raise ValueError("a batch without values and returns for the critic")
  values, old, returns = (
    jnp.where(batch.sampled, x, 0.0)
    for x in (values, batch.values, batch.returns)
  )
  found, errors = loss(values, old, returns), returns - values
  sums = ValueSums(
    tokens=batch.sampled.sum().astype(jnp.float32),
    loss=found.sum(),
    targets=_moments(returns, batch),
    errors=_moments(errors, batch),
  )
  return found, sums


def _moments(values: Float[Array, "B L"], batch: batch_lib.Batch) -> Moments:
  count = jnp.maximum(batch.sampled.sum(), 1)
  mean = values.sum() / count
  # A long sum is rounded, and what is left of the mean less so.
  mean += jnp.where(batch.sampled, values - mean, 0.0).sum() / count
  centred = jnp.where(batch.sampled, values - mean, 0.0)
  return Moments(mean, jnp.square(centred).sum())


def metrics(sums: ValueSums) -> dict[str, Array]:
  """Returns means of a token.

  `explained_variance` is 1 - var(R - V) / var(R): 1 of a critic that knows all,
  0 of one that says the mean, nan where all targets are about the same, or
  differ by less than float32 tells of the errors.
  """
  tokens = jnp.maximum(sums.tokens, 1.0)
  left, whole = sums.errors.squares, sums.targets.squares
  largest = jnp.maximum(jnp.abs(sums.targets.mean), jnp.abs(sums.errors.mean))
  is_known = whole > _ROUNDING * tokens * jnp.square(largest)
  return {
    "value_loss": sums.loss / tokens,
    "explained_variance": jnp.where(is_known, 1 - left / whole, jnp.nan),
  }
