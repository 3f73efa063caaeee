"""Finds the batch, row, trajectory and operation of a nonfinite gradient.

  update -> micro-batches -> rows, each alone -> trajectories, each alone

"Alone" means a batch of the same shape in which all else is padding, so that
one program does for all of them.

Letters: B rows, L row length.
"""

import itertools
import math
import pathlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, PyTree

from models import config as model_config
from models import layer_stack
from models.attention import mask
from rl.data import batch as batch_lib
from rl.data import segment_index
from rl.train import learner, skipped_updates

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_LIBRARIES = "site-packages"
_OURS = ("configs", "envs", "launch", "models", "rl")
_ABSURD = 1e6
"""No parameter, log-probability or advantage of a sound run is so large."""
_COLUMNS = (
  "behaviour",
  "old",
  "reference",
  "values",
  "returns",
  "advantages",
)


class UpdateOutcome(NamedTuple):
  """Loss and gradient of one or more micro-batches.

  Attributes:
    loss: of the policy, as the update reports it.
    norm: of the gradient.
    leaves: parameters whose gradient is not finite, by their paths.
  """

  loss: float
  norm: float
  leaves: tuple[str, ...]

  @property
  def is_finite(self) -> bool:
    """True if the update would be taken."""
    return math.isfinite(self.loss) and math.isfinite(self.norm)


class RowPlace(NamedTuple):
  """A row, or a trajectory within it.

  Attributes:
    segment: None is the whole row.
  """

  batch: int
  row: int
  segment: int | None = None


class Extremes(NamedTuple):
  """The sampled tokens of one column.

  Attributes:
    low, high: of those that are finite; nan when none is.
    bad: how many are not.
    first: the first of them, and its index in the row.
  """

  name: str
  low: float
  high: float
  bad: int
  first: tuple[RowPlace, int] | None


class Parameters(NamedTuple):
  """The parameters that the batches met.

  Attributes:
    bad: parameters that are not finite, by their paths.
    largest: magnitude of a finite entry, and the path of its parameter.
  """

  bad: tuple[str, ...]
  largest: tuple[float, str]


def outcome(
  programs: learner.Learner,
  skipped: skipped_updates.SkippedUpdate,
  batches: Sequence[batch_lib.Batch],
) -> UpdateOutcome:
  """Accumulates micro-batches; returns their loss and gradient."""
  total = None
  for packed in batches:
    total = programs.accumulate(skipped.params, total, packed, skipped.critic)
  assert total is not None  # There is a batch.
  loss, norm, finite = jax.device_get(
    _summary(total, skipped.left_out_divisor, programs.config)
  )
  return UpdateOutcome(float(loss), float(norm), _paths(finite, which=False))


def _summary(
  total: learner.Accumulator,
  left_out_divisor: float,
  config: model_config.ModelConfig,
) -> tuple[Array, Array, PyTree]:
  """Returns loss and norm as `update` has them, and whether leaves are finite.

  See `learner.Learner.update`. Layers that are scanned are told apart.
  """
  _, norm, divisor = learner.mean_gradient(total, left_out_divisor)
  policy = layer_stack.unstack(total.grads.policy, config)
  finite = jax.tree.map(
    lambda g: jnp.isfinite(g).all(), total.grads._replace(policy=policy)
  )
  return total.sums.loss / divisor, norm, finite


def _paths(flags: PyTree, *, which: bool) -> tuple[str, ...]:
  """Returns the paths of the leaves with this flag."""
  return tuple(
    jax.tree_util.keystr(path, simple=True, separator="/")
    for path, flag in jax.tree_util.tree_leaves_with_path(flags)
    if bool(flag) == which
  )


def rows(
  skipped: skipped_updates.SkippedUpdate, number: int
) -> Iterator[RowPlace]:
  """Yields the rows of a micro-batch in which something was sampled."""
  for row in np.flatnonzero(skipped.batches[number].sampled.any(1)).tolist():
    yield RowPlace(number, row)


def trajectories(
  skipped: skipped_updates.SkippedUpdate, row: RowPlace
) -> Iterator[RowPlace]:
  """Yields the trajectories of a row that have a sampled token."""
  packed = skipped.batches[row.batch]
  own = packed.segments[row.row][packed.sampled[row.row]]
  for segment in np.unique(own).tolist():
    yield row._replace(segment=segment)


def alone(packed: batch_lib.Batch, place: RowPlace) -> batch_lib.Batch:
  """Returns a batch of the same shape with nothing but this in it.

  A trajectory brings the prompt that it shares with others.
  """
  keep = _tokens(packed, place)
  height, length = packed.tokens.shape
  experts = None if packed.experts is None else packed.experts[0, 0]
  padding = batch_lib.empty(
    height, length, share_prompts=packed.prefix is not None, experts=experts
  )
  # Those that an empty batch lacks are 0 where nothing was sampled.
  padding = padding._replace(
    **{
      name: np.zeros_like(column)
      for name, column in packed._asdict().items()
      if column is not None and getattr(padding, name) is None
    }
  )

  def cut(column, blank):
    where = keep.reshape(keep.shape + (1,) * (column.ndim - 2))
    return np.where(where, column, blank)

  return jax.tree.map(cut, packed, padding)


def _tokens(
  packed: batch_lib.Batch, place: RowPlace
) -> Bool[np.ndarray, "B L"]:
  keep = np.zeros(packed.tokens.shape, bool)
  own = packed.segments[place.row]
  if place.segment is None:
    keep[place.row] = own > 0
    return keep
  keep[place.row] = own == place.segment
  if packed.prefix is not None:
    parents = packed.prefix.parents[place.row][keep[place.row]]
    known = np.setdiff1d(parents, [mask.NO_PARENT])
    keep[place.row] |= np.isin(own, known)
  return keep


def span(packed: batch_lib.Batch, place: RowPlace) -> tuple[int, int, int]:
  """Returns first index, last index and number of its sampled tokens."""
  found = np.flatnonzero(
    _tokens(packed, place)[place.row] & packed.sampled[place.row]
  )
  return int(found[0]), int(found[-1]), len(found)


def owner(
  skipped: skipped_updates.SkippedUpdate, place: RowPlace
) -> segment_index.Owner | None:
  """Returns the owner of a segment; None if it was not written down."""
  return next((x for x in skipped.owners if x[:3] == place), None)


def parameters(
  programs: learner.Learner, skipped: skipped_updates.SkippedUpdate
) -> Parameters:
  """Returns the parameters that are not finite, and the largest."""
  policy = layer_stack.unstack(skipped.params, programs.config)
  tree = {"policy": policy, "critic": skipped.critic}
  finite, sizes = jax.device_get(_sizes(tree))
  paths = _paths(jax.tree.map(lambda _: True, finite), which=True)
  largest = max(zip(map(float, jax.tree.leaves(sizes)), paths, strict=True))
  return Parameters(_paths(finite, which=False), largest)


def _sizes(tree: PyTree) -> tuple[PyTree, PyTree]:
  def largest(x):
    return jnp.where(jnp.isfinite(x), jnp.abs(x), 0).max()

  finite = jax.tree.map(lambda x: jnp.isfinite(x).all(), tree)
  return finite, jax.tree.map(largest, tree)


def columns(
  programs: learner.Learner, skipped: skipped_updates.SkippedUpdate
) -> list[Extremes]:
  """Returns the extremes of the columns that a loss is made of.

  `logprobs` and `log ratio` are of these parameters, the ratio over `old`, or
  over `behaviour` where that was not scored again.
  """
  found: dict[str, list[np.ndarray]] = {name: [] for name in _COLUMNS}
  found |= {"logprobs": [], "log ratio": []}
  for packed in skipped.batches:
    for name in _COLUMNS:
      column = getattr(packed, name)
      if column is not None:
        found[name].append(column)
    scored = np.asarray(jax.device_get(programs.score(skipped.params, packed)))
    old = packed.behaviour if packed.old is None else packed.old
    found["logprobs"].append(scored)
    with np.errstate(invalid="ignore"):  # inf - inf is one to be found.
      found["log ratio"].append(scored - old)
  return [_extremes(skipped, name, x) for name, x in found.items() if x]


def _extremes(
  skipped: skipped_updates.SkippedUpdate,
  name: str,
  column: Sequence[np.ndarray],
) -> Extremes:
  good, bad, first = [np.zeros(0, np.float32)], 0, None
  for i, (packed, values) in enumerate(
    zip(skipped.batches, column, strict=True)
  ):
    finite = np.isfinite(values)
    good.append(values[packed.sampled & finite])
    wrong = np.argwhere(packed.sampled & ~finite)
    bad += len(wrong)
    if first is None and len(wrong):
      row, index = wrong[0].tolist()
      first = RowPlace(i, row, int(packed.segments[row, index])), index
  joined = np.concatenate(good)
  low, high = math.nan, math.nan
  if len(joined):
    low, high = float(joined.min()), float(joined.max())
  return Extremes(name, low, high, bad, first)


def suspect(found: Parameters, told: Sequence[Extremes]) -> str:
  """Returns where to look when every row fails, each on its own.

  Args:
    told: from `columns`; only columns of the data are looked at.
  """
  if found.bad or found.largest[0] > _ABSURD:
    return "the parameters, not the data"
  odd = [
    column.name
    for column in told
    if column.name in _COLUMNS
    and (column.bad or max(-column.low, column.high) > _ABSURD)
  ]
  if odd:
    return f"what the data has as {' and '.join(odd)}, not the parameters"
  return "the parameters and the loss, not the data"


def first_nan(function: Callable[..., Any], *args: Any) -> str | None:
  """Runs a program operation by operation until one makes a nan.

  It is slow: nothing is compiled as a whole. A program that makes infinities
  only runs to its end, like a finite one.

  Returns:
    The operation and the line of this project that asks for it, of a gradient
    the line that it belongs to; None without a nan.
  """
  try:
    with jax.debug_nans(True), jax.disable_jit():
      jax.block_until_ready(function(*args))
  except FloatingPointError as error:
    return f"{error.args[0]}{_line(error)}"
  return None


def _line(error: BaseException) -> str:
  """Returns " at FILE:LINE in FUNCTION", of the innermost frame of ours."""
  # A backward pass has as its cause where the forward one was traced.
  causes = itertools.chain([error.__cause__], [error])
  for one in causes:
    frames = [] if one is None else traceback.extract_tb(one.__traceback__)
    for frame in reversed(frames):
      path = pathlib.Path(frame.filename)
      # A checkout may hold the libraries, and a wheel lies among them.
      is_own = any(path.is_relative_to(_ROOT / top) for top in _OURS)
      is_near = path.is_relative_to(_ROOT) and _LIBRARIES not in path.parts
      if is_own or is_near:
        at = f"{path.relative_to(_ROOT)}:{frame.lineno}"
        return f" at {at} in {frame.name}: {frame.line}"
  return ""
