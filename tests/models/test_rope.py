import json
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import rope
from models.hf import config as hf_config

pytestmark = pytest.mark.compiled

GOLDEN = pathlib.Path(__file__).parent / "golden"
CASES = json.loads((GOLDEN / "rope.json").read_text())
EXPECTED = np.load(GOLDEN / "rope.npz")

ROTATE = jax.jit(rope.rotate, static_argnums=3)


def positions(*values):
  return jnp.asarray([values], jnp.int32)


@pytest.mark.parametrize("name", CASES)
def test_frequencies_are_those_of_transformers(name, tmp_path):
  data = json.loads((GOLDEN / "qwen3" / "config.json").read_text())
  del data["rope_parameters"]
  (tmp_path / "config.json").write_text(json.dumps(data | CASES[name]))
  config = hf_config.load(tmp_path)
  found, factor = rope.frequencies(
    config.head_dim, config.rope_theta, config.rope_scaling
  )
  # A period and the share of a blend may each round to a neighbour in torch,
  # up to 2^-23 apart.
  wanted = EXPECTED[f"{name}/frequencies"]
  np.testing.assert_allclose(found, wanted, rtol=2**-22)
  assert factor == pytest.approx(EXPECTED[f"{name}/factor"], rel=1e-12)


@pytest.mark.parametrize("rotate", [ROTATE, rope.rotate], ids=["jit", "eager"])
def test_a_pair_turns_by_its_position_times_its_frequency(rotate):
  # Width 4, theta 100: pairs (0, 2) and (1, 3) turn by 1 and by 0.1 radians a
  # position.
  x = jnp.asarray([1.0, 1.0, 0.0, 0.0]).reshape(1, 1, 1, 4)
  found = rotate(x, positions(3), *rope.frequencies(4, 100.0, None))
  wanted = [math.cos(3), math.cos(0.3), math.sin(3), math.sin(0.3)]
  np.testing.assert_allclose(found[0, 0, 0], wanted, atol=1e-6)


@pytest.mark.parametrize("rotate", [ROTATE, rope.rotate], ids=["jit", "eager"])
@pytest.mark.parametrize(
  "scaling",
  [
    None,
    rope.Linear(factor=2.0),
    rope.Yarn(factor=4.0, original_max_length=64, attention_factor=1.0),
    rope.Llama3(factor=4.0, original_max_length=64),
  ],
)
def test_scores_depend_on_the_distance_alone(rotate, scaling):
  rng = np.random.default_rng(0)
  query, key = (
    jnp.asarray(rng.normal(size=(1, 1, 3, 16)), jnp.float32) for _ in range(2)
  )

  turns = rope.frequencies(16, 1e4, scaling)

  def score(i, j):
    q = rotate(query, positions(i), *turns)
    return jnp.sum(q * rotate(key, positions(j), *turns), -1)

  np.testing.assert_allclose(score(40, 33), score(7, 0), atol=1e-4)
  assert not np.allclose(score(40, 33), score(40, 32), atol=1e-2)


def test_angles_of_half_precision_are_those_of_full_precision():
  # At position 40,000 a bfloat16 angle would be off by up to 128 radians.
  x = jnp.ones((1, 2, 1, 128), jnp.bfloat16)
  at = positions(39_999, 40_000)
  turns = rope.frequencies(128, 1e6, None)
  full = rope.rotate(x.astype(jnp.float32), at, *turns)
  half = rope.rotate(x, at, *turns)
  assert half.dtype == jnp.bfloat16
  np.testing.assert_allclose(half.astype(jnp.float32), full, atol=2**-8)


def test_linear_scaling_stretches_every_position():
  x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 1, 2, 8)))
  x = x.astype(jnp.float32)
  stretched, plain = (
    rope.rotate(x, positions(at), *rope.frequencies(8, 1e4, scaling))
    for at, scaling in ((30, rope.Linear(factor=2.0)), (15, None))
  )
  np.testing.assert_allclose(stretched, plain, atol=1e-5)


def test_yarn_spares_what_turns_often_and_lengthens_queries():
  # Width 8, theta 10^4: periods 1, 10, 100, 1000. In 128 positions pairs turn
  # 20, 2, 0.2 and 0.02 times, so beta_fast = 10 lies at pair 0.31, rounded
  # down to 0, and beta_slow = 1 at pair 1.31, rounded up to 2: of 1 / factor
  # pair 1 takes half.
  scaling = rope.Yarn(factor=4.0, original_max_length=128, beta_fast=10.0)
  found, factor = rope.frequencies(8, 1e4, scaling)
  plain, _ = rope.frequencies(8, 1e4, None)
  np.testing.assert_allclose(
    found / plain, [1, (1 + 1 / 4) / 2, 1 / 4, 1 / 4], rtol=1e-6
  )
  assert factor == pytest.approx(1 + math.log(4) / 10)


def test_llama3_spares_what_turns_often():
  # As above, in 2 pi * 128 positions pairs turn 128, 12.8, 1.28 and 0.128
  # times. Those above 4 stay, those below 1 are divided by 8, and of 1.28 the
  # share (1.28 - 1) / (4 - 1) stays.
  scaling = rope.Llama3(factor=8.0, original_max_length=804)
  found, factor = rope.frequencies(8, 1e4, scaling)
  plain, _ = rope.frequencies(8, 1e4, None)
  share = (804 / (2 * math.pi * 100) - 1) / 3
  between = share + (1 - share) / 8
  np.testing.assert_allclose(found / plain, [1, 1, between, 1 / 8], rtol=1e-6)
  assert factor == 1


@pytest.mark.parametrize(
  ("scaling", "message"),
  [
    (rope.Linear(factor=0.5), "factor=0.5 is not a number from 1 up; use 1"),
    (rope.Linear(factor=math.nan), "factor=nan is not a number from 1 up"),
    (
      rope.Yarn(factor=4.0, original_max_length=0),
      "original_max_length=0 is below 1; use the length",
    ),
    (
      rope.Yarn(factor=4.0, original_max_length=64, beta_slow=40.0),
      "beta_slow=40.0 is not between 0 and beta_fast=32.0; use 1 and 32",
    ),
    (
      rope.Yarn(factor=4.0, original_max_length=64, attention_factor=0.0),
      "attention_factor=0.0 is not above 0; leave it out",
    ),
    (
      rope.Llama3(factor=8.0, original_max_length=64, low_freq_factor=4.0),
      "low_freq_factor=4.0 is not between 0 and high_freq_factor=4.0",
    ),
  ],
)
def test_a_scaling_that_cannot_work_is_refused(scaling, message):
  words = re.escape(f"model.rope_scaling.{message}")
  with pytest.raises(ValueError, match=words):
    scaling.validate()
