import collections
import dataclasses
import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import config as config_lib
from models import definition, kv_cache, logprobs, sharding, transformer
from models import policy as policy_lib
from models.attention import attention, mask
from models.hf import config as hf_config
from tests.helpers import numpy_decoder, small_models

pytestmark = pytest.mark.compiled

HIDDEN = jax.jit(small_models.hidden, static_argnames="config")
FEED = jax.jit(small_models.feed, static_argnames=("config", "chunks"))
LENGTHS = ((5, 4), (9,), (2, 1))  # of the segments of each row of 10


def apply(hidden, params, config, tokens, positions, segments):
  states, aux = hidden(params, config, tokens, positions, segments)
  model = policy_lib.of(config).bind(params)
  return logprobs.logits(model.terms(states)), aux


def packed(lengths, width=10):
  """Returns tokens, positions and segments of rows of segments."""
  segments = np.zeros((len(lengths), width), np.int32)
  positions = np.zeros_like(segments)
  for row, parts in enumerate(lengths):
    start = 0
    for number, length in enumerate(parts, 1):
      segments[row, start : start + length] = number
      positions[row, start : start + length] = range(length)
      start += length
  tokens = np.random.default_rng(0).integers(11, size=segments.shape)
  return tuple(map(jnp.asarray, (tokens.astype(np.int32), positions, segments)))


@pytest.mark.parametrize(
  "hidden", [HIDDEN, small_models.hidden], ids=["jit", "eager"]
)
def test_packed_rows_agree_with_a_float64_model_of_each_segment(
  params, config, hidden
):
  tokens, positions, segments = packed(LENGTHS)
  logits, _ = apply(hidden, params, config, tokens, positions, segments)
  tensors, sizes = numpy_decoder.checkpoint(params), hf_config.to_hf(config)
  for row, parts in enumerate(LENGTHS):
    for number in range(1, len(parts) + 1):
      own = np.asarray(segments[row] == number)
      ids = np.asarray(tokens[row])[own]
      expected = numpy_decoder.forward(tensors, sizes, ids)
      np.testing.assert_allclose(logits[row][own], expected, atol=1e-5)


def test_padding_changes_neither_logits_nor_statistics(params, config):
  args = packed([(6,)], width=6)
  padded = [jnp.pad(x, ((0, 1), (0, 3))) for x in args]
  logits, aux = apply(HIDDEN, params, config, *args)
  more, aux_more = apply(HIDDEN, params, config, *padded)
  np.testing.assert_allclose(more[0, :6], logits[0], atol=1e-5)
  for found, wanted in zip(aux_more, aux, strict=True):
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
  assert np.isfinite(more).all()


def test_gradients_of_rows_with_padding_are_finite(params, config):
  tokens, positions, segments = packed([(3,), ()])

  def loss(params):
    logits, aux = apply(
      small_models.hidden, params, config, tokens, positions, segments
    )
    losses = jnp.where(segments > 0, jax.nn.logsumexp(logits, -1), 0)
    return jnp.mean(losses) + aux.load_balance + aux.router_entropy

  for gradient in jax.tree.leaves(jax.jit(jax.grad(loss))(params)):
    assert np.isfinite(gradient).all()
    assert np.abs(gradient).max() > 0


def test_a_tied_head_is_the_embedding(params, config):
  tied = {k: v for k, v in params.items() if k != "head"}
  config = dataclasses.replace(config, tie_embeddings=True)
  hidden = jnp.eye(config.d_model)
  model = policy_lib.of(config).bind(tied)
  logits = logprobs.logits(model.terms(hidden))
  np.testing.assert_allclose(logits, params["embed"].T, rtol=1e-6)


def decode(params, config, tokens, sizes, feed):
  """Feeds 3 rows in chunks; returns logits of every token.

  Pages of 4 lie in any order, and row r begins r tokens late: until then its
  chunks are padding.
  """
  order = np.random.default_rng(1).permutation(20)
  tables = jnp.asarray(order[:12].reshape(3, 4), jnp.int32)
  rows = jnp.arange(3, dtype=jnp.int32)
  positions = jnp.arange(12, dtype=jnp.int32) - rows[:, None]
  tokens = jnp.take_along_axis(tokens, jnp.maximum(positions, 0), 1)
  positions = jnp.where(positions < 0, kv_cache.EMPTY, positions)
  store = kv_cache.init_cache(config, 20, 4)
  hidden = small_models.fed(
    feed, params, config, store, tables, tokens, positions, sizes
  )
  model = policy_lib.of(config).bind(params)
  logits = logprobs.logits(model.terms(jnp.asarray(hidden)))
  return [logits[row, row:] for row in range(3)]


@pytest.mark.parametrize(
  ("sizes", "feed"),
  [
    ((12,), FEED),
    ((4, 1, 1, 1, 1, 4), FEED),
    ((4, 4, 4), small_models.feed),
  ],
  ids=["whole-jit", "chunks-jit", "chunks-eager"],
)
def test_decoding_in_any_chunks_agrees_with_whole_rows(
  params, config, sizes, feed
):
  tokens, positions, segments = packed([(12,)] * 3, width=12)
  expected, _ = apply(HIDDEN, params, config, tokens, positions, segments)
  decoded = decode(params, config, tokens, sizes, feed)
  for row, logits in enumerate(decoded):
    assert np.isfinite(logits).all()
    np.testing.assert_allclose(logits, expected[row, : 12 - row], atol=1e-5)


@pytest.mark.parametrize("chunks", [(1, 2), (0, 1)], ids=["chunk", "one"])
def test_a_row_of_nothing_but_padding_stays_finite(params, config, chunks):
  store = kv_cache.init_cache(config, 2, 4)
  tables = jnp.array([[1, 0]], jnp.int32)
  empty = jnp.full(chunks[1], kv_cache.EMPTY, jnp.int32)
  hidden, store, experts = FEED(
    params, config, store, tables, jnp.zeros_like(empty), empty, chunks
  )
  assert np.isfinite(hidden).all()
  np.testing.assert_array_equal(experts, -1)
  assert not any(np.any(x) for x in store)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_token_that_is_not_finite_ruins_its_own_conversation_only(
  params, config, bad, dtype
):
  config = dataclasses.replace(config, compute=config_lib.Compute(dtype=dtype))
  params = jax.tree.map(lambda x: x.astype(dtype), params)
  params["embed"] = params["embed"].at[9].set(bad)
  ids = jnp.array([[1, 9, 2, 3], [4, 5, 6, 7]], jnp.int32)
  positions = jnp.tile(jnp.arange(4, dtype=jnp.int32), 2)
  tables = jnp.array([[0, 2], [1, 3]], jnp.int32)
  more, next_ = jnp.array([8, 8], jnp.int32), jnp.full(2, 4, jnp.int32)

  def both(store, ids):
    """Returns what four ids in pages of 4, and one behind them, lead to."""
    hidden, store, _ = FEED(
      params, config, store, tables, ids.reshape(-1), positions, (2, 4)
    )
    then, store, _ = FEED(params, config, store, tables, more, next_, (0, 1))
    return np.r_[hidden, then].astype(np.float32), store

  empty = kv_cache.init_cache(config, 4, 4)
  clean, _ = both(empty, ids.at[0].set(ids[1]))
  found, store = both(empty, ids)
  # Of the first row those from the second id on, and the one behind.
  is_bad = np.zeros(10, bool)
  is_bad[[1, 2, 3, 8]] = True
  np.testing.assert_array_equal(np.isfinite(found).all(1), ~is_bad)
  np.testing.assert_array_equal(found[[4, 5, 6, 7, 9]], clean[[4, 5, 6, 7, 9]])
  # Its page is another's now, who has not filled it yet.
  one = jnp.array([0, kv_cache.EMPTY, kv_cache.EMPTY, kv_cache.EMPTY] * 2)
  hidden, _, _ = FEED(
    params, config, store, tables, ids[::-1].reshape(-1), one, (2, 4)
  )
  np.testing.assert_array_equal(np.float32(hidden[0]), clean[4])


@pytest.mark.parametrize(
  ("rows", "chunks"),
  [(4, (4, 2)), (4, (0, 1)), (1, (0, 1))],
  ids=["chunks", "step", "one row"],
)
def test_pages_are_written_and_read_where_they_are(config, rows, chunks):
  params = policy_lib.of(config).shapes
  feed = jax.jit(
    small_models.feed, static_argnames=("config", "chunks"), donate_argnums=2
  )

  def memory(pages, width):
    cache = jax.eval_shape(lambda: kv_cache.init_cache(config, pages, 4))
    tables = jax.ShapeDtypeStruct((rows, width), jnp.int32)
    ids = jax.ShapeDtypeStruct((rows * chunks[1],), jnp.int32)
    run = feed.lower(params, config, cache, tables, ids, ids, chunks).compile()
    found = run.memory_analysis()
    assert found is not None
    size = 2 * cache.k.size * cache.k.dtype.itemsize
    assert found.alias_size_in_bytes == size
    return found.temp_size_in_bytes, size

  (few, _), (many, size) = memory(64, 64), memory(2**14, 2**10)
  # More pages, and longer tables, need no more memory beside them but for the
  # tables themselves.
  assert many - few < 64 * 2**10
  assert many < size / 10


def test_what_writes_into_the_residual_stream_starts_smaller(config):
  init = jax.jit(policy_lib.of(config).init)
  layer = init(jax.random.key(0))["layers"][1]
  # 0.02 / sqrt(2 * 2 layers) = 0.01; 512 samples of it err by 3% (1 sigma).
  assert np.std(layer["moe"]["down"]) == pytest.approx(0.01, rel=0.15)
  assert np.std(layer["moe"]["up"]) == pytest.approx(0.02, rel=0.15)
  np.testing.assert_array_equal(layer["mlp_norm"], 1)


def test_the_head_of_the_engine_is_as_exact_as_that_of_the_learner():
  # Logits of 8 bits around 30 would be off by up to 30 / 2^9 = 0.06 nats.
  rng = np.random.default_rng(0)
  config = config_lib.tiny(
    vocab_size=64, compute=config_lib.Compute(dtype="bfloat16")
  )
  table = rng.normal(size=(64, config.d_model))
  params = policy_lib.of(config).init(jax.random.key(0))
  params |= {"embed": jnp.asarray(table, jnp.bfloat16)}
  hidden = jnp.asarray(rng.normal(size=(2, 5, config.d_model)), jnp.bfloat16)
  targets = jnp.asarray(rng.integers(64, size=(2, 5)), jnp.int32)
  model = policy_lib.of(config).bind(params)
  logits = logprobs.logits(model.terms(hidden))
  assert logits.dtype == jnp.float32
  assert np.abs(logits).max() > 20
  found = jax.nn.log_softmax(logits)
  found = jnp.take_along_axis(found, targets[..., None], -1)[..., 0]
  terms = model.terms(hidden)
  expected, _ = logprobs.score(terms, targets, temperature=1.0, chunk=4)
  np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("remat", ["none", "layer"])
def test_recorded_experts_reach_the_router_of_their_layer(remat):
  config = config_lib.tiny_moe(
    vocab_size=11,
    num_layers=3,
    d_model=16,
    d_expert=8,
    dense_layers=(1,),
    compute=config_lib.Compute(remat=remat),
  )
  params = policy_lib.of(config).init(jax.random.key(0))
  tokens, positions, segments = packed([(6, 4), (10,)])
  # Layer 0 sends everything to experts 0 and 1, layer 2 to 1 and 3.
  recorded = jnp.array([[0, 1], [3, 1]], jnp.int32)
  recorded = jnp.broadcast_to(recorded, (2, 10, 2, 2))

  def total(params):
    model = policy_lib.of(config).bind(params)
    hidden, aux = model.hidden(tokens, positions, segments, experts=recorded)
    return jnp.sum(jnp.sin(hidden)), aux

  gradient, aux = jax.jit(jax.grad(total, has_aux=True))(params)
  np.testing.assert_allclose(aux.load, [0.25, 0.5, 0, 0.25], rtol=1e-6)
  assert aux.dropped == 0
  for layer in (0, 2):
    assert (
      np.abs(gradient["layers"][layer]["moe"]["router"]["kernel"]).max() > 0
    )
  np.testing.assert_array_equal(gradient["layers"][0]["moe"]["up"][2:], 0)
  np.testing.assert_array_equal(gradient["layers"][2]["moe"]["up"][::2], 0)


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
  return jax.tree.map(jnp.asarray, small_models.noisy(CONFIG))


@functools.cache
def whole_rows():
  """Returns ids, hidden states, and the experts of each token and layer.

  Hidden states are those of `Transformer.hidden`; experts are asked of
  `TopKRouter`, by layers that are put together here.
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
  for layer, block in enumerate(model.layers):
    normed = attention.rms_norm(x, block.attention_norm[...], eps)
    query, k, v = block.attention.project(normed, positions, layer)
    sources = [mask.KeyValues(k, v, token_mask)]
    mixed = attention.attend(query, token_mask, sources, form="reference")
    x += block.attention.merge(mixed)
    normed = attention.rms_norm(x, block.mlp_norm[...], eps)
    if hasattr(block, "mlp"):
      x += block.mlp(normed)
      continue
    flat = normed.reshape(-1, CONFIG.d_model)
    _, experts, _ = block.moe.router(flat, copies)
    y, _, _ = block.moe(flat, copies)
    x += y.reshape(x.shape)
    taken.append(experts.reshape(*ids.shape, -1))
  return attention.rms_norm(x, params["final_norm"], eps), jnp.stack(taken, 2)


class Plan(NamedTuple):
  """One dispatch: ids fed at once, then ids of a few steps of each row."""

  tables: jax.Array
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
    owners,
    ids[talks[owners], np.minimum(fed, last)],
    fed,
    ids[talks[:, None], np.minimum(then, last)],
    then,
  )
  return Plan(*(jnp.asarray(x, jnp.int32) for x in arrays)), talks


def advance(params, store, plan, *, chunks, layout=None):
  """Feeds and steps; returns the pages, and what both passes gave."""
  model = policy_lib.of(CONFIG).bind(params)
  hidden, store, experts = model.feed(
    store, plan.tables, plan.ids, plan.positions, chunks, layout=layout
  )
  assert experts is not None
  stepped = ()

  def step(store, now):
    ids, positions = now
    model = policy_lib.of(CONFIG).bind(params)
    hidden, store, experts = model.feed(
      store, plan.tables, ids, positions, (0, 1), layout=layout
    )
    assert experts is not None
    return store, (hidden, experts[:, 0])

  if plan.next_ids.shape[1]:
    columns = plan.next_ids.T, plan.next_positions.T
    store, stepped = jax.lax.scan(step, store, columns)
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
  [(3, 4), pytest.param((8, 4), marks=pytest.mark.slow), (0, 1)],
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
  layout = sharding.Layout(sharding.make_mesh(*shape), rules)
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
    # An engine of `test_model_runner.py` has each of these.
    pytest.param((1, 1, 8), sharding.DECODE, (3, 4), marks=pytest.mark.slow),
    pytest.param((1, 8, 1), sharding.DECODE, (8, 4), marks=pytest.mark.slow),
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


CONFIGS = {
  "dense": config_lib.tiny(
    vocab_size=16, num_layers=3, d_model=32, head_dim=8, d_ff=128
  ),
  "sparse": config_lib.tiny_moe(
    vocab_size=16, num_layers=3, d_model=32, head_dim=8, d_expert=64
  ),
}
ORDER = ("host", "layer", "dots", "none")
"""From the least memory to the most."""


def gradient(config, remat):
  compute = dataclasses.replace(config.compute, remat=remat)
  config = dataclasses.replace(config, compute=compute)

  def total(params, tokens):
    positions = jnp.broadcast_to(
      jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape
    )
    model = policy_lib.of(config).bind(params)
    hidden, aux = model.hidden(tokens, positions, jnp.ones_like(tokens))
    return jnp.sum(jnp.sin(hidden)) + aux.load_balance

  return jax.jit(jax.grad(total))


@pytest.mark.parametrize("kind", CONFIGS)
def test_layers_of_a_kind_are_lowered_once(kind):
  def products(num_layers):
    config = dataclasses.replace(CONFIGS[kind], num_layers=num_layers)
    policy = policy_lib.of(config)
    cache = jax.eval_shape(lambda: policy.module.init_cache(4, 8))
    ids = jax.ShapeDtypeStruct((2,), jnp.int32)
    tables = jax.ShapeDtypeStruct((2, 2), jnp.int32)

    def feed(params, cache, tables, tokens, positions):
      model = policy.bind(params)
      return model.feed(cache, tables, tokens, positions, (0, 1))

    text = jax.jit(feed).lower(policy.shapes, cache, tables, ids, ids).as_text()
    return text.count("stablehlo.dot_general")

  # The matrix products of one layer, whether two call it or six.
  assert 0 < products(2) == products(6)


@pytest.mark.parametrize(
  ("kind", "remat"),
  [
    *(("sparse", "dots"), ("sparse", "layer"), ("dense", "host")),
    *(
      pytest.param(*other, marks=pytest.mark.slow)
      for other in (("dense", "dots"), ("dense", "layer"), ("sparse", "host"))
    ),
  ],
)
def test_gradients_are_equal(kind, remat):
  config = CONFIGS[kind]
  params = policy_lib.of(config).init(jax.random.key(0))
  tokens = jax.random.randint(jax.random.key(1), (4, 12), 0, 16, jnp.int32)
  expected = gradient(config, "none")(params, tokens)
  found = gradient(config, remat)(params, tokens)
  for a, b in zip(
    jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
  ):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.abs(b).max())


@pytest.mark.skipif(
  jax.__version_info__ < (0, 9), reason="XLA of jax 0.8 undoes it on a CPU"
)
@pytest.mark.parametrize(
  "kind", ["dense", pytest.param("sparse", marks=pytest.mark.slow)]
)
def test_the_less_is_kept_the_less_memory_it_takes(kind):
  config = CONFIGS[kind]
  tokens = jax.ShapeDtypeStruct((8, 64), jnp.int32)

  def temporary(remat):
    run = gradient(config, remat).lower(policy_lib.of(config).shapes, tokens)
    memory = run.compile().memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes

  assert set(ORDER) == set(transformer.REMAT)
  sizes = [temporary(remat) for remat in ORDER]
  assert sizes == sorted(sizes)
  # Of three layers, one at a time.
  assert sizes[0] < 0.6 * sizes[-1]


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("layers", ["unroll", "scan"])
def test_inputs_of_layers_go_to_the_host_and_come_back(layers, platform):
  config = CONFIGS["dense"]
  compute = dataclasses.replace(config.compute, layers=layers)
  config = dataclasses.replace(config, compute=compute)
  tokens = jax.ShapeDtypeStruct((4, 12), jnp.int32)
  shapes = policy_lib.of(config).shapes

  def moves(remat):
    traced = gradient(config, remat).trace(shapes, tokens)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    found = collections.Counter()
    for function in re.split(r"(?=func\.func )", text):
      # A function that layers share is called once for each.
      name = function.partition("@")[2].partition("(")[0]
      calls = max(1, text.count(f"call @{name}("))
      for kind in re.findall(r'_xla_buffer_placement = "(\w+)"', function):
        found[kind] += calls
    return found, traced.jaxpr

  there_and_back, program = moves("host")
  # Of three layers, or of the one that stands for them in a loop.
  count = 3 if layers == "unroll" else 1
  assert there_and_back == {"pinned_host": count, "device": count}
  assert not moves("layer")[0]
  # Between the passes of a loop all inputs lie in one array, on the host.
  if layers == "scan":
    assert "f32<host>[3,4,12,32]" in str(program)
    assert "f32[3,4,12,32]" not in str(program)


@pytest.mark.parametrize("remat", ["dots", "layer"])
def test_decoding_has_nothing_to_compute_again(remat):
  config = CONFIGS["sparse"]
  params = policy_lib.of(config).init(jax.random.key(0))
  tables = jnp.array([[1, 3], [0, 2]], jnp.int32)
  cache = kv_cache.init_cache(config, 4, 4)
  tokens = jnp.array([1, 2, 3, 4, 5, 6], jnp.int32)
  positions = jnp.tile(jnp.arange(3, dtype=jnp.int32), 2)
  feed = jax.jit(small_models.feed, static_argnames=("config", "chunks"))

  def decode(config):
    return feed(params, config, cache, tables, tokens, positions, (2, 3))

  compute = dataclasses.replace(config.compute, remat=remat)
  found = decode(dataclasses.replace(config, compute=compute))
  jax.tree.map(np.testing.assert_array_equal, found, decode(config))
