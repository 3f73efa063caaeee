"""The stream of tasks: seeded, without repeats, resumed exactly."""

import json

import pytest

from rl import prompts, testing


def _stream(seed=0):
  return prompts.Prompts(testing.Counting(), seed)


def _take(stream, count):
  return [stream.next() for _ in range(count)]


def test_the_same_seed_gives_the_same_tasks():
  assert _take(_stream(3), 100) == _take(_stream(3), 100)


def test_two_seeds_give_other_tasks():
  # 2^31 tasks: a shared one among 100 of each has a chance of 5 in a million.
  one = {task.id for task in _take(_stream(0), 100)}
  other = {task.id for task in _take(_stream(1), 100)}
  assert not one & other


def test_no_task_comes_twice_among_the_first_thousand():
  tasks = _take(_stream(), 1000)
  assert len({task.index for task in tasks}) == 1000
  assert {task.split for task in tasks} == {"train"}


@pytest.mark.parametrize("taken", [0, 1, 17])
def test_a_cursor_goes_on_exactly_where_it_was_saved(taken):
  stream = _stream()
  _take(stream, taken)
  # As a checkpoint keeps it.
  cursor = json.loads(json.dumps(stream.cursor))
  expected = _take(stream, 50)
  resumed = _stream()
  _take(resumed, 5)
  resumed.seek(cursor)
  assert _take(resumed, 50) == expected


def test_a_saved_cursor_does_not_move_with_the_stream():
  stream = _stream()
  cursor = stream.cursor
  _take(stream, 3)
  assert stream.cursor != cursor
  stream.seek(cursor)
  assert stream.cursor == cursor
