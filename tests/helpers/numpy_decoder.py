"""Decoders of eight families in float64 NumPy, token by token and head by head.

It knows a checkpoint by the names of its tensors and its config.json, and
shares no code with what it checks; `checkpoint` gives our parameters the same
names.

Sources: Qwen3, arXiv 2505.09388, section 2; Llama 3, 2407.21783, section 3.2;
its scaling of positions: the code of Llama 3.1; RMSNorm, 1910.07467, eq. 4;
rotary positions, 2104.09864, eq. 15; YaRN, 2309.00071; SwiGLU, 2002.05202,
eq. 5; windows, norms and embeddings of Gemma 3: 2503.19786, section 2, and its
code; norms of OLMo 2: 2501.00656, section 3.2, and of OLMoE: 2409.02060,
section 4.2.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

Tensors = Mapping[str, np.ndarray]


def forward(
  tensors: Tensors, config: Mapping[str, Any], tokens: np.ndarray
) -> np.ndarray:
  """Returns the logits [token, word] of one sequence."""
  tensors = {k: np.asarray(v, np.float64) for k, v in tensors.items()}
  embed = tensors["model.embed_tokens.weight"]
  eps = config["rms_norm_eps"]
  gemma = config["model_type"] == "gemma3_text"
  olmo = config["model_type"] in ("olmo2", "olmo3")
  if gemma:  # Its norms count from 1.
    tensors = {k: v + (v.ndim == 1) for k, v in tensors.items()}
  x = embed[tokens] * (np.sqrt(config["hidden_size"]) if gemma else 1)
  for index in range(config["num_hidden_layers"]):
    start = f"model.layers.{index}."
    layer = {
      name.removeprefix(start).removesuffix(".weight"): tensor
      for name, tensor in tensors.items()
      if name.startswith(start)
    }
    normed = x if olmo else norm(x, layer["input_layernorm"], eps)
    added = attention(layer, config, normed, index)
    before = "post_attention_layernorm"
    if gemma or olmo:
      added = norm(added, layer["post_attention_layernorm"], eps)
      before = "pre_feedforward_layernorm"
    x = x + added
    normed = x if olmo else norm(x, layer[before], eps)
    added = np.stack([mixed(layer, config, token) for token in normed])
    if gemma or olmo:
      added = norm(added, layer["post_feedforward_layernorm"], eps)
    x = x + added
  tied = config["tie_word_embeddings"]
  head = embed if tied else tensors["lm_head.weight"]
  return norm(x, tensors["model.norm.weight"], eps) @ head.T


def norm(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
  return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale


def attention(
  layer: Tensors, config: Mapping[str, Any], x: np.ndarray, index: int
):
  """Every token looks at itself and at what came before, maybe not far."""
  slides = config["model_type"] == "mistral"
  if config["model_type"] in ("gemma3_text", "olmo3"):
    slides = config["layer_types"][index] == "sliding_attention"
  window = config.get("sliding_window") if slides else None
  width, eps = config["head_dim"], config["rms_norm_eps"]
  group = config["num_attention_heads"] // config["num_key_value_heads"]
  frequency, growth = rotary(config, slides)
  scale = config.get("query_pre_attn_scalar", width)

  def heads(name, token):
    out = layer[f"self_attn.{name}_proj"] @ token
    out = out + layer.get(f"self_attn.{name}_proj.bias", 0.0)
    return out.reshape(-1, width)

  def placed(name, token, position):
    """Positions turn x[i] + i x[i + half] in the complex plane."""
    h = heads(name, token)
    if f"self_attn.{name}_norm" in layer:
      # An OLMo's and an OLMoE's is as wide as all heads.
      of_heads = layer[f"self_attn.{name}_norm"]
      h = norm(h.reshape(-1, of_heads.size), of_heads, eps)
      h = h.reshape(-1, width)
    z = h[:, : width // 2] + 1j * h[:, width // 2 :]
    z = z * np.exp(1j * position * frequency) * growth
    return np.concatenate([z.real, z.imag], -1)

  outputs, keys, values = [], [], []
  for position, token in enumerate(x):
    keys.append(placed("k", token, position))
    values.append(heads("v", token))
    output = []
    for index, query in enumerate(placed("q", token, position)):
      past_k = np.stack(keys[-(window or 0) :])[:, index // group]
      past_v = np.stack(values[-(window or 0) :])[:, index // group]
      output.append(softmax(past_k @ query / np.sqrt(scale)) @ past_v)
    outputs.append(layer["self_attn.o_proj"] @ np.concatenate(output))
  return np.stack(outputs)


def rotary(config: Mapping[str, Any], slides: bool) -> tuple[np.ndarray, float]:
  """Returns radians a position of each pair, and the growth of its length."""
  rope = config.get("rope_parameters") or {
    "rope_theta": config["rope_theta"],
    **(config["rope_scaling"] or {}),
  }
  if "full_attention" in rope:
    rope = rope["sliding_attention" if slides else "full_attention"]
  elif slides and "rope_local_base_freq" in config:
    rope = {"rope_theta": config["rope_local_base_freq"]}
  width, theta = config["head_dim"], rope["rope_theta"]
  pairs = np.arange(width // 2)
  frequency = theta ** (-2 * pairs / width)
  if rope.get("rope_type", "default") == "default":
    return frequency, 1.0
  if rope["rope_type"] == "linear":
    return frequency / rope["factor"], 1.0
  if rope["rope_type"] == "llama3":
    turns = rope["original_max_position_embeddings"] * frequency / 2 / np.pi
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return ((1 - smooth) / rope["factor"] + smooth) * frequency, 1.0
  assert rope["rope_type"] == "yarn"

  def pair(turns):
    """Solves original_length * frequency[pair] = turns * 2 pi."""
    radians = turns * 2 * np.pi / rope["original_max_position_embeddings"]
    return -np.log(radians) / np.log(theta) * width / 2

  low = max(np.floor(pair(rope["beta_fast"])), 0)
  high = np.ceil(pair(rope.get("beta_slow", 1)))
  slow = np.clip((pairs - low) / (high - low), 0, 1)
  scaled = (1 - slow) * frequency + slow * frequency / rope["factor"]
  growth = 0.1 * np.log(rope["factor"]) + 1
  return scaled, rope.get("attention_factor") or growth


def mixed(layer: Tensors, config: Mapping[str, Any], x: np.ndarray):
  """One token through the MLP, or through its k best experts."""
  if "mlp.gate_proj" in layer:
    return swiglu(layer, "mlp", x)
  probs = softmax(layer["mlp.gate"] @ x)
  best = np.argsort(-probs)[: config["num_experts_per_tok"]]
  total = probs[best].sum() if config["norm_topk_prob"] else 1
  return sum(
    probs[e] / total * swiglu(layer, f"mlp.experts.{e}", x) for e in best
  )


def swiglu(layer: Tensors, name: str, x: np.ndarray) -> np.ndarray:
  gate, up = layer[f"{name}.gate_proj"] @ x, layer[f"{name}.up_proj"] @ x
  activated = gate / (1 + np.exp(-gate))
  if "pre_feedforward_layernorm" in layer:
    inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    activated = gate / 2 * (1 + np.tanh(inner))
  return layer[f"{name}.down_proj"] @ (activated * up)


def softmax(x: np.ndarray) -> np.ndarray:
  weights = np.exp(x - x.max())
  return weights / weights.sum()


def layer_norms(layer: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the norms around attention and MLP, which a Gemma all has."""
  names = {"attention_norm": "input_layernorm"}
  names["mlp_norm"] = "post_attention_layernorm"
  if "post_mlp_norm" in layer:
    names["mlp_norm"] = "pre_feedforward_layernorm"
    names["post_attention_norm"] = "post_attention_layernorm"
    names["post_mlp_norm"] = "post_feedforward_layernorm"
  return {names[name]: layer[name] for name in names if name in layer}


def checkpoint(params: Mapping[str, Any]) -> dict[str, np.ndarray]:
  """Returns our parameters, or their gradients, as a checkpoint names them."""
  named = {
    "model.embed_tokens": params["embed"],
    "model.norm": params["final_norm"],
  }
  if "head" in params:
    named["lm_head"] = params["head"].T
  for index, layer in params["layers"].items():
    ours, d_model = layer["attention"], len(params["final_norm"])
    own = {
      **layer_norms(layer),
      "self_attn.q_proj": ours["query"].reshape(d_model, -1).T,
      "self_attn.k_proj": ours["key"].reshape(d_model, -1).T,
      "self_attn.v_proj": ours["value"].reshape(d_model, -1).T,
      "self_attn.o_proj": ours["out"].reshape(-1, d_model).T,
    }
    for name in ("query", "key", "value") if "query_bias" in ours else ():
      own[f"self_attn.{name[0]}_proj.bias"] = ours[f"{name}_bias"].reshape(-1)
    for name in ("query", "key") if "query_norm" in ours else ():
      own[f"self_attn.{name[0]}_norm"] = ours[f"{name}_norm"]
    for name in ("gate", "up", "down"):
      if "mlp" in layer:
        own[f"mlp.{name}_proj"] = layer["mlp"][name].T
        continue
      own["mlp.gate"] = layer["moe"]["router"]["kernel"].T
      for e, matrix in enumerate(layer["moe"][name]):
        own[f"mlp.experts.{e}.{name}_proj"] = matrix.T
    named |= {f"model.layers.{index}.{k}": v for k, v in own.items()}
  return {
    name if name.endswith(".bias") else f"{name}.weight": np.asarray(v)
    for name, v in named.items()
  }
