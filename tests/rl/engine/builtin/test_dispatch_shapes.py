"""Compiled shapes of a dispatch, and the choice among them."""

import pytest

from rl.engine.builtin import dispatch_shapes

SHAPES = dispatch_shapes.DispatchShapes(
  slots=24,
  page_size=16,
  row_buckets=(8, 4, 8, 64),
  chunk_buckets=(4, 32),
  prefill_tokens=64,
)


def test_rows_and_lengths_are_ascending_and_end_with_the_largest_size():
  assert SHAPES.rows == (4, 8, 24)  # 64 is more than there are slots.
  assert SHAPES.lengths(600) == (128, 512, 600)
  assert SHAPES.lengths(512) == (128, 512)
  assert SHAPES.lengths(64) == (64,)


def test_only_the_named_numbers_of_rows_are_compiled():
  shapes = dispatch_shapes.DispatchShapes(slots=256, row_buckets=(32,))
  assert shapes.rows == (32,)
  # However many are ready, the rest goes with the next dispatch.
  assert shapes.bucket(256, fixed=8) == 32


def test_pages_are_enough_for_every_slot_unless_they_are_given():
  assert [SHAPES.width(length) for length in (1, 16, 17, 100)] == [1, 1, 2, 7]
  # 24 slots of 7 pages, and one that is copied from while all are full.
  assert SHAPES.num_pages(100) == 24 * 7 + 1
  few = dispatch_shapes.DispatchShapes(pages=9)
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
  assert SHAPES.chunks(rows, parts) == expected
  for count, _ in expected:
    assert count % parts == 0
    assert (rows - count) % parts == 0


def test_a_chunk_longer_than_a_dispatch_still_goes_one_at_a_time():
  shapes = dispatch_shapes.DispatchShapes(chunk_buckets=(32,), prefill_tokens=8)
  assert shapes.chunks(8) == ((0, 1), (1, 32))


def test_fewer_chunks_are_another_form_where_padding_would_cost_more():
  shapes = dispatch_shapes.DispatchShapes(
    chunk_buckets=(8, 32), prefill_tokens=1024
  )
  # A quarter of 64 rows: 16 chunks of 32 fewer are 512 ids, of 8 they are 384.
  assert shapes.chunks(64) == ((0, 1), (16, 8), (64, 8), (16, 32), (32, 32))
  # 24 chunks of 8 fewer are 192 ids. The 8 of 32 are a multiple of 16, as rows.
  assert shapes.chunks(32) == ((0, 1), (32, 8), (16, 32), (32, 32))


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
  assert SHAPES.bucket(ready, fixed) == rows
  share = min(ready, rows) / (fixed + rows)
  assert SHAPES.efficiency(ready, fixed) == share
