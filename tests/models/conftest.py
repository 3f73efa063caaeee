"""A model small enough to be checked by hand-written loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import config as config_lib
from models import policy as policy_lib


@pytest.fixture(scope="session")
def config():
  return config_lib.tiny_moe(
    vocab_size=11,
    num_layers=2,
    d_model=16,
    head_dim=4,
    d_ff=8,
    d_expert=8,
    tie_embeddings=False,
    compute=config_lib.Compute(moe_block=2),
  )


@pytest.fixture(scope="session")
def params(config):
  """Large and without structure, so that no part of the model is idle."""
  rng = np.random.default_rng(0)

  def noise(leaf):
    values = rng.normal(float(leaf.ndim == 1), 0.3, leaf.shape)
    return jnp.asarray(values, leaf.dtype)

  return jax.tree.map(noise, policy_lib.of(config).shapes)
