"""Settings of the built-in engine: refusals, and the engine that they build."""

import dataclasses
import math

import pytest

from models import config as model_config
from models import sharding
from rl.engine.builtin import engine as builtin_engine
from rl.engine.builtin import settings as engine_settings
from rl.engine.builtin import sizing
from rl.pools import placement
from rl.runtime import mesh_thread

SETTINGS = engine_settings.EngineSettings(
  slots=24,
  page_size=16,
  row_buckets=(8, 4, 8, 64),
  chunk_buckets=(4, 32),
  prefill_tokens=64,
)


def test_rows_that_the_mesh_splits_are_named_by_their_setting():
  assert SETTINGS.split_rows == {
    "engine.slots": 24,
    "engine.row_buckets[0]": 8,
    "engine.row_buckets[1]": 4,
    "engine.row_buckets[2]": 8,
  }


def test_sizes_that_are_not_set_follow_from_lengths_and_the_mesh():
  plan = placement.MeshSpec(data=3, rules=sharding.DECODE).plan
  rooms = [sizing.Room(plan)]
  short = engine_settings.EngineSettings().sizes(
    model_config.tiny(max_length=64), rooms
  )
  # 256 and the like, up to what 3 divides; 64 positions are 4 pages of 16.
  assert (short.slots, short.pages) == (258, 258 * 4 + 1)
  assert short.rows == (9, 33, 129, 258)
  assert (short.chunk_buckets, short.prefill_tokens) == ((4, 32), 1024)
  long = SETTINGS.sizes(model_config.tiny(max_length=5000), rooms, 3000)
  # Conversations of 3000 are 188 pages.
  assert (long.slots, long.pages) == (24, 24 * 188 + 1)
  assert (long.rows, long.chunk_buckets) == ((4, 8, 24), (4, 32))
  default = engine_settings.EngineSettings().sizes(
    model_config.tiny(max_length=5000), rooms, 3000
  )
  assert default.chunk_buckets == (4, 32, 256)


def test_the_default_size_is_valid():
  engine_settings.EngineSettings().validate()
  engine_settings.EngineSettings().validate_model(model_config.tiny())


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"slots": 0}, "engine.slots=0 must be at least 1"),
    ({"page_size": 0}, "engine.page_size=0 must be at least 1"),
    ({"prefill_tokens": -1}, "engine.prefill_tokens=-1 must be at least 1"),
    (
      {"steps_per_dispatch": 0},
      "engine.steps_per_dispatch=0 must be at least 1",
    ),
    (
      {"row_buckets": ()},
      r"engine.row_buckets=\(\) must be numbers of at least 1",
    ),
    (
      {"chunk_buckets": (4, 0)},
      r"engine.chunk_buckets=\(4, 0\) must be numbers",
    ),
    (
      {"batching_delay_s": math.nan},
      r"engine.batching_delay_s=nan must be in \[0, 1\)",
    ),
    (
      {"batching_delay_s": 1.0},
      r"engine.batching_delay_s=1.0 must be in \[0, 1\)",
    ),
    ({"bias_slots": -1}, "engine.bias_slots=-1 must be at least 0"),
    (
      {"steps_per_dispatch": 2, "speculative_tokens": 4},
      "engine.steps_per_dispatch=2 must be at least 3; to feed drafts",
    ),
  ],
)
def test_sizes_that_cannot_work_are_refused(change, message):
  with pytest.raises(ValueError, match=message):
    engine_settings.EngineSettings(**change).validate()


@pytest.mark.parametrize(
  ("change", "data", "fewest"),
  [({"row_buckets": (64, 16)}, 1, 16), ({}, 3, 9)],  # 9: what 3 divides.
)
def test_drafts_that_no_dispatch_would_have_are_refused(change, data, fewest):
  plan = placement.MeshSpec(data=data, rules=sharding.DECODE).plan
  model, rooms = model_config.tiny(max_length=64), [sizing.Room(plan)]
  settings = engine_settings.EngineSettings(speculative_tokens=4, **change)
  with pytest.raises(ValueError, match=f"speculative_rows=8.*use {fewest} or"):
    settings.sizes(model, rooms)
  for changes in ({"speculative_rows": fewest}, {"speculative_tokens": 0}):
    sizes = dataclasses.replace(settings, **changes).sizes(model, rooms)
    assert sizes.rows[0] == fewest


@pytest.mark.parametrize("pages", [0, 7])
def test_pages_for_less_than_one_conversation_are_refused(pages):
  # 100 positions are 7 pages of 16, and one is copied from.
  settings = engine_settings.EngineSettings(pages=pages)
  config = model_config.tiny(max_length=100)
  with pytest.raises(
    ValueError, match=f"pages={pages} must be at least 8; to hold"
  ):
    settings.validate_model(config)
  engine_settings.EngineSettings(pages=8).validate_model(config)


def test_experts_of_a_model_without_are_not_recorded():
  settings = engine_settings.EngineSettings(record_experts=True)
  with pytest.raises(ValueError, match="no experts; use false"):
    settings.validate_model(model_config.tiny())
  settings.validate_model(model_config.tiny_moe())


def test_settings_build_the_engine_that_they_describe(spans, one_device):
  thread = mesh_thread.MeshThread("decode", spans)
  built = engine_settings.EngineSettings(bias_slots=0).build(
    model_config.tiny(max_length=48), one_device, thread
  )
  assert isinstance(built, builtin_engine.BuiltinEngine)
  able = built.capabilities
  assert (able.max_length, able.bias, able.experts) == (48, False, False)
  with pytest.raises(ValueError, match="slots=0"):
    engine_settings.EngineSettings(slots=0).build(
      model_config.tiny(), one_device, thread
    )
  thread.close()
