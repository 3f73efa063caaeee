"""Makes the golden files of tests/models/golden with Hugging Face transformers.

They are committed. This makes them again, bit for bit, in an environment of
its own, because the project does not depend on torch:

  python3.11 -m venv golden
  golden/bin/pip install torch==2.13.0 transformers==5.23.0 safetensors==0.8.0
  golden/bin/python scripts/make_golden.py

The directory of a model holds what `save_pretrained` writes, and expected.npz:

  lengths           of the sequences, each computed on its own
  tokens, targets   of all sequences, one after the other; a target of -1 does
                    not count
  logits            of every token
  gradient/NAME     of the mean of -ln p(target), by the parameter's name

rope.json holds changes to the config.json of qwen3, rope.npz the frequencies
and the attention factor that follow from each.

Weights are large and random, norms are not 1: no part of a model is idle. All
is computed in float64, but for what transformers turns to float32 in any case:
norms, softmax, rotary angles, and the root that Gemma's embeddings grow by.
"""

# PyTorch and transformers are in an environment of their own.
# pyright: reportMissingImports=false

import json
import pathlib
import tempfile
import zlib

import numpy as np
import torch
import transformers
from safetensors import numpy as safetensors
from transformers.models.qwen3 import modeling_qwen3

ROOT = pathlib.Path(__file__).parents[1] / "tests" / "models" / "golden"
LENGTHS = (9, 1, 14, 5, 7)

SIZES = {
  "vocab_size": 32,
  "hidden_size": 16,
  "intermediate_size": 24,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 8,
  "max_position_embeddings": 64,
}
EXPERTS = {
  "moe_intermediate_size": 8,
  "num_experts": 6,
  "num_experts_per_tok": 2,
}
# torch has no gradient of the embedding of padding.
UNPADDED = {"pad_token_id": None, "eos_token_id": None}
# The first with which the name of a model begins.
FAMILIES = {
  "llama": ("LlamaConfig", "LlamaForCausalLM"),
  "mistral": ("MistralConfig", "MistralForCausalLM"),
  "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
  "olmo2": ("Olmo2Config", "Olmo2ForCausalLM"),
  "olmo3": ("Olmo3Config", "Olmo3ForCausalLM"),
  "olmoe": ("OlmoeConfig", "OlmoeForCausalLM"),
  "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
  "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
  "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
}
MODELS = {
  "qwen2": {"rope_theta": 1e4},
  "qwen3": {"rope_theta": 1e4},
  "qwen3_tied_yarn": {
    "tie_word_embeddings": True,
    "head_dim": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "rope_parameters": {
      "rope_type": "yarn",
      "rope_theta": 1e3,
      "factor": 4.0,
      "original_max_position_embeddings": 64,
      "beta_fast": 4.0,
    },
  },
  # Of layers 0 to 5 the step leaves 1, 3 and 5 sparse, the list 3 and 5.
  "qwen3_moe": EXPERTS
  | {
    "num_hidden_layers": 6,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [1],
    "norm_topk_prob": True,
  },
  "qwen3_moe_unnormed": EXPERTS
  | {"num_experts_per_tok": 3, "norm_topk_prob": False},
  # Of the four pairs one is fast, one in between and two are slow.
  "llama3": {
    "rope_parameters": {
      "rope_type": "llama3",
      "rope_theta": 1e2,
      "factor": 8.0,
      "low_freq_factor": 1.0,
      "high_freq_factor": 4.0,
      "original_max_position_embeddings": 32,
    },
  },
  "llama3_tied": {"rope_theta": 1e4, "tie_word_embeddings": True},
  "mistral": {"rope_theta": 1e4, "sliding_window": 5},
  "olmo2": UNPADDED | {"rope_theta": 1e4},
  "olmoe": UNPADDED
  | {
    "intermediate_size": 8,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "head_dim": 4,  # Here it is a quotient of the other sizes.
    "rope_theta": 1e4,
  },
  # The last of the three layers sees more than four tokens, and alone scales.
  "olmo3": UNPADDED
  | {
    "num_hidden_layers": 3,
    "max_position_embeddings": 256,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 4,
    "rope_parameters": {
      "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
      "full_attention": {
        "rope_type": "yarn",
        "rope_theta": 5e5,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 4.0,
        "attention_factor": 1.25,
      },
    },
  },
  # The last of the three layers sees more than four tokens.
  "gemma3": {
    "num_hidden_layers": 3,
    "sliding_window": 4,
    "sliding_window_pattern": 3,
    "query_pre_attn_scalar": 12,
    "pad_token_id": None,  # torch has no gradient of its embedding.
    "rope_parameters": {
      "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
      "full_attention": {
        "rope_type": "linear",
        "rope_theta": 1e3,
        "factor": 2.0,
      },
    },
  },
}

LONG = {"head_dim": 128, "max_position_embeddings": 40_960}
QWEN = {
  "rope_type": "yarn",
  "rope_theta": 1e6,
  "factor": 4.0,
  "original_max_position_embeddings": 32_768,
}
LLAMA = {
  "rope_type": "llama3",
  "factor": 8.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 8192,
}
ROPES = {
  "default": LONG | {"rope_theta": 1_000_000},
  "default_of_80": LONG | {"head_dim": 80, "rope_theta": 5e6},
  "linear": {
    "rope_theta": 1e4,
    "rope_scaling": {"type": "linear", "factor": 2.5},
  },
  "yarn": LONG | {"rope_parameters": QWEN},
  "yarn_untruncated": LONG | {"rope_parameters": QWEN | {"truncate": False}},
  "yarn_attention_factor": LONG
  | {"rope_parameters": QWEN | {"attention_factor": 1.25}},
  "yarn_mscale": LONG
  | {
    "rope_parameters": QWEN
    | {"mscale": 0.8, "mscale_all_dim": 0.5, "beta_fast": 16, "beta_slow": 2}
  },
  "yarn_mscale_alone": LONG | {"rope_parameters": QWEN | {"mscale": 0.5}},
  "yarn_of_no_original": LONG
  | {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 2.0}},
  # Trained on so few tokens that no pair is in between.
  "yarn_abrupt": {
    "rope_theta": 1e4,
    "rope_scaling": {
      "rope_type": "yarn",
      "factor": 16.0,
      "original_max_position_embeddings": 4,
    },
  },
  "llama3": LONG | {"rope_theta": 5e5, "rope_scaling": LLAMA},
}


def main() -> None:
  """Writes every file below ROOT."""
  torch.use_deterministic_algorithms(True)
  for name, sizes in MODELS.items():
    write_model(ROOT / name, sizes)
  write_ropes()


def write_model(directory: pathlib.Path, sizes: dict) -> None:
  """Writes a model and what it computes."""
  family = next(name for name in FAMILIES if directory.name.startswith(name))
  config_name, model_name = FAMILIES[family]
  config = getattr(transformers, config_name)(**SIZES | sizes)
  cls = getattr(transformers, model_name)
  if "num_experts" in sizes:
    config._experts_implementation = "eager"
  config._attn_implementation = "eager"
  model = cls(config).eval()
  for name, parameter in model.named_parameters():
    rng = np.random.default_rng(zlib.crc32(f"{directory.name}/{name}".encode()))
    one = parameter.ndim == 1 and not directory.name.startswith("gemma")
    values = rng.normal(float(one), 0.3, parameter.shape)
    parameter.data = torch.from_numpy(values.astype(np.float32))
  model.save_pretrained(directory)
  (directory / "generation_config.json").unlink()
  expected = run(model.double())
  np.savez(directory / "expected.npz", allow_pickle=False, **expected)


def run(model) -> dict[str, np.ndarray]:
  """Returns inputs, logits and gradients, the latter left in the model."""
  rng = np.random.default_rng(0)
  vocab_size = model.config.vocab_size
  tokens = rng.integers(vocab_size, size=sum(LENGTHS))
  targets = rng.integers(vocab_size, size=sum(LENGTHS))
  targets[rng.permutation(sum(LENGTHS))[:8]] = -1
  sparse = hasattr(model.config, "num_experts")
  logits = []
  for part in torch.from_numpy(tokens).split(LENGTHS):
    options = {"output_router_logits": True} if sparse else {}
    output = model(part[None], use_cache=False, **options)
    logits.append(output.logits[0])
    if sparse:
      check_margin(output.router_logits, model.config.num_experts_per_tok)
  logits = torch.cat(logits)
  loss = torch.nn.functional.cross_entropy(
    logits, torch.from_numpy(targets), ignore_index=-1
  )
  loss.backward()
  return {
    "lengths": np.asarray(LENGTHS, np.int32),
    "tokens": tokens.astype(np.int32),
    "targets": targets.astype(np.int32),
    "logits": logits.detach().numpy().astype(np.float32),
    **{f"gradient/{k}": v for k, v in gradients(model).items()},
  }


def check_margin(router_logits: tuple[torch.Tensor, ...], k: int) -> None:
  """Raises ValueError where rounding could change the choice of experts."""
  for logits in router_logits:
    best = torch.softmax(logits, -1).sort(-1, descending=True).values
    margin = (best[:, k - 1] - best[:, k]).min().item()
    if margin < 1e-4:
      raise ValueError(f"margin {margin} is below 1e-4; draw other weights")


def gradients(model) -> dict[str, np.ndarray]:
  """Returns gradients under the names of the parameters in a checkpoint."""
  # transformers keeps experts together and takes them apart when it saves.
  for parameter in model.parameters():
    parameter.data = parameter.grad
  with tempfile.TemporaryDirectory() as directory:
    model.float().save_pretrained(directory)
    return safetensors.load_file(f"{directory}/model.safetensors")


def write_ropes() -> None:
  """Writes frequencies and attention factor for each of ROPES."""
  expected = {}
  for name, changes in ROPES.items():
    copy = json.loads(json.dumps(changes))
    config = transformers.Qwen3Config(**SIZES | copy)
    rope = modeling_qwen3.Qwen3RotaryEmbedding(config)
    expected[f"{name}/frequencies"] = rope.inv_freq.numpy()
    expected[f"{name}/factor"] = np.float64(rope.attention_scaling)
  (ROOT / "rope.json").write_text(json.dumps(ROPES, indent=1) + "\n")
  np.savez(ROOT / "rope.npz", **expected)


if __name__ == "__main__":
  main()
