"""Prints a Kubernetes JobSet of a run: python -m launch.manifest.

  python -m launch.manifest --config=configs/qwen3_0_6b.py \\
      --image=example/twinmesh:1 --accelerator=tpu-v6e-slice \\
      --claim=runs | kubectl apply -f -

A run whose meshes fit on one host is one pod with TPUs or GPUs. Where the
learner has several processes and each engine has its own, these are pods of
their own, with `launch.host`, and the pod of the run is without accelerators:

  run: launch.train --backend=addresses ==> learner-0-0, learner-0-1, ...
                                        ==> engine-0-0, ...

The image has the project in its working directory, and the claim is a volume
for runs. What fails or is moved away is started again with all the rest, and
the run goes on from its newest checkpoint.

Sources: the JobSet API, jobset.x-k8s.io/v1alpha2, and the names that it gives
to pods; the labels of nodes are those of Google Kubernetes Engine.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from absl import app
from absl import flags as absl_flags

from launch.cli import flags, known_programs
from rl import experiment as experiment_lib
from rl.backends import addresses
from rl.pools import placement
from rl.settings import overrides

UNTRIED = (
  "# Never run on a cluster: written from the API and checked against a schema."
)
_LABEL = "cloud.google.com/gke-"
# Of a job, so that all its pods lie in one place of a kind.
_EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"
# Slices of one host: topologies and their chips, each of which is a device.
_SLICES = {
  "tpu-v4-podslice": {"2x2x1": 4},
  "tpu-v5p-slice": {"2x2x1": 4},
  "tpu-v5-lite-podslice": {"1x1": 1, "2x2": 4, "2x4": 8},
  "tpu-v6e-slice": {"1x1": 1, "2x2": 4, "2x4": 8},
}
# Slices of several hosts, of four chips each.
_HOST_CHIPS = 4
_CUBES = ("2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8")
_SQUARES = ("2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_LARGE_SLICES = {
  "tpu-v4-podslice": _CUBES,
  "tpu-v5p-slice": _CUBES,
  "tpu-v5-lite-podslice": _SQUARES,
  "tpu-v6e-slice": _SQUARES,
}
_MAX_GPUS = 8
_MAX_RESTARTS = 10
_SAVING_S = 600
"""Time from SIGTERM to SIGKILL, in which the run saves."""
_RUNS = "/runs"
_SECRET = "/secret"
_PORT = 7000
_PLACE_S = 1800
"""Longest wait for a pod: its node may have to start, and its image to come."""
# The names of its jobs and pods are longer, and have 63 characters at most.
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
# A name of DNS, as those of claims and secrets are.
_WORD = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_OBJECT = re.compile(rf"(?=.{{1,253}}$){_WORD}(\.{_WORD})*")

_IMAGE = absl_flags.DEFINE_string("image", "", "Container image of the run.")
_ACCELERATOR = absl_flags.DEFINE_string(
  "accelerator",
  "",
  "Accelerator of the nodes, such as nvidia-h100-80gb or one of "
  + ", ".join(_SLICES),
)
_NAME_FLAG = absl_flags.DEFINE_string(
  "name", "twinmesh", "Name of the JobSet, and of the run's directory."
)
_SECRET_FLAG = absl_flags.DEFINE_string(
  "secret",
  "",
  "Secret with the key `token`, if the run has several pods: who knows it can"
  " run any code in them.",
)
_CLAIM = absl_flags.DEFINE_string(
  "claim", "", f"PersistentVolumeClaim that is mounted at {_RUNS}."
)

# Shows --config and --trust_config in --help.
absl_flags.adopt_module_key_flags(flags)
absl_flags.adopt_module_key_flags(known_programs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostShare:
  """The part of a host that a pod asks for.

  Attributes:
    platform: jax's name of it.
    resource: Kubernetes' name of it.
    count: of its devices.
    labels: of the nodes that have it.
    within: label that is the same on all hosts of a slice; "" for one host.
  """

  platform: str
  resource: str
  count: int
  labels: dict[str, str]
  within: str = ""


def host_share(accelerator: str, num_devices: int) -> HostShare:
  """Returns the smallest part of a host that has enough devices.

  Raises:
    SettingError: the accelerator is unknown, or has fewer on one host.
  """
  if accelerator.startswith("nvidia-"):
    _check_fits(accelerator, num_devices, _MAX_GPUS)
    labels = {f"{_LABEL}accelerator": accelerator}
    return HostShare(
      platform="gpu",
      resource="nvidia.com/gpu",
      count=num_devices,
      labels=labels,
    )
  if (slices := _SLICES.get(accelerator)) is None:
    raise overrides.SettingError(
      f"--accelerator={accelerator} is unknown; use {', '.join(_SLICES)}, or "
      "the label of a GPU, such as nvidia-h100-80gb"
    )
  _check_fits(accelerator, num_devices, max(slices.values()))
  topology = next(x for x, count in slices.items() if count >= num_devices)
  return HostShare(
    platform="tpu",
    resource="google.com/tpu",
    count=slices[topology],
    labels={
      f"{_LABEL}tpu-accelerator": accelerator,
      f"{_LABEL}tpu-topology": topology,
    },
  )


def _check_fits(accelerator: str, num_devices: int, most: int) -> None:
  if num_devices > most:
    raise overrides.SettingError(
      f"the placement needs {num_devices} devices, and one host with "
      f"--accelerator={accelerator} has {most}; lower the sizes of its meshes "
      "or placement.replicas, share devices by placement.colocated=true, or "
      "use more hosts, by placement.learner_processes of 2 or more and "
      "placement.decode_processes=1"
    )


def slice_share(
  accelerator: str, num_devices: int, num_hosts: int
) -> HostShare:
  """Returns the part of each host that together have so many devices.

  Raises:
    SettingError: there are no such hosts.
  """
  each = num_devices // num_hosts
  if (topologies := _LARGE_SLICES.get(accelerator)) is None:
    return host_share(accelerator, each)
  sizes = {
    math.prod(map(int, topology.split("x"))): topology
    for topology in topologies
  }
  if each != _HOST_CHIPS or num_devices not in sizes:
    fit = ", ".join(
      f"{chips // _HOST_CHIPS} processes and {chips} devices" for chips in sizes
    )
    raise overrides.SettingError(
      f"placement.learner has {num_devices} devices in {num_hosts} processes, "
      f"and no slice of --accelerator={accelerator} is such; it may have {fit}"
    )
  share = host_share(accelerator, _HOST_CHIPS)
  return dataclasses.replace(
    share,
    labels={**share.labels, f"{_LABEL}tpu-topology": sizes[num_devices]},
    # Two slices of one topology have the same labels, but for this one.
    within=f"{_LABEL}nodepool",
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pods:
  """Equal pods of a JobSet.

  Attributes:
    name: of their job.
    command: that each runs.
    where: the part of a host that each has; None is a processor alone.
    count: of them.
    volumes: places in the pod, and what is there, as Kubernetes names it.
    variables: of the environment, from fields of the pod.
  """

  name: str
  command: Sequence[str]
  where: HostShare | None
  count: int = 1
  volumes: Mapping[str, Mapping[str, Any]]
  variables: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def job(self, image: str) -> dict[str, Any]:
    """Returns their job, of which each pod knows its number."""
    container: dict[str, Any] = {
      "name": self.name,
      "image": image,
      "command": list(self.command),
    }
    pod: dict[str, Any] = {
      "restartPolicy": "Never",
      "terminationGracePeriodSeconds": _SAVING_S,
    }
    if self.variables:
      container["env"] = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in self.variables.items()
      ]
    if self.where is not None:
      limits = {self.where.resource: self.where.count}
      container["resources"] = {"limits": limits}
      pod["nodeSelector"] = self.where.labels
    container["volumeMounts"] = [
      {"name": path.strip("/"), "mountPath": path} for path in self.volumes
    ]
    pod["containers"] = [container]
    pod["volumes"] = [
      {"name": path.strip("/"), **volume}
      for path, volume in self.volumes.items()
    ]
    job = {
      "parallelism": self.count,
      "completions": self.count,
      "completionMode": "Indexed",
      "backoffLimit": 0,
      "template": {"spec": pod},
    }
    template: dict[str, Any] = {"spec": job}
    if self.where is not None and self.where.within:
      annotations = {_EXCLUSIVE: self.where.within}
      template = {"metadata": {"annotations": annotations}, **template}
    return {"name": self.name, "replicas": 1, "template": template}


def job_set(name: str, image: str, pods: Sequence[Pods]) -> dict[str, Any]:
  """Returns a JobSet that ends once the first of its jobs has succeeded."""
  return {
    "apiVersion": "jobset.x-k8s.io/v1alpha2",
    "kind": "JobSet",
    "metadata": {"name": name},
    "spec": {
      "successPolicy": {
        "operator": "All",
        "targetReplicatedJobs": [pods[0].name],
      },
      "failurePolicy": {"maxRestarts": _MAX_RESTARTS},
      "replicatedJobs": [each.job(image) for each in pods],
    },
  }


def _hosts(name: str, only: str, where: HostShare, count: int) -> Pods:
  """Returns pods that take programs of a name."""
  command = (
    *("python", "-m", "launch.host", f"--listen=0.0.0.0:{_PORT}"),
    f"--token_file={_SECRET}/token",
    f"--only={only}",
  )
  return Pods(
    name=name, command=command, where=where, count=count, volumes=_token()
  )


def _runs(claim: str) -> Mapping[str, Mapping[str, Any]]:
  return {_RUNS: {"persistentVolumeClaim": {"claimName": claim}}}


def _token() -> Mapping[str, Mapping[str, Any]]:
  # For its user alone, or `launch.host` does not take it.
  secret = {"secretName": _SECRET_FLAG.value, "defaultMode": 0o400}
  return {_SECRET: {"secret": secret}}


def _train(name: str, platform: str) -> list[str]:
  changes = flags.overrides() | {"placement.platform": platform}
  arguments = [
    f"--config={absl_flags.FLAGS.config}",
    *flags.arguments(changes),
    *(["--trust_config"] * known_programs.TRUST.value),
    f"--workdir={_RUNS}/{name}",
  ]
  # Kubernetes would read $(NAME) as a variable of the pod.
  return [
    *("python", "-m", "launch.train"),
    *(argument.replace("$", "$$") for argument in arguments),
  ]


def _of_one_host(
  place: placement.Placement, name: str, claim: str
) -> list[Pods]:
  where = host_share(_ACCELERATOR.value, place.num_devices)
  # Raises for what such devices cannot do yet.
  dataclasses.replace(place, platform=where.platform).validate()
  return [
    Pods(
      name="run",
      command=_train(name, where.platform),
      where=where,
      volumes=_runs(claim),
    )
  ]


def _of_many_hosts(
  place: placement.Placement, name: str, claim: str
) -> list[Pods]:
  accelerator, count = _ACCELERATOR.value, place.learner_processes
  where = slice_share(accelerator, place.learner.size, count)
  sizes = {pool.mesh.size for pool in place.pools}
  if len(sizes) > 1:
    raise overrides.SettingError(
      "decode pools have engines of "
      f"{' and '.join(map(str, sorted(sizes)))} devices; their pods "
      "have one size so far, so use one for all pools"
    )
  (size,) = sizes
  hosts = [
    # The number of a process is that of its host in the slice.
    _hosts("learner", "learner $(JOB_COMPLETION_INDEX)", where, count),
    _hosts(
      "engine",
      "engine",
      host_share(accelerator, size),
      len(place.engine_infos),
    ),
  ]
  backend = addresses.KnownAddresses(
    at=tuple(
      f"{name}-{pods.name}-0-{number}.{name}:{_PORT}"
      for pods in hosts
      for number in range(pods.count)
    ),
    token_file=f"{_SECRET}/token",
    host="$(POD_IP)",
    place_s=_PLACE_S,
  )
  place = dataclasses.replace(place, platform=where.platform, backend=backend)
  place.validate()
  fields = ", ".join(
    f"{field.name}={getattr(backend, field.name)!r}"
    for field in dataclasses.fields(backend)
  )
  run = Pods(
    name="run",
    command=(
      *_train(name, where.platform),
      f"--backend=addresses({fields})",
    ),
    where=None,
    volumes={**_runs(claim), **_token()},
    variables={"POD_IP": "status.podIP"},
  )
  return [run, *hosts]


def _checked(name: str, **needed: str) -> None:
  for flag, value in needed.items():
    if not value:
      raise overrides.SettingError(f"--{flag} is missing; see --help")
  if not _NAME.fullmatch(name):
    raise overrides.SettingError(
      f"--name={name}: use lower-case letters, digits and dashes, 40 at most, "
      "with a letter first and no dash last"
    )
  for flag, value in needed.items():
    if flag in ("claim", "secret") and not _OBJECT.fullmatch(value):
      raise overrides.SettingError(
        f"--{flag}={value}: use lower-case letters, digits, dashes and dots, "
        "253 at most, and a letter or digit at each end and beside each dot"
      )
    if re.search(r"\s", value):
      raise overrides.SettingError(f"--{flag}={value}: leave out the spaces")


@flags.command
def main() -> None:
  """Prints the JobSet of the settings on the command line."""
  name, image, claim = _NAME_FLAG.value, _IMAGE.value, _CLAIM.value
  with flags.exit_on_setting_error():
    experiment = flags.load_from_command_line(experiment_lib.check_experiment)
    _checked(name, image=image, accelerator=_ACCELERATOR.value, claim=claim)
    place = experiment.placement
    if place.learner_processes > 1:
      _checked(name, secret=_SECRET_FLAG.value)
      pods = _of_many_hosts(place, name, claim)
    else:
      pods = _of_one_host(place, name, claim)
  tree = job_set(name, image, pods)
  print(UNTRIED)
  print(yaml.safe_dump(tree, sort_keys=False), end="")


if __name__ == "__main__":
  app.run(main, flags_parser=flags.parse)
