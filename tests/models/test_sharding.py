import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import cache, sharding, transformer

needs_devices = pytest.mark.skipif(
  jax.device_count() < 8, reason="needs 8 devices"
)


def make_mesh(data, expert):
  devices = np.array(jax.devices()[: data * expert]).reshape(data, expert)
  return jax.sharding.Mesh(devices, sharding.MESH_AXES)


def batch(rows=8, length=6):
  tokens = jax.random.randint(jax.random.key(0), (rows, length), 0, 11)
  positions = jnp.tile(jnp.arange(length), (rows, 1))
  # Rows end in 0 to 3 tokens of padding.
  segments = positions < length - jnp.arange(rows)[:, None] % 4
  return tokens, positions, segments.astype(jnp.int32)


@pytest.fixture
def config(config):
  return dataclasses.replace(config, num_layers=1)


@functools.partial(jax.jit, static_argnames=("config", "mesh"))
def gradients(params, config, tokens, positions, segments, mesh=None):
  def loss(params):
    logits, aux = transformer.apply(
      params, config, tokens, positions, segments, mesh=mesh
    )
    chosen = jax.nn.log_softmax(logits)[..., 0]
    chosen = jnp.sum(jnp.where(segments > 0, chosen, 0)) / segments.sum()
    return aux.load_balance - chosen, aux

  return jax.value_and_grad(loss, has_aux=True)(params)


@needs_devices
@pytest.mark.parametrize("shape", [(8, 1), (4, 2), (2, 4)], ids=str)
def test_loss_and_gradients_are_those_of_one_device(params, config, shape):
  mesh = make_mesh(*shape)
  sharding.validate(config, mesh, rows=8)
  expected = gradients(params, config, *batch())
  placed = jax.device_put(params, sharding.param_shardings(config, mesh))
  rows = jax.device_put(batch(), sharding.batch_sharding(mesh))
  actual = gradients(placed, config, *rows, mesh=mesh)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), actual, expected
  )
  up = actual[1]["layers"][0]["moe"]["up"]
  assert up.sharding.shard_shape(up.shape)[0] == 4 // shape[1]


@needs_devices
def test_decoding_is_that_of_one_device(params, config):
  mesh = make_mesh(4, 2)
  tokens, positions, segments = batch()
  positions = jnp.where(segments > 0, positions, cache.EMPTY)
  past = cache.init_cache(config, 8, 6)
  fresh = cache.init_fresh(config, 8, 6)
  lengths = jnp.zeros(8, jnp.int32)
  run = jax.jit(transformer.extend, static_argnames=("config", "mesh"))
  hidden, _ = run(params, config, past, lengths, fresh, 0, tokens, positions)
  placed = jax.device_put(params, sharding.param_shardings(config, mesh))
  past, fresh = jax.device_put((past, fresh), sharding.cache_sharding(mesh))
  lengths, tokens, at = jax.device_put(
    (lengths, tokens, positions), sharding.batch_sharding(mesh)
  )
  actual, _ = run(
    placed, config, past, lengths, fresh, 0, tokens, at, mesh=mesh
  )
  valid = positions != cache.EMPTY
  np.testing.assert_allclose(
    np.asarray(actual)[valid], hidden[valid], atol=1e-5
  )


@needs_devices
def test_a_mesh_that_does_not_divide_is_refused_with_a_way_out(config):
  with pytest.raises(
    ValueError,
    match="num_experts=4 does not divide over expert=8 devices; use expert=4",
  ):
    sharding.validate(config, make_mesh(1, 8))
  three = dataclasses.replace(config, num_experts=3)
  with pytest.raises(ValueError, match=r"num_experts=3 .* use expert=1"):
    sharding.validate(three, make_mesh(4, 2))
  with pytest.raises(
    ValueError,
    match="rows=6 do not divide over data=4 devices; use 8 rows or data=3",
  ):
    sharding.validate(config, make_mesh(4, 2), rows=6)


def test_a_mesh_of_other_axes_is_refused(config):
  one = np.array(jax.devices()[:1]).reshape(1, 1)
  with pytest.raises(ValueError, match=re.escape("use ('data', 'expert')")):
    sharding.validate(config, jax.sharding.Mesh(one, ("data", "model")))
  explicit = (jax.sharding.AxisType.Explicit,) * 2
  with pytest.raises(ValueError, match=r"use jax.sharding.AxisType.Auto"):
    sharding.validate(
      config, jax.sharding.Mesh(one, sharding.MESH_AXES, axis_types=explicit)
    )
