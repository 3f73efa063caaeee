"""Plans for meshes that need not exist, against those that do."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from models import config as config_lib
from models import (
  kv_cache,
  logprobs,
  lora,
  memory_report,
  sharding,
)
from models import policy as policy_lib


def make_plan(data=1, expert=1, tensor=1, rules=sharding.TRAIN):
  return sharding.Layout(sharding.plan_mesh(data, expert, tensor), rules)


def by_name(config, layout):
  return {row.name: row for row in memory_report.parameters(config, layout)}


def test_layers_of_one_shape_are_one_row():
  config = config_lib.tiny_moe(num_layers=5, dense_layers=(1, 2))
  rows = by_name(config, make_plan())
  names = list(rows)
  assert names[0] == "embed"
  assert names[-1] == "final_norm"
  assert rows["layers.0-4.attention.query"].count == 5
  assert rows["layers.1-2.mlp.gate"].count == 2
  assert rows["layers.0,3-4.moe.gate"].count == 3
  assert rows["embed"].count == 1


def test_a_row_says_where_its_parameter_lies():
  config = config_lib.qwen3_moe("235b-a22b")
  row = by_name(config, make_plan(8, 4, 2))["layers.0-93.moe.up"]
  assert row.shape == (128, 4096, 1536)
  assert row.axes == ("experts", "embed", "mlp")
  assert row.spec == jax.P("expert", "data", "tensor")
  assert row.dtype == "bfloat16"
  # 94 layers, 2 bytes, and a 64th of each.
  assert row.device_bytes == 94 * 2 * 128 * 4096 * 1536 // 64
  norm = by_name(config, make_plan(8, 4, 2))["final_norm"]
  assert norm.device_bytes == 2 * 4096


@pytest.mark.parametrize(
  "config",
  [
    config_lib.tiny_moe(dense_layers=(0,), tie_embeddings=False),
    config_lib.tiny(lora=lora.Lora(rank=4)),
    config_lib.qwen3("0.6b"),
    config_lib.qwen3_moe("30b-a3b"),
  ],
  ids=["sparse", "adapters", "0.6b", "30b"],
)
def test_the_rows_are_all_parameters(config):
  rows = memory_report.parameters(config, make_plan())
  total = memory_report.num_params(config).total
  width = {"float32": 4, "bfloat16": 2}[config.dtype]
  assert sum(row.device_bytes for row in rows) == width * total


@pytest.mark.compiled
@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
def test_planned_bytes_are_those_of_arrays():
  config = config_lib.tiny_moe(num_layers=1)
  layout = sharding.Layout(sharding.make_mesh(2, 2, 2))
  plan = make_plan(2, 2, 2)
  params = jax.device_put(
    jax.tree.map(jnp.zeros_like, policy_lib.of(config).shapes),
    layout.tree(policy_lib.of(config).axes),
  )
  store = jax.device_put(
    kv_cache.init_cache(config, 5, 3), layout.sharding(*kv_cache.AXES)
  )

  def held(tree):
    shards = [leaf.addressable_shards[0] for leaf in jax.tree.leaves(tree)]
    return sum(shard.data.nbytes for shard in shards)

  rows = memory_report.parameters(config, plan)
  assert sum(row.device_bytes for row in rows) == held(params)
  places = plan.tree(policy_lib.of(config).axes)
  tree = memory_report.placed(policy_lib.of(config).shapes, places)
  assert memory_report.device_bytes(tree) == held(params)
  pages = memory_report.cache_bytes(config, plan, pages=5, page_size=3)
  assert pages == held(store)


def test_a_leaf_without_a_sharding_is_on_every_device():
  assert (
    memory_report.device_bytes(jax.ShapeDtypeStruct((3, 5), jnp.bfloat16)) == 30
  )


def temporary_bytes(config, layout, rows, length):
  """Returns what XLA takes for a micro-batch's gradient beside its in- and
  outputs.
  """
  places = layout.tree(policy_lib.of(config).axes)
  shapes = memory_report.placed(policy_lib.of(config).shapes, places)
  tokens = jax.ShapeDtypeStruct(
    (rows, length), jnp.int32, sharding=layout.sharding("batch")
  )

  def loss(params, tokens):
    positions = jnp.broadcast_to(
      jnp.arange(length, dtype=jnp.int32), tokens.shape
    )
    model = policy_lib.of(config).bind(params)
    hidden, aux = model.hidden(
      tokens, positions, jnp.ones_like(tokens), layout=layout
    )
    logits = logprobs.logits(model.terms(hidden, layout=layout))
    return jax.nn.logsumexp(logits, -1).sum() + aux.load_balance

  def accumulate(params, sums, tokens):
    gradient = jax.grad(loss)(params, tokens)
    return jax.tree.map(jnp.add, sums, gradient)

  run = jax.jit(accumulate, donate_argnums=1, out_shardings=places)
  compiled = run.lower(shapes, shapes, tokens).compile()
  analysis = compiled.memory_analysis()
  assert analysis is not None
  return analysis.temp_size_in_bytes


@pytest.mark.compiled
@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
@pytest.mark.parametrize(
  ("remat", "num_experts"),
  [
    *(("none", 8), ("dots", 0), ("layer", 8)),
    *(
      pytest.param(*other, marks=pytest.mark.slow)
      for other in (("none", 0), ("dots", 8), ("layer", 0))
    ),
  ],
)
def test_estimated_activations_are_within_a_factor_of_two(remat, num_experts):
  # Two factors: what XLA shares, and what its kernels need, is not modelled.
  config = config_lib.tiny_moe(
    vocab_size=512,
    num_layers=3,
    num_experts=num_experts,
    num_heads=8,
    num_kv_heads=4,
    d_ff=384,
    d_expert=192,
    compute=config_lib.Compute(remat=remat),
  )
  layout = sharding.Layout(sharding.make_mesh(2, 1, 2))
  found = temporary_bytes(config, layout, 8, 128)
  plan = make_plan(2, 1, 2)
  planned = memory_report.activation_bytes(config, plan, rows=8, length=128)
  planned += memory_report.parameter_use_bytes(config, plan)
  assert found / 2 < planned < found * 2


def test_activations_shrink_with_the_mesh_and_with_what_is_computed_again():
  config = config_lib.qwen3("1.7b")

  def estimate(remat, attention, **mesh):
    compute = config_lib.Compute(remat=remat, attention=attention)
    changed, plan = (
      dataclasses.replace(config, compute=compute),
      make_plan(**mesh),
    )
    return memory_report.activation_bytes(
      changed, plan, rows=8, length=4096
    ) + memory_report.parameter_use_bytes(changed, plan)

  tiled = functools.partial(estimate, attention="blockwise")
  none, dots, layer = map(tiled, ("none", "dots", "layer"))
  assert none > dots > layer
  # 8 bytes for each of 8 * 16 * 4096^2 scores of each of 28 layers.
  scores = estimate("none", "reference") - none
  assert scores == 8 * 28 * (8 * 16 * 4096**2) + 8 * 8 * 16 * 4096**2
  assert tiled("layer", tensor=8) < layer / 2


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_activations_of_a_long_row_halve_with_each_doubling_of_context(
  platform,
):
  config = config_lib.qwen3("0.6b", max_length=32_768)
  one, *shared = (
    memory_report.activation_bytes(
      config,
      sharding.Layout(sharding.plan_mesh(context=context)),
      rows=1,
      length=32_768,
      platform=platform,
    )
    for context in (1, 2, 4, 8)
  )
  assert [2 * x for x in shared[1:]] == shared[:-1]
  # What goes round is there only when devices share a row: of 8 keys and 8
  # values of 128 numbers, 2 bytes of each and 4 of its gradient.
  assert 2 * shared[0] == one + 32_768 * 2 * 8 * 128 * (2 + 4)
  assert shared[0] < 0.55 * one


def test_inputs_of_layers_in_the_memory_of_the_host_take_none_of_the_device():
  def estimate(remat, platform):
    config = config_lib.qwen3("0.6b", max_length=32_768)
    compute = dataclasses.replace(config.compute, remat=remat)
    return memory_report.activation_bytes(
      dataclasses.replace(config, compute=compute),
      make_plan(),
      rows=1,
      length=32_768,
      platform=platform,
    )

  # Of 28 layers two inputs of 1024 numbers of 2 bytes stay.
  spared = estimate("layer", "gpu") - estimate("host", "gpu")
  assert spared == 26 * 32_768 * 1024 * 2
  # On a CPU the two memories are one.
  assert estimate("host", "cpu") == estimate("layer", "cpu")
