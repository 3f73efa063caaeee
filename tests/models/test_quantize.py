"""Matrices of int8 and float8, and a model that is computed with them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import config as config_lib
from models import logprobs, lora, quantize, sharding
from models import policy as policy_lib
from tests.helpers import small_models

pytestmark = pytest.mark.compiled

CONFIG = dataclasses.replace(
  small_models.CONFIG, compute=config_lib.Compute(moe_block=4)
)
TIED = dataclasses.replace(
  CONFIG,
  tie_embeddings=True,
  lora=lora.Lora(rank=2, targets=("query", "out", "gate", "up", "router")),
)
KERNELS = dataclasses.replace(
  CONFIG, compute=config_lib.Compute(experts="pallas")
)
BFLOAT16 = dataclasses.replace(
  CONFIG, compute=config_lib.Compute(dtype="bfloat16", moe_block=4)
)


@functools.cache
def make_params(config):
  """Channels of very different size, so that one scale would not do."""
  rng = np.random.default_rng(0)

  def noise(leaf):
    values = rng.normal(float(leaf.ndim == 1), 0.3, leaf.shape)
    channels = np.exp(rng.normal(size=leaf.shape[-1:])) if leaf.ndim > 1 else 1
    return jnp.asarray(values * channels, leaf.dtype)

  return jax.tree.map(noise, policy_lib.of(config).shapes)


def multiplied_out(params, dtype=jnp.float32):
  """What `quantize.dequantize` must return, by NumPy."""

  def leaf(node):
    if not isinstance(node, quantize.Quantized):
      return node
    values, scale = map(np.asarray, node)
    return jnp.asarray(values.astype(np.float32) * scale, dtype)

  return jax.tree.map(leaf, params, is_leaf=quantize.is_quantized)


def logits(params, config, layout=None, experts=None):
  tokens = jax.random.randint(jax.random.key(0), (8, 5), 0, config.vocab_size)
  positions = jnp.tile(jnp.arange(5, dtype=jnp.int32), (8, 1))
  model = policy_lib.of(config).bind(params)
  hidden, _ = model.hidden(
    tokens, positions, jnp.ones_like(tokens), experts=experts, layout=layout
  )
  return logprobs.logits(model.terms(hidden, layout=layout))


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_the_largest_weight_of_a_channel_is_127_steps(wrap):
  # Steps of 1 and 2 / 127; 0.5 is 31.75 of the latter.
  weight = jnp.array([[127, -2], [-63.4, 0.5]])
  matrix = wrap(lambda x: quantize.quantize_matrix(x, (0,)))(weight)
  np.testing.assert_array_equal(matrix.values, [[127, -127], [-63, 32]])
  np.testing.assert_allclose(matrix.scale, [[1, 2 / 127]], rtol=1e-6)
  assert (matrix.values.dtype, matrix.shape) == (jnp.int8, (2, 2))


def test_no_weight_is_off_by_more_than_half_a_step_of_its_channel():
  params = make_params(CONFIG)
  small = quantize.quantize(params)

  def check(node, weight):
    if isinstance(node, quantize.Quantized):
      error = np.abs(np.asarray(quantize.dequantize(node, "float32")) - weight)
      # Half a step, and what rounding of the scale adds to 127 of them.
      assert (error <= np.asarray(node.scale) * (0.5 + 127 * 2**-23)).all()
      assert error.max() > 0

  jax.tree.map(check, small, params, is_leaf=quantize.is_quantized)


def float8_magnitudes():
  """Every finite magnitude of e4m3fn: 4 bits of exponent, 3 of mantissa."""
  small = [m / 8 * 2.0**-6 for m in range(8)]
  rest = [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
  return np.array(small + rest[:-1])  # The last code is nan.


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_float8_is_the_nearest_of_its_values_to_weight_over_scale(wrap):
  weight = np.random.default_rng(0).normal(size=(64, 48)) * np.geomspace(
    1e-3, 1e3, 48
  )
  weight = weight.astype(np.float32)
  matrix = wrap(lambda x: quantize.quantize_matrix(x, (0,), "float8_e4m3fn"))(
    jnp.asarray(weight)
  )
  assert matrix.values.dtype == jnp.float8_e4m3fn
  scale = np.abs(weight.astype(np.float64)).max(0, keepdims=True) / 448
  np.testing.assert_allclose(matrix.scale, scale, rtol=2e-7)
  back = np.asarray(quantize.dequantize(matrix, jnp.float32), np.float64)
  magnitudes = float8_magnitudes()
  assert magnitudes[-1] == 448
  wanted = np.abs(weight / scale)
  nearest = np.abs(wanted[..., None] - magnitudes).min(-1)
  # Of two values equally near, but for the rounding of the scale, either.
  np.testing.assert_allclose(
    np.abs(back / scale - weight / scale), nearest, rtol=1e-4, atol=1e-4
  )


def test_every_output_channel_has_a_scale_and_nothing_else_is_quantised():
  params = make_params(TIED)
  small = quantize.quantize(params)
  dense, sparse = small["layers"].values()
  assert small["embed"].scale.shape == (16, 1)
  assert dense["attention"]["query"].scale.shape == (1, 4, 4)
  assert dense["attention"]["key"].scale.shape == (1, 2, 4)
  assert dense["attention"]["out"].scale.shape == (1, 1, 8)
  assert dense["mlp"]["gate"].scale.shape == (1, 6)
  assert dense["mlp"]["down"].scale.shape == (1, 8)
  assert sparse["moe"]["up"].scale.shape == (4, 1, 10)
  assert sparse["moe"]["down"].scale.shape == (4, 1, 8)
  head = quantize.quantize(make_params(CONFIG))["head"]
  assert head.scale.shape == (1, 16)
  before = params["layers"][1]["moe"]
  router = before["router"]["kernel"]
  assert sparse["moe"]["router"]["kernel"] is router
  adapters = map(jax.tree.leaves, (sparse["moe"]["lora"], before["lora"]))
  assert all(a is b for a, b in zip(*adapters, strict=True))
  assert small["final_norm"] is params["final_norm"]
  assert dense["attention"]["query_norm"].dtype == jnp.float32
  again = quantize.quantize(small)
  assert jax.tree.structure(again) == jax.tree.structure(small)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_zeros_come_back_as_zeros_and_faults_as_nan(dtype):
  weight = jnp.array([[0.0, np.nan, np.inf, 1e-44], [0, 1, 1, 0]])
  matrix = quantize.quantize_matrix(weight, (0,), dtype)
  back = np.asarray(quantize.dequantize(matrix, jnp.float32))
  np.testing.assert_array_equal(back[:, 0], 0)
  assert np.isnan(back[0, 1:3]).all()
  # Half a step of the smallest scale there is.
  np.testing.assert_allclose(back[:, 3], 0, atol=1e-38)


@pytest.mark.parametrize(
  ("config", "dtype"),
  [
    pytest.param(CONFIG, "int8", id="untied-int8"),
    pytest.param(TIED, "float8_e4m3fn", id="tied-float8"),
    pytest.param(KERNELS, "int8", id="kernels-int8"),
    pytest.param(
      CONFIG, "float8_e4m3fn", id="untied-float8", marks=pytest.mark.slow
    ),
    pytest.param(TIED, "int8", id="tied-int8", marks=pytest.mark.slow),
    pytest.param(
      KERNELS, "float8_e4m3fn", id="kernels-float8", marks=pytest.mark.slow
    ),
  ],
)
def test_a_quantised_model_is_that_of_the_matrices_multiplied_out(
  config, dtype
):
  small = quantize.quantize(make_params(config), dtype)
  run = functools.partial(logits, config=config)
  np.testing.assert_array_equal(run(small), run(multiplied_out(small)))


@pytest.mark.parametrize(
  ("config", "dtype", "bound"),
  [
    pytest.param(CONFIG, "int8", 0.01, id="untied-int8"),
    pytest.param(TIED, "float8_e4m3fn", 0.04, id="tied-float8"),
    pytest.param(TIED, "int8", 0.01, id="tied-int8", marks=pytest.mark.slow),
    pytest.param(
      *(CONFIG, "float8_e4m3fn", 0.04),
      id="untied-float8",
      marks=pytest.mark.slow,
    ),
  ],
)
def test_a_quantised_model_is_close_to_the_one_that_it_is_of(
  config, dtype, bound
):
  params = make_params(config)
  # Given experts: at a tie the routers might choose others.
  experts = jnp.tile(jnp.array([1, 3], jnp.int32), (8, 5, 1, 1))
  run = functools.partial(logits, config=config, experts=experts)
  wide = np.asarray(run(params))
  off = np.asarray(run(quantize.quantize(params, dtype))) - wide
  # Rounding has a standard deviation of 1 / sqrt(12) steps, and a channel
  # about 60 of them: 0.5% for each matrix. The median of the logits is within
  # 1% of their spread; a token near a bend of the model may be further off.
  # float8 rounds to 4 bits: a standard deviation of 2% for each matrix.
  assert 0 < np.median(np.abs(off)) < bound * wide.std()


def test_a_model_of_bfloat16_multiplies_out_to_bfloat16():
  small = quantize.quantize(make_params(BFLOAT16))
  tokens = jnp.zeros((1, 5), jnp.int32)
  model = policy_lib.of(BFLOAT16).bind(small)
  hidden, _ = model.hidden(tokens, tokens, tokens + 1)
  assert hidden.dtype == jnp.bfloat16
  wide = np.asarray(logits(multiplied_out(small, jnp.bfloat16), BFLOAT16))
  off = np.asarray(logits(small, BFLOAT16)) - wide
  # Experts are multiplied out in float32: bfloat16 has 8 bits.
  assert off.std() < 2**-6 * wide.std()


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
@pytest.mark.parametrize(
  ("config", "rules"),
  [
    pytest.param(CONFIG, "TRAIN", id="untied-TRAIN"),
    pytest.param(TIED, "DECODE", id="tied-DECODE"),
    pytest.param(CONFIG, "DECODE", id="untied-DECODE", marks=pytest.mark.slow),
    pytest.param(TIED, "TRAIN", id="tied-TRAIN", marks=pytest.mark.slow),
  ],
)
def test_a_quantised_model_on_a_mesh_is_that_of_one_device(config, rules):
  mesh = sharding.make_mesh(2, 2, 2)
  layout = sharding.Layout(mesh, getattr(sharding, rules))
  small = quantize.quantize(make_params(config))
  axes = sharding.follow(policy_lib.of(config).axes, small)
  placed = jax.device_put(small, layout.tree(axes))
  down = placed["layers"][1]["moe"]["down"]
  # Experts, hidden width and, in training, width are split; the scale has
  # no hidden width.
  width = 4 if rules == "TRAIN" else 8
  assert down.values.sharding.shard_shape(down.shape) == (2, 5, width)
  assert down.scale.sharding.shard_shape(down.scale.shape) == (2, 1, width)
  run = jax.jit(functools.partial(logits, config=config, layout=layout))
  # Sums in another order: 1e-5 of logits of order 1.
  np.testing.assert_allclose(
    run(placed), logits(small, config), rtol=1e-5, atol=1e-5
  )
