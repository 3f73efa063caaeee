"""Writing a checkpoint: round trips, files, and what is refused."""

import dataclasses
import json
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.numpy

from models import config as config_lib
from models import lora, rope, sharding
from models import policy as policy_lib
from models.chat import word_chat
from models.hf import config as hf_config
from models.hf import export, load, safetensors_io
from tests.helpers import small_models

pytestmark = pytest.mark.compiled

CONFIG, CHAT = small_models.CONFIG, small_models.CHAT


def sizes(dtype: Any = "float32", **changes):
  compute = config_lib.Compute(dtype=dtype)
  return dataclasses.replace(CONFIG, compute=compute, **changes)


def random_params(config):
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(lambda: policy_lib.of(config).init(jax.random.key(0)))
  return jax.tree.map(
    lambda x: jax.numpy.asarray(rng.normal(size=x.shape), x.dtype), shapes
  )


def on_mesh():
  return sharding.Layout(sharding.make_mesh(2, 2, 2))


def assert_bits_equal(one, other):
  assert jax.tree.structure(one) == jax.tree.structure(other)
  pairs = zip(
    jax.tree.leaves_with_path(one), jax.tree.leaves(other), strict=True
  )
  for (path, a), b in pairs:
    assert (a.shape, a.dtype) == (b.shape, b.dtype), path
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), path


SIZES: dict[str, Any] = {
  "moe": {},
  "moe tied": {"tie_embeddings": True},
  "dense": {"num_experts": 0, "dense_layers": ()},
  "dense tied": {
    **{"num_experts": 0, "dense_layers": ()},
    "tie_embeddings": True,
  },
  "biased": {
    **{"num_experts": 0, "dense_layers": ()},
    **{"qk_norm": False, "qkv_bias": True},
  },
  "gemma": {"num_experts": 0, "dense_layers": (), "architecture": "gemma"},
  "olmo": {"num_experts": 0, "dense_layers": (), "architecture": "olmo"},
  "olmoe": {"dense_layers": (), "architecture": "olmoe", "head_dim": 2},
}


@pytest.mark.parametrize(
  ("changes", "dtype"),
  [
    pytest.param(
      SIZES[name],
      dtype,
      id=f"{name}-{dtype}",
      # A dtype is that of all tensors, of whatever model.
      marks=[]
      if dtype == "float32" or name == "moe tied"
      else [pytest.mark.slow],
    )
    for name in SIZES
    for dtype in ("float32", "bfloat16")
  ],
)
def test_what_was_exported_is_loaded_bit_for_bit(dtype, changes, tmp_path):
  config = sizes(dtype, **changes)
  params = random_params(config)
  layout = on_mesh()
  axes = policy_lib.of(config).axes
  split = jax.device_put(params, layout.tree(axes))
  one, several = tmp_path / "one", tmp_path / "several"
  export.export(one, params, config)
  export.export(several, split, config, max_file_bytes=1000)
  assert len(list(one.glob("*.safetensors"))) == 1
  assert len(list(several.glob("*.safetensors"))) > 1
  # Each is read where it was not written.
  assert_bits_equal(load.load(one, config, layout), params)
  assert_bits_equal(load.load(several, config), params)
  read = hf_config.load(one)
  assert read.compute.dtype == dtype
  load.check(several, read)


def test_files_are_filled_in_order_and_indexed(tmp_path):
  config = sizes(num_experts=0, dense_layers=(), num_layers=1)
  params = random_params(config)
  told = []
  export.export(
    tmp_path / "hf", params, config, max_file_bytes=1000, report=told.append
  )
  index = json.loads(
    (tmp_path / "hf" / "model.safetensors.index.json").read_text()
  )
  files = sorted(path.name for path in (tmp_path / "hf").glob("*.safe*rs"))
  found = {}
  for number, name in enumerate(files, 1):
    assert name == f"model-{number:05}-of-{len(files):05}.safetensors"
    tensors = safetensors.numpy.load_file(tmp_path / "hf" / name)
    assert sum(tensor.nbytes for tensor in tensors.values()) <= 1000
    found |= dict.fromkeys(tensors, name)
  assert index["weight_map"] == found
  # 2 of 16 * 8 and 8 outside; in the layer 2 norms of 8 and 2 of 4, 2 of
  # 8 * 16, 2 of 8 * 8 and 3 of 8 * 6: 264 + 552 = 816 floats.
  assert index["metadata"]["total_size"] == 816 * 4
  # Embedding, head, norm, and 11 of the layer.
  assert told == [f"writing the weights {i + 1}/14" for i in range(14)]


def test_a_tensor_that_is_larger_than_a_file_may_be_has_its_own(tmp_path):
  config = sizes(num_experts=0, dense_layers=(), num_layers=1)
  params = random_params(config)
  export.export(tmp_path / "hf", params, config, max_file_bytes=1)
  # Embedding, head and norm; 2 norms, 6 of attention, 3 of the MLP.
  assert len(list((tmp_path / "hf").glob("*.safetensors"))) == 14
  assert_bits_equal(load.load(tmp_path / "hf", config), params)


def test_files_are_what_transformers_expects(tmp_path):
  config = sizes("bfloat16", rope_scaling=rope.Linear(factor=2.0))
  export.export(tmp_path / "hf", random_params(config), config, CHAT)
  assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == [
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
  ]
  data = json.loads((tmp_path / "hf" / "config.json").read_text())
  assert data["architectures"] == ["Qwen3MoeForCausalLM"]
  assert (data["eos_token_id"], data["pad_token_id"]) == (1, 0)
  with safetensors.safe_open(
    tmp_path / "hf" / "model.safetensors", "numpy"
  ) as file:
    assert file.metadata() == {"format": "pt"}
    shape = file.get_slice("model.layers.1.mlp.experts.3.up_proj.weight")
    assert shape.get_dtype() == "BF16"
    assert shape.get_shape() == [10, 8]


def test_a_checkpoints_own_tokenizer_goes_with_it(tmp_path):
  source, target = tmp_path / "source", tmp_path / "target"
  params = random_params(CONFIG)
  export.export(source, params, CONFIG, CHAT)
  (source / "chat_template.jinja").write_text("Its own: {{ messages }}")
  (source / "merges.txt").write_text("a b")
  (source / "additional_chat_templates").mkdir()
  (source / "additional_chat_templates" / "tools.jinja").write_text("tools")
  (source / "README.md").write_text("about other weights")
  export.export(target, params, CONFIG, source)

  def files(directory):
    return {
      str(path.relative_to(directory)): path.read_bytes()
      for path in directory.rglob("*")
      if path.is_file() and path.name != "README.md"
    }

  assert files(target) == files(source)
  assert not (target / "README.md").exists()


def test_nothing_is_written_when_something_does_not_fit(tmp_path):
  params = random_params(CONFIG)
  (tmp_path / "empty").mkdir()
  cases = [
    (dict(directory=tmp_path / "empty"), r"empty exists; remove it or choose"),
    # Longer than any name of a file may be.
    (dict(directory=tmp_path / ("x" * 300)), "x cannot be written: .*; choose"),
    (dict(directory="/dev/null/hf"), "/dev/null/hf cannot be written: .*Not a"),
    (
      dict(config=dataclasses.replace(CONFIG, num_layers=3)),
      "the parameters are not of this model; merge adapters",
    ),
    (
      dict(params=random_params(sizes(lora=lora.Lora(rank=2)))),
      "the parameters are not of this model; merge adapters",
    ),
    (
      dict(config=dataclasses.replace(CONFIG, d_expert=12)),
      r"experts.0.down_proj.weight: the parameter is float32\[4, 10, 8\], but "
      r"the config says float32\[4, 12, 8\]",
    ),
    (
      dict(config=sizes("bfloat16")),
      r"is float32\[16, 8\], but the config says bfloat16\[16, 8\]",
    ),
    # 3 special tokens and 14 words.
    (
      dict(tokenizer=word_chat.WordChat(tuple("abcdefghijklmn"))),
      "model.vocab_size=16 is below the 17 ids of the tokenizer",
    ),
    (dict(tokenizer=tmp_path / "empty"), "empty holds no tokenizer; it has"),
    (
      dict(tokenizer=word_chat.WordChat(("a<end>",))),
      "word 'a<end>' holds the special token <end>; rename it",
    ),
  ]
  for changes, message in cases:
    arguments = {
      **dict(directory=tmp_path / "hf", params=params, config=CONFIG),
      **changes,
    }
    with pytest.raises(ValueError, match=message):
      export.export(**arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
    assert not list((tmp_path / "empty").iterdir())


def test_what_a_killed_export_left_is_replaced(tmp_path):
  left = tmp_path / ".hf.0123abcd.partial"
  left.mkdir()
  (left / "model-00009-of-00009.safetensors").write_text("half")
  params = random_params(CONFIG)
  export.export(tmp_path / "hf", params, CONFIG)
  assert [path.name for path in tmp_path.iterdir()] == ["hf"]
  assert_bits_equal(load.load(tmp_path / "hf", CONFIG), params)


def test_of_two_exports_at_once_one_is_whole_and_the_other_fails(tmp_path):
  target = tmp_path / "hf"
  late = safetensors_io.whole_directory(target)
  partial = late.__enter__()
  with safetensors_io.whole_directory(target) as first:
    (first / "model.safetensors").write_text("first")
  # Neither has taken away what the other writes.
  (partial / "model.safetensors").write_text("late")
  with pytest.raises(ValueError, match=r"hf cannot be written: .*not empty"):
    late.__exit__(None, None, None)
  assert [path.name for path in tmp_path.iterdir()] == ["hf"]
  assert (target / "model.safetensors").read_text() == "first"
