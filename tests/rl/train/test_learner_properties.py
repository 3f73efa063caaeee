"""One gradient, however its trajectories are packed, split and sharded.

With a network in float32, all parts of an objective at once and a critic. For
the objective alone, over all losses and corrections, see `test_objective`.
"""

import asyncio
import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np
import optax
import pytest

from models import config as config_lib
from models import transformer
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
from rl.train import learner
from rl.train import trainer as trainer_lib
from tests.helpers import packed_rows, scored_episodes
from tests.helpers.real_programs import on_mesh

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
OBJECTIVE = objective.Objective(
  loss=losses.ClippedSurrogate(dual_clip=3.0),
  correction=corrections.TokenTruncated(),
  kl=kl.KlPenalty(estimator="k3_plus", weight=0.2),
  value=value_loss.ValueLoss(weight=0.5, clip=0.5),
  entropy_bonus=0.1,
  balance_weight=0.0,  # It is not linear over micro-batches.
)


@functools.cache
def build(
  data: int = 1,
  expert: int = 1,
  tensor: int = 1,
  *,
  through_body: bool = True,
  critic: bool = True,
  balanced: bool = False,
) -> learner.Learner:
  spec = placement.MeshSpec(data=data, expert=expert, tensor=tensor)
  layout, _ = placement.Placement(learner=spec, colocated=True).layouts()
  value = dataclasses.replace(OBJECTIVE.value, through_body=through_body)
  weights = {"balance_weight": 1.0, "z_weight": 0.1} if balanced else {}
  return learner.Learner(
    CONFIG,
    layout,
    dataclasses.replace(OBJECTIVE, value=value, **weights),
    optax.sgd(0.1),
    critic=critic,
    num_lags=scored_episodes.MAX_LAG + 1,
  )


@functools.cache
def weights() -> tuple[transformer.Params, Any]:
  """Large and without structure, so that nothing is nearly 0."""
  draws = np.random.default_rng(5)
  with jax.transfer_guard("allow"):
    params = transformer.init(jax.random.key(0), CONFIG)
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


def accumulate(programs: learner.Learner, batches) -> learner.Accumulator:
  params, critic = placed(programs)
  total = programs.zero()
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

  scores, values = on_mesh(score, build())
  near = scored_episodes.about(
    drawn.members, batch.collect(laid, scores), seed=1
  )
  critics = batch.collect(laid, values)
  noise = np.random.default_rng(2)
  near.columns["values"] = [
    (own + noise.normal(scale=0.5, size=own.shape)).astype(np.float32)
    for own in critics
  ]
  return near


def packed(**changes) -> batch.Packed:
  settings: dict[str, Any] = {"rows": ROWS, "length": LENGTH, **changes}
  return scored_episodes.pack(episodes(), **settings)


@functools.cache
def total() -> learner.Accumulator:
  return on_mesh(accumulate, build(), packed().batches)


def assert_same(found: learner.Accumulator, expected: learner.Accumulator):
  """Gradients to 1e-5 of the largest entry of each leaf, and means to 1e-5.

  What a network computes in float32 is no better: in matrix products of other
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
  sums = total().sums
  assert sums.tokens == sum(episodes().sizes) > 100
  assert 0 < sums.clipped < sums.tokens
  assert sums.correction is not None
  assert 0 < sums.correction.truncated < sums.tokens
  assert all(0 < x < sums.tokens for x in sums.lag_tokens)
  assert sums.critic is not None
  for added in (sums.kl, sums.critic.loss, sums.entropy):
    assert added is not None
    assert added > 1
  for leaf in jax.tree.leaves(total().grads):
    assert np.abs(leaf).max() > 0.01


@pytest.mark.parametrize(
  ("num_batches", "layout"),
  [
    # One trajectory a row; a smaller batch at the end; a prompt for several.
    (4, lambda: scored_episodes.alone(episodes(), rows=ROWS, length=LENGTH)),
    (2, lambda: packed(tail_rows=2)),
    (2, lambda: packed(share_prompts=True)),
  ],
  ids=["unpacked", "unequal", "shared"],
)
def test_how_trajectories_are_packed_changes_nothing(num_batches, layout):
  batches = layout().batches
  assert len(batches) == num_batches
  assert_same(on_mesh(accumulate, build(), batches), total())


@pytest.mark.parametrize(
  ("mesh", "layout"),
  [
    ((1, 1, 1), lambda: scored_episodes.alone(episodes(), **WHOLE)),
    ((1, 1, 1), lambda: packed(**WHOLE, share_prompts=True)),
    ((2, 2, 2), lambda: packed(**WHOLE)),
  ],
  ids=["unpacked", "shared", "eight devices"],
)
def test_the_router_of_all_tokens_at_once_is_balanced_alike(mesh, layout):
  """Padding has no weight, and a shared prompt that of its copies."""
  found, expected = (
    on_mesh(accumulate, build(*where, balanced=True), laid.batches)
    for where, laid in ((mesh, layout()), ((1, 1, 1), packed(rows=8)))
  )
  assert_same(found, expected)
  assert expected.sums.router.dropped == 0
  for leaf, other in zip(found.sums.router, expected.sums.router, strict=True):
    np.testing.assert_allclose(leaf, other, rtol=1e-5)
  # Its losses do weigh: without them its gradient is another.
  gradients = (
    x.grads.policy["layers"][0]["moe"]["router"] for x in (expected, total())
  )
  assert scored_episodes.difference(*gradients) > 0.01


def test_members_of_a_group_do_share_their_prompt():
  shared = packed(share_prompts=True).batches
  assert max(b.prefix.copies.max() for b in shared if b.prefix) > 2
  used = [
    sum((b.segments > 0).sum() for b in x) for x in (shared, packed().batches)
  ]
  assert used[0] < used[1]


def test_eight_devices_have_the_gradient_of_one():
  assert_same(on_mesh(accumulate, build(2, 2, 2), packed().batches), total())


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf], ids=str)
def test_nothing_that_stands_in_padding_leaks(poison):
  """Not one bit, whatever the column."""
  planted = [scored_episodes.poisoned(b, poison) for b in packed().batches]
  found = on_mesh(accumulate, build(), planted)
  expected = on_mesh(accumulate, build(), packed().batches)
  jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_head_of_its_own_leaves_the_body_alone():
  """Without a way through, policies learn as if there were no critic."""
  values, none = (
    on_mesh(accumulate, build(**kind), packed().batches).grads
    for kind in ({"through_body": False}, {"critic": False})
  )
  assert none.critic is None
  pairs = zip(*map(jax.tree.leaves, (values.policy, none.policy)), strict=True)
  assert max(scored_episodes.difference(a, b) for a, b in pairs) < 1e-6
  # The head learns the same either way, but there is more in the body.
  head, body = total().grads.critic, total().grads.policy
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
      trajectory.Group(
        group_id=number, trajectories=own, admitted=trajectory.PolicyVersion(0)
      )
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
  trainer = trainer_lib.Training(
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
  whole = dataclasses.replace(plain, entropy_bonus=1e-30)
  computed, all_of = trained(DENSE, whole, at_once=6)
  left_out, some = trained(DENSE, plain, at_once=1)
  assert all_of["zero_variance_groups"] == some["zero_variance_groups"] == 2
  assert some["tokens"] < all_of["tokens"]
  assert_same_steps(left_out, computed)


def test_a_router_is_balanced_over_tokens_of_zero_variance_groups_too():
  balanced = presets.Grpo(balance_weight=1.0, z_weight=0.1)
  computed = dataclasses.replace(balanced, entropy_bonus=1e-30)
  # One micro-batch holds them all, for balance is not linear over several.
  (steps, sums), (expected, all_of) = (
    trained(CONFIG, algorithm, at_once=6, shape=(16, None))
    for algorithm in (balanced, computed)
  )
  assert sums["zero_variance_groups"] == 2
  assert sums["tokens"] == all_of["tokens"]
  assert_same_steps(steps, expected)
