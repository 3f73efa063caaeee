"""The stream of tasks: seeded, in proportion, resumed exactly."""

import collections
import fractions
import json
import random

import pytest

from envs import base, delayed, mixture
from rl.rollout import curriculum, prompts
from rl.testing import fakes


def _stream(seed=0):
  return prompts.Prompts(fakes.Counting(), seed)


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


def test_a_source_that_raises_is_named_with_the_task_and_the_line():
  class Short(fakes.Counting):
    def task(self, index, split):
      return [super().task(0, split)][index]

  told = (
    r"^task\(1, 'eval'\) of environment counting raised IndexError: .*"
    r"test_prompts\.py:\d+, in task\)"
  )
  assert prompts.task_of(Short(), 0, "eval").index == 0
  with pytest.raises(prompts.NoTask, match=told):
    prompts.task_of(Short(), 1, "eval")
  with pytest.raises(prompts.NoTask, match=r"task\(\d+, 'train'\)"):
    prompts.Prompts(Short(), 0).next()


def test_a_saved_cursor_does_not_move_with_the_stream():
  stream = _stream()
  cursor = stream.cursor
  _take(stream, 3)
  assert stream.cursor != cursor
  stream.seek(cursor)
  assert stream.cursor == cursor


def _mixed(seed=0, *, pool=None, passing=None, **weights):
  parts = tuple(
    mixture.Part(fakes.Counting(name=name), weight)
    for name, weight in weights.items()
  )
  source = mixture.Mixture(parts)
  return prompts.Prompts(source, seed, pool=pool, curriculum=passing)


@pytest.mark.parametrize("number", range(20))
def test_turns_keep_every_share_to_within_one_at_every_moment(number):
  draw = random.Random(number)
  weights = [
    fractions.Fraction(draw.uniform(0.01, 1)) for _ in range(2 + number)
  ]
  shares = [weight / sum(weights) for weight in weights]
  slots = [0] * len(shares)
  for total in range(1, 500):
    slots[prompts.turn(slots, shares)] += 1
    gaps = [abs(n - total * s) for n, s in zip(slots, shares, strict=True)]
    assert max(gaps) < 1


def test_each_source_of_a_mixture_keeps_the_order_that_it_has_alone():
  drawn = _take(_mixed(3, a=1.0, b=2.0), 90)
  for name, count in (("a", 30), ("b", 60)):
    alone = prompts.Prompts(fakes.Counting(name=name), 3)
    own = [task for task in drawn if task.source == name]
    assert own == _take(alone, count)


def test_a_slot_played_again_keeps_its_source_and_the_proportions():
  stream = _mixed(a=3.0, b=1.0)
  counts = collections.Counter()
  for number in range(1, 201):
    task = stream.next()
    # Tasks of a are dropped every time, up to three times in one slot.
    while task.source == "a" and task.index % 3:
      task = stream.next(task.source)
      assert task.source == "a"
    counts[task.source] += 1
    assert abs(counts["a"] - 0.75 * number) < 1


def test_slots_of_a_slow_source_that_are_gone_are_owed():
  # Six are begun and four trained, and all that are not fast are cut off.
  stream = _mixed(fast=1.0, slow=1.0)
  trained = collections.Counter()
  for _ in range(50):
    begun = sorted(_take(stream, 6), key=lambda task: task.source)
    for task in begun[4:]:
      stream.give_back(task)
    trained.update(task.source for task in begun[:4])
  # Of 200 each should have 100; what is owed stays below a round.
  assert abs(trained["slow"] - trained["fast"]) <= 4


def test_what_was_never_drawn_cannot_be_given_back():
  stream = _mixed(a=1.0, b=1.0)
  task = stream.next()
  stream.give_back(task)
  with pytest.raises(ValueError, match="no slot of a is left"):
    stream.give_back(task)


@pytest.mark.parametrize("call", ["next", "give_back"])
def test_an_unknown_source_is_refused_by_name(call):
  stream = _mixed(a=1.0, b=1.0)
  argument = {"next": "c", "give_back": base.Task("c/train/0", 0, "train", 0)}
  with pytest.raises(ValueError, match=r"called c; there are \['a', 'b'\]"):
    getattr(stream, call)(argument[call])


def test_a_wrapper_that_hides_the_sources_of_a_mixture_is_refused():
  inner = mixture.Mixture((mixture.Part(fakes.Counting()),))
  renamed = fakes.Counting(name="b")
  two = mixture.Mixture((*inner.parts, mixture.Part(renamed)))
  stream = prompts.Prompts(delayed.Delayed(source=two), 0)
  with pytest.raises(ValueError, match="wrap the parts of a mixture"):
    stream.next()


def test_a_pool_comes_again_in_another_order():
  stream = prompts.Prompts(fakes.Counting(), 0, pool=50)
  first, second = _take(stream, 50), _take(stream, 50)
  assert {task.index for task in first} == set(range(50))
  assert {task.index for task in second} == set(range(50))
  assert first != second


def test_a_curriculum_skips_what_was_too_easy_and_keeps_the_proportions():
  passing = curriculum.PassRate(window=1, revisit=100)
  stream = _mixed(pool=10, passing=passing, a=1.0, b=1.0)
  for task in _take(stream, 20):
    easy = task.source == "a" and task.index < 8
    stream.learned(task, [1.0, 1.0] if easy else [1.0, 0.0])
  later = _take(stream, 20)
  # Two tasks of a are left, so they come again and again.
  assert collections.Counter(
    task.index for task in later if task.source == "a"
  ) == {8: 5, 9: 5}
  assert sum(task.source == "b" for task in later) == 10


def test_a_cursor_of_a_mixture_holds_streams_slots_and_curriculum():
  def made():
    passing = curriculum.PassRate(window=2, revisit=3)
    return _mixed(1, pool=7, passing=passing, a=1.0, b=2.0)

  def play(stream, count):
    tasks = []
    for _ in range(count):
      task = stream.next()
      tasks.append(task)
      stream.learned(task, [1.0, float(task.index % 3 == 0)])
      if task.index == 5:
        stream.give_back(task)
      if task.index == 6:
        tasks.append(stream.next(task.source))
    return tasks

  stream, resumed = made(), made()
  play(stream, 37)
  # As a checkpoint keeps it.
  cursor = json.loads(json.dumps(stream.cursor))
  play(resumed, 5)
  resumed.seek(cursor)
  assert play(resumed, 60) == play(stream, 60)
  assert json.dumps(resumed.cursor) == json.dumps(stream.cursor)


def test_a_cursor_of_other_sources_is_refused():
  cursor = _mixed(a=1.0, b=1.0).cursor
  with pytest.raises(ValueError, match=r"\['a', 'b'\], but .*\['a', 'c'\]"):
    _mixed(a=1.0, c=1.0).seek(cursor)


@pytest.mark.parametrize(
  ("order", "match"),
  [
    ({"pool": 0}, "pool=0 must be in"),
    ({"pool": 2**31}, "pool=2147483648 must be in"),
    ({"curriculum": curriculum.PassRate()}, "no task comes again"),
  ],
)
def test_an_order_that_cannot_work_is_refused(order, match):
  with pytest.raises(ValueError, match=match):
    prompts.TaskOrder(**order).validate()


def test_an_order_of_a_pool_with_a_curriculum_is_valid():
  order = prompts.TaskOrder(pool=9, curriculum=curriculum.PassRate())
  order.validate()
  prompts.TaskOrder().validate()
  assert order.pool == 9
