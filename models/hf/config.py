"""config.json of a Hugging Face checkpoint <-> ModelConfig.

Every field of the file is read, is known to change nothing, or is refused: a
checkpoint is never computed as something that it is not.
"""

import dataclasses
import json
import pathlib
import types
import typing
from collections.abc import Mapping
from typing import Any

from models import config as config_lib
from models import rope, untrusted_files

TINY = pathlib.Path(__file__).with_name("tiny")
"""A mixture of experts for a CPU, with a tokenizer and Qwen3's tags and tools.

It has no weights: a run draws them. `scripts/make_chat_golden.py` made it.
"""

ARCHITECTURES = {
  "Qwen2ForCausalLM": "qwen2",
  "Qwen3ForCausalLM": "qwen3",
  "Qwen3MoeForCausalLM": "qwen3_moe",
  "LlamaForCausalLM": "llama",
  "MistralForCausalLM": "mistral",
  "Gemma3ForCausalLM": "gemma3_text",
  "Olmo2ForCausalLM": "olmo2",
  "Olmo3ForCausalLM": "olmo3",
  "OlmoeForCausalLM": "olmoe",
}
"""Supported architectures, and what the file calls their family.

Without a sliding window a Mistral is a Llama, and is written as one.
"""

_SIZES = {
  "vocab_size": "vocab_size",
  "num_hidden_layers": "num_layers",
  "hidden_size": "d_model",
  "num_attention_heads": "num_heads",
  "num_key_value_heads": "num_kv_heads",
  "head_dim": "head_dim",
  "intermediate_size": "d_ff",
  "max_position_embeddings": "max_length",
  "rms_norm_eps": "norm_eps",
  "tie_word_embeddings": "tie_embeddings",
}
_EXPERT_SIZES = _SIZES | {
  "num_experts": "num_experts",
  "num_experts_per_tok": "experts_per_token",
  "norm_topk_prob": "norm_topk_prob",
}
_SPARSE = {
  "qwen3_moe": _EXPERT_SIZES | {"moe_intermediate_size": "d_expert"},
  "olmoe": _EXPERT_SIZES | {"intermediate_size": "d_expert"},
}
"""Sizes in the files of families with experts."""
# Lists are made of them, so that absurd ones would fill the memory first.
_MOST = {"num_hidden_layers": 10_000, "num_experts": 10_000}
# As in transformers. Of what is not here it has defaults too, but no
# published checkpoint relies on them, and a guessed size helps nobody.
_DEFAULTS = {
  "rms_norm_eps": 1e-6,
  "tie_word_embeddings": False,
  "norm_topk_prob": False,
}
_ARCHITECTURE_OF: dict[str, config_lib.Architecture] = {
  "gemma3_text": "gemma",
  "olmo2": "olmo",
  "olmo3": "olmo",
  "olmoe": "olmoe",
}
_NORMED = ("qwen3", "qwen3_moe", *_ARCHITECTURE_OF)
"""Families that norm queries and keys."""
_WITH_HEAD_DIM = ("qwen3", "qwen3_moe", "gemma3_text")
"""Those whose files always have the width of heads."""
_DEFAULTS_OF: dict[str, dict[str, Any]] = {
  "gemma3_text": {
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10_000.0,
  },
  "olmo2": {"rms_norm_eps": 1e-5},
  "olmo3": {"rms_norm_eps": 1e-5},
  "olmoe": {"rms_norm_eps": 1e-5},
}
_THETAS = {"gemma3_text": 1e6, "olmo3": 5e5}
_WINDOWED = ("mistral", "gemma3_text", "olmo3")
# Of so many layers the last has no window, unless the file says otherwise.
_FULL_EVERY = {"gemma3_text": 6, "olmo3": 4}
_MUST_BE = {"attention_dropout": 0, "is_encoder_decoder": False}
_OTHER = {
  *("architectures", "model_type", "dtype", "torch_dtype", "layer_types"),
  *("rope_theta", "rope_scaling", "rope_parameters"),
}
# What transformers knows of one family alone.
_UNBIASED = {"attention_bias": False}
_SILU = {"hidden_act": "silu", "use_sliding_window": False}
_GELU = "gelu_pytorch_tanh"
_MUST_BE_OF: dict[str, dict[str, Any]] = {
  "qwen2": _SILU,
  "qwen3": _SILU | _UNBIASED,
  "qwen3_moe": _SILU | _UNBIASED,
  "llama": _SILU | _UNBIASED | {"mlp_bias": False, "pretraining_tp": 1},
  "mistral": {"hidden_act": "silu"},
  "olmo2": _UNBIASED | {"hidden_act": "silu"},
  "olmo3": _UNBIASED | {"hidden_act": "silu"},
  "olmoe": _UNBIASED | {"hidden_act": "silu", "clip_qkv": None},
  "gemma3_text": _UNBIASED
  | {
    "hidden_act": _GELU,
    "hidden_activation": _GELU,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": False,
  },
}
# Of Qwen's own code: Qwen2.5 has the first, and Qwen3-Coder the others.
_MUST_BE_READ = {
  "use_mrope": False,
  "qkv_bias": False,
  "use_qk_norm": True,
  "shared_expert_intermediate_size": 0,
}
_PATTERN = ("sliding_window_pattern", "_sliding_window_pattern")
_OTHER_OF = {
  "qwen3_moe": {"num_local_experts", "decoder_sparse_step", "mlp_only_layers"},
  "olmoe": {"num_local_experts"},
  "gemma3_text": {"query_pre_attn_scalar", "rope_local_base_freq", *_PATTERN},
}
_SLIDING, _FULL = "sliding_attention", "full_attention"
# How the weights were drawn, are sampled from or are kept by transformers, and
# what SmolLM2 has from nanotron.
_HARMLESS = {
  *("transformers_version", "_name_or_path", "name_or_path", "use_cache"),
  *("initializer_range", "bos_token_id", "eos_token_id", "pad_token_id"),
  *("sliding_window", "max_window_layers", "chunk_size_feed_forward"),
  *("output_router_logits", "router_aux_loss_coef", "output_attentions"),
  *("output_hidden_states", "return_dict", "id2label", "label2id"),
  *("problem_type", "tokenizer_class", "unsloth_fixed", "unsloth_version"),
  *("attn_implementation", "_attn_implementation", "experts_implementation"),
  *("_attn_implementation_autoset", "transformers.js_config"),
  *("is_llama_config", "rope_interleaved", "cache_implementation"),
  *("max_length", "max_new_tokens", "do_sample", "num_beams", "temperature"),
  *("top_k", "top_p", "min_p", "repetition_penalty"),
}

_SCALINGS = {"linear": rope.Linear, "yarn": rope.Yarn, "llama3": rope.Llama3}
_ROPE_NAMES = {"original_max_length": "original_max_position_embeddings"}


def load(
  directory: str | pathlib.Path, compute: config_lib.Compute | None = None
) -> config_lib.ModelConfig:
  """Returns the config that config.json of a checkpoint stands for.

  Args:
    compute: None is the default, in the type of the checkpoint's weights;
      of float16, which nothing computes in here, the type is "auto".

  Raises:
    ValueError: names the field that is not supported, missing or unknown, its
      value, and the way out.
  """
  path = pathlib.Path(directory, "config.json")
  data = untrusted_files.read_object(path)
  if data.get("model_type") in _WINDOWED:
    data.setdefault("sliding_window", 4096)  # As in transformers.
  # What is null takes its default in transformers, and so it does here.
  data = {name: value for name, value in data.items() if value is not None}
  try:
    config = _read(data, compute)
    config.validate()
    for part in (config.rope_scaling, config.window):
      if part is not None:
        part.validate()
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from error
  return config


def to_hf(config: config_lib.ModelConfig) -> dict[str, Any]:
  """Returns a config.json that transformers reads from 4.51 on.

  `load` reads an equal config from it, up to `compute` and `lora`, and a
  larger `max_length` with Yarn: transformers before 5 puts the quotient of
  max_length and original_max_length in the place of `factor`.
  """
  family = "qwen2" if config.qkv_bias else "llama"
  if config.architecture == "gemma":
    family = "gemma3_text"
  elif config.architecture == "olmo":
    family = "olmo3" if config.window is not None else "olmo2"
  elif config.architecture == "olmoe":
    family = "olmoe"
  elif config.qk_norm:
    family = "qwen3_moe" if config.num_experts else "qwen3"
  elif config.window is not None:
    family = "mistral"
  named = next(name for name, own in ARCHITECTURES.items() if own == family)
  names = _SPARSE.get(family, _SIZES)
  data = {
    "architectures": [named],
    "model_type": family,
    "torch_dtype": config.dtype,
    "rope_theta": config.rope_theta,
    "rope_scaling": _scaling_to_hf(config.rope_scaling),
    **(_MUST_BE | _MUST_BE_OF[family]),
    **{name: getattr(config, field) for name, field in names.items()},
  }
  if isinstance(config.rope_scaling, rope.Yarn):
    scaled = (
      config.rope_scaling.factor * config.rope_scaling.original_max_length
    )
    data["max_position_embeddings"] = max(config.max_length, round(scaled))
  if family == "qwen3_moe":
    data["decoder_sparse_step"] = 1
    data["mlp_only_layers"] = list(config.dense_layers)
  if config.window is not None:
    data["sliding_window"] = config.window.size
  if family in _FULL_EVERY:
    data["layer_types"] = _layer_types(config.window, config.num_layers)
  if family == "gemma3_text":
    data |= _gemma_to_hf(config)
  return dict(sorted(data.items()))


def _gemma_to_hf(config: config_lib.ModelConfig) -> dict[str, Any]:
  window = config.window
  data: dict[str, Any] = {
    "query_pre_attn_scalar": config.query_pre_attn_scalar or config.head_dim,
    "rope_local_base_freq": config.rope_theta,
  }
  if window is not None and window.rope_theta is not None:
    data["rope_local_base_freq"] = window.rope_theta
  if window is not None and window.full_every:
    data[_PATTERN[0]] = window.full_every
  return data


def _read(
  data: dict[str, Any], compute: config_lib.Compute | None
) -> config_lib.ModelConfig:
  family = _family(data)
  names = _SPARSE.get(family, _SIZES)
  if family in _SPARSE:
    data = data | _one_name(data, "num_experts", "num_local_experts")
  data = data if family in _WITH_HEAD_DIM else _with_head_dim(data)
  known = {*names, *_OTHER, *_OTHER_OF.get(family, ())}
  _refuse(data, known, _MUST_BE | _MUST_BE_OF[family] | _MUST_BE_READ)
  kinds = {f.name: f.type for f in dataclasses.fields(config_lib.ModelConfig)}
  fields: dict[str, Any] = {
    "num_experts": 0,
    "qk_norm": family in _NORMED,
    "qkv_bias": family == "qwen2",
    "architecture": _ARCHITECTURE_OF.get(family, "llama"),
  }
  data = _DEFAULTS_OF.get(family, {}) | data
  for name, field in names.items():
    if name not in data and name not in _DEFAULTS:
      raise ValueError(f"{name} is missing; every published file has it")
    value = data.get(name, _DEFAULTS.get(name))
    fields[field] = _typed(name, value, kinds[field])
    if name in _MOST and fields[field] > _MOST[name]:
      raise ValueError(
        f"{name}={fields[field]} is above {_MOST[name]}, so the file is "
        "damaged; fetch it again"
      )
  if family == "gemma3_text":
    scalar = data["query_pre_attn_scalar"]
    scalar = _typed("query_pre_attn_scalar", scalar, int)
    if scalar != fields["head_dim"]:
      fields["query_pre_attn_scalar"] = scalar
  theta = _THETAS.get(family, 1e4)  # As in transformers.
  fields["rope_theta"], fields["rope_scaling"] = _read_rope(data, theta)
  fields.setdefault("d_ff", fields.get("d_expert"))
  if fields["num_experts"] and family == "qwen3_moe":
    fields["dense_layers"] = _read_dense(data, fields["num_layers"])
  fields["window"] = _read_window(data, family, fields)
  return config_lib.ModelConfig(**fields, compute=_read_compute(data, compute))


def _read_window(
  data: Mapping[str, Any], family: str, fields: Mapping[str, Any]
) -> config_lib.Window | None:
  """Returns the window that layers of a family have, if they have one."""
  num_layers = max(0, fields["num_layers"])
  types = _typed("layer_types", data.get("layer_types", []), list)
  window = None
  if family in _WINDOWED and "sliding_window" in data:
    size = _typed("sliding_window", data["sliding_window"], int)
    window = config_lib.Window(size=size)
  if family in _FULL_EVERY and window is not None:
    every = 1 + types.index(_FULL) if _FULL in types else 0
    if (named := _one_name(data, *_PATTERN)) or not types:
      default = _FULL_EVERY[family]
      every = _typed(_PATTERN[0], named.get(_PATTERN[0], default), int)
    default = data.get("rope_local_base_freq", fields["rope_theta"])
    theta = _read_local_theta(data, default)
    same = theta == fields["rope_theta"] and fields["rope_scaling"] is None
    window = dataclasses.replace(
      window, full_every=every, rope_theta=None if same else theta
    )
  if not types:
    return window
  for one in (None, window):
    if types == _layer_types(one, num_layers):
      return one
  wanted = f"in each of {num_layers} layers"
  if family in _FULL_EVERY:
    wanted += f", or last in each group of equally many, with {_SLIDING} before"
  raise ValueError(
    f"layer_types={json.dumps(types)} is not supported; use a checkpoint with "
    f"{_FULL} {wanted}"
  )


def _layer_types(
  window: config_lib.Window | None, num_layers: int
) -> list[str]:
  return [
    _SLIDING if window is not None and window.holds(layer) else _FULL
    for layer in range(num_layers)
  ]


def _read_local_theta(data: Mapping[str, Any], default: Any) -> float:
  """Returns theta of the layers with a window, where others have none."""
  nested = data.get("rope_parameters", {}).get(_SLIDING) or {}
  nested = {"rope_type": "default"} | _typed(_SLIDING, nested, dict)
  theta = nested.pop("rope_theta", default)
  theta = _typed("rope_theta", theta, float)
  if nested != {"rope_type": "default"}:
    raise ValueError(
      f"rope_parameters of {_SLIDING} as {json.dumps(nested)} are not "
      "supported; rope_theta alone is"
    )
  return theta


def _family(data: Mapping[str, Any]) -> str:
  """Returns the family of the architecture, as the file calls it."""
  named = data.get("architectures")
  if named is None and "class" in data:
    raise ValueError(
      "these are the settings of a run; export its weights with python -m "
      "launch.export, and name the directory of these"
    )
  architecture = named[0] if isinstance(named, list) and len(named) == 1 else ""
  if architecture not in list(ARCHITECTURES):
    raise ValueError(
      f"architectures={named} is not supported; use a checkpoint of "
      f"{', '.join(ARCHITECTURES)}"
    )
  family = ARCHITECTURES[architecture]
  if data.get("model_type", family) != family:
    raise ValueError(
      f"model_type={data['model_type']!r} contradicts architectures={named}; "
      f"use {family!r}"
    )
  return family


def _with_head_dim(data: dict[str, Any]) -> dict[str, Any]:
  """Returns data in which the width of heads is a quotient if it is missing.

  Files of Qwen2.5 and Llama 3.1 do not have it.
  """
  width, heads = data.get("hidden_size"), data.get("num_attention_heads")
  if type(width) is not int or type(heads) is not int or heads < 1:
    return data
  return {"head_dim": width // heads} | data


def _refuse(
  data: Mapping[str, Any], known: set[str], must_be: Mapping[str, Any]
) -> None:
  """Raises ValueError for a field that is not known, or not so valued."""
  for name, value in data.items():
    if name not in _HARMLESS and not _is_finite(value):
      raise ValueError(
        f"{name}={json.dumps(value)} holds no finite number; correct it"
      )
    wanted = must_be.get(name, value)
    if value != wanted:
      raise ValueError(
        f"{name}={json.dumps(value)} is not supported; use a checkpoint with "
        f"{json.dumps(wanted)}"
      )
    if "quant" in name or "compress" in name:
      raise ValueError(
        f"{name}={json.dumps(value)}: quantized weights are not supported; use "
        "the checkpoint in bfloat16"
      )
    if name not in known | _HARMLESS | must_be.keys():
      raise ValueError(
        f"{name}={json.dumps(value)} is unknown and might change the result; "
        "if it does not, take it out of the file"
      )


def _is_finite(value: Any) -> bool:
  """Returns whether a value holds neither NaN nor infinity."""
  try:
    json.dumps(value, allow_nan=False)
  except ValueError:
    return False
  return True


def _one_name(data: Mapping[str, Any], name: str, other: str) -> dict[str, Any]:
  """Returns the value of a field that has two names, under the first."""
  values = [data[key] for key in (name, other) if key in data]
  if len(values) == 2 and values[0] != values[1]:
    raise ValueError(
      f"{name}={values[0]} and {other}={values[1]} contradict each other; keep "
      "one"
    )
  return {name: values[0]} if values else {}


def _typed(name: str, value: Any, kind: Any) -> Any:
  """Returns a number or truth value of JSON, which must be of its kind."""
  if typing.get_origin(kind) in (typing.Union, types.UnionType):
    kind = typing.get_args(kind)[0]
  if kind is float and type(value) is int:
    try:
      return float(value)
    except OverflowError as error:
      raise ValueError(
        f"{name} is a number of {len(str(abs(value)))} digits, which no float "
        "holds; correct it"
      ) from error
  if type(value) is not kind:
    raise ValueError(
      f"{name}={json.dumps(value)} must be of type {kind.__name__}; correct it"
    )
  return value


def _read_dense(data: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
  """Returns the layers without experts, by the two ways of naming them."""
  step = _typed("decoder_sparse_step", data.get("decoder_sparse_step", 1), int)
  if step < 1:
    raise ValueError(f"decoder_sparse_step={step} is below 1; use 1 or more")
  named = _typed("mlp_only_layers", data.get("mlp_only_layers", []), list)
  for layer in named:
    _typed("mlp_only_layers", layer, int)
  every = {i for i in range(num_layers) if (i + 1) % step}
  return tuple(sorted(every.union(named)))


def _read_compute(
  data: Mapping[str, Any], compute: config_lib.Compute | None
) -> config_lib.Compute:
  dtype = _one_name(data, "dtype", "torch_dtype").get("dtype", "float32")
  if compute is not None:
    return compute
  if dtype == "float16":
    return config_lib.Compute()
  if dtype not in ("float32", "bfloat16"):
    raise ValueError(
      f"dtype={dtype!r} is not computed in; pass "
      'compute=Compute(dtype="float32") or "bfloat16"'
    )
  return config_lib.Compute(dtype=dtype)


def _read_rope(
  data: Mapping[str, Any], default: float
) -> tuple[float, rope.Scaling | None]:
  """Returns theta and scaling, as written by transformers 4 or by 5.

  Those of a Gemma or OLMo are of its layers without a window.
  """
  found = _one_name(data, "rope_parameters", "rope_scaling")
  values = found.get("rope_parameters", {})
  _typed("rope_scaling", values, dict)
  if values and values.keys() <= {_SLIDING, _FULL}:
    values = values.get(_FULL) or {}
  values = {name: value for name, value in values.items() if value is not None}
  kind = _one_name(values, "rope_type", "type").get("rope_type", "default")
  beside = "rope_theta outside of it"
  outside = {beside: data["rope_theta"]} if "rope_theta" in data else {}
  theta = _one_name(values | outside, "rope_theta", beside)
  theta = _typed("rope_theta", theta.get("rope_theta", default), float)
  if values.pop("partial_rotary_factor", 1) != 1:
    raise ValueError("partial_rotary_factor is supported only as 1")
  for name in ("rope_type", "type", "rope_theta"):
    values.pop(name, None)
  return theta, _read_scaling(kind, values, data["max_position_embeddings"])


def _read_scaling(
  kind: str, values: Mapping[str, Any], max_length: int
) -> rope.Scaling | None:
  """Returns the scaling of a kind; all of `values` must belong to it."""
  if kind not in (*_SCALINGS, "default"):
    raise ValueError(
      f"rope_type={kind!r} is not supported; {', '.join(_SCALINGS)} and "
      "default are"
    )
  scaling = _SCALINGS.get(kind)
  known = dataclasses.fields(scaling) if scaling else ()
  names = {
    field.name: _ROPE_NAMES.get(field.name, field.name) for field in known
  }
  for name, value in values.items():
    if name not in names.values():
      raise ValueError(
        f"{name}={json.dumps(value)} is unknown for rope_type={kind!r}; take "
        "it out if it has no effect"
      )
  if scaling is None:
    return None
  # As transformers does when the file does not say.
  values = {"original_max_position_embeddings": max_length} | dict(values)
  arguments: dict[str, Any] = {
    field.name: _typed(name, values[name], field.type)
    for field in known
    if (name := names[field.name]) in values
  }
  if "factor" not in arguments:
    raise ValueError(f"factor is missing for rope_type={kind!r}")
  return scaling(**arguments)


def _scaling_to_hf(scaling: rope.Scaling | None) -> dict[str, Any] | None:
  if scaling is None:
    return None
  kind = next(k for k, cls in _SCALINGS.items() if isinstance(scaling, cls))
  values = {
    _ROPE_NAMES.get(field.name, field.name): getattr(scaling, field.name)
    for field in dataclasses.fields(scaling)
  }
  return {"rope_type": kind} | {
    name: value for name, value in values.items() if value is not None
  }
