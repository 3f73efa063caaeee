"""Policy losses: frozen callables that give one packed row's loss by token.

In a formula pi is the trained policy, old the one that a ratio is against, mu
the one that sampled, A the advantage, r = pi / old, and sg() has no gradient.
All are minimised; their field `aggregate` sums them up.

Bias is |mean gradient - policy gradient| / |policy gradient| off policy, by lag
in optimizer steps, in bypass mode and without a correction, on the task of
rl/testing/tabular.py. See benchmarks/estimator_bias.py. A trajectory is one
conversation here: of a member that led several, each has a ratio of its own.

Letters: L row length.
"""

import dataclasses
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rl.algorithms import loss_aggregation, packed_row
from rl.settings import checks


class Terms(NamedTuple):
  """The loss of each token; 0 and False where nothing was sampled.

  Attributes:
    loss: in units of the advantage.
    clipped: where a bound keeps the token from counting in full.
  """

  loss: Float[Array, " L"]
  clipped: Bool[Array, " L"]


@runtime_checkable
class Loss(Protocol):
  """Frozen callable over one row."""

  @property
  def own_weight(self) -> bool:
    """True if it weighs tokens by pi over the policy that sampled them.

    A correction that does so as well would weigh them twice.
    """
    ...

  @property
  def has_ratio(self) -> bool:
    """True if it compares pi with an older policy.

    If not, every token counts as sampled by pi itself.
    """
    ...

  @property
  def aggregate(self) -> loss_aggregation.Aggregate:
    """The sum over tokens; see `loss_aggregation`."""
    ...

  def __call__(self, row: packed_row.Row) -> Terms:
    """Returns the loss by token."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClippedSurrogate:
  """-min(r A, clip(r) A): no more gain from a ratio out of bounds.

  With `SequenceMean` it is GRPO's, with `Constant` Dr.GRPO's, as it stands
  DAPO's. Decoupled PPO (arXiv 2110.00641; AReaL, 2505.24298, section 5.2) is
  this with old scored again, which makes it the proximal policy, and the
  correction `TokenTruncated(cap=inf)`, which weighs by old / mu; with one step
  of what was scored at once old is pi, and nothing is clipped: see `epochs` and
  `old_logprob=snapshot`. Bounds 1 and inf clip nothing.
  Bias: 16 % at lag 1, 79 % at lag 4, 56 % mixed.

  Attributes:
    clip_low, clip_high: the ratio stays in [1 - clip_low, 1 + clip_high].
    dual_clip: where A < 0 the loss of a token stays below this times -A, so
      that a ratio far above 1 pushes no further; 3 in its paper.

  Source: PPO, arXiv 1707.06347, eq. 7; two bounds: DAPO, 2503.14476, section
  3.1; dual clip: 1912.09729.
  """

  clip_low: float = 0.2
  clip_high: float = 0.28
  dual_clip: float | None = None
  aggregate: loss_aggregation.Aggregate = loss_aggregation.TokenMean()
  own_weight = False
  has_ratio = True

  def validate(self) -> None:
    """Raises ValueError on bounds that clip a ratio of 1."""
    checks.in_unit(self, "clip_low")
    checks.at_least(self, 0, "clip_high")
    out = "use none to leave it out"
    checks.above(self, 1, "dual_clip", out=out)

  def __call__(self, row: packed_row.Row) -> Terms:
    """Returns the loss; clipped are tokens without a gradient."""
    gain = _advantages(row)
    surrogate, clipped = _clip(_ratio(row), gain, self.clip_low, self.clip_high)
    if self.dual_clip is not None:
      least = self.dual_clip * gain
      too_low = (gain < 0) & (surrogate < least)
      surrogate = jnp.where(too_low, least, surrogate)
      clipped |= too_low
    return Terms(-surrogate, clipped)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gspo:
  """-min(s A, clip(s) A) with one ratio s = exp(mean log r) a trajectory.

  A is the mean over the trajectory, should its tokens differ. A correction that
  weighs by token weighs the one ratio by their mean.
  Bias: 80 % at lag 1, 98 % at lag 4, 94 % mixed.

  Attributes:
    clip_low, clip_high: the ratio stays in [1 - clip_low, 1 + clip_high].

  Source: GSPO, arXiv 2507.18071, eq. 5 and 7; the bounds: section 5.1.
  """

  clip_low: float = 3e-4
  clip_high: float = 4e-4
  aggregate: loss_aggregation.Aggregate = loss_aggregation.SequenceMean()
  own_weight = False
  has_ratio = True

  validate = checks.fields(
    (checks.in_unit, "clip_low"), (checks.at_least, 0, "clip_high")
  )

  def __call__(self, row: packed_row.Row) -> Terms:
    """Returns the loss; clipped are all tokens of a trajectory or none."""
    ratio = packed_row.bounded_exp(packed_row.means(_log_ratio(row), row))
    gain = packed_row.means(row.advantages, row)
    surrogate, clipped = _clip(ratio, gain, self.clip_low, self.clip_high)
    return Terms(-surrogate, clipped)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GspoToken(Gspo):
  """GSPO with an advantage for each token: s_t = sg(s) pi_t / sg(pi_t).

  Where all advantages of a trajectory are the same, value and gradient are
  those of `Gspo`.
  Bias: 80 % at lag 1, 98 % at lag 4, 94 % mixed.

  Source: GSPO, arXiv 2507.18071, section 4.3.
  """

  def __call__(self, row: packed_row.Row) -> Terms:
    """Returns the loss; clipped are tokens without a gradient."""
    whole = packed_row.bounded_exp(packed_row.means(_log_ratio(row), row))
    logprobs = _logprobs(row)
    ratio = jax.lax.stop_gradient(whole) * jnp.exp(
      logprobs - jax.lax.stop_gradient(logprobs)
    )
    surrogate, clipped = _clip(
      ratio, _advantages(row), self.clip_low, self.clip_high
    )
    return Terms(-surrogate, clipped)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gmpo:
  """-g A: g is the geometric mean of the ratios of a trajectory.

  A ratio counts as e^(clip(log r)) where that makes r A smaller: tokens are
  clipped one by one, before the mean, where `Gspo` clips the mean. A is the
  mean over the trajectory, should its tokens differ. A correction that weighs
  by token weighs g by their mean; verl's by their geometric mean.
  Bias: 9 % at lag 1, 86 % at lag 4, 50 % mixed.

  Attributes:
    clip_low, clip_high: log r stays in [-clip_low, clip_high], in nats.

  Source: GMPO, arXiv 2507.20673, eq. 4 and algorithm 1; the bounds: section 3.
  """

  clip_low: float = 0.4
  clip_high: float = 0.4
  aggregate: loss_aggregation.Aggregate = loss_aggregation.SequenceMean()
  own_weight = False
  has_ratio = True

  validate = checks.fields((checks.at_least, 0, "clip_low", "clip_high"))

  def __call__(self, row: packed_row.Row) -> Terms:
    """Returns the loss; clipped are tokens without a gradient."""
    gain = packed_row.means(row.advantages, row)
    ratio = _log_ratio(row)
    bounded = jnp.clip(ratio, -self.clip_low, self.clip_high)
    clipped = bounded * jnp.sign(gain) < ratio * jnp.sign(gain)
    mean = packed_row.means(jnp.where(clipped, bounded, ratio), row)
    return Terms(-packed_row.bounded_exp(mean) * gain, clipped)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cispo:
  """-sg(clip(r)) A log pi: every token keeps a gradient, of bounded weight.

  Bias: 9 % at lag 1, 17 % at lag 4, 14 % mixed.

  Attributes:
    clip_low: the weight is at least 1 - clip_low; None, as in the paper, has
      no lower bound.
    clip_high: it is at most 1 + clip_high. The paper gives no number; the
      bound of 5 is that of ScaleRL, arXiv 2510.13786.

  Source: MiniMax-M1, arXiv 2506.13585, eq. 4 and 5.
  """

  clip_low: float | None = None
  clip_high: float = 4.0
  aggregate: loss_aggregation.Aggregate = loss_aggregation.TokenMean()
  own_weight = False
  has_ratio = True

  validate = checks.fields(
    (checks.in_unit, "clip_low"), (checks.at_least, 0, "clip_high")
  )

  def __call__(self, row: packed_row.Row) -> Terms:
    """Returns the loss; clipped are tokens whose weight is at a bound."""
    ratio = _ratio(row)
    low = 0.0 if self.clip_low is None else 1 - self.clip_low
    bounded = jnp.clip(ratio, low, 1 + self.clip_high)
    return Terms(_reinforce(row, bounded), bounded != ratio)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reinforce:
  """-A log pi: the policy gradient itself, without a ratio.

  By default its sum over a trajectory counts, so on policy its gradient is
  that of the expected return if the advantage allows it.
  Bias: 11 % at lag 1, 32 % at lag 4, 24 % mixed.

  Source: Williams 1992, Machine Learning 8, theorem 1; for language models:
  arXiv 2402.14740.
  """

  aggregate: loss_aggregation.Aggregate = loss_aggregation.Constant(length=1.0)
  own_weight = False
  has_ratio = False

  def __call__(self, row: packed_row.Row) -> Terms:
    """Returns the loss; nothing is clipped."""
    return _unclipped(_reinforce(row, jnp.ones_like(row.logprobs)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Aipo:
  """-sg(min(pi / mu, cap)) A log pi: REINFORCE weighed token by token.

  It is against the policy that sampled, so it is its own correction.
  Bias: 9 % at lag 1, 17 % at lag 4, 14 % mixed.

  Attributes:
    cap: highest weight; the paper takes 2 to 10, PipelineRL (arXiv 2509.19128)
      5. With inf nothing is cut.

  Source: LlamaRL, arXiv 2505.24034.
  """

  cap: float = 5.0
  aggregate: loss_aggregation.Aggregate = loss_aggregation.Constant(length=1.0)
  own_weight = True
  has_ratio = True

  validate = checks.fields((checks.at_least, 1, "cap"))

  def __call__(self, row: packed_row.Row) -> Terms:
    """Returns the loss; clipped are tokens whose weight is the cap."""
    ratio = packed_row.bounded_exp(_sampling_gap(row))
    weights = jnp.minimum(ratio, self.cap)
    return Terms(_reinforce(row, weights), ratio > self.cap)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topr:
  """-sg(w) A log pi: w is 1 where A >= 0, else the trajectory's ratio up to 1.

  Good tokens are imitated however unlikely they have become; bad ones are
  forgotten as they become unlikely, with w = min(product of pi / mu, 1). The
  ratio is of the whole trajectory, the sign of A of each token; the paper has
  one reward for both. It is its own correction.
  Bias: 14 % at lag 1, 39 % at lag 4, 23 % mixed.

  Source: TOPR, arXiv 2503.14286, section 3: the taper clips to [0, 1].
  """

  aggregate: loss_aggregation.Aggregate = loss_aggregation.Constant(length=1.0)
  own_weight = True
  has_ratio = True

  def __call__(self, row: packed_row.Row) -> Terms:
    """Returns the loss; clipped are bad tokens of a ratio above 1."""
    ratio = packed_row.bounded_exp(packed_row.totals(_sampling_gap(row), row))
    is_bad = _advantages(row) < 0
    weights = jnp.where(is_bad, jnp.minimum(ratio, 1.0), 1.0)
    return Terms(_reinforce(row, weights), is_bad & (ratio > 1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vespo:
  """-sg(W^k e^(lambda (1 - W))) A log pi: a soft gate on whole trajectories.

  W is the product of pi / mu over the trajectory, not normed by its length. The
  weight is 1 where W is, and fades on both sides: good ones that have become
  likely, and bad ones that have become unlikely, move the policy no further.
  It is its own correction.
  Bias: 28 % at lag 1, 69 % at lag 4, 49 % mixed.

  Attributes:
    k_positive, k_negative: k where A > 0, and elsewhere.
    lambda_positive, lambda_negative: lambda, likewise.

  Source: VESPO, arXiv 2602.10693, section 3.4; the numbers, and the mean over
  tokens, are those of its authors' code.
  """

  k_positive: float = 2.0
  k_negative: float = 3.0
  lambda_positive: float = 3.0
  lambda_negative: float = 2.0
  aggregate: loss_aggregation.Aggregate = loss_aggregation.TokenMean()
  own_weight = True
  has_ratio = True

  validate = checks.fields(
    (checks.finite_at_least, 0, "k_positive", "k_negative"),
    (checks.finite_above, 0, "lambda_positive", "lambda_negative"),
  )

  def __call__(self, row: packed_row.Row) -> Terms:
    """Returns the loss; nothing is clipped."""
    most = packed_row.MAX_LOG_RATIO
    total = packed_row.totals(_sampling_gap(row), row)
    log_ratio, is_good = jnp.clip(total, -most, most), _advantages(row) > 0
    k = jnp.where(is_good, self.k_positive, self.k_negative)
    decay = jnp.where(is_good, self.lambda_positive, self.lambda_negative)
    fade = decay * (1 - jnp.exp(log_ratio))
    return _unclipped(_reinforce(row, jnp.exp(k * log_ratio + fade)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sapo:
  """-(4 / tau) sigmoid(tau (r - 1)) A: a soft gate where others clip.

  The gradient's weight is r at r = 1 and fades on both sides. On policy the
  loss itself is -2 A / tau, which means nothing.
  Bias: 9 % at lag 1, 16 % at lag 4, 13 % mixed.

  Attributes:
    tau_positive, tau_negative: how fast it fades where A > 0, and elsewhere.

  Source: SAPO, arXiv 2511.20347; the temperatures are its defaults.
  """

  tau_positive: float = 1.0
  tau_negative: float = 1.05
  aggregate: loss_aggregation.Aggregate = loss_aggregation.SequenceMean()
  own_weight = False
  has_ratio = True

  validate = checks.fields(
    (checks.finite_above, 0, "tau_positive", "tau_negative")
  )

  def __call__(self, row: packed_row.Row) -> Terms:
    """Returns the loss; nothing is clipped."""
    gain = _advantages(row)
    tau = jnp.where(gain > 0, self.tau_positive, self.tau_negative)
    gate = jax.nn.sigmoid(tau * (_ratio(row) - 1)) * 4 / tau
    return _unclipped(-gate * gain)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NegativeLogLikelihood:
  """-log pi: imitation of the sampled tokens, whatever their advantage."""

  aggregate: loss_aggregation.Aggregate = loss_aggregation.TokenMean()
  own_weight = False
  has_ratio = False

  def __call__(self, row: packed_row.Row) -> Terms:
    """Returns the loss in nats; nothing is clipped."""
    return _unclipped(-_logprobs(row))


def _advantages(row: packed_row.Row) -> Float[Array, " L"]:
  return jnp.where(row.sampled, row.advantages, 0.0)


def _logprobs(row: packed_row.Row) -> Float[Array, " L"]:
  return jnp.where(row.sampled, row.logprobs, 0.0)


def _log_ratio(row: packed_row.Row) -> Float[Array, " L"]:
  return packed_row.log_ratio(row.logprobs, row.old, row)


def _ratio(row: packed_row.Row) -> Float[Array, " L"]:
  return packed_row.bounded_exp(_log_ratio(row))


def _sampling_gap(row: packed_row.Row) -> Float[Array, " L"]:
  """Returns log pi / mu."""
  return packed_row.log_ratio(row.logprobs, row.behaviour, row)


def _clip(
  ratio: Float[Array, " L"], gain: Float[Array, " L"], low: float, high: float
) -> tuple[Float[Array, " L"], Bool[Array, " L"]]:
  """Returns (min(ratio, clipped ratio) by gain, where that is the clipped)."""
  bounded = jnp.clip(ratio, 1 - low, 1 + high) * gain
  clipped = bounded < ratio * gain
  # Not minimum(): its gradient at a tie would be half of each.
  return jnp.where(clipped, bounded, ratio * gain), clipped


def _reinforce(
  row: packed_row.Row, weights: Float[Array, " L"]
) -> Float[Array, " L"]:
  """Returns -sg(weights) A log pi."""
  return -jax.lax.stop_gradient(weights) * _advantages(row) * _logprobs(row)


def _unclipped(loss: Float[Array, " L"]) -> Terms:
  return Terms(loss, jnp.zeros(loss.shape, bool))
