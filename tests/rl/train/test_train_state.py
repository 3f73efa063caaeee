"""The trained state: precision, frozen parts, shardings of its moments."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models import config as config_lib
from models import lora, sharding
from models import policy as policy_lib
from rl.algorithms import losses, objective
from rl.data import batch
from rl.pools import placement
from rl.runtime import checkpoint
from rl.train import learner, optimizers, train_state

pytestmark = pytest.mark.compiled

OBJECTIVE = objective.Objective(loss=losses.ClippedSurrogate())
F32 = config_lib.tiny(
  vocab_size=16, num_layers=2, d_model=16, num_heads=2, head_dim=8, d_ff=32
)
BF16 = dataclasses.replace(
  F32, compute=config_lib.Compute(dtype="bfloat16", logprob_chunk=16)
)

SPARSE = config_lib.tiny_moe(
  vocab_size=24,
  num_layers=2,
  d_model=32,
  head_dim=8,
  d_ff=32,
  d_expert=64,
  max_length=32,
)
OPTIMIZERS = [
  optimizers.AdamW(learning_rate=0.1, weight_decay=0.1),
  optimizers.Adafactor(learning_rate=0.1, least_factored=8),
  optimizers.Muon(learning_rate=0.1),
]
IDS = ["adamw", "adafactor", "muon"]


def build(config, optimizer=None, data=1, **changes):
  spec = placement.MeshSpec(data=data)
  layout, _ = placement.Placement(learner=spec, colocated=True).layouts()
  optimizer = optimizer or optimizers.AdamW(learning_rate=0.01)()
  objective = dataclasses.replace(OBJECTIVE, **changes)
  return learner.Learner(config, layout, objective, optimizer)


@pytest.fixture(scope="module")
def packed():
  shape, rng = (4, 10), np.random.default_rng(0)
  return batch.empty(*shape)._replace(
    tokens=rng.integers(16, size=shape).astype(np.int32),
    positions=np.tile(np.arange(10, dtype=np.int32), (4, 1)),
    segments=np.ones(shape, np.int32),
    sampled=np.tile(np.arange(10) > 2, (4, 1)),
    behaviour=np.full(shape, -np.log(16), np.float32),
    advantages=rng.normal(size=shape).astype(np.float32),
  )


def step(programs, state, packed):
  total = programs.accumulate(state.params, None, programs.place(packed))
  state, metrics = programs.update(state, total)
  return state, jax.device_get(metrics)


def dtypes(tree):
  return {x.dtype for x in jax.tree.leaves(tree)}


def assert_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture(scope="module")
def programs():
  return build(BF16)


def test_what_is_published_is_bfloat16_and_what_is_added_to_float32(
  programs, packed
):
  state, _ = step(programs, programs.init(jax.random.key(0)), packed)
  total = programs.accumulate(state.params, None, programs.place(packed))
  scores = programs.score(state.params, programs.place(packed))
  assert dtypes(state.params) == {jnp.dtype(jnp.bfloat16)}
  f32 = {jnp.dtype(jnp.float32)}
  moments = [optax.tree.get(state.opt_state, name) for name in ("mu", "nu")]
  for tree in (state.master, moments, total, scores):
    assert dtypes(tree) == f32
  rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state.master.policy)
  assert_equal(state.params, rounded)


def test_log_probabilities_of_bfloat16_are_near_those_of_float32(
  programs, packed
):
  params = programs.init(jax.random.key(0)).params
  exact = build(F32)
  wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
  found, expected = (
    x.score(p, x.place(packed)) for x, p in ((programs, params), (exact, wide))
  )
  # Hidden states have 8 bits: logits, which are below 1 here, are off by a few
  # times 2**-8; uniform ones would be off by ln 16 * 2**-8 = 0.01 in bfloat16.
  np.testing.assert_allclose(found, expected, atol=0.01)
  assert len(np.unique(np.asarray(found))) > 0.9 * found.size


def test_updates_too_small_for_bfloat16_do_not_vanish(packed):
  # One step of Adam is the rate, 1e-5. Next to 1, the norms' scale, bfloat16
  # moves in steps of 2**-8 down: 196 updates to get past half of one.
  optimizer = optax.adam(1e-5)
  small = build(BF16, optimizer)
  state = small.init(jax.random.key(0))
  before = jax.device_get(state.params)
  total = small.accumulate(state.params, None, small.place(packed))
  for _ in range(3):
    # The same gradient each time, as `update` uses it up only with float32.
    state, _ = small.update(state, total)
  assert state.master is not None
  unmoved, scale = before["final_norm"], state.master.policy["final_norm"]
  assert_equal(state.params["final_norm"], unmoved)
  np.testing.assert_allclose(np.abs(scale - 1), 3e-5, rtol=0.01)
  for _ in range(203):
    state, _ = small.update(state, total)
  assert state.master is not None
  # 206 steps: 2.06e-3 is above half of 2**-8 = 3.9e-3, so those that go down
  # are one step further; up there the steps are twice as wide.
  moved = np.asarray(state.params["final_norm"], np.float32)
  down = np.asarray(state.master.policy["final_norm"]) < 1
  assert down.any()
  np.testing.assert_array_equal(moved, np.where(down, 1 - 2**-8, 1))


def test_gradients_of_micro_batches_are_added_in_float32(programs, packed):
  params = programs.init(jax.random.key(0)).params
  placed = programs.place(packed)
  one = programs.accumulate(params, None, placed)
  once = jax.device_get(one.grads)
  for _ in range(511):
    one = programs.accumulate(params, one, placed)
  # In bfloat16 a sum stops growing at 256 terms.
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(
      a, 512 * b, rtol=1e-4, atol=1e-4 * np.abs(b).max()
    ),
    jax.device_get(one.grads),
    once,
  )


@pytest.mark.parametrize("config", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("data", [1, 4])
def test_a_restored_state_goes_on_bit_by_bit(config, data, packed, tmp_path):
  programs = build(config, data=data)
  state, _ = step(programs, programs.init(jax.random.key(0)), packed)
  checkpoints = checkpoint.Checkpoints(tmp_path, keep=1)
  checkpoints.save(1, state, {})
  checkpoints.wait()
  restored = checkpoints.restore(programs.abstract)
  checkpoints.close()
  assert restored is not None
  again = restored.state
  assert (again.master is None) == (config is F32)
  on, metrics = step(programs, state, packed)
  same, same_metrics = step(programs, again, packed)
  assert_equal(same, on)
  assert_equal(same_metrics, metrics)


def test_wrapped_parameters_are_the_same_arrays(programs):
  params = programs.init(jax.random.key(0)).params
  state = programs.wrap(params)
  leaves = jax.tree.leaves(state.params)
  assert all(
    a is b for a, b in zip(leaves, jax.tree.leaves(params), strict=True)
  )
  assert int(state.updates) == 0
  wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
  assert_equal(state.master, train_state.Trainable(wide, None))


def test_a_model_without_experts_has_nothing_to_balance(packed):
  plain, weighted = (
    build(F32, balance_weight=weight, z_weight=weight) for weight in (0.0, 9.0)
  )
  (one, metrics), (two, _) = (
    step(x, x.init(jax.random.key(0)), packed) for x in (plain, weighted)
  )
  assert_equal(one.params, two.params)
  assert not {"load_balance", "z_loss", "dropped"} & metrics.keys()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_adapters_nothing_else_trains(dtype, packed):
  config = dataclasses.replace(
    F32,
    lora=lora.Lora(rank=2, targets=("query", "down")),
    compute=config_lib.Compute(dtype=dtype),
  )
  programs = build(config)
  before = programs.init(jax.random.key(0))
  state, metrics = step(programs, before, packed)
  adapters, frozen = lora.split(state.params)
  old_adapters, old_frozen = lora.split(before.params)
  # The very arrays: whoever publishes sees at once that nothing is new.
  for a, b in zip(
    jax.tree.leaves(frozen), jax.tree.leaves(old_frozen), strict=True
  ):
    assert a is b
  moved = [
    np.abs(np.asarray(a - b, np.float32)).max()
    for a, b in zip(
      jax.tree.leaves(adapters), jax.tree.leaves(old_adapters), strict=True
    )
  ]
  # A fresh b is 0, so a has no gradient yet: of each pair one moves.
  assert sum(x > 1e-3 for x in moved) == len(moved) / 2
  total = programs.accumulate(state.params, None, programs.place(packed))
  trained = [total.grads, optax.tree.get(state.opt_state, "mu")]
  trained += [state.master] if dtype == "bfloat16" else []
  for tree in trained:
    assert jax.tree.structure(tree.policy) == jax.tree.structure(adapters)
    assert tree.critic is None
  assert metrics["grad_norm"] > 0


@pytest.fixture(scope="module")
def layout() -> sharding.Layout:
  spec = placement.MeshSpec(data=2, expert=2, tensor=2)
  return placement.Placement(learner=spec, colocated=True).layouts()[0]


def _placed(optimizer, layout, config=SPARSE):
  """Returns the shardings of the parameters and of the optimizer's state."""
  shapes, _ = lora.split(policy_lib.of(config).shapes)
  axes, _ = lora.split(layout.tree(policy_lib.of(config).axes))
  state = train_state.optimizer_shardings(
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
  shapes = policy_lib.of(SPARSE).shapes
  leaves, tree = jax.tree.flatten(shapes)
  keys = jax.random.split(jax.random.key(seed), len(leaves))
  drawn = [
    jax.random.normal(key, leaf.shape)
    for key, leaf in zip(keys, leaves, strict=True)
  ]
  return jax.tree.unflatten(tree, drawn)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=IDS)
def test_a_mesh_takes_the_steps_of_one_device(optimizer, layout):
  params, gradients = _draws(0), [_draws(1), _draws(2)]
  places = _placed(optimizer, layout)
  on_mesh = [jax.device_put(x, places[0]) for x in (params, *gradients)]
  one = _updated(optimizer, params, gradients)
  many = _updated(optimizer, on_mesh[0], on_mesh[1:], places)
  for a, b in zip(*map(jax.tree.leaves, (one, many)), strict=True):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(a)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=IDS)
def test_a_moment_lies_where_its_parameter_does(optimizer, layout):
  params, state = _placed(optimizer, layout)
  shapes = jax.eval_shape(optimizer().init, policy_lib.of(SPARSE).shapes)
  found = {
    jax.tree_util.keystr(path): (shape.shape, place.spec)
    for (path, shape), place in zip(
      jax.tree.leaves_with_path(shapes), jax.tree.leaves(state), strict=True
    )
  }
  expected = params["layers"][1]["moe"]["gate"].spec
  gate = [x for path, x in found.items() if path.endswith("['gate']")]
  whole = [spec for shape, spec in gate if shape == (4, 32, 64)]
  if optimizer is not OPTIMIZERS[1]:
    assert whole
    assert set(whole) == {expected}
    return
  # The two longest of [4, 32, 64] are factored: over the last, and over 32.
  assert not whole
  experts, embed, mlp = expected
  assert ((4, 32), jax.P(experts, embed)) in gate
  assert ((4, 64), jax.P(experts, mlp)) in gate
  assert ((1,), jax.P()) in gate


def test_a_square_takes_its_last_axis_as_reduced(layout):
  # Which one it was cannot be told from [8]; both ways the result is right.
  square = jax.ShapeDtypeStruct((8, 8), jnp.float32)
  optimizer = optimizers.Adafactor(least_factored=8)
  state = train_state.optimizer_shardings(
    optimizer(), square, layout.sharding("embed", "mlp"), layout.sharding()
  )
  specs = [place.spec for place in jax.tree.leaves(state)]
  assert specs.count(jax.P("data")) == 2
  assert jax.P("tensor") not in specs
