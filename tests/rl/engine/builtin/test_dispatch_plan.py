"""A dispatch: pages that it needs, and the arrays that the device reads."""

import numpy as np

from rl.engine.builtin import decode_step, dispatch_plan, dispatch_shapes
from tests.helpers import json_letters

SHAPES = dispatch_shapes.DispatchShapes(
  slots=8,
  page_size=4,
  row_buckets=(2, 4, 8),
  chunk_buckets=(2, 8),
  prefill_tokens=8,
  steps_per_dispatch=4,
)
LONGEST = 80


def test_pages_are_needed_for_all_that_a_row_may_do(running):
  choice = dispatch_plan.DispatchChoice([], (2, 8), 4, 3)
  assert choice.needed_length(running(30, 4)) == 4 + 8 + 3
  assert choice.needed_length(running(7, 7, 1)) == 7 + 1 + 3
  # No more than the request may ever have.
  assert choice.needed_length(running(7, 8, 2, most=3)) == 10


def test_a_row_under_a_constraint_has_a_mask_or_samples_freely(running):
  constraint = json_letters.constraint({"type": "boolean"})
  masked, free = (running(5, 5, 1, constraint=constraint) for _ in range(2))
  free.num_masked = 0
  masked.bias_row = free.bias_row = 3
  choice = dispatch_plan.DispatchChoice([masked, free], (0, 1), 2, 3)
  dispatch = dispatch_plan.build(choice, SHAPES, 4, longest=LONGEST)
  columns = [decode_step.BUDGET, decode_step.BIAS]
  assert dispatch.plan.integers[:, columns].tolist() == [[1, 3], [3, 0]]
  assert dispatch.masks == [(3, masked.matcher)]


def test_a_dispatch_says_what_every_row_does(running):
  context = running(
    30, 4, seed=-3, top_k=5, top_p=0.5, min_p=0.25, temperature=0.0
  )
  ending = running(6, 3, most=1, stop_ids=(7, 8))
  decoding = running(5, 6, 2, most=9)
  decoding.bias_row = 2
  choice = dispatch_plan.DispatchChoice(
    [context, ending, decoding], (2, 8), 4, steps=3
  )
  dispatch = dispatch_plan.build(choice, SHAPES, 4, longest=LONGEST)
  # Slot, cached, new, budget, seed, top k, bias, follow, steps.
  assert dispatch.plan.integers[:, : decode_step.STEPS + 1].tolist() == [
    [0, 4, 8, 0, -3, 5, 0, 0, 3],
    [1, 3, 3, 1, 0, 0, 0, 0, 3],
    [2, 6, 1, 3, 0, 0, 2, 0, 3],
    [8, 0, 0, 0, 0, 0, 0, 0, 3],
  ]
  assert dispatch.plan.stop_ids.tolist() == [
    [-1] * 4,
    [7, 8, -1, -1],
    [-1] * 4,
    [-1] * 4,
  ]
  floats = [[0.0, 0.5, 0.25], *[[1.0, 1.0, 0.0]] * 3]
  np.testing.assert_array_equal(
    dispatch.plan.floats, np.asarray(floats, np.float32)
  )
  # Two chunks of 8, then one id of each other row.
  assert dispatch.starts == [0, 8, 16]
  assert dispatch.plan.ids.tolist() == [
    *range(4, 12),
    *[3, 4, 5, 0, 0, 0, 0, 0],
    *[6, 0],
  ]
  assert dispatch.plan.tables.shape == (4, 20)
  assert dispatch.plan.tables[1, :3].tolist() == [10, 11, 0]
  assert (dispatch.fed, dispatch.version) == ([8, 3, 1], 4)
  # The context is fed, and the other two will have sampled 1 and 5: of these
  # only the last wants more.
  assert [(one.planned_cached, one.planned_known) for one in choice.rows] == [
    (12, 30),
    (6, 7),
    (9, 10),
  ]
  assert [(one.pending, one.remaining) for one in choice.rows] == [
    (18, 50),
    (1, 0),
    (1, 4),
  ]
  assert dispatch.num_continuing == 2
  assert [one.in_flight for one in choice.rows] == [1, 1, 1]


def test_a_row_that_samples_follows_and_one_that_is_fed_does_not(running):
  context, decoding = running(30, 4), running(5, 5, 1)
  choice = dispatch_plan.DispatchChoice([context, decoding], (2, 8), 2, steps=2)
  first, second, third, fourth = (
    dispatch_plan.build(choice, SHAPES, 0, longest=LONGEST) for _ in range(4)
  )
  columns = slice(decode_step.PAST, decode_step.BUDGET + 1)
  follow = decode_step.FOLLOW
  # The host knows the context; of what is sampled, only how far it may get.
  for dispatch, context_row, decoding_row, follows in (
    (first, [4, 8, 0], [5, 1, 2], [0, 0]),
    (second, [12, 8, 0], [7, 1, 2], [0, 1]),
    (third, [20, 8, 0], [9, 1, 2], [0, 1]),
    (fourth, [28, 2, 2], [11, 1, 2], [0, 1]),
  ):
    rows = dispatch.plan.integers[:, columns].tolist()
    assert rows == [context_row, decoding_row]
    assert dispatch.plan.integers[:, follow].tolist() == follows
