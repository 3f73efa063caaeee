"""The sizes of a model: checked, as published, and what they add up to.

qwen3("1.7b") qwen3_moe("30b-a3b")   published sizes, in bfloat16
qwen2_5("7b") llama3("3.1-8b") gemma3("1b") olmo2("1b") olmo3("7b")
olmoe("1b-7b")
models.hf.config.load(directory)     sizes of a checkpoint
tiny() tiny_moe()                    for a CPU
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import PRNGKeyArray

from models import lora as lora_lib
from models import rope

Dtype = Literal["float32", "bfloat16"]
Remat = Literal["none", "dots", "layer", "host"]
Architecture = Literal["llama", "gemma", "olmo", "olmoe"]
_DEEP = 16
"""Layers from which on they are scanned unless told otherwise."""
_LARGE = 100_000_000
"""Parameters from which on activations are not kept unless asked for."""
_OLMO_THETA = 5e5
_MAX_SIZE, _MAX_LAYERS = 2**31 - 1, 10_000
"""Sizes beyond which checks would take for ever, or shapes overflow."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compute:
  """The way a model is computed: nothing here changes more than rounding.

  Attributes:
    dtype: of parameters and activations; published sizes come in bfloat16.
      "auto" is bfloat16 in runs on a TPU, or on a GPU of NVIDIA from Ampere on,
      and else float32. Optimizers keep float32 masters, and norms, softmax,
      routing, rotary angles, log-probabilities and sums are float32 in any
      case. Accelerators multiply float32 matrices in fewer bits unless jax is
      told otherwise: JAX_DEFAULT_MATMUL_PRECISION=highest.
    attention: form of `attention.attend`; "auto" goes by platform and shape.
      "packed" does too, but on NVIDIA's GPUs from 9.0 on, as H100, a device's
      rows need no mask if each has 16 segments at most; it compiles for them,
      and has not been run. "fused", "triton" and "splash" are for
      whole rows: on top of a cache, and so when decoding, all of these mean
      "auto".
    attention_block: queries and keys of a tile of the blockwise form.
    experts: form of the grouped matmul; "auto" goes by platform.
    moe_block: fewest rows of a block of the grouped matmul, to which every
      expert pads; with many tokens blocks are larger.
    layers: "scan" compiles one layer of each kind, whose parameters are stacked
      over the layers, and loops; "unroll" compiles each layer by itself. "auto"
      is "scan" from 16 layers on.
    remat: what the backward pass computes again; see `transformer.REMAT`. None
      is "layer" for a model of over 100 million parameters, and else "none".
    logprob_chunk: tokens whose logits exist at the same time, of a device or of
      those that share a row.
  """

  dtype: Literal["auto"] | Dtype = "auto"
  attention: Literal[
    "auto", "packed", "reference", "fused", "blockwise", "triton", "splash"
  ] = "auto"
  attention_block: int = 256
  experts: Literal["auto", "blocks", "pallas"] = "auto"
  moe_block: int = 16
  layers: Literal["auto", "scan", "unroll"] = "auto"
  remat: Remat | None = None
  logprob_chunk: int = 2048

  def validate(self) -> None:
    """Raises ValueError for sizes that cannot work."""
    for name in ("attention_block", "moe_block", "logprob_chunk"):
      if (value := getattr(self, name)) < 1:
        raise ValueError(f"model.compute.{name}={value} must be at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
  """Attention to the last tokens alone, in some layers or in all.

  Decoding reads the keys within it, and yet keeps all of them.

  Attributes:
    size: tokens that a query sees, its own included.
    full_every: of so many layers the last has no window, as in Gemma 3, where
      it is 6, and OLMo 3, where it is 4; 0: every layer has one, as in
      Mistral 7B.
    rope_theta: base of the rotary positions of layers with a window, which
      have no `rope_scaling`; None is as in the others.

  Source: Longformer, arXiv 2004.05150, section 3.1.
  """

  size: int
  full_every: int = 0
  rope_theta: float | None = None

  def holds(self, layer: Any) -> Any:
    """Returns whether a layer, counted from 0, has the window.

    Args:
      layer: an integer, or an array of them.
    """
    return (layer + 1) % self.full_every != 0 if self.full_every else True

  def validate(self) -> None:
    """Raises ValueError on values that cannot work."""
    for problem in self._problems():
      raise ValueError(f"model.window.{problem}")

  def _problems(self) -> Iterator[str]:
    if self.size < 1:
      yield f"size={self.size} is below 1; use 1 or more"
    if self.full_every < 0:
      out = "use 0 for windows in all layers"
      yield f"full_every={self.full_every} is below 0; {out}"
    if self.rope_theta is not None and not 1 < self.rope_theta < math.inf:
      out = "use 10000, or none for that of the model"
      yield f"rope_theta={self.rope_theta} is not above 1; {out}"


@runtime_checkable
class PolicyMaker(Protocol):
  """Makes a policy: a frozen dataclass that is called."""

  def __call__(self, config: "ModelConfig", key: PRNGKeyArray) -> Any:
    """Returns a `policy.Policy`; it takes of the sizes what it has a use for.

    Args:
      key: of its random parameters.
    """
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
  """Sizes of a Qwen2.5, Qwen3, Llama 3, Gemma 3, OLMo or OLMoE decoder.

  Attributes:
    num_kv_heads: key and value heads; each serves num_heads / num_kv_heads
      query heads.
    d_ff: hidden width of the MLP of a dense layer.
    d_expert: hidden width of one expert.
    num_experts: of each sparse layer; 0 makes every layer dense.
    experts_per_token: experts that each token is sent to.
    norm_topk_prob: the gates of a token sum to 1.
    dense_layers: layers, from 0, with one MLP although there are experts.
    max_length: longest conversation, in tokens.
    rope_theta: base of the wavelengths of the rotary positions.
    rope_scaling: how they stretch beyond the trained length, or None.
    qk_norm: queries and keys are normed, as in Qwen3 and not in Llama 3.
    qkv_bias: queries, keys and values have a bias, as in Qwen2.5.
    architecture: that of the layers. "llama", also of Qwen and Mistral: what
      reads the residual stream is normed. "olmo", of OLMo 2 and 3: what is
      added to it is normed instead, and queries and keys over all heads at
      once. "olmoe", of OLMoE: as "llama", with queries and keys as in "olmo".
      "gemma", of Gemma 3: both are normed, all norms by 1 + their scale, a GELU
      is in the place of the SiLU, and embeddings are multiplied by the root of
      d_model.
    window: layers that attend to the last tokens alone; None has none.
    query_pre_attn_scalar: scores are divided by its root; None is head_dim.
    tie_embeddings: the embedding is also the output projection.
    compute: how it is computed.
    lora: adapters, which then are all that trains; None trains everything.
    policy: makes another policy than ours; None is `transformer.Transformer`.
  """

  vocab_size: int = 64
  num_layers: int = 4
  d_model: int = 128
  num_heads: int = 4
  num_kv_heads: int = 2
  head_dim: int = 32
  d_ff: int = 256
  d_expert: int = 128
  num_experts: int = 4
  experts_per_token: int = 2
  norm_topk_prob: bool = True
  dense_layers: tuple[int, ...] = ()
  max_length: int = 64
  rope_theta: float = 10_000.0
  rope_scaling: rope.Scaling | None = None
  norm_eps: float = 1e-6
  qk_norm: bool = True
  qkv_bias: bool = False
  architecture: Architecture = "llama"
  window: Window | None = None
  query_pre_attn_scalar: int | None = None
  tie_embeddings: bool = True
  compute: Compute = Compute()
  lora: lora_lib.Lora | None = None
  policy: PolicyMaker | None = None

  def is_sparse(self, layer: int) -> bool:
    """Returns whether a layer, counted from 0, has experts."""
    return self.num_experts > 0 and layer not in self.dense_layers

  @property
  def num_sparse(self) -> int:
    """Number of layers with experts."""
    return sum(map(self.is_sparse, range(self.num_layers)))

  @property
  def scans_layers(self) -> bool:
    """Returns whether a loop runs over stacked layers; see `Compute.layers`."""
    form = self.compute.layers
    return form == "scan" or (form == "auto" and self.num_layers >= _DEEP)

  @property
  def layer_runs(self) -> list[range]:
    """The layers of each entry of `params["layers"]`.

    Neighbours of one kind when layers are scanned, or else a single one.
    """
    every = range(self.num_layers)
    if not self.scans_layers:
      return [range(i, i + 1) for i in every]
    starts = [
      i for i in every if not i or self.is_sparse(i) != self.is_sparse(i - 1)
    ]
    ends = [*starts[1:], self.num_layers]
    return [range(*pair) for pair in zip(starts, ends, strict=True)]

  @property
  def dtype(self) -> Dtype:
    """`compute.dtype`, or float32 where that is still "auto"."""
    named = self.compute.dtype
    return "float32" if named == "auto" else named

  def with_auto_dtype(self, dtype: Dtype) -> "ModelConfig":
    """Returns the config with a dtype in the place of "auto"."""
    if self.compute.dtype != "auto":
      return self
    compute = dataclasses.replace(self.compute, dtype=dtype)
    return dataclasses.replace(self, compute=compute)

  @property
  def norms_heads_at_once(self) -> bool:
    """Returns whether a norm of queries or keys is over all of their heads."""
    return self.architecture in ("olmo", "olmoe")

  @property
  def norms_input(self) -> bool:
    """Returns whether layers norm what reads the residual stream."""
    return self.architecture != "olmo"

  @property
  def norms_output(self) -> bool:
    """Returns whether layers norm what is added to the residual stream."""
    return self.architecture in ("gemma", "olmo")

  @property
  def norm_offset(self) -> float:
    """The number that the scales of norms count from."""
    return 1.0 if self.architecture == "gemma" else 0.0

  @property
  def expert_dtype(self) -> np.dtype:
    """The smallest integers for recorded experts, and for -1 where unknown."""
    return np.min_scalar_type(-max(self.num_experts, 1))

  @property
  def remat(self) -> Remat:
    """`compute.remat`, or the one for this size where that is None."""
    if self.compute.remat is not None:
      return self.compute.remat
    return "layer" if self._num_weights > _LARGE else "none"

  @property
  def _num_weights(self) -> int:
    """Number of entries of all matrices."""
    heads = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
    dense = 3 * self.d_ff
    sparse = self.num_experts * (3 * self.d_expert + 1)
    num_dense = self.num_layers - self.num_sparse
    tables = self.vocab_size * (1 if self.tie_embeddings else 2)
    layers = self.num_layers * heads + num_dense * dense
    return self.d_model * (tables + layers + self.num_sparse * sparse)

  def validate(self) -> None:
    """Raises ValueError for sizes that cannot work."""
    for problem in self._problems():
      raise ValueError(f"model.{problem}")

  def _problems(self) -> Iterator[str]:
    for field in dataclasses.fields(self):
      name, value = field.name, getattr(self, field.name)
      least = 0 if name == "num_experts" else 1
      if field.type is int and value < least:
        yield f"{name}={value} must be at least {least}"
      most = _MAX_LAYERS if name == "num_layers" else _MAX_SIZE
      if field.type is int and value > most:
        yield f"{name}={value} must be at most {most}"
      if field.type is float and not 0 < value < math.inf:
        out = f"use {field.default} unless the weights were trained otherwise"
        yield f"{name}={value} must be a finite number above 0; {out}"
    heads, groups = self.num_heads, self.num_kv_heads
    if heads % groups:
      out = f"num_kv_heads={groups}; use {(heads // groups + 1) * groups}"
      yield f"num_heads={heads} does not split over {out}"
    if (width := self.head_dim) % 2:
      out = f"rotary positions turn pairs; use {width + 1}"
      yield f"head_dim={width} is odd, and {out}"
    if self.rope_theta <= 1:
      out = "every pair would turn as fast; use 10000 or more"
      yield f"rope_theta={self.rope_theta} is not above 1, and {out}"
    chosen, experts = self.experts_per_token, self.num_experts
    if experts and chosen > experts:
      out = f"use {experts} or fewer"
      yield f"experts_per_token={chosen} is above num_experts={experts}; {out}"
    why = "no published family has both, so it could not be exported"
    if experts and not self.qk_norm:
      yield f"qk_norm=false with num_experts={experts}: {why}; use one of them"
    if self.qkv_bias and self.qk_norm:
      yield f"qkv_bias=true with qk_norm=true: {why}; use one of them"
    named = f"architecture={self.architecture}"
    if self.norms_output and (experts or not self.qk_norm):
      wrong = "qk_norm=false" if not self.qk_norm else f"num_experts={experts}"
      out = "use qk_norm=true and num_experts=0"
      yield f"{named} with {wrong}: {why}; {out}"
    if self.architecture == "olmoe":
      of_olmoe = {
        "num_experts": (experts, experts or ModelConfig.num_experts),
        "dense_layers": (self.dense_layers, ()),
        "qk_norm": (self.qk_norm, True),
        "window": (self.window, None),
        "head_dim": (self.head_dim, self.d_model // heads),
      }
      for name, (found, wanted) in of_olmoe.items():
        if found != wanted:
          out = f"use {name}={wanted}"
          yield f"{name}={found} with {named}: no published OLMoE has it; {out}"
    if (window := self.window) is not None and not self.norms_output:
      of_mistral = {
        "qk_norm": (self.qk_norm, False),
        "qkv_bias": (self.qkv_bias, False),
        "num_experts": (experts, 0),
        "window.full_every": (window.full_every, 0),
        "window.rope_theta": (window.rope_theta, None),
      }
      for name, (found, wanted) in of_mistral.items():
        if found != wanted:
          why = "with a window: no published family but Gemma and OLMo has both"
          out = f"use {name}={str(wanted).lower()}, as in Mistral 7B"
          yield f"{name}={str(found).lower()} {why}; {out}"
    near = None if window is None else window.rope_theta
    scales = window is not None and self.rope_scaling is not None
    if scales and self.norms_output and near is None:
      why = "with rope_scaling, which layers with a window never have"
      out = f"use window.rope_theta={self.rope_theta}"
      yield f"window.rope_theta=none {why}; {out}"
    if window is not None and self.architecture == "olmo":
      for name, theta in (("", self.rope_theta), ("window.", near)):
        if theta not in (None, _OLMO_THETA):
          why = "no published OLMo with a window has another, and files of"
          why += f" transformers cannot tell; use {_OLMO_THETA}"
          yield f"{name}rope_theta={theta} with {named}: {why}"
    scalar = self.query_pre_attn_scalar
    if scalar is not None and (scalar < 1 or self.architecture != "gemma"):
      why = "is for architecture=gemma, and above 0"
      yield f"query_pre_attn_scalar={scalar} {why}; use none"
    for layer in self.dense_layers:
      if not 0 <= layer < self.num_layers:
        bound = f"names layer {layer}, but they are 0 to {self.num_layers - 1}"
        yield f"dense_layers={self.dense_layers} {bound}"
    targets = self.lora.targets if self.lora else ()
    for name in targets if self.tie_embeddings else ():
      if name in ("embed", "head"):
        both = "which tie_embeddings=true makes both embedding and head"
        yield f"lora.targets names {name!r}, {both}; leave it out"
    if "router" in targets and not self.num_sparse:
      why = f"no layer has one with num_experts={experts}"
      yield f"lora.targets names 'router', but {why}; leave it out"


def qwen2_5(size: str, **overrides: Any) -> ModelConfig:
  """Returns a published Qwen2.5-Instruct, overridden.

  The base models, and those for mathematics, have another max_length.

  Args:
    size: 0.5b, 1.5b, 3b, 7b, 14b, 32b or 72b.

  Source: arXiv 2412.15115, table 1, and config.json of
  Qwen/Qwen2.5-0.5B-Instruct, ...
  """
  return _published("Qwen2.5", _QWEN2_5, size, overrides)


def qwen3(size: str, **overrides: Any) -> ModelConfig:
  """Returns a published dense Qwen3, overridden.

  The releases of July 2025 have other values of rope_theta and max_length.

  Args:
    size: 0.6b, 1.7b, 4b, 8b, 14b or 32b.

  Source: arXiv 2505.09388, table 1, and config.json of Qwen/Qwen3-0.6B, ...
  """
  return _published("Qwen3", _QWEN3, size, overrides)


def qwen3_moe(size: str, **overrides: Any) -> ModelConfig:
  """Returns a published Qwen3-MoE, overridden.

  Args:
    size: 30b-a3b, 235b-a22b, or Qwen3-Coder's 480b-a35b.

  Source: arXiv 2505.09388, table 2, and config.json of Qwen/Qwen3-30B-A3B,
  Qwen/Qwen3-235B-A22B and Qwen/Qwen3-Coder-480B-A35B-Instruct.
  """
  return _published("Qwen3-MoE", _QWEN3_MOE, size, overrides)


def llama3(size: str, **overrides: Any) -> ModelConfig:
  """Returns a published Llama 3.1 or 3.2 of text, overridden.

  Args:
    size: 3.2-1b, 3.2-3b, 3.1-8b or 3.1-70b.

  Source: arXiv 2407.21783, table 3, and config.json of
  meta-llama/Llama-3.2-1B, ...
  """
  return _published("Llama 3", _LLAMA3, size, overrides)


def gemma3(size: str, **overrides: Any) -> ModelConfig:
  """Returns the text decoder of a published Gemma 3, overridden.

  Args:
    size: 270m, 1b, 4b, 12b or 27b; those from 4b on come with a model of
      images, which is left out.

  Source: arXiv 2503.19786, table 1, and config.json of google/gemma-3-1b-it,
  ...
  """
  return _published("Gemma 3", _GEMMA3, size, overrides)


def olmo2(size: str, **overrides: Any) -> ModelConfig:
  """Returns a published OLMo 2, overridden.

  Args:
    size: 1b, 7b, 13b or 32b.

  Source: arXiv 2501.00656, table 1, and config.json of
  allenai/OLMo-2-0425-1B, ...
  """
  return _published("OLMo 2", _OLMO2, size, overrides)


def olmo3(size: str, **overrides: Any) -> ModelConfig:
  """Returns a published OLMo 3, overridden.

  Args:
    size: 7b or 32b.

  Source: arXiv 2512.13961, section 3.2, and config.json of
  allenai/Olmo-3-7B-Instruct, ...
  """
  return _published("OLMo 3", _OLMO3, size, overrides)


def olmoe(size: str, **overrides: Any) -> ModelConfig:
  """Returns a published OLMoE, overridden.

  Args:
    size: 1b-7b, of which a token uses 1.3 billion parameters.

  Source: arXiv 2409.02060, table 1, and config.json of
  allenai/OLMoE-1B-7B-0924.
  """
  return _published("OLMoE", _OLMOE, size, overrides)


def tiny(**overrides: Any) -> ModelConfig:
  """Returns a dense model small enough to train on a CPU, overridden."""
  return dataclasses.replace(ModelConfig(num_experts=0), **overrides)


def tiny_moe(**overrides: Any) -> ModelConfig:
  """Returns the default sizes, small enough to train on a CPU, overridden."""
  return dataclasses.replace(ModelConfig(), **overrides)


def axis_sizes(config: ModelConfig, *, sparse: bool) -> dict[str, int]:
  """Returns the size of each logical axis, but of "norm", which has several.

  Args:
    sparse: in a layer with experts, whose "mlp" is that of one expert.
  """
  return {
    "vocab": config.vocab_size,
    "embed": config.d_model,
    "heads": config.num_heads,
    "kv_heads": config.num_kv_heads,
    "head_dim": config.head_dim,
    "experts": config.num_experts,
    "router": config.num_experts,
    "mlp": config.d_expert if sparse else config.d_ff,
    "rank": config.lora.rank if config.lora else 0,
  }


def _published(
  family: str,
  sizes: Mapping[str, Mapping[str, Any]],
  size: str,
  overrides: Mapping[str, Any],
) -> ModelConfig:
  if size not in sizes:
    raise ValueError(
      f"{family} does not come in size {size!r}; use {', '.join(sizes)}"
    )
  return ModelConfig(**{**_SAME, **sizes[size], **overrides})


def _dense(
  num_layers: int, d_model: int, heads: tuple[int, int], d_ff: int, tied: bool
) -> dict[str, Any]:
  return {
    "num_layers": num_layers,
    "d_model": d_model,
    "num_heads": heads[0],
    "num_kv_heads": heads[1],
    "d_ff": d_ff,
    "num_experts": 0,
    "tie_embeddings": tied,
  }


def _sparse(
  num_layers: int,
  d_model: int,
  heads: tuple[int, int],
  d_ff: int,
  d_expert: int,
  num_experts: int,
) -> dict[str, Any]:
  return _dense(num_layers, d_model, heads, d_ff, False) | {
    "d_expert": d_expert,
    "num_experts": num_experts,
    "experts_per_token": 8,
  }


_SAME = {
  "vocab_size": 151_936,
  "head_dim": 128,
  "max_length": 40_960,
  "rope_theta": 1e6,
  "norm_eps": 1e-6,
  "norm_topk_prob": True,
  "compute": Compute(dtype="bfloat16"),
}


def _llama(
  factor: float, head_dim: int, dense: dict[str, Any]
) -> dict[str, Any]:
  return dense | {
    "vocab_size": 128_256,
    "head_dim": head_dim,
    "max_length": 131_072,
    "rope_theta": 5e5,
    "rope_scaling": rope.Llama3(factor=factor, original_max_length=8192),
    "norm_eps": 1e-5,
    "qk_norm": False,
  }


def _qwen2_5(dense: dict[str, Any]) -> dict[str, Any]:
  is_small, d_model = dense["tie_embeddings"], dense["d_model"]
  return dense | {
    "vocab_size": 151_936 if is_small else 152_064,
    "head_dim": d_model // dense["num_heads"],
    "max_length": 32_768,
    "qk_norm": False,
    "qkv_bias": True,
  }


def _gemma3(
  window: int, head_dim: int, dense: dict[str, Any]
) -> dict[str, Any]:
  is_small = window == 512
  return dense | {
    "vocab_size": 262_144 if is_small else 262_208,
    "head_dim": head_dim,
    "max_length": 32_768 if is_small else 131_072,
    "rope_scaling": None if is_small else rope.Linear(factor=8.0),
    "architecture": "gemma",
    "window": Window(size=window, full_every=6, rope_theta=10_000.0),
  }


def _olmo2(dense: dict[str, Any]) -> dict[str, Any]:
  return dense | {
    "vocab_size": 100_352,
    "head_dim": 128,
    "max_length": 4096,
    "rope_theta": _OLMO_THETA,
    "architecture": "olmo",
  }


def _olmo3(dense: dict[str, Any]) -> dict[str, Any]:
  return _olmo2(dense) | {
    "vocab_size": 100_278,
    "max_length": 65_536,
    "rope_scaling": rope.Yarn(
      factor=8.0, original_max_length=8192, attention_factor=1.2079441541679836
    ),
    "window": Window(size=4096, full_every=4, rope_theta=_OLMO_THETA),
  }


_QWEN2_5 = {
  "0.5b": _qwen2_5(_dense(24, 896, (14, 2), 4864, True)),
  "1.5b": _qwen2_5(_dense(28, 1536, (12, 2), 8960, True)),
  "3b": _qwen2_5(_dense(36, 2048, (16, 2), 11_008, True)),
  "7b": _qwen2_5(_dense(28, 3584, (28, 4), 18_944, False)),
  "14b": _qwen2_5(_dense(48, 5120, (40, 8), 13_824, False)),
  "32b": _qwen2_5(_dense(64, 5120, (40, 8), 27_648, False)),
  "72b": _qwen2_5(_dense(80, 8192, (64, 8), 29_568, False)),
}

_QWEN3 = {
  "0.6b": _dense(28, 1024, (16, 8), 3072, True),
  "1.7b": _dense(28, 2048, (16, 8), 6144, True),
  "4b": _dense(36, 2560, (32, 8), 9728, True),
  "8b": _dense(36, 4096, (32, 8), 12_288, False),
  "14b": _dense(40, 5120, (40, 8), 17_408, False),
  "32b": _dense(64, 5120, (64, 8), 25_600, False),
}

_QWEN3_MOE = {
  "30b-a3b": _sparse(48, 2048, (32, 4), 6144, 768, 128),
  "235b-a22b": _sparse(94, 4096, (64, 4), 12_288, 1536, 128),
  "480b-a35b": _sparse(62, 6144, (96, 8), 8192, 2560, 160)
  | {"rope_theta": 1e7, "max_length": 262_144},
}

_LLAMA3 = {
  "3.2-1b": _llama(32.0, 64, _dense(16, 2048, (32, 8), 8192, True)),
  "3.2-3b": _llama(32.0, 128, _dense(28, 3072, (24, 8), 8192, True)),
  "3.1-8b": _llama(8.0, 128, _dense(32, 4096, (32, 8), 14_336, False)),
  "3.1-70b": _llama(8.0, 128, _dense(80, 8192, (64, 8), 28_672, False)),
}

_GEMMA3 = {
  "270m": _gemma3(512, 256, _dense(18, 640, (4, 1), 2048, True)),
  "1b": _gemma3(512, 256, _dense(26, 1152, (4, 1), 6912, True)),
  "4b": _gemma3(1024, 256, _dense(34, 2560, (8, 4), 10_240, True)),
  "12b": _gemma3(1024, 256, _dense(48, 3840, (16, 8), 15_360, True)),
  "27b": _gemma3(1024, 128, _dense(62, 5376, (32, 16), 21_504, True))
  | {"query_pre_attn_scalar": 168},
}

_OLMO2 = {
  "1b": _olmo2(_dense(16, 2048, (16, 16), 8192, False)),
  "7b": _olmo2(_dense(32, 4096, (32, 32), 11_008, False)),
  "13b": _olmo2(_dense(40, 5120, (40, 40), 13_824, False)),
  "32b": _olmo2(_dense(64, 5120, (40, 8), 27_648, False)),
}

_OLMO3 = {
  "7b": _olmo3(_dense(32, 4096, (32, 32), 11_008, False)),
  "32b": _olmo3(_dense(64, 5120, (40, 8), 27_648, False)),
}

_OLMOE = {
  "1b-7b": _sparse(16, 2048, (16, 16), 1024, 1024, 64)
  | {
    "vocab_size": 50_304,
    "max_length": 4096,
    "rope_theta": 1e4,
    "norm_eps": 1e-5,
    "norm_topk_prob": False,
    "architecture": "olmoe",
  },
}
