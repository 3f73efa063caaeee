"""Gradients against a plainly written loss, on one device and on meshes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models import transformer
from rl.algorithms import losses, objective
from rl.data import batch
from rl.pools import placement
from rl.train import learner, optimizers, train_state
from tests.helpers import real_programs
from tests.helpers.real_programs import on_mesh

# Sums over meshes are compared to 1e-5.
optimised = real_programs.optimised

OBJECTIVE = objective.Objective(
  loss=losses.ClippedSurrogate(clip_low=0.2, clip_high=0.28),
  entropy_bonus=0.1,
  balance_weight=0.0,  # It is not linear over micro-batches.
)
TEMPERATURE = 0.7
SEGMENTS = ((6, 6), (12,), (6,), (6, 6))
ADVANTAGES = (1.0, -0.5, 2.0, -1.5, 0.25, 1.0)


def build(config, data=1, expert=1, tensor=1, **changes):
  spec = placement.MeshSpec(data=data, expert=expert, tensor=tensor)
  layout, _ = placement.Placement(learner=spec, colocated=True).layouts()
  optimizer = changes.pop("optimizer", optimizers.AdamW(learning_rate=0.01)())
  objective = dataclasses.replace(OBJECTIVE, **changes)
  return learner.Learner(config, layout, objective, optimizer, TEMPERATURE)


@pytest.fixture(scope="module")
def programs(config):
  return build(config)


@pytest.fixture(scope="module")
def packed(programs, params):
  """Two turns a segment; behaviour is up to half a nat off the policy."""
  data, rng = batch.empty(4, 12), np.random.default_rng(0)
  advantages = iter(ADVANTAGES)
  for row, lengths in enumerate(SEGMENTS):
    start = 0
    for number, length in enumerate(lengths, 1):
      at = slice(start, start + length)
      data.tokens[row, at] = rng.integers(24, size=length)
      data.positions[row, at] = np.arange(length)
      data.segments[row, at] = number
      data.sampled[row, at] = [i not in (0, 1, 4) for i in range(length)]
      data.advantages[row, at] = next(advantages)
      start += length
  own = on_mesh(score, programs, params, data)
  data.behaviour[:] = own + rng.uniform(-0.5, 0.5, own.shape)
  return data


def score(programs, params, data):
  params = jax.device_put(params, params_shardings(programs))
  return jax.device_get(programs.score(params, programs.place(data)))


def params_shardings(programs):
  return jax.tree.map(lambda x: x.sharding, programs.abstract.params)


def accumulate(programs, params, batches):
  params = jax.device_put(params, params_shardings(programs))
  total = programs.zero()
  for data in batches:
    total = programs.accumulate(params, total, programs.place(data))
  return jax.device_get(total)


def step(programs, state, batches):
  total = programs.zero()
  for data in batches:
    total = programs.accumulate(state.params, total, programs.place(data))
  state, metrics = programs.update(state, total)
  return state, jax.device_get(metrics)


def fresh(programs, params):
  return programs.wrap(jax.device_put(params, params_shardings(programs)))


def only_row(data, row):
  """The same shape, in which all rows but one are padding."""
  rest = batch.empty(*data.tokens.shape)
  for array, source in zip(rest[:7], data[:7], strict=True):
    array[row] = source[row]
  return rest


def plain_loss(params, *, config, data):
  """GRPO's loss, summed, token by token over segments on their own."""

  @jax.jit
  def policies(params, ids):
    positions, segments = jnp.arange(len(ids))[None], jnp.ones_like(ids)[None]
    hidden, _ = transformer.hidden(
      params, config, ids[None], positions, segments
    )
    logits = transformer.head(params, config, hidden[0])
    return jax.nn.softmax(logits / TEMPERATURE)

  total, entropies = 0.0, 0.0
  for row, lengths in enumerate(SEGMENTS):
    for number in range(1, len(lengths) + 1):
      own = data.segments[row] == number
      ids, behaviour = data.tokens[row][own], data.behaviour[row][own]
      policy = policies(params, ids)
      for t in np.flatnonzero(data.sampled[row][own]):
        ratio = policy[t - 1, ids[t]] / np.exp(behaviour[t])
        gain = data.advantages[row][own][t]
        total -= jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.28) * gain)
        entropies -= (policy[t - 1] * jnp.log(policy[t - 1])).sum()
  return total - 0.1 * entropies, (total, entropies)


def assert_close(actual, expected, rtol):
  """Leaf by leaf, relative to the largest entry of the leaf."""
  for a, b in zip(
    jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
  ):
    np.testing.assert_allclose(a, b, rtol=0, atol=rtol * np.abs(b).max())


@pytest.fixture(scope="module")
def total(programs, params, packed):
  return on_mesh(accumulate, programs, params, [packed])


def test_gradient_and_sums_are_those_of_a_plain_loss(
  config, params, packed, total
):
  loss_of = functools.partial(plain_loss, config=config, data=packed)
  gradient = jax.value_and_grad(loss_of, has_aux=True)
  (_, (loss, entropy)), grads = gradient(params)
  # 3 of each segment of 6 and 9 of the one of 12: all but 0, 1 and 4.
  assert total.sums.tokens == 3 * 5 + 9
  assert_close(total.grads, grads, rtol=1e-5)
  assert total.sums.loss == pytest.approx(float(loss), rel=1e-5)
  assert total.sums.entropy == pytest.approx(float(entropy), rel=1e-5)


def test_sums_count_clipped_tokens_and_the_distance_to_behaviour(
  programs, params, packed, total
):
  own = on_mesh(score, programs, params, packed)
  gap = (own - packed.behaviour)[packed.sampled]
  gain = packed.advantages[packed.sampled]
  clipped = ((np.exp(gap) > 1.28) & (gain > 0)) | (
    (np.exp(gap) < 0.8) & (gain < 0)
  )
  assert 3 < clipped.sum() < len(clipped) - 3
  assert total.sums.clipped == clipped.sum()
  late = (np.expm1(gap) - gap).sum()
  assert total.sums.lag_kl.sum() == pytest.approx(late, rel=1e-4)


def test_micro_batches_add_up_to_the_whole(programs, params, packed, total):
  rows = [only_row(packed, row) for row in range(4)]
  parts = on_mesh(accumulate, programs, params, rows)
  assert_close(parts.grads, total.grads, rtol=1e-6)
  for name in ("tokens", "loss", "clipped", "entropy", "ratio"):
    whole = getattr(total.sums, name)
    assert getattr(parts.sums, name) == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("planted", [-np.inf, np.inf, np.nan], ids=str)
def test_what_is_padding_or_not_sampled_changes_nothing(
  programs, params, packed, total, planted
):
  padding = packed.segments == 0
  changed = packed._replace(
    tokens=np.where(padding, 7, packed.tokens).astype(np.int32),
    behaviour=np.where(packed.sampled, packed.behaviour, np.float32(planted)),
    advantages=np.where(packed.sampled, packed.advantages, np.float32(planted)),
  )
  assert padding.any()
  again = on_mesh(accumulate, programs, params, [changed])
  jax.tree.map(np.testing.assert_array_equal, again, total)


def test_a_batch_without_tokens_changes_nothing_but_the_count(programs, params):
  state = fresh(programs, params)
  state, metrics = on_mesh(step, programs, state, [batch.empty(4, 12)])
  jax.tree.map(np.testing.assert_array_equal, state.params, params)
  assert int(state.updates) == 1
  assert metrics["tokens"] == metrics["grad_norm"] == 0


def test_update_divides_by_the_tokens_of_all_micro_batches_once(
  config, params, packed, total
):
  sgd = build(config, optimizer=optax.sgd(0.5))
  rows = [only_row(packed, row) for row in range(4)]
  state, metrics = on_mesh(step, sgd, fresh(sgd, params), rows)
  tokens = packed.sampled.sum()
  expected = jax.tree.map(
    lambda p, g: p - 0.5 * g / tokens, params, total.grads.policy
  )
  assert_close(state.params, expected, rtol=1e-6)
  assert metrics["tokens"] == tokens
  assert metrics["loss"] == pytest.approx(total.sums.loss / tokens, rel=1e-5)
  norm = optax.tree.norm(total.grads) / tokens
  assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)


def test_parameters_survive_an_update_and_the_moments_do_not(
  programs, params, packed
):
  before = fresh(programs, params)
  after, _ = on_mesh(step, programs, before, [packed])
  jax.tree.map(np.testing.assert_array_equal, before.params, params)
  assert all(
    x.is_deleted() for x in jax.tree.leaves(optax.tree.get(before, "mu"))
  )
  assert int(after.updates) == 1
  assert np.abs(after.params["embed"] - params["embed"]).max() > 1e-4


@pytest.mark.parametrize("shape", [(2, 2, 2), (4, 1, 1), (1, 4, 2)], ids=str)
def test_meshes_agree_with_one_device(
  config, programs, params, packed, total, shape, tmp_path
):
  expert = shape[1]
  mesh_programs = build(config, *shape)
  sums = on_mesh(accumulate, mesh_programs, params, [packed])
  assert_close(sums.grads, total.grads, rtol=1e-5)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
    sums.sums,
    total.sums,
  )
  state = fresh(mesh_programs, params)
  state, _ = on_mesh(step, mesh_programs, state, [packed])
  one, _ = on_mesh(step, programs, fresh(programs, params), [packed])
  np.testing.assert_allclose(
    on_mesh(score, mesh_programs, state.params, packed),
    on_mesh(score, programs, one.params, packed),
    rtol=1e-5,
    atol=1e-5,
  )
  # A moment lies where its parameter does, the experts' one `expert`-th each.
  shardings = params_shardings(mesh_programs)
  for name in ("mu", "nu"):
    placed = jax.tree.map(
      lambda x: x.sharding, optax.tree.get(state.opt_state, name)
    )
    assert placed == train_state.Trainable(shardings, None)
  moment = optax.tree.get(state.opt_state, "mu").policy["layers"][0]["moe"][
    "gate"
  ]
  assert moment.addressable_shards[0].data.shape[0] == 4 // expert
  restored = real_programs.saved_and_restored(
    tmp_path, state, mesh_programs.abstract
  )
  jax.tree.map(np.testing.assert_array_equal, restored, state)
  assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(
    lambda x: x.sharding, state
  )


def test_init_has_the_shapes_and_shardings_of_abstract(programs):
  state = programs.init(jax.random.key(0))

  def describe(x):
    return (x.shape, x.dtype, x.sharding)

  assert jax.tree.map(describe, state) == jax.tree.map(
    describe, programs.abstract
  )


def test_the_loss_of_one_batch_goes_down(programs, params, packed):
  own = on_mesh(score, programs, params, packed)
  on_policy = packed._replace(behaviour=own)
  state, history = fresh(programs, params), []
  for _ in range(8):
    state, metrics = on_mesh(step, programs, state, [on_policy])
    history.append(float(metrics["loss"]))
  # Ratios start at 1: minus the mean advantage of a token.
  expected = -packed.advantages[packed.sampled].mean()
  assert history[0] == pytest.approx(expected, abs=1e-5)
  assert history[-1] < history[0] - 0.1


def test_the_balance_of_the_router_is_part_of_what_is_minimised(
  config, params, packed, total
):
  balanced = build(config, balance_weight=0.5)
  sums = on_mesh(accumulate, balanced, params, [packed])
  routers = [
    x.grads.policy["layers"][0]["moe"]["router"] for x in (sums, total)
  ]
  assert np.abs(routers[0] - routers[1]).max() > 1e-3
  assert sums.sums.router.load_balance == total.sums.router.load_balance


def test_the_z_loss_of_the_router_adds_to_the_gradient_in_proportion(
  config, params, packed, total
):
  once, twice = (
    on_mesh(accumulate, build(config, z_weight=weight), params, [packed])
    for weight in (0.5, 1.0)
  )
  added = jax.tree.map(np.subtract, once.grads, total.grads)
  assert np.abs(added.policy["layers"][0]["moe"]["router"]).max() > 1e-3
  # Weights 0, 1/2 and 1 are on a line.
  expected = jax.tree.map(lambda x, y: x + y, once.grads, added)
  assert_close(twice.grads, expected, rtol=1e-5)
  assert once.sums.router.z_loss == total.sums.router.z_loss


def test_metrics_say_how_the_router_did(config, programs, params, packed):
  state = fresh(programs, params)
  _, metrics = on_mesh(step, programs, state, [packed, packed])
  loads = [metrics[f"load/{i}"] for i in range(config.num_experts)]
  # Shares: they add up to 1 whatever the number of micro-batches.
  assert sum(loads) == pytest.approx(1, abs=1e-6)
  # The busiest of any layer is at least as busy as the busiest on average.
  assert max(loads) * config.num_experts <= metrics["max_load"] + 1e-6
  assert metrics["max_load"] <= config.num_experts / config.experts_per_token
  assert 0 < metrics["router_entropy"] < np.log(config.num_experts)
  assert metrics["z_loss"] > 0
  assert metrics["dropped"] == 0
  others = {"load_balance", "router_entropy", "z_loss", "max_load", "dropped"}
  names = {name for name in metrics if not name.startswith("load/")}
  lags = {"lag_share/0", "behaviour_kl/lag_0"}
  assert names == {*learner.METRICS, *others, *lags}
