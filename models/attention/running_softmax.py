"""A softmax over keys that come tile by tile, times their values.

Letters: s keys of a tile, d head width.

Source: arXiv 1805.02867, algorithm 3; with values, FlashAttention-2, arXiv
2307.08691, section 3.1.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

LOWEST = float(np.finfo(np.float32).min)
"""The log of a sum over nothing, for arithmetic without infinities."""


class Running(NamedTuple):
  """The softmax so far: highest score, sum of weights, and mixed values."""

  top: Float32[Array, "*any"]
  total: Float32[Array, "*any"]
  mixed: Float32[Array, "*any d"]


def start(shape: tuple[int, ...], width: int) -> Running:
  """Returns the softmax over no keys."""
  # A finite start: the difference of two maxima is never that of infinities.
  return Running(
    jnp.full(shape, LOWEST, jnp.float32),
    jnp.zeros(shape, jnp.float32),
    jnp.zeros((*shape, width), jnp.float32),
  )


def add(
  so_far: Running,
  scores: Float32[Array, "*any s"],
  mix: Callable[[Float32[Array, "*any s"]], Float32[Array, "*any d"]],
) -> Running:
  """Returns the softmax with a tile more; a tile of -inf changes no bit.

  Args:
    mix: weights -> values, mixed with them.
  """
  top = jnp.maximum(so_far.top, jnp.max(scores, -1))
  weights = jnp.exp(scores - top[..., None])
  kept = jnp.exp(so_far.top - top)
  return Running(
    top,
    so_far.total * kept + jnp.sum(weights, -1),
    so_far.mixed * kept[..., None] + mix(weights),
  )


def result(
  running: Running,
) -> tuple[Float32[Array, "*any d"], Float32[Array, "*any"]]:
  """Returns the mixed values, and the logs of the sums.

  Without keys these are zeros, and the lowest of finite numbers.
  """
  some = running.total > 0
  mixed = running.mixed / jnp.where(some, running.total, 1)[..., None]
  norm = jnp.where(some, running.top + jnp.log(running.total), LOWEST)
  return mixed, norm
