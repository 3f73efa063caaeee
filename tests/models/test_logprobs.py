"""Chunks of tokens give what all logits at once would, and cost less memory."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import config as config_lib
from models import logprobs, lora, sharding
from models import policy as policy_lib

pytestmark = pytest.mark.compiled

TEMPERATURE = 0.7
ROWS, LENGTH, WIDTH, WORDS = 8, 14, 16, 48

both = pytest.mark.parametrize(
  "wrap", [jax.jit, lambda f: f], ids=["jit", "eager"]
)
# Of 104 tokens: one each, a last chunk of 6, one that is too large.
chunks = pytest.mark.parametrize("chunk", [1, 7, 1000])


@pytest.fixture(scope="module")
def data():
  rng = np.random.default_rng(0)
  hidden = rng.normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32)
  table = rng.normal(size=(WORDS, WIDTH)).astype(np.float32)
  targets = rng.integers(WORDS, size=(ROWS, LENGTH)).astype(np.int32)
  weights = rng.normal(size=(2, ROWS, LENGTH)).astype(np.float32)
  return jax.tree.map(jnp.asarray, (hidden, table, targets, weights))


def total(hidden, table, targets, weights, *, chunk, layout=None):
  """Any function of both results, which is returned with them."""
  found = logprobs.score(
    [logprobs.Term(hidden, table)],
    targets,
    temperature=TEMPERATURE,
    chunk=chunk,
    layout=layout,
  )
  return (found[0] * weights[0] + found[1] * weights[1]).sum(), found


def gradient(chunk, layout=None):
  function = functools.partial(total, chunk=chunk, layout=layout)
  return jax.grad(function, argnums=(0, 1), has_aux=True)


def exact(hidden, table, targets, weights):
  """The same by the definitions, in float64; gradients by hand."""
  hidden, table, weights = (
    np.asarray(x, np.float64) for x in (hidden, table, weights)
  )
  logits = hidden @ table.T / TEMPERATURE
  probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  logs = np.log(probs)
  entropy = -(probs * logs).sum(-1)
  picked = np.eye(WORDS)[np.asarray(targets)]
  # d log p_t = 1[j = t] - p_j; d(-sum p log p) = -p_j (log p_j + H).
  d_logits = weights[0][..., None] * (picked - probs)
  d_logits -= weights[1][..., None] * probs * (logs + entropy[..., None])
  d_logits /= TEMPERATURE
  d_table = np.einsum("blv,bld->vd", d_logits, hidden)
  return ((logs * picked).sum(-1), entropy), (d_logits @ table, d_table)


def assert_close(found, expected, rtol=1e-5):
  """Relative to the largest entry."""
  for a, b in zip(found, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=rtol * np.abs(b).max())


@both
@chunks
def test_values_and_gradients_are_the_exact_ones(data, wrap, chunk):
  grads, values = wrap(gradient(chunk))(*data)
  expected_values, expected_grads = exact(*data)
  for found, expected in zip(values, expected_values, strict=True):
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
  assert_close(grads, expected_grads)


@pytest.mark.skipif(
  jax.__version_info__ < (0, 9), reason="XLA of jax 0.8 rounds logits twice"
)
@both
def test_a_certain_token_has_no_entropy_and_no_gradient(wrap):
  # One logit is 200 above the other: exp(-200) is 0 in float32.
  hidden = jnp.full((1, 2, 1), 200 * TEMPERATURE)
  table = jnp.array([[0.0], [1.0]])
  targets = jnp.array([[1, 0]], jnp.int32)
  weights = jnp.ones((2, 1, 2))
  grads, (scores, entropy) = wrap(gradient(1))(hidden, table, targets, weights)
  np.testing.assert_allclose(scores, [[0.0, -200.0]], rtol=1e-6)
  np.testing.assert_array_equal(entropy, 0)
  # Only the impossible token pulls: (1, -1) / 0.7 on words 0 and 1. Logits of
  # 200 are computed again, to 2**-16 = 1.5e-5.
  assert_close([grads[0]], [np.array([[[0.0], [-1 / 0.7]]])], rtol=2e-5)
  assert_close([grads[1]], [np.array([[200.0], [-200.0]])], rtol=2e-5)


def test_gradients_of_many_chunks_are_added_in_float32():
  # 1024 equal tokens of 1024 chunks. A bfloat16 sum would stop growing at 256
  # terms; a float32 one is rounded to bfloat16 once, by at most 1 in 256.
  hidden = jnp.ones((1, 1024, 4), jnp.bfloat16)
  table = jnp.zeros((4, 4), jnp.bfloat16)
  targets = jnp.zeros((1, 1024), jnp.int32)
  weights = jnp.stack([jnp.ones((1, 1024)), jnp.zeros((1, 1024))])
  grads, (scores, entropy) = gradient(1)(hidden, table, targets, weights)
  # p = 1/4 each: 1024 (1 - 1/4) / 0.7 for word 0, 1024 (-1/4) / 0.7 for others.
  expected = 1024 / TEMPERATURE * np.array([0.75, -0.25, -0.25, -0.25])
  found = np.asarray(grads[1], np.float32)
  np.testing.assert_allclose(found, np.tile(expected, (4, 1)).T, rtol=1 / 128)
  assert grads[0].dtype == grads[1].dtype == jnp.bfloat16
  assert scores.dtype == entropy.dtype == jnp.float32
  np.testing.assert_allclose(scores, -math.log(4), rtol=1e-6)


def test_bfloat16_states_are_multiplied_into_float32_logits():
  # 1 + 2**-8 from two products is 1 when it is rounded to bfloat16.
  hidden = jnp.array([[[1.0, 2**-8]]], jnp.bfloat16)
  table = jnp.array([[1.0, 1.0], [1.0, 0.0]], jnp.bfloat16)
  term = logprobs.Term(hidden, table)
  targets = jnp.zeros((1, 1), jnp.int32)
  scores, _ = logprobs.score([term], targets, temperature=1.0, chunk=1)
  expected = -math.log1p(math.exp(-(2**-8)))
  np.testing.assert_allclose(scores, [[expected]], rtol=1e-6)


@pytest.fixture(params=[(2, 2, 2), (1, 1, 8), (2, 1, 2, 2)], ids=str)
def layout(request):
  return sharding.Layout(sharding.make_mesh(*request.param))


def compiled(layout, data, chunk):
  rows, table = (
    layout.sharding("batch", "length"),
    layout.sharding("vocab", "embed"),
  )
  where = (rows, table, rows, layout.sharding(None, "batch", "length"))
  placed = jax.device_put(data, where)
  run = jax.jit(gradient(chunk, layout), out_shardings=((rows, table), rows))
  return run.lower(*placed).compile(), placed


@chunks
def test_meshes_agree_and_gather_no_more_than_the_table(layout, data, chunk):
  run, placed = compiled(layout, data, chunk)
  grads, values = run(*placed)
  expected_values, expected_grads = exact(*data)
  assert_close(values, expected_values)
  assert_close(grads, expected_grads)
  # What travels: the table and its gradient once, a vocabulary's share of
  # each; inside of the loop sums over words, and of gradients [C, D].
  moved = re.findall(
    r"= \(?(\w+)\[([\d,]*)\]\S* (all-\w+|reduce-scatter|collective-\w+)\(",
    run.as_text() or "",
  )
  limit = max(
    WORDS * WIDTH // layout.size("vocab"),
    ROWS * LENGTH // layout.size("tokens") * WIDTH,
  )
  sizes = [math.prod(map(int, shape.split(","))) for _, shape, _ in moved]
  assert 0 < max(sizes) <= limit
  gathers = [shape for _, shape, name in moved if name == "all-gather"]
  assert len(gathers) <= 1


def test_the_room_it_takes_follows_the_chunk_and_not_the_tokens():
  # Logits of all tokens would be 1024 * 151,936 * 4 bytes. A chunk of 64 has
  # them, and their gradients, for a 16th: 2/16, and the table's gradient is
  # 4/1024 more for each of its 4 columns, times 2. A fifth is above that.
  shape = (2, 512)
  hidden = jax.ShapeDtypeStruct((*shape, 4), jnp.float32)
  table = jax.ShapeDtypeStruct((151_936, 4), jnp.float32)
  targets = jax.ShapeDtypeStruct(shape, jnp.int32)
  weights = jax.ShapeDtypeStruct((2, *shape), jnp.float32)

  def memory(chunk):
    run = jax.jit(gradient(chunk)).lower(hidden, table, targets, weights)
    memory = run.compile().memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes

  logits = 1024 * 151_936 * 4
  assert memory(64) < logits / 5
  assert memory(1024) > logits


def test_a_frozen_table_has_no_gradient_to_be_stored(data):
  # The loop of the backward pass would carry it, in float32.
  hidden, _, targets, weights = data
  table = jnp.ones((151_936, WIDTH))

  def memory(argnums):
    function = functools.partial(total, chunk=1)
    run = jax.jit(jax.grad(function, argnums=argnums, has_aux=True))
    run = run.lower(hidden, table, targets, weights).compile()
    memory = run.memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes + memory.output_size_in_bytes

  assert memory((0, 1)) - memory((0,)) > 0.9 * table.nbytes


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_it_can_be_compiled_for_accelerators(data, platform):
  traced = jax.jit(gradient(7)).trace(*data)
  assert traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("kind", ["tied", "untied", "adapted"])
def test_the_terms_sum_up_to_the_logits_of_the_model(kind):
  adapter = lora.Lora(rank=2, alpha=6.0, targets=("head",))
  config = config_lib.tiny(
    vocab_size=11,
    num_layers=1,
    d_model=8,
    tie_embeddings=kind == "tied",
    lora=adapter if kind == "adapted" else None,
  )
  params = policy_lib.of(config).init(jax.random.key(0))
  # A fresh adapter adds nothing.
  params = jax.tree.map(lambda x: x + 0.1, params)
  hidden = jax.random.normal(jax.random.key(1), (2, 3, 8))
  model = policy_lib.of(config).bind(params)
  terms = model.terms(hidden)
  assert len(terms) == 1 + (kind == "adapted")
  logits = sum(term.hidden @ term.table.T for term in terms)
  np.testing.assert_allclose(
    logits, logprobs.logits(model.terms(hidden)), rtol=1e-5, atol=1e-5
  )
  targets = jnp.arange(6, dtype=jnp.int32).reshape(2, 3)
  scores, _ = logprobs.score(terms, targets, temperature=1.0, chunk=2)
  expected = jax.nn.log_softmax(logits)[
    jnp.arange(2)[:, None], jnp.arange(3), targets
  ]
  np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-5)
