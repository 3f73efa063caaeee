"""The way of the weights: learner's mesh -> every engine, version by version.

  place (decoding goes on) -> suspend -> update every engine -> resume

Only what training has changed is moved: a leaf that is the very array of the
version before is, in the engine, the copy of that version. The engines
recompute what was in flight; the gate is released by the caller, once this has
returned.
"""

import time
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from rl import dispatch, engine, events, trace, trajectory


class _Sent(NamedTuple):
  """A leaf that an engine has; weak, so that nothing outlives its version."""

  leaf: weakref.ref[jax.Array]
  copy: weakref.ref[jax.Array]


class WeightPublisher:
  """Ships parameters from the learner's shardings to those of each engine.

  Whoever starts the engines calls `place` for each, and the coordinator
  `publish`, one version after another.

  Args:
    pools: each engine with the shardings of its parameters.
    thread: of the learner's mesh, which reads the parameters.
  """

  def __init__(
    self,
    pools: Sequence[tuple[engine.DecodeEngine, Any]],
    thread: dispatch.MeshThread,
    log: events.EventLog,
    spans: trace.Trace,
  ):
    self._pools = pools
    self._thread = thread
    self._log = log
    self._spans = spans
    self._sent: list[list[_Sent | None]] = [[] for _ in pools]

  async def place(self, params: Any, pool: int = 0) -> tuple[Any, int]:
    """Returns a copy of `params` for an engine, and how many bytes moved.

    What the engine still holds of the version before is not copied again.
    """
    leaves, tree = jax.tree.flatten(params)
    places = _places(self._pools[pool][1], params)
    kept = _unchanged(leaves, self._sent[pool])
    missing = [i for i, copy in enumerate(kept) if copy is None]
    moved = await self._thread.run(
      "reshard",
      copy_to,
      [leaves[i] for i in missing],
      [places[i] for i in missing],
    )
    fresh = iter(moved)
    copies = [next(fresh) if copy is None else copy for copy in kept]
    # Numbers, which may take the place of arrays, have no identity.
    self._sent[pool] = [
      _Sent(weakref.ref(leaf), weakref.ref(copy))
      if isinstance(leaf, jax.Array)
      else None
      for leaf, copy in zip(leaves, copies, strict=True)
    ]
    return tree.unflatten(copies), sum(copy.nbytes for copy in moved)

  async def publish(
    self,
    version: trajectory.PolicyVersion,
    params: Any,
    on_publish: engine.OnPublish,
  ) -> float:
    """Returns when every engine serves `version`, with the seconds of stall.

    An engine that does not acknowledge stays paused and the exception of the
    update propagates: a run never goes on with two versions.
    """
    placed = [await self.place(params, i) for i in range(len(self._pools))]
    copies = [copy for copy, _ in placed]
    moved = sum(num_bytes for _, num_bytes in placed)
    self._log.emit("publish_start", version=int(version), moved_bytes=moved)
    start = time.monotonic()
    with self._spans.span(
      "host", "publish", version=int(version), moved_bytes=moved
    ):
      for served, _ in self._pools:
        await served.pause(on_publish)
      for (served, _), copy in zip(self._pools, copies, strict=True):
        await served.update_weights(version, copy)
      for served, _ in self._pools:
        served.resume()
    self._log.emit("published", version=int(version))
    return time.monotonic() - start


def copy_to(params: Any, shardings: Any) -> Any:
  """Returns a copy with other shardings, valid whatever becomes of `params`.

  The learner may donate its own buffers while an engine still reads these.
  """
  # Between meshes that split a leaf differently jax goes through the host.
  with jax.transfer_guard("allow"):
    return jax.device_put(params, shardings, may_alias=False)


def _places(shardings: Any, params: Any) -> list[jax.sharding.Sharding | None]:
  """Returns the sharding of each leaf, as jax.device_put understands them.

  One may be that of a whole subtree, and None leaves the devices to jax.
  """
  places: list[jax.sharding.Sharding | None] = []
  jax.tree.map(
    lambda place, part: places.extend([place] * len(jax.tree.leaves(part))),
    shardings,
    params,
    is_leaf=lambda node: node is None,
  )
  return places


def _unchanged(
  leaves: Sequence[Any], sent: Sequence[_Sent | None]
) -> list[jax.Array | None]:
  """Returns the copy that an engine has of each leaf, or None."""
  if len(leaves) != len(sent):
    return [None] * len(leaves)
  return [
    old.copy() if old is not None and old.leaf() is leaf else None
    for leaf, old in zip(leaves, sent, strict=True)
  ]
