"""A model small enough to be checked by hand-written loops."""

import jax
import jax.numpy as jnp
import pytest

from models import config as config_lib
from tests.helpers import small_models


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
  return jax.tree.map(jnp.asarray, small_models.noisy(config))
