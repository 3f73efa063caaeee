"""Packed rows, one of each loss and correction, and NumPy views of them."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np

from rl.algorithms import corrections, loss_aggregation, losses, packed_row

LOSSES = [
  losses.ClippedSurrogate(),
  losses.ClippedSurrogate(dual_clip=3.0),
  losses.Gspo(clip_low=0.2, clip_high=0.3),
  losses.GspoToken(clip_low=0.2, clip_high=0.3),
  losses.Gmpo(clip_low=0.2, clip_high=0.3),
  losses.Cispo(clip_low=0.3, clip_high=0.5),
  losses.Cispo(),
  losses.Reinforce(),
  losses.Aipo(cap=2.0),
  losses.Topr(),
  losses.Vespo(),
  losses.Sapo(),
  losses.NegativeLogLikelihood(),
]
CORRECTIONS = [
  corrections.TokenTruncated(),
  corrections.TokenTruncated(cap=math.inf),
  corrections.SequenceTruncated(),
  corrections.SequenceTruncated(cap=math.inf),
  corrections.IcePop(),
  corrections.SequenceMasked(),
  corrections.GeometricRejection(),
  corrections.Veto(),
  corrections.OffPolicySequenceMask(delta=0.0),
  corrections.DppoMask(),
  corrections.Both(
    first=corrections.TokenTruncated(), second=corrections.DppoMask()
  ),
]
AGGREGATES = [
  loss_aggregation.TokenMean(),
  loss_aggregation.SequenceMean(),
  loss_aggregation.Constant(length=7.0),
]
COLUMNS = ("logprobs", "old", "behaviour", "advantages")


def frozen_callables(module: ModuleType) -> set[type]:
  """The settings that a module defines and that can be called."""
  return {
    x
    for x in vars(module).values()
    if isinstance(x, type)
    and x.__module__ == module.__name__
    and dataclasses.is_dataclass(x)
  }


def make(
  logprobs: Any,
  *,
  old: Any = None,
  behaviour: Any = None,
  advantages: Any = 1.0,
  sampled: Any = True,
  segments: Any = 1,
) -> packed_row.Row:
  """A row of lists; one number stands for a row full of it.

  `old` is as the policy where it is not given, and `behaviour` as `old`.
  """
  logprobs = jnp.asarray(logprobs, jnp.float32)
  old = logprobs if old is None else old
  behaviour = old if behaviour is None else behaviour
  rest = (
    jnp.broadcast_to(jnp.asarray(x, dtype), logprobs.shape)
    for x, dtype in [
      (old, jnp.float32),
      (behaviour, jnp.float32),
      (advantages, jnp.float32),
      (sampled, bool),
      (segments, jnp.int32),
    ]
  )
  return packed_row.Row(logprobs, *rest)


def of_ratios(ratios: Sequence[float], **columns: Any) -> packed_row.Row:
  """A row whose policy has moved by `ratios` since old and behaviour."""
  old = -1.0 - np.arange(len(ratios))
  return make(old + np.log(ratios), old=old, **columns)


def draw(seed: int, *, lengths: Sequence[int] = (4, 1, 7)) -> packed_row.Row:
  """Trajectories side by side, prompts and padding among what was sampled."""
  rng = np.random.default_rng(seed)
  segments = np.repeat(np.arange(1, len(lengths) + 1), lengths)
  segments = np.concatenate([segments, np.zeros(3, int)])
  size = len(segments)
  sampled = (rng.random(size) < 0.7) & (segments > 0)
  # No trajectory without a sampled token.
  sampled[np.cumsum(lengths) - 1] = True
  old = -rng.exponential(1.0, size)
  # One advantage a trajectory, of both signs.
  advantages = rng.normal(size=len(lengths) + 1)[segments]
  return make(
    old + rng.normal(scale=0.4, size=size),
    old=old,
    behaviour=old + rng.normal(scale=0.4, size=size),
    advantages=advantages,
    sampled=sampled,
    segments=segments,
  )


def poisoned(row: packed_row.Row) -> Iterator[packed_row.Row]:
  """The row with nan or an infinity where nothing was sampled, by column."""
  for name in COLUMNS:
    for poison in (np.nan, np.inf, -np.inf):
      column = jnp.where(row.sampled, getattr(row, name), poison)
      yield row._replace(**{name: column})


def alone(row: packed_row.Row) -> list[packed_row.Row]:
  """Each trajectory of a row as a row that has nothing else."""
  found = np.unique(np.asarray(row.segments)[np.asarray(row.sampled)])
  return [
    packed_row.Row(*(x[np.asarray(row.segments) == k] for x in row))
    for k in found
  ]


def trajectories(row: packed_row.Row) -> Iterator[tuple[np.ndarray, list]]:
  """Yields (indices, [logprobs, old, behaviour, advantages]) in float64."""
  sampled = np.asarray(row.sampled)
  segments = np.asarray(row.segments)
  for k in np.unique(segments[sampled]):
    indices = np.flatnonzero(sampled & (segments == k))
    columns = [np.asarray(getattr(row, name), np.float64) for name in COLUMNS]
    yield indices, [x[indices] for x in columns]
