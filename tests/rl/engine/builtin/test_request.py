"""One request: its end, its first token, and its stream."""

import asyncio

import numpy as np

from rl.engine import contract
from tests.helpers import json_letters


def test_a_request_ends_behind_a_stop_id_or_at_its_limit(running):
  # Ids are their own positions: the last sampled one of 5 + 3 is 7.
  assert running(5, 7, 3, stop_ids=(7,)).stop_reason() == "stop"
  assert running(5, 7, 3, most=3, stop_ids=(7,)).stop_reason() == "stop"
  assert running(5, 7, 3, most=3, stop_ids=(6,)).stop_reason() == "length"
  assert running(5, 7, 3, stop_ids=(6,)).stop_reason() is None
  # A stop id in the prompt is none.
  assert running(5, 4, 0, stop_ids=(4,)).stop_reason() is None


def test_the_first_token_sets_first_version_and_first_token_s(running):
  state = running(5, 5)
  state.started -= 30.0
  assert (state.first_version, state.first_token_s) == (None, 0.0)
  state.append([7, 6], [-1.0, -2.0], 3)
  first_s = state.first_token_s
  assert first_s >= 30.0
  state.started -= 30.0
  state.append([5], [-3.0], 4)
  assert (state.first_version, state.first_token_s) == (3, first_s)
  assert state.ids[: state.known].tolist() == [0, 1, 2, 3, 4, 7, 6, 5]
  assert (state.versions, state.logprobs) == ([3, 3, 4], [-1.0, -2.0, -3.0])


def test_a_stream_gets_new_tokens_and_everything_at_the_end(running):
  state = running(5, 6, 2)
  state.emit_delta()
  state.deltas = asyncio.Queue()
  state.emit_delta()
  state.emit_delta()
  state.append([7], [-2.0], 3)
  state.emit_delta()
  completion = contract.Completion(
    tokens=np.zeros(0, np.int32),
    logprobs=np.zeros(0, np.float32),
    versions=np.zeros(0, np.int32),
    stop="abort",
    cached_tokens=0,
    decode_s=0.0,
  )
  state.emit_delta(completion)
  deltas = [state.deltas.get_nowait() for _ in range(state.deltas.qsize())]
  told = [delta and delta.tokens.tolist() for delta in deltas]
  assert told == [[5, 6], [7], []]
  assert [delta and delta.completion for delta in deltas] == [
    None,
    None,
    completion,
  ]
  assert deltas[1] is not None
  assert deltas[1].logprobs.tolist() == [-2.0]
  assert deltas[1].versions.tolist() == [3]


def test_an_error_reaches_the_caller_and_ends_the_stream(running):
  state = running(5, 5)
  state.deltas = asyncio.Queue()
  state.fail(contract.EngineClosed("closed"))
  state.fail(contract.EngineClosed("again"))
  assert str(state.future.exception()) == "closed"
  assert state.deltas.get_nowait() is None


def test_tokens_that_do_not_fit_are_dropped_and_masks_last_longer(running):
  constraint = json_letters.constraint({"type": "string"})
  state = running(2, 2, constraint=constraint, stop_ids=(0,))
  quote, letter, end = 3, 20, 0
  assert (state.is_masked, state.max_steps) == (True, 1)
  assert state.num_fitting([quote]) == 1
  assert (state.is_masked, state.max_steps) == (False, 50)
  lasted = []
  for _ in range(3):
    # The string is still open where the answer ends.
    assert state.num_fitting([letter, letter, end]) == 2
    lasted.append(state.num_masked)
    while state.is_masked:
      assert state.num_fitting([letter]) == 1
  assert lasted == [1, 2, 4]
  assert state.num_fitting([letter] * 3) == 3
  assert state.num_fitting([end]) == 0
  assert (state.num_masked, state.constraint_error) == (1, "")
  assert state.num_fitting([quote]) == 1
  assert state.num_fitting([end]) == 1
  assert (state.num_masked, state.constraint_error) == (0, "")


def test_filters_leave_every_choice_to_a_mask(running):
  constraint = json_letters.constraint({"type": "string"})
  for filters in ({"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}):
    state = running(2, 2, constraint=constraint, **filters)
    assert state.num_fitting([3]) == 1
    assert (state.is_masked, state.max_steps) == (True, 1)
