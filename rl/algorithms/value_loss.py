"""The loss of a critic: squared errors of its values, and their metrics.

Letters: B rows, L row length.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from rl.data import batch as batch_lib
from rl.settings import checks

_ROUNDING = 1e-6
"""A variance below this share of the mean square is what sums in float32 have
lost."""


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


class ValueSums(NamedTuple):
  """Of the loss, of the targets R and of the errors R - V, over tokens."""

  loss: Float[Array, ""]
  targets: Float[Array, ""]
  targets_squared: Float[Array, ""]
  errors: Float[Array, ""]
  errors_squared: Float[Array, ""]


def zero() -> ValueSums:
  """Returns sums of nothing."""
  return ValueSums._make([jnp.zeros(())] * len(ValueSums._fields))


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
    loss=found.sum(),
    targets=returns.sum(),
    targets_squared=jnp.square(returns).sum(),
    errors=errors.sum(),
    errors_squared=jnp.square(errors).sum(),
  )
  return found, sums


def metrics(sums: ValueSums, tokens: Float[Array, ""]) -> dict[str, Array]:
  """Returns means of a token.

  `explained_variance` is 1 - var(R - V) / var(R): 1 of a critic that knows all,
  0 of one that says the mean, nan where all targets are about the same.
  """

  def variance(total, squared):
    return squared / tokens - (total / tokens) ** 2

  left = variance(sums.errors, sums.errors_squared)
  whole = variance(sums.targets, sums.targets_squared)
  least = _ROUNDING * sums.targets_squared / tokens
  return {
    "value_loss": sums.loss / tokens,
    "explained_variance": jnp.where(whole > least, 1 - left / whole, jnp.nan),
  }
