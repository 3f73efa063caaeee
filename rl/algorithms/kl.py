"""KL divergence to a reference policy, token by token, as a penalty.

Letters: L row length.
"""

import dataclasses
from typing import Literal, assert_never

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rl.algorithms import corrections, packed_row
from rl.settings import checks

KlEstimator = Literal["k1", "k2", "k3", "k3_plus"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class KlPenalty:
  """Keeps the policy pi near a reference, from the sampled tokens alone.

  With d = log pi - log reference, of tokens that pi sampled:

  - k1, d: its mean is KL(pi, reference), though single ones are often below
    0. Its gradient as a loss has mean 0.
  - k2, d^2 / 2: biased, little while pi is near. Its gradient as a loss is
    that of KL(pi, reference).
  - k3, e^-d - 1 + d: its mean is KL(pi, reference), and none is below 0. Its
    gradient as a loss is that of the reverse, KL(reference, pi).
  - k3_plus: the value of k3 with the gradient of k2.

  As a loss only k2 and k3_plus have the gradient of what they estimate: of the
  divergence in each state that the policy comes to. That a token decides which
  states come next is left out; it is 4 % of the gradient of the KL of whole
  episodes, on the task of benchmarks/estimator_bias.py. All of that gradient
  has k1 in the reward, with an advantage that is unbiased, such as `Rloo`, as
  each token then has a part in what later ones cost. k2, k3 and k3_plus in the
  reward leave out their own gradient.

  As a loss they are biased on late tokens as well: the gradient of k2 and
  k3_plus, weighed by single tokens as `late` does unless it is set, by 2 % at
  lag 1 and 9 % at lag 4; not weighed, by 6 % and 27 %; weighed by
  `SequenceTruncated(cap=inf)`, not at all. In the reward it is weighed
  together with the advantage. k3 takes gaps below -20 nats as -20.

  Attributes:
    weight: price of a nat.
    where: "loss" adds it to the loss of each token; "reward" takes it from the
      reward of each token, where it is a number without a gradient.
    late: weighs it, as a loss, for the gap between the policy that is trained
      and the one that sampled; None does not.

  Source: Schulman 2020, "Approximating KL divergence"; k3 as a loss: GRPO,
  arXiv 2402.03300, eq. 4; k3_plus, k3 with the gradient of k2: verl; weights:
  DeepSeek-V3.2, 2512.02556, eq. 7.
  """

  estimator: KlEstimator = "k3_plus"
  weight: float = 0.001
  where: Literal["loss", "reward"] = "loss"
  late: corrections.Correction | None = corrections.TokenTruncated()

  def validate(self) -> None:
    """Raises ValueError on k1 as a loss, or weights that mean nothing."""
    out = "use kl=none to leave it out"
    checks.finite_above(self, 0, "weight", out=out)
    if self.estimator == "k1" and self.where == "loss":
      why = "its gradient has mean 0; use k2 or k3_plus, or where=reward"
      checks.refuse(self, "estimator", "where", why=why)
    if self.late is not None and not self.late.compares_old:
      why = "it compares the policy that is trained with that same policy"
      out = "use late=token_truncated, or none"
      checks.refuse(self, "late", why=why, out=out)

  def __call__(
    self, row: packed_row.Row, reference: Float[Array, " L"]
  ) -> Float[Array, " L"]:
    """Returns the estimate of each token in nats, without the weight.

    It is 0 where nothing was sampled, whatever stands there.
    """
    found = estimate(
      self.estimator, packed_row.log_ratio(row.logprobs, reference, row)
    )
    if self.late is None:
      return found
    now = row._replace(old=jax.lax.stop_gradient(row.logprobs))
    return found * jnp.where(row.sampled, self.late(now).weights, 0.0)


def estimate(
  estimator: KlEstimator, gap: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
  """Returns the estimate in nats from log pi - log reference."""
  match estimator:
    case "k1":
      return gap
    case "k2":
      return jnp.square(gap) / 2
    case "k3":
      return _k3(gap)
    case "k3_plus":
      k2 = jnp.square(gap) / 2
      return k2 + jax.lax.stop_gradient(_k3(gap) - k2)
    case _:
      assert_never(estimator)


def _k3(gap: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
  # Below the limit the gradient is 0; that of one of the terms alone would push
  # the policy further away.
  gap = jnp.maximum(gap, -packed_row.MAX_LOG_RATIO)
  # expm1: near 0 the difference of e^-d and 1 is all rounding.
  return jnp.expm1(-gap) + gap
