import re

import jax
import pytest

from models import config as config_lib
from models import transformer


@pytest.mark.parametrize(
  ("overrides", "message"),
  [
    (
      {"num_heads": 5},
      "model.num_heads=5 does not split over num_kv_heads=2; use 6",
    ),
    ({"head_dim": 31}, "model.head_dim=31 is odd, and rotary"),
    (
      {"experts_per_token": 5},
      "model.experts_per_token=5 is above num_experts=4; use 4 or fewer",
    ),
    ({"num_layers": 0}, "model.num_layers=0 is below 1; use 1 or more"),
    ({"norm_eps": 0.0}, "model.norm_eps=0.0 is not above 0; use 1e-06"),
  ],
)
def test_a_size_that_cannot_work_is_refused_with_a_way_out(overrides, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    config_lib.tiny_moe(**overrides).validate()


def test_the_defaults_are_valid():
  config_lib.tiny_moe().validate()


@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_is_counted(tied):
  config = config_lib.tiny_moe(tie_embeddings=tied)
  params = jax.eval_shape(lambda: transformer.init(jax.random.key(0), config))
  total, active = config_lib.num_params(config)
  assert total == sum(leaf.size for leaf in jax.tree.leaves(params))
  # A token skips 2 of 4 experts in each of 4 layers: 3 * 128 * 128 each.
  assert total - active == 4 * 2 * 3 * 128 * 128
