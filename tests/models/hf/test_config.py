import dataclasses
import json
import math
import pathlib
import re

import pytest

from models import config as config_lib
from models import rope
from models.hf import config as hf_config
from models.hf import tokenizer_files

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
# As published, by transformers 4.51: Qwen/Qwen3-0.6B and Qwen/Qwen3-30B-A3B.
DENSE = {
  "architectures": ["Qwen3ForCausalLM"],
  "attention_bias": False,
  "attention_dropout": 0.0,
  "bos_token_id": 151643,
  "eos_token_id": 151645,
  "head_dim": 128,
  "hidden_act": "silu",
  "hidden_size": 1024,
  "initializer_range": 0.02,
  "intermediate_size": 3072,
  "max_position_embeddings": 40960,
  "max_window_layers": 28,
  "model_type": "qwen3",
  "num_attention_heads": 16,
  "num_hidden_layers": 28,
  "num_key_value_heads": 8,
  "rms_norm_eps": 1e-06,
  "rope_scaling": None,
  "rope_theta": 1000000,
  "sliding_window": None,
  "tie_word_embeddings": True,
  "torch_dtype": "bfloat16",
  "transformers_version": "4.51.0",
  "use_cache": True,
  "use_sliding_window": False,
  "vocab_size": 151936,
}
SPARSE = DENSE | {
  "architectures": ["Qwen3MoeForCausalLM"],
  "decoder_sparse_step": 1,
  "hidden_size": 2048,
  "intermediate_size": 6144,
  "max_window_layers": 48,
  "mlp_only_layers": [],
  "model_type": "qwen3_moe",
  "moe_intermediate_size": 768,
  "norm_topk_prob": True,
  "num_attention_heads": 32,
  "num_experts": 128,
  "num_experts_per_tok": 8,
  "num_hidden_layers": 48,
  "num_key_value_heads": 4,
  "output_router_logits": False,
  "router_aux_loss_coef": 0.001,
  "tie_word_embeddings": False,
}
# meta-llama/Llama-3.1-8B, which says no width of heads.
LLAMA = {
  "architectures": ["LlamaForCausalLM"],
  "attention_bias": False,
  "attention_dropout": 0.0,
  "bos_token_id": 128000,
  "eos_token_id": 128001,
  "hidden_act": "silu",
  "hidden_size": 4096,
  "initializer_range": 0.02,
  "intermediate_size": 14336,
  "max_position_embeddings": 131072,
  "mlp_bias": False,
  "model_type": "llama",
  "num_attention_heads": 32,
  "num_hidden_layers": 32,
  "num_key_value_heads": 8,
  "pretraining_tp": 1,
  "rms_norm_eps": 1e-05,
  "rope_scaling": {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
  },
  "rope_theta": 500000.0,
  "tie_word_embeddings": False,
  "torch_dtype": "bfloat16",
  "transformers_version": "4.43.0.dev0",
  "use_cache": True,
  "vocab_size": 128256,
}
# Qwen/Qwen2.5-0.5B, mistralai/Mistral-Nemo-Base-2407 and what Qwen3-Coder has
# beside the fields of Qwen3-MoE.
BIASED = {
  "architectures": ["Qwen2ForCausalLM"],
  "attention_dropout": 0.0,
  "bos_token_id": 151643,
  "eos_token_id": 151643,
  "hidden_act": "silu",
  "hidden_size": 896,
  "initializer_range": 0.02,
  "intermediate_size": 4864,
  "max_position_embeddings": 32768,
  "max_window_layers": 24,
  "model_type": "qwen2",
  "num_attention_heads": 14,
  "num_hidden_layers": 24,
  "num_key_value_heads": 2,
  "rms_norm_eps": 1e-06,
  "rope_theta": 1000000.0,
  "sliding_window": 32768,
  "tie_word_embeddings": True,
  "torch_dtype": "bfloat16",
  "transformers_version": "4.40.1",
  "use_cache": True,
  "use_mrope": False,
  "use_sliding_window": False,
  "vocab_size": 151936,
}
NEMO = {
  "architectures": ["MistralForCausalLM"],
  "attention_dropout": 0.0,
  "bos_token_id": 1,
  "eos_token_id": 2,
  "head_dim": 128,
  "hidden_act": "silu",
  "hidden_size": 5120,
  "initializer_range": 0.02,
  "intermediate_size": 14336,
  "max_position_embeddings": 128000,
  "model_type": "mistral",
  "num_attention_heads": 32,
  "num_hidden_layers": 40,
  "num_key_value_heads": 8,
  "rms_norm_eps": 1e-05,
  "rope_theta": 1000000.0,
  "sliding_window": None,
  "tie_word_embeddings": False,
  "torch_dtype": "bfloat16",
  "transformers_version": "4.43.0.dev0",
  "use_cache": True,
  "vocab_size": 131072,
}
CODER = {
  "qkv_bias": False,
  "shared_expert_intermediate_size": 0,
  "use_qk_norm": True,
}
# google/gemma-3-1b-it.
GEMMA = {
  "architectures": ["Gemma3ForCausalLM"],
  "attention_bias": False,
  "attention_dropout": 0.0,
  "attn_logit_softcapping": None,
  "bos_token_id": 2,
  "cache_implementation": "hybrid",
  "eos_token_id": [1, 106],
  "final_logit_softcapping": None,
  "head_dim": 256,
  "hidden_activation": "gelu_pytorch_tanh",
  "hidden_size": 1152,
  "initializer_range": 0.02,
  "intermediate_size": 6912,
  "max_position_embeddings": 32768,
  "model_type": "gemma3_text",
  "num_attention_heads": 4,
  "num_hidden_layers": 26,
  "num_key_value_heads": 1,
  "pad_token_id": 0,
  "query_pre_attn_scalar": 256,
  "rms_norm_eps": 1e-06,
  "rope_local_base_freq": 10000,
  "rope_scaling": None,
  "rope_theta": 1000000,
  "sliding_window": 512,
  "sliding_window_pattern": 6,
  "torch_dtype": "bfloat16",
  "transformers_version": "4.50.0.dev0",
  "use_cache": True,
  "vocab_size": 262144,
}
# allenai/Olmo-3-7B-Instruct, and in it what allenai/OLMo-2-0425-1B has.
OLMO = {
  "architectures": ["Olmo3ForCausalLM"],
  "attention_bias": False,
  "attention_dropout": 0.0,
  "eos_token_id": 100257,
  "hidden_act": "silu",
  "hidden_size": 4096,
  "initializer_range": 0.02,
  "intermediate_size": 11008,
  "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 8,
  "max_position_embeddings": 65536,
  "model_type": "olmo3",
  "num_attention_heads": 32,
  "num_hidden_layers": 32,
  "num_key_value_heads": 32,
  "pad_token_id": 100277,
  "rms_norm_eps": 1e-06,
  "rope_scaling": {
    "attention_factor": 1.2079441541679836,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "yarn",
  },
  "rope_theta": 500000,
  "sliding_window": 4096,
  "tie_word_embeddings": False,
  "transformers_version": "4.57.0",
  "use_cache": False,
  "vocab_size": 100278,
}
OLMO2 = OLMO | {
  "architectures": ["Olmo2ForCausalLM"],
  "hidden_size": 2048,
  "intermediate_size": 8192,
  "layer_types": None,
  "max_position_embeddings": 4096,
  "model_type": "olmo2",
  "num_attention_heads": 16,
  "num_hidden_layers": 16,
  "num_key_value_heads": 16,
  "rope_scaling": None,
  "sliding_window": None,
  "vocab_size": 100352,
}
# allenai/OLMoE-1B-7B-0924.
OLMOE = {
  "architectures": ["OlmoeForCausalLM"],
  "attention_bias": False,
  "attention_dropout": 0.0,
  "clip_qkv": None,
  "eos_token_id": 50279,
  "hidden_act": "silu",
  "hidden_size": 2048,
  "initializer_range": 0.02,
  "intermediate_size": 1024,
  "max_position_embeddings": 4096,
  "model_type": "olmoe",
  "norm_topk_prob": False,
  "num_attention_heads": 16,
  "num_experts": 64,
  "num_experts_per_tok": 8,
  "num_hidden_layers": 16,
  "num_key_value_heads": 16,
  "output_router_logits": False,
  "pad_token_id": 1,
  "rms_norm_eps": 1e-05,
  "rope_scaling": None,
  "rope_theta": 10000.0,
  "router_aux_loss_coef": 0.01,
  "tie_word_embeddings": False,
  "torch_dtype": "bfloat16",
  "transformers_version": "4.43.0.dev0",
  "use_cache": True,
  "vocab_size": 50304,
}
YARN = {
  "rope_type": "yarn",
  "factor": 4.0,
  "original_max_position_embeddings": 32768,
}
FLOAT32 = config_lib.Compute(dtype="float32")


def read(path, data):
  (path / "config.json").write_text(json.dumps(data))
  return hf_config.load(path)


def test_published_files_are_the_presets(tmp_path):
  compute = config_lib.Compute(dtype="bfloat16")
  assert read(tmp_path, DENSE) == config_lib.qwen3("0.6b", compute=compute)
  assert read(tmp_path, SPARSE) == config_lib.qwen3_moe(
    "30b-a3b", compute=compute
  )
  assert read(tmp_path, LLAMA) == config_lib.llama3("3.1-8b", compute=compute)
  assert read(tmp_path, GEMMA) == config_lib.gemma3("1b", compute=compute)
  assert read(tmp_path, OLMOE) == config_lib.olmoe("1b-7b", compute=compute)
  in_float32 = config_lib.Compute(dtype="float32")
  assert read(tmp_path, OLMO) == config_lib.olmo3("7b", compute=in_float32)
  assert read(tmp_path, OLMO2) == config_lib.olmo2("1b", compute=in_float32)


def test_other_families_are_read(tmp_path):
  biased = read(tmp_path, BIASED)
  assert (biased.head_dim, biased.qk_norm, biased.qkv_bias) == (64, False, True)
  assert read(tmp_path, SPARSE | CODER) == read(tmp_path, SPARSE)
  # Without a window a Mistral is a Llama.
  nemo = read(tmp_path, NEMO)
  assert (nemo.head_dim, nemo.qk_norm, nemo.qkv_bias) == (128, False, False)
  llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
  assert nemo == read(tmp_path, NEMO | llama)
  window = {"sliding_window": 4096}
  for data in (
    NEMO | window,
    # Its default in transformers.
    {k: v for k, v in NEMO.items() if k != "sliding_window"},
  ):
    assert read(tmp_path, data) == dataclasses.replace(
      nemo, window=config_lib.Window(size=4096)
    )


def test_windows_are_read_by_the_type_of_each_layer(tmp_path):
  config, full = read(tmp_path, GEMMA), "full_attention"
  assert config.window is not None
  types = hf_config.to_hf(config)["layer_types"]
  assert [i for i, kind in enumerate(types) if kind == full] == [5, 11, 17, 23]
  bare = {k: v for k, v in GEMMA.items() if k != "sliding_window_pattern"}
  assert read(tmp_path, bare) == config
  assert read(tmp_path, bare | {"layer_types": types}) == config
  whole = dataclasses.replace(config, window=None)
  assert read(tmp_path, bare | {"layer_types": [full] * 26}) == whole
  every = [*types[:5], *["sliding_attention"] * 21]
  found = read(tmp_path, bare | {"layer_types": every})
  assert found.window == dataclasses.replace(config.window, full_every=0)
  # As transformers 5 writes it.
  nested = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
  }
  new = {k: v for k, v in bare.items() if not k.startswith("rope_")}
  found = read(tmp_path, new | {"rope_parameters": nested})
  window = dataclasses.replace(config.window, rope_theta=500.0)
  assert found == dataclasses.replace(
    config, window=window, rope_scaling=rope.Linear(factor=8.0)
  )


def test_an_olmo_is_read_as_either_transformers_wrote_it(tmp_path):
  config = read(tmp_path, OLMO)
  bare = {k: v for k, v in OLMO.items() if not k.startswith("rope_")}
  theta = {"rope_theta": 500000.0}
  nested = {
    "sliding_attention": {"rope_type": "default", **theta},
    "full_attention": OLMO["rope_scaling"] | theta,
  }
  assert read(tmp_path, bare | {"rope_parameters": nested}) == config
  assert read(tmp_path, OLMO | {"layer_types": None}) == config
  with pytest.raises(ValueError, match=r"rope_theta=1000\.0 with architecture"):
    read(tmp_path, OLMO | {"rope_theta": 1000})


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (
      {"attn_logit_softcapping": 50.0},
      "attn_logit_softcapping=50.0 is not supported; use a checkpoint with nul",
    ),
    ({"hidden_activation": "gelu"}, 'hidden_activation="gelu" is not'),
    ({"use_bidirectional_attention": True}, "use_bidirectional_attention=true"),
    (
      {"layer_types": ["full_attention", *["sliding_attention"] * 25]},
      "full_attention in each of 26 layers, or last in each group",
    ),
    ({"sliding_window": 0}, "model.window.size=0 is below 1"),
    ({"sliding_window_pattern": -1}, "window.full_every=-1 is below 0"),
    ({"rope_local_base_freq": 1}, "window.rope_theta=1.0 is not above 1"),
    ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0 is for architec"),
    (
      {"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}},
      'of sliding_attention as {"rope_type": "linear"} are not supported',
    ),
    ({"rope_parameters": {"sliding_attention": 3}}, "must be of type dict"),
  ],
)
def test_another_gemma_is_refused(changes, message, tmp_path):
  with pytest.raises(ValueError, match=re.escape(message)):
    read(tmp_path, GEMMA | {"rope_scaling": None} | changes)


@pytest.mark.parametrize(
  ("data", "message"),
  [
    (BIASED | {"use_mrope": True}, "use_mrope=true is not supported"),
    (BIASED | {"use_sliding_window": True}, "use_sliding_window=true is not"),
    (SPARSE | CODER | {"qkv_bias": True}, "qkv_bias=true is not supported"),
    (
      SPARSE | CODER | {"shared_expert_intermediate_size": 512},
      "shared_expert_intermediate_size=512 is not supported",
    ),
  ],
)
def test_parts_of_other_families_are_refused(data, message, tmp_path):
  with pytest.raises(ValueError, match=re.escape(message)):
    read(tmp_path, data)


def test_fields_that_transformers_does_not_compute_with_are_passed_over(
  tmp_path,
):
  # Of SmolLM2, and of what transformers 4.48 saved.
  fields = {
    "is_llama_config": True,
    "rope_interleaved": False,
    "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}},
    "_attn_implementation_autoset": True,
  }
  assert read(tmp_path, LLAMA | fields) == read(tmp_path, LLAMA)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"mlp_bias": True}, "mlp_bias=true is not supported; use a checkpoint"),
    ({"pretraining_tp": 2}, "pretraining_tp=2 is not supported; use a"),
    ({"num_attention_heads": 0}, "head_dim is missing"),
    ({"use_sliding_window": True}, "use_sliding_window=true is not supported"),
  ],
)
def test_another_llama_is_refused(changes, message, tmp_path):
  with pytest.raises(ValueError, match=re.escape(message)):
    read(tmp_path, LLAMA | changes)


def test_files_of_transformers_5_are_read():
  # decoder_sparse_step=2 leaves layers 1, 3, 5, and mlp_only_layers the last 2.
  config = hf_config.load(GOLDEN / "qwen3_moe")
  assert config.dense_layers == (0, 1, 2, 4)
  assert (config.num_experts, config.num_layers) == (6, 6)
  assert config.compute == FLOAT32
  config = hf_config.load(str(GOLDEN / "qwen3_tied_yarn"))
  assert config.rope_theta == 1000
  assert config.rope_scaling == rope.Yarn(
    factor=4.0, original_max_length=64, beta_fast=4.0
  )


@pytest.mark.parametrize(
  "config",
  [
    *map(config_lib.qwen3, ("0.6b", "1.7b", "4b", "8b", "14b", "32b")),
    *map(config_lib.qwen3_moe, ("30b-a3b", "235b-a22b", "480b-a35b")),
    *map(config_lib.llama3, ("3.2-1b", "3.2-3b", "3.1-8b", "3.1-70b")),
    config_lib.tiny(rope_scaling=rope.Linear(factor=2.0), compute=FLOAT32),
    config_lib.tiny(qk_norm=False, qkv_bias=True, compute=FLOAT32),
    *map(config_lib.gemma3, ("270m", "1b", "4b", "12b", "27b")),
    *map(config_lib.olmo2, ("1b", "7b", "13b", "32b")),
    *map(config_lib.olmo3, ("7b", "32b")),
    config_lib.olmoe("1b-7b"),
    config_lib.tiny(architecture="olmo", compute=FLOAT32),
    config_lib.tiny(architecture="gemma", compute=FLOAT32),
    config_lib.tiny(
      qk_norm=False, window=config_lib.Window(size=9), compute=FLOAT32
    ),
    config_lib.tiny(
      architecture="gemma",
      query_pre_attn_scalar=7,
      window=config_lib.Window(size=9, full_every=6, rope_theta=50.0),
      compute=FLOAT32,
    ),
    config_lib.tiny(
      compute=FLOAT32,
      rope_scaling=rope.Yarn(
        factor=2.0, original_max_length=32, truncate=False, mscale=0.7
      ),
    ),
    config_lib.tiny_moe(
      norm_topk_prob=False,
      dense_layers=(0, 2),
      rope_scaling=rope.Llama3(factor=8.0, original_max_length=32),
      compute=config_lib.Compute(dtype="bfloat16"),
    ),
  ],
)
def test_what_is_written_is_read_back(config, tmp_path):
  assert read(tmp_path, hf_config.to_hf(config)) == config


def test_a_shorter_context_keeps_the_factor_of_yarn(tmp_path):
  # transformers 4 computes it as 64 / 16.
  scaling = rope.Yarn(factor=4.0, original_max_length=16)
  config = config_lib.tiny(max_length=32, rope_scaling=scaling, compute=FLOAT32)
  back = read(tmp_path, hf_config.to_hf(config))
  assert back == dataclasses.replace(config, max_length=64)


def test_any_computation_can_be_asked_for(tmp_path):
  # Nothing computes in float16: the devices decide.
  auto = config_lib.Compute(dtype="auto")
  found = read(tmp_path, DENSE | {"torch_dtype": "float16"})
  assert found == config_lib.qwen3("0.6b", compute=auto)
  compute = config_lib.Compute(dtype="float32", remat="layer")
  config = hf_config.load(tmp_path, compute)
  assert config == config_lib.qwen3("0.6b", compute=compute)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (
      {"architectures": ["Phi3ForCausalLM"]},
      "architectures=['Phi3ForCausalLM'] is not supported; use a checkpoint "
      "of Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM, "
      "LlamaForCausalLM, MistralForCausalLM, Gemma3ForCausalLM",
    ),
    ({"architectures": None}, "architectures=None is not supported"),
    ({"architectures": []}, "architectures=[] is not supported"),
    (
      {"architectures": None, "class": "rl.experiment.Experiment"},
      "these are the settings of a run; export its weights with",
    ),
    (
      {"model_type": "qwen3_moe"},
      "model_type='qwen3_moe' contradicts architectures=['Qwen3ForCausalLM']; "
      "use 'qwen3'",
    ),
    (
      {"hidden_act": "gelu"},
      'hidden_act="gelu" is not supported; use a checkpoint with "silu"',
    ),
    (
      {"attention_bias": True},
      "attention_bias=true is not supported; use a checkpoint with false",
    ),
    ({"attention_dropout": 0.1}, "attention_dropout=0.1 is not supported"),
    ({"use_sliding_window": True}, "use_sliding_window=true is not supported"),
    (
      {"layer_types": ["full_attention"] * 27 + ["sliding_attention"]},
      "use a checkpoint with full_attention in each of 28 layers",
    ),
    (
      {"quantization_config": {"bits": 4}},
      'quantization_config={"bits": 4}: quantized weights are not supported; '
      "use the checkpoint in bfloat16",
    ),
    (
      {"logit_scale": 2},
      "logit_scale=2 is unknown and might change the result; if it does not, "
      "take it out of the file",
    ),
    # Experts are of the other architecture, and transformers ignores them.
    ({"num_experts": 8}, "num_experts=8 is unknown and might change"),
    ({"head_dim": None}, "head_dim is missing; every published file has it"),
    (
      {"hidden_size": "1024"},
      'hidden_size="1024" must be of type int; correct it',
    ),
    ({"num_hidden_layers": True}, "num_hidden_layers=true must be of type int"),
    ({"vocab_size": 0}, "model.vocab_size=0 must be at least 1"),
    ({"rope_theta": 10**400}, "rope_theta is a number of 401 digits, which no"),
    ({"num_hidden_layers": -(10**400)}, "model.num_layers=-1000"),
    ({"num_key_value_heads": 3}, "model.num_heads=16 does not split over"),
    ({"dtype": "float32"}, "dtype=float32 and torch_dtype=bfloat16 contradict"),
    ({"rms_norm_eps": math.nan}, "rms_norm_eps=NaN holds no finite number;"),
    (
      {"rope_scaling": YARN | {"factor": math.inf}},
      '"factor": Infinity, "original_max_position_embeddings": 32768} holds no',
    ),
    ({"torch_dtype": "int8"}, "dtype='int8' is not computed in; pass"),
  ],
)
def test_what_would_change_the_result_is_refused(changes, message, tmp_path):
  with pytest.raises(ValueError, match=re.escape(message)) as error:
    read(tmp_path, DENSE | changes)
  assert str(tmp_path / "config.json") in str(error.value)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"num_experts": None}, "num_experts is missing"),
    (
      {"num_local_experts": 64},
      "num_experts=128 and num_local_experts=64 contradict each other; keep",
    ),
    ({"decoder_sparse_step": 0}, "decoder_sparse_step=0 is below 1; use 1"),
    ({"mlp_only_layers": 3}, "mlp_only_layers=3 must be of type list"),
    ({"mlp_only_layers": ["3"]}, 'mlp_only_layers="3" must be of type int'),
    ({"mlp_only_layers": [48]}, "names layer 48, but they are 0 to 47"),
    ({"num_experts": 10**9}, "num_experts=1000000000 is above 10000, so the"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 is above"),
    ({"num_experts_per_tok": 129}, "model.experts_per_token=129 is above"),
  ],
)
def test_experts_that_cannot_be_are_refused(changes, message, tmp_path):
  with pytest.raises(ValueError, match=re.escape(message)):
    read(tmp_path, SPARSE | changes)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (
      {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
      "rope_type='dynamic' is not supported; linear, yarn, llama3 and default",
    ),
    ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type='longrope' is"),
    ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing for"),
    (
      {"rope_scaling": YARN | {"mrope_section": [1, 2]}},
      "mrope_section=[1, 2] is unknown for rope_type='yarn'",
    ),
    ({"rope_scaling": {"factor": 2.0}}, "factor=2.0 is unknown for rope_type"),
    (
      {"rope_scaling": YARN | {"factor": "4"}},
      'factor="4" must be of type float',
    ),
    ({"rope_scaling": YARN | {"factor": 0.5}}, "rope_scaling.factor=0.5 is"),
    (
      {"rope_scaling": YARN | {"factor": 10**400}},
      "factor is a number of 401 digits, which no float holds; correct it",
    ),
    ({"rope_scaling": YARN | {"type": "linear"}}, "rope_type=yarn and type="),
    ({"rope_scaling": "yarn"}, 'rope_scaling="yarn" must be of type dict'),
    (
      {"rope_parameters": {"rope_theta": 1e4}},
      "rope_theta=10000.0 and rope_theta outside of it=1000000 contradict",
    ),
    (
      {"rope_parameters": {"rope_type": "default"}, "rope_scaling": YARN},
      "contradict each other; keep one",
    ),
    (
      {"rope_scaling": {"partial_rotary_factor": 0.5}},
      "partial_rotary_factor is supported only as 1",
    ),
  ],
)
def test_positions_that_would_be_others_are_refused(changes, message, tmp_path):
  with pytest.raises(ValueError, match=re.escape(message)):
    read(tmp_path, DENSE | changes)


def test_what_the_file_leaves_out_is_as_in_transformers(tmp_path):
  # YaRN stretches max_position_embeddings, norms have 1e-6, and theta is 10^4.
  data = {
    name: value
    for name, value in SPARSE.items()
    if name
    not in ("rms_norm_eps", "rope_theta", "norm_topk_prob", "torch_dtype")
  }
  scaling = {"type": "yarn", "factor": 2, "attention_factor": None}
  config = read(tmp_path, data | {"rope_scaling": scaling})
  assert config == config_lib.qwen3_moe(
    "30b-a3b",
    rope_theta=1e4,
    norm_topk_prob=False,
    rope_scaling=rope.Yarn(factor=2.0, original_max_length=40_960),
    compute=FLOAT32,
  )


@pytest.mark.parametrize(
  ("text", "words"),
  [
    ("{", "valid JSON.*; copy it again"),
    ("[]", "an object.*; copy it again"),
    ("\xff", "not UTF-8.*; copy it again"),
    ("[" * 100_000, "nested deeper than 64 levels"),
  ],
  ids=["cut", "list", "bytes", "deep"],
)
def test_a_file_that_holds_no_object_is_refused(text, words, tmp_path):
  (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
  with pytest.raises(ValueError, match=words):
    hf_config.load(tmp_path)


def test_a_directory_without_a_checkpoint_is_refused(tmp_path):
  with pytest.raises(ValueError, match="cannot be read: No such file"):
    hf_config.load(tmp_path / "absent")


def test_adapters_and_computation_are_not_written(tmp_path):
  config = config_lib.tiny(compute=config_lib.Compute(remat="layer"))
  back = read(tmp_path, hf_config.to_hf(config))
  assert back == dataclasses.replace(config, compute=FLOAT32)


def test_the_tiny_model_has_room_for_its_tokenizer():
  config = hf_config.load(hf_config.TINY)
  assert config.num_experts > 0
  assert config.vocab_size >= tokenizer_files.num_ids(hf_config.TINY)
