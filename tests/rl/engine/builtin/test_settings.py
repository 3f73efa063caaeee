"""The size of the built-in engine: which shapes follow, and what is refused."""

import math

import pytest

from models import config as model_config
from rl.engine.builtin import engine as builtin_engine
from rl.engine.builtin import settings as engine_settings
from rl.runtime import mesh_thread

SETTINGS = engine_settings.EngineSettings(
  slots=24,
  page_size=16,
  row_buckets=(8, 4, 8, 64),
  chunk_buckets=(4, 32),
  prefill_tokens=64,
  length_buckets=(512, 100, 9000),
)


def test_buckets_are_ascending_and_end_with_the_largest_size():
  assert SETTINGS.rows == (4, 8, 24)
  assert SETTINGS.lengths(600) == (100, 512, 600)
  assert SETTINGS.lengths(512) == (100, 512)
  assert SETTINGS.lengths(64) == (64,)


def test_rows_that_the_mesh_splits_are_named_by_their_setting():
  assert SETTINGS.split_rows == {
    "engine.slots": 24,
    "engine.row_buckets[0]": 8,
    "engine.row_buckets[1]": 4,
    "engine.row_buckets[2]": 8,
  }


def test_pages_are_enough_for_every_slot_unless_they_are_given():
  assert [SETTINGS.width(length) for length in (1, 16, 17, 100)] == [1, 1, 2, 7]
  # 24 slots of 7 pages, and one that is copied from while all are full.
  assert SETTINGS.num_pages(100) == 24 * 7 + 1
  few = engine_settings.EngineSettings(pages=9)
  assert few.num_pages(100) == 9


@pytest.mark.parametrize(
  ("rows", "parts", "expected"),
  [
    # 64 ids are 16 chunks of 4 and 2 of 32; no more chunks than rows.
    (24, 1, ((0, 1), (16, 4), (2, 32))),
    (8, 1, ((0, 1), (8, 4), (2, 32))),
    (1, 1, ((0, 1), (1, 4), (1, 32))),
    # Rows with chunks are split over the parts of the mesh as all are.
    (8, 4, ((0, 1), (8, 4), (4, 32))),
    (24, 3, ((0, 1), (18, 4), (3, 32))),
  ],
)
def test_chunks_of_all_rows_are_about_as_many_ids_as_allowed(
  rows, parts, expected
):
  assert SETTINGS.chunks(rows, parts) == expected
  for count, _ in expected:
    assert count % parts == 0
    assert (rows - count) % parts == 0


def test_a_chunk_longer_than_a_dispatch_still_goes_one_at_a_time():
  settings = engine_settings.EngineSettings(
    chunk_buckets=(32,), prefill_tokens=8
  )
  assert settings.chunks(8) == ((0, 1), (1, 32))


def test_fewer_chunks_are_another_form_where_padding_would_cost_more():
  settings = engine_settings.EngineSettings(
    chunk_buckets=(8, 32), prefill_tokens=1024
  )
  # A quarter of 64 rows: 16 chunks of 32 fewer are 512 ids, of 8 they are 384.
  assert settings.chunks(64) == ((0, 1), (16, 8), (64, 8), (16, 32), (32, 32))
  # 24 chunks of 8 fewer are 192 ids. The 8 of 32 are a multiple of 16, as rows.
  assert settings.chunks(32) == ((0, 1), (32, 8), (16, 32), (32, 32))


@pytest.mark.parametrize(
  ("ready", "fixed", "rows"),
  [
    (1, 8, 4),
    # 4 of 8 + 4 rather than 5 of 8 + 8; 6 of 8 + 8 rather than 4 of 8 + 4.
    (5, 8, 4),
    (6, 8, 8),
    # 8 of 8 + 8, and 15 or 16 of 8 + 24.
    (15, 8, 8),
    (16, 8, 24),
    # Where a step costs much anyway, all go at once.
    (4, 512, 4),
    (5, 512, 8),
    (9, 512, 24),
  ],
)
def test_rows_are_as_many_as_make_most_of_a_dispatch(ready, fixed, rows):
  assert SETTINGS.bucket(ready, fixed) == rows
  share = min(ready, rows) / (fixed + rows)
  assert SETTINGS.efficiency(ready, fixed) == share


def test_the_default_size_is_valid():
  engine_settings.EngineSettings().validate()
  engine_settings.EngineSettings().validate_model(model_config.tiny())


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"slots": 0}, "engine.slots=0 is below 1"),
    ({"page_size": 0}, "engine.page_size=0 is below 1"),
    ({"prefill_tokens": -1}, "engine.prefill_tokens=-1 is below 1"),
    ({"steps_per_dispatch": 0}, "engine.steps_per_dispatch=0 is below 1"),
    ({"row_buckets": ()}, r"engine.row_buckets=\(\) needs positive"),
    ({"chunk_buckets": (4, 0)}, r"engine.chunk_buckets=\(4, 0\) needs"),
    ({"length_buckets": (-1,)}, r"engine.length_buckets=\(-1,\) needs"),
    ({"linger_s": math.nan}, r"engine.linger_s=nan is not in \[0, 1\)"),
    ({"linger_s": 1.0}, r"engine.linger_s=1.0 is not in \[0, 1\)"),
    ({"bias_slots": -1}, "engine.bias_slots=-1 is below 0"),
  ],
)
def test_sizes_that_cannot_work_are_refused(change, message):
  with pytest.raises(ValueError, match=message):
    engine_settings.EngineSettings(**change).validate()


@pytest.mark.parametrize("pages", [0, 7])
def test_pages_for_less_than_one_conversation_are_refused(pages):
  # 100 positions are 7 pages of 16, and one is copied from.
  settings = engine_settings.EngineSettings(pages=pages)
  config = model_config.tiny(max_length=100)
  with pytest.raises(ValueError, match=f"pages={pages} .*use 8 or more"):
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
  assert isinstance(built, builtin_engine.JaxEngine)
  able = built.capabilities
  assert (able.max_length, able.bias, able.experts) == (48, False, False)
  with pytest.raises(ValueError, match="slots=0"):
    engine_settings.EngineSettings(slots=0).build(
      model_config.tiny(), one_device, thread
    )
  thread.close()
