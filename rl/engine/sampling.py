"""From logits to one id a row: temperature, filters, bias and noise.

What is reported is the log-probability of the plain distribution at the
temperature, which the learner can compute again; filters and bias only decide
which id is taken.

Letters: R rows, V vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32


class Knobs(NamedTuple):
  """How each row samples; see `contract.DecodeRequest`.

  Attributes:
    seed: with the position it decides the noise.
    bias: row of the table of biases; 0 is none.
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
  knobs: Knobs,
  biases: Float32[Array, "slots V"],
) -> tuple[Int32[Array, " R"], Float32[Array, " R"]]:
  """Returns (ids, log-probabilities at the temperature, in nats).

  The noise of an id follows from its row's seed and its position alone. What
  no row asks for is not computed.

  Args:
    positions: of the ids to be sampled.
    biases: row 0 is all zeros.
  """
  greedy = knobs.temperature <= 0
  scale = jnp.where(greedy, 1.0, knobs.temperature)[:, None]
  logits = logits.astype(jnp.float32)
  logprobs = jax.nn.log_softmax(logits / scale)
  scores = jax.lax.cond(
    (knobs.bias > 0).any(),
    lambda: jax.nn.log_softmax((logits + biases[knobs.bias]) / scale),
    lambda: logprobs,
  )
  filtered = (knobs.top_k > 0) | (knobs.top_p < 1) | (knobs.min_p > 0)
  scores = jax.lax.cond(
    (filtered & ~greedy).any(),
    lambda: jnp.where(kept(scores, knobs), scores, -jnp.inf),
    lambda: scores,
  )
  noisy = jax.lax.cond(
    greedy.all(),
    lambda: scores,
    lambda: jnp.where(
      greedy[:, None],
      scores,
      scores + _noise(knobs.seed, positions, logits.shape[1]),
    ),
  )
  choice = jnp.argmax(noisy, -1).astype(jnp.int32)
  return choice, jnp.take_along_axis(logprobs, choice[:, None], 1)[:, 0]


def kept(logprobs: Float32[Array, "R V"], knobs: Knobs) -> Bool[Array, "R V"]:
  """Returns which ids pass top-k, top-p and min-p, each on its own.

  The most probable id passes always. Of equal ones the lower id comes first.
  """
  order = jnp.argsort(-logprobs, -1, stable=True)
  probs = jnp.exp(jnp.take_along_axis(logprobs, order, -1))
  rank = jnp.arange(probs.shape[1])
  most = jnp.where(knobs.top_k > 0, knobs.top_k, probs.shape[1])
  before = jnp.cumsum(probs, -1) - probs
  # A sum of all may round to below or above 1.
  reached = (before >= knobs.top_p[:, None]) & (knobs.top_p < 1)[:, None]
  good = (rank < most[:, None]) & ~reached
  good &= probs >= knobs.min_p[:, None] * probs[:, :1]
  good |= rank == 0
  rows = jnp.arange(len(order))[:, None]
  return jnp.zeros_like(good).at[rows, order].set(good)


def _noise(
  seeds: Int32[Array, " R"], positions: Int32[Array, " R"], size: int
) -> Float32[Array, "R V"]:
  """Returns Gumbel noise: the largest sum with log-probabilities is a sample.

  Source: Gumbel-max trick, Maddison et al., arXiv 1411.0030, section 2.
  """

  def row(seed, position):
    key = jax.random.fold_in(jax.random.key(seed), position)
    return jax.random.gumbel(key, (size,), jnp.float32)

  return jax.vmap(row)(seeds, positions)
