"""Kernels of jax that attend to pages, by their interpreters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from models import kv_cache
from models.attention import paged, paged_kernels
from tests.helpers import absent_devices

pytestmark = pytest.mark.compiled

CASE = {
  "queries": 1,
  "head_dim": 128,
  "page_size": 16,
  "dtypes": frozenset({"bfloat16"}),
}
LAYERS, LAYER, PAGES = 2, 1, 90


def draw(groups=4):
  """Returns (query, positions, cache, layer, tables) of four rows."""
  rng = np.random.default_rng(0)

  def noise(*shape):
    return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)

  cache = kv_cache.Cache(*noise(2, 2, LAYERS, PAGES, 16, 128))
  tables = rng.permutation(PAGES)[:80].reshape(4, 20)
  return (
    noise(4, 1, 2 * groups, 128),
    jnp.array([[0], [17], [200], [319]], jnp.int32),
    cache,
    jnp.int32(LAYER),
    jnp.asarray(tables, jnp.int32),
  )


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_a_kernel_agrees_with_tiles(platform, monkeypatch):
  # Two calls of two rows each on a TPU.
  monkeypatch.setattr(paged_kernels, "_MAX_TABLE", 64)
  args = draw()
  expected = paged.by_tiles(*args, tile=128)
  if platform == "gpu":
    found = paged_kernels.attend(*args, platform=platform, interpret=True)
  else:
    with pltpu.force_tpu_interpret_mode():
      found = paged_kernels.attend(*args, platform=platform)
  # Of values of about 1 a bfloat16 has 2^-8; 0.008 is typical.
  np.testing.assert_allclose(
    found.astype(jnp.float32),
    expected.astype(jnp.float32),
    rtol=0,
    atol=0.03,
  )


@pytest.mark.parametrize(
  ("platform", "target"), [("gpu", "gpu.triton"), ("tpu", "@tpu_custom_call")]
)
def test_a_kernel_lowers_without_a_device_and_gathers_no_page(platform, target):
  attend = jax.jit(functools.partial(paged_kernels.attend, platform=platform))
  with absent_devices.described(platform):
    traced = attend.trace(*draw())
    name = "cuda" if platform == "gpu" else platform
    text = traced.lower(lowering_platforms=(name,)).as_text()
  assert target in text
  assert "stablehlo.gather" not in text


@pytest.mark.parametrize(
  ("platform", "change", "why"),
  [
    ("gpu", {}, None),
    ("tpu", {}, None),
    ("cpu", {}, "no kernel for a cpu"),
    ("gpu", {"form": "blockwise"}, "attention=blockwise asks"),
    ("gpu", {"queries": 2}, "one id a row"),
    ("gpu", {"head_dim": 96}, "powers of 2"),
    ("gpu", {"page_size": 24}, "powers of 2"),
    ("gpu", {"dtypes": frozenset({"float32"})}, "no float32"),
    ("tpu", {"queries": 256}, "one id a row"),
    ("tpu", {"head_dim": 64}, "multiples of 128 and 16"),
    ("tpu", {"page_size": 8}, "multiples of 128 and 16"),
    ("tpu", {"dtypes": frozenset({"float16"})}, "bfloat16 alone"),
    ("tpu", {"dtypes": frozenset({"bfloat16", "float32"})}, "no bfloat16 with"),
  ],
)
def test_a_refusal_says_why(platform, change, why):
  refused = paged_kernels.refusal(platform, **{**CASE, **change})
  if why is None:
    assert refused is None
  else:
    assert refused is not None
    assert why in refused
