"""What an optimizer does to a single number."""

import jax.numpy as jnp
import numpy as np
import pytest

from rl import optimizers


@pytest.mark.parametrize(
  ("warmup", "expected"),
  [(0, [1, 1, 1, 1, 1, 1]), (1, [1] * 6), (4, [0.25, 0.5, 0.75, 1, 1, 1])],
)
def test_the_rate_warms_up_linearly(warmup, expected):
  optimizer = optimizers.AdamW(
    learning_rate=0.5, warmup_updates=warmup, max_grad_norm=1e9
  )()
  # For a constant gradient each step of Adam is the rate, against the sign.
  gradient, x = jnp.array(3.0), jnp.array(0.0)
  state, steps = optimizer.init(x), []
  for _ in range(6):
    change, state = optimizer.update(gradient, state, x)
    steps.append(-np.asarray(change) / 0.5)
  np.testing.assert_allclose(steps, expected, rtol=1e-4)
