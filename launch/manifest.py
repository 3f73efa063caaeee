"""Prints a Kubernetes JobSet of a run: python -m launch.manifest.

  python -m launch.manifest --config=configs/qwen3_0_6b.py \\
      --image=example/twinmesh:1 --accelerator=tpu-v6e-slice \\
      --claim=runs | kubectl apply -f -

A run has one host so far, so this is one pod with TPUs or GPUs of one host. The
image has the project in its working directory, and the claim is a volume for
runs. A pod that fails or is moved away is started again, and the run goes on
from its newest checkpoint.

Sources: the JobSet API, jobset.x-k8s.io/v1alpha2; the labels of nodes are those
of Google Kubernetes Engine.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import yaml
from absl import app
from absl import flags as absl_flags

from launch.cli import flags
from rl import experiment as experiment_lib
from rl.settings import overrides

UNTRIED = (
  "# Never run on a cluster: written from the API and checked against a schema."
)
_LABEL = "cloud.google.com/gke-"
# Slices of one host: topologies and their chips, each of which is a device.
_SLICES = {
  "tpu-v4-podslice": {"2x2x1": 4},
  "tpu-v5p-slice": {"2x2x1": 4},
  "tpu-v5-lite-podslice": {"1x1": 1, "2x2": 4, "2x4": 8},
  "tpu-v6e-slice": {"1x1": 1, "2x2": 4, "2x4": 8},
}
_MAX_GPUS = 8
_MAX_RESTARTS = 10
_SAVING_S = 600
"""Time from SIGTERM to SIGKILL, in which the run saves."""
_RUNS = "/runs"
# The names of its jobs and pods are longer, and have 63 characters at most.
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")

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
_CLAIM = absl_flags.DEFINE_string(
  "claim", "", f"PersistentVolumeClaim that is mounted at {_RUNS}."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostShare:
  """The part of a host that a pod asks for.

  Attributes:
    platform: jax's name of it.
    resource: Kubernetes' name of it.
    count: of its devices.
    labels: of the nodes that have it.
  """

  platform: str
  resource: str
  count: int
  labels: dict[str, str]


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
      f"--accelerator={accelerator} has {most}: a run has one host so far; "
      "lower the sizes of its meshes or placement.replicas, or share devices "
      "by placement.colocated=true"
    )


def job_set(
  name: str, image: str, claim: str, command: Sequence[str], where: HostShare
) -> dict[str, Any]:
  """Returns a JobSet of one pod that runs a command until it succeeds."""
  container = {
    "name": "run",
    "image": image,
    "command": list(command),
    "resources": {"limits": {where.resource: where.count}},
    "volumeMounts": [{"name": "runs", "mountPath": _RUNS}],
  }
  pod = {
    "restartPolicy": "Never",
    "terminationGracePeriodSeconds": _SAVING_S,
    "nodeSelector": where.labels,
    "containers": [container],
    "volumes": [
      {"name": "runs", "persistentVolumeClaim": {"claimName": claim}}
    ],
  }
  job = {
    "parallelism": 1,
    "completions": 1,
    "backoffLimit": 0,
    "template": {"spec": pod},
  }
  return {
    "apiVersion": "jobset.x-k8s.io/v1alpha2",
    "kind": "JobSet",
    "metadata": {"name": name},
    "spec": {
      "failurePolicy": {"maxRestarts": _MAX_RESTARTS},
      "replicatedJobs": [
        {"name": "run", "replicas": 1, "template": {"spec": job}}
      ],
    },
  }


def _checked(name: str, **needed: str) -> None:
  for flag, value in needed.items():
    if not value:
      raise overrides.SettingError(f"--{flag} is missing; see --help")
  if not _NAME.fullmatch(name):
    raise overrides.SettingError(
      f"--name={name}: use lower-case letters, digits and dashes, 40 at most, "
      "with a letter first and no dash last"
    )


@flags.command
def main() -> None:
  """Prints the JobSet of the settings on the command line."""
  name, image, claim = _NAME_FLAG.value, _IMAGE.value, _CLAIM.value
  with flags.exit_on_setting_error():
    experiment = flags.load_from_command_line(experiment_lib.check_experiment)
    _checked(name, image=image, accelerator=_ACCELERATOR.value, claim=claim)
    place = experiment.placement
    where = host_share(_ACCELERATOR.value, place.num_devices)
    # Raises for what such devices cannot do yet.
    dataclasses.replace(place, platform=where.platform).validate()
  changes = flags.overrides() | {"placement.platform": where.platform}
  command = [
    *("python", "-m", "launch.train"),
    f"--config={absl_flags.FLAGS.config}",
    *flags.arguments(changes),
    f"--workdir={_RUNS}/{name}",
  ]
  tree = job_set(name, image, claim, command, where)
  print(UNTRIED)
  print(yaml.safe_dump(tree, sort_keys=False), end="")


if __name__ == "__main__":
  app.run(main, flags_parser=flags.parse)
