"""Our tree of parameters -> the leaves of sglang-jax's Qwen3 and Qwen3-MoE.

  params -> no adapters, no int8 -> [in, out] matrices, heads of width 128

sglang-jax serves head widths of 128. A head of another width d dividing 128 is
widened in the weights, and computes the same. With r = 128 / d:

  place      pair (i, i + d/2) goes to (r i, r i + 64): the same rotary angle
  norm       a mean over 128 is r times less: projections grow by sqrt(r), and
             the norm's weights shrink by it
  scores     are divided by sqrt(128): the query's norm grows by sqrt(r) again
  values     d of 128, and the others are 0

Exact but for the rounding of sqrt(r), which is none for r = 4, 16 and 64.

Letters: D width, H heads, d head width, V vocabulary.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from models import config as config_lib
from models import definition, layer_stack, lora, quantize
from models.hf import config as hf_config

HEAD_DIM = 128
"""Width of the heads that sglang-jax serves."""


def check(config: config_lib.ModelConfig) -> None:
  """Raises ValueError for a model that sglang-jax would compute otherwise."""
  if HEAD_DIM % config.head_dim or config.head_dim % 2:
    out = f"serves even divisors of {HEAD_DIM}; use one, or engine=built_in"
    raise ValueError(f"model.head_dim={config.head_dim}: sglang-jax {out}")
  for name, wanted in (("qk_norm", True), ("architecture", "llama")):
    if (found := getattr(config, name)) != wanted:
      out = "sglang-jax is told of a Qwen3; use engine=built_in"
      raise ValueError(f"model.{name}={str(found).lower()}: {out}")
  if config.rope_scaling is not None:
    kind = type(config.rope_scaling).__name__
    out = "sglang-jax ignores it in Qwen3; use engine=built_in"
    raise ValueError(f"model.rope_scaling={kind}: {out}")


def check_split(config: config_lib.ModelConfig, num_devices: int) -> None:
  """Raises ValueError for a model that does not split over the devices.

  Heads, MLPs and words are split over all of them.
  """
  sizes = ["num_heads", "num_kv_heads", "vocab_size"]
  sizes += ["d_ff"] * (config.num_sparse < config.num_layers)
  sizes += ["d_expert"] * (config.num_sparse > 0)
  for name in sizes:
    if (size := getattr(config, name)) % num_devices:
      devices = f"{num_devices} devices of a decode mesh"
      out = f"over the {devices}; use fewer, or engine=built_in"
      raise ValueError(f"model.{name}={size} does not divide {out}")


def config_json(
  config: config_lib.ModelConfig, max_length: int
) -> dict[str, Any]:
  """Returns the config.json of the model as sglang-jax is to serve it.

  Args:
    max_length: positions that it has to know.
  """
  return hf_config.to_hf(config) | {
    "head_dim": HEAD_DIM,
    "max_position_embeddings": max_length,
  }


def name_of(path: str) -> str:
  """Returns the name under which `convert` makes the leaf at a key path.

  Releases and models differ in the root and in the name of the projection
  after attention.
  """
  parts = re.findall(r"\w+", path)
  parts = parts[parts[0] in ("model", "transformer") :]
  parts = parts[: -1 if parts[-1] == "value" else None]
  return ".".join("o_proj" if part == "c_proj" else part for part in parts)


def convert(
  params: definition.Params, config: config_lib.ModelConfig
) -> dict[str, Float[Array, "..."]]:
  """Returns the leaves of sglang-jax by name; call it inside of jit."""
  params = quantize.dequantize(params, config.dtype)
  params = layer_stack.unstack(lora.merge(params, config.lora), config)
  leaves = {
    "embed_tokens.embedding": params["embed"],
    "norm.scale": params["final_norm"],
  }
  if not config.tie_embeddings:
    leaves["lm_head.embedding"] = params["head"].T
  for index, layer in params["layers"].items():
    for name, leaf in _layer(layer).items():
      leaves[f"layers.{index}.{name}"] = leaf
  return leaves


def fill(
  converted: Mapping[str, Float[Array, "..."]],
  paths: Sequence[str],
  leaves: Sequence[Array],
) -> list[Array]:
  """Returns new leaves, placed and typed as the old ones.

  Args:
    paths: key paths of `leaves`, in their order. The state of random numbers
      is kept as it is.

  Raises:
    ValueError: the leaves are not those of this model.
  """
  unused = set(converted)
  filled = []
  for path, leaf in zip(paths, leaves, strict=True):
    name = name_of(path)
    if name.startswith("rng"):
      filled.append(leaf)
      continue
    ours = converted.get(name)
    shape = None if ours is None else ours.shape
    if ours is None or shape != leaf.shape:
      raise ValueError(
        f"sglang-jax has {path} of shape {leaf.shape}, but our {name} is "
        f"{shape or 'missing'}; use a release that this adapter knows"
      )
    unused.discard(name)
    filled.append(jax.device_put(ours.astype(leaf.dtype), leaf.sharding))
  if unused:
    raise ValueError(
      f"sglang-jax has no leaf for {', '.join(sorted(unused))}; use a release "
      "that this adapter knows"
    )
  return filled


def _layer(layer: definition.Params) -> dict[str, Float[Array, "..."]]:
  attention = layer["attention"]
  root = math.sqrt(HEAD_DIM / attention["query"].shape[-1])
  leaves = {
    "input_layernorm.scale": layer["attention_norm"],
    "post_attention_layernorm.scale": layer["mlp_norm"],
    "self_attn.q_proj.weight": _columns(_spread(attention["query"]) * root),
    "self_attn.k_proj.weight": _columns(_spread(attention["key"]) * root),
    "self_attn.v_proj.weight": _columns(_padded(attention["value"], -1)),
    "self_attn.o_proj.weight": _rows(_padded(attention["out"], -2)),
    # Divided by the root for the mean, multiplied by it for the scores.
    "self_attn.q_norm.scale": _spread(attention["query_norm"]),
    "self_attn.k_norm.scale": _spread(attention["key_norm"]) / root,
  }
  if "mlp" in layer:
    mlp = layer["mlp"]
    return leaves | {
      "mlp.gate_proj.weight": mlp["gate"],
      "mlp.up_proj.weight": mlp["up"],
      "mlp.down_proj.weight": mlp["down"],
    }
  moe = layer["moe"]
  return leaves | {
    "moe_gate.kernel": moe["router"]["kernel"],
    "mlp.wi_0": moe["gate"],
    "mlp.wi_1": moe["up"],
    "mlp.wo": moe["down"],
  }


def _spread(weights: Float[Array, "*any d"]) -> Float[Array, "*any wide"]:
  """Returns pairs of a head at the places where they turn as fast."""
  half = weights.shape[-1] // 2
  pairs = jnp.arange(half) * (HEAD_DIM // weights.shape[-1])
  places = jnp.concatenate([pairs, pairs + HEAD_DIM // 2])
  wide = jnp.zeros((*weights.shape[:-1], HEAD_DIM), weights.dtype)
  return wide.at[..., places].set(weights)


def _padded(weights: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
  widths = [(0, 0)] * weights.ndim
  widths[axis] = (0, HEAD_DIM - weights.shape[axis])
  return jnp.pad(weights, widths)


def _columns(weights: Float[Array, "D H d"]) -> Float[Array, "D columns"]:
  return weights.reshape(len(weights), -1)


def _rows(weights: Float[Array, "H d D"]) -> Float[Array, "rows D"]:
  return weights.reshape(-1, weights.shape[-1])
