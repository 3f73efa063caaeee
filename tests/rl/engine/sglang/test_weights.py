"""Weights for sglang-jax, which compute what ours do."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import config as config_lib
from models import logprobs, lora, quantize, rope
from models import policy as policy_lib
from rl.engine.sglang import weights as sglang_weights

pytestmark = pytest.mark.compiled

SMALL = config_lib.tiny(
  vocab_size=11,
  num_layers=2,
  d_model=16,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  d_ff=24,
  max_length=20,
)
SPARSE = dataclasses.replace(
  SMALL, num_experts=4, d_expert=8, dense_layers=(1,), tie_embeddings=False
)


def weights(config):
  shapes, rng = policy_lib.of(config).shapes, np.random.default_rng(0)
  return jax.tree.map(
    lambda leaf: jnp.asarray(
      rng.normal(0.5 * (len(leaf.shape) == 1), 0.3, leaf.shape), leaf.dtype
    ),
    shapes,
  )


@functools.partial(jax.jit, static_argnums=1)
def logits(params, config):
  """Of two conversations of 20 ids, whose rotary angles differ by much."""
  rng = np.random.default_rng(1)
  ids = jnp.asarray(rng.integers(0, 11, (2, 20)), jnp.int32)
  positions = jnp.broadcast_to(jnp.arange(20), ids.shape)
  model = policy_lib.of(config).bind(params)
  hidden, _ = model.hidden(ids, positions, jnp.ones_like(ids))
  return logprobs.logits(model.terms(hidden))


def ours_again(leaves, config):
  """Our tree of the widened model out of sglang-jax's leaves."""
  wide = dataclasses.replace(config, head_dim=sglang_weights.HEAD_DIM)
  shapes = policy_lib.of(wide).shapes
  names = {
    "query": "self_attn.q_proj.weight",
    "key": "self_attn.k_proj.weight",
    "value": "self_attn.v_proj.weight",
    "out": "self_attn.o_proj.weight",
    "query_norm": "self_attn.q_norm.scale",
    "key_norm": "self_attn.k_norm.scale",
    "attention_norm": "input_layernorm.scale",
    "mlp_norm": "post_attention_layernorm.scale",
    "mlp.gate": "mlp.gate_proj.weight",
    "mlp.up": "mlp.up_proj.weight",
    "mlp.down": "mlp.down_proj.weight",
    "router.kernel": "moe_gate.kernel",
    "moe.gate": "mlp.wi_0",
    "moe.up": "mlp.wi_1",
    "moe.down": "mlp.wo",
    "embed": "embed_tokens.embedding",
    "final_norm": "norm.scale",
  }

  def leaf(path, shape):
    keys = [getattr(key, "key", getattr(key, "idx", None)) for key in path]
    if keys == ["head"]:
      return leaves["lm_head.embedding"].T
    name = names.get(str(keys[-1])) or names[".".join(map(str, keys[-2:]))]
    if keys[0] == "layers":
      name = f"layers.{keys[1]}.{name}"
    return leaves[name].reshape(shape.shape)

  return jax.tree_util.tree_map_with_path(leaf, shapes), wide


@pytest.mark.parametrize("head_dim", [2, 8, 16, 32, 64, 128])
def test_wider_heads_compute_the_same(head_dim):
  config = dataclasses.replace(SMALL, head_dim=head_dim)
  params = weights(config)
  convert = jax.jit(functools.partial(sglang_weights.convert, config=config))
  again = logits(*ours_again(convert(params), config))
  np.testing.assert_allclose(again, logits(params, config), atol=1e-5)


def test_experts_beside_dense_layers_and_a_head_compute_the_same():
  params = weights(SPARSE)
  leaves = sglang_weights.convert(params, SPARSE)
  again = logits(*ours_again(leaves, SPARSE))
  np.testing.assert_allclose(again, logits(params, SPARSE), atol=1e-5)


def test_adapters_are_merged():
  config = dataclasses.replace(SPARSE, lora=lora.Lora(rank=2))
  params = weights(config)
  leaves = sglang_weights.convert(params, config)
  plain = dataclasses.replace(config, lora=None)
  again = logits(*ours_again(leaves, plain))
  expected = logits(params, config)
  np.testing.assert_allclose(again, expected, atol=1e-4)
  without = logits(lora.drop(params), plain)
  assert abs(without - expected).max() > 0.01


def test_quantised_matrices_are_multiplied_out():
  params = quantize.quantize(weights(SMALL))
  leaves = sglang_weights.convert(params, SMALL)
  again = logits(*ours_again(leaves, SMALL))
  np.testing.assert_allclose(again, logits(params, SMALL), atol=1e-4)


def test_powers_of_four_are_exact_in_bfloat16():
  # 128 / 8 = 16 whose root is 4: no digit is lost, and 0 is added.
  compute = config_lib.Compute(dtype="bfloat16")
  config = dataclasses.replace(SMALL, compute=compute)
  params = weights(config)
  leaves = sglang_weights.convert(params, config)
  query = params["layers"][0]["attention"]["query"]
  wide = leaves["layers.0.self_attn.q_proj.weight"].reshape(16, 4, 128)
  assert wide.dtype == jnp.bfloat16
  np.testing.assert_array_equal(wide[..., [0, 16, 32, 48]], 4 * query[..., :4])
  np.testing.assert_array_equal(
    wide[..., [64, 80, 96, 112]], 4 * query[..., 4:]
  )
  assert (wide != 0).sum() == (query != 0).sum()


@pytest.mark.parametrize(
  ("path", "name"),
  [
    ("['model']['norm']['scale'].value", "norm.scale"),
    ("['transformer']['norm']['scale'].value", "norm.scale"),
    ("['lm_head']['embedding'].value", "lm_head.embedding"),
    ("['rng']['default']['key'].value", "rng.default.key"),
    (
      "['model']['layers'][1]['self_attn']['c_proj']['weight'].value",
      "layers.1.self_attn.o_proj.weight",
    ),
  ],
)
def test_names_are_the_same_in_all_releases(path, name):
  assert sglang_weights.name_of(path) == name


def test_leaves_are_filled_in_their_order_and_places():
  ours = {"norm.scale": jnp.ones(3), "lm_head.embedding": jnp.zeros((2, 3))}
  paths = [
    "['lm_head']['embedding']",
    "['rng']['key']",
    "['model']['norm']['scale']",
  ]
  second = jax.sharding.SingleDeviceSharding(jax.devices()[1])
  old = [
    jax.device_put(leaf, second)
    for leaf in (jnp.ones((2, 3)), jnp.arange(2), jnp.zeros(3, jnp.bfloat16))
  ]
  filled = sglang_weights.fill(ours, paths, old)
  assert filled[1] is old[1]
  assert [leaf.dtype for leaf in filled] == [leaf.dtype for leaf in old]
  assert {leaf.sharding for leaf in filled} == {second}
  np.testing.assert_array_equal(filled[0], ours["lm_head.embedding"])
  np.testing.assert_array_equal(filled[2], 1.0)


@pytest.mark.parametrize(
  ("paths", "shape", "words"),
  [
    (["['norm']['scale']"], (4,), r"\(4,\), but our norm.scale is \(3,\)"),
    (["['norm']['bias']"], (3,), "norm.bias is missing"),
    ([], (3,), "no leaf for norm.scale"),
  ],
)
def test_leaves_of_another_model_are_refused(paths, shape, words):
  old = [jnp.zeros(shape) for _ in paths]
  with pytest.raises(ValueError, match=words):
    sglang_weights.fill({"norm.scale": jnp.ones(3)}, paths, old)


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    ({"head_dim": 48}, "head_dim=48"),
    ({"head_dim": 256}, "head_dim=256"),
    ({"rope_scaling": rope.Linear(factor=2.0)}, "rope_scaling=Linear"),
    ({"qk_norm": False}, "qk_norm=false"),
    ({"architecture": "olmo"}, "architecture=olmo"),
  ],
)
def test_what_it_would_compute_otherwise_is_refused(changes, words):
  config = dataclasses.replace(SMALL, **changes)
  with pytest.raises(ValueError, match=words):
    sglang_weights.check(config)


@pytest.mark.parametrize(
  ("config", "devices", "words"),
  [
    (SMALL, 4, "num_kv_heads=2"),
    (SMALL, 2, "vocab_size=11"),
    (dataclasses.replace(SMALL, vocab_size=12, d_ff=25), 2, "d_ff=25"),
    (
      dataclasses.replace(SPARSE, vocab_size=12, d_expert=7),
      2,
      "d_expert=7",
    ),
  ],
)
def test_what_does_not_split_is_refused(config, devices, words):
  sglang_weights.check_split(config, 1)
  with pytest.raises(ValueError, match=words):
    sglang_weights.check_split(config, devices)


def test_the_file_tells_the_widened_sizes():
  data = sglang_weights.config_json(SPARSE, 28)
  assert data["architectures"] == ["Qwen3MoeForCausalLM"]
  assert data["head_dim"] == 128
  assert data["max_position_embeddings"] == 28
  assert data["mlp_only_layers"] == [1]
