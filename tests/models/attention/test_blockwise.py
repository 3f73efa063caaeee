import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.attention import attention, blockwise, mask

pytestmark = pytest.mark.compiled


def draw(*shape, seed=0):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), "float32")


def packed(batch, length, heads=4, kv_heads=2, width=4, segments=1):
  """Returns queries, keys, values, and the mask of equal segments."""
  numbers = 1 + np.arange(length) * segments // length
  token_mask = mask.packed_mask(
    jnp.asarray(np.tile(numbers, (batch, 1)), jnp.int32)
  )
  shapes = ((heads, 0), (kv_heads, 1), (kv_heads, 2))
  arrays = (draw(batch, length, num, width, seed=seed) for num, seed in shapes)
  return *arrays, token_mask


@functools.partial(jax.jit, static_argnums=4)
def tiled(q, k, v, token_mask, block):
  source = mask.KeyValues(k, v, token_mask)
  return blockwise.attend(q, token_mask, [source], block=block)


@functools.partial(jax.jit, static_argnums=4)
def gradient(q, k, v, token_mask, block):
  def loss(q, k, v):
    return jnp.sum(jnp.sin(tiled(q, k, v, token_mask, block)))

  return jax.grad(loss, (0, 1, 2))(q, k, v)


def random_marks(rng, length, first):
  """Returns token_mask in no order at all, from place `first` on."""
  order, segments, parents = (
    jnp.asarray(rng.integers(low, high, (2, length)), jnp.int32)
    for low, high in ((first, 20), (-1, 4), (-1, 4))
  )
  return mask.TokenMask(order, segments, parents)


def run(attend, masks, q, first, second):
  """Returns the result for two sources, and gradients of all three."""
  own, past, new = masks

  def mix(q, first, second):
    sources = [
      mask.KeyValues(first, first + 1, past),
      mask.KeyValues(second, second + 1, new),
    ]
    return attend(q, own, sources)

  out, pull = jax.vjp(mix, q, first, second)
  return out, *pull(jnp.sin(out))


WHOLE = jax.jit(
  functools.partial(run, functools.partial(attention.attend, form="reference"))
)


@pytest.mark.parametrize(
  ("block", "wrap"),
  [(1, jax.jit), (4, jax.jit), (7, jax.jit), (100, jax.jit), (7, lambda f: f)],
  ids=["1", "4", "7", "100", "7-eager"],
)
def test_tiles_of_any_size_see_what_a_whole_matrix_sees(block, wrap):
  rng = np.random.default_rng(block)
  q, first, second = draw(2, 9, 4, 4), draw(2, 7, 2, 4), draw(2, 12, 2, 4)
  token_mask = random_marks(rng, 9, first=9)
  token_mask = token_mask._replace(segments=jnp.maximum(token_mask.segments, 1))
  past = random_marks(rng, 7, first=0)
  # Three first tokens, so that every query sees one.
  new = mask.TokenMask(
    jnp.asarray(rng.integers(0, 20, (2, 12)), jnp.int32).at[:, :3].set(0),
    jnp.tile(jnp.array([1, 2, 3, -1], jnp.int32), (2, 3)),
  )

  args = (token_mask, past, new), q, first, second
  tiles = functools.partial(blockwise.attend, block=block)
  actual, expected = wrap(functools.partial(run, tiles))(*args), WHOLE(*args)
  jax.tree.map(
    lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5, atol=2e-6),
    actual,
    expected,
  )


def test_a_query_that_sees_nothing_gets_zeros_and_no_gradient():
  q, k, v, token_mask = packed(1, 6)
  hidden = token_mask._replace(segments=token_mask.segments.at[0, 2:4].set(-1))
  out = tiled(q, k, v, hidden, 2)
  np.testing.assert_array_equal(out[0, 2:4], 0)
  assert np.abs(out[0, 4:]).min() > 0
  for leaf in gradient(q, k, v, hidden, 2):
    np.testing.assert_array_equal(leaf[0, 2:4], 0)
    assert np.isfinite(leaf).all()


def test_tiles_that_nobody_sees_are_not_read():
  # Segments of 8 in tiles of 4: of the first and the last segment, nothing is
  # touched on the way to the middle one.
  q, k, v, token_mask = packed(1, 24, segments=3)
  far = np.r_[0:8, 16:24]
  planted = (q, k.at[:, far].set(jnp.nan), v.at[:, far].set(jnp.nan))
  out = tiled(*planted, token_mask, 4)
  np.testing.assert_array_equal(
    out[:, 8:16], tiled(q, k, v, token_mask, 4)[:, 8:16]
  )
  assert np.isnan(out[:, far]).all()


def temp_bytes(length, function):
  args = packed(1, length, heads=2, kv_heads=1)
  run = jax.jit(function, static_argnums=4)
  analysis = run.lower(*args, 64).compile().memory_analysis()
  assert analysis is not None
  return analysis.temp_size_in_bytes


@pytest.mark.parametrize("function", [tiled, gradient])
def test_memory_grows_with_the_length_and_not_with_its_square(function):
  # Linear is 4, square is 16; one whole matrix of scores at 4096 is 128 MiB.
  short, long = temp_bytes(1024, function), temp_bytes(4096, function)
  assert long < 5 * short
  assert long < 2**21


def test_only_what_is_named_is_kept_for_the_backward_pass():
  q, k, v, token_mask = packed(1, 64)
  policy = jax.checkpoint_policies.save_only_these_names(*blockwise.SAVED)

  def loops(policy):
    attend = jax.checkpoint(
      lambda q, k, v: tiled(q, k, v, token_mask, 16).sum(), policy=policy
    )
    text = str(jax.make_jaxpr(jax.grad(attend))(q, k, v))
    return text.count(" while[")

  # One over tiles of keys forward, one backward; without the names the forward
  # pass is run a second time.
  assert loops(policy) == 2
  assert loops(None) == 3
