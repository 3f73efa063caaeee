"""Conversations fed in pieces over pages, against the same in whole rows."""

import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import config as config_lib
from models import definition, kv_cache, sharding, transformer
from models import policy as policy_lib
from models.attention import attention, mask
from models.moe import router
from tests.helpers import small_models

# Every axis divides over 8 devices; two layers of experts, one without.
CONFIG = config_lib.tiny_moe(
  vocab_size=24,
  num_layers=3,
  dense_layers=(1,),
  d_model=16,
  num_heads=8,
  num_kv_heads=8,
  head_dim=2,
  d_ff=48,
  d_expert=16,
  num_experts=8,
  compute=config_lib.Compute(moe_block=4),
)
ROWS, PAGE = 8, 3
ENDS = np.array([18, 1, 9, 18, 4, 13, 2, 11])
"""Lengths of the conversations; the longest fill all of their pages."""
WIDTH = int(-(-max(ENDS) // PAGE))
NUM_PAGES = ROWS * WIDTH + 2
needs_devices = pytest.mark.skipif(
  jax.device_count() < 8, reason="needs 8 devices"
)
TOLERANCE = 2e-5  # Hidden states are about 1, and 4 at most.


@functools.cache
def make_params():
  """Large and without structure, so that no part of the model is idle."""
  rng = np.random.default_rng(0)

  def noise(leaf):
    values = rng.normal(float(leaf.ndim == 1), 0.3, leaf.shape)
    return jnp.asarray(values, leaf.dtype)

  return jax.tree.map(noise, policy_lib.of(CONFIG).shapes)


@functools.cache
def whole_rows():
  """Returns ids, hidden states, and the experts of each token and layer.

  Hidden states are those of `Transformer.hidden`; experts are asked of
  `router.route`, by layers that are put together here.
  """
  rng = np.random.default_rng(1)
  ids = jnp.asarray(rng.integers(24, size=(ROWS, max(ENDS))), jnp.int32)
  positions = jnp.broadcast_to(
    jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape
  )
  segments = jnp.ones_like(ids)
  params = make_params()
  hidden, _ = jax.jit(small_models.hidden, static_argnames="config")(
    params, CONFIG, ids, positions, segments
  )
  x, taken = jax.jit(by_layers)(params, ids, positions)
  np.testing.assert_allclose(x, hidden, rtol=0, atol=TOLERANCE)
  return np.asarray(ids), np.asarray(hidden), np.asarray(taken)


def by_layers(params, ids, positions):
  token_mask = mask.packed_mask(jnp.ones_like(ids))
  copies, eps = jnp.ones(ids.size, jnp.int32), CONFIG.norm_eps
  x, taken = params["embed"][ids], []
  create = functools.partial(transformer.Transformer, CONFIG)
  model = definition.define(create).bind(params)
  for block in model.layers:
    normed = attention.rms_norm(x, block.attention_norm[...], eps)
    query, k, v = block.attention.project(normed, positions)
    sources = [mask.KeyValues(k, v, token_mask)]
    mixed = attention.attend(query, token_mask, sources, form="reference")
    x += block.attention.merge(mixed)
    normed = attention.rms_norm(x, block.mlp_norm[...], eps)
    if hasattr(block, "mlp"):
      x += block.mlp(normed)
      continue
    flat = normed.reshape(-1, CONFIG.d_model)
    _, experts, _ = router.route(
      block.moe.values(),
      flat,
      copies,
      num_chosen=CONFIG.experts_per_token,
      normalise=CONFIG.norm_topk_prob,
    )
    y, _, _ = block.moe(flat, copies)
    x += y.reshape(x.shape)
    taken.append(experts.reshape(*ids.shape, -1))
  return attention.rms_norm(x, params["final_norm"], eps), jnp.stack(taken, 2)


class Plan(NamedTuple):
  """One dispatch: ids fed at once, then ids of a few steps of each row."""

  tables: jax.Array
  lengths: jax.Array
  owners: jax.Array
  ids: jax.Array
  positions: jax.Array
  next_ids: jax.Array
  next_positions: jax.Array


def draw_plan(rng, chunks, max_steps, tables, done):
  """Returns a random dispatch, and the conversation of each row.

  Some rows have less than their chunk, or nothing; some stop before others.
  Where a table has no page yet, it names one of somebody.
  """
  (count, size), (ids, *_) = chunks, whole_rows()
  talks, row = rng.permutation(ROWS), np.arange(ROWS)
  owners = np.r_[np.repeat(row[:count], size), row[count:]]
  offset = np.r_[np.tile(np.arange(size), count), 0 * row[count:]]
  start, left = done[talks], (ENDS - done)[talks]
  new = np.minimum(rng.integers(0, np.where(row < count, size, 1) + 1), left)
  steps = np.minimum(rng.integers(0, max_steps + 1, ROWS), left - new)
  steps *= new > 0
  fed = np.where(offset < new[owners], start[owners] + offset, kv_cache.EMPTY)
  then = (start + new)[:, None] + np.arange(max_steps)
  then[np.arange(max_steps) >= steps[:, None]] = kv_cache.EMPTY
  done[talks] += new + steps
  used = np.arange(WIDTH) * PAGE < done[talks, None]
  last = ids.shape[1] - 1
  arrays = (
    np.where(used, tables[talks], rng.choice(tables.ravel(), used.shape)),
    start + new,
    owners,
    ids[talks[owners], np.minimum(fed, last)],
    fed,
    ids[talks[:, None], np.minimum(then, last)],
    then,
  )
  return Plan(*(jnp.asarray(x, jnp.int32) for x in arrays)), talks


def advance(params, store, plan, *, chunks, layout=None):
  """Feeds, steps and commits; returns the pages, and what both passes gave."""
  past = jax.tree.map(
    lambda x: sharding.constrain(layout, x, *kv_cache.ROW_AXES),
    kv_cache.gather(store, plan.tables),
  )
  model = policy_lib.of(CONFIG).bind(params)
  hidden, past, fed, experts = model.feed(
    past, plan.lengths, plan.ids, plan.positions, chunks, layout=layout
  )
  assert experts is not None
  pieces, stepped = [(plan.owners, fed)], ()

  def step(past, now):
    index, ids, positions = now
    # Of a row that has stopped this is beyond what was written.
    lengths = plan.lengths + index + 1
    model = policy_lib.of(CONFIG).bind(params)
    hidden, past, _, experts = model.feed(
      past, lengths, ids, positions, (0, 1), layout=layout
    )
    assert experts is not None
    return past, (hidden, experts[:, 0])

  if max_steps := plan.next_ids.shape[1]:
    order = jnp.arange(max_steps, dtype=jnp.int32)
    columns = order, plan.next_ids.T, plan.next_positions.T
    past, stepped = jax.lax.scan(step, past, columns)
    fresh = kv_cache.take(past, plan.next_positions)
    pieces.append((jnp.arange(ROWS, dtype=jnp.int32), fresh))
  store = kv_cache.commit(store, plan.tables, pieces)
  return store, (hidden, experts[:, 0]), stepped


def full_pages():
  """Returns pages that hold what somebody else left there."""
  return jax.tree.map(
    lambda x: x + 7, kv_cache.init_cache(CONFIG, NUM_PAGES, PAGE)
  )


def check(run, params, store, chunks, max_steps=2):
  """Plays all conversations to their end, in random dispatches."""
  _, expected, experts = whole_rows()
  rng = np.random.default_rng(chunks)
  tables = rng.permutation(NUM_PAGES)[: ROWS * WIDTH].reshape(ROWS, WIDTH)
  done, seen = np.zeros(ROWS, int), np.zeros(expected.shape[:2], int)
  while (done < ENDS).any():
    plan, talks = draw_plan(rng, chunks, max_steps, tables, done)
    store, fed, stepped = run(params, store, plan)
    passes = [(talks[plan.owners], plan.positions, *fed)]
    for s in range(max_steps):
      passes.append(
        (talks, plan.next_positions[:, s], *(x[s] for x in stepped))
      )
    for owners, at, hidden, taken in passes:
      at, hidden, taken = jax.device_get((at, hidden, taken))
      real = at != kv_cache.EMPTY
      where = (owners[real], at[real])
      seen[where] += 1
      np.testing.assert_allclose(
        hidden[real], expected[where], rtol=0, atol=TOLERANCE
      )
      np.testing.assert_array_equal(taken[real], experts[where])
      np.testing.assert_array_equal(taken[~real], -1)
      assert np.isfinite(hidden).all()
  # Every token once.
  np.testing.assert_array_equal(seen, np.arange(max(ENDS)) < ENDS[:, None])


@pytest.mark.parametrize(
  "chunks",
  [(3, 4), (8, 4), (0, 1)],
  ids=["mixed", "chunks", "one-by-one"],
)
def test_any_mix_of_chunks_and_single_ids_agrees_with_whole_rows(chunks):
  run = jax.jit(functools.partial(advance, chunks=chunks))
  check(run, make_params(), full_pages(), chunks)


def test_a_mix_agrees_with_whole_rows_without_jit():
  run = functools.partial(advance, chunks=(6, 16))
  check(run, make_params(), full_pages(), (6, 16), max_steps=0)


def on_mesh(shape, rules, chunks):
  """Returns the dispatch, jitted for a mesh, with its parameters and pages."""
  auto = (jax.sharding.AxisType.Auto,) * 3
  mesh = jax.make_mesh(shape, sharding.MESH_AXES, axis_types=auto)
  layout = sharding.Layout(mesh, rules)
  pages = layout.sharding(*kv_cache.AXES)
  run = jax.jit(
    functools.partial(advance, chunks=chunks, layout=layout),
    donate_argnums=1,
    out_shardings=(pages, None, None),
  )
  places = layout.tree(policy_lib.of(CONFIG).axes)
  params = jax.device_put(make_params(), places)
  return run, params, jax.device_put(full_pages(), pages)


@needs_devices
@pytest.mark.parametrize(
  ("shape", "rules", "chunks"),
  [
    ((2, 2, 2), sharding.DECODE, (4, 4)),
    ((2, 2, 2), sharding.TRAIN, (4, 4)),
    ((1, 1, 8), sharding.DECODE, (3, 4)),
    ((1, 8, 1), sharding.DECODE, (8, 4)),
  ],
  ids=["decode", "train", "tensor", "expert"],
)
def test_any_mix_on_a_mesh_agrees_with_whole_rows(shape, rules, chunks):
  check(*on_mesh(shape, rules, chunks), chunks)


@needs_devices
@pytest.mark.parametrize(
  ("shape", "chunks"),
  [((1, 1, 8), (3, 4)), ((1, 8, 1), (8, 4)), ((2, 2, 2), (0, 1))],
  ids=["tensor", "expert", "one-by-one"],
)
def test_keys_and_values_of_the_past_stay_on_their_devices(shape, chunks):
  run, params, store = on_mesh(shape, sharding.DECODE, chunks)
  tables, done = np.zeros((ROWS, WIDTH), int), np.zeros(ROWS, int)
  plan, _ = draw_plan(np.random.default_rng(0), chunks, 2, tables, done)
  program = run.lower(params, store, plan).compile().as_text()
  assert program is not None
  exchanged = re.findall(r"= (.*) (?:all-|collective-)[a-z-]+\(", program)
  assert exchanged
  # Nothing else has as many entries as the longest row, or as the cache.
  sizes = rf"[\[,]({WIDTH * PAGE}|{NUM_PAGES})[,\]]"
  assert re.search(sizes, program)
  assert not [shapes for shapes in exchanged if re.search(sizes, shapes)]
