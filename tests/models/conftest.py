"""A model small enough to be checked by hand-written loops."""

import jax
import pytest

from models import config as config_lib
from models import transformer


@pytest.fixture(scope="session")
def config():
  return config_lib.tiny_moe(
    vocab_size=11,
    num_layers=2,
    d_model=16,
    head_dim=4,
    d_ff=8,
    tie_embeddings=False,
    moe_block=2,
  )


@pytest.fixture(scope="session")
def params(config):
  """Large and without structure, so that no part of the model is idle."""
  init = jax.jit(transformer.init, static_argnames="config")
  leaves, tree = jax.tree.flatten(init(jax.random.key(0), config))
  keys = jax.random.split(jax.random.key(1), len(leaves))
  noisy = [
    leaf + 0.3 * jax.random.normal(key, leaf.shape)
    for key, leaf in zip(keys, leaves, strict=True)
  ]
  return jax.tree.unflatten(tree, noisy)
