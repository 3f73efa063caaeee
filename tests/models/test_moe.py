import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import moe


@pytest.fixture
def layer(params):
  return params["layers"][0]["moe"]


def dense(layer, config, x):
  """Every expert on every token; those not among the top k weigh nothing."""
  probs = jax.nn.softmax(x @ layer["router"])
  kth = jnp.sort(probs, -1)[:, -config.experts_per_token, None]
  gates = jnp.where(probs >= kth, probs, 0)
  gates = gates / gates.sum(-1, keepdims=True)
  up = jnp.einsum("td,edf->tef", x, layer["up"])
  gate = jnp.einsum("td,edf->tef", x, layer["gate"])
  hidden = jax.nn.silu(gate) * up
  return jnp.einsum("te,tef,efd->td", gates, hidden, layer["down"])


def some_tokens(count, config):
  return jax.random.normal(jax.random.key(2), (count, config.d_model))


# 1 is below one block, 7 divides nothing, 200 makes blocks of 12 rows.
@pytest.mark.parametrize(
  ("count", "wrap"),
  [(1, jax.jit), (7, jax.jit), (200, jax.jit), (7, lambda f: f)],
  ids=["1-jit", "7-jit", "200-jit", "7-eager"],
)
def test_blocks_agree_with_all_experts_on_all_tokens(
  layer, config, count, wrap
):
  x = some_tokens(count, config)
  target = x[::-1]

  def grouped(layer, x):
    return moe.apply(layer, config, x, jnp.ones(count, bool))[0]

  def reference(layer, x):
    return dense(layer, config, x)

  def run(mix, wrap):
    def loss(layer, x):
      y = mix(layer, x)
      return jnp.mean(y * target), y

    return wrap(jax.grad(loss, (0, 1), has_aux=True))(layer, x)

  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-6),
    run(grouped, wrap),
    run(reference, jax.jit),
  )


def test_no_token_is_dropped_when_all_choose_the_same_experts(layer, config):
  x = jnp.tile(some_tokens(1, config), (33, 1))
  y, _ = moe.apply(layer, config, x, jnp.ones(33, bool))
  np.testing.assert_allclose(y, dense(layer, config, x), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
  ("count", "wrap"),
  [(16, jax.jit), (304, jax.jit), (304, lambda f: f)],
  ids=["16-jit", "304-jit", "304-eager"],
)
def test_permuting_tokens_permutes_their_bits(layer, config, count, wrap):
  # Whole vectors only: the tail of one of XLA's loops may round differently.
  config = dataclasses.replace(config, moe_block=16)
  x, valid = some_tokens(count, config), jnp.ones(count, bool)
  order = jax.random.permutation(jax.random.key(3), count)
  mix = wrap(lambda x: moe.apply(layer, config, x, valid)[0])
  np.testing.assert_array_equal(mix(x[order]), np.asarray(mix(x))[order])


def test_a_token_does_not_depend_on_its_companions(layer, config):
  config = dataclasses.replace(config, moe_block=16)
  x, valid = some_tokens(64, config), jnp.ones(64, bool)
  mix = jax.jit(lambda x: moe.apply(layer, config, x, valid)[0])
  others = x.at[32:].set(-3 * x[32:])
  np.testing.assert_array_equal(mix(others)[:32], mix(x)[:32])


def test_padding_gets_zeros_and_is_not_counted(layer, config):
  x = some_tokens(9, config)
  valid = jnp.arange(9) < 6
  apply = jax.jit(moe.apply, static_argnames="config")
  y, aux = apply(layer, config, x.at[6:].set(1e30), valid)
  alone, aux_alone = apply(layer, config, x[:6], jnp.ones(6, bool))
  np.testing.assert_array_equal(y[6:], 0)
  np.testing.assert_allclose(y[:6], alone, atol=1e-6)
  np.testing.assert_allclose(aux, aux_alone, rtol=1e-6)


def test_a_batch_of_padding_has_finite_statistics(layer, config):
  y, aux = moe.apply(layer, config, some_tokens(4, config), jnp.zeros(4, bool))
  np.testing.assert_array_equal(y, 0)
  np.testing.assert_array_equal(aux, 0)


def test_statistics_of_a_router_that_is_sure_and_of_one_that_is_not(
  layer, config
):
  x, valid = jnp.ones((8, config.d_model)), jnp.ones(8, bool)

  def aux(router):
    return moe.apply(layer | {"router": router}, config, x, valid)[1]

  # All probabilities 1/4, so the two experts taken do not matter:
  # 4 * (1/2 * 1/4 + 1/2 * 1/4) = 1, and ln 4 nats.
  even = aux(jnp.zeros((config.d_model, 4)))
  np.testing.assert_allclose(even, (1, math.log(4)), rtol=1e-6)
  # Logits 16 * 10 for experts 0 and 1, and 0 for the others: P = 1/2, 1/2 and
  # f = 1/2, 1/2, so 4 * (1/4 + 1/4) = 2, and ln 2 nats.
  sure = aux(jnp.zeros((config.d_model, 4)).at[:, :2].set(10.0))
  np.testing.assert_allclose(sure, (2, math.log(2)), rtol=1e-6)
