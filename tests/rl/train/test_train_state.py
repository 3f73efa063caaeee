"""What trains, in which precision, and what stays as it is."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models import config as config_lib
from models import lora
from rl.algorithms import losses, objective
from rl.data import batch
from rl.pools import placement
from rl.runtime import checkpoint
from rl.train import learner, optimizers, train_state

OBJECTIVE = objective.Objective(loss=losses.ClippedSurrogate())
F32 = config_lib.tiny(
  vocab_size=16, num_layers=2, d_model=16, num_heads=2, head_dim=8, d_ff=32
)
BF16 = dataclasses.replace(
  F32, compute=config_lib.Compute(dtype="bfloat16", logprob_chunk=16)
)


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
  total = programs.accumulate(
    state.params, programs.zero(), programs.place(packed)
  )
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
  total = programs.accumulate(
    state.params, programs.zero(), programs.place(packed)
  )
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
  total = small.accumulate(state.params, small.zero(), small.place(packed))
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
  one = programs.accumulate(params, programs.zero(), placed)
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
  trained = [programs.zero().grads, optax.tree.get(state.opt_state, "mu")]
  trained += [state.master] if dtype == "bfloat16" else []
  for tree in trained:
    assert jax.tree.structure(tree.policy) == jax.tree.structure(adapters)
    assert tree.critic is None
  assert metrics["grad_norm"] > 0
