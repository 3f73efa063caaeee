"""Dimension numbers for Muon: the parameters that are matrices, their axes.

Projections of attention, all heads in one, of MLPs, of each expert, and their
adapters. Embeddings, heads and routers do not count, as their rows are looked
up or compared one by one, nor do norms, biases and a critic, which are vectors.
"""

import math
from typing import Any, NamedTuple

import jax
import optax
from optax import contrib

from rl.train import parameter_axes


def labels(params: Any) -> Any:
  """Returns "muon" for every matrix and "adam" for all else."""
  return jax.tree.map_with_path(
    lambda path, leaf: "adam" if _sides(path, leaf) is None else "muon", params
  )


def numbers(matrices: Any) -> Any:
  """Returns contrib.MuonDimensionNumbers for each of a tree of matrices.

  Other parameters are `optax.MaskedNode`, and stay so.
  """
  return jax.tree.map_with_path(
    lambda path, leaf: contrib.MuonDimensionNumbers(*_of_matrix(path, leaf)),
    matrices,
  )


def scale_to_rms(rms: float) -> optax.GradientTransformation:
  """Scales matrices with singular values of 1 to this root mean square.

  The squares of such an [m, n] add up to min(m, n).
  """

  def scale(path: tuple[Any, ...], step: jax.Array) -> jax.Array:
    sides = _of_matrix(path, step)
    longer = max(math.prod(step.shape[i] for i in side) for side in sides)
    return rms * math.sqrt(longer) * step

  return optax.stateless(
    lambda updates, _: jax.tree.map_with_path(scale, updates)
  )


class _Sides(NamedTuple):
  """Axes that a matrix sums over, and the axes of its result.

  Further axes, of stacked layers and of experts, count one matrix each.
  """

  summed: tuple[int, ...]
  given: tuple[int, ...]


def _of_matrix(path: tuple[Any, ...], leaf: Any) -> _Sides:
  sides = _sides(path, leaf)
  assert sides is not None, jax.tree_util.keystr(path)
  return sides


def _sides(path: tuple[Any, ...], leaf: Any) -> _Sides | None:
  """Returns the sides of a parameter, or None if it is not a matrix."""
  names = parameter_axes.of(path)
  # Vectors, of norms and biases, have neither axis.
  if "router" in names or not {"embed", "rank"}.intersection(names):
    return None
  if leaf.ndim < len(names):  # Of another policy, with heads in one axis.
    return None
  experts = int(names[0] == "experts")
  # One side of every matrix is a single axis: the model's width, or a rank.
  split = 1 if names[experts] in ("embed", "rank") else -1
  inner = range(leaf.ndim - len(names) + experts, leaf.ndim)
  return _Sides(tuple(inner[:split]), tuple(inner[split:]))
