import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from models import config as config_lib
from models import definition, sharding
from models import policy as policy_lib

CONFIG = config_lib.tiny_moe(
  vocab_size=8, num_layers=2, d_model=8, dense_layers=(0,), tie_embeddings=False
)


def names(tree):
  return [
    jax.tree_util.keystr(path, simple=True, separator="/")
    for path, _ in jax.tree_util.tree_leaves_with_path(
      tree, is_leaf=sharding.is_axes
    )
  ]


def test_parameters_have_the_names_of_attributes():
  # Checkpoints, digests and messages name parameters by these paths.
  policy = policy_lib.of(CONFIG)
  attention = ("key", "key_norm", "out", "query", "query_norm", "value")
  assert names(policy.shapes) == [
    *("embed", "final_norm", "head"),
    *(f"layers/0/attention/{name}" for name in attention),
    "layers/0/attention_norm",
    *(f"layers/0/mlp/{name}" for name in ("down", "gate", "up")),
    "layers/0/mlp_norm",
    *(f"layers/1/attention/{name}" for name in attention),
    "layers/1/attention_norm",
    "layers/1/mlp_norm",
    *("layers/1/moe/down", "layers/1/moe/gate"),
    *("layers/1/moe/router/kernel", "layers/1/moe/up"),
  ]
  assert names(policy.axes) == names(policy.shapes)


def test_layers_from_ten_on_stay_in_order():
  deep = config_lib.tiny(vocab_size=8, num_layers=12, d_model=8)
  layers = policy_lib.of(deep).shapes["layers"]
  assert list(jax.tree.map(lambda x: x, layers)) == list(range(12))


def test_equal_configs_have_one_definition():
  same = config_lib.tiny_moe(
    vocab_size=8,
    num_layers=2,
    d_model=8,
    dense_layers=(0,),
    tie_embeddings=False,
  )
  assert policy_lib.of(same) is policy_lib.of(CONFIG)


def test_parameters_of_another_model_are_refused():
  policy = policy_lib.of(CONFIG)
  less = {name: x for name, x in policy.shapes.items() if name != "head"}
  with pytest.raises(ValueError, match="this Transformer: head is missing"):
    policy.bind(less)
  with pytest.raises(ValueError, match="this Transformer: tail is extra"):
    policy.bind({**policy.shapes, "tail": policy.shapes["head"]})


class Noisy(nnx.Module):
  def __init__(self, key):
    self.weight = nnx.Param(jax.random.normal(key, (2, 3)))
    self.noise = nnx.Rngs(0)


class Plain(nnx.Module):
  def __init__(self, key):
    self.weight = nnx.Param(jnp.zeros((2, 3)))


def test_state_that_is_not_a_parameter_is_refused():
  with pytest.raises(ValueError, match=r"Noisy must hold nnx\.Param only"):
    definition.define(Noisy)


def test_a_parameter_without_axes_lies_whole_on_every_device():
  assert definition.define(Plain).axes == {"weight": (None, None)}
