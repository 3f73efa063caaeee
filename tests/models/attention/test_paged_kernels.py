"""Kernels that attend to pages, by their interpreters."""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from models import kv_cache, sharding
from models.attention import paged, paged_kernels, paged_triton
from tests.helpers import absent_devices, triton_modules

pytestmark = pytest.mark.compiled

CASE = {
  "queries": 1,
  "head_dim": 128,
  "page_size": 16,
  "dtypes": frozenset({"bfloat16"}),
}
LAYERS, LAYER, PAGES = 2, 1, 90


def draw(groups=4, chunk=1, width=128, page_size=16):
  """Returns (query, positions, cache, layer, tables) of four rows."""
  rng = np.random.default_rng(0)

  def noise(*shape):
    return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)

  cache = kv_cache.Cache(*noise(2, 2, LAYERS, PAGES, page_size, width))
  tables = rng.permutation(PAGES)[:80].reshape(4, 20)
  ends = np.array([chunk - 1, chunk + 16, 200, 319]) * page_size // 16
  positions = np.maximum(ends, chunk - 1)[:, None] + np.arange(1 - chunk, 1)
  return (
    noise(4, chunk, 2 * groups, width),
    jnp.asarray(positions, jnp.int32),
    cache,
    jnp.int32(LAYER),
    jnp.asarray(tables, jnp.int32),
  )


@functools.cache
def by_tiles(**sizes):
  """Returns what tiles of pages make of `draw`, as one program."""
  return jax.jit(functools.partial(paged.by_tiles, tile=128))(*draw(**sizes))


def assert_close(found, expected):
  # Of values of about 1 a bfloat16 has 2^-8; 0.008 is typical.
  np.testing.assert_allclose(
    found.astype(jnp.float32),
    expected.astype(jnp.float32),
    rtol=0,
    atol=0.03,
  )


def test_the_kernel_of_a_tpu_agrees_with_tiles(monkeypatch):
  # Two calls of two rows each.
  monkeypatch.setattr(paged_kernels, "_MAX_TABLE", 64)
  with pltpu.force_tpu_interpret_mode():
    found = paged_kernels.attend(*draw(), platform="tpu")
  assert_close(found, by_tiles())


# One program has all keys of a row; with many, some have none to read.
ONE = paged_triton.PageTiling(programs=1)
MANY = paged_triton.PageTiling(programs=100, keys=32)
LARGE = paged_triton.PageTiling(queries=16, keys=128)


@pytest.mark.parametrize(
  ("sizes", "tiling"),
  [
    (sizes, tiling)
    for sizes, tilings in (
      ({}, (None, ONE, MANY)),
      ({"groups": 1, "width": 64}, (None, LARGE)),
      # Five queries of three heads share their keys: 15 of 16 rows.
      ({"groups": 3, "chunk": 5, "page_size": 4}, (None, ONE, LARGE)),
      # Two tiles of queries, of which the last is filled up.
      ({"groups": 2, "chunk": 40, "width": 64}, (None, MANY, LARGE)),
      # A page is more than a block.
      ({"page_size": 128, "width": 16}, (None, ONE, MANY)),
      ({"page_size": 1, "chunk": 3, "width": 32}, (None, ONE, LARGE)),
      ({"groups": 2, "chunk": 40, "width": 256}, (None,)),
    )
    for tiling in tilings
  ],
  ids=str,
)
def test_the_kernel_of_a_gpu_agrees_with_tiles(sizes, tiling):
  attend = functools.partial(paged_triton.attend, tiling=tiling, interpret=True)
  assert_close(jax.jit(attend)(*draw(**sizes)), by_tiles(**sizes))


@pytest.mark.parametrize("chunk", [1, 40])
def test_a_window_on_a_gpu_agrees_with_tiles(chunk):
  args = draw(chunk=chunk, width=64)
  args += (args[1] - 99,)
  attend = functools.partial(paged_triton.attend, interpret=True)
  expected = jax.jit(functools.partial(paged.by_tiles, tile=128))(*args)
  assert_close(jax.jit(attend)(*args), expected)
  assert np.abs(expected - by_tiles(chunk=chunk, width=64)).max() > 0.1


@pytest.mark.parametrize(
  ("platform", "attend"),
  [
    ("cpu", functools.partial(paged.by_tiles, tile=128)),
    ("gpu", functools.partial(paged_triton.attend, interpret=True)),
    ("tpu", functools.partial(paged_kernels.attend, platform="tpu")),
  ],
  ids=["tiles", "gpu", "tpu"],
)
def test_what_is_not_finite_reaches_only_those_who_see_it(
  platform, attend, monkeypatch
):
  query, positions, cache, layer, tables = draw()
  monkeypatch.setattr(sharding, "platform", lambda layout: platform)
  # Behind the last key that each row sees; of the fourth there is no place.
  behind = positions + 1
  owners = jnp.arange(4, dtype=jnp.int32)
  at = kv_cache.addresses(cache, tables, owners, behind[:, 0])
  bad = jnp.full((4, 2, 128), jnp.nan, jnp.bfloat16)
  cache = kv_cache.write(cache, layer, at, bad, bad)
  with (
    pltpu.force_tpu_interpret_mode()
    if platform == "tpu"
    else contextlib.nullcontext()
  ):
    attend = jax.jit(attend)
    found = attend(query, positions, cache, layer, tables)
    seen = attend(query, behind.at[3].add(-1), cache, layer, tables)[:3]
  assert_close(found, by_tiles())
  # A kernel of a TPU takes no nan.
  assert np.isnan(seen.astype(jnp.float32)).all() == (platform != "tpu")


@pytest.mark.parametrize(
  ("platform", "chunk"), [("gpu", 1), ("gpu", 40), ("tpu", 1)]
)
def test_a_kernel_lowers_without_a_device_and_gathers_no_page(platform, chunk):
  attend = jax.jit(functools.partial(paged_kernels.attend, platform=platform))
  with absent_devices.described(platform):
    traced = attend.trace(*draw(chunk=chunk))
    name = "cuda" if platform == "gpu" else platform
    lowered = traced.lower(lowering_platforms=(name,))
  text = lowered.as_text()
  if platform == "gpu":
    assert triton_modules.check(lowered) == 1
  else:
    assert "@tpu_custom_call" in text
  assert "stablehlo.gather" not in text


def test_a_cache_of_many_gigabytes_is_read_by_addresses_of_64_bits():
  # 32 rows of 32k of Qwen3-0.6B.
  shape = (8, 28, 2**16, 16, 128)
  pages: Any = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
  cache = kv_cache.Cache(pages, pages)
  attend = jax.jit(functools.partial(paged_kernels.attend, platform="gpu"))
  with absent_devices.described("gpu"):
    traced = attend.trace(
      jax.ShapeDtypeStruct((32, 1, 16, 128), jnp.bfloat16),
      jax.ShapeDtypeStruct((32, 1), jnp.int32),
      cache,
      jax.ShapeDtypeStruct((), jnp.int32),
      jax.ShapeDtypeStruct((32, 2048), jnp.int32),
    )
    lowered = traced.lower(lowering_platforms=("cuda",))
  (kernel,) = triton_modules.texts(lowered)
  assert "tensor<64x128xi64>" in kernel
  assert "tensor<64x128xi32>" not in kernel


@pytest.mark.parametrize(
  ("platform", "change", "why"),
  [
    ("gpu", {}, None),
    ("tpu", {}, None),
    ("cpu", {}, "no kernel for a cpu"),
    ("gpu", {"form": "blockwise"}, "attention=blockwise asks"),
    ("gpu", {"queries": 256}, None),
    ("gpu", {"windowed": True}, None),
    ("tpu", {"windowed": True}, "knows no window"),
    ("gpu", {"head_dim": 96}, "powers of 2"),
    ("gpu", {"page_size": 24}, "powers of 2"),
    ("gpu", {"head_dim": 512}, "up to 256, not 512"),
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
