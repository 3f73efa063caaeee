"""Moments lie with their parameters, and steps on a mesh are those of one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import config as config_lib
from models import lora, sharding, transformer
from rl.pools import placement
from rl.train import optimizer_sharding, optimizers

CONFIG = config_lib.tiny_moe(
  vocab_size=24,
  num_layers=2,
  d_model=32,
  head_dim=8,
  d_ff=32,
  d_expert=64,
  max_length=32,
)
ALL = [
  optimizers.AdamW(learning_rate=0.1, weight_decay=0.1),
  optimizers.Adafactor(learning_rate=0.1, least_factored=8),
  optimizers.Muon(learning_rate=0.1),
]
IDS = ["adamw", "adafactor", "muon"]


@pytest.fixture(scope="module")
def layout() -> sharding.Layout:
  spec = placement.MeshSpec(data=2, expert=2, tensor=2)
  return placement.Placement(learner=spec, colocated=True).layouts()[0]


def _placed(optimizer, layout, config=CONFIG):
  """Returns the shardings of the parameters and of the optimizer's state."""
  shapes, _ = lora.split(transformer.shapes(config))
  axes, _ = lora.split(layout.tree(transformer.logical_axes(config)))
  state = optimizer_sharding.shardings(
    optimizer(), shapes, axes, layout.sharding()
  )
  return axes, state


def _updated(optimizer, params, gradients, places=None):
  """Returns the parameters' changes and the state after two updates."""
  transformation = optimizer()
  init, update = transformation.init, transformation.update
  start = jax.jit(init, out_shardings=places and places[1])
  step = jax.jit(update, out_shardings=places)
  state, change = start(params), None
  for gradient in gradients:
    change, state = step(gradient, state, params)
  return change, state


def _draws(seed):
  shapes = transformer.shapes(CONFIG)
  leaves, tree = jax.tree.flatten(shapes)
  keys = jax.random.split(jax.random.key(seed), len(leaves))
  drawn = [
    jax.random.normal(key, leaf.shape)
    for key, leaf in zip(keys, leaves, strict=True)
  ]
  return jax.tree.unflatten(tree, drawn)


@pytest.mark.parametrize("optimizer", ALL, ids=IDS)
def test_a_mesh_takes_the_steps_of_one_device(optimizer, layout):
  params, gradients = _draws(0), [_draws(1), _draws(2)]
  places = _placed(optimizer, layout)
  on_mesh = [jax.device_put(x, places[0]) for x in (params, *gradients)]
  one = _updated(optimizer, params, gradients)
  many = _updated(optimizer, on_mesh[0], on_mesh[1:], places)
  for a, b in zip(*map(jax.tree.leaves, (one, many)), strict=True):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(a)


@pytest.mark.parametrize("optimizer", ALL, ids=IDS)
def test_a_moment_lies_where_its_parameter_does(optimizer, layout):
  params, state = _placed(optimizer, layout)
  shapes = jax.eval_shape(optimizer().init, transformer.shapes(CONFIG))
  found = {
    jax.tree_util.keystr(path): (shape.shape, place.spec)
    for (path, shape), place in zip(
      jax.tree.leaves_with_path(shapes), jax.tree.leaves(state), strict=True
    )
  }
  expected = params["layers"][1]["moe"]["gate"].spec
  gate = [x for path, x in found.items() if path.endswith("['gate']")]
  whole = [spec for shape, spec in gate if shape == (4, 32, 64)]
  if optimizer is not ALL[1]:
    assert whole
    assert set(whole) == {expected}
    return
  # The two longest of [4, 32, 64] are factored: over the last, and over 32.
  assert not whole
  experts, embed, mlp = expected
  assert ((4, 32), jax.P(experts, embed)) in gate
  assert ((4, 64), jax.P(experts, mlp)) in gate
  assert ((1,), jax.P()) in gate


@pytest.mark.parametrize("optimizer", ALL, ids=IDS)
def test_no_device_holds_all_moments(optimizer, layout):
  places = _placed(optimizer, layout)
  params = jax.device_put(_draws(0), places[0])
  _, state = _updated(optimizer, params, [params], places)
  large = [x for x in jax.tree.leaves(state) if x.ndim > 1]
  assert large
  for moment in large:
    # Those of the router, [32, 4], and of matrices are split at least in two.
    assert moment.addressable_shards[0].data.size <= moment.size / 2


@pytest.mark.parametrize("optimizer", ALL, ids=IDS)
def test_with_adapters_only_their_moments_exist(optimizer, layout):
  config = config_lib.tiny_moe(
    vocab_size=24, num_layers=1, d_model=32, lora=lora.Lora(rank=2)
  )
  params, state = _placed(optimizer, layout, config)
  trained = set(jax.tree.leaves(params))
  assert jax.tree.leaves(state)
  assert {x.spec for x in jax.tree.leaves(state)} & {x.spec for x in trained}


def test_a_square_takes_its_last_axis_as_reduced(layout):
  # Which one it was cannot be told from [8]; both ways the result is right.
  square = jax.ShapeDtypeStruct((8, 8), jnp.float32)
  optimizer = optimizers.Adafactor(least_factored=8)
  state = optimizer_sharding.shardings(
    optimizer(), square, layout.sharding("embed", "mlp"), layout.sharding()
  )
  specs = [place.spec for place in jax.tree.leaves(state)]
  assert specs.count(jax.P("data")) == 2
  assert jax.P("tensor") not in specs
