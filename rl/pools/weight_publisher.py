"""Weight synchronisation: learner's mesh -> every engine, version by version.

  publish: _place: _cast on the learner's mesh -> copy_to each engine's mesh
             (decoding goes on)
           _update: Router.update_weights, all engines side by side
           _check: compare checksums

Only leaves that training has changed are cast and moved: of an unchanged array
the engine keeps its copy. Requests in flight are the engine's business; the
caller releases the gate once `publish` has returned.
"""

import asyncio
import dataclasses
import functools
import weakref
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from models import config as model_config
from models import policy as policy_lib
from models import quantize, sharding
from rl.audit import event_log
from rl.engine import contract
from rl.pools import router as router_lib
from rl.runtime import checksum as checksum_lib
from rl.runtime import mesh_thread, trace
from rl.settings import checks

Dtype = Literal["same", "bfloat16", "int8"]
"""Type of the weights in a pool.

same: the learner's.
bfloat16: for wider types; build the pool with `pool_model`.
int8: for matrices, with a scale of each output channel; see `models.quantize`.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Publishing:
  """The form in which weights reach the engines.

  Attributes:
    dtype: weights are cast before they move, so that fewer bytes do.
    verify: compare the checksum of every engine's weights at each publish.
  """

  dtype: Dtype = "same"
  verify: bool = False

  def validate(self) -> None:
    """Raises ValueError on an unknown type."""
    checks.one_of(self, Dtype, "dtype")


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
  policy = policy_lib.of(config)
  shapes = jax.eval_shape(functools.partial(cast, dtype=dtype), policy.shapes)
  return layout.tree(sharding.follow(policy.axes, shapes))


def cast(params: Any, dtype: Dtype) -> Any:
  """Returns parameters in the pool's type, with their shardings."""
  return jax.tree_util.tree_map_with_path(
    functools.partial(_cast, dtype), params
  )


def _cast(dtype: Dtype, path: _Path, leaf: Any) -> Any:
  axes = _scale_axes(dtype, path)
  if axes is not None:
    return _quantized(leaf, axes)
  if dtype == "bfloat16" and _is_wide(leaf):
    return _narrowed(leaf)
  return leaf


_quantized = jax.jit(quantize.quantize_matrix, static_argnums=1)
_narrowed = jax.jit(lambda leaf: leaf.astype(jnp.bfloat16))


def _scale_axes(dtype: Dtype, path: _Path) -> tuple[int, ...] | None:
  """Returns the axes of each scale of a leaf that becomes int8, else None."""
  return quantize.summed(path) if dtype == "int8" else None


def _is_wide(leaf: Any) -> bool:
  kind = jnp.dtype(getattr(leaf, "dtype", jnp.int32))
  return jnp.issubdtype(kind, jnp.floating) and kind.itemsize > 2


class _Sent(NamedTuple):
  """A leaf that an engine has; weak, so that nothing outlives its version.

  Attributes:
    copy: a reference to each array of its copy.
  """

  leaf: weakref.ref[jax.Array]
  copy: Any


class WeightPublisher:
  """Ships parameters from the learner's shardings to those of each engine.

  `assemble.Parts.start` calls `place` for each engine, and the coordinator
  `publish`, one version after another.

  Args:
    shardings: of each engine's parameters, after the cast: `pool_shardings`.
    thread: of the learner's mesh, which reads the parameters.
  """

  def __init__(
    self,
    router: router_lib.Router,
    shardings: Sequence[Any],
    thread: mesh_thread.MeshThread,
    log: event_log.EventLog,
    spans: trace.Trace,
    publishing: Publishing = _PLAIN,
  ):
    self._router = router
    self._shardings = shardings
    self._thread = thread
    self._log = log
    self._spans = spans
    self._dtype: Dtype = publishing.dtype
    self._verify = publishing.verify
    self._sent: list[list[_Sent | None]] = [[] for _ in shardings]
    self._parts: dict[str, dict[str, str]] = {}

  async def place(self, params: Any, number: int = 0) -> tuple[Any, int]:
    """Returns a copy of `params` for an engine, and the bytes moved.

    Unchanged leaves that the engine still holds are not copied again.
    """
    (placed,) = await self._place(params, [number])
    return placed

  async def publish(
    self,
    version: int,
    params: Any,
    in_flight: contract.InFlight,
  ) -> float:
    """Returns the seconds of stall, once every engine serves `version`.

    That is the longest time for which decoding stood still in any engine. If a
    copy fails, every engine stays at the version before, and one may publish
    again. If an engine fails to take its copy, its exception propagates, with
    a note of the engines that serve the new version: a run never goes on with
    two versions.

    Raises:
      RuntimeError: with `Publishing.verify`, an engine serves other weights.
    """
    placed = await self._place(params, range(len(self._shardings)))
    copies = [copy for copy, _ in placed]
    moved = sum(num_bytes for _, num_bytes in placed)
    self._log.emit("publish_start", version=version, moved_bytes=moved)
    before_s = self._paused_s()
    with self._spans.span(
      "host", "publish", version=version, moved_bytes=moved
    ):
      await self._update(version, copies, in_flight)
    if self._verify:
      await self._check(version, params)
    self._log.emit("published", version=version)
    pauses_s = zip(before_s, self._paused_s(), strict=True)
    return max(after - before for before, after in pauses_s)

  def _paused_s(self) -> list[float]:
    return [engine.stats().paused_s for engine in self._router.engines]

  async def _place(
    self, params: Any, numbers: Sequence[int]
  ) -> list[tuple[Any, int]]:
    """Returns copy and bytes moved of each engine; a leaf is cast once."""
    named, tree = jax.tree_util.tree_flatten_with_path(params)
    leaves = [leaf for _, leaf in named]
    kept = {i: _unchanged(leaves, self._sent[i]) for i in numbers}
    changed = {
      i: pair
      for i, pair in enumerate(named)
      if any(i not in copies for copies in kept.values())
    }
    ready = await self._cast(changed)
    if self._verify:
      await self._record_checksums(changed, ready)
    placed = []
    for number, copies in kept.items():
      places = _places(self._shardings[number], params, self._dtype)
      missing = [i for i in ready if i not in copies]
      moved = await self._thread.run(
        "reshard",
        copy_to,
        [ready[i] for i in missing],
        [places[i] for i in missing],
      )
      copies |= zip(missing, moved, strict=True)
      self._sent[number] = [_sent(x, copies[i]) for i, x in enumerate(leaves)]
      whole = tree.unflatten([copies[i] for i in range(len(leaves))])
      placed.append((whole, sum(x.nbytes for x in jax.tree.leaves(moved))))
    return placed

  async def _cast(self, named: dict[int, tuple[_Path, Any]]) -> dict[int, Any]:
    """Returns leaves in the pools' type, on the learner's mesh."""
    if self._dtype == "same":
      return {i: leaf for i, (_, leaf) in named.items()}
    return await self._thread.run(
      "cast", lambda: {i: _cast(self._dtype, *x) for i, x in named.items()}
    )

  async def _record_checksums(
    self, named: dict[int, tuple[_Path, Any]], ready: dict[int, Any]
  ) -> None:
    """Records the checksums of these leaves, which the engines must match."""
    sums = await self._thread.run(
      "checksum", lambda: {i: checksum_lib.parts(x) for i, x in ready.items()}
    )
    for i, parts in sums.items():
      name = jax.tree_util.keystr(named[i][0])
      self._parts[name] = {name + rest: parts[rest] for rest in parts}

  async def _update(
    self,
    version: int,
    copies: Sequence[Any],
    in_flight: contract.InFlight,
  ) -> None:
    """Updates all engines at once; the first fault cancels the rest."""
    updated: list[int] = []
    fault = None

    async def update(number: int) -> None:
      copy = copies[number]
      await self._router.update_weights(number, version, copy, in_flight)
      updated.append(number)

    try:
      async with asyncio.TaskGroup() as tasks:
        for number in range(len(copies)):
          tasks.create_task(update(number))
    except ExceptionGroup as group:
      fault, *also = group.exceptions
      others = sorted(set(range(len(copies))) - set(updated))
      fault.add_note(
        f"publishing version {version}: engines {sorted(updated)} serve it, "
        f"{others} do not" + "".join(f"; also {other!r}" for other in also)
      )
    if fault is not None:
      raise fault

  async def _check(self, version: int, params: Any) -> None:
    """Raises RuntimeError unless every engine has the right checksum."""
    parts: dict[str, str] = {}
    for path, _ in jax.tree_util.tree_leaves_with_path(params):
      parts |= self._parts[jax.tree_util.keystr(path)]
    sent = version, checksum_lib.combine(parts)
    answers = await asyncio.gather(
      *(self._router.checksum(i) for i in range(len(self._shardings))),
      return_exceptions=True,
    )
    for number, answer in enumerate(answers):
      if isinstance(answer, contract.EngineClosed):
        continue  # A stopped engine serves nothing.
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
  # Plain numbers in the place of arrays have no identity.
  if not isinstance(leaf, jax.Array):
    return None
  return _Sent(weakref.ref(leaf), jax.tree.map(weakref.ref, copy))


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
