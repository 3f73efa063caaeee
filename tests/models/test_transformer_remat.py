"""What is computed again changes memory, and nothing else."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import config as config_lib
from models import kv_cache, transformer
from models import policy as policy_lib
from tests.helpers import small_models

CONFIGS = {
  "dense": config_lib.tiny(
    vocab_size=16, num_layers=3, d_model=32, head_dim=8, d_ff=128
  ),
  "sparse": config_lib.tiny_moe(
    vocab_size=16, num_layers=3, d_model=32, head_dim=8, d_expert=64
  ),
}
ORDER = ("layer", "dots", "none")
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
@pytest.mark.parametrize("remat", ["dots", "layer"])
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
@pytest.mark.parametrize("kind", CONFIGS)
def test_the_less_is_kept_the_less_memory_it_takes(kind):
  config = CONFIGS[kind]
  tokens = jax.ShapeDtypeStruct((8, 64), jnp.int32)

  def room(remat):
    run = gradient(config, remat).lower(policy_lib.of(config).shapes, tokens)
    memory = run.compile().memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes

  assert set(ORDER) == set(transformer.REMAT)
  rooms = [room(remat) for remat in ORDER]
  assert rooms == sorted(rooms)
  # Of three layers, one at a time.
  assert rooms[0] < 0.6 * rooms[-1]


@pytest.mark.parametrize("remat", ["dots", "layer"])
def test_decoding_has_nothing_to_compute_again(remat):
  config = CONFIGS["sparse"]
  params = policy_lib.of(config).init(jax.random.key(0))
  tables = jnp.array([[1, 3], [0, 2]], jnp.int32)
  past = kv_cache.gather(kv_cache.init_cache(config, 4, 4), tables)
  tokens = jnp.array([1, 2, 3, 4, 5, 6], jnp.int32)
  positions = jnp.tile(jnp.arange(3, dtype=jnp.int32), 2)
  lengths = jnp.full(2, 3, jnp.int32)
  feed = jax.jit(small_models.feed, static_argnames=("config", "chunks"))

  def decode(config):
    return feed(params, config, past, lengths, tokens, positions, (2, 3))

  compute = dataclasses.replace(config.compute, remat=remat)
  found = decode(dataclasses.replace(config, compute=compute))
  jax.tree.map(np.testing.assert_array_equal, found, decode(config))
