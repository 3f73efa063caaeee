"""The way of the weights: learner's mesh -> every engine, version by version.

  cast on the learner's mesh -> copy to each pool's (decoding goes on)
    -> every engine takes its copy, side by side -> compare checksums

Only what training has changed is cast and moved: a leaf that is the very array
of the version before is, in the engine, the copy of that version. What becomes
of requests in flight is the engine's matter; the gate is released by the
caller, once this has returned.
"""

import asyncio
import dataclasses
import functools
import weakref
from collections.abc import Sequence
from typing import (
  Any,
  Literal,
  NamedTuple,
  Protocol,
  get_args,
  runtime_checkable,
)

import jax
import jax.numpy as jnp

from models import config as model_config
from models import quantize, sharding, transformer
from rl.audit import event_log
from rl.data import trajectory
from rl.engine import contract
from rl.runtime import checksum as checksum_lib
from rl.runtime import mesh_thread, trace

Dtype = Literal["same", "bfloat16", "int8"]
"""Of weights in a pool.

same: as the learner has them.
bfloat16: of whatever is wider; build the pool with `pool_model`.
int8: of matrices, with a scale of each output channel; see `models.quantize`.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Publishing:
  """How weights reach the engines.

  Attributes:
    dtype: they are cast before they move, so that fewer bytes do.
    verify: every engine must tell the checksum of what it serves, each time.
  """

  dtype: Dtype = "same"
  verify: bool = False

  def validate(self) -> None:
    """Raises ValueError on a type that weights cannot have."""
    known = get_args(Dtype)
    if self.dtype not in known:
      raise ValueError(
        f"publishing.dtype={self.dtype}; use {' or '.join(known)}"
      )


@runtime_checkable
class Served(Protocol):
  """What takes weights: an engine, or its `router.Door`."""

  async def update_weights(
    self,
    version: trajectory.PolicyVersion,
    params: Any,
    in_flight: contract.InFlight = "recompute",
  ) -> None:
    """Serves `params` from now on; see `contract.DecodeEngine`."""
    ...

  async def checksum(self) -> tuple[trajectory.PolicyVersion, int]:
    """Returns the served version and `checksum.of` its weights."""
    ...

  def stats(self) -> contract.EngineStats:
    """Returns the counters."""
    ...


_PLAIN = Publishing()
_Path = jax.tree_util.KeyPath


def pool_model(
  config: model_config.ModelConfig, dtype: Dtype
) -> model_config.ModelConfig:
  """Returns the model as a pool computes it that is given such weights."""
  if dtype != "bfloat16":
    return config
  compute = dataclasses.replace(config.compute, dtype=dtype)
  return dataclasses.replace(config, compute=compute)


def pool_shardings(
  config: model_config.ModelConfig, layout: sharding.Layout, dtype: Dtype
) -> Any:
  """Returns where a pool has the leaves of parameters that were `cast`."""
  axes = transformer.logical_axes(config)
  shapes = jax.eval_shape(
    functools.partial(cast, dtype=dtype), transformer.shapes(config)
  )
  return layout.tree(sharding.follow(axes, shapes))


def cast(params: Any, dtype: Dtype) -> Any:
  """Returns parameters as a pool has them, where and as they are sharded."""
  return jax.tree_util.tree_map_with_path(
    functools.partial(_cast, dtype), params
  )


def _cast(dtype: Dtype, path: _Path, leaf: Any) -> Any:
  axes = _summed(dtype, path)
  if axes is not None:
    return _quantized(leaf, axes)
  if dtype == "bfloat16" and _is_wide(leaf):
    return _narrowed(leaf)
  return leaf


_quantized = jax.jit(quantize.quantize_matrix, static_argnums=1)
_narrowed = jax.jit(lambda leaf: leaf.astype(jnp.bfloat16))


def _summed(dtype: Dtype, path: _Path) -> tuple[int, ...] | None:
  """Returns the axes of each scale of a leaf that becomes int8, else None."""
  return quantize.summed(path) if dtype == "int8" else None


def _is_wide(leaf: Any) -> bool:
  kind = jnp.dtype(getattr(leaf, "dtype", jnp.int32))
  return jnp.issubdtype(kind, jnp.floating) and kind.itemsize > 2


class _Sent(NamedTuple):
  """A leaf that an engine has; weak, so that nothing outlives its version.

  Attributes:
    copy: a reference to each array that the leaf has become.
  """

  leaf: weakref.ref[jax.Array]
  copy: Any


class WeightPublisher:
  """Ships parameters from the learner's shardings to those of each engine.

  Whoever starts the engines calls `place` for each, and the coordinator
  `publish`, one version after another.

  Args:
    pools: each engine with the shardings of its parameters, after the cast:
      `pool_shardings`.
    thread: of the learner's mesh, which reads the parameters.
  """

  def __init__(
    self,
    pools: Sequence[tuple[Served, Any]],
    thread: mesh_thread.MeshThread,
    log: event_log.EventLog,
    spans: trace.Trace,
    publishing: Publishing = _PLAIN,
  ):
    self._pools = pools
    self._thread = thread
    self._log = log
    self._spans = spans
    self._dtype: Dtype = publishing.dtype
    self._verify = publishing.verify
    self._sent: list[list[_Sent | None]] = [[] for _ in pools]
    self._parts: dict[str, dict[str, str]] = {}

  async def place(self, params: Any, pool: int = 0) -> tuple[Any, int]:
    """Returns a copy of `params` for an engine, and how many bytes moved.

    What the engine still holds of the version before is not copied again.
    """
    (placed,) = await self._place(params, [pool])
    return placed

  async def publish(
    self,
    version: trajectory.PolicyVersion,
    params: Any,
    in_flight: contract.InFlight,
  ) -> float:
    """Returns when every engine serves `version`, with the seconds of stall.

    That is the longest for which decoding stood still in any engine. A copy
    that cannot be made leaves every engine at the version before, and one may
    publish again. When an engine does not take its copy, what it raised
    propagates, with a note of who serves what: a run never goes on with two
    versions.

    Raises:
      RuntimeError: with `Publishing.verify`, an engine serves other weights.
    """
    placed = await self._place(params, range(len(self._pools)))
    copies = [copy for copy, _ in placed]
    moved = sum(num_bytes for _, num_bytes in placed)
    self._log.emit("publish_start", version=int(version), moved_bytes=moved)
    stood_s = [served.stats().paused_s for served, _ in self._pools]
    with self._spans.span(
      "host", "publish", version=int(version), moved_bytes=moved
    ):
      await self._update(version, copies, in_flight)
    if self._verify:
      await self._check(version, params)
    self._log.emit("published", version=int(version))
    return max(
      served.stats().paused_s - before
      for (served, _), before in zip(self._pools, stood_s, strict=True)
    )

  async def _place(
    self, params: Any, pools: Sequence[int]
  ) -> list[tuple[Any, int]]:
    """Returns copies and bytes moved, by pool; a leaf is cast once for all."""
    named, tree = jax.tree_util.tree_flatten_with_path(params)
    leaves = [leaf for _, leaf in named]
    kept = {pool: _unchanged(leaves, self._sent[pool]) for pool in pools}
    changed = {
      i: pair
      for i, pair in enumerate(named)
      if any(i not in copies for copies in kept.values())
    }
    ready = await self._cast(changed)
    if self._verify:
      await self._sum(changed, ready)
    placed = []
    for pool, copies in kept.items():
      places = _places(self._pools[pool][1], params, self._dtype)
      missing = [i for i in ready if i not in copies]
      moved = await self._thread.run(
        "reshard",
        copy_to,
        [ready[i] for i in missing],
        [places[i] for i in missing],
      )
      copies |= zip(missing, moved, strict=True)
      self._sent[pool] = [_sent(x, copies[i]) for i, x in enumerate(leaves)]
      whole = tree.unflatten([copies[i] for i in range(len(leaves))])
      placed.append((whole, sum(x.nbytes for x in jax.tree.leaves(moved))))
    return placed

  async def _cast(self, named: dict[int, tuple[_Path, Any]]) -> dict[int, Any]:
    """Returns leaves as pools have them, but on the learner's mesh."""
    if self._dtype == "same":
      return {i: leaf for i, (_, leaf) in named.items()}
    return await self._thread.run(
      "cast", lambda: {i: _cast(self._dtype, *x) for i, x in named.items()}
    )

  async def _sum(
    self, named: dict[int, tuple[_Path, Any]], ready: dict[int, Any]
  ) -> None:
    """Keeps what leaves contribute to the checksum that engines must tell."""
    found = await self._thread.run(
      "checksum", lambda: {i: checksum_lib.parts(x) for i, x in ready.items()}
    )
    for i, parts in found.items():
      name = jax.tree_util.keystr(named[i][0])
      self._parts[name] = {name + rest: parts[rest] for rest in parts}

  async def _update(
    self,
    version: trajectory.PolicyVersion,
    copies: Sequence[Any],
    in_flight: contract.InFlight,
  ) -> None:
    """Gives every engine its copy, side by side; the first fault ends all."""
    took: list[int] = []
    fault = None

    async def give(number: int) -> None:
      served, _ = self._pools[number]
      await served.update_weights(version, copies[number], in_flight)
      took.append(number)

    try:
      async with asyncio.TaskGroup() as tasks:
        for number in range(len(copies)):
          tasks.create_task(give(number))
    except ExceptionGroup as group:
      fault, *others = group.exceptions
      rest = sorted(set(range(len(copies))) - set(took))
      fault.add_note(
        f"publishing version {version}: engines {sorted(took)} serve it, "
        f"{rest} do not" + "".join(f"; also {other!r}" for other in others)
      )
    if fault is not None:
      raise fault

  async def _check(
    self, version: trajectory.PolicyVersion, params: Any
  ) -> None:
    """Raises RuntimeError unless every engine tells the right checksum."""
    parts: dict[str, str] = {}
    for path, _ in jax.tree_util.tree_leaves_with_path(params):
      parts |= self._parts[jax.tree_util.keystr(path)]
    sent = int(version), checksum_lib.combine(parts)
    told = await asyncio.gather(
      *(x.checksum() for x, _ in self._pools), return_exceptions=True
    )
    for number, answer in enumerate(told):
      if isinstance(answer, contract.EngineClosed):
        continue  # What has stopped serves nothing.
      if isinstance(answer, BaseException):
        raise answer
      serves, total = answer
      if (int(serves), total) != sent:
        raise RuntimeError(
          f"engine {number} serves version {int(serves)} with the checksum "
          f"{total:016x} of its weights; the {len(parts)} arrays of version "
          f"{sent[0]} that it was sent have {sent[1]:016x}: start it again"
        )


def copy_to(params: Any, shardings: Any) -> Any:
  """Returns a copy with other shardings, valid whatever becomes of `params`.

  The learner may donate its own buffers while an engine still reads these.
  """
  # Between meshes that split a leaf differently jax goes through the host.
  with jax.transfer_guard("allow"):
    return jax.device_put(params, shardings, may_alias=False)


def _places(shardings: Any, params: Any, dtype: Dtype) -> list[Any]:
  """Returns where each leaf goes: a sharding, or one of each array that it
  becomes, as jax.device_put understands them.

  One may be that of a whole subtree, and None leaves the devices to jax.
  """
  mark: Any = 0
  marks = jax.tree_util.tree_map_with_path(
    lambda path, _: (
      mark if _summed(dtype, path) is None else quantize.Quantized(mark, mark)
    ),
    params,
  )
  flat: list[jax.sharding.Sharding | None] = []
  jax.tree.map(
    lambda place, part: flat.extend([place] * len(jax.tree.leaves(part))),
    shardings,
    marks,
    is_leaf=lambda node: node is None,
  )
  rest = iter(flat)
  return [
    jax.tree.map(lambda _: next(rest), mark)
    for mark in jax.tree.leaves(marks, is_leaf=quantize.is_quantized)
  ]


def _sent(leaf: Any, copy: Any) -> _Sent | None:
  # Numbers, which may take the place of arrays, have no identity.
  if not isinstance(leaf, jax.Array):
    return None
  return _Sent(weakref.ref(leaf), jax.tree.map(weakref.ref, copy))


def _unchanged(
  leaves: Sequence[Any], sent: Sequence[_Sent | None]
) -> dict[int, Any]:
  """Returns the copies that an engine has of leaves, by their place."""
  if len(leaves) != len(sent):
    return {}
  kept = {}
  for i, (leaf, old) in enumerate(zip(leaves, sent, strict=True)):
    if old is not None and old.leaf() is leaf:
      copy = jax.tree.map(lambda reference: reference(), old.copy)
      # What is gone is None, which is no leaf.
      if jax.tree.structure(copy) == jax.tree.structure(old.copy):
        kept[i] = copy
  return kept
