"""Programs as jobs of Slurm, by way of submitit."""

import contextlib
import dataclasses
import ipaddress
import pathlib
import socket
import threading
from typing import Any, Literal

from rl.backends import contract, followed, local, spool
from rl.settings import checks

_SHOWN = 300
"""Characters of an error of the queue."""
_SUBMITTING = threading.Lock()
"""Held while variables of this process are away."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slurm:
  """Starts each program as a job of Slurm, on hosts that mount the same disk.

  The checkout and the directory of the run are on that disk. A job that waits
  in the queue is taken out of it when its program is to end.

  Attributes:
    partition: of the cluster; None is its default one.
    cpus, gpus, memory_gib: of each program; None is the default of the cluster.
    minutes: longest time of a program.
    options: further ones of sbatch, such as `{"account": "rl"}`.
    host: address of this host for the jobs; None is its name.
    place_s: longest wait of an engine in the queue.
    cluster: "local" runs jobs as processes of this host, to try a command.
    folder: of the files of jobs, on that disk; None is beside the logs.
    silence_s: longest time without a sign of this host, after which a program
      ends. Disks of networks show changes late.
  """

  partition: str | None = None
  cpus: int | None = None
  gpus: int | None = None
  memory_gib: float | None = None
  minutes: int = 24 * 60
  options: dict[str, str] = dataclasses.field(default_factory=dict)
  host: str | None = None
  place_s: float = 600.0
  cluster: Literal["slurm", "local"] = "slurm"
  folder: str | None = None
  silence_s: float = 120.0

  shares_memory = False

  def validate(self) -> None:
    """Raises ValueError on a size that cannot be."""
    where = "placement.backend"
    checks.at_least(self, 1, "cpus", "minutes", where=where)
    checks.at_least(self, 0, "gpus", where=where)
    checks.finite_above(self, 0, "memory_gib", "place_s", where=where)
    checks.finite_at_least(self, 4, "silence_s", where=where)
    checks.one_of(self, Literal["slurm", "local"], "cluster", where=where)

  def validate_installed(self) -> None:
    """Raises ValueError without submitit."""
    checks.installed("backend slurm", "slurm", "submitit")

  def open(self, folder: pathlib.Path) -> contract.Launcher:
    """Returns what submits them.

    Raises:
      ValueError: there is no Slurm on this host.
    """
    self.validate_installed()
    import submitit  # pyright: ignore[reportMissingImports]

    folder = pathlib.Path(self.folder) if self.folder else folder
    folder.mkdir(parents=True, exist_ok=True)
    try:
      executor = submitit.AutoExecutor(folder / "jobs", cluster=self.cluster)
    except RuntimeError as error:
      raise ValueError(
        f"backend slurm: {error}; start the command on a host that has sbatch, "
        "or try it with 'slurm(cluster=local)'"
      ) from error
    executor.update_parameters(
      timeout_min=self.minutes, name="twinmesh", **self._parameters()
    )
    host = self.host or (local.LOOPBACK if self.cluster == "local" else None)
    return _SlurmLauncher(executor, folder / "programs", host, self.silence_s)

  def _parameters(self) -> dict[str, Any]:
    given = {
      "cpus_per_task": self.cpus,
      "gpus_per_node": self.gpus,
      "mem_gb": self.memory_gib,
    }
    if self.cluster == "slurm":
      given["slurm_partition"] = self.partition
      given["slurm_additional_parameters"] = self.options or None
      if self.cpus is not None:
        # Slurm 22.05 to 23.02 gives the step of a job one processor otherwise.
        given["slurm_srun_args"] = [f"--cpus-per-task={self.cpus}"]
    return {name: value for name, value in given.items() if value is not None}


def _own_name() -> str:
  """Returns the name of this host.

  Raises:
    ValueError: it stands for an address at which other hosts find themselves.
  """
  name = socket.getfqdn()
  try:
    found = sorted({str(x[4][0]) for x in socket.getaddrinfo(name, None)})
  except OSError:
    found = []
  if all(ipaddress.ip_address(address).is_loopback for address in found):
    raise ValueError(
      f"this host's name, {name}, has no address that jobs reach (found "
      f"{', '.join(found) or 'none'}); give one as placement.backend.host"
    )
  return name


class _SlurmLauncher(followed.FollowingLauncher):
  def __init__(
    self,
    executor: Any,
    folder: pathlib.Path,
    host: str | None,
    silence_s: float,
  ):
    super().__init__()
    self._executor = executor
    self._folder = folder
    self._silence_s = silence_s
    self._host = host

  @property
  def host(self) -> str:
    # Runs of a sweep need none.
    return self._host or _own_name()

  def _make(self, program: contract.Program) -> followed.Followed:
    return spool.SpooledProcess(
      program, self._folder, self._silence_s, self._submit
    )

  def _submit(self, directory: pathlib.Path) -> spool.QueuedJob:
    from submitit import helpers  # pyright: ignore[reportMissingImports]

    try:
      # The run may be a job itself: srun would read the sizes of that one.
      with _SUBMITTING, helpers.clean_env():
        job = self._executor.submit(spool.run, str(directory))
    # Those of submitit, of the shell, of a queue that takes no more.
    except Exception as error:
      raise followed.NotPlaced(
        f"Slurm does not take its job: {str(error)[:_SHOWN]}"
      ) from error
    return _Job(job)


class _Job:
  def __init__(self, job: Any):
    self._job = job

  def ended(self) -> bool:
    # To submitit every job that is preempted comes back, as some clusters have
    # it, and none that is suspended.
    is_done, state = self._job.done(), self._job.state
    return state == "PREEMPTED" or (is_done and state != "SUSPENDED")

  def describe(self) -> str:
    return f"job {self._job.job_id} of Slurm is {self._job.state}"

  def cancel(self) -> None:
    with contextlib.suppress(OSError):
      self._job.cancel(check=False)
