import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import config as config_lib
from models import kv_cache, logprobs
from models import policy as policy_lib
from models.hf import config as hf_config
from tests.helpers import numpy_decoder, small_models

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


def decode(params, config, tokens, dispatches, feed):
  """Feeds 3 rows in dispatches of chunks; returns logits of every token.

  Pages of 4 lie in any order, and row r begins r tokens late: until then its
  chunks are padding. What is written to pages is all taken from the past.
  """
  order = np.random.default_rng(1).permutation(20)
  tables = jnp.asarray(order[:12].reshape(3, 4), jnp.int32)
  rows = jnp.arange(3, dtype=jnp.int32)
  positions = jnp.arange(12, dtype=jnp.int32) - rows[:, None]
  tokens = jnp.take_along_axis(tokens, jnp.maximum(positions, 0), 1)
  positions = jnp.where(positions < 0, kv_cache.EMPTY, positions)
  store = jax.tree.map(lambda x: x + 9, kv_cache.init_cache(config, 20, 4))
  hidden, done = [], 0
  for sizes in dispatches:
    past, before = kv_cache.gather(store, tables), done
    for size in sizes:
      now = slice(done, done + size)
      done += size
      h, past, _, _ = feed(
        params,
        config,
        past,
        jnp.maximum(done - rows, 0),
        tokens[:, now].reshape(-1),
        positions[:, now].reshape(-1),
        (3, size) if size > 1 else (0, 1),
      )
      hidden.append(h.reshape(3, size, -1))
    fresh = kv_cache.take(past, positions[:, before:done])
    store = kv_cache.commit(store, tables, [(rows, fresh)])
  model = policy_lib.of(config).bind(params)
  logits = logprobs.logits(model.terms(jnp.concatenate(hidden, 1)))
  return [logits[row, row:] for row in range(3)]


@pytest.mark.parametrize(
  ("dispatches", "feed"),
  [
    ([(12,)], FEED),
    ([(4, 1, 1), (1, 1, 4)], FEED),
    ([(4, 4), (4,)], small_models.feed),
  ],
  ids=["whole-jit", "chunks-jit", "chunks-eager"],
)
def test_decoding_in_any_chunks_agrees_with_whole_rows(
  params, config, dispatches, feed
):
  tokens, positions, segments = packed([(12,)] * 3, width=12)
  expected, _ = apply(HIDDEN, params, config, tokens, positions, segments)
  decoded = decode(params, config, tokens, dispatches, feed)
  for row, logits in enumerate(decoded):
    assert np.isfinite(logits).all()
    np.testing.assert_allclose(logits, expected[row, : 12 - row], atol=1e-5)


@pytest.mark.parametrize("chunks", [(1, 2), (0, 1)], ids=["chunk", "one"])
def test_a_row_of_nothing_but_padding_stays_finite(params, config, chunks):
  store = kv_cache.init_cache(config, 2, 4)
  tables = jnp.array([[1, 0]], jnp.int32)
  past = kv_cache.gather(store, tables)
  empty = jnp.full(chunks[1], kv_cache.EMPTY, jnp.int32)
  nothing = jnp.zeros(1, jnp.int32)
  hidden, past, fresh, experts = FEED(
    params, config, past, nothing, jnp.zeros_like(empty), empty, chunks
  )
  assert all(np.isfinite(x).all() for x in jax.tree.leaves((hidden, fresh)))
  np.testing.assert_array_equal(experts, -1)
  owners = jnp.zeros_like(empty)
  committed = kv_cache.commit(store, tables, [(owners, fresh)])
  assert not any(np.any(x) for x in jax.tree.leaves((past, committed)))


@pytest.mark.parametrize("chunks", [(4, 2), (0, 1)], ids=["chunks", "step"])
def test_a_past_is_written_in_place(config, chunks):
  # Wide, so that keys outweigh the token_mask of who sees them.
  config = dataclasses.replace(config, head_dim=64)
  params = policy_lib.of(config).shapes
  tables = jax.ShapeDtypeStruct((4, 2**10), jnp.int32)
  pages = jax.eval_shape(lambda: kv_cache.init_cache(config, 4, 4))
  past = jax.eval_shape(kv_cache.gather, pages, tables)
  ids = jax.ShapeDtypeStruct((4 * chunks[1],), jnp.int32)
  lengths = jax.ShapeDtypeStruct((4,), jnp.int32)
  feed = jax.jit(
    small_models.feed, static_argnames=("config", "chunks"), donate_argnums=2
  )
  run = feed.lower(params, config, past, lengths, ids, ids, chunks).compile()
  memory = run.memory_analysis()
  assert memory is not None
  layer = past.k[0].size * past.k[0].dtype.itemsize
  assert memory.alias_size_in_bytes == 2 * config.num_layers * layer
  # Not even one layer's keys are copied on the way.
  assert memory.temp_size_in_bytes < layer / 10


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
    assert np.abs(gradient["layers"][layer]["moe"]["router"]).max() > 0
  np.testing.assert_array_equal(gradient["layers"][0]["moe"]["up"][2:], 0)
  np.testing.assert_array_equal(gradient["layers"][2]["moe"]["up"][::2], 0)
