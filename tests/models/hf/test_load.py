"""Reading a checkpoint: where numbers go, what is read, what is refused."""

import dataclasses
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from models import config as config_lib
from models import layer_stack, sharding
from models import policy as policy_lib
from models.hf import (
  export,
  load,
  parameter_names,
  safetensors_io,
  tokenizer_files,
)
from tests.helpers import small_models

pytestmark = pytest.mark.compiled

CONFIG, CHAT = small_models.CONFIG, small_models.CHAT
TIED = dataclasses.replace(CONFIG, tie_embeddings=True)


def as_bfloat16(config):
  compute = dataclasses.replace(config.compute, dtype="bfloat16")
  return dataclasses.replace(config, compute=compute)


def mesh(data=2, expert=2, tensor=2):
  return sharding.make_mesh(data, expert, tensor)


def random_params(config, seed=0):
  rng = np.random.default_rng(seed)
  shapes = jax.eval_shape(lambda: policy_lib.of(config).init(jax.random.key(0)))
  return jax.tree.map(
    lambda x: jax.numpy.asarray(rng.normal(size=x.shape), x.dtype), shapes
  )


@pytest.fixture
def directory(tmp_path):
  """A checkpoint in one file, with a tokenizer."""
  export.export(tmp_path / "hf", random_params(CONFIG), CONFIG, CHAT)
  return tmp_path / "hf"


@pytest.fixture
def several(tmp_path):
  """The same in several files."""
  params = random_params(CONFIG)
  export.export(tmp_path / "hfs", params, CONFIG, max_file_bytes=2000)
  return tmp_path / "hfs"


def rewrite(directory, change, file="model.safetensors"):
  """Writes a file again after `change` to its dict of tensors."""
  tensors = safetensors.numpy.load_file(directory / file)
  change(tensors)
  safetensors.numpy.save_file(tensors, directory / file)


def refusal(directory, config=CONFIG):
  with pytest.raises(load.Unusable) as caught:
    load.load(directory, config)
  message = str(caught.value)
  assert message.startswith(f"{directory} cannot be loaded:\n")
  return message


@pytest.mark.parametrize("layout", [None, "mesh"])
def test_every_number_goes_where_the_formulas_of_the_model_want_it(
  directory, layout
):
  def number(tensors):
    for tensor in tensors.values():
      tensor[...] = np.arange(tensor.size).reshape(tensor.shape)
    expert = tensors["model.layers.1.mlp.experts.3.down_proj.weight"]
    expert += 1000

  rewrite(directory, number)
  layout = layout and sharding.Layout(mesh())
  params = load.load(directory, CONFIG, layout)
  # A matrix [out, in] holds out * width_in + in; D = 8, H = 4, K = 2, d = 4.
  first, second = params["layers"].values()
  attention = first["attention"]
  # query[D=5, H=2, d=3] is at row 2 * 4 + 3 = 11, column 5: 11 * 8 + 5.
  assert attention["query"].shape == (8, 4, 4)
  assert attention["query"][5, 2, 3] == 93
  # value[D=7, K=1, d=0]: row 4, column 7: 4 * 8 + 7.
  assert attention["value"][7, 1, 0] == 39
  # out[H=2, d=3, D=5]: row 5, column 11: 5 * 16 + 11.
  assert attention["out"].shape == (4, 4, 8)
  assert attention["out"][2, 3, 5] == 91
  # gate[D=3, F=5]: 5 * 8 + 3. down[F=5, D=3]: 3 * 6 + 5.
  assert first["mlp"]["gate"][3, 5] == 43
  assert first["mlp"]["down"][5, 3] == 23
  # router[D=3, E=2]: 2 * 8 + 3. down[E=3, F=9, D=2]: 1000 + 2 * 10 + 9.
  assert second["moe"]["router"]["kernel"][3, 2] == 19
  assert second["moe"]["down"][3, 9, 2] == 1029
  # embed[V=15, D=3]: 15 * 8 + 3, and so is the head, turned.
  assert params["embed"][15, 3] == 123
  assert params["head"][3, 15] == 123
  assert second["attention"]["key_norm"][2] == 2


def test_arrays_lie_where_the_layout_says(directory):
  layout = sharding.Layout(mesh())
  params = load.load(directory, CONFIG, layout)
  wanted = layout.tree(policy_lib.of(CONFIG).axes)
  assert jax.tree.map(lambda x: x.sharding, params) == wanted


def test_a_checkpoint_is_cast_to_the_type_of_the_config(directory):
  stored = {}
  rewrite(directory, stored.update)
  params = load.load(directory, as_bfloat16(CONFIG))
  # numpy rounds to the nearest even, as XLA does.
  up = stored["model.layers.0.mlp.up_proj.weight"].T.astype(ml_dtypes.bfloat16)
  assert params["layers"][0]["mlp"]["up"].dtype == "bfloat16"
  assert np.asarray(params["layers"][0]["mlp"]["up"]).tobytes() == up.tobytes()


def test_numbers_of_other_widths_are_read_too(directory):
  rewrite(
    directory,
    lambda tensors: tensors.update(
      {
        "model.norm.weight": np.full(8, 0.5, np.float64),
        "lm_head.weight": np.full((16, 8), 0.25, np.float16),
        # An expert of another type than the rest of its stack.
        "model.layers.1.mlp.experts.0.up_proj.weight": np.full(
          (10, 8), 2, ml_dtypes.bfloat16
        ),
      }
    ),
  )
  params = load.load(directory, CONFIG)
  assert set(np.ravel(params["final_norm"])) == {0.5}
  assert set(np.ravel(params["head"])) == {0.25}
  assert set(np.ravel(params["layers"][1]["moe"]["up"][0])) == {2}
  whole = random_params(CONFIG)["layers"][1]["moe"]["up"]
  assert np.array_equal(params["layers"][1]["moe"]["up"][1:], whole[1:])


@pytest.mark.parametrize(
  "rules", [sharding.TRAIN, sharding.DECODE], ids=["split", "copied"]
)
def test_one_host_reads_every_byte_once_however_many_devices_keep_it(
  several, rules
):
  total = sum(x.nbytes for x in jax.tree.leaves(random_params(CONFIG)))
  with safetensors_io.TensorFiles(several) as files:
    load.place(files, CONFIG, sharding.Layout(mesh(), rules))
    assert files.bytes_read == total


def test_the_host_never_holds_more_than_a_tensor_and_a_shard(tmp_path):
  # 16 layers of 4 experts of 64 x 256 floats: 768 KiB a layer, 12 MiB in all.
  config = config_lib.tiny_moe(
    num_layers=16, d_model=64, d_expert=256, num_heads=2, vocab_size=64
  )
  params = random_params(config)
  total = sum(x.nbytes for x in jax.tree.leaves(params))
  layers = layer_stack.unstack(params, config)
  largest = max(x.nbytes for x in jax.tree.leaves(layers))
  assert total > 12 << 20
  assert largest == 4 * 64 * 256 * 4
  export.export(tmp_path / "hf", params, config)
  layout = sharding.Layout(mesh(1, 2, 1))
  load.load(tmp_path / "hf", config, layout)
  tracemalloc.start()
  load.load(tmp_path / "hf", config, layout)
  _, peak = tracemalloc.get_traced_memory()
  tracemalloc.stop()
  # Numpy's memory is traced. A shard of the largest leaf is half of it, made
  # of slices of one expert, a quarter; the rest is what jax traces.
  assert peak < largest // 2 + largest // 4 + (2 << 20)


def test_a_stored_head_may_repeat_the_embedding_to_which_it_is_tied(tmp_path):
  params = random_params(TIED)
  export.export(tmp_path / "hf", params, TIED)
  rewrite(
    tmp_path / "hf",
    lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}),
  )
  for layout in (None, sharding.Layout(mesh())):
    told = []
    loaded = load.load(tmp_path / "hf", TIED, layout, told.append)
    assert np.array_equal(loaded["embed"], params["embed"])
    # The head is no parameter of its own.
    total = len(jax.tree.leaves(parameter_names.entries(TIED)))
    counts = [f"loading the weights {i + 1}/{total}" for i in range(total)]
    assert told == [*counts, counts[-1]]

  def differ(tensors):
    tensors["lm_head.weight"][3, 5] += 1

  rewrite(tmp_path / "hf", differ)
  message = refusal(tmp_path / "hf", TIED)
  assert "lm_head.weight differs from model.embed_tokens.weight" in message


def test_everything_that_is_wrong_with_tensors_is_told_at_once(directory):
  def spoil(tensors):
    del tensors["model.norm.weight"]
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    tensors["model.layers.7.mlp.up_proj.weight"] = np.ones((2, 2), np.float32)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].T.copy()
    name = "model.layers.0.mlp.gate_proj.weight"
    tensors[name] = tensors[name].astype(np.int8)

  rewrite(directory, spoil)
  message = refusal(directory)
  assert (
    "missing tensors (2): model.layers.1.mlp.experts.2.up_proj.weight, "
    "model.norm.weight\n"
  ) in message
  assert "extra tensors (1): model.layers.7.mlp.up_proj.weight\n" in message
  assert (
    "misshaped tensors (1): lm_head.weight is [8, 16] instead of [16, 8]\n"
  ) in message
  assert (
    "other types than floats; quantised weights are not read (1): "
    "model.layers.0.mlp.gate_proj.weight is I8"
  ) in message
  # The same before any device is touched.
  with pytest.raises(load.Unusable, match="missing tensors"):
    load.check(directory, CONFIG)


def test_long_lists_are_cut_and_counted(directory):
  rewrite(
    directory,
    lambda t: [t.pop(name) for name in list(t) if ".layers.1." in name],
  )
  # 8 of attention and norms, the router, and 3 of each of 4 experts.
  assert "missing tensors (21): model.layers.1.input" in refusal(directory)
  assert " and 11 more" in refusal(directory)


def test_buffers_of_old_checkpoints_are_no_extra_tensors(directory):
  name = "model.layers.0.self_attn.rotary_emb.inv_freq"
  rewrite(directory, lambda t: t.update({name: np.ones(2, np.float32)}))
  load.load(directory, CONFIG)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("layout", [None, "mesh"])
def test_weights_that_are_no_numbers_are_named(directory, bad, layout):
  names = (
    "model.layers.0.self_attn.o_proj.weight",
    "model.layers.1.mlp.experts.3.gate_proj.weight",
  )

  def spoil(tensors):
    for name in names:
      tensors[name][1, 2] = bad

  rewrite(directory, spoil)
  load.check(directory, CONFIG)
  layout = layout and sharding.Layout(mesh())
  with pytest.raises(load.Unusable) as caught:
    load.load(directory, CONFIG, layout)
  listing = ", ".join(names)
  assert f"NaN or infinity in 2 tensors: {listing}" in str(caught.value)


def test_damage_is_told_without_listing_what_the_files_would_hold(
  directory, several
):
  file = directory / "model.safetensors"
  file.write_bytes(file.read_bytes()[:-4])
  message = refusal(directory)
  assert "bytes) is damaged or cut short" in message
  assert "missing" not in message
  file = sorted(several.glob("*.safetensors"))[1]
  file.unlink()
  message = refusal(several)
  assert f"{file.name} does not exist" in message
  assert "missing tensors" not in message


def test_a_directory_without_a_checkpoint_says_what_it_lacks(
  directory, tmp_path
):
  assert "the directory does not exist" in refusal(tmp_path / "nothing")
  (directory / "model.safetensors").unlink()
  message = refusal(directory)
  assert (
    "it holds no model.safetensors and no model.safetensors.index.json"
    in message
  )
  assert "missing tensors" not in message
  (directory / "config.json").unlink()
  assert "it holds no config.json" in refusal(directory)


def test_what_is_no_directory_of_weights_says_what_might_be_meant(
  directory, tmp_path, monkeypatch
):
  file = directory / "config.json"
  assert (
    f"it is a file; name the directory that holds it, {directory}"
  ) in refusal(file)
  monkeypatch.chdir(tmp_path)
  message = refusal("Qwen/Qwen3-0.6B")
  assert (
    f"the directory does not exist in {tmp_path}; if this is the name of a "
    "published" in message
  )
  assert "published" not in refusal(tmp_path / "Qwen" / "Qwen3-0.6B")
  adapter = tmp_path / "adapter"
  adapter.mkdir()
  (adapter / "adapter_config.json").write_text("{}")
  message = refusal(adapter)
  assert "an adapter alone; merge it into its model" in message
  assert "config.json\n" not in message
  # Weights may well lie beside an adapter.
  (directory / "adapter_config.json").write_text("{}")
  load.check(directory, CONFIG)


@pytest.mark.parametrize(
  ("change", "reason"),
  [
    ({"rope_theta": 5e5}, "model.rope_theta=500000.0, but config.json has 1"),
    ({"norm_eps": 1e-5}, "model.norm_eps=1e-05, but config.json has 1e-06"),
    ({"experts_per_token": 1}, "model.experts_per_token=1, but config.json"),
    ({"max_length": 65}, "model.max_length=65 is above the 64 of config.json"),
    ({"norm_topk_prob": False}, "model.norm_topk_prob=False, but config.json"),
  ],
)
def test_a_config_that_computes_something_else_is_refused(
  directory, change, reason
):
  message = refusal(directory, dataclasses.replace(CONFIG, **change))
  assert reason in message


class Words(nnx.Module):
  """A policy of one table, with a name of its own."""

  def __init__(self, config, key):
    shape = config.vocab_size, config.d_model
    self.words = sharding.parameter(
      jax.random.normal(key, shape), ("vocab", "embed")
    )


def test_a_policy_of_other_parameters_has_no_checkpoint(directory, tmp_path):
  other = dataclasses.replace(CONFIG, policy=Words)
  assert "model.policy has the parameter 'words'" in refusal(directory, other)
  with pytest.raises(load.Unusable, match=r"use model\.policy=none"):
    load.check(directory, other)
  with pytest.raises(ValueError, match="has the parameter 'words'"):
    export.export(tmp_path / "other", {}, other)
  assert not (tmp_path / "other").exists()


def test_a_shorter_context_and_another_way_to_compute_are_fine(directory):
  compute = config_lib.Compute(remat="layer", moe_block=4)
  load.check(
    directory, dataclasses.replace(CONFIG, max_length=8, compute=compute)
  )


def test_sizes_of_what_a_dense_model_lacks_do_not_matter(tmp_path):
  config = dataclasses.replace(CONFIG, num_experts=0, dense_layers=())
  export.export(tmp_path / "hf", random_params(config), config)
  load.check(
    tmp_path / "hf",
    dataclasses.replace(config, d_expert=3, experts_per_token=1),
  )


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path):
  # Two words and three special tokens, and a model of 4 ids.
  config = dataclasses.replace(CONFIG, vocab_size=4)
  export.export(tmp_path / "hf", random_params(config), config)
  tokenizer_files.write(CHAT, tmp_path / "hf")
  message = refusal(tmp_path / "hf", config)
  assert "tokenizer.json has 5 ids, but model.vocab_size=4" in message
  (tmp_path / "hf" / "tokenizer.json").write_text("{}")
  assert "tokenizer.json cannot be read as a tokenizer" in refusal(
    tmp_path / "hf", config
  )
