import dataclasses
import re

import pytest

from models.attention import backend

# A device's part of training rows of Qwen3-1.7B.
TRAIN = backend.Case(
  batch=2,
  queries=4096,
  keys=4096,
  heads=16,
  head_dim=128,
  dtypes=frozenset({"bfloat16"}),
)
DECODE = dataclasses.replace(
  TRAIN, queries=1, sources=2, keys=513, in_order=False
)


@pytest.mark.parametrize(
  ("platform", "form"),
  [("cpu", "blockwise"), ("gpu", "fused"), ("tpu", "splash")],
)
def test_long_rows_take_the_kernel_of_their_platform(platform, form):
  assert backend.choose(platform, TRAIN) == form


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_decoding_on_a_short_cache_takes_the_reference(platform):
  assert backend.choose(platform, DECODE) == "reference"


@pytest.mark.parametrize(
  ("queries", "keys", "form"),
  [
    (64, 64, "reference"),  # the rows of the tiny runs
    (128, 128, "reference"),
    (256, 256, "blockwise"),
    (1, 512, "reference"),
    (1, 4096, "blockwise"),  # a cache that is seldom full
    (64, 600, "blockwise"),
  ],
)
def test_on_a_cpu_tiles_are_for_many_scores(queries, keys, form):
  case = dataclasses.replace(TRAIN, queries=queries, keys=keys)
  assert backend.choose("cpu", case) == form


@pytest.mark.parametrize(
  ("platform", "change", "form"),
  [
    # 2 * 4096^2 * 16 scores are 2^29, and more than a GiB.
    ("gpu", {"dtypes": frozenset({"float32"})}, "blockwise"),
    ("gpu", {"dtypes": frozenset({"float32"}), "batch": 1}, "reference"),
    ("gpu", {"head_dim": 192}, "blockwise"),
    ("gpu", {"head_dim": 100, "batch": 1}, "reference"),
    ("gpu", {"queries": 4095, "keys": 4095}, "blockwise"),
    # The mask alone: 32 * 4096^2 = 2^29.
    ("gpu", {"batch": 32}, "triton"),
    ("gpu", {"batch": 32, "parents": True}, "blockwise"),
    ("gpu", {"batch": 32, "windowed": True}, "blockwise"),
    ("tpu", {"windowed": True}, "splash"),
    # A device's part of a row that two share.
    ("gpu", {"batch": 64, "queries": 2048, "in_order": False}, "blockwise"),
    # A quarter of a row of 32,768: the mask of the whole row has 2^30.
    (
      "gpu",
      {"batch": 1, "queries": 8192, "keys": 32_768, "in_order": False},
      "blockwise",
    ),
    ("gpu", {"queries": 2048, "in_order": False}, "fused"),
    ("gpu", {"parents": True}, "fused"),
    ("tpu", {"parents": True}, "blockwise"),
    ("tpu", {"queries": 200, "keys": 200}, "reference"),
    ("tpu", {"head_dim": 64, "batch": 1}, "reference"),
    ("tpu", {"in_order": False}, "blockwise"),
  ],
)
def test_what_a_kernel_cannot_do_goes_by_its_memory(platform, change, form):
  case = dataclasses.replace(TRAIN, **change)
  assert backend.choose(platform, case) == form


@pytest.mark.parametrize(
  ("form", "change", "message"),
  [
    ("splash", {"sources": 2}, "cannot join 2 sources of keys; use auto"),
    ("splash", {"parents": True}, "knows no shared prompts; .* do not share"),
    ("splash", {"queries": 1}, "needs whole rows"),
    (
      "splash",
      {"queries": 200, "keys": 200},
      "needs rows of 256 tokens, not 200; pad, or use auto",
    ),
    (
      "triton",
      {"queries": 200, "keys": 200},
      "needs rows of 256 tokens, not 200; pad, or use auto",
    ),
    ("splash", {"dtypes": frozenset({"float16"})}, "does not know float16"),
    (
      "fused",
      {"dtypes": frozenset({"float32", "bfloat16"})},
      "needs one dtype and got bfloat16, float32; use auto",
    ),
  ],
)
def test_a_refusal_says_why_and_the_way_out(form, change, message):
  reason = backend.refusal(form, dataclasses.replace(TRAIN, **change))
  assert reason is not None
  assert re.search(message, reason)


@pytest.mark.parametrize("form", ["fused", *backend.UNIVERSAL])
def test_forms_in_plain_jnp_refuse_nothing(form):
  case = dataclasses.replace(DECODE, parents=True, queries=7)
  assert backend.refusal(form, case) is None
