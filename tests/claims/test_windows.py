"""A decoder of layers with a window and without: loops, pages, meshes.

That its values are those of transformers is for tests/claims/test_parity.py.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import config as config_lib
from models import kv_cache, layer_stack, rope, sharding
from models import policy as policy_lib
from tests.helpers import small_models

pytestmark = pytest.mark.compiled

LENGTH, PAGE = 20, 4
WINDOW = config_lib.Window(size=6, full_every=3, rope_theta=100.0)
CONFIG = config_lib.tiny(
  vocab_size=16,
  num_layers=4,
  d_model=16,
  num_heads=4,
  head_dim=4,
  d_ff=24,
  max_length=LENGTH,
  rope_scaling=rope.Linear(factor=2.0),
  architecture="gemma",
  window=WINDOW,
  query_pre_attn_scalar=3,
)
# Its heads are normed as one, of which devices may hold parts.
OLMO = dataclasses.replace(
  CONFIG,
  architecture="olmo",
  rope_theta=5e5,
  rope_scaling=rope.Yarn(factor=2.0, original_max_length=8),
  window=dataclasses.replace(WINDOW, rope_theta=5e5),
  query_pre_attn_scalar=None,
)
CONFIGS = {"gemma": CONFIG, "olmo": OLMO}
FEED = jax.jit(small_models.feed, static_argnames=("config", "chunks"))
needs_devices = pytest.mark.skipif(
  jax.device_count() < 8, reason="needs 8 devices"
)


def of_form(layers, architecture="gemma"):
  config = CONFIGS[architecture]
  compute = dataclasses.replace(config.compute, layers=layers)
  return dataclasses.replace(config, compute=compute)


@functools.cache
def noisy(architecture="gemma"):
  return small_models.noisy(of_form("unroll", architecture), of_norms=0.0)


stack = functools.partial(layer_stack.stack, join=np.stack)


def params_of(config):
  return stack(noisy(config.architecture), config)


def rows():
  """Returns tokens, positions and segments of two packed rows."""
  tokens = np.random.default_rng(1).integers(16, size=(2, LENGTH))
  segments = np.stack([np.ones(LENGTH), 1 + (np.arange(LENGTH) >= 12)])
  positions = np.stack([np.arange(LENGTH), np.r_[:12, :8]])
  return [x.astype(np.int32) for x in (tokens, positions, segments)]


def outcome(config, params, layout=None):
  """Returns hidden states of `rows`, and the gradient of a sum of theirs."""
  hidden = functools.partial(small_models.hidden, layout=layout)

  def total(params, *args):
    states, _ = hidden(params, config, *args)
    return jnp.sum(jnp.sin(states)), states

  return jax.jit(jax.grad(total, has_aux=True))(params, *rows())


@functools.cache
def unrolled(architecture="gemma"):
  config = of_form("unroll", architecture)
  return jax.device_get(outcome(config, noisy(architecture)))


def assert_close(found, expected):
  for a, e in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
    bound = 1e-5 * max(1, np.abs(e).max())
    np.testing.assert_allclose(a, e, rtol=0, atol=bound)


def test_layers_with_and_without_a_window_scan_as_one():
  scanned = of_form("scan")
  assert len(scanned.layer_runs) == 1
  gradient, states = outcome(scanned, params_of(scanned))
  expected, whole = unrolled()
  assert_close(gradient, stack(expected, scanned))
  assert_close(states, whole)


def test_a_window_changes_what_comes_after_it_alone():
  everything = dataclasses.replace(WINDOW, size=LENGTH)
  config = dataclasses.replace(of_form("unroll"), window=everything)
  _, states = outcome(config, noisy())
  difference = np.abs(np.asarray(states) - unrolled()[1]).max(-1)
  np.testing.assert_allclose(difference[:, :6], 0, atol=1e-6)
  assert (difference[0, 6:] > 1e-3).all()


@needs_devices
@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_mesh_changes_nothing(architecture):
  layout = sharding.Layout(sharding.make_mesh(data=2, tensor=2, context=2))
  config = of_form("scan", architecture)
  places = layout.tree(policy_lib.of(config).axes)
  params = jax.device_put(params_of(config), places)
  gradient, states = outcome(config, params, layout)
  expected, whole = unrolled(architecture)
  assert_close(gradient, stack(expected, config))
  assert_close(states, whole)


@pytest.mark.parametrize(
  ("architecture", "layers", "tensor", "sizes"),
  [
    ("gemma", "unroll", 1, (LENGTH,)),
    ("gemma", "unroll", 1, (7, 1, 1, 1, 5, 5)),
    ("gemma", "scan", 1, (7, 1, 1, 1, 5, 5)),
    ("gemma", "scan", 1, (1,) * LENGTH),
    pytest.param("gemma", "scan", 2, (7, 1, 1, 1, 5, 5), marks=needs_devices),
    pytest.param("olmo", "scan", 2, (7, 1, 1, 1, 5, 5), marks=needs_devices),
  ],
)
def test_pages_give_what_rows_do(architecture, layers, tensor, sizes):
  config = of_form(layers, architecture)
  params, feed = params_of(config), FEED
  if tensor == 2:
    mesh = sharding.make_mesh(data=2, tensor=2, devices=jax.devices()[:4])
    layout = sharding.Layout(mesh, sharding.DECODE)
    params = jax.device_put(params, layout.tree(policy_lib.of(config).axes))
    feed = jax.jit(
      functools.partial(small_models.feed, layout=layout),
      static_argnames=("config", "chunks"),
    )
  tokens, positions, _ = rows()
  # Two conversations of whole rows, that of the second 12 long.
  positions[1, 12:] = kv_cache.EMPTY
  tables = np.random.default_rng(2).permutation(10).reshape(2, 5)
  states = small_models.fed(
    *(feed, params, config, kv_cache.init_cache(config, 10, PAGE)),
    *(jnp.asarray(tables, jnp.int32), tokens, positions, sizes),
  )
  _, whole = unrolled(architecture)
  assert_close(states[0], whole[0])
  assert_close(states[1, :12], whole[1, :12])
