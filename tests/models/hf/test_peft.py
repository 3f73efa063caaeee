"""Adapters in PEFT's layout: what the files say, the way back, and errors."""

import dataclasses
import json
from typing import Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from models import config as config_lib
from models import lora, sharding
from models import policy as policy_lib
from models.hf import load, peft

pytestmark = pytest.mark.compiled

LINEAR = lora.Lora(
  rank=2, alpha=3.0, targets=(*lora.TARGETS[:7], "embed", "head")
)
EVERYWHERE = lora.Lora(rank=2, alpha=3.0, targets=lora.TARGETS)
PREFIX = "base_model.model.model.layers"


def model(
  num_experts: int = 4,
  settings: lora.Lora | None = EVERYWHERE,
  dtype: Literal["float32", "bfloat16"] = "float32",
):
  """Three layers, of which the middle one is dense in any case."""
  config = config_lib.tiny_moe(
    num_experts=num_experts,
    vocab_size=16,
    num_layers=3,
    dense_layers=(1,),
    d_model=16,
    head_dim=4,
    d_ff=8,
    d_expert=12,
    tie_embeddings=False,
    lora=settings,
    compute=config_lib.Compute(dtype=dtype),
  )
  config.validate()
  return config


def noisy(config):
  rng = np.random.default_rng(0)
  shapes = policy_lib.of(config).shapes
  return jax.tree.map(
    lambda leaf: jnp.asarray(rng.normal(0, 0.3, leaf.shape), leaf.dtype), shapes
  )


def exported(directory, config):
  """Returns the parameters, adapter_config.json and the tensors."""
  params = noisy(config)
  peft.export(directory, params, config, base="some/base")
  settings = json.loads((directory / "adapter_config.json").read_text())
  file = directory / "adapter_model.safetensors"
  return params, settings, safetensors.numpy.load_file(file)


def rewrite(directory, change):
  """Applies `change` to the tensors of a directory."""
  file = directory / "adapter_model.safetensors"
  tensors = safetensors.numpy.load_file(file)
  change(tensors)
  safetensors.numpy.save_file(tensors, file)


def configure(directory, **changes):
  file = directory / "adapter_config.json"
  file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def same(actual, expected):
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_a_linear_layer_has_two_matrices_as_torch_stores_them(tmp_path):
  config = model(num_experts=0, settings=LINEAR)
  params, settings, tensors = exported(tmp_path / "adapter", config)
  assert settings["peft_type"] == "LORA"
  assert (settings["r"], settings["lora_alpha"]) == (2, 3)
  assert settings["base_model_name_or_path"] == "some/base"
  assert settings["target_parameters"] is None
  assert settings["rank_pattern"] == {}
  assert settings["target_modules"] == [
    *("down_proj", "embed_tokens", "gate_proj", "k_proj", "lm_head", "o_proj"),
    *("q_proj", "up_proj", "v_proj"),
  ]
  # [out, in] = scale * B A of a module is what merging adds to its matrix.
  merged = lora.merge(params, config.lora)
  for module, ours, name, shape in (
    ("self_attn.q_proj", "attention", "query", (16, 16)),
    ("self_attn.o_proj", "attention", "out", (16, 16)),
    ("mlp.down_proj", "mlp", "down", (8, 16)),
  ):
    a, b = (tensors[f"{PREFIX}.2.{module}.lora_{k}.weight"] for k in "AB")
    before, after = (
      np.asarray(p["layers"][2][ours][name]).reshape(shape)
      for p in (params, merged)
    )
    # Both differences of sums in float32 around 1.
    np.testing.assert_allclose(1.5 * (b @ a).T, after - before, atol=1e-6)
  stem = "base_model.model.model.embed_tokens.lora_embedding_"
  a, b = (tensors[stem + k] for k in "AB")
  change = merged["embed"] - params["embed"]
  np.testing.assert_allclose(1.5 * (b @ a).T, change, atol=1e-6)


def test_experts_are_one_parameter_of_all(tmp_path):
  config = model()
  params, settings, tensors = exported(tmp_path / "adapter", config)
  assert settings["target_modules"] == [
    *("embed_tokens", "k_proj", "lm_head", "o_proj", "q_proj", "v_proj")
  ]
  assert settings["target_parameters"] == [
    *("mlp.down_proj.weight", "mlp.experts.down_proj"),
    *("mlp.experts.gate_up_proj", "mlp.gate.weight"),
    *("mlp.gate_proj.weight", "mlp.up_proj.weight"),
  ]
  assert settings["rank_pattern"] == {r".*\.gate_up_proj": 4}
  assert settings["alpha_pattern"] == {r".*\.gate_up_proj": 6}
  before = params["layers"][0]["moe"]
  after = lora.merge(params, config.lora)["layers"][0]["moe"]

  def change(stem):
    # PEFT 0.21, tuners/lora/layer.py, ParamWrapper.get_delta_weight; alpha /
    # rank is 3 / 2 = 6 / 4.
    a, b = (tensors[f"{stem}.lora_{k}.weight"] for k in "AB")
    a = a.reshape(4, -1, a.shape[-1])
    b = b.reshape(len(b), -1, 4)
    return 1.5 * np.einsum("ore,eri->eio", b, a)

  stem = f"{PREFIX}.0.mlp.experts"
  for theirs, names in (
    (change(f"{stem}.base_layer"), ("gate", "up")),
    (change(stem), ("down",)),
  ):
    ours = [after[name] - before[name] for name in names]
    np.testing.assert_allclose(theirs, np.concatenate(ours, 2), atol=1e-6)


@pytest.mark.parametrize(
  ("targets", "names"),
  [
    (("gate",), ["mlp.experts.gate_up_proj"]),
    (("up", "gate"), ["mlp.experts.gate_up_proj"]),
    (("down",), ["mlp.experts.down_proj"]),
  ],
)
def test_a_parameter_that_is_adapted_alone_needs_no_inner_wrapper(
  tmp_path, targets, names
):
  config = dataclasses.replace(
    model(settings=lora.Lora(rank=2, targets=targets)), dense_layers=()
  )
  params, settings, tensors = exported(tmp_path / "adapter", config)
  assert settings["target_parameters"] == names
  assert settings["rank_pattern"] == (
    {r".*\.gate_up_proj": 4} if len(targets) == 2 else {}
  )
  assert f"{PREFIX}.0.mlp.experts.lora_A.weight" in tensors
  # Of gate alone, the rows of up are zeros: two matrices of 12 rows.
  if targets == ("gate",):
    b = tensors[f"{PREFIX}.0.mlp.experts.lora_B.weight"]
    assert b.shape == (24, 2 * 4)
    assert not np.any(b[12:])
    assert np.all(b[:12])
  same(peft.load(tmp_path / "adapter", config), lora.split(params)[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_experts", [0, 4])
def test_loading_undoes_exporting_bit_for_bit(tmp_path, num_experts, dtype):
  settings = EVERYWHERE if num_experts else LINEAR
  config = model(num_experts, settings, dtype)
  params, _, tensors = exported(tmp_path / "adapter", config)
  assert {str(x.dtype) for x in tensors.values()} == {dtype}
  same(peft.load(tmp_path / "adapter", config), lora.split(params)[0])


def test_adapters_of_eight_devices_come_back_on_eight(tmp_path):
  config = model()
  layout = sharding.Layout(sharding.make_mesh(2, 2, 2))
  shardings = layout.tree(policy_lib.of(config).axes)
  params = jax.device_put(noisy(config), shardings)
  peft.export(tmp_path / "adapter", params, config)
  loaded = peft.load(tmp_path / "adapter", config, layout)
  adapters, base = lora.split(params)
  same(loaded, adapters)
  # The same specs, so that training goes on without a transfer.
  places = [jax.tree.map(lambda x: x.sharding, t) for t in (loaded, adapters)]
  assert places[0] == places[1]
  same(lora.join(loaded, base), params)


def test_an_adapter_is_read_in_the_dtype_of_the_model(tmp_path):
  config = model()
  params, _, _ = exported(tmp_path / "adapter", config)
  loaded = peft.load(tmp_path / "adapter", model(dtype="bfloat16"))
  expected, _ = lora.split(params)
  same(loaded, jax.tree.map(lambda x: x.astype(jnp.bfloat16), expected))


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"r": 16}, "r=16, but model.lora.rank is 2; use the same"),
    ({"lora_alpha": 32}, "lora_alpha=32, but model.lora.alpha is 3"),
    ({"use_rslora": True}, "use_rslora=True, which is not supported"),
    ({"bias": "all"}, "bias='all', which is not supported; use 'none'"),
    ({"peft_type": "LOHA"}, "peft_type='LOHA'"),
    ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]"),
    ({"rank_pattern": {}}, "rank_pattern={}, but these adapters have"),
    ({"alpha_pattern": {"q": 1}}, "alpha_pattern={'q': 1}"),
    (
      {"init_lora_weights": "pissa_niter_16"},
      "'pissa_niter_16', which may have changed the base; save it again by",
    ),
    ({"init_lora_weights": "olora"}, "'olora', which may have changed the"),
    (
      {"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4}},
      "'loftq', which may have changed the base",
    ),
    (
      {"use_mora": True},
      "use_mora=True, which is unknown and might change the result; if it does",
    ),
    ({"kasa_config": {"beta": 1e-4}}, "kasa_config={'beta': 0.0001}, which is"),
  ],
)
def test_an_adapter_of_another_kind_is_refused(tmp_path, changes, message):
  config = model()
  exported(tmp_path / "adapter", config)
  configure(tmp_path / "adapter", **changes)
  with pytest.raises(load.Unusable, match=message):
    peft.load(tmp_path / "adapter", config)


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "eva"])
def test_what_else_peft_writes_changes_nothing(tmp_path, init):
  # `LoraConfig().to_dict()` of PEFT 0.21, without what `export` writes.
  off = {
    name: None
    for name in (
      *("alora_invocation_tokens", "arrow_config", "corda_config"),
      *("eva_config", "exclude_modules", "kasa_config", "layer_replication"),
      *("layers_pattern", "layers_to_transform", "lora_ga_config"),
      *("megatron_config", "modules_to_save", "monteclora_config", "revision"),
      *("trainable_token_indices", "use_bdlora", "velora_config"),
    )
  }
  config = model()
  params, _, _ = exported(tmp_path / "adapter", config)
  configure(
    tmp_path / "adapter",
    **off,
    auto_mapping={"base_model_class": "Qwen3MoeForCausalLM"},
    ensure_weight_tying=False,
    init_lora_weights=init,
    loftq_config={},
    lora_bias=False,
    lora_dropout=0.05,
    megatron_core="megatron.core",
    peft_version="0.21.0",
    qalora_group_size=16,
    use_qalora=False,
  )
  same(peft.load(tmp_path / "adapter", config), lora.split(params)[0])


def lose(tensors):
  del tensors[f"{PREFIX}.0.self_attn.q_proj.lora_A.weight"]


def add(tensors):
  tensors[f"{PREFIX}.9.self_attn.q_proj.lora_A.weight"] = np.zeros((2, 16))


def widen(tensors):
  name = f"{PREFIX}.1.mlp.down_proj.lora_B.weight"
  tensors[name] = np.zeros((32, 2), np.float32)


def poison(tensors):
  tensors[f"{PREFIX}.2.mlp.gate.lora_B.weight"][0, 0] = np.nan


def share(tensors):
  tensors[f"{PREFIX}.2.mlp.experts.base_layer.lora_B.weight"][-1, 0] = 1


def quantise(tensors):
  name = "base_model.model.lm_head.lora_A.weight"
  tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lose, r"missing tensors \(1\): .*layers\.0\.self_attn\.q_proj\.lora_A"),
    (add, r"extra tensors \(1\): .*layers\.9\.self_attn\.q_proj\.lora_A"),
    (widen, r"down_proj\.lora_B\.weight is \[32, 2\] instead of \[16, 2\]"),
    (poison, r"NaN or infinity in .*layers\.2\.mlp\.gate\.lora_B"),
    (share, r"gate and up share factors.*layers\.2\.mlp\.experts\.base_layer"),
    (quantise, r"than floats.*lm_head\.lora_A\.weight is F8_E4M3"),
  ],
)
def test_tensors_that_do_not_fit_are_listed(tmp_path, change, message):
  config = model()
  exported(tmp_path / "adapter", config)
  rewrite(tmp_path / "adapter", change)
  with pytest.raises(load.Unusable, match=message):
    peft.load(tmp_path / "adapter", config)


def test_files_that_are_missing_or_broken_are_named(tmp_path):
  config = model()
  with pytest.raises(load.Unusable, match=r"adapter_config\.json"):
    peft.load(tmp_path / "nothing", config)
  exported(tmp_path / "adapter", config)
  file = tmp_path / "adapter" / "adapter_model.safetensors"
  file.write_bytes(file.read_bytes()[:-7])
  with pytest.raises(load.Unusable, match=r"adapter_model\.safetensors"):
    peft.load(tmp_path / "adapter", config)
  file.unlink()
  with pytest.raises(load.Unusable, match=r"adapter_model\.safetensors"):
    peft.load(tmp_path / "adapter", config)
  (tmp_path / "adapter" / "adapter_config.json").write_text("[")
  with pytest.raises(load.Unusable, match=r"adapter_config\.json"):
    peft.load(tmp_path / "adapter", config)


def test_loading_needs_the_settings_of_the_adapter(tmp_path):
  exported(tmp_path / "adapter", model())
  with pytest.raises(load.Unusable, match=r"model\.lora is None"):
    peft.load(tmp_path / "adapter", model(settings=None))


def test_exporting_refuses_what_is_no_adapter_of_the_config(tmp_path):
  config, bare = model(), model(settings=None)
  smaller = dataclasses.replace(config, lora=lora.Lora(rank=1))
  for params, wrong in (
    (noisy(bare), bare),
    (noisy(bare), config),
    (noisy(config), smaller),
  ):
    with pytest.raises(ValueError, match="no adapters, or not those of model"):
      peft.export(tmp_path / "adapter", params, wrong)
  assert not list(tmp_path.iterdir())
  (tmp_path / "there").mkdir()
  with pytest.raises(ValueError, match="there exists; remove it or choose"):
    peft.export(tmp_path / "there", noisy(config), config)
  with pytest.raises(ValueError, match=r"cannot be written: .*; choose"):
    peft.export("/dev/null/adapter", noisy(config), config)
