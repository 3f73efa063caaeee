"""The training objective of packed rows, summed over micro-batches.

  rows -> per token: loss x correction + KL - entropy + value loss
       -> aggregate: (sum, count) -> sums over all micro-batches of an update

The learner divides by the count once, when the last micro-batch is in.

Letters: B rows, L row length, K lags.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from models.moe import layer as moe_layer
from rl.algorithms import corrections as corrections_lib
from rl.algorithms import kl as kl_lib
from rl.algorithms import losses, packed_row, preference_loss, token_selection
from rl.algorithms import value_loss as value_loss_lib
from rl.data import batch as batch_lib
from rl.settings import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
  """The sum to minimise; each part is aggregated like the policy's loss.

  Attributes:
    correction: weighs tokens for the gap between the policy that sampled them
      and the one that trains; None trusts the loss alone.
    kl: keeps the policy near a reference; None does not.
    value: loss of the critic, where the advantage needs one.
    entropy_bonus: weight of the policy's entropy, in nats a token.
    entropy_on_zero_variance: whether the bonus also counts in groups whose
      members did equally well. Where all groups are such it is the only
      gradient of the policy, and Adam scales any gradient to full steps: the
      policy becomes random within a few rounds.
    top_entropy_share: share of the tokens of each micro-batch, those with the
      highest entropy, whose loss of the policy counts; the others stay in its
      divisor. "Beyond the 80/20 rule", arXiv 2506.01939, has 0.2 (eq. 5).
    covariance: keeps the entropy up at the tokens of each micro-batch that cost
      most of it; None treats all alike.
    balance_weight: weight of the router's load-balance loss. It is not linear
      over micro-batches: each balances its own tokens.
    z_weight: weight of the router's z-loss; 0.001 in its source, ST-MoE, arXiv
      2202.08906, eq. 6. Both mean nothing to a model without experts.
  """

  loss: losses.Loss | preference_loss.Dpo
  correction: corrections_lib.Correction | None = None
  kl: kl_lib.KlPenalty | None = None
  value: value_loss_lib.ValueLoss = value_loss_lib.ValueLoss()
  entropy_bonus: float = 0.0
  entropy_on_zero_variance: bool = False
  top_entropy_share: float = 1.0
  covariance: token_selection.ClipCov | token_selection.KlCov | None = None
  balance_weight: float = 0.01
  z_weight: float = 0.0

  def validate(self) -> None:
    """Raises ValueError on an infinite weight, or tokens weighed twice."""
    words: Any = {"where": "algorithm", "out": "use 0 to leave it out"}
    checks.finite(self, "entropy_bonus", **words)
    checks.finite_at_least(self, 0, "balance_weight", "z_weight", **words)
    checks.above(self, 0, "top_entropy_share", where="algorithm")
    checks.in_unit(self, "top_entropy_share", where="algorithm")
    correction = self.correction
    if correction is not None and correction.weighs and self.loss.own_weight:
      why = "both weigh each token against the policy that sampled it"
      out = "use correction=none"
      checks.refuse(
        self, "correction", "loss", why=why, out=out, where="algorithm"
      )

  @property
  def loss_kl(self) -> kl_lib.KlPenalty | None:
    """The penalty where it is part of the loss."""
    return self.kl if self.kl is not None and self.kl.where == "loss" else None

  @property
  def reward_kl(self) -> kl_lib.KlPenalty | None:
    """The penalty where it is part of the rewards."""
    return self.kl if self.loss_kl is None else None

  def regularises(self, *, has_routers: bool) -> bool:
    """Returns True if groups of zero variance have a gradient too."""
    of_routers = bool(self.balance_weight) or bool(self.z_weight)
    return (
      bool(self.entropy_bonus and self.entropy_on_zero_variance)
      or self.loss_kl is not None
      or (has_routers and of_routers)
    )


class Scored(NamedTuple):
  """The model's scores of a batch; entry t is of token t.

  Attributes:
    values: the critic's, of the state before the token; None without one.
    aux: statistics of the routers; None without any.
  """

  logprobs: Float[Array, "B L"]
  entropy: Float[Array, "B L"]
  values: Float[Array, "B L"] | None
  aux: moe_layer.Aux | None


class CorrectionSums(NamedTuple):
  """Sums of a correction's weights and of the tokens that it changed."""

  weight: Float[Array, ""]
  weight_squared: Float[Array, ""]
  truncated: Float[Array, ""]
  masked: Float[Array, ""]


class ObjectiveSums(NamedTuple):
  """Sums over micro-batches. Divide by `tokens` for means of a token.

  Attributes:
    tokens: that the policy sampled.
    divisor: of the aggregated loss; see `loss_aggregation`.
    loss: of the policy, correction included, as aggregated.
    ratio, ratio_squared: policy / behaviour of each token, within the bounds
      of `packed_row.MAX_LOG_RATIO`.
    lag_tokens, lag_kl: tokens by how many versions they are late, and
      KL(behaviour, policy) of each as k3 has it; the last entry is of all that
      are later.
    covariance: None unless tokens are selected by it.
    kl: to the reference, by the penalty's estimator, without its weight; of
      late tokens as it weighs them.
    critic: without the weight of its loss; None without one.
    margin, accuracy: of pairs, and the share whose margin is above 0, as the
      loss is aggregated; None without pairs.
    router: Aux of each micro-batch, weighted by its divisor, so it divides
      too, except for `dropped`, which is a count; None without experts.
  """

  tokens: Float[Array, ""]
  divisor: Float[Array, ""]
  loss: Float[Array, ""]
  clipped: Float[Array, ""]
  entropy: Float[Array, ""]
  ratio: Float[Array, ""]
  ratio_squared: Float[Array, ""]
  lag_tokens: Float[Array, " K"]
  lag_kl: Float[Array, " K"]
  correction: CorrectionSums | None
  covariance: token_selection.CovarianceSums | None
  kl: Float[Array, ""] | None
  critic: value_loss_lib.ValueSums | None
  margin: Float[Array, ""] | None
  accuracy: Float[Array, ""] | None
  router: moe_layer.Aux | None


def zero(
  objective: Objective, *, num_lags: int, critic: bool, num_experts: int
) -> ObjectiveSums:
  """Returns sums of nothing.

  Args:
    num_experts: 0 for a model without any.
  """
  scalar, lags = jnp.zeros(()), jnp.zeros(num_lags)
  correction = None
  if objective.correction is not None:
    correction = CorrectionSums._make([scalar] * len(CorrectionSums._fields))
  covariance = None
  if objective.covariance is not None:
    covariance = token_selection.CovarianceSums(scalar, scalar)
  router = None
  if num_experts:
    sizes = {"load": num_experts}
    router = moe_layer.Aux(
      *(jnp.zeros(sizes.get(name, ())) for name in moe_layer.Aux._fields)
    )
  paired = isinstance(objective.loss, preference_loss.Dpo)
  return ObjectiveSums(
    tokens=scalar,
    divisor=scalar,
    loss=scalar,
    clipped=scalar,
    entropy=scalar,
    ratio=scalar,
    ratio_squared=scalar,
    lag_tokens=lags,
    lag_kl=lags,
    correction=correction,
    covariance=covariance,
    kl=None if objective.loss_kl is None else scalar,
    critic=value_loss_lib.zero() if critic else None,
    margin=scalar if paired else None,
    accuracy=scalar if paired else None,
    router=router,
  )


def add(one: ObjectiveSums, other: ObjectiveSums) -> ObjectiveSums:
  """Returns the sums over the micro-batches of both."""
  critic = None
  if one.critic is not None and other.critic is not None:
    critic = value_loss_lib.add(one.critic, other.critic)
  one, other = one._replace(critic=None), other._replace(critic=None)
  return jax.tree.map(jnp.add, one, other)._replace(critic=critic)


def metrics(sums: ObjectiveSums, divisor: Float[Array, ""]) -> dict[str, Array]:
  """Returns scalars: means, and one for each entry of a vector.

  `ess` is the effective sample size, (sum w)^2 / (n sum w^2), of n tokens, with
  the weights of the correction or, as `behaviour_ess`, with policy / behaviour;
  of weights that are all 0 it is nan, as is the KL of a lag that no token has.

  Args:
    divisor: what the gradient was divided by.
  """
  tokens = jnp.maximum(sums.tokens, 1.0)
  found = {
    "tokens": sums.tokens,
    "loss": sums.loss / divisor,
  }
  for name in ("clipped", "entropy", "kl"):
    if (added := getattr(sums, name)) is not None:
      found[name] = added / tokens
  for name in ("margin", "accuracy"):
    if (added := getattr(sums, name)) is not None:
      found[name] = added / divisor
  found["behaviour_kl"] = sums.lag_kl.sum() / tokens
  found["behaviour_ess"] = sums.ratio**2 / (tokens * sums.ratio_squared)
  for i in range(len(sums.lag_tokens)):
    found[f"lag_share/{i}"] = sums.lag_tokens[i] / tokens
    found[f"behaviour_kl/lag_{i}"] = sums.lag_kl[i] / sums.lag_tokens[i]
  if (weights := sums.correction) is not None:
    found |= {
      "correction/ess": weights.weight**2 / (tokens * weights.weight_squared),
      "correction/weight": weights.weight / tokens,
      "correction/truncated": weights.truncated / tokens,
      "correction/masked": weights.masked / tokens,
    }
  if sums.covariance is not None:
    found["covariance"] = sums.covariance.covariance / tokens
    found["covariance/selected"] = sums.covariance.selected / tokens
  if sums.critic is not None:
    found |= value_loss_lib.metrics(sums.critic)
  if sums.router is not None:
    router = sums.router._asdict()
    found["dropped"] = router.pop("dropped")
    means = {
      name: x / jnp.maximum(sums.divisor, 1.0) for name, x in router.items()
    }
    load = means.pop("load")
    found |= means | {f"load/{i}": x for i, x in enumerate(load)}
  return found


def of_batch(
  objective: Objective,
  scored: Scored,
  batch: batch_lib.Batch,
  *,
  num_lags: int,
) -> tuple[Float[Array, ""], ObjectiveSums]:
  """Returns the loss to differentiate, not yet divided, and the sums.

  Args:
    batch: of jax arrays, with the columns that the objective reads.
  """
  placed: Any = batch
  sampled, behaviour = placed.sampled, placed.behaviour
  rows = packed_row.Row(
    logprobs=scored.logprobs,
    old=behaviour if placed.old is None else placed.old,
    behaviour=behaviour,
    advantages=placed.advantages,
    sampled=sampled,
    segments=placed.segments,
  )
  terms, covariance = jax.vmap(objective.loss)(rows), None
  if objective.covariance is not None and isinstance(terms, losses.Terms):
    terms, covariance = objective.covariance(terms, rows)
  weighed, correction = _corrected(objective, terms.loss, rows)
  if objective.top_entropy_share < 1:
    which = token_selection.highest(
      objective.top_entropy_share, scored.entropy, sampled
    )
    weighed = jnp.where(which, weighed, 0.0)
  loss, count = _aggregate(objective, weighed, rows)
  entropy = jnp.where(sampled, scored.entropy, 0.0)
  more = -objective.entropy_bonus * entropy
  if placed.entropy_weights is not None:
    more *= placed.entropy_weights
  kl = critic = None
  if (penalty := objective.loss_kl) is not None:
    if placed.reference is None:
      raise ValueError("a batch without log-probabilities of the reference")
    kl = jax.vmap(penalty)(rows, placed.reference)
    more += penalty.weight * kl
  if scored.values is not None:
    value_loss, critic = value_loss_lib.of_batch(
      objective.value, scored.values, batch
    )
    more += objective.value.weight * value_loss
  total = loss + _aggregate(objective, more, rows)[0]
  margin = accuracy = None
  if isinstance(terms, preference_loss.PairTerms):
    margin, _ = _aggregate(objective, terms.margin, rows)
    is_right = (terms.margin > 0).astype(jnp.float32)
    accuracy, _ = _aggregate(objective, is_right, rows)
  gap = jnp.where(sampled, scored.logprobs - behaviour, 0.0)
  ratio = jnp.where(sampled, packed_row.bounded_exp(gap), 0.0)
  sums = ObjectiveSums(
    tokens=sampled.sum().astype(jnp.float32),
    divisor=count,
    loss=loss,
    clipped=_count(terms.clipped),
    entropy=entropy.sum(),
    ratio=ratio.sum(),
    ratio_squared=jnp.square(ratio).sum(),
    **_by_lag(gap, batch, num_lags),
    correction=correction,
    covariance=covariance,
    kl=None if kl is None else kl.sum(),
    critic=critic,
    margin=margin,
    accuracy=accuracy,
    router=None,
  )
  if scored.aux is None:
    return total, sums
  router = jax.tree.map(lambda x: x * count, scored.aux)
  total += objective.balance_weight * router.load_balance
  total += objective.z_weight * router.z_loss
  router = router._replace(dropped=scored.aux.dropped)
  return total, sums._replace(router=router)


def _aggregate(
  objective: Objective, values: Float[Array, "B L"], rows: packed_row.Row
) -> tuple[Float[Array, ""], Float[Array, ""]]:
  sums, counts = jax.vmap(objective.loss.aggregate)(values, rows)
  return sums.sum(), counts.sum()


def _corrected(
  objective: Objective, loss: Float[Array, "B L"], rows: packed_row.Row
) -> tuple[Float[Array, "B L"], CorrectionSums | None]:
  """Returns the weighed loss, and the sums of its weights."""
  if objective.correction is None:
    return loss, None
  found = jax.vmap(objective.correction)(rows)
  weights = jnp.where(rows.sampled, found.weights, 0.0)
  sums = CorrectionSums(
    weight=weights.sum(),
    weight_squared=jnp.square(weights).sum(),
    truncated=_count(found.truncated & rows.sampled),
    masked=_count(found.masked & rows.sampled),
  )
  return loss * weights, sums


def _by_lag(
  gap: Float[Array, "B L"], batch: batch_lib.Batch, num_lags: int
) -> dict[str, Float[Array, " K"]]:
  """Returns `lag_tokens` and `lag_kl` of `ObjectiveSums`."""
  late = jax.nn.one_hot(jnp.minimum(batch.lags, num_lags - 1), num_lags)
  late = jnp.where(batch.sampled[..., None], late, 0.0)
  kl = kl_lib.estimate("k3", -gap)
  return {
    "lag_tokens": late.sum((0, 1)),
    "lag_kl": jnp.einsum("blk,bl->k", late, kl),
  }


def _count(which: Bool[Array, "B L"]) -> Float[Array, ""]:
  return which.sum().astype(jnp.float32)
