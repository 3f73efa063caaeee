"""The requests of the next dispatch, without a device."""

import asyncio
import collections
import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from models import config as model_config
from rl.engine import contract
from rl.engine.builtin import (
  decode_step,
  dispatch_plan,
  dispatch_shapes,
  request_queue,
  scheduler,
)
from tests.helpers import json_letters, page_holders

pytestmark = pytest.mark.compiled

CONFIG = model_config.tiny(vocab_size=8, max_length=64)
SHAPES = dispatch_shapes.DispatchShapes(
  slots=16,
  page_size=4,
  row_buckets=(8, 16),
  chunk_buckets=(8,),
  steps_per_dispatch=4,
)
LENGTHS = dispatch_shapes.DispatchShapes(
  slots=8,
  page_size=4,
  row_buckets=(2, 4, 8),
  chunk_buckets=(2, 8),
  prefill_tokens=8,
  steps_per_dispatch=4,
)
LONGEST = 4000
VERSION = 0
SAMPLED = 7


def choose(ready, **kwargs):
  return scheduler.choose(ready, LENGTHS, longest=LONGEST, **kwargs)


@pytest.mark.parametrize(
  ("lefts", "most", "steps"),
  [
    ([9, 9, 9], 8, 8),
    ([1], 8, 1),
    ([5], 8, 5),
    ([], 8, 1),
    # A dispatch costs a step beside its own: in n steps 3 n + 1 tokens for
    # n + 1, more and more of them.
    ([1, 9, 9, 9], 8, 8),
    # n + 3 for n + 1: less and less.
    ([1, 1, 1, 9], 8, 1),
    # 4 + 3 + 3 for 4, and then one at a time.
    ([1, 3, 3, 9], 8, 3),
    # 6 for 4, and 9 for 7.
    ([3, 6], 8, 3),
  ],
)
def test_steps_give_most_tokens_for_what_a_dispatch_costs(lefts, most, steps):
  assert scheduler.num_steps(lefts, most) == steps


def test_rows_that_decode_need_no_chunks(running):
  ready = [running(5, 5, 1), running(7, 7, 1), running(7, 8, 2)]
  choice = choose(ready)
  assert choice.rows == ready
  # 3 of 8 + 4 rather than 2 of 8 + 2.
  assert (choice.chunks, choice.num_rows, choice.steps) == ((0, 1), 4, 4)


def test_new_context_goes_first_in_the_chunks_that_feed_most_of_it(running):
  decoding, short, long = running(5, 5, 1), running(3, 0), running(30, 0)
  # Of 4 rows 4 chunks of 2 feed 2 + 2 + 1; one of 8 only the 3 of `short`.
  choice = choose([decoding, short, long])
  assert (choice.num_rows, choice.chunks) == (4, (4, 2))
  assert choice.rows == [short, long, decoding]
  # Of 2 rows one chunk feeds 8 of `long`, which comes first, and 1.
  choice = choose([long, decoding, short])
  assert (choice.num_rows, choice.chunks) == (2, (1, 8))
  assert choice.rows == [long, decoding]
  # Who decodes goes on for 4 steps; alone `long` samples nothing.
  assert (choice.steps, choose([long]).steps) == (4, 1)


def test_of_chunks_that_feed_as_much_the_fewest_ids_are_taken(running):
  # 2 ids fit 2 chunks of 2 just as one of 8; 3 do not.
  assert choose([running(3, 1)]).chunks == (2, 2)
  assert choose([running(4, 1)]).chunks == (1, 8)


def test_context_that_is_worth_little_waits_but_not_for_long(running):
  shapes = dispatch_shapes.DispatchShapes()
  late = running(300, 0)
  ready = [*(running(290, 290, 1) for _ in range(40)), late]
  turns = [
    late in scheduler.choose(ready, shapes, longest=LONGEST, turn=turn).rows
    for turn in range(14)
  ]
  # Beside 40 that decode a chunk is not worth its cost.
  assert turns == [turn % 7 == 0 for turn in range(14)]
  # Many are, at any time.
  ready += [running(300, 0) for _ in range(8)]
  choice = scheduler.choose(ready, shapes, longest=LONGEST, turn=1)
  assert choice.rows[0] is late


def test_rows_beyond_the_bucket_wait(running):
  ready = [running(5, 5, 1) for _ in range(5)]
  # 4 of 8 + 4 rather than 5 of 8 + 8.
  choice = choose(ready)
  assert (choice.rows, choice.num_rows) == (ready[:4], 4)


def test_rows_stop_together_when_many_have_little_left(running):
  going_on, ending = running(5, 5, 1), running(5, 6, 2, most=3)
  assert choose([ending, going_on, going_on]).steps == 4
  assert choose([ending, ending, ending, going_on]).steps == 1


def test_lengths_far_apart_take_turns_and_near_ones_go_together(running):
  short = [running(5, 5, 1) for _ in range(4)]
  long = [running(2500, 2500, 1) for _ in range(4)]
  # Apart: 4 * (256 + 128) + 4 * (256 + 4000); together 8 rows of 4000.
  turns = [choose([*short, *long], turn=turn) for turn in range(3)]
  assert [choice.rows for choice in turns] == [long, short, long]
  # One of 1800 and one of 400: 2 rows either way, so 2 * 768 are saved.
  few = [running(400, 400, 1), running(1800, 1800, 1)]
  for turn in range(2):
    assert choose(few, turn=turn).rows == few


@pytest.mark.parametrize(("length", "apart"), [(123, True), (124, False)])
def test_a_length_has_room_for_what_is_sampled(running, length, apart):
  # 124 + 4 steps are 128 just so, 125 are not.
  short = [running(length, length, 1) for _ in range(2)]
  long = [running(500, 500, 1) for _ in range(2)]
  found = [choose([*long, *short], turn=turn).rows for turn in range(2)]
  assert found == ([long, short] if apart else [[*long, *short]] * 2)


def test_nothing_is_longer_than_the_longest(running):
  last = running(3998, 3998, 1, most=2)
  assert choose([last]).rows == [last]


@dataclasses.dataclass
class Case:
  """A scheduler over requests that run, in order of their numbers."""

  queue: request_queue.RequestQueue
  chooser: scheduler.Scheduler
  loop: asyncio.AbstractEventLoop

  def ask(self, count, most=16, length=2, **fields):
    for number in range(count):
      request = contract.DecodeRequest(
        request_id=str(len(self.queue.requests)),
        session="",
        tokens=np.full(length, number % 8, np.int32),
        max_tokens=most,
        **fields,
      )
      self.queue.accept(request, self.loop.create_future())
    self.queue.admit()

  def launch(self, last=None):
    """The next dispatch, which is then on its way; None when there is none."""
    choice = self.chooser.next(last)
    if choice is None:
      return None
    return dispatch_plan.build(choice, SHAPES, VERSION, longest=64)


def names(dispatch):
  return [one.request.request_id for one in dispatch.rows]


@pytest.fixture
def case():
  loop = asyncio.new_event_loop()
  queue = request_queue.RequestQueue(
    CONFIG, SHAPES, min_copied_ids=16, bias_slots=4
  )
  chooser = scheduler.Scheduler(
    queue, SHAPES, longest=64, parts=1, platform="cpu"
  )
  yield Case(queue, chooser, loop)
  loop.close()


def test_nothing_is_dispatched_when_nothing_runs(case):
  assert case.launch() is None


def test_the_same_rows_follow_while_most_of_them_go_on(case):
  case.ask(8)
  first = case.launch()
  assert names(first) == list("01234567")
  # All of 16 tokens are wanted, and 4 are on their way.
  following = case.launch(first)
  assert names(following) == list("01234567")
  assert following.plan.integers[:, 7].tolist() == [1] * 8


def test_rows_under_a_constraint_sample_once_and_wait_for_their_next_mask(case):
  constraint = json_letters.constraint(json_letters.SCHEMAS[0])
  case.ask(2, constraint=constraint)
  case.ask(6)
  first = case.launch()
  budgets = first.plan.integers[:, decode_step.BUDGET].tolist()
  assert budgets == [1, 1, 4, 4, 4, 4, 4, 4]
  assert [row for row, _ in first.masks] == [1, 2]
  # The others go on meanwhile.
  following = case.launch(first)
  assert names(following) == list("234567")
  assert following.masks == []


def test_rows_that_end_with_their_dispatch_do_not_follow(case):
  case.ask(8, most=4)
  assert case.launch(case.launch()) is None


def test_where_most_end_early_the_next_dispatch_waits(case):
  case.ask(8)
  first = case.launch()
  # An average moves by a tenth of the way: after 3 such landings it is 0.73,
  # and below three quarters no row follows.
  for _ in range(2):
    case.chooser.completed(first, 0)
  assert case.launch(first) is not None
  for _ in range(3):
    case.chooser.completed(first, 0)
  assert case.launch(first) is None


def test_others_go_beside_when_they_fill_a_dispatch_of_their_own(case):
  case.ask(16, most=4)
  first = case.launch()
  # 16 rows in one dispatch use 16 / (8 + 16) of its cost, 8 use 8 / (8 + 8).
  assert len(first.rows) == 16
  assert case.launch(first) is None
  for one in first.rows[:8]:
    one.in_flight = 0
    one.sync_counters()
  assert len(case.launch(first).rows) == 8


def test_a_few_wait_for_more(case):
  case.ask(16, most=4)
  first = case.launch()
  for one in first.rows[:2]:
    one.in_flight = 0
    one.sync_counters()
  assert case.launch(first) is None


def test_a_request_that_cannot_get_its_pages_says_so(case):
  case.ask(1)
  table = case.queue.running[0].page_table
  hoard, _ = case.queue.blocks.begin(np.ones(2, np.int32))
  total = case.queue.blocks.num_pages
  assert case.queue.blocks.grow(hoard, 4 * total)
  assert not table.pages
  with pytest.raises(RuntimeError, match=f"gets no pages: of {total}, 0 are"):
    case.launch()


class Loop:
  """Two dispatches in flight, which sample all that they may."""

  def __init__(self, loop, shapes, longest):
    config = model_config.tiny(vocab_size=8, max_length=longest)
    self.loop = loop
    self.queue = request_queue.RequestQueue(
      config, shapes, min_copied_ids=16, bias_slots=4
    )
    self.chooser = scheduler.Scheduler(
      self.queue, shapes, longest=longest, parts=1, platform="cpu"
    )
    self.shapes, self.longest = shapes, longest
    self.in_flight = collections.deque[dispatch_plan.Dispatch]()
    self.num_dispatches = self.names = 0

  def ask(self, ids, most, **fields):
    self.names += 1
    name = f"name {self.names}"
    request = contract.DecodeRequest(
      **{
        "request_id": name,
        "session": name,
        "tokens": np.asarray(ids, np.int32),
        "max_tokens": most,
        **fields,
      }
    )
    return self.queue.accept(request, self.loop.create_future())

  def step(self):
    """Launches two, completes one; False when there is nothing to do."""
    while len(self.in_flight) < 2:
      self.queue.admit()
      choice = self.chooser.next(self.in_flight[-1] if self.in_flight else None)
      if choice is None:
        break
      self.in_flight.append(
        dispatch_plan.build(choice, self.shapes, 0, longest=self.longest)
      )
      self.queue.take_uploads()
      self.num_dispatches += 1
    if not self.in_flight:
      return False
    dispatch = self.in_flight.popleft()
    rows, steps = len(dispatch.plan.integers), self.shapes.steps_per_dispatch
    sampled = decode_step.Sampled(
      tokens=jnp.full((rows, steps), SAMPLED, jnp.int32),
      logprobs=jnp.zeros((rows, steps), jnp.float32),
      counts=jnp.asarray(dispatch.plan.integers[:, decode_step.BUDGET]),
    )
    self.chooser.completed(
      dispatch, self.queue.apply_results(dispatch, sampled)
    )
    page_holders.check_queue(self.queue)
    return True


@pytest.fixture
def looping():
  """Shapes and longest -> `Loop`."""
  loop = asyncio.new_event_loop()
  yield lambda shapes, longest: Loop(loop, shapes, longest)
  loop.close()


@pytest.mark.parametrize("seed", range(20))
def test_pages_for_one_conversation_are_enough_whoever_repeats_whom(
  looping, seed
):
  rng = np.random.default_rng(seed)
  shapes = dispatch_shapes.DispatchShapes(
    slots=4,
    page_size=int(rng.choice([1, 2, 4])),
    row_buckets=(4,),
    chunk_buckets=(4, 16),
    prefill_tokens=64,
    steps_per_dispatch=int(rng.choice([2, 8])),
  )
  least = shapes.width(32) + 1
  loop = looping(dataclasses.replace(shapes, pages=least), 32)
  for _ in range(120):
    if rng.random() < 0.3 and len(loop.queue.requests) < 8:
      # A prompt of what others sample: both encode it at once.
      given = int(rng.integers(1, 28))
      loop.ask(
        [1, *[SAMPLED] * (given - 1)],
        int(rng.integers(1, 33 - given)),
        priority=(int(rng.integers(3)),),
      )
    loop.step()
  for _ in range(1000):
    if not loop.queue.requests:
      break
    assert loop.step()
  assert not loop.queue.requests
  assert loop.queue.blocks.num_free + loop.queue.blocks.num_idle == least


def test_rows_that_do_not_fit_take_turns(looping):
  shapes = dispatch_shapes.DispatchShapes()
  loop = looping(shapes, 512)
  nine = [loop.ask([i], 400) for i in range(9)]
  for _ in range(20):
    loop.step()
  # 8 rows are worth most; the ninth waits for none of them to end.
  sampled = [one.num_sampled for one in nine]
  assert max(sampled) - min(sampled) <= 2 * shapes.steps_per_dispatch
  while loop.step():
    pass
  # 9 * 400 tokens in 8 rows of 8 steps are 57 dispatches, not 50 + 50.
  assert loop.num_dispatches <= 60


def test_context_beside_many_that_decode_comes_in_long_chunks(looping):
  shapes = dispatch_shapes.DispatchShapes()
  loop = looping(shapes, 2048)
  for i in range(40):
    loop.ask([i, i], 2000)
  for _ in range(10):
    loop.step()
  late = loop.ask([*range(300)], 10)
  before = loop.num_dispatches
  while not late.num_sampled:
    assert loop.step()
  # 10 chunks of 32, one of 7 dispatches; in chunks of 4 it would be over 500.
  assert loop.num_dispatches - before <= 7 * 11
