"""A step of the learner, and one gradient however its batch is packed."""

import asyncio
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models import config as config_lib
from models import definition, logprobs, sharding
from models import policy as policy_lib
from rl.algorithms import algorithm as algorithm_lib
from rl.algorithms import (
  corrections,
  kl,
  losses,
  objective,
  presets,
  value_loss,
)
from rl.data import batch, trajectory
from rl.pools import placement
from rl.runtime import mesh_thread, trace
from rl.train import learner, optimizers, train_state
from rl.train import trainer as trainer_lib
from tests.helpers import packed_rows, real_programs, scored_episodes
from tests.helpers.real_programs import on_mesh

pytestmark = pytest.mark.compiled

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
  memory = changes.pop("optimizer_memory", "device")
  objective = dataclasses.replace(OBJECTIVE, **changes)
  return learner.Learner(
    config,
    layout,
    objective,
    optimizer,
    TEMPERATURE,
    optimizer_memory=memory,
  )


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
  total = None
  for data in batches:
    total = programs.accumulate(params, total, programs.place(data))
  return jax.device_get(total)


def step(programs, state, batches):
  total = None
  for data in batches:
    total = programs.accumulate(state.params, total, programs.place(data))
  state, metrics = programs.update(state, total)
  return state, jax.device_get(metrics)


def fresh(programs, params):
  return programs.wrap(jax.device_put(params, params_shardings(programs)))


def test_programs_are_lowered_as_they_run_and_without_a_state(
  programs, config, params, packed
):
  gradient, update = build(config).lower(packed)
  state, total = fresh(programs, params), None
  total = programs.accumulate(state.params, total, packed)
  trainable, frozen = train_state.split(state.params, state.critic)
  placed = programs.place(packed)
  real = programs._add.lower(trainable, frozen, total, placed)
  assert gradient.as_text() == real.as_text()
  divisor = jax.device_put(np.float32(0), programs._layout.sharding())
  real = programs._apply.lower(
    trainable, total.grads, *state[1:4], total.sums, divisor
  )
  assert update.as_text() == real.as_text()


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
    model = policy_lib.of(config).bind(params)
    hidden, _ = model.hidden(ids[None], positions, segments)
    logits = logprobs.logits(model.terms(hidden[0]))
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


@pytest.mark.parametrize("memory", ["device", "host"])
def test_parameters_survive_an_update_and_the_moments_do_not(
  config, programs, params, packed, memory
):
  if memory == "host":
    programs = build(config, optimizer_memory=memory)
  before = fresh(programs, params)
  after, _ = on_mesh(step, programs, before, [packed])
  jax.tree.map(np.testing.assert_array_equal, before.params, params)
  assert all(
    x.is_deleted() for x in jax.tree.leaves(optax.tree.get(before, "mu"))
  )
  assert int(after.updates) == 1
  assert np.abs(after.params["embed"] - params["embed"]).max() > 1e-4


def test_an_update_writes_each_leaf_into_the_memory_that_it_gives_up(
  programs, params, packed
):
  def addresses(params, state):
    moments = [optax.tree.get(state, name) for name in ("mu", "nu")]
    return [
      leaf.unsafe_buffer_pointer()
      for leaf in jax.tree.leaves([params, *moments])
    ]

  def both():
    state = fresh(programs, params)
    total = programs.accumulate(state.params, None, programs.place(packed))
    given = addresses(total.grads.policy, state.opt_state)
    state, _ = programs.update(state, total)
    return given, addresses(state.params, state.opt_state)

  given, taken = on_mesh(both)
  assert given == taken


@pytest.mark.parametrize(
  "shape",
  [
    (2, 2, 2),
    pytest.param((4, 1, 1), marks=pytest.mark.slow),
    pytest.param((1, 4, 2), marks=pytest.mark.slow),
  ],
  ids=str,
)
def test_meshes_agree_with_one_device(config, params, packed, shape, tmp_path):
  expert = shape[1]
  # Programs of their own, which nothing else has compiled.
  mesh_programs, alone = build(config, *shape), build(config)
  with real_programs.optimised():
    sums, total = (
      on_mesh(accumulate, programs, params, [packed])
      for programs in (mesh_programs, alone)
    )
    (state, _), (one, _) = (
      on_mesh(step, programs, fresh(programs, params), [packed])
      for programs in (mesh_programs, alone)
    )
    scores = on_mesh(score, mesh_programs, state.params, packed)
    expected = on_mesh(score, alone, one.params, packed)
  assert_close(sums.grads, total.grads, rtol=1e-5)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
    sums.sums,
    total.sums,
  )
  np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-5)
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


def test_an_optimizer_may_rest_in_the_memory_of_the_host(
  config, programs, params, packed, tmp_path
):
  rounded = dataclasses.replace(
    config, compute=dataclasses.replace(config.compute, dtype="bfloat16")
  )
  params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
  states = []
  for memory in ("device", "host"):
    resting = build(rounded, optimizer_memory=memory)
    state, _ = on_mesh(step, resting, fresh(resting, params), [packed])
    state, _ = on_mesh(step, resting, state, [packed])
    states.append(state)
  jax.tree.map(np.testing.assert_array_equal, *states)
  on_device, on_host = states
  kinds = {
    leaf.sharding.memory_kind
    for leaf in jax.tree.leaves((on_host.opt_state, on_host.master))
  }
  assert kinds == {"pinned_host"}
  assert on_host.params["embed"].sharding.memory_kind == "device"
  assert on_device.master is not None
  restored = real_programs.saved_and_restored(
    tmp_path, on_host, resting.abstract
  )
  assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(
    lambda x: x.sharding, on_host
  )


def test_init_has_the_shapes_and_shardings_of_abstract(programs):
  state = programs.init(jax.random.key(0))

  def describe(x):
    return (x.shape, x.dtype, x.sharding)

  assert jax.tree.map(describe, state) == jax.tree.map(
    describe, programs.abstract
  )


def test_the_balance_of_the_router_is_part_of_what_is_minimised(
  config, params, packed, total
):
  balanced = build(config, balance_weight=0.5)
  sums = on_mesh(accumulate, balanced, params, [packed])
  routers = [
    x.grads.policy["layers"][0]["moe"]["router"]["kernel"]
    for x in (sums, total)
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
  assert (
    np.abs(added.policy["layers"][0]["moe"]["router"]["kernel"]).max() > 1e-3
  )
  # Weights 0, 1/2 and 1 are on a line.
  expected = jax.tree.map(lambda x, y: x + y, once.grads, added)
  assert_close(twice.grads, expected, rtol=1e-5)
  assert once.sums.router.z_loss == total.sums.router.z_loss


def test_experts_are_replayed_alike_in_the_dtype_that_they_came_in(
  config, programs, params, packed
):
  shape = (*packed.tokens.shape, config.num_sparse, 2)
  wide = np.tile(np.asarray([3, 0], np.int32), (*shape[:-1], 1))
  narrow = wide.astype(config.expert_dtype)
  assert programs.place(packed._replace(experts=narrow)).experts.dtype == "int8"
  scores = [
    on_mesh(score, programs, params, packed._replace(experts=experts))
    for experts in (None, wide, narrow)
  ]
  assert np.abs(scores[0] - scores[1]).max() > 0.01
  np.testing.assert_array_equal(scores[1], scores[2])


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
  assert metrics["unused_experts"] == 0
  others = {"load_balance", "router_entropy", "z_loss", "max_load", "dropped"}
  others.add("unused_experts")
  names = {name for name in metrics if not name.startswith("load/")}
  lags = {"lag_share/0", "behaviour_kl/lag_0"}
  assert names == {*learner.METRICS, *others, *lags}


CONFIG = config_lib.tiny_moe(
  vocab_size=24,
  num_layers=1,
  d_model=16,
  head_dim=8,
  d_ff=16,
  d_expert=16,
  max_length=32,
  compute=config_lib.Compute(moe_block=4),
)
ROWS, LENGTH = 4, 32
WHOLE = {"rows": 16, "length": LENGTH}
"""One micro-batch holds everything, as it does in 8 rows, with padding."""
EVERY_PART = objective.Objective(
  loss=losses.ClippedSurrogate(dual_clip=3.0),
  correction=corrections.TokenTruncated(),
  kl=kl.KlPenalty(estimator="k3_plus", weight=0.2),
  value=value_loss.ValueLoss(weight=0.5, clip=0.5),
  entropy_bonus=0.1,
  balance_weight=0.0,  # It is not linear over micro-batches.
)


@functools.cache
def build_whole(
  data: int = 1,
  expert: int = 1,
  tensor: int = 1,
  context: int = 1,
  *,
  through_body: bool = True,
  critic: bool = True,
  balanced: bool = False,
) -> learner.Learner:
  spec = placement.MeshSpec(
    data=data,
    expert=expert,
    tensor=tensor,
    context=context,
    rules=sharding.Rules(embed=("data", "context")),
  )
  layout, _ = placement.Placement(learner=spec, colocated=True).layouts()
  value = dataclasses.replace(EVERY_PART.value, through_body=through_body)
  weights = {"balance_weight": 1.0, "z_weight": 0.1} if balanced else {}
  return learner.Learner(
    CONFIG,
    layout,
    dataclasses.replace(EVERY_PART, value=value, **weights),
    optax.sgd(0.1),
    critic=critic,
    num_lags=scored_episodes.MAX_LAG + 1,
  )


@functools.cache
def weights() -> tuple[definition.Params, Any]:
  """Large and without structure, so that nothing is nearly 0."""
  draws = np.random.default_rng(5)
  with jax.transfer_guard("allow"):
    params = policy_lib.of(CONFIG).init(jax.random.key(0))
  params = jax.tree.map(
    lambda x: (
      np.asarray(x) + draws.normal(scale=0.2, size=x.shape).astype("f4")
    ),
    params,
  )
  critic = {
    "kernel": draws.normal(size=CONFIG.d_model).astype(np.float32) / 4,
    "bias": np.float32(0.3),
  }
  return params, critic


def placed(programs: learner.Learner) -> tuple[Any, Any]:
  where = jax.tree.map(lambda x: x.sharding, programs.abstract)
  params, critic = weights()
  return (
    jax.device_put(params, where.params),
    where.critic and jax.device_put(critic, where.critic),
  )


def gradient(programs: learner.Learner, batches) -> learner.Accumulator:
  params, critic = placed(programs)
  total = None
  for data in batches:
    total = programs.accumulate(params, total, programs.place(data), critic)
  return jax.device_get(total)


@functools.cache
def episodes() -> scored_episodes.Episodes:
  """Old policies, and the critic's targets, are near this one."""
  drawn = scored_episodes.draw(1)
  laid = scored_episodes.pack(drawn, rows=ROWS, length=LENGTH)

  def score(programs):
    params, critic = placed(programs)
    data = [programs.place(b) for b in laid.batches]
    scores = [programs.score(params, b) for b in data]
    values = [programs.values(params, critic, b) for b in data]
    return jax.device_get((scores, values))

  scores, values = on_mesh(score, build_whole())
  near = scored_episodes.about(
    drawn.members, batch.collect(laid, scores), seed=1
  )
  critics = [own[:-1] for own in batch.collect_states(laid, values)]
  noise = np.random.default_rng(2)
  near.columns["values"] = [
    (own + noise.normal(scale=0.5, size=own.shape)).astype(np.float32)
    for own in critics
  ]
  return near


def pack_all(**changes) -> batch.Packed:
  settings: dict[str, Any] = {"rows": ROWS, "length": LENGTH, **changes}
  return scored_episodes.pack(episodes(), **settings)


@functools.cache
def whole_gradient() -> learner.Accumulator:
  return on_mesh(gradient, build_whole(), pack_all().batches)


def assert_same(found: learner.Accumulator, expected: learner.Accumulator):
  """Gradients to 1e-5 of the largest entry of each leaf, and means to 1e-5.

  Float32 does not allow less: in matrix products of other
  shapes sums are taken in another order, and 2e-6 to 5e-6 were measured. The
  objective itself is held to 1e-6 in `test_objective`.
  """
  for leaf, other in zip(
    jax.tree.leaves(found.grads),
    jax.tree.leaves(expected.grads),
    strict=True,
  ):
    assert scored_episodes.difference(leaf, other) < 1e-5
  # Each micro-batch balances its own tokens: for the router see below.
  sums, wanted = (
    jax.tree.leaves(x.sums._replace(router=None)) for x in (found, expected)
  )
  assert len(sums) == len(wanted) > 10
  atol = 1e-5 * float(expected.sums.divisor)
  for leaf, other in zip(sums, wanted, strict=True):
    np.testing.assert_allclose(leaf, other, rtol=1e-5, atol=atol)


def test_every_part_of_the_objective_is_at_work():
  sums = whole_gradient().sums
  assert sums.tokens == sum(episodes().sizes) > 100
  assert 0 < sums.clipped < sums.tokens
  assert sums.correction is not None
  assert 0 < sums.correction.truncated < sums.tokens
  assert all(0 < x < sums.tokens for x in sums.lag_tokens)
  assert sums.critic is not None
  for added in (sums.kl, sums.critic.loss, sums.entropy):
    assert added is not None
    assert added > 1
  for leaf in jax.tree.leaves(whole_gradient().grads):
    assert np.abs(leaf).max() > 0.01


@pytest.mark.parametrize(
  ("num_batches", "layout"),
  [
    # One trajectory a row; a smaller batch at the end; a prompt for several.
    (4, lambda: scored_episodes.alone(episodes(), rows=ROWS, length=LENGTH)),
    (2, lambda: pack_all(tail_rows=2)),
    (2, lambda: pack_all(share_prompts=True)),
  ],
  ids=["unpacked", "unequal", "shared"],
)
def test_how_trajectories_are_packed_changes_nothing(num_batches, layout):
  batches = layout().batches
  assert len(batches) == num_batches
  assert_same(on_mesh(gradient, build_whole(), batches), whole_gradient())


@pytest.mark.parametrize(
  ("mesh", "layout"),
  [
    ((1, 1, 1), lambda: scored_episodes.alone(episodes(), **WHOLE)),
    ((1, 1, 1), lambda: pack_all(**WHOLE, share_prompts=True)),
    pytest.param((2, 2, 2), lambda: pack_all(**WHOLE), marks=pytest.mark.slow),
    ((1, 2, 1, 2), lambda: pack_all(**WHOLE)),
    pytest.param(
      (2, 1, 2, 2),
      lambda: pack_all(**WHOLE, share_prompts=True),
      marks=pytest.mark.slow,
    ),
  ],
  ids=["unpacked", "shared", "eight devices", "context", "context, shared"],
)
def test_the_router_of_all_tokens_at_once_is_balanced_alike(mesh, layout):
  """Padding has no weight, and a shared prompt that of its copies."""
  found, expected = (
    on_mesh(gradient, build_whole(*where, balanced=True), laid.batches)
    for where, laid in ((mesh, layout()), ((1, 1, 1), pack_all(rows=8)))
  )
  assert_same(found, expected)
  assert expected.sums.router.dropped == 0
  for leaf, other in zip(found.sums.router, expected.sums.router, strict=True):
    np.testing.assert_allclose(leaf, other, rtol=1e-5)
  # Its losses do weigh: without them its gradient is another.
  gradients = (
    x.grads.policy["layers"][0]["moe"]["router"]["kernel"]
    for x in (expected, whole_gradient())
  )
  assert scored_episodes.difference(*gradients) > 0.01


def test_members_of_a_group_do_share_their_prompt():
  shared = pack_all(share_prompts=True).batches
  assert max(b.prefix.copies.max() for b in shared if b.prefix) > 2
  used = [
    sum((b.segments > 0).sum() for b in x) for x in (shared, pack_all().batches)
  ]
  assert used[0] < used[1]


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf], ids=str)
def test_nothing_that_stands_in_padding_leaks(poison):
  """Not one bit, whatever the column."""
  planted = [scored_episodes.poisoned(b, poison) for b in pack_all().batches]
  found = on_mesh(gradient, build_whole(), planted)
  expected = on_mesh(gradient, build_whole(), pack_all().batches)
  jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_head_of_its_own_leaves_the_body_alone():
  """Without a way through, policies learn as if there were no critic."""
  values, none = (
    on_mesh(gradient, build_whole(**kind), pack_all().batches).grads
    for kind in ({"through_body": False}, {"critic": False})
  )
  assert none.critic is None
  pairs = zip(*map(jax.tree.leaves, (values.policy, none.policy)), strict=True)
  assert max(scored_episodes.difference(a, b) for a, b in pairs) < 1e-6
  # The head learns the same either way, but there is more in the body.
  head, body = whole_gradient().grads.critic, whole_gradient().grads.policy
  pairs = zip(*map(jax.tree.leaves, (values.critic, head)), strict=True)
  assert max(scored_episodes.difference(a, b) for a, b in pairs) < 1e-6
  assert scored_episodes.difference(body["embed"], none.policy["embed"]) > 0.01


DENSE = config_lib.tiny(
  vocab_size=24,
  num_layers=1,
  d_model=16,
  num_heads=2,
  head_dim=8,
  d_ff=16,
  max_length=32,
)


def graded() -> list[trajectory.Group]:
  """Four groups of different rewards, and two in which all are the same."""
  draws = np.random.default_rng(8)
  members = scored_episodes.draw(6, groups=6).members
  groups = []
  for number in range(6):
    own = [
      dataclasses.replace(m, reward=1.0 if number in (1, 4) else draws.random())
      for m in members
      if m.group_id == number
    ]
    groups.append(
      trajectory.Group(group_id=number, trajectories=own, admitted=0)
    )
  return groups


def trained(
  model: config_lib.ModelConfig,
  algorithm: algorithm_lib.Algorithm,
  *,
  at_once: int,
  shape: tuple[int, int | None] = (ROWS, 2),
) -> tuple[Any, dict[str, float]]:
  """Returns how far one update of `graded` takes the parameters; metrics.

  Steps are far above the parameters, and so have all digits of the gradient.
  `shape` is of rows: those of a batch, and of the last one.
  """
  layout, _ = placement.Placement(colocated=True).layouts()
  programs = learner.Learner(model, layout, algorithm, optax.sgd(1e4))
  thread = mesh_thread.MeshThread("learner", trace.Trace(None))
  trainer = trainer_lib.MeshTrainer(
    trainer_lib.TrainerSettings(
      rows=shape[0],
      length=LENGTH,
      tail_rows=shape[1],
      share_prompts=False,
      probe_rows=ROWS,
      max_staleness=scored_episodes.MAX_LAG,
      old_logprob="decode",
      has_routers=model.num_sparse > 0,
    ),
    programs,
    thread,
    estimator=algorithm.advantage,
    objective=algorithm,
  )

  async def scenario():
    trainer.restore(programs.init(jax.random.key(0)))
    await trainer.begin_round(scored_episodes.VERSION)
    first, groups = jax.device_get(trainer.params), graded()
    for start in range(0, len(groups), at_once):
      await trainer.accumulate(groups[start : start + at_once])
    sums = await trainer.update()
    last = jax.device_get(trainer.params)
    return jax.tree.map(lambda after, before: after - before, last, first), sums

  try:
    return asyncio.run(scenario())
  finally:
    thread.close()


def assert_same_steps(steps: Any, expected: Any) -> None:
  pairs = zip(*map(jax.tree.leaves, (steps, expected)), strict=True)
  assert max(scored_episodes.difference(*pair) for pair in pairs) < 1e-5


@pytest.mark.parametrize("aggregate", packed_rows.AGGREGATES, ids=repr)
def test_groups_that_come_one_by_one_are_an_update_of_all_at_once(aggregate):
  """Zero-variance groups add to the divisor alone, computed or left out."""
  plain = presets.Grpo(loss=losses.ClippedSurrogate(aggregate=aggregate))
  # Next to nothing, but then zero-variance groups are computed as well.
  whole = dataclasses.replace(
    plain, entropy_bonus=1e-30, entropy_on_zero_variance=True
  )
  computed, all_of = trained(DENSE, whole, at_once=6)
  left_out, some = trained(DENSE, plain, at_once=1)
  assert all_of["zero_variance_groups"] == some["zero_variance_groups"] == 2
  assert some["tokens"] < all_of["tokens"]
  assert_same_steps(left_out, computed)


def test_a_router_is_balanced_over_tokens_of_zero_variance_groups_too():
  balanced = presets.Grpo(balance_weight=1.0, z_weight=0.1)
  computed = dataclasses.replace(
    balanced, entropy_bonus=1e-30, entropy_on_zero_variance=True
  )
  # One micro-batch holds them all, for balance is not linear over several.
  (steps, sums), (expected, all_of) = (
    trained(CONFIG, algorithm, at_once=6, shape=(16, None))
    for algorithm in (balanced, computed)
  )
  assert sums["zero_variance_groups"] == 2
  assert sums["tokens"] == all_of["tokens"]
  assert_same_steps(steps, expected)
