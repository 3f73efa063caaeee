"""--explain: memory and placement of a run, without its devices."""

import dataclasses
import io
import re

import pytest

from launch import explain
from launch.cli import flags
from models import lora, memory_report
from rl.engine.builtin import settings as engine_settings
from rl.pools import placement
from tests.helpers import commands, pod_run

pytestmark = pytest.mark.compiled


@pytest.fixture(scope="module")
def experiment():
  return flags.load(str(commands.ROOT / commands.CONFIG))


def printed(experiment):
  stream = io.StringIO()
  explain.show(experiment, stream)
  return stream.getvalue()


def test_a_plan_needs_the_sizes_of_a_checkpoint_and_not_its_weights(tmp_path):
  assert not explain.is_absent(None)
  assert explain.is_absent(str(tmp_path / "model"))
  (tmp_path / "config.json").touch()
  assert explain.is_absent(str(tmp_path))
  (tmp_path / "model.safetensors").touch()
  assert not explain.is_absent(str(tmp_path))


@pytest.mark.slow
def test_a_model_for_a_pod_is_planned_without_one():
  text = printed(pod_run.experiment())
  # As published: 235B parameters, 22B of them active.
  assert "235 billion parameters, of which a token uses 22.2 billion" in text
  learner = "64 devices, data 8 x expert 4 x context 1 x tensor 2"
  assert f"placement.learner: {learner}" in text
  decode = "32 devices, data 1 x expert 8 x context 1 x tensor 4"
  assert f"placement.decode: {decode}" in text
  query = r"layers\.0-93\.attention\.query +4096x64x128 +embed:data "
  assert re.search(query + r"heads:tensor head_dim +bf16 +376 MiB", text)
  assert max(map(len, text.splitlines())) <= 100


@pytest.mark.process
def test_the_command_prints_both_pools_and_starts_nothing(tmp_path):
  result = commands.run(
    "launch.train",
    f"--config={commands.CONFIG}",
    "--explain",
    f"--workdir={tmp_path / 'run'}",
    # This machine has no such devices.
    "--config.placement.platform=tpu",
    "--config.placement.learner.data=64",
    "--config.batch.rows=64",
    "--config.batch.tail_rows=none",
  )
  assert result.returncode == 0, result.stderr
  assert "placement.learner: 64 devices" in result.stdout
  assert "placement.decode: 1 device" in result.stdout
  assert not (tmp_path / "run").exists()
  assert "Traceback" not in result.stderr


@pytest.mark.process
def test_the_command_refuses_a_mesh_that_does_not_divide():
  config = f"--config={commands.CONFIG}"
  tensor = "--config.placement.learner.tensor=2"
  result = commands.run("launch.train", config, "--explain", tensor)
  assert result.returncode == 2
  assert result.stdout == ""
  assert "model.vocab_size=29 does not divide over" in result.stderr
  assert "placement.learner.rules.vocab=none" in result.stderr


@pytest.mark.process
def test_a_run_without_a_workdir_is_told_of_both():
  result = commands.run("launch.train", f"--config={commands.CONFIG}")
  assert result.returncode == 2
  assert "--workdir is missing" in result.stderr
  assert "--explain" in result.stderr


def test_a_device_that_trains_and_decodes_holds_the_sum(experiment):
  place = placement.Placement(platform="gpu", colocated=True, device_gib=1.0)
  text = printed(dataclasses.replace(experiment, placement=place))
  assert "on a device that trains and decodes" in text
  # As it would run there; on this host it is float32.
  assert "bf16" in text
  assert "master copy" in text
  here = placement.Placement(platform="cpu")
  assert "bf16" not in printed(dataclasses.replace(experiment, placement=here))
  # A tenth of a GiB is kept free.
  assert text.endswith("it fits the 922 MiB that each device can give\n")
  tight = dataclasses.replace(place, device_gib=0.01)
  unset = engine_settings.EngineSettings()
  text = printed(dataclasses.replace(experiment, placement=tight, engine=unset))
  assert "it does not fit: the run takes" in text
  # One conversation of 32 tokens, and a page beside it.
  assert "KV cache, 48 tokens in 3 pages" in text
  unknown = dataclasses.replace(place, device_gib=None)
  text = printed(dataclasses.replace(experiment, placement=unknown))
  assert "placement.device_gib=80 plans for devices of 80 GiB" in text


def test_numbers_of_parameters_have_three_digits():
  assert explain._count(999_885_952) == "1 billion"
  assert explain._count(998_885_952) == "999 million"
  assert explain._count(12_345) == "12,345"


def test_adapters_are_all_that_trains(experiment):
  model = dataclasses.replace(experiment.model, lora=lora.Lora(rank=2))
  trained = memory_report.num_params(model).trained
  adapted = dataclasses.replace(experiment, model=model)
  assert f"and {trained:,} train" in printed(adapted)


def test_a_pool_that_only_encodes_says_so(experiment):
  pool = placement.DecodePool(name="encode", role="prefill", processes=1)
  place = placement.Placement(decode_processes=1, more=(pool,))
  text = printed(dataclasses.replace(experiment, placement=place))
  words = "pool encode, which encodes 256 or more new ids for the other pools"
  assert words in " ".join(text.split())
