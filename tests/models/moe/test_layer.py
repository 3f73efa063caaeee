import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import lora
from models.moe import layer as moe_layer
from tests.helpers import small_models

pytestmark = pytest.mark.compiled


@pytest.fixture
def layer(params):
  return params["layers"][0]["moe"]


@functools.partial(jax.jit, static_argnums=1)
def mix(layer, config, x, copies, chosen=None):
  """What the layer returns, as one program for all tests of one shape."""
  return small_models.moe(config).bind(layer)(x, copies, None, chosen)


@functools.partial(jax.jit, static_argnums=1)
def dense(layer, config, x, experts=None):
  """Every expert on every token; those that it does not take weigh nothing."""
  probs = jax.nn.softmax(x @ layer["router"]["kernel"])
  if experts is None:
    experts = jax.lax.top_k(probs, config.experts_per_token)[1]
  gates = probs * jax.nn.one_hot(experts, config.num_experts).sum(1)
  if config.norm_topk_prob:
    gates = gates / gates.sum(-1, keepdims=True)
  up = jnp.einsum("td,edf->tef", x, layer["up"])
  gate = jnp.einsum("td,edf->tef", x, layer["gate"])
  hidden = jax.nn.silu(gate) * up
  return jnp.einsum("te,tef,efd->td", gates, hidden, layer["down"])


@functools.partial(jax.jit, static_argnums=1)
def dense_gradients(layer, config, x, target, experts):
  """Returns gradients of `layer` and `x`, and the values."""

  def loss(layer, x):
    y = dense(layer, config, x, experts)
    return jnp.mean(y * target), y

  return jax.grad(loss, (0, 1), has_aux=True)(layer, x)


def in_blocks(config, rows):
  compute = dataclasses.replace(config.compute, moe_block=rows)
  return dataclasses.replace(config, compute=compute)


# Made by numpy: in jax every shape would be a program.
def ones(count):
  return jnp.asarray(np.ones(count, np.int32))


def some_tokens(count, config):
  values = np.random.default_rng(2).normal(size=(count, config.d_model))
  return jnp.asarray(values, jnp.float32)


def check_against_dense(layer, config, x, wrap, experts=None):
  """Compares values and all gradients, to 1e-6."""
  target = x[::-1]

  def loss(layer, x):
    mixed = small_models.moe(config).bind(layer)
    y = mixed(x, ones(len(x)), None, experts)[0]
    return jnp.mean(y * target), y

  got = wrap(jax.grad(loss, (0, 1), has_aux=True))(layer, x)
  want = dense_gradients(layer, config, x, target, experts)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-6),
    got,
    want,
  )


# 1 is below one block, 7 divides nothing, 200 makes blocks of 32 rows. That the
# others come eagerly to the same is shown with the golden models.
@pytest.mark.parametrize(
  ("count", "normed", "wrap"),
  [
    pytest.param(1, True, jax.jit, id="1"),
    pytest.param(7, True, jax.jit, id="7"),
    pytest.param(7, False, jax.jit, id="7-not-normed"),
    pytest.param(200, True, jax.jit, id="200"),
    pytest.param(7, False, lambda f: f, id="7-not-normed-eager"),
  ],
)
def test_blocks_agree_with_all_experts_on_all_tokens(
  layer, config, count, normed, wrap
):
  config = dataclasses.replace(config, norm_topk_prob=normed)
  check_against_dense(layer, config, some_tokens(count, config), wrap)


def test_kernels_agree_with_all_experts_on_all_tokens(layer, config):
  compute = dataclasses.replace(config.compute, experts="pallas")
  config = dataclasses.replace(config, compute=compute)
  check_against_dense(layer, config, some_tokens(40, config), jax.jit)


def test_no_token_is_dropped_when_all_choose_the_same_experts(layer, config):
  x = jnp.tile(some_tokens(1, config), (20, 1))
  y, aux, _ = mix(layer, config, x, ones(20))
  np.testing.assert_allclose(y, dense(layer, config, x), atol=1e-6, rtol=1e-6)
  # Two of four experts have half of all assignments each, twice their share.
  assert aux.dropped == 0
  assert aux.max_load == 2
  assert sorted(aux.load.tolist()) == [0, 0, 0.5, 0.5]


@pytest.mark.parametrize("count", [16, 304])
def test_permuting_tokens_permutes_their_bits(layer, config, count):
  # Whole vectors only: the tail of one of XLA's loops may round differently.
  config = in_blocks(config, 16)
  x, order = some_tokens(count, config), np.random.default_rng(3)
  order = order.permutation(count)
  mixed = [mix(layer, config, some, ones(count))[0] for some in (x, x[order])]
  np.testing.assert_array_equal(mixed[1], np.asarray(mixed[0])[order])


def test_a_token_does_not_depend_on_its_companions(layer, config):
  config = in_blocks(config, 16)
  x = some_tokens(64, config)
  others = x.at[32:].set(-3 * x[32:])
  found, alone = (mix(layer, config, y, ones(64))[0] for y in (others, x))
  np.testing.assert_array_equal(found[:32], alone[:32])


def test_padding_gets_zeros_and_is_not_counted(layer, config):
  x, copies = some_tokens(9, config), (jnp.arange(9) < 6).astype(jnp.int32)

  def loss(layer, x, copies):
    y, aux, _ = small_models.moe(config).bind(layer)(x, copies)
    total = jnp.sum(y**2) + aux.load_balance + aux.z_loss + aux.router_entropy
    return total, (y, aux)

  step = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
  (alone, dx_alone), (y_alone, aux_alone) = step(layer, x[:6], ones(6))
  for planted in (1e30, np.inf, np.nan):
    (grads, dx), (y, aux) = step(layer, x.at[6:].set(planted), copies)
    np.testing.assert_array_equal(y[6:], 0)
    np.testing.assert_array_equal(dx[6:], 0)
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-5),
      (grads, dx[:6], y[:6], aux),
      (alone, dx_alone, y_alone, aux_alone),
    )


def test_a_batch_of_padding_has_finite_statistics_and_gradients(layer, config):
  def loss(layer, x):
    y, aux, _ = small_models.moe(config).bind(layer)(x, jnp.zeros(4, jnp.int32))
    return jnp.sum(y) + sum(jnp.sum(value) for value in aux), (y, aux)

  x = some_tokens(4, config)
  step = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
  grads, (y, aux) = step(layer, x)
  for leaf in jax.tree.leaves((grads, y, aux)):
    np.testing.assert_array_equal(leaf, 0)


def test_a_token_with_copies_counts_as_often(layer, config):
  x = some_tokens(3, config)
  copies = jnp.array([3, 1, 2], jnp.int32)
  y, shared, _ = mix(layer, config, x, copies)
  every = mix(layer, config, jnp.repeat(x, copies, 0), ones(6))
  np.testing.assert_allclose(jnp.repeat(y, copies, 0), every[0], atol=1e-6)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), shared, every[1]
  )


def test_statistics_of_a_router_that_is_sure_and_of_one_that_is_not(
  layer, config
):
  x = jnp.ones((20, config.d_model))

  def aux(router):
    changed = layer | {"router": {"kernel": router}}
    return mix(changed, config, x, ones(20))[1]

  # All probabilities 1/4, so the two experts taken do not matter:
  # 4 * (1/2 * 1/4 + 1/2 * 1/4) = 1, and ln 4 nats; the logits sum to 4.
  even = aux(jnp.zeros((config.d_model, 4)))
  np.testing.assert_allclose(even.load_balance, 1, rtol=1e-6)
  np.testing.assert_allclose(even.router_entropy, math.log(4), rtol=1e-6)
  np.testing.assert_allclose(even.z_loss, math.log(4) ** 2, rtol=1e-6)
  np.testing.assert_allclose(even.max_load, 2)
  # Logits 16 * 10 for experts 0 and 1, and 0 for the others: P = 1/2, 1/2 and
  # f = 1/2, 1/2, so 4 * (1/4 + 1/4) = 2, and ln 2 nats; the logarithm of
  # 2 exp(160) is 160 + ln 2.
  sure = aux(jnp.zeros((config.d_model, 4)).at[:, :2].set(10.0))
  np.testing.assert_allclose(sure.load_balance, 2, rtol=1e-6)
  np.testing.assert_allclose(sure.router_entropy, math.log(2), rtol=1e-5)
  np.testing.assert_allclose(sure.z_loss, (160 + math.log(2)) ** 2, rtol=1e-6)
  np.testing.assert_allclose(sure.load, [0.5, 0.5, 0, 0])
  assert sure.unused_experts == 0.5


def test_layers_are_averaged_but_for_the_worst_load_and_what_is_dropped():
  def aux(value):
    value = jnp.float32(value)
    load = jnp.stack([value, 1 - value])
    return moe_layer.Aux(value, value, value, load, value, value, value)

  both = jax.tree.map(lambda *x: jnp.stack(x), aux(0.25), aux(0.75))
  mean = moe_layer.average(both)
  assert mean.load_balance == mean.z_loss == mean.router_entropy == 0.5
  assert mean.load.tolist() == [0.5, 0.5]
  assert mean.max_load == 0.75
  assert mean.unused_experts == 0.5
  assert mean.dropped == 1
  none = moe_layer.average(None, num_experts=3)
  assert none.load.tolist() == [0, 0, 0]
  assert none.load_balance == none.max_load == none.dropped == 0


@functools.partial(jax.jit, static_argnums=1)
def own_choice(layer, config, x):
  probs = jax.nn.softmax(x @ layer["router"]["kernel"])
  return jax.lax.top_k(probs, config.experts_per_token)[1].astype(jnp.int32)


def test_it_tells_whom_the_router_chose_and_padding_took_nobody(layer, config):
  x, copies = some_tokens(20, config), jnp.arange(20, dtype=jnp.int32) % 3
  experts = own_choice(layer, config, x)
  padding = copies[:, None] == 0
  expected = jnp.where(padding, -1, experts)
  np.testing.assert_array_equal(mix(layer, config, x, copies)[2], expected)
  # What it was told to take, in that order, is what it took.
  others = 3 - experts
  chosen = jnp.where(jnp.arange(20)[:, None] < 10, others, -1)
  found = mix(layer, config, x, copies, chosen)[2]
  np.testing.assert_array_equal(found[10:], expected[10:])
  np.testing.assert_array_equal(found[:10], jnp.where(padding, -1, others)[:10])


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_replaying_its_own_choice_changes_no_bit(layer, config, wrap):
  x = some_tokens(32, config)
  apply = wrap(
    lambda chosen: small_models.moe(config).bind(layer)(
      x, ones(32), None, chosen
    )
  )
  free, again = apply(None), apply(own_choice(layer, config, x))
  jax.tree.map(np.testing.assert_array_equal, free, again)


@pytest.mark.parametrize(
  ("num_experts", "dtype"), [(128, np.int8), (300, np.int16)]
)
def test_a_router_takes_choices_in_the_recorded_dtype_bit_for_bit(
  config, num_experts, dtype
):
  config = dataclasses.replace(config, num_experts=num_experts)
  moe, x = small_models.moe(config), some_tokens(4, config)
  router = moe.bind(moe.init(jax.random.key(0))).router
  # The first and the last expert among them; the last token is free.
  last = num_experts - 1
  chosen = jnp.asarray([[0, last], [last, 5], [7, 0], [-1, -1]], jnp.int32)
  narrow = chosen.astype(config.expert_dtype)
  assert narrow.dtype == dtype
  wide, again = (router(x, ones(4), some) for some in (chosen, narrow))
  np.testing.assert_array_equal(again[1][:3], chosen[:3])
  jax.tree.map(np.testing.assert_array_equal, wide, again)


@pytest.mark.parametrize("normed", [True, False], ids=["normed", "not-normed"])
def test_replay_takes_the_recorded_experts_and_no_others(layer, config, normed):
  config = dataclasses.replace(config, norm_topk_prob=normed)
  x = some_tokens(20, config)
  order = np.random.default_rng(4).random((20, 4)).argsort(1)
  recorded = jnp.asarray(order[:, :2], jnp.int32)
  assert (recorded != own_choice(layer, config, x)).any()
  check_against_dense(layer, config, x, jax.jit, recorded)
  _, aux, _ = mix(layer, config, x, ones(20), recorded)
  counts = np.bincount(np.asarray(recorded).ravel(), minlength=4)
  np.testing.assert_allclose(aux.load, counts / 40, rtol=1e-6)


def test_under_replay_the_router_learns_from_the_recorded_experts(
  layer, config
):
  x, target = some_tokens(6, config), some_tokens(12, config)[6:]
  # The worst two experts of each token: the router would never take them.
  chosen = jnp.argsort(x @ layer["router"]["kernel"])[:, :2].astype(jnp.int32)

  def mixed(router):
    changed = layer | {"router": {"kernel": router}}
    return small_models.moe(config).bind(changed)(x, ones(6), None, chosen)[0]

  @jax.jit
  def loss(router):
    return jnp.sum(mixed(router) * target)

  kernel = layer["router"]["kernel"]
  grad = jax.grad(loss)(kernel)
  assert jnp.abs(grad).max() > 1e-3
  direction = jnp.sign(grad)
  step = 1e-2 * direction
  slope = (loss(kernel + step) - loss(kernel - step)) / 0.02
  # Central differences in float32: 1e-2^2 times the curvature.
  np.testing.assert_allclose(slope, jnp.vdot(grad, direction), rtol=1e-2)


def test_where_nothing_is_recorded_the_router_chooses(layer, config):
  x = some_tokens(20, config)
  own = own_choice(layer, config, x)
  recorded = jnp.where(jnp.arange(20)[:, None] < 10, 3 - own, -1)
  y, _, _ = mix(layer, config, x, ones(20), recorded)
  experts = jnp.where(recorded < 0, own, recorded)
  np.testing.assert_allclose(
    y, dense(layer, config, x, experts), atol=1e-6, rtol=1e-6
  )


def test_a_half_recorded_token_takes_the_best_of_the_other_experts(
  layer, config
):
  x = some_tokens(20, config)
  best = own_choice(layer, config, x)
  # Its best expert is recorded, in the other place: the second best is free.
  recorded = jnp.stack([jnp.full(20, -1, jnp.int32), best[:, 0]], 1)
  y, aux, _ = mix(layer, config, x, ones(20), recorded)
  np.testing.assert_allclose(y, dense(layer, config, x), atol=1e-6, rtol=1e-6)
  assert aux.dropped == 0


def test_a_recorded_expert_that_does_not_exist_shows_as_dropped(layer, config):
  x = some_tokens(20, config)
  recorded = own_choice(layer, config, x).at[2, 1].set(4)
  y, aux, _ = mix(layer, config, x, ones(20), recorded)
  assert aux.dropped == 1
  assert jnp.isfinite(y).all()


def test_adapters_compute_what_merged_weights_do(layer, config):
  rng, x = np.random.default_rng(5), some_tokens(21, config)

  def noise(*shape):
    return jnp.asarray(0.3 * rng.normal(size=shape), jnp.float32)

  weights = layer | {"router": layer["router"]["kernel"]}
  adapters, merged = {}, {}
  for name, weight in weights.items():
    *stack, rows, columns = weight.shape
    adapters[name] = {
      "a": noise(*stack, rows, 3),
      "b": noise(*stack, 3, columns),
    }
    merged[name] = weight + adapters[name]["a"] @ adapters[name]["b"]

  def loss(weights, adapters, x):
    router, settings, own = {"kernel": weights["router"]}, config, {}
    if adapters:
      # A factor of alpha / rank = 1.
      wanted = lora.Lora(rank=3, alpha=3.0, targets=tuple(adapters))
      settings = dataclasses.replace(config, lora=wanted)
      router["lora"] = {"kernel": adapters["router"]}
      own["lora"] = {x: adapters[x] for x in adapters if x != "router"}
    params = weights | own | {"router": router}
    y, aux, _ = small_models.moe(settings).bind(params)(x, ones(21))
    return jnp.sum(y**2) + aux.load_balance, (y, aux)

  step = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))
  grads, (y, aux) = step(weights, adapters, x)
  want, (y_merged, aux_merged) = step(merged, {}, x)
  close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-4)  # noqa: E731
  jax.tree.map(close, (y, aux), (y_merged, aux_merged))
  close(grads[2], want[2])
  for name in adapters:
    # d/dA of a function of W + A B is its d/dW times B^T, and A^T for B.
    a, b = adapters[name]["a"], adapters[name]["b"]
    got, dw = grads[1][name], want[0][name]
    close(got["a"], dw @ jnp.swapaxes(b, -1, -2))
    close(got["b"], jnp.swapaxes(a, -1, -2) @ dw)


def test_the_backward_pass_keeps_no_hidden_values(layer, config):
  # What is saved: inputs, and integers of 4 bytes for slots. Hidden values of
  # one matmul alone would be 2 x 4096 x 64 floats.
  config = dataclasses.replace(config, d_expert=64)
  shapes = small_models.moe(config).shapes
  layer = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), shapes)

  def saved(x):
    _, pull = jax.vjp(
      lambda layer, x: small_models.moe(config).bind(layer)(x, ones(4096))[0],
      layer,
      x,
    )
    return pull

  leaves = jax.tree.leaves(jax.eval_shape(saved, jnp.zeros((4096, 16))))
  assert max(leaf.size for leaf in leaves) <= 4096 * 16
