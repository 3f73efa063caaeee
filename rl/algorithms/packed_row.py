"""One packed row as losses and corrections see it, and sums a trajectory.

Letters: L row length.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

MAX_LOG_RATIO = 20.0
"""Log ratios are kept within this many nats, so that e^20 = 4.9e8 bounds every
ratio and a product of two is far from infinity. Beyond it the ratio has no
gradient. verl bounds them alike (`core_algos.py`)."""


class Row(NamedTuple):
  """Several trajectories, side by side; index t is of token t.

  Log-probabilities are in nats. Entries that were not sampled may be nan.

  Attributes:
    logprobs: of the trained policy; only these have a gradient.
    old: of the policy that a ratio is against, pi_old; `behaviour` if it was
      not scored again.
    behaviour: of the engine that sampled the token, mu; a row may mix versions.
    sampled: the tokens of the policy.
    segments: the trajectory that a sampled token belongs to, in [0, L]; no
      trajectory is in two rows.
  """

  logprobs: Float[Array, " L"]
  old: Float[Array, " L"]
  behaviour: Float[Array, " L"]
  advantages: Float[Array, " L"]
  sampled: Bool[Array, " L"]
  segments: Int[Array, " L"]


def log_ratio(
  over: Float[Array, " L"], under: Float[Array, " L"], row: Row
) -> Float[Array, " L"]:
  """Returns the log of over / under in nats, 0 where nothing was sampled."""
  # where() before exp(): padding may hold -inf, and inf * 0 is nan.
  return jnp.where(row.sampled, over - under, 0.0)


def bounded_exp(
  log_ratios: Float[Array, "*shape"],
) -> Float[Array, "*shape"]:
  """Returns the exponential, within `MAX_LOG_RATIO`."""
  return jnp.exp(jnp.clip(log_ratios, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def totals(values: Float[Array, " L"], row: Row) -> Float[Array, " L"]:
  """Returns, at each sampled token, the sum over its trajectory; else 0.

  Args:
    values: those of tokens that were not sampled are not looked at.
  """
  keys = _keys(row)
  return _by_key(jnp.where(row.sampled, values, 0.0), keys)[keys]


def sizes(row: Row) -> Float[Array, " L"]:
  """Returns, at each token, how many its trajectory has; 1 if not sampled."""
  counts = totals(jnp.ones_like(row.logprobs), row)
  return jnp.where(row.sampled, counts, 1.0)


def means(values: Float[Array, " L"], row: Row) -> Float[Array, " L"]:
  """Returns, at each sampled token, the mean over its trajectory; else 0."""
  return totals(values, row) / sizes(row)


def num_trajectories(row: Row) -> Float[Array, ""]:
  """Returns how many trajectories have a sampled token in this row."""
  found = _by_key(row.sampled.astype(jnp.float32), _keys(row)) > 0
  return found.sum().astype(jnp.float32)


def _keys(row: Row) -> Int[Array, " L"]:
  """Returns the trajectory of each token; all padding has one of its own."""
  return jnp.where(row.sampled, row.segments, len(row.segments) + 1)


def _by_key(
  values: Float[Array, " L"], keys: Int[Array, " L"]
) -> Float[Array, " keys"]:
  return jax.ops.segment_sum(values, keys, num_segments=len(keys) + 2)
