import dataclasses
import math
import re

import jax
import numpy as np
import pytest

from models import config as config_lib
from models import memory_report, rope
from models import policy as policy_lib
from rl.settings import checks
from rl.settings import overrides as overrides_lib


@pytest.mark.parametrize(
  ("overrides", "message"),
  [
    (
      {"num_heads": 5},
      "model.num_heads=5 does not split over num_kv_heads=2; use 6",
    ),
    ({"head_dim": 31}, "model.head_dim=31 is odd, and rotary"),
    (
      {"experts_per_token": 5},
      "model.experts_per_token=5 is above num_experts=4; use 4 or fewer",
    ),
    ({"num_layers": 0}, "model.num_layers=0 must be at least 1"),
    ({"num_layers": 2**31}, f"num_layers={2**31} must be at most 10000"),
    ({"d_model": 2**63}, f"model.d_model={2**63} must be at most {2**31 - 1}"),
    ({"num_experts": -1}, "model.num_experts=-1 must be at least 0"),
    (
      {"norm_eps": 0.0},
      "model.norm_eps=0.0 must be a finite number above 0; use 1e-06",
    ),
    (
      {"rope_theta": math.inf},
      "model.rope_theta=inf must be a finite number above 0",
    ),
    ({"rope_theta": 1.0}, "model.rope_theta=1.0 is not above 1, and every"),
    (
      {"qk_norm": False},
      "model.qk_norm=false with num_experts=4: no published family has both",
    ),
    (
      {"qkv_bias": True},
      "model.qkv_bias=true with qk_norm=true: no published family has both",
    ),
    (
      {"architecture": "gemma"},
      "model.architecture=gemma with num_experts=4: no published family has b",
    ),
    (
      {"architecture": "olmo", "qk_norm": False, "num_experts": 0},
      "model.architecture=olmo with qk_norm=false: no published family has bo",
    ),
    (
      {"num_experts": 0, "window": config_lib.Window(size=9)},
      "model.qk_norm=true with a window: no published family but Gemma and "
      "OLMo has both; use qk_norm=false, as in Mistral 7B",
    ),
    (
      {
        **{"num_experts": 0, "qk_norm": False},
        "window": config_lib.Window(size=9, full_every=6),
      },
      "model.window.full_every=6 with a window: no published family but",
    ),
    (
      {
        **{"num_experts": 0, "architecture": "gemma"},
        "rope_scaling": rope.Linear(factor=2.0),
        "window": config_lib.Window(size=9),
      },
      "model.window.rope_theta=none with rope_scaling, which layers with a wi",
    ),
    (
      {
        **{"num_experts": 0, "architecture": "olmo"},
        "window": config_lib.Window(size=9),
      },
      "model.rope_theta=10000.0 with architecture=olmo: no published OLMo with",
    ),
    (
      {"architecture": "olmoe", "num_experts": 0},
      "model.num_experts=0 with architecture=olmoe: no published OLMoE has it; "
      "use num_experts=4",
    ),
    (
      {"architecture": "olmoe", "dense_layers": (1,)},
      "model.dense_layers=(1,) with architecture=olmoe: no published OLMoE has",
    ),
    (
      {"query_pre_attn_scalar": 9},
      "model.query_pre_attn_scalar=9 is for architecture=gemma, and above 0",
    ),
    (
      {"dense_layers": (1, 4)},
      "model.dense_layers=(1, 4) names layer 4, but they are 0 to 3",
    ),
  ],
)
def test_a_size_that_cannot_work_is_refused_with_a_way_out(overrides, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    config_lib.tiny_moe(**overrides).validate()


def test_a_block_of_nothing_is_refused():
  words = r"model\.compute\.moe_block=0 must be at least 1"
  with pytest.raises(ValueError, match=words):
    config_lib.Compute(moe_block=0).validate()


def test_the_defaults_are_valid():
  config_lib.tiny().validate()
  config_lib.tiny_moe().validate()


def test_a_large_model_computes_its_layers_again_unless_it_is_told_otherwise():
  # Width 1024 with a vocabulary of 1: 12 layers of an MLP of 2048 and 4 + 4
  # heads of 128 are 12 * 1024 * (3 * 2048 + 2 * (4 + 4) * 128) = 100.7 million
  # and the table, 11 are 92.3.
  sizes = {"vocab_size": 1, "d_model": 1024, "d_ff": 2048, "head_dim": 128}
  heads = {"num_heads": 4, "num_kv_heads": 4}
  small, large = (
    config_lib.tiny(**sizes, **heads, num_layers=layers) for layers in (11, 12)
  )
  assert memory_report.num_params(small).total < 100e6
  assert memory_report.num_params(large).total > 100e6
  assert (small.remat, large.remat) == ("none", "layer")
  for size in ("30b-a3b", "235b-a22b"):
    assert config_lib.qwen3_moe(size).remat == "layer"
  kept = overrides_lib.override(large, "compute.remat", "none")
  assert kept.remat == "none"
  assert overrides_lib.override(kept, "compute.remat", None) == large


@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_is_counted(tied):
  config = config_lib.tiny_moe(tie_embeddings=tied, dense_layers=(2,))
  params = jax.eval_shape(lambda: policy_lib.of(config).init(jax.random.key(0)))
  total, active, _ = memory_report.num_params(config)
  assert total == sum(leaf.size for leaf in jax.tree.leaves(params))
  # A token skips 2 of 4 experts in each of 3 layers: 3 * 128 * 128 each.
  assert total - active == 3 * 2 * 3 * 128 * 128


# Parameters in all and without embeddings, in 10^9, by the cards of
# Qwen/Qwen3-0.6B and so on at Hugging Face.
PUBLISHED = {
  "0.6b": (0.6, 0.44),
  "1.7b": (1.7, 1.4),
  "4b": (4.0, 3.6),
  "8b": (8.2, 6.95),
  "14b": (14.8, 13.2),
  "32b": (32.8, 31.2),
}
# In all, without embeddings, and used by a token. The card of 480b-a35b, of
# Qwen3-Coder, does not tell the second.
PUBLISHED_MOE = {
  "30b-a3b": (30.5, 29.9, 3.3),
  "235b-a22b": (235, 234, 22),
  "480b-a35b": (480, None, 35),
}


# In all and without embeddings, by the cards of Qwen/Qwen2.5-0.5B-Instruct and
# so on.
PUBLISHED_QWEN2_5 = {
  "0.5b": (0.49, 0.36),
  "1.5b": (1.54, 1.31),
  "3b": (3.09, 2.77),
  "7b": (7.61, 6.53),
  "14b": (14.7, 13.1),
  "32b": (32.5, 31.0),
  "72b": (72.7, 70.0),
}


# In all, by the cards of meta-llama/Llama-3.2-1B and so on; of 3.1-8B and
# 3.1-70B as their safetensors index counts them.
PUBLISHED_LLAMA = {
  "3.2-1b": 1.24,
  "3.2-3b": 3.21,
  "3.1-8b": 8.03,
  "3.1-70b": 70.6,
}


def outside_embeddings(config):
  tables = 1 if config.tie_embeddings else 2
  return tables * config.vocab_size * config.d_model


# In all, without models of images: table 1 of arXiv 2503.19786, and the card of
# google/gemma-3-270m.
PUBLISHED_GEMMA = {
  "270m": (0.268, 0.1),
  "1b": (1.0, 0.698),
  "4b": (3.884, 3.209),
  "12b": (11.771, 10.759),
  "27b": (27.016, 25.6),
}


@pytest.mark.parametrize("size", PUBLISHED_GEMMA)
def test_gemma_presets_have_the_published_number_of_parameters(size):
  config = config_lib.gemma3(size)
  checks.validate(config)
  total = memory_report.num_params(config).total
  rest = total - outside_embeddings(config)
  wanted = [pytest.approx(x * 1e9, rel=0.005) for x in PUBLISHED_GEMMA[size]]
  assert [total, rest] == wanted


# Numbers of weights of allenai/OLMo-2-0425-1B, ..., Olmo-3-7B-Instruct, ...,
# OLMoE-1B-7B-0924.
PUBLISHED_OLMO = {
  config_lib.olmo2: {"1b": 1.485, "7b": 7.299, "13b": 13.716, "32b": 32.234},
  config_lib.olmo3: {"7b": 7.298, "32b": 32.234},
  config_lib.olmoe: {"1b-7b": 6.919},
}


@pytest.mark.parametrize("family", PUBLISHED_OLMO)
def test_olmo_presets_have_the_published_number_of_parameters(family):
  for size, wanted in PUBLISHED_OLMO[family].items():
    config = family(size)
    checks.validate(config)
    total = memory_report.num_params(config).total
    assert total == pytest.approx(wanted * 1e9, rel=0.0005)


@pytest.mark.parametrize("size", PUBLISHED)
def test_dense_presets_have_the_published_number_of_parameters(size):
  # Within 1.5 %, because 1.72 is published as 1.7.
  config = config_lib.qwen3(size)
  config.validate()
  total, active, _ = memory_report.num_params(config)
  assert active == total
  rest = total - outside_embeddings(config)
  wanted = [pytest.approx(x * 1e9, rel=0.015) for x in PUBLISHED[size]]
  assert [total, rest] == wanted
  assert config.tie_embeddings == (size in ("0.6b", "1.7b", "4b"))


@pytest.mark.parametrize("size", PUBLISHED_MOE)
def test_sparse_presets_have_the_published_number_of_parameters(size):
  config = config_lib.qwen3_moe(size)
  config.validate()
  total, active, _ = memory_report.num_params(config)
  in_all, rest, used = PUBLISHED_MOE[size]
  assert total == pytest.approx(in_all * 1e9, rel=0.002)
  # Within 2 %, because 3.35 is published as 3.3.
  assert active == pytest.approx(used * 1e9, rel=0.02)
  if rest is not None:
    outside = total - outside_embeddings(config)
    assert outside == pytest.approx(rest * 1e9, rel=0.002)
  assert config.num_sparse == config.num_layers


@pytest.mark.parametrize("size", PUBLISHED_QWEN2_5)
def test_qwen2_5_presets_have_the_published_number_of_parameters(size):
  # Within 1 %, because 0.358 is published as 0.36, and 14.77 as 14.7.
  config = config_lib.qwen2_5(size)
  config.validate()
  total = memory_report.num_params(config).total
  rest = total - outside_embeddings(config)
  wanted = [pytest.approx(x * 1e9, rel=0.01) for x in PUBLISHED_QWEN2_5[size]]
  assert [total, rest] == wanted


@pytest.mark.parametrize("size", PUBLISHED_LLAMA)
def test_llama_presets_have_the_published_number_of_parameters(size):
  config = config_lib.llama3(size)
  config.validate()
  total = memory_report.num_params(config).total
  assert total == pytest.approx(PUBLISHED_LLAMA[size] * 1e9, rel=0.005)


def test_presets_are_overridden_by_name():
  config = config_lib.qwen3("4b", max_length=262_144, rope_theta=5e6)
  plain = config_lib.qwen3("4b")
  assert (plain.max_length, plain.rope_theta) == (40_960, 1e6)
  assert config == dataclasses.replace(
    plain, max_length=262_144, rope_theta=5e6
  )


@pytest.mark.parametrize(
  ("preset", "size", "message"),
  [
    (
      config_lib.qwen3,
      "7b",
      "Qwen3 does not come in size '7b'; use 0.6b, 1.7b, 4b, 8b, 14b, 32b",
    ),
    (
      config_lib.qwen3_moe,
      "30B-A3B",
      "Qwen3-MoE does not come in size '30B-A3B'; use 30b-a3b, 235b-a22b, "
      "480b-a35b",
    ),
  ],
)
def test_an_unknown_size_is_answered_with_the_known_ones(preset, size, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    preset(size)


def test_a_scaling_can_be_set_from_the_command_line():
  config = overrides_lib.override(
    config_lib.tiny(),
    "rope_scaling",
    "models.rope.Yarn(factor=4,original_max_length=32,truncate=false)",
  )
  assert config.rope_scaling == rope.Yarn(
    factor=4.0, original_max_length=32, truncate=False
  )
  assert overrides_lib.from_json(overrides_lib.to_json(config)) == config


@pytest.mark.parametrize(
  ("num_experts", "dtype"),
  [(1, "int8"), (128, "int8"), (129, "int16"), (257, "int16")],
)
def test_recorded_experts_and_unknown_ones_fit_their_dtype(num_experts, dtype):
  config = config_lib.tiny_moe(num_experts=num_experts)
  assert config.expert_dtype == dtype
  bounds = np.iinfo(config.expert_dtype)
  assert bounds.min <= -1 < num_experts - 1 <= bounds.max


@pytest.mark.parametrize(
  ("named", "dtype"),
  [("auto", "bfloat16"), ("float32", "float32"), ("bfloat16", "bfloat16")],
)
def test_a_dtype_that_is_named_wins_over_that_of_the_devices(named, dtype):
  config = config_lib.tiny(
    compute=config_lib.Compute(dtype=named, layers="scan")
  )
  placed = config.with_auto_dtype("bfloat16")
  assert placed.compute.dtype == placed.dtype == dtype
  assert placed.compute.layers == "scan"
  leaves = jax.tree.leaves(policy_lib.of(placed).shapes)
  assert {str(leaf.dtype) for leaf in leaves} == {dtype}


def test_a_model_outside_of_a_run_is_in_float32():
  # Its values are to be compared, on whatever device.
  config = config_lib.tiny()
  assert config.compute.dtype == "auto"
  assert config.dtype == "float32"
