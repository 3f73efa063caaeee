"""From logits to one id a row: temperature, filters, bias and noise.

The reported log-probability is that of the plain distribution at the
temperature, which the learner can compute again; filters, biases and masks,
which are biases of -inf, only decide the id.

Under a mask an id comes from p / Z, the policy p restricted to what is allowed,
where Z is the probability of all of that. The learner scores by p, so log p is
reported: the ratio of a new policy to this one is then 1 until the policy
changes, and clipping and corrections see its drift alone. With log p / Z the
ratio would begin at Z, almost 0 where a grammar forces what the policy would
not say, and corrections would drop just these tokens. The price: the gradient
of log p is that of the restricted policy plus that of log Z. So forced tokens
are trained too, towards the form where its answers beat the baseline, and away
from it where they do not; as Z grows to 1 the difference vanishes.

Letters: R rows, V vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32


class SamplingParams(NamedTuple):
  """Sampling parameters of each row; see `contract.DecodeRequest`.

  Attributes:
    seed: decides the noise, together with the position.
    bias: row of the bias table; 0 is none.
  """

  temperature: Float32[Array, " R"]
  top_p: Float32[Array, " R"]
  min_p: Float32[Array, " R"]
  top_k: Int32[Array, " R"]
  seed: Int32[Array, " R"]
  bias: Int32[Array, " R"]


def sample(
  logits: Float[Array, "R V"],
  positions: Int32[Array, " R"],
  params: SamplingParams,
  biases: Float32[Array, "slots V"],
) -> tuple[Int32[Array, " R"], Float32[Array, " R"]]:
  """Returns (ids, log-probabilities at the temperature, in nats).

  The noise of an id depends on its row's seed and its position alone. Filters,
  biases and noise that no row asks for are not computed.

  Args:
    positions: of the ids to be sampled.
    biases: row 0 is all zeros.
  """
  greedy = params.temperature <= 0
  logprobs = _at_temperature(logits, params.temperature)
  scores = jax.lax.cond(
    (params.bias > 0).any(),
    lambda: _at_temperature(logits + biases[params.bias], params.temperature),
    lambda: logprobs,
  )
  filtered = (params.top_k > 0) | (params.top_p < 1) | (params.min_p > 0)
  scores = jax.lax.cond(
    (filtered & ~greedy).any(),
    lambda: jnp.where(passes_filters(scores, params), scores, -jnp.inf),
    lambda: scores,
  )
  noisy = jax.lax.cond(
    greedy.all(),
    lambda: scores,
    lambda: jnp.where(
      greedy[:, None],
      scores,
      scores + _noise(params.seed, positions, logits.shape[1]),
    ),
  )
  choice = jnp.argmax(noisy, -1).astype(jnp.int32)
  return choice, jnp.take_along_axis(logprobs, choice[:, None], 1)[:, 0]


def most_probable(
  logits: Float[Array, "R V"], temperature: Float32[Array, " R"], count: int
) -> tuple[Int32[Array, "R count"], Float32[Array, "R count"]]:
  """Returns (ids, log-probabilities) of the best, in the terms of `sample`.

  The best comes first; of equal ones the lower id does.
  """
  logprobs, ids = jax.lax.top_k(_at_temperature(logits, temperature), count)
  return ids, logprobs


def _at_temperature(
  logits: Float[Array, "R V"], temperature: Float32[Array, " R"]
) -> Float32[Array, "R V"]:
  """Returns log-probabilities; at temperature 0 those of the plain logits."""
  scale = jnp.where(temperature <= 0, 1.0, temperature)[:, None]
  return jax.nn.log_softmax(logits.astype(jnp.float32) / scale)


def passes_filters(
  logprobs: Float32[Array, "R V"], params: SamplingParams
) -> Bool[Array, "R V"]:
  """Returns a mask of the ids that pass each of top-k, top-p and min-p.

  The most probable id always passes. Of equal ones the lower id ranks first.
  """
  order = jnp.argsort(-logprobs, -1, stable=True)
  probs = jnp.exp(jnp.take_along_axis(logprobs, order, -1))
  rank = jnp.arange(probs.shape[1])
  max_rank = jnp.where(params.top_k > 0, params.top_k, probs.shape[1])
  before = jnp.cumsum(probs, -1) - probs
  # Rounding may take the sum of all below or above 1.
  reached = (before >= params.top_p[:, None]) & (params.top_p < 1)[:, None]
  passes = (rank < max_rank[:, None]) & ~reached
  passes &= probs >= params.min_p[:, None] * probs[:, :1]
  passes |= rank == 0
  rows = jnp.arange(len(order))[:, None]
  return jnp.zeros_like(passes).at[rows, order].set(passes)


def _noise(
  seeds: Int32[Array, " R"], positions: Int32[Array, " R"], size: int
) -> Float32[Array, "R V"]:
  """Returns Gumbel noise: argmax(log-probabilities + noise) is a sample.

  Source: Gumbel-max trick, Maddison et al., arXiv 1411.0030, section 2.
  """

  def row(seed, position):
    key = jax.random.fold_in(jax.random.key(seed), position)
    return jax.random.gumbel(key, (size,), jnp.float32)

  return jax.vmap(row)(seeds, positions)
