"""The memory of a run, device by device, and an engine that fits it."""

import dataclasses
from typing import Any

import jax
import optax
import pytest

from launch.cli import flags
from models import config as model_config
from models import lora, memory_report, sharding
from models import policy as policy_lib
from rl import assemble, memory_plan
from rl.algorithms import losses, preference_loss, references
from rl.engine.builtin import settings as engine_settings
from rl.engine.builtin import sizing
from rl.engine.sglang import settings as sglang_settings
from rl.loop import fine_tuning
from rl.pools import placement, weight_transfer
from rl.settings import overrides
from rl.train import learner
from tests.helpers import commands, pod_run

pytestmark = pytest.mark.compiled


@pytest.fixture(scope="module")
def experiment():
  return flags.load(str(commands.ROOT / commands.CONFIG))


@pytest.fixture(scope="module")
def big():
  return pod_run.experiment()


def programs_of(experiment):
  plan = experiment.placement.learner.plan
  return assemble.learner_programs(experiment, plan)


def learner_bytes(experiment):
  return memory_plan.learner_bytes(experiment, programs_of(experiment))


def test_bytes_of_the_learner_follow_from_the_number_of_parameters(big):
  lines = learner_bytes(big)
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
  lines = memory_plan.decode_bytes(big)
  # 94 layers of keys and values of 4 heads of 128 numbers of 2 bytes; heads
  # over 4 devices.
  token = 94 * 2 * 4 * 128 * 2 // 4
  # 256 slots of 8192 / 16 pages, and one; every row of devices has them all.
  tokens = 256 * pod_run.LENGTH
  pages = "KV cache, 2,097,168 tokens in 131,073 pages"
  assert lines[pages] == (tokens + 16) * token
  assert not [name for name in lines if "copied" in name]
  assert lines["their next version, arriving"] == lines["parameters"]


def test_a_cache_has_as_many_pages_as_were_asked_for(experiment):
  engine = engine_settings.EngineSettings(slots=6, pages=50, page_size=3)
  changed = dataclasses.replace(
    experiment,
    engine=engine,
    model=dataclasses.replace(experiment.model, max_length=100),
  )
  lines = memory_plan.decode_bytes(changed)
  assert "KV cache, 150 tokens in 50 pages" in lines


def test_an_engine_that_sizes_its_own_cache_has_no_line_for_it(experiment):
  other = dataclasses.replace(
    experiment, engine=sglang_settings.SglangSettings()
  )
  lines = memory_plan.decode_bytes(other)
  built_in = memory_plan.decode_bytes(experiment)
  assert list(lines) == ["parameters", "their next version, arriving"]
  assert lines.items() < built_in.items()
  memory = placement.Memory(2**30)
  assert memory_plan.fit(other, programs_of(other), memory) == other


def test_of_adapters_alone_there_are_gradients(experiment):
  model = dataclasses.replace(experiment.model, lora=lora.Lora(rank=2))
  adapted = dataclasses.replace(experiment, model=model)
  lines = learner_bytes(adapted)
  trained = memory_report.num_params(model).trained
  assert lines["gradients, summed"] == 4 * trained
  # Two moments, and two counters of 4 bytes at most.
  assert 0 <= lines["optimizer state"] - 8 * trained <= 8
  arriving = memory_plan.decode_bytes(adapted)["their next version, arriving"]
  assert arriving == 4 * trained


def test_what_a_host_keeps_takes_no_device_and_all_the_same_a_cpu(experiment):
  teacher = references.Teacher(
    model=model_config.tiny(), directory="teacher", memory="host"
  )
  algorithm = dataclasses.replace(experiment.algorithm, reference=teacher)
  experiment = dataclasses.replace(experiment, algorithm=algorithm)
  kept = overrides.apply(experiment, {"optimizer_memory": "host"})
  names = "optimizer state", "reference"

  def held(experiment, platform):
    place = dataclasses.replace(experiment.placement, platform=platform)
    lines = learner_bytes(dataclasses.replace(experiment, placement=place))
    return [lines.get(name, 0) for name in names]

  whole = held(experiment, "gpu")[0]
  parameters = 4 * memory_report.num_params(teacher.model).total
  assert held(kept, "gpu") == [0, 0]
  assert held(kept, "cpu") == [whole, parameters]


def test_a_teacher_on_the_host_has_room_on_the_device_while_it_scores(one_gpu):
  teacher = references.Teacher(
    model=model_config.qwen3("14b"), directory="teacher", memory="host"
  )
  algorithm = dataclasses.replace(one_gpu.algorithm, reference=teacher)
  changed = dataclasses.replace(one_gpu, algorithm=algorithm)
  lines = learner_bytes(changed)
  room = sum(size for name, size in lines.items() if "about" in name)
  parameters = 2 * memory_report.num_params(teacher.model).total
  assert lines["reference that scores, beyond those"] == parameters - room > 0
  assert fit(changed).engine.slots < fit(one_gpu).engine.slots


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
def test_planned_bytes_are_those_of_the_state_that_training_makes(experiment):
  spec = placement.MeshSpec(
    data=2, expert=2, tensor=2, rules=sharding.Rules(vocab=None)
  )
  place = placement.Placement(learner=spec, colocated=True)
  model = dataclasses.replace(experiment.model, num_layers=1)
  planned = learner_bytes(
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
  assert planned["gradients, summed"] == held(
    optax.tree.get(state.opt_state, "mu")
  )


def test_a_pool_holds_what_is_published(experiment):
  publishing = weight_transfer.Publishing(dtype="int8")
  small = dataclasses.replace(experiment, publishing=publishing)
  # A scale a channel and the norms stay float32: a bit above a quarter.
  whole, quarter = (
    memory_plan.decode_bytes(one)["parameters"] for one in (experiment, small)
  )
  assert 0.25 < quarter / whole < 0.3


def test_the_learner_holds_one_bucket_of_what_it_casts(experiment):
  name = "a bucket of weights to publish, cast"
  assert name not in learner_bytes(experiment)  # Copied as they are.

  def held(bucket_bytes):
    publishing = weight_transfer.Publishing(
      dtype="bfloat16", bucket_bytes=bucket_bytes
    )
    return learner_bytes(
      dataclasses.replace(experiment, publishing=publishing)
    )[name]

  # Of float32 half of each bucket's bytes, or of its largest array.
  whole = memory_report.num_params(experiment.model).total
  leaves = jax.tree.leaves(policy_lib.of(experiment.model).shapes)
  assert held(1 << 30) == 2 * whole
  assert held(1) == 2 * max(leaf.size for leaf in leaves)
  assert held(1) < held(whole) <= whole // 2


# An engine that fits.


@pytest.fixture(scope="module")
def one_gpu(experiment):
  """Qwen3-0.6B, trained and decoded on one device of 80 GiB."""
  changed = dataclasses.replace(
    experiment,
    model=model_config.qwen3("0.6b"),
    rollout=dataclasses.replace(experiment.rollout, max_tokens=4096),
    engine=engine_settings.EngineSettings(),
    placement=placement.Placement(
      platform="gpu", colocated=True, device_gib=80.0
    ),
    batch=dataclasses.replace(experiment.batch, length=4096),
  )
  changed.validate()
  return changed


def fit(experiment, memory=None) -> Any:
  memory = memory or experiment.placement.memory()
  return memory_plan.fit(experiment, programs_of(experiment), memory)


def test_an_engine_takes_what_training_leaves_on_its_device(one_gpu):
  fitted = fit(one_gpu)
  parts = memory_plan.shares(fitted, programs_of(fitted))
  assert [part.devices for part in parts] == [range(1), range(1)]
  # A tenth is kept free, and room for twice the estimates. One slot takes 256
  # pages of 16 tokens, in each of 28 layers 8 keys and 8 values of 128 numbers
  # of 2 bytes; and 16 bytes for each of 151,936 logits.
  usable = 80 * 2**30 * 9 // 10
  usable -= parts[0].lines["activations, about, 10 x 4096 tokens"]
  usable -= parts[0].lines["parameters in use and their gradients, about"]
  slot = 4096 * 28 * 2 * 8 * 128 * 2 + 16 * 151_936
  held = sum(part.total for part in parts)
  assert usable - 1.1 * slot < held <= usable
  engine = fitted.engine
  assert 8 < engine.slots < 256
  assert engine.pages == engine.slots * 256 + 1
  # With memory enough there are 256.
  more = fit(one_gpu, placement.Memory(2**40)).engine
  assert (more.slots, more.row_buckets) == (256, (8, 32, 128, 256))
  # What is unset is all that is set, and a second time changes nothing.
  assert fit(fitted) == fitted


def test_sizes_that_are_set_stay_and_pages_make_room(one_gpu):
  asked = engine_settings.EngineSettings(slots=200, row_buckets=(16,))
  found = fit(dataclasses.replace(one_gpu, engine=asked)).engine
  assert (found.slots, found.row_buckets) == (200, (16,))
  # 200 whole conversations would be 87.5 GiB.
  assert 257 <= found.pages < 200 * 256 + 1


@pytest.mark.parametrize(
  # Of a conversation's 32,768 tokens keys and values are 3.5 GiB. A tenth of
  # the memory is kept free, and the weights are there twice.
  ("gib", "whole"),
  [(139, 34), (95e9 / 2**30, 21)],
  ids=["H200", "v5p"],
)
def test_32_rows_of_32k_take_their_pages_and_no_copy(gib, whole):
  config = model_config.qwen3("0.6b", max_length=32_768)
  plan = placement.MeshSpec(rules=sharding.DECODE).plan
  weights = sum(
    row.device_bytes for row in memory_report.parameters(config, plan)
  )
  left = int(gib * 2**30) * 9 // 10 - 2 * weights
  rooms = [sizing.Room(plan, left)]
  # As many whole conversations as fit, and 32 that share what there is.
  free = engine_settings.EngineSettings().sizes(config, rooms)
  assert (free.slots, free.pages) == (whole, whole * 2048 + 1)
  asked = engine_settings.EngineSettings(slots=32).sizes(config, rooms)
  assert asked.pages is not None
  assert min(whole, 32) * 2048 <= asked.pages <= 32 * 2048 + 1
  lines = sizing.lines(asked, config, plan, sizing.Extras())
  assert sum(lines.values()) <= left
  # No conversation is there twice.
  assert len(lines) == 3


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    (
      # The logits of 30,000 rows are 68 GiB.
      {"engine": "built_in(slots=30000)"},
      r"engine: slots=30000 .* take \d+\.?\d* GiB of .* are left beside the",
    ),
    (
      {"engine": "built_in(slots=64,pages=80000)"},
      r"takes \d+\.?\d* GiB of a device, where 72.0 GiB can be used:\n"
      r"  learner: parameters 1.11 GiB, .*\n  decode: parameters 1.11 GiB, .*"
      r"KV cache, 1,280,000 tokens in 80,000 pages 1\d\d GiB.*"
      r"\nlower batch.rows",
    ),
    ({"batch.rows": "400", "batch.tail_rows": "none"}, "activations, about"),
    # It fits, by estimates that may be half of what training takes.
    ({"overlap.max_staleness": "40"}, "where 0 B are left beside the weights"),
  ],
)
def test_a_run_that_does_not_fit_is_refused_with_figures(
  one_gpu, changes, words
):
  changed = overrides.apply(one_gpu, changes)
  with pytest.raises(ValueError, match=words):
    fit(changed)


def test_devices_of_a_host_share_its_memory(experiment):
  experiment = overrides.override(experiment, "engine.pages", "513")
  programs = programs_of(experiment)
  parts = memory_plan.shares(experiment, programs)
  total = sum(part.total * len(part.devices) for part in parts)
  enough = placement.Memory(total, is_shared=True)
  fitted = memory_plan.fit(experiment, programs, enough)
  assert memory_plan.shares(fitted, programs) == parts
  # Learner and engine have a device each, of which either would fit.
  assert max(part.total for part in parts) < total - 1
  less = placement.Memory(total - 1, is_shared=True)
  with pytest.raises(ValueError, match="of this host"):
    memory_plan.fit(experiment, programs, less)


def test_a_policy_that_only_plays_needs_no_room_for_training(experiment):
  programs = programs_of(experiment)
  total = memory_report.num_params(experiment.model).total
  # In float32 of the learner, of the engine, and its next version; 14 MiB of
  # cache. Gradients, moments and activations are more than that.
  memory = placement.Memory(3 * 4 * total + (15 << 20), is_shared=True)
  memory_plan.fit(experiment, programs, memory, trains=False)
  with pytest.raises(ValueError, match=r"^the run takes .* of this host"):
    memory_plan.fit(experiment, programs, memory)


def test_fine_tuning_alone_has_its_reference_and_no_engine(one_gpu):
  none = dataclasses.replace(one_gpu.evaluation, episodes=0)
  sft, dpo = (
    dataclasses.replace(
      one_gpu,
      rounds=0,
      evaluation=none,
      warm_start=fine_tuning.FineTuning(loss=loss),
    )
    for loss in (losses.NegativeLogLikelihood(), preference_loss.Dpo())
  )
  (alone,) = memory_plan.shares(sft, programs_of(sft))
  (paired,) = memory_plan.shares(dpo, programs_of(dpo))
  assert "reference" not in alone.lines
  # The initial weights, beside those that are trained.
  assert paired.lines["reference"] == alone.lines["parameters"]
  assert not any("versions" in name for name in alone.lines)
  enough = placement.Memory(alone.total)
  assert fit(sft, enough) == sft
  with pytest.raises(ValueError, match="the run takes"):
    fit(dpo, enough)
  rounds = dataclasses.replace(dpo, rounds=1)
  learner_share, _ = memory_plan.shares(rounds, programs_of(rounds))
  assert learner_share.lines["reference"] == paired.lines["reference"]
  adapted = overrides.apply(dpo, {"model.lora": "lora"})
  assert "reference" not in learner_bytes(adapted)


def test_a_served_model_has_what_its_weights_leave(experiment):
  model = dataclasses.replace(experiment.model, max_length=4096)
  place = placement.Placement(colocated=True)
  engine = engine_settings.EngineSettings()

  def fitted(num_bytes) -> Any:
    memory = None if num_bytes is None else placement.Memory(num_bytes)
    return memory_plan.fit_served(engine, model, place, memory)

  roomy, (share,) = fitted(2**36)
  assert (roomy.slots, roomy.pages) == (256, 256 * 256 + 1)
  weights = share.lines["parameters"]
  assert weights == 4 * memory_report.num_params(model).total
  # Half of what the cache and its copy take leaves half of the slots, about.
  half, (less,) = fitted(weights + (share.total - weights) // 2)
  assert 100 < half.slots < 128
  assert less.total <= weights + (share.total - weights) // 2
  # As given sizes do, and a second time those that followed.
  memory = placement.Memory(2**36)
  again = memory_plan.fit_served(half, model, place, memory)
  assert again == (half, [less])
  with pytest.raises(ValueError, match=r"(?s)the served model .*parameters"):
    fitted(weights - 1)
  with pytest.raises(ValueError, match=r"slots=1 for conversations of 4096"):
    fitted(weights + 1)
  # Nothing is known of the memory: nothing is checked.
  assert fitted(None)[0].slots == 256


def test_engines_on_one_device_divide_what_is_left(one_gpu):
  mesh = placement.MeshSpec(first_device=0, rules=sharding.DECODE)
  pool = placement.DecodePool(name="second", mesh=mesh)
  place = dataclasses.replace(one_gpu.placement, more=(pool,))
  two = dataclasses.replace(one_gpu, placement=place)
  two.validate()
  fitted = fit(two)
  assert fitted.engine.slots < fit(one_gpu).engine.slots / 2
  parts = memory_plan.shares(fitted, programs_of(fitted))
  assert len(parts) == 3
  assert sum(part.total for part in parts) <= 72 * 2**30


def test_memory_that_is_named_is_that_of_an_accelerator(one_gpu):
  changes = {"placement.platform": "none", "model.compute.remat": "host"}
  unnamed = overrides.apply(one_gpu, changes)
  named = overrides.apply(unnamed, {"placement.platform": "gpu"})
  lines = learner_bytes(unnamed)
  assert lines == learner_bytes(named)
  # Of 28 layers two have their inputs on the device, as on no CPU.
  assert lines.items() != learner_bytes(one_gpu).items()


def test_nothing_is_said_of_devices_that_are_not_known(one_gpu):
  unknown = dataclasses.replace(one_gpu.placement, device_gib=None)
  changed = dataclasses.replace(one_gpu, placement=unknown)
  assert unknown.memory() is None
  assert memory_plan.fit(changed, programs_of(changed), None) == changed
