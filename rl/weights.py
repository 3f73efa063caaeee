"""The way of the weights: learner's mesh -> every engine, version by version.

  place (decoding goes on) -> suspend -> update every engine -> resume

The engines recompute what was in flight; the gate is released by the caller,
once this has returned.
"""

import time
from collections.abc import Sequence
from typing import Any

import jax

from rl import dispatch, engine, events, trace, trajectory


class WeightPublisher:
  """Ships parameters from the learner's shardings to those of each engine.

  The coordinator calls `publish`, one version after another.

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

  async def place(self, params: Any, shardings: Any) -> Any:
    """Returns a copy of `params` with the shardings of an engine."""
    return await self._thread.run("reshard", copy_to, params, shardings)

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
    copies = [await self.place(params, where) for _, where in self._pools]
    self._log.emit("publish_start", version=int(version))
    start = time.monotonic()
    with self._spans.span("host", "publish", version=int(version)):
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
