"""Weights on their way from the learner's mesh to those of the engines.

  stage: bucket by bucket, while training and decoding go on
           fetch     from the learner's processes, if it has its own
           _cast     on the learner's mesh, between two of its programs
           copy_to   each engine's mesh, on a thread of its own

Only leaves that training has changed are cast and moved: of an unchanged array
the engine keeps its copy. An engine holds two versions while one is staged; the
learner holds one bucket beside its own, and none if nothing is cast.
"""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from models import config as model_config
from models import policy as policy_lib
from models import quantize, sharding
from rl.runtime import checksum as checksum_lib
from rl.runtime import mesh_thread
from rl.settings import checks

Dtype = Literal["same", "bfloat16", "int8", "float8_e4m3fn"]
"""Type of the weights in a pool.

same: the learner's.
bfloat16: for wider types; build the pool with `pool_model`.
int8, float8_e4m3fn: for matrices, with a scale of each output channel; see
  `models.quantize`.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Publishing:
  """The form in which weights reach the engines.

  Attributes:
    dtype: weights are cast before they move, so that fewer bytes do.
    bucket_bytes: of the learner's weights that are cast and moved at a time; an
      array of more makes a bucket of its own.
    verify: compare the checksum of every engine's weights at each publish.
  """

  dtype: Dtype = "same"
  bucket_bytes: int = 1 << 30
  verify: bool = False

  def validate(self) -> None:
    """Raises ValueError on buckets of nothing."""
    checks.at_least(self, 1, "bucket_bytes")


_PLAIN = Publishing()
_Path = jax.tree_util.KeyPath


def pool_model(
  config: model_config.ModelConfig, dtype: Dtype
) -> model_config.ModelConfig:
  """Returns the model as a pool with such weights computes it."""
  if dtype != "bfloat16":
    return config
  compute = dataclasses.replace(config.compute, dtype=dtype)
  return dataclasses.replace(config, compute=compute)


def pool_shardings(
  config: model_config.ModelConfig, layout: sharding.Layout, dtype: Dtype
) -> Any:
  """Returns the shardings of a pool's parameters, after `cast`."""
  axes = policy_lib.of(config).axes
  return layout.tree(sharding.follow(axes, pool_shapes(config, dtype)))


def pool_shapes(config: model_config.ModelConfig, dtype: Dtype) -> Any:
  """Returns shapes and dtypes of a pool's parameters, after `cast`."""
  shapes = policy_lib.of(config).shapes
  return jax.eval_shape(functools.partial(cast, dtype=dtype), shapes)


def cast(params: Any, dtype: Dtype) -> Any:
  """Returns parameters in the pool's type, with their shardings."""
  return jax.tree_util.tree_map_with_path(
    functools.partial(_cast, dtype), params
  )


def _cast(dtype: Dtype, path: _Path, leaf: Any) -> Any:
  axes = _scale_axes(dtype, path)
  if axes is not None:
    return _quantized(leaf, axes, dtype)
  if dtype == "bfloat16" and _is_wide(leaf):
    return _narrowed(leaf)
  return leaf


_quantized = jax.jit(quantize.quantize_matrix, static_argnums=(1, 2))
_narrowed = jax.jit(lambda leaf: leaf.astype(jnp.bfloat16))


def _scale_axes(dtype: Dtype, path: _Path) -> tuple[int, ...] | None:
  """Returns the axes of each scale of a leaf in 8 bits, else None."""
  is_8_bit = dtype in get_args(quantize.Dtype)
  return quantize.summed(path) if is_8_bit else None


def _is_wide(leaf: Any) -> bool:
  kind = jnp.dtype(getattr(leaf, "dtype", jnp.int32))
  return jnp.issubdtype(kind, jnp.floating) and kind.itemsize > 2


class _Sent(NamedTuple):
  """A leaf that an engine has; weak, so that nothing outlives its version.

  Attributes:
    copy: a reference to each array of its copy.
  """

  leaf: weakref.ref[Any]
  copy: Any


def buckets(sizes: Iterable[int], bucket_bytes: int) -> list[list[int]]:
  """Returns the places of sizes, in order, in runs of at most so many bytes.

  A larger size is a run of its own.
  """
  runs: list[list[int]] = []
  room = 0
  for place, size in enumerate(sizes):
    if not runs or size > room:
      runs.append([])
      room = bucket_bytes
    runs[-1].append(place)
    room -= size
  return runs


class StagedCopy(NamedTuple):
  """Weights on an engine's mesh, beside those that it serves.

  Attributes:
    moved_bytes, buckets: of the leaves that had to move.
  """

  params: Any
  moved_bytes: int
  buckets: int


class MeshTransfer:
  """Copies parameters from the learner's shardings to those of each engine.

  `weight_publisher.WeightPublisher` calls `stage`, one version after another.

  Args:
    shardings: of each engine's parameters, after the cast: `pool_shardings`.
    learner: thread of the learner's mesh, which casts.
    copier: thread that copies, so that training need not wait.
    fetch: brings leaves to this process, from a learner that has its own.
    write: puts arrays where engines of other processes read them.
    remote: numbers of these engines, as are all without shardings; a copy holds
      what `write` returned.
  """

  def __init__(
    self,
    shardings: Sequence[Any],
    learner: mesh_thread.MeshThread,
    copier: mesh_thread.MeshThread,
    publishing: Publishing = _PLAIN,
    *,
    fetch: Callable[[Any], Any] | None = None,
    write: Callable[[Sequence[Any]], Sequence[Any]] | None = None,
    remote: Collection[int] = (),
  ):
    self._fetch = fetch
    self._write = write
    self._remote = remote
    self._shardings = shardings
    self._learner = learner
    self._copier = copier
    self._publishing = publishing
    self._dtype: Dtype = publishing.dtype
    # Of engines elsewhere there is one copy, which all of them read.
    self._sent: dict[int | None, list[_Sent | None]] = {}
    self._parts: dict[str, dict[str, str]] = {}

  async def stage(
    self, params: Any, engines: Sequence[int]
  ) -> list[StagedCopy]:
    """Returns a copy of `params` for each of these engines.

    Unchanged leaves that an engine still holds are not copied again.
    """
    named, tree = jax.tree_util.tree_flatten_with_path(params)
    leaves = [leaf for _, leaf in named]
    kept = {
      i: _unchanged(leaves, self._sent.get(self._place(i), [])) for i in engines
    }
    places = {
      i: _places(self._shardings[i], params, self._dtype)
      for i in engines
      if self._place(i) is not None
    }
    moved = dict.fromkeys(engines, 0)
    changed = [
      i
      for i in range(len(leaves))
      if any(i not in copies for copies in kept.values())
    ]
    sizes = [getattr(leaves[i], "nbytes", 0) for i in changed]
    runs = buckets(sizes, self._publishing.bucket_bytes)
    for run in runs:
      bucket = {changed[place]: named[changed[place]] for place in run}
      if self._fetch is not None:
        bucket = await self._copier.run("fetch", self._fetch, bucket)
      ready = await self._cast(bucket)
      if self._publishing.verify:
        await self._record_checksums(bucket, ready)
      for number, copies in kept.items():
        missing = [i for i in ready if i not in copies]
        arrays = [ready[i] for i in missing]
        if self._place(number) is None:
          assert self._write is not None
          fresh = await self._copier.run("store", self._write, arrays)
        else:
          where = [places[number][i] for i in missing]
          fresh = await self._copier.run("reshard", copy_to, arrays, where)
        copies |= zip(missing, fresh, strict=True)
        moved[number] += sum(x.nbytes for x in jax.tree.leaves(fresh))
    staged = []
    for number, copies in kept.items():
      sent = [_sent(x, copies[i]) for i, x in enumerate(leaves)]
      self._sent[self._place(number)] = sent
      whole = tree.unflatten([copies[i] for i in range(len(leaves))])
      staged.append(StagedCopy(whole, moved[number], len(runs)))
    return staged

  def _place(self, number: int) -> int | None:
    """Returns the number of an engine in this process; None of any other."""
    is_here = number < len(self._shardings) and number not in self._remote
    return number if is_here else None

  async def _cast(
    self, named: Mapping[int, tuple[_Path, Any]]
  ) -> dict[int, Any]:
    """Returns leaves in the pools' type, on the learner's mesh."""
    if self._dtype == "same":
      return {i: leaf for i, (_, leaf) in named.items()}
    return await self._learner.run(
      "cast", lambda: {i: _cast(self._dtype, *x) for i, x in named.items()}
    )

  async def _record_checksums(
    self, named: Mapping[int, tuple[_Path, Any]], ready: Mapping[int, Any]
  ) -> None:
    """Records the checksums of these leaves, which the engines must match."""
    sums = await self._learner.run(
      "checksum", lambda: {i: checksum_lib.parts(x) for i, x in ready.items()}
    )
    for i, parts in sums.items():
      name = jax.tree_util.keystr(named[i][0])
      self._parts[name] = {name + rest: parts[rest] for rest in parts}

  def checksum(self, params: Any) -> int | None:
    """Returns the checksum of `params` as staged; None without `verify`."""
    if not self._publishing.verify:
      return None
    parts: dict[str, str] = {}
    for path, _ in jax.tree_util.tree_leaves_with_path(params):
      parts |= self._parts[jax.tree_util.keystr(path)]
    return checksum_lib.combine(parts)


def copy_to(params: Any, shardings: Any) -> Any:
  """Returns a copy with other shardings that shares no buffer with `params`.

  The learner may donate its own buffers while an engine still reads these.
  """
  # Between meshes that split a leaf differently jax goes through the host.
  with jax.transfer_guard("allow"):
    return jax.device_put(params, shardings, may_alias=False)


def _places(shardings: Any, params: Any, dtype: Dtype) -> list[Any]:
  """Returns the sharding of each leaf, for jax.device_put.

  A leaf that becomes several arrays has one for each. A sharding may stand for
  a whole subtree, and None leaves the devices to jax.
  """
  mark: Any = 0
  pair = quantize.Quantized(mark, mark)
  marks = jax.tree_util.tree_map_with_path(
    lambda path, _: mark if _scale_axes(dtype, path) is None else pair, params
  )
  whole = jax.tree.broadcast(shardings, marks, lambda node: node is None)
  return jax.tree.leaves(
    whole, lambda node: node is None or quantize.is_quantized(node)
  )


def _sent(leaf: Any, copy: Any) -> _Sent | None:
  try:
    return _Sent(weakref.ref(leaf), jax.tree.map(weakref.ref, copy))
  except TypeError:  # Plain numbers in the place of arrays have no identity.
    return None


def _unchanged(
  leaves: Sequence[Any], sent: Sequence[_Sent | None]
) -> dict[int, Any]:
  """Returns the engine's copies of unchanged leaves, by their place."""
  if len(leaves) != len(sent):
    return {}
  kept = {}
  for i, (leaf, old) in enumerate(zip(leaves, sent, strict=True)):
    if old is not None and old.leaf() is leaf:
      copy = jax.tree.map(lambda reference: reference(), old.copy)
      # A collected array leaves None, which does not count as a leaf.
      if jax.tree.structure(copy) == jax.tree.structure(old.copy):
        kept[i] = copy
  return kept
