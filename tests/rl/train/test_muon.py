"""The parameters that Muon makes orthogonal, and along which axes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import config as config_lib
from models import lora
from models import policy as policy_lib
from rl.train import muon as muon_lib
from rl.train import optimizers

pytestmark = pytest.mark.compiled

SIZES = {
  "num_layers": 2,
  "d_model": 16,
  "head_dim": 4,
  "d_ff": 24,
  "vocab_size": 24,
  "max_length": 8,
}


def _shapes(sparse, adapters=None):
  kind = config_lib.tiny_moe if sparse else config_lib.tiny
  config = kind(**SIZES, lora=adapters, qkv_bias=not sparse)
  return policy_lib.of(config).shapes


def _labels(params):
  """Returns the label of each parameter by the names on its path."""
  labelled = jax.tree.leaves_with_path(muon_lib.labels(params))
  return {
    tuple(k.key for k in path if isinstance(getattr(k, "key", 0), str)): label
    for path, label in labelled
  }


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_projections_are_matrices_and_all_else_is_not(sparse):
  labelled = _labels(_shapes(sparse))
  muon = {path[1:] for path, label in labelled.items() if label == "muon"}
  mlp = "moe" if sparse else "mlp"
  expected = {("attention", x) for x in ("query", "key", "value", "out")}
  expected |= {(mlp, x) for x in ("gate", "up", "down")}
  assert muon == expected
  adam = {path[-1] for path, label in labelled.items() if label == "adam"}
  assert {"embed", "final_norm", "query_norm", "attention_norm"} <= adam
  assert ("kernel" in adam) == sparse
  assert ("query_bias" in adam) != sparse


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_every_matrix_has_two_sides_of_the_sizes_that_it_multiplies(sparse):
  layer = _shapes(sparse)["layers"][1]
  config = (config_lib.tiny_moe if sparse else config_lib.tiny)(**SIZES)
  heads, kv = config.num_heads * 4, config.num_kv_heads * 4
  wide = config.d_expert if sparse else config.d_ff
  expected = {
    ("attention", "query"): (16, heads),
    ("attention", "key"): (16, kv),
    ("attention", "value"): (16, kv),
    ("attention", "out"): (heads, 16),
    ("moe" if sparse else "mlp", "gate"): (16, wide),
    ("moe" if sparse else "mlp", "up"): (16, wide),
    ("moe" if sparse else "mlp", "down"): (wide, 16),
  }
  for (module, name), sizes in expected.items():
    shape = layer[module][name].shape
    dims = muon_lib.numbers({module: {name: layer[module][name]}})[module][name]
    sides = [[shape[i] for i in axes] for axes in dims]
    assert tuple(map(np.prod, sides)) == sizes
    # What is on neither side are the experts.
    rest = set(range(len(shape))) - {i for axes in dims for i in axes}
    assert rest == ({0} if module == "moe" else set())


def test_adapters_are_matrices_and_frozen_parameters_are_left_out():
  params = _shapes(True, lora.Lora(rank=2))
  trained, _ = lora.split(params)
  labelled = _labels(trained)
  assert labelled
  assert set(labelled.values()) == {"muon"}
  # Of `out` the product sums over heads and their width.
  out = trained["layers"][0]["attention"]["lora"]["out"]
  a = {"attention": {"lora": {"out": out}}}
  dims = muon_lib.numbers(a)["attention"]["lora"]["out"]
  assert tuple(dims["a"]) == ((0, 1), (2,))
  assert tuple(dims["b"]) == ((0,), (1,))


def test_a_critic_is_no_matrix():
  assert muon_lib.labels(({}, {"kernel": jnp.zeros(4), "bias": 0})) == (
    {},
    {"kernel": "adam", "bias": "adam"},
  )


def test_a_projection_of_another_policy_with_fewer_axes_is_no_matrix():
  # Ours are [embed, heads, head_dim].
  other = {"attention": {"query": jnp.ones((16, 24)), "key": jnp.ones(16)}}
  adam = {"attention": {"query": "adam", "key": "adam"}}
  assert muon_lib.labels(other) == adam


def test_what_lies_deeper_in_another_policy_is_no_matrix():
  # Ours is mlp.gate itself.
  other = {"mlp": {"gate": {"kernel": jnp.ones((16, 24))}}}
  adam = {"mlp": {"gate": {"kernel": "adam"}}}
  assert muon_lib.labels(other) == adam


def test_each_expert_steps_as_a_matrix_of_its_own():
  experts = np.random.default_rng(0).normal(size=(3, 4, 6)).astype(np.float32)
  optimizer = optimizers.Muon(learning_rate=1.0, max_grad_norm=1e9)()

  def step(module, gradient):
    gradient = {module: {"gate": jnp.asarray(gradient)}}
    state = optimizer.init(gradient)
    change: Any = optimizer.update(gradient, state, gradient)[0]
    return change[module]["gate"]

  together = step("moe", experts)
  apart = [step("mlp", expert) for expert in experts]
  np.testing.assert_allclose(together, apart, atol=1e-6)
  stacked_layers = step("mlp", experts)
  np.testing.assert_allclose(stacked_layers, apart, atol=1e-6)
