"""Adapters in and out, in the layout of Hugging Face's PEFT.

  adapter_config.json         what is adapted, rank and alpha
  adapter_model.safetensors   lora_A [r, in] and lora_B [out, r] of each matrix

Linear layers, embedding and head are PEFT's `target_modules`. A model with
experts has `target_parameters` instead: all experts of a layer are one adapter,
expert by expert along the ranks of A and rank by rank along those of B, and
"gate" and "up" are one matrix. Each keeps factors of its own, because their
ranks lie side by side:

  lora_A [E (r + r), D]     lora_B [F + F, (r + r) E], zero off the diagonal

This is how PEFT 0.21 on transformers 5 writes its own. On transformers 4
experts are Linear layers, so export the merged model for it.

Letters: E experts, r rank, D width, F width of an expert, N matrices fused.
"""

import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from models import config as config_lib
from models import definition, layer_stack, lora, sharding, untrusted_files
from models import policy as policy_lib
from models.hf import load as load_lib
from models.hf import parameter_names, safetensors_io

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"

_PREFIX = "base_model.model."
_FUSED = ("gate", "up")
_PATTERN = r".*\.gate_up_proj"

# The others of PEFT 0.21, such as PiSSA and LoftQ, change the base.
_BASE_IS_KEPT = (None, True, False, "gaussian", "orthogonal", "eva", "mica")
# Whatever else they are set to would change what an adapter computes.
_PLAIN = {
  "peft_type": ("LORA",),
  "bias": ("none",),
  "use_rslora": (False,),
  "use_dora": (False,),
  "use_qalora": (False,),
  "use_bdlora": (None, False),
  "lora_bias": (False,),
  "fan_in_fan_out": (False,),
  "modules_to_save": (None, []),
  "trainable_token_indices": (None,),
  "layer_replication": (None,),
  "alora_invocation_tokens": (None,),
}
# The rest of what PEFT 0.21 writes: how an adapter was drawn and trained, the
# matrices it has, which its tensors show, and options of what is off above.
_HARMLESS = {
  *("task_type", "inference_mode", "peft_version", "auto_mapping"),
  *("base_model_name_or_path", "revision", "lora_dropout", "runtime_config"),
  *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),
  *("target_modules", "target_parameters", "exclude_modules"),
  *("layers_to_transform", "layers_pattern"),
  *("megatron_core", "qalora_group_size"),
}
_CHECKED = {
  *("init_lora_weights", "r", "lora_alpha", "rank_pattern", "alpha_pattern")
}


@dataclasses.dataclass(frozen=True)
class _Target:
  """One adapter of theirs, and ours that are in it.

  Attributes:
    module: of theirs, which holds it.
    parameter: of an inner module or of experts, for `target_parameters`; ""
      adapts the module.
    path: of our module.
    projections: names in our module.
    stacked: each expert has factors of its own.
  """

  module: str
  parameter: str
  path: tuple[str | int, ...]
  projections: tuple[str, ...]
  stacked: bool = False

  @property
  def names(self) -> tuple[str, str]:
    """Names of tensors A and B."""
    if self.projections == ("embed",):
      stem = f"{_PREFIX}{self.module}.lora_embedding_"
      return f"{stem}A", f"{stem}B"
    stem = f"{_PREFIX}{self.module}.lora_"
    return f"{stem}A.weight", f"{stem}B.weight"

  def of(self, adapters: Any) -> list[dict[str, Any]]:
    """Returns our {"a", "b"} of each projection, out of a tree of adapters."""
    module = _at(adapters, self.path)["lora"]
    return [module[name] for name in self.projections]


def export(
  directory: str | os.PathLike[str],
  params: definition.Params,
  config: config_lib.ModelConfig,
  base: str | None = None,
) -> None:
  """Writes the adapters of `params` as a directory that PEFT loads, or nothing.

  Args:
    directory: is made, and must not exist.
    params: with or without what is frozen. On several hosts each calls this,
      and the first one writes.
    base: name or path of the model beneath, for whoever loads it.

  Raises:
    ValueError: the directory exists or cannot be written, or there are no
      adapters of `config`.
  """
  path = pathlib.Path(directory)
  if os.path.exists(path):
    raise ValueError(f"{path} exists; remove it or choose another directory")
  adapters, _ = lora.split(params)
  _check(adapters, config)
  adapters = layer_stack.unstack(adapters, config)
  config = layer_stack.unrolled(config)
  tensors = {
    name: safetensors_io.on_host(tensor)
    for name, tensor in _tensors(adapters, config).items()
  }
  if jax.process_index():
    return
  with safetensors_io.whole_directory(path) as partial:
    text = json.dumps(_settings(config) | {"base_model_name_or_path": base})
    (partial / CONFIG).write_text(text + "\n", "utf-8")
    data = safetensors.numpy.save(tensors, {"format": "pt"})
    (partial / TENSORS).write_bytes(data)


def load(
  directory: str | os.PathLike[str],
  config: config_lib.ModelConfig,
  layout: sharding.Layout | None = None,
) -> definition.Params:
  """Returns adapters in `config.dtype`; `lora.join` adds the base.

  Args:
    directory: as `export` writes it, or PEFT for an adapter like it.
    config: with the `lora` that the adapter was made with.
    layout: where they go; None is the default device.

  Raises:
    load.Unusable: lists what is wrong: another rank or alpha, a kind of adapter
      that is not ours, tensors that are missing, unknown, of another shape or
      not finite.
  """
  path = pathlib.Path(directory)
  single = layer_stack.unrolled(config)
  load_lib.refuse(path, _config_problems(path, single))
  adapters = layer_stack.stack(_load(path, single), config, np.stack)
  if layout is None:
    return jax.device_put(adapters)
  axes, _ = lora.split(policy_lib.of(config).axes)
  return jax.device_put(adapters, layout.tree(axes))


def _load(
  path: pathlib.Path, config: config_lib.ModelConfig
) -> definition.Params:
  """Returns the adapters of a model whose layers are unrolled, on the host."""
  shapes, _ = lora.split(policy_lib.of(config).shapes)
  tensors = _read(path, config, shapes)
  adapters = jax.tree.map(lambda leaf: leaf, shapes)
  for target in _targets(config):
    a, b = (tensors[name] for name in target.names)
    pairs = zip(target.of(adapters), target.of(shapes), strict=True)
    for place, (own, like) in enumerate(pairs):
      own["a"], own["b"] = _unpack(target, place, a, b, like)
  load_lib.refuse(path, _shared(tensors, _tensors(adapters, config)))
  return adapters


def _targets(config: config_lib.ModelConfig) -> Iterator[_Target]:
  """Yields the adapters that PEFT has for a model, in a fixed order.

  Args:
    config: whose layers are unrolled.
  """
  entries = parameter_names.entries(config)
  adapters, _ = lora.split(policy_lib.of(config).axes)
  for path in _adapted(adapters):
    ours, theirs = _at(adapters, path), _at(entries, path)
    stacked = []
    for name in ours["lora"]:
      if theirs[name].stacked:
        stacked.append(name)
        continue
      module = theirs[name].names[0].removesuffix(".weight")
      # With experts PEFT takes each module of an MLP for one of theirs.
      is_parameter = config.num_sparse > 0 and ".mlp." in module
      parameter = ".".join(module.split(".")[-2:]) + ".weight"
      yield _Target(module, parameter if is_parameter else "", path, (name,))
    yield from _of_experts(theirs, path, stacked)


def _adapted(
  adapters: Any, path: tuple[str | int, ...] = ()
) -> Iterator[tuple[str | int, ...]]:
  """Yields the path of each of our modules that has adapters."""
  if "lora" in adapters:
    yield path
  for name, inner in adapters.items():
    if name != "lora":
      yield from _adapted(inner, (*path, name))


def _at(tree: Any, path: Sequence[str | int]) -> Any:
  for step in path:
    tree = tree[step]
  return tree


def _of_experts(
  theirs: Mapping[str, parameter_names.Entry],
  path: tuple[str | int, ...],
  names: Sequence[str],
) -> Iterator[_Target]:
  """Yields the parameters, at most two, that all experts of a layer are."""
  fused = tuple(name for name in _FUSED if name in names)
  for parameter, own in (("gate_up_proj", fused), ("down_proj", ("down",))):
    if not own or own[0] not in names:
      continue
    # model.layers.0.mlp.experts[.0.gate_proj.weight]
    module = theirs[own[0]].names[0].rsplit(".", 3)[0]
    if own == fused and "down" in names:
      # PEFT wraps a module once for each of its parameters, this one first.
      module += ".base_layer"
    yield _Target(module, f"mlp.experts.{parameter}", path, own, stacked=True)


def _tensors(adapters: Any, config: config_lib.ModelConfig) -> dict[str, Any]:
  """Returns their tensors by name."""
  tensors = {}
  for target in _targets(config):
    packed = _pack(target, target.of(adapters))
    tensors |= zip(target.names, packed, strict=True)
  return tensors


def _pack(target: _Target, own: Sequence[Mapping[str, Any]]) -> tuple[Any, Any]:
  """Returns their A [ranks, in] and B [out, ranks]."""
  if not target.stacked:
    a, b = own[0]["a"], own[0]["b"]
    rank = len(b)
    return a.reshape(-1, rank).T, b.reshape(rank, -1).T
  a = jnp.concatenate([adapter["a"] for adapter in own], 2)  # [E, in, N r]
  num_experts, rank, width = own[0]["b"].shape
  height = width * (len(_FUSED) if target.projections[0] in _FUSED else 1)
  b = jnp.zeros((num_experts, len(own) * rank, height), own[0]["b"].dtype)
  for place, adapter in enumerate(own):
    b = b.at[_block(target, place, rank, width)].set(adapter["b"])
  a = a.swapaxes(1, 2).reshape(-1, a.shape[1])
  return a, b.transpose(2, 1, 0).reshape(height, -1)


def _unpack(
  target: _Target, place: int, a: np.ndarray, b: np.ndarray, like: Any
) -> tuple[np.ndarray, np.ndarray]:
  """Returns our factors of one projection; inverse of `_pack`."""
  if not target.stacked:
    return a.T.reshape(like["a"].shape), b.T.reshape(like["b"].shape)
  num_experts, rank, width = like["b"].shape
  a = a.reshape(num_experts, -1, a.shape[1]).swapaxes(1, 2)
  b = b.reshape(len(b), -1, num_experts).transpose(2, 1, 0)
  at = _block(target, place, rank, width)
  return a[:, :, at[1]], b[at]


def _block(
  target: _Target, place: int, rank: int, width: int
) -> tuple[slice, slice, slice]:
  """Returns where b of a projection lies in [E, N r, all outputs]."""
  name = target.projections[place]
  row = _FUSED.index(name) * width if name in _FUSED else 0
  return (
    slice(None),
    slice(place * rank, (place + 1) * rank),
    slice(row, row + width),
  )


def _settings(config: config_lib.ModelConfig) -> dict[str, Any]:
  """Returns adapter_config.json of the model's adapters."""
  assert config.lora is not None
  rank, alpha = config.lora.rank, config.lora.alpha
  alpha = int(alpha) if alpha == int(alpha) else alpha
  targets = list(_targets(config))
  num_fused = max([len(target.projections) for target in targets])
  parameters = {target.parameter for target in targets if target.parameter}
  modules = {
    target.module.split(".")[-1] for target in targets if not target.parameter
  }
  return {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "inference_mode": True,
    "r": rank,
    "lora_alpha": alpha,
    "lora_dropout": 0.0,
    "bias": "none",
    "fan_in_fan_out": False,
    "use_rslora": False,
    "use_dora": False,
    "target_modules": sorted(modules),
    "target_parameters": sorted(parameters) or None,
    # Twice of both, which leaves alpha / rank as it is.
    "rank_pattern": {_PATTERN: 2 * rank} if num_fused > 1 else {},
    "alpha_pattern": {_PATTERN: 2 * alpha} if num_fused > 1 else {},
  }


def _config_problems(
  path: pathlib.Path, config: config_lib.ModelConfig
) -> list[str]:
  if config.lora is None:
    return ["model.lora is None; set the one that it was made with"]
  try:
    found = untrusted_files.read_object(path / CONFIG)
  except untrusted_files.BadFile as error:
    return [str(error)]
  problems = [
    f"{CONFIG} has {name}={found[name]!r}, which is not supported; use "
    f"{allowed[0]!r}"
    for name, allowed in _PLAIN.items()
    if found.get(name, allowed[0]) not in allowed
  ]
  init = found.get("init_lora_weights")
  if init not in _BASE_IS_KEPT:
    problems.append(
      f"{CONFIG} has init_lora_weights={init!r}, which may have changed the "
      "base; save it again by PEFT's save_pretrained with "
      "path_initial_model_for_weight_conversion, or merge it there"
    )
  known = _PLAIN.keys() | _HARMLESS | _CHECKED
  problems += [
    f"{CONFIG} has {name}={value!r}, which is unknown and might change the "
    "result; if it does not, take it out of the file"
    for name, value in found.items()
    if value and name not in known
  ]
  wanted = _settings(config)
  for theirs, ours in (("r", "rank"), ("lora_alpha", "alpha")):
    if found.get(theirs) != wanted[theirs]:
      problems.append(
        f"{CONFIG} has {theirs}={found.get(theirs)}, but model.lora.{ours} is "
        f"{wanted[theirs]}; use the same"
      )
  for name in ("rank_pattern", "alpha_pattern"):
    # Whatever follows from another rank or alpha has been said.
    if not problems and (found.get(name) or {}) != wanted[name]:
      problems.append(
        f"{CONFIG} has {name}={found.get(name)}, but these adapters have "
        f"{wanted[name]}; each projection has factors of its own here"
      )
  return problems


def _read(
  path: pathlib.Path, config: config_lib.ModelConfig, shapes: Any
) -> dict[str, np.ndarray]:
  """Returns their tensors by name, all there and finite."""
  wanted = jax.eval_shape(lambda tree: _tensors(tree, config), shapes)
  # Both axes are as they are stored.
  entries = [
    parameter_names.Entry((name,), ("rank", "rank"), leaf.shape, 0)
    for name, leaf in wanted.items()
  ]
  with safetensors_io.TensorFiles(path, TENSORS, None) as files:
    problems = load_lib.tensor_problems(files, entries, tied=False)
    load_lib.refuse(path, [*files.problems, *problems])
    tensors = {name: files.read(name) for name in wanted}
  bad = [name for name, x in tensors.items() if not np.isfinite(x).all()]
  if bad:
    load_lib.refuse(path, [f"NaN or infinity in {safetensors_io.listing(bad)}"])
  dtype = jnp.dtype(config.dtype)
  return {name: tensor.astype(dtype) for name, tensor in tensors.items()}


def _shared(
  tensors: Mapping[str, np.ndarray], again: Mapping[str, Any]
) -> list[str]:
  """Returns which tensors are not what our adapters pack into."""
  names = [
    name
    for name, tensor in tensors.items()
    if not np.array_equal(tensor, jax.device_get(again[name]))
  ]
  if not names:
    return []
  return [
    "gate and up share factors, which ours do not: "
    f"{safetensors_io.listing(names)} is not zero off its two blocks"
  ]


def _check(adapters: Any, config: config_lib.ModelConfig) -> None:
  shapes, _ = lora.split(policy_lib.of(config).shapes)
  like = functools.partial(jax.tree.map, lambda x: (x.shape, x.dtype))
  if config.lora is None or like(adapters) != like(shapes):
    raise ValueError(
      "the parameters have no adapters, or not those of model.lora="
      f"{config.lora}; pass the config that they were made with"
    )
