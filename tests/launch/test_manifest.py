"""launch.manifest prints a JobSet of one or several hosts, or why it cannot.

The schema is that of the fields in use, written from the JobSet API
(v1alpha2) and those of Kubernetes' jobs and pods.
"""

import json
import pathlib

import jsonschema
import pytest
import yaml

from launch import manifest
from launch.cli import flags
from rl.backends import addresses
from rl.settings import overrides
from tests.helpers import commands

GOLDEN = pathlib.Path(__file__).with_name("golden")
SCHEMA = json.loads((GOLDEN / "job_set_schema.json").read_text())
MODEL = ("--config=configs/qwen3_0_6b.py",)
# Without 20,000 rows to make.
LETTERS = (
  "--config=configs/next_letter.py",
  "--config.batch.rows=8",
  "--config.placement.device_gib=80",
)
NEEDED = ("--image=example/twinmesh:1", "--claim=runs")


def printed(*arguments, accelerator="tpu-v6e-slice", config=LETTERS):
  return commands.run(
    "launch.manifest",
    *config,
    *NEEDED,
    f"--accelerator={accelerator}",
    *arguments,
  )


def pod_of(text):
  (job,) = yaml.safe_load(text)["spec"]["replicatedJobs"]
  return pod_in(job)


def pod_in(job):
  return job["template"]["spec"]["template"]["spec"]


def test_it_prints_what_it_did():
  done = printed(
    "--name=numbers",
    "--config.rounds=40",
    "--noconfig.chat",
    "--config.initial=/runs/qwen3",
    config=MODEL,
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout == (GOLDEN / "job_set.yaml").read_text()
  assert done.stdout.startswith("# Never run on a cluster")


MANY = (
  "--name=numbers",
  "--secret=token",
  "--config.batch.tail_rows=none",
  "--noconfig.chat",
  "--config.initial=/runs/qwen3",
  "--config.placement.colocated=false",
  "--config.placement.decode_processes=1",
  "--config.placement.learner_processes=2",
  "--config.placement.learner.data=8",
)


def test_it_prints_the_pods_of_several_hosts():
  done = printed(*MANY, "--config.placement.replicas=2", config=MODEL)
  assert done.returncode == 0, done.stderr
  assert done.stdout == (GOLDEN / "job_set_of_hosts.yaml").read_text()


@pytest.mark.compiled
def test_the_command_of_several_hosts_is_one_that_trains():
  done = printed(*MANY, "--config.placement.replicas=2", config=MODEL)
  run, learner, engine = yaml.safe_load(done.stdout)["spec"]["replicatedJobs"]
  command = pod_in(run)["containers"][0]["command"]
  (backend,) = [x for x in command if x.startswith("--backend=")]
  given = flags.read_backend(backend.removeprefix("--backend="))
  # A pod of each process has a name, as JobSet gives it.
  assert isinstance(given, addresses.KnownAddresses)
  assert given.at == tuple(
    f"numbers-{job['name']}-0-{number}.numbers:7000"
    for job in (learner, engine)
    for number in range(job["template"]["spec"]["completions"])
  )
  explained = [x for x in command[2:] if not x.startswith("--workdir")]
  done = commands.run(*explained, "--explain")
  assert done.returncode == 0, done.stderr
  assert "it fits the 72.0 GiB that each device can give" in done.stdout


@pytest.mark.parametrize(
  ("arguments", "accelerator"),
  [
    ((), "tpu-v5p-slice"),
    ((), "nvidia-h100-80gb"),
    (MANY, "tpu-v5p-slice"),
    (MANY, "nvidia-h100-80gb"),
  ],
)
def test_what_it_prints_has_the_fields_of_a_job_set(arguments, accelerator):
  done = printed(*arguments, accelerator=accelerator)
  jsonschema.validate(yaml.safe_load(done.stdout), SCHEMA)


def test_gpus_are_divided_among_hosts_as_the_placement_says():
  done = printed(*MANY, accelerator="nvidia-h100-80gb")
  run, learner, engine = yaml.safe_load(done.stdout)["spec"]["replicatedJobs"]
  limits = [
    pod_in(job)["containers"][0].get("resources")
    for job in (run, learner, engine)
  ]
  assert limits == [
    None,
    {"limits": {"nvidia.com/gpu": 4}},
    {"limits": {"nvidia.com/gpu": 1}},
  ]


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


def test_the_run_gets_what_was_given_to_the_letter():
  # Of $$ Kubernetes makes $, and it puts the address of the pod in POD_IP.
  done = printed(*MANY, "--config.initial=/$HOME/$(POD_IP)", "--trust_config")
  run, *_ = yaml.safe_load(done.stdout)["spec"]["replicatedJobs"]
  command = pod_in(run)["containers"][0]["command"]
  assert "--config.initial=/$$HOME/$$(POD_IP)" in command
  assert "--trust_config" in command
  assert "host='$(POD_IP)'" in command[-1]


@pytest.mark.parametrize(
  ("arguments", "why"),
  [
    (
      ["--config.placement.colocated=false", "--config.placement.replicas=8"],
      "the placement needs 9 devices, and one host with "
      "--accelerator=tpu-v6e-slice has 8; lower the sizes of its meshes or",
    ),
    (
      [x for x in MANY if not x.startswith("--secret")],
      "--secret is missing",
    ),
    (
      [*MANY, "--config.placement.learner.data=4"],
      "placement.learner has 4 devices in 2 processes, and no slice of "
      "--accelerator=tpu-v6e-slice is such; it may have 2 processes and 8",
    ),
    (
      [*MANY, "--config.placement.decode_processes=0"],
      "a learner of several processes runs on CPUs so far, not on a TPU",
    ),
    (
      ["--config.placement.decode_processes=1"],
      "engines in processes of their own run on CPUs so far, not on a TPU",
    ),
    (["--name=Numbers"], "--name=Numbers: use lower-case letters"),
    (["--name=" + "n" * 41], "40 at most"),
    (["--claim="], "--claim is missing"),
    (["--image="], "--image is missing"),
    (["--image=example/a b"], "--image=example/a b: leave out the spaces"),
    (["--claim=Runs"], "--claim=Runs: use lower-case letters, digits, dashes"),
    (["--claim=a..b"], "--claim=a..b: use lower-case letters"),
    ([*MANY, "--secret=a_b"], "--secret=a_b: use lower-case letters"),
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
