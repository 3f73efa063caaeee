"""The factor of every update, worked out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl.train import learning_rates

Constant = learning_rates.Constant
Linear = learning_rates.Linear
Cosine = learning_rates.Cosine
HALF = 0.5**0.5


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize(
  ("schedule", "expected"),
  [
    (Constant(), [1, 1, 1, 1, 1, 1, 1]),
    (Constant(warmup_updates=1), [1, 1, 1, 1, 1, 1, 1]),
    (Constant(warmup_updates=4), [0.25, 0.5, 0.75, 1, 1, 1, 1]),
    # From 1 to 0.2 in four equal steps.
    (Linear(decay_updates=4, end=0.2), [1, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2]),
    # The second update has the peak, and four later it is at the end.
    (
      Linear(warmup_updates=2, decay_updates=4, end=0.0),
      [0.5, 1, 0.75, 0.5, 0.25, 0, 0],
    ),
    # The second and two more have it, and two later it is at the end.
    (
      Linear(warmup_updates=2, hold_updates=2, decay_updates=2, end=0.0),
      [0.5, 1, 1, 1, 0.5, 0, 0],
    ),
    # (1 + cos(0, 45, 90, 135 and 180 degrees)) / 2.
    (
      Cosine(decay_updates=4, end=0.0),
      [1, (1 + HALF) / 2, 0.5, (1 - HALF) / 2, 0, 0, 0],
    ),
    # Halfway between 1 and 0.5 after two of four.
    (Cosine(warmup_updates=3, decay_updates=2, end=0.5),
     [1 / 3, 2 / 3, 1, 0.75, 0.5, 0.5, 0.5]),
  ],
)  # fmt: skip
def test_the_rate_is_this_share_of_the_highest(wrap, schedule, expected):
  schedule.validate()
  factors = [wrap(schedule)(jnp.int32(n)) for n in range(7)]
  np.testing.assert_allclose(factors, expected, atol=1e-6)


@pytest.mark.parametrize(
  ("schedule", "message"),
  [
    (
      Constant(warmup_updates=-1),
      r"Constant\.warmup_updates=-1 is below 0; use 0",
    ),
    (
      Linear(decay_updates=0),
      r"Linear\.decay_updates=0 is below 1; use the upd",
    ),
    (
      Linear(hold_updates=-1, decay_updates=1),
      r"Linear\.hold_updates=-1 is below 0; use 0",
    ),
    (
      Cosine(decay_updates=1, end=1.5),
      r"Cosine\.end=1\.5 is no share of the peak",
    ),
    (Cosine(decay_updates=1, end=-0.5), r"Cosine\.end=-0\.5 is no share"),
    (Linear(decay_updates=1, end=float("nan")), r"Linear\.end=nan is no share"),
    (Linear(decay_updates=1, warmup_updates=-2), r"warmup_updates=-2 is below"),
  ],
)
def test_a_schedule_that_cannot_work_is_refused(schedule, message):
  with pytest.raises(ValueError, match=message):
    schedule.validate()
