"""Programs on the hosts of a Ray cluster, each held by an actor.

Ray finds a place for a program and tells when its host is lost. Tokens and
weights do not pass through it.
"""

import dataclasses
import os
import pathlib
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent import futures
from typing import Any

from rl.backends import contract, followed, host, local
from rl.settings import checks

_LOOK_S = 0.2
_ANSWER_S = 30.0
_CHUNK = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ray:
  """Starts each program in an actor of a Ray cluster that is up.

  Its hosts have this checkout at the same path, and this Python's packages.

  Attributes:
    address: of the cluster, as `ray.init` takes it; "auto" finds that of this
      host.
    cpus, gpus: of each program.
    resources: further ones that its host must have, such as `{"tpu": 4}`.
    host: address of this host for the cluster; None is the one that Ray uses.
    place_s: longest wait for the cluster to answer, and for a host with enough
      of all these.
  """

  address: str = "auto"
  cpus: float = 1.0
  gpus: float = 0.0
  resources: dict[str, float] = dataclasses.field(default_factory=dict)
  host: str | None = None
  place_s: float = 60.0

  shares_memory = False

  def validate(self) -> None:
    """Raises ValueError on an amount that cannot be had."""
    where = "placement.backend"
    checks.finite_at_least(self, 0, "cpus", "gpus", where=where)
    checks.finite_above(self, 0, "place_s", where=where)

  def validate_installed(self) -> None:
    """Raises ValueError without ray."""
    checks.installed("backend ray", "ray", "ray")

  def open(self, folder: pathlib.Path) -> contract.Launcher:
    """Connects to the cluster.

    Raises:
      ValueError: there is none, or it does not answer in `place_s`.
    """
    del folder
    self.validate_installed()
    import ray  # pyright: ignore[reportMissingImports]

    is_ours = not ray.is_initialized()
    if is_ours:
      try:
        self._connect(ray)
      except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        why = str(error) or f"nothing came in {self.place_s:g} s"
        raise ValueError(
          f"placement.backend.address={self.address}: no Ray answers: {why}; "
          "start one with `ray start --head`, and more hosts with "
          "`ray start --address=HOST:6379`"
        ) from error
    own = self.host or ray.util.get_node_ip_address()
    return _RayLauncher(self, own, is_ours)

  def _connect(self, ray: Any) -> None:
    """Connects, in a thread: Ray waits for minutes where a cluster is gone.

    There it also leaves the handler of SIGTERM alone, and would warn of that.
    """
    connected = futures.Future[None]()

    def connect():
      try:
        ray.init(
          self.address,
          log_to_driver=False,
          logging_level="error",
          namespace="twinmesh",
        )
      except BaseException as error:
        connected.set_exception(error)
      else:
        connected.set_result(None)

    threading.Thread(target=connect, name="ray-init", daemon=True).start()
    connected.result(self.place_s)


class Holder:
  """Runs a program where Ray has placed it; an actor."""

  def __init__(self, data: Mapping[str, Any]):
    self._folder = tempfile.TemporaryDirectory()
    log = pathlib.Path(self._folder.name) / "log"
    log.touch()
    self._process = local.LocalProcess(host.read_program(dict(data), log))
    self._output = log.open("rb")
    self._is_lost = False
    threading.Thread(target=self._end_with_raylet, daemon=True).start()

  def _end_with_raylet(self) -> None:
    """Ends program and actor once their raylet has ended: Ray lets them be."""
    parent = os.getppid()
    while os.getppid() == parent:
      time.sleep(_LOOK_S)
    self._is_lost = True
    self._process.close()
    os._exit(1)

  def place(self) -> str:
    """Returns the address of its host."""
    import ray  # pyright: ignore[reportMissingImports]

    return ray.util.get_node_ip_address()

  def poll(self, signals: Sequence[int]) -> tuple[bytes, int | None, str]:
    """Passes signals on; returns new output, code and reason."""
    for number in signals:
      self._process.signal(number)
    code = self._process.code()
    output = self._output.read(_CHUNK)
    # Its last words come before its code. One that was ended with its raylet
    # has none: whoever asks is to hear from Ray that it is lost.
    is_over = not output and not self._is_lost
    return output, code if is_over else None, self._process.reason


class _RayLauncher(followed.FollowingLauncher):
  def __init__(self, setting: Ray, own: str, is_ours: bool):
    super().__init__()
    self.host = own
    self._setting = setting
    self._is_ours = is_ours

  def _make(self, program: contract.Program) -> followed.Followed:
    return _RayProcess(program, self._setting)

  def close(self) -> None:
    """Ends every process that is left, and the connection."""
    super().close()
    if self._is_ours:
      import ray  # pyright: ignore[reportMissingImports]

      self._is_ours = False
      ray.shutdown()


class _RayProcess(followed.Followed):
  def __init__(self, program: contract.Program, setting: Ray):
    super().__init__(program)
    self._setting = setting

  def _follow(self) -> int:
    import ray  # pyright: ignore[reportMissingImports]

    setting = self._setting
    data = host.sent(self.program)
    actor = (
      ray.remote(Holder)
      .options(
        num_cpus=setting.cpus,
        num_gpus=setting.gpus,
        resources=setting.resources,
        max_restarts=0,
      )
      .remote(data)
    )
    try:
      first = actor.poll.remote(())
      self._wait_for_place(ray, first)
      self.place = ray.get(actor.place.remote(), timeout=_ANSWER_S)
      self._begun.set()
      return self._poll(ray, actor, first)
    except ray.exceptions.RayError as error:
      raise followed.NotPlaced(f"Ray has lost it: {error}") from error
    finally:
      # Its program ends with the pipe that the actor holds.
      ray.kill(actor)

  def _wait_for_place(self, ray: Any, first: Any) -> None:
    begin_s, place_s = time.monotonic(), self._setting.place_s
    while not ray.wait([first], timeout=_LOOK_S)[0]:
      if not self.has_time_left(begin_s, place_s):
        setting = self._setting
        wanted = {"CPU": setting.cpus, "GPU": setting.gpus, **setting.resources}
        raise followed.NotPlaced(
          f"no host has had {_amounts(wanted)} free in {place_s:g} s; free "
          f"now: {_free(ray)}; lower it, or add a host"
        )

  def _poll(self, ray: Any, actor: Any, polled: Any) -> int:
    while True:
      output, code, self.reason = ray.get(polled, timeout=_ANSWER_S)
      self._write(output)
      if code is not None:
        return code
      if not output:
        time.sleep(_LOOK_S)
      polled = actor.poll.remote(self._taken())


def _amounts(found: Mapping[str, float]) -> str:
  named = [f"{name} {count:g}" for name, count in found.items() if count]
  return ", ".join(named) or "nothing"


def _free(ray: Any) -> str:
  """Returns the free resources of each host, as text."""
  hidden = ("node:", "memory", "object_store_memory", "accelerator_type:")
  hosts = {
    node["NodeID"]: node["NodeManagerAddress"]
    for node in ray.nodes()
    if node["Alive"]
  }
  free = ray._private.state.available_resources_per_node()
  return "; ".join(
    f"{address} "
    + _amounts(
      {
        name: count
        for name, count in free.get(node, {}).items()
        if not name.startswith(hidden)
      }
    )
    for node, address in hosts.items()
  )
