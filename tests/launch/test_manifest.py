"""launch.manifest prints a JobSet of one pod, or says why a host cannot do.

The schema is that of the fields in use, written from the JobSet API
(v1alpha2) and those of Kubernetes' jobs and pods.
"""

import json
import pathlib

import jsonschema
import pytest
import yaml

from launch import manifest
from rl.settings import overrides
from tests.helpers import commands

GOLDEN = pathlib.Path(__file__).with_name("golden")
SCHEMA = json.loads((GOLDEN / "job_set_schema.json").read_text())
CONFIG = "--config=configs/qwen3_0_6b.py"
NEEDED = ("--image=example/twinmesh:1", "--claim=runs")


def printed(*arguments, accelerator="tpu-v6e-slice"):
  return commands.run(
    "launch.manifest",
    CONFIG,
    *NEEDED,
    f"--accelerator={accelerator}",
    *arguments,
  )


def pod_of(text):
  (job,) = yaml.safe_load(text)["spec"]["replicatedJobs"]
  return job["template"]["spec"]["template"]["spec"]


def test_it_prints_what_it_did():
  done = printed(
    "--name=numbers",
    "--config.rounds=40",
    "--noconfig.chat",
    "--config.initial=/runs/qwen3",
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout == (GOLDEN / "job_set.yaml").read_text()
  assert done.stdout.startswith("# Never run on a cluster")


@pytest.mark.parametrize("name", ["tpu-v5p-slice", "nvidia-h100-80gb"])
def test_what_it_prints_has_the_fields_of_a_job_set(name):
  done = printed(accelerator=name)
  jsonschema.validate(yaml.safe_load(done.stdout), SCHEMA)


def test_the_schema_knows_no_other_fields():
  tree = yaml.safe_load((GOLDEN / "job_set.yaml").read_text())
  tree["spec"]["replicatedJobs"][0]["replica"] = 1
  with pytest.raises(jsonschema.ValidationError, match="'replica'"):
    jsonschema.validate(tree, SCHEMA)


def test_the_pod_has_the_devices_of_the_placement():
  # A learner of 2 and 3 engines: 5 GPUs, or a slice of 8 chips.
  more = (
    "--config.placement.colocated=false",
    "--config.placement.replicas=3",
    "--config.placement.learner.data=2",
  )
  gpu = pod_of(printed(*more, accelerator="nvidia-h100-80gb").stdout)
  assert gpu["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": 5}}
  assert "--config.placement.platform=gpu" in gpu["containers"][0]["command"]
  tpu = pod_of(printed(*more).stdout)
  assert tpu["containers"][0]["resources"] == {"limits": {"google.com/tpu": 8}}
  assert tpu["nodeSelector"] == {
    "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
    "cloud.google.com/gke-tpu-topology": "2x4",
  }


@pytest.mark.parametrize(
  ("arguments", "why"),
  [
    (
      ["--config.placement.colocated=false", "--config.placement.replicas=8"],
      "the placement needs 9 devices, and one host with "
      "--accelerator=tpu-v6e-slice has 8: a run has one host so far; lower",
    ),
    (
      ["--config.placement.decode_processes=1"],
      "engines in processes of their own run on CPUs so far, not on a TPU",
    ),
    (["--name=Numbers"], "--name=Numbers: use lower-case letters"),
    (["--name=" + "n" * 41], "40 at most"),
    (["--claim="], "--claim is missing"),
    (["--image="], "--image is missing"),
  ],
)
def test_what_cannot_run_is_refused(arguments, why):
  done = printed(*arguments)
  assert done.returncode == 2
  assert why in done.stderr
  assert not done.stdout


def test_an_unknown_accelerator_is_refused():
  with pytest.raises(overrides.SettingError, match="tpu-v7 is unknown; use"):
    manifest.host_share("tpu-v7", 1)
  assert manifest.host_share("tpu-v5-lite-podslice", 3).count == 4
