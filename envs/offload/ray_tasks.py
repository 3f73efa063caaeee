"""A reward computed by tasks of Ray, on this machine or a cluster."""

import asyncio
import dataclasses
import math
from typing import Any

from envs import base, extras, threads
from envs.offload import calls, wire, worker


@dataclasses.dataclass(frozen=True, kw_only=True)
class RayTasks(wire.Elsewhere):
  """Computes a reward in tasks of Ray, one call in each.

  The machines of a cluster need this package, and the reward's.

  Attributes:
    address: of a cluster, as `ray.init` takes it; "" starts Ray here, for as
      long as the run takes.
    cpus: of one task; with 0.5, two share a core.
    max_tasks: at once; others wait.
    start_s: of the connection.
  """

  address: str = ""
  cpus: float = 1.0
  max_tasks: int = 64
  start_s: float = 120.0

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.max_tasks < 1:
      raise ValueError(f"max_tasks={self.max_tasks} must be at least 1")
    for name in ("cpus", "start_s"):
      if not 0 < getattr(self, name) < math.inf:
        raise ValueError(f"{name}={getattr(self, name)} must be above 0")
    extras.require("ray", "ray", "reward ray_tasks")
    worker.packed(self.reward)

  def client(self) -> calls.Client:
    """Returns a client that is not connected."""
    return _Tasks(self)


class _Tasks(calls.Client):
  def __init__(self, setting: RayTasks):
    super().__init__(setting.hedge, setting.max_tasks)
    self._setting = setting
    self._packed = worker.packed(setting.reward)
    self._connecting = asyncio.Lock()
    self._task: Any = None
    self._is_ours = False

  async def open(self) -> None:
    await self.calls.call(lambda: self.send(b""))

  async def send(self, request: bytes) -> list[base.Grade]:
    import ray  # pyright: ignore[reportMissingImports]

    task = await self._connected()
    called = task.remote(self._packed, request)
    try:
      answer = await called
    except ray.exceptions.RayError as error:
      raise calls.CallError(f"a task of Ray ended: {error}") from error
    except BaseException:
      ray.cancel(called, force=True)
      raise
    return wire.read_grades(answer, "a task of Ray")[0]

  async def close(self) -> None:
    import ray  # pyright: ignore[reportMissingImports]

    if self._is_ours:
      self._is_ours = False
      await threads.call(ray.shutdown)

  async def _connected(self) -> Any:
    """Returns the remote function; connects first."""
    async with self._connecting:
      if self._task is None:
        try:
          async with asyncio.timeout(self._setting.start_s):
            self._task = await threads.call(self._connect)
        except (OSError, RuntimeError, ValueError) as error:
          where = self._setting.address or "this machine"
          raise calls.CallError(
            f"Ray on {where} cannot be used: {error or 'it took too long'}"
          ) from error
    return self._task

  def _connect(self) -> Any:
    import ray  # pyright: ignore[reportMissingImports]

    if not ray.is_initialized():
      ray.init(
        self._setting.address or "local",
        include_dashboard=False,
        log_to_driver=False,
        logging_level="warning",
      )
      self._is_ours = True
    # Another attempt is the rollout's to decide.
    options = {"num_cpus": self._setting.cpus, "max_retries": 0}
    return ray.remote(**options)(worker.compute)
