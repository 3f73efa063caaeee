"""Aggregates token losses to a sum, and the count that divides it.

Sums and counts add up over rows, micro-batches and devices and are divided
once an update, so the result does not depend on how trajectories were packed.
Here a trajectory is one conversation, of which a member may have several.

Letters: L row length.
"""

import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float

from rl.algorithms import packed_row
from rl.settings import checks

_Values = Float[Array, " L"]
_SumAndCount = tuple[Float[Array, ""], Float[Array, ""]]


@runtime_checkable
class Aggregate(Protocol):
  """Weighs tokens against one another; a frozen callable over one row."""

  def __call__(self, values: _Values, row: packed_row.Row) -> _SumAndCount:
    """Returns (sum, count) over the sampled tokens."""
    ...

  def count(self, num_tokens: Sequence[int]) -> float:
    """Returns the count that trajectories of these sizes would add in a row.

    Args:
      num_tokens: sampled tokens of each; one without a token adds nothing.
    """
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenMean:
  """Every sampled token of the update counts the same.

  Long trajectories have more tokens, so they weigh more.

  Source: DAPO, arXiv 2503.14476, section 3.3.
  """

  def __call__(self, values: _Values, row: packed_row.Row) -> _SumAndCount:
    """Returns (sum, number of sampled tokens)."""
    return _sum(values, row), row.sampled.sum().astype(jnp.float32)

  def count(self, num_tokens: Sequence[int]) -> float:
    """Returns the number of tokens."""
    return float(sum(num_tokens))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceMean:
  """Every trajectory counts the same, shared by its tokens.

  A token of a short trajectory weighs more than one of a long trajectory.
  Bias: 39 % aside of the gradient on policy.

  Source: GRPO, arXiv 2402.03300, eq. 3; GSPO, 2507.18071, eq. 5.
  """

  def __call__(self, values: _Values, row: packed_row.Row) -> _SumAndCount:
    """Returns (sum of the trajectories' means, number of trajectories)."""
    shares = values / packed_row.sizes(row)
    return _sum(shares, row), packed_row.num_trajectories(row)

  def count(self, num_tokens: Sequence[int]) -> float:
    """Returns the number of trajectories with a token."""
    return _num_trajectories(num_tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constant:
  """The sum over a trajectory, over a constant: no length is favoured.

  Attributes:
    length: the constant. Dr.GRPO takes the longest answer allowed; 1 is the
      policy gradient of the expected return, which is a sum over tokens.

  Source: Dr.GRPO, arXiv 2503.20783, listing 1.
  """

  length: float

  def validate(self) -> None:
    """Raises ValueError unless the length is above 0."""
    out = "use the longest answer allowed"
    checks.finite_above(self, 0, "length", out=out)

  def __call__(self, values: _Values, row: packed_row.Row) -> _SumAndCount:
    """Returns (sum / length, number of trajectories)."""
    return _sum(values, row) / self.length, packed_row.num_trajectories(row)

  def count(self, num_tokens: Sequence[int]) -> float:
    """Returns the number of trajectories with a token."""
    return _num_trajectories(num_tokens)


def _sum(values: _Values, row: packed_row.Row) -> Float[Array, ""]:
  return jnp.where(row.sampled, values, 0.0).sum()


def _num_trajectories(num_tokens: Sequence[int]) -> float:
  return float(sum(n > 0 for n in num_tokens))
