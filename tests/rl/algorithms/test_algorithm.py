"""Parts that a user writes: they work, or are refused before anything runs."""

import dataclasses
import re
from typing import Any

import jax.numpy as jnp
import pytest

from rl.algorithms import advantages, algorithm, loss_aggregation, losses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Squared:
  """A loss as a user would write it."""

  aggregate: loss_aggregation.Aggregate = dataclasses.field(
    default_factory=loss_aggregation.TokenMean
  )
  own_weight = False
  has_ratio = True

  def __call__(self, row) -> Any:
    """Returns half the squared log ratio, weighed by the advantage."""
    gap = jnp.where(row.sampled, row.logprobs - row.old, 0.0)
    return losses.Terms(-gap * row.advantages, gap > 1)


class Bare(Squared):
  """Forgets that the terms have a name each."""

  def __call__(self, row) -> Any:
    """Returns an array."""
    return super().__call__(row).loss


class Summed(Squared):
  """Adds up what the aggregate is to add up."""

  def __call__(self, row) -> Any:
    """Returns scalars."""
    loss, clipped = super().__call__(row)
    return losses.Terms(loss.sum(), clipped.any())


class Nameless:
  """Says nothing of itself."""

  def __call__(self, row) -> Any:
    """Returns a loss that is right in itself."""
    return Squared()(row)


class Unweighed:
  """A correction that returns only weights."""

  compares_old = True
  weighs = True

  def __call__(self, row) -> Any:
    """Returns an array."""
    return jnp.ones_like(row.logprobs)


class Ranked(advantages.Estimator):
  """An estimator as a user would write it."""

  def __call__(self, members) -> Any:
    """Returns +1 for the best and -1 for the others."""
    best = max(member.reward for member in members)
    return advantages.Estimate(
      [
        (1.0 if member.reward == best else -1.0) + 0.0 * member.turns
        for member in members
      ]
    )


class Listed(Ranked):
  """Forgets the name of what it returns."""

  def __call__(self, members) -> Any:
    """Returns a list."""
    return super().__call__(members).advantages


class Alike(Ranked):
  """Takes a member for a token."""

  def __call__(self, members) -> Any:
    """Returns an entry a member."""
    found = super().__call__(members).advantages
    return advantages.Estimate([own[:1] for own in found])


def test_parts_of_ones_own_are_taken():
  parts = algorithm.Algorithm(loss=Squared(), advantage=Ranked())
  assert parts.validate() is None


@pytest.mark.parametrize(
  ("parts", "message"),
  [
    (
      {"loss": Nameless()},
      "algorithm.loss=nameless has no own_weight, has_ratio, aggregate; see "
      "rl.algorithms.losses.Loss",
    ),
    (
      {"loss": Bare()},
      "algorithm.loss=bare does not return rl.algorithms.losses.Terms, each "
      "with one entry"
      " a token",
    ),
    (
      {"loss": Summed()},
      "algorithm.loss=summed does not return rl.algorithms.losses.",
    ),
    (
      {"correction": Unweighed()},
      "algorithm.correction=unweighed does not return "
      "rl.algorithms.corrections.Weights",
    ),
    (
      {"advantage": Listed()},
      "algorithm.advantage=listed does not return a "
      "rl.algorithms.advantages.Estimate",
    ),
    (
      {"advantage": Alike()},
      "algorithm.advantage=alike does not return a "
      "rl.algorithms.advantages.Estimate",
    ),
  ],
)
def test_what_is_no_part_is_refused(parts, message):
  made = algorithm.Algorithm()
  # The constructor checks types in tests, but not in a run.
  for name, part in parts.items():
    object.__setattr__(made, name, part)
  with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
    made.validate()
