"""--explain: memory and placement of a run, without its devices."""

import dataclasses
import io
import re

import jax
import pytest

from launch import explain
from launch.cli import flags
from models import config as model_config
from models import lora, memory_report, sharding
from rl import experiment as experiment_lib
from rl.engine.builtin import settings as engine_settings
from rl.engine.sglang import settings as sglang_settings
from rl.pools import placement, weight_publisher
from rl.train import learner
from tests.helpers import commands

pytestmark = pytest.mark.compiled


@pytest.fixture(scope="module")
def experiment():
  return flags.load(str(commands.ROOT / commands.CONFIG))


@pytest.fixture(scope="module")
def big(experiment):
  """Qwen3-235B-A22B on 64 chips, decoded on 32."""
  changed = dataclasses.replace(
    experiment,
    model=model_config.qwen3_moe(
      "235b-a22b",
      compute=model_config.Compute(dtype="bfloat16", remat="layer"),
    ),
    placement=placement.Placement(
      learner=placement.MeshSpec(data=8, expert=4, tensor=2),
      decode=placement.MeshSpec(expert=8, tensor=4, rules=sharding.DECODE),
    ),
    batch=experiment_lib.BatchShape(rows=64, length=8192),
  )
  changed.validate()
  return changed


def printed(experiment):
  stream = io.StringIO()
  explain.show(experiment, stream)
  return stream.getvalue()


def test_a_model_for_a_pod_is_planned_without_one(big):
  text = printed(big)
  # As published: 235B parameters, 22B of them active.
  assert "235 billion parameters, of which a token uses 22.2 billion" in text
  assert "placement.learner: 64 devices, data 8 x expert 4 x tensor 2" in text
  assert "placement.decode: 32 devices, data 1 x expert 8 x tensor 4" in text
  query = r"layers\.0-93\.attention\.query +4096x64x128 +embed:data "
  assert re.search(query + r"heads:tensor head_dim +bf16 +376 MiB", text)
  assert max(map(len, text.splitlines())) <= 100


def test_bytes_of_the_learner_follow_from_the_number_of_parameters(big):
  lines = explain.learner_bytes(big)
  total = memory_report.num_params(big.model).total
  # Experts are split over all 64 devices, the rest (but norms and routers) over
  # data and tensor, 16. In bytes: 2 of a parameter, 4 of its gradient, and 4
  # each of two moments and the master copy.
  experts = 94 * 128 * 3 * 4096 * 1536
  split = experts / 64 + (total - experts) / 16
  for label, size in (
    ("parameters", 2),
    ("gradients, summed", 4),
    ("optimizer state, master copy", 12),
  ):
    assert lines[label] == pytest.approx(size * split, rel=1e-2)


def test_bytes_of_the_decode_pool_follow_from_its_rules(big):
  lines = explain.decode_bytes(big)
  # 94 layers of keys and values of 4 heads of 128 numbers of 2 bytes; heads
  # over 4 devices.
  token = 94 * 2 * 4 * 128 * 2 // 4
  # 256 slots of 40960 / 16 pages, and one; every row of devices has them all.
  # Each device copies an 8th of the rows.
  tokens = 256 * 40_960
  pages = "KV cache, 10,485,776 tokens in 655,361 pages"
  assert lines[pages] == (tokens + 16) * token
  assert lines["copied of it, 256 rows of 40,960 tokens"] == tokens // 8 * token
  assert lines["their next version, arriving"] == lines["parameters"]


def test_a_cache_has_as_many_pages_as_were_asked_for(experiment):
  engine = engine_settings.EngineSettings(slots=6, pages=50, page_size=3)
  changed = dataclasses.replace(
    experiment,
    engine=engine,
    model=dataclasses.replace(experiment.model, max_length=100),
  )
  lines = explain.decode_bytes(changed)
  # A row of 100 tokens has 34 pages, of 102.
  assert "KV cache, 150 tokens in 50 pages" in lines
  assert "copied of it, 6 rows of 102 tokens" in lines
  assert "KV cache, 150 tokens in 50 pages" in printed(changed)


def test_an_engine_that_sizes_its_own_cache_has_no_line_for_it(experiment):
  other = dataclasses.replace(
    experiment, engine=sglang_settings.SglangSettings()
  )
  lines = explain.decode_bytes(other)
  built_in = explain.decode_bytes(experiment)
  assert list(lines) == ["parameters", "their next version, arriving"]
  assert lines.items() < built_in.items()
  assert "placement.decode" in printed(other)


def test_of_adapters_alone_there_are_gradients(experiment):
  model = dataclasses.replace(experiment.model, lora=lora.Lora(rank=2))
  adapted = dataclasses.replace(experiment, model=model)
  lines = explain.learner_bytes(adapted)
  trained = memory_report.num_params(model).trained
  assert lines["gradients, summed"] == 4 * trained
  # Two moments, and two counters of 4 bytes at most.
  assert 0 <= lines["optimizer state"] - 8 * trained <= 8
  arriving = explain.decode_bytes(adapted)["their next version, arriving"]
  assert arriving == 4 * trained
  assert f"and {trained:,} train" in printed(adapted)


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
def test_planned_bytes_are_those_of_the_state_that_training_makes(experiment):
  spec = placement.MeshSpec(
    data=2, expert=2, tensor=2, rules=sharding.Rules(vocab=None)
  )
  place = placement.Placement(learner=spec, colocated=True)
  model = dataclasses.replace(experiment.model, num_layers=1)
  planned = explain.learner_bytes(
    dataclasses.replace(experiment, model=model, placement=place)
  )
  programs = learner.Learner(
    model, place.layouts()[0], experiment.algorithm, experiment.optimizer()
  )
  state = programs.init(jax.random.key(0))

  def held(tree):
    leaves = jax.tree.leaves(tree)
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)

  assert planned["parameters"] == held(state.params)
  assert planned["optimizer state"] == held(state.opt_state)
  assert planned["gradients, summed"] == held(programs.zero().grads)


@pytest.mark.process
def test_the_command_prints_both_pools_and_starts_nothing(tmp_path):
  result = commands.launch(
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


def test_a_pool_holds_what_is_published(experiment):
  publishing = weight_publisher.Publishing(dtype="int8")
  small = dataclasses.replace(experiment, publishing=publishing)
  # A scale a channel and the norms stay float32: a bit above a quarter.
  whole, quarter = (
    explain.decode_bytes(one)["parameters"] for one in (experiment, small)
  )
  assert 0.25 < quarter / whole < 0.3
