"""What the next dispatch does, by worked examples."""

import asyncio

import numpy as np
import pytest

from rl.data import trajectory
from rl.engine import contract
from rl.engine.builtin import block_manager, decode_step, dispatch_plan
from rl.engine.builtin import settings as engine_settings

SETTINGS = engine_settings.EngineSettings(
  slots=8,
  page_size=4,
  row_buckets=(2, 4),
  chunk_buckets=(2, 8),
  prefill_tokens=8,
  length_buckets=(1000, 2000),
  steps_per_dispatch=4,
)
LONGEST = 4000


@pytest.fixture
def loop():
  loop = asyncio.new_event_loop()
  yield loop
  loop.close()


@pytest.fixture
def running(loop):
  """(ids given, cached, tokens sampled of at most) -> a running request."""
  arrivals = iter(range(100))

  def make(given, cached, sampled=0, most=50, **fields):
    at = next(arrivals)
    request = contract.DecodeRequest(
      request_id=str(at),
      session=str(at),
      tokens=np.arange(given, dtype=np.int32),
      max_tokens=most,
      **fields,
    )
    one = dispatch_plan.Running(
      request,
      loop.create_future(),
      ((), at),
      np.arange(given + most, dtype=np.int32),
      given + sampled,
    )
    pages = [10 * at + i for i in range(-(-(given + most) // 4))]
    one.slot, one.lease = at, block_manager.Lease(pages, cached, 0)
    one.versions = [0] * sampled
    one.logprobs = [-1.0] * sampled
    one.settle()
    return one

  return make


def choose(ready, **kwargs):
  return dispatch_plan.choose(ready, SETTINGS, longest=LONGEST, **kwargs)


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
  assert dispatch_plan.num_steps(lefts, most) == steps


def test_rows_that_decode_need_no_chunks(running):
  ready = [running(5, 5, 1), running(7, 7, 1), running(7, 8, 2)]
  choice = choose(ready)
  assert choice.rows == ready
  # 3 of 8 + 4 rather than 2 of 8 + 2.
  assert (choice.chunks, choice.num_rows, choice.steps) == ((0, 1), 4, 4)
  assert choice.length == 1000


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
  settings = engine_settings.EngineSettings()
  late = running(300, 0)
  ready = [*(running(290, 290, 1) for _ in range(40)), late]
  turns = [
    late
    in dispatch_plan.choose(ready, settings, longest=LONGEST, turn=turn).rows
    for turn in range(14)
  ]
  # Beside 40 that decode a chunk is not worth its cost.
  assert turns == [turn % 7 == 0 for turn in range(14)]
  # Many are, at any time.
  ready += [running(300, 0) for _ in range(8)]
  choice = dispatch_plan.choose(ready, settings, longest=LONGEST, turn=1)
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
  # Apart: 4 * (256 + 1000) + 4 * (256 + 4000); together 8 rows of 4000.
  turns = [choose([*short, *long], turn=turn) for turn in range(3)]
  assert [choice.length for choice in turns] == [4000, 1000, 4000]
  assert [choice.rows for choice in turns] == [long, short, long]
  # One of 1800 and one of 900: 2 rows either way, so 2 * 1256 are saved.
  few = [running(900, 900, 1), running(1800, 1800, 1)]
  for turn in range(2):
    choice = choose(few, turn=turn)
    assert (choice.rows, choice.length) == (few, 2000)


def test_the_length_has_room_for_what_is_sampled(running):
  # 996 + 4 steps are 1000 just so, 997 are not; nothing is above the longest.
  assert choose([running(995, 995, 1)]).length == 1000
  assert choose([running(996, 996, 1)]).length == 2000
  assert choose([running(3998, 3998, 1, most=2)]).length == 4000


def test_pages_are_needed_for_all_that_a_row_may_do(running):
  choice = dispatch_plan.Choice([], (2, 8), 4, 1000, 3)
  assert choice.need(running(30, 4)) == 4 + 8 + 3
  assert choice.need(running(7, 7, 1)) == 7 + 1 + 3
  # No more than the request may ever have.
  assert choice.need(running(7, 8, 2, most=3)) == 10


def test_a_dispatch_says_what_every_row_does(running):
  context = running(
    30, 4, seed=-3, top_k=5, top_p=0.5, min_p=0.25, temperature=0.0
  )
  ending = running(6, 3, most=1, stop_ids=(7, 8))
  decoding = running(5, 6, 2, most=9)
  decoding.bias = 2
  choice = dispatch_plan.Choice(
    [context, ending, decoding], (2, 8), 4, 1000, steps=3
  )
  flight = dispatch_plan.build(choice, SETTINGS, trajectory.PolicyVersion(4))
  # Slot, cached, new, budget, seed, top k, bias, follow, steps.
  assert flight.plan.integers[:, : decode_step.STEPS + 1].tolist() == [
    [0, 4, 8, 0, -3, 5, 0, 0, 3],
    [1, 3, 3, 1, 0, 0, 0, 0, 3],
    [2, 6, 1, 3, 0, 0, 2, 0, 3],
    [8, 0, 0, 0, 0, 0, 0, 0, 3],
  ]
  assert flight.plan.stop_ids.tolist() == [
    [-1] * 4,
    [7, 8, -1, -1],
    [-1] * 4,
    [-1] * 4,
  ]
  floats = [[0.0, 0.5, 0.25], *[[1.0, 1.0, 0.0]] * 3]
  np.testing.assert_array_equal(
    flight.plan.floats, np.asarray(floats, np.float32)
  )
  # Two chunks of 8, then one id of each other row.
  assert flight.starts == [0, 8, 16]
  assert flight.plan.ids.tolist() == [
    *range(4, 12),
    *[3, 4, 5, 0, 0, 0, 0, 0],
    *[6, 0],
  ]
  assert flight.plan.tables.shape == (4, 250)
  assert flight.plan.tables[1, :3].tolist() == [10, 11, 0]
  assert (flight.fed, flight.version) == ([8, 3, 1], 4)
  # The context is fed, and the other two will have sampled 1 and 5: of these
  # only the last wants more.
  assert [(one.fed, one.grown) for one in choice.rows] == [
    (12, 30),
    (6, 7),
    (9, 10),
  ]
  assert [(one.pending, one.left) for one in choice.rows] == [
    (18, 50),
    (1, 0),
    (1, 4),
  ]
  assert flight.could_go_on == 2
  assert [one.flights for one in choice.rows] == [1, 1, 1]


def test_a_row_that_samples_follows_and_one_that_is_fed_does_not(running):
  context, decoding = running(30, 4), running(5, 5, 1)
  choice = dispatch_plan.Choice([context, decoding], (2, 8), 2, 1000, steps=2)
  first, second, third, fourth = (
    dispatch_plan.build(choice, SETTINGS, trajectory.PolicyVersion(0))
    for _ in range(4)
  )
  columns = slice(decode_step.PAST, decode_step.BUDGET + 1)
  follow = decode_step.FOLLOW
  # The host knows the context; of what is sampled, only how far it may get.
  for flight, context_row, decoding_row, follows in (
    (first, [4, 8, 0], [5, 1, 2], [0, 0]),
    (second, [12, 8, 0], [7, 1, 2], [0, 1]),
    (third, [20, 8, 0], [9, 1, 2], [0, 1]),
    (fourth, [28, 2, 2], [11, 1, 2], [0, 1]),
  ):
    rows = flight.plan.integers[:, columns].tolist()
    assert rows == [context_row, decoding_row]
    assert flight.plan.integers[:, follow].tolist() == follows


def test_a_request_ends_behind_a_stop_id_or_at_its_limit(running):
  # Ids are their own positions: the last sampled one of 5 + 3 is 7.
  assert running(5, 7, 3, stop_ids=(7,)).why_ended() == "stop"
  assert running(5, 7, 3, most=3, stop_ids=(7,)).why_ended() == "stop"
  assert running(5, 7, 3, most=3, stop_ids=(6,)).why_ended() == "length"
  assert running(5, 7, 3, stop_ids=(6,)).why_ended() is None
  # A stop id in the prompt is none.
  assert running(5, 4, 0, stop_ids=(4,)).why_ended() is None


def test_the_first_token_tells_its_version_and_when_it_came(running):
  one = running(5, 5)
  one.started -= 30.0
  assert (one.first_version, one.first_token_s) == (None, 0.0)
  one.take([7, 6], [-1.0, -2.0], 3)
  first_s = one.first_token_s
  assert first_s >= 30.0
  one.started -= 30.0
  one.take([5], [-3.0], 4)
  assert (one.first_version, one.first_token_s) == (3, first_s)
  assert one.ids[: one.known].tolist() == [0, 1, 2, 3, 4, 7, 6, 5]
  assert (one.versions, one.logprobs) == ([3, 3, 4], [-1.0, -2.0, -3.0])


def test_a_stream_is_told_what_is_new_and_everything_at_the_end(running):
  one = running(5, 6, 2)
  one.tell()
  one.deltas = asyncio.Queue()
  one.tell()
  one.tell()
  one.take([7], [-2.0], 3)
  one.tell()
  completion = contract.Completion(
    tokens=np.zeros(0, np.int32),
    logprobs=np.zeros(0, np.float32),
    versions=np.zeros(0, np.int32),
    stop="abort",
    cached_tokens=0,
    decode_s=0.0,
  )
  one.tell(completion)
  deltas = [one.deltas.get_nowait() for _ in range(one.deltas.qsize())]
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


def test_an_error_reaches_who_waits_and_ends_the_stream(running):
  one = running(5, 5)
  one.deltas = asyncio.Queue()
  one.fail(contract.EngineClosed("closed"))
  one.fail(contract.EngineClosed("again"))
  assert str(one.future.exception()) == "closed"
  assert one.deltas.get_nowait() is None
