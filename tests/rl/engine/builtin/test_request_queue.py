"""Requests that wait, run and end, and the pages that they hold."""

import asyncio
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
)
from tests.helpers import json_letters, page_holders

pytestmark = pytest.mark.compiled

CONFIG = model_config.tiny(vocab_size=8, max_length=32)
SHAPES = dispatch_shapes.DispatchShapes(
  slots=3, page_size=4, steps_per_dispatch=4
)


def ids(text):
  return np.array([ord(letter) for letter in text], np.int32)


@dataclasses.dataclass
class Desk:
  """A queue, and dispatches that complete at once."""

  queue: request_queue.RequestQueue
  loop: asyncio.AbstractEventLoop

  def ask(self, text, most=8, **fields):
    request = contract.DecodeRequest(
      **{
        "request_id": f"{text} {self.loop.time()}",
        "session": text,
        "tokens": ids(text),
        "max_tokens": most,
        **fields,
      }
    )
    return self.queue.accept(request, self.loop.create_future())

  def admit(self, **kwargs):
    """The conversations that run now, in the order of their admission."""
    self.queue.admit(**kwargs)
    page_holders.check_queue(self.queue)
    return ["".join(map(chr, one.request.tokens)) for one in self.queue.running]

  def run(self, one, sampled="", *, feed=None, version=0):
    """Feeds `feed` ids, or all, and samples these; returns rows that go on."""
    new = one.pending if feed is None else feed
    assert self.queue.ensure_pages(
      one, one.planned_cached + new + len(sampled), []
    )
    dispatch = dispatch_plan.Dispatch(
      [one],
      [new],
      [0],
      (1, new),
      1,
      decode_step.empty_plan(1, (1, new), 1, slots=3),
      version,
    )
    one.planned_cached += new + max(len(sampled) - 1, 0)
    one.planned_known += len(sampled)
    one.in_flight += 1
    return self.complete(dispatch, sampled)

  def complete(self, dispatch, sampled):
    count = len(sampled)
    going_on = self.queue.apply_results(
      dispatch,
      decode_step.Sampled(
        tokens=jnp.array([[*map(ord, sampled), 0]], jnp.int32),
        logprobs=jnp.full((1, count + 1), -0.5, jnp.float32),
        counts=jnp.array([count], jnp.int32),
      ),
    )
    page_holders.check_queue(self.queue)
    return going_on


def queue_of(shapes):
  return request_queue.RequestQueue(
    CONFIG, shapes, min_copied_ids=1, bias_slots=2
  )


@pytest.fixture
def desk():
  loop = asyncio.new_event_loop()
  yield Desk(queue_of(SHAPES), loop)
  loop.close()


@pytest.fixture
def tight():
  """With pages for 8 + 1 * 4 positions only."""
  loop = asyncio.new_event_loop()
  yield Desk(queue_of(dataclasses.replace(SHAPES, pages=9)), loop)
  loop.close()


def test_the_lowest_priority_is_served_first_and_then_the_first_to_come(desk):
  for text, priority in (("a", 2), ("b", 1), ("c", 1), ("d", 0), ("e", 1)):
    desk.ask(text, priority=(priority,))
  assert desk.admit() == ["d", "b", "c"]
  assert (len(desk.queue.running), desk.queue.num_waiting) == (3, 2)
  desk.queue.finish(desk.queue.running[0], "abort")
  assert desk.admit() == ["b", "c", "e"]


def test_only_sessions_that_ended_beside_others_are_waited_for(desk):
  for text in ("a", "abc", "abcde"):  # The turns of one conversation alone.
    one = desk.ask(text, most=1, session="alone")
    desk.admit()
    desk.run(one, "b")
    assert desk.queue.num_returning(60.0) == 0
  first, second = desk.ask("f", most=1), desk.ask("s", most=2)
  desk.admit()
  desk.run(first, "b")
  assert desk.queue.num_returning(60.0) == 1
  desk.ask("fbd", session="f")  # Its next turn is there.
  assert desk.queue.num_returning(60.0) == 0
  desk.run(second, "bd")
  assert desk.queue.num_returning(0.0) == 0  # Long ago.


def test_a_name_in_flight_is_taken_and_free_afterwards(desk):
  one = desk.ask("a", request_id="name")
  with pytest.raises(ValueError, match="request name is already in flight"):
    desk.ask("b", request_id="name")
  desk.queue.finish(one, "abort")
  desk.ask("b", request_id="name")
  # The first still stands in the queue, and is passed over.
  assert desk.admit() == ["b"]


def test_a_group_waits_until_its_prompt_is_known(desk):
  group = [desk.ask("abcdefghij", most=most) for most in (8, 7, 6)]
  assert desk.admit() == ["abcdefghij"]
  # After a chunk of 4 the others would still have to feed the next 4.
  desk.run(group[0], feed=4)
  assert len(desk.admit()) == 1
  # Behind 8 there is no whole page to wait for: they feed "ij" themselves.
  desk.run(group[0], feed=4)
  assert len(desk.admit()) == 3
  assert [one.cached_tokens for one in group] == [0, 8, 8]
  # In the same two pages.
  tables = [one.page_table for one in group]
  assert len({tuple(table.pages[:2]) for table in tables if table}) == 1


def test_a_prompt_of_whole_pages_is_waited_for_to_its_end(desk):
  first, second = desk.ask("abcdefgh"), desk.ask("abcdefghij")
  assert desk.admit() == ["abcdefgh"]
  desk.run(first, feed=4)
  assert desk.admit() == ["abcdefgh"]
  desk.run(first, "X")
  assert desk.admit() == ["abcdefgh", "abcdefghij"]
  assert second.cached_tokens == 8


def test_a_prompt_of_one_whole_page_is_waited_for(desk):
  first, second = desk.ask("abcd"), desk.ask("abcdefgh")
  assert desk.admit() == ["abcd"]
  desk.run(first, "X")
  assert desk.admit() == ["abcd", "abcdefgh"]
  assert second.cached_tokens == 4


@pytest.mark.parametrize("other", ["abcX", "Xbcdefgh", "abc"])
def test_a_request_without_a_common_page_does_not_wait(desk, other):
  desk.ask("abcdefgh")
  desk.ask(other)
  assert desk.admit() == ["abcdefgh", other]


def test_a_request_that_waits_for_an_aborted_one_takes_its_place(desk):
  first, second = desk.ask("abcdefgh"), desk.ask("abcdefgh")
  desk.admit()
  desk.run(first, feed=4)
  desk.queue.finish(first, "abort")
  assert desk.admit() == ["abcdefgh"]
  assert second.cached_tokens == 4


def bias(value):
  return np.full(8, value, np.float32)


def test_equal_biases_share_a_row_and_others_wait_for_one(desk):
  a, b, c = (desk.ask(text, bias=bias(1)) for text in "abc")
  assert desk.admit() == ["a", "b", "c"]
  assert a.bias_row == b.bias_row == c.bias_row > 0
  for one in (b, c):
    desk.queue.finish(one, "abort")
  desk.ask("d", bias=bias(2))
  third = desk.ask("e", bias=bias(3))
  desk.ask("f", bias=bias(2))
  desk.ask("g")
  # Both rows are taken: a request without bias passes those that wait for one.
  assert desk.admit() == ["a", "d", "g"]
  copies, uploads, _ = desk.queue.take_uploads()
  assert copies == []
  assert [value[0] for _, value in uploads] == [1, 2]
  assert desk.queue.take_uploads() == ([], [], [])
  row = a.bias_row
  desk.queue.finish(a, "abort")
  assert desk.admit() == ["d", "g", "e"]
  assert third.bias_row == row


def test_each_constraint_has_a_row_of_its_own(desk):
  constraint = json_letters.constraint(json_letters.SCHEMAS[0])
  a = desk.ask("a", bias=bias(1))
  desk.admit()
  desk.queue.finish(a, "abort")
  b, c, _ = (desk.ask(text, constraint=constraint) for text in "bcd")
  # One of the two takes the row of the bias that nobody uses any more.
  assert desk.admit() == ["b", "c"]
  assert {b.bias_row, c.bias_row} == {1, 2}
  desk.queue.finish(b, "abort")
  assert desk.admit() == ["c", "d"]


def test_a_bias_that_comes_back_is_still_there(desk):
  for value in (1, 2, 1):
    one = desk.ask("a", bias=bias(value))
    desk.admit()
    desk.queue.finish(one, "abort")
  assert len(desk.queue.take_uploads()[1]) == 2
  # A third one takes a row of one of them.
  one = desk.ask("a", bias=bias(3))
  desk.admit()
  assert [(one.bias_row, 3.0)] == [
    (row, value[0]) for row, value in desk.queue.take_uploads()[1]
  ]


def test_a_request_without_pages_waits_and_keeps_its_turn(tight):
  # 6 of 9 pages; the next needs 4 and one for the first; the last only 1.
  long = tight.ask("a" * 23)
  assert tight.admit() == ["a" * 23]
  tight.run(long)
  tight.ask("b" * 12)
  tight.ask("c")
  assert len(tight.admit()) == 1
  tight.queue.finish(long, "abort")
  assert tight.admit() == ["b" * 12, "c"]


def test_pages_come_from_the_last_in_order_that_may_lose_them(tight):
  first, second, third = (tight.ask(letter * 8, most=24) for letter in "abc")
  tight.admit()
  for one in (first, second, third):
    tight.run(one)
  third.in_flight = 1
  # 9 pages: 2 each, 3 are free. 6 pages for the first: the second loses its.
  assert tight.queue.ensure_pages(first, 24, [])
  assert (second.page_table, tight.queue.preemptions) == (None, 1)
  # 7 pages: no other request may be preempted.
  assert not tight.queue.ensure_pages(first, 32, [])
  third.in_flight = 0
  assert not tight.queue.ensure_pages(first, 32, [third])
  assert not tight.queue.ensure_pages(third, 32, [])
  assert tight.queue.ensure_pages(first, 32, [])
  assert tight.queue.preemptions == 2
  page_holders.check_queue(tight.queue)


def test_a_preempted_request_goes_on_where_it_was(tight):
  one = tight.ask("abcdefgh", most=8)
  tight.admit()
  tight.run(one, "XYZ")
  tight.queue.preempt(one)
  assert (one.has_started, one.slot, one.page_table) == (True, -1, None)
  tight.ask("z")
  # By its old turn; all but the last id, which was never fed, is known.
  assert tight.admit() == ["abcdefgh", "z"]
  assert one.page_table is not None
  assert (one.page_table.cached, one.pending, one.remaining) == (10, 1, 5)
  assert one.cached_tokens == 0
  tight.run(one, "UVW12")
  assert "".join(map(chr, one.future.result().tokens)) == "XYZUVW12"


def test_while_old_weights_drain_only_started_requests_go_on(desk):
  one = desk.ask("a")
  desk.admit()
  desk.queue.preempt(one)
  new = desk.ask("b", priority=())
  assert desk.queue.any_started
  assert desk.admit(started_only=True) == ["a"]
  desk.queue.finish(one, "abort")
  assert not desk.queue.any_started
  assert desk.admit(started_only=True) == []
  assert desk.admit() == ["b"]
  desk.queue.finish(new, "abort")


def test_after_new_weights_all_begin_again_and_share_their_prompt(desk):
  group = [desk.ask("abcdefgh", most=most) for most in (8, 7)]
  desk.admit()
  desk.run(group[0], "X")
  desk.admit()
  desk.run(group[1], "XY")
  desk.queue.restart()
  pages = desk.queue.blocks
  assert (pages.num_free, pages.num_idle) == (pages.num_pages, 0)
  assert desk.queue.preemptions == 0
  assert len(desk.admit()) == 1
  desk.run(group[0], "Y", version=1)
  assert len(desk.admit()) == 2
  assert [one.page_table and one.page_table.cached for one in group] == [9, 9]
  desk.run(group[1], "ZUVWS", version=1)
  done = group[1].future.result()
  assert done.versions.tolist() == [0, 0, 1, 1, 1, 1, 1]
  # Its keys and values are all of the new weights.
  assert done.oldest_kv == 1


def test_after_new_weights_one_of_a_group_has_room_for_all_it_may_become(tight):
  first, second = (tight.ask("abcdefghijkl", most=20) for _ in range(2))
  tight.admit()
  tight.run(first, "X")
  tight.admit()
  tight.run(second, "Y")
  tight.queue.restart()
  for one in (first, second):
    tight.admit()
    tight.run(one, "Z", version=1)
  tight.queue.finish(first, "abort")
  # 8 of 9 pages: none is held twice, as would be after each had fed its own.
  assert tight.queue.ensure_pages(second, 32, [])


def test_kept_keys_and_values_have_their_oldest_version(desk):
  one = desk.ask("abcdefgh", most=4)
  desk.admit()
  desk.run(one, "XY", version=3)
  desk.run(one, "Z", version=5)
  desk.queue.finish(one, "abort")
  done = one.future.result()
  assert (done.versions.tolist(), done.oldest_kv) == ([3, 3, 5], 3)
  # Nothing sampled, nothing to tell.
  other = desk.ask("abcdefghi")
  desk.admit()
  desk.queue.finish(other, "abort")
  assert other.future.result().oldest_kv == -1


def test_the_counts_are_of_context_and_of_what_was_sampled(desk):
  one = desk.ask("abcdefgh", most=8)
  desk.admit()
  desk.run(one, feed=5)
  assert desk.run(one, "XY") == 1
  # "Y" is fed as well, but it is no context.
  desk.run(one, "Z")
  counts = desk.queue.counts
  assert (counts["prefilled"], counts["sampled"]) == (8, 3)
  desk.queue.finish(one, "stop")
  again = desk.ask("abcdefghXYZ12")
  desk.admit()
  desk.run(again, "Q")
  # "Z", which was never fed, and "12".
  assert (counts["prefilled"], counts["cached"]) == (8 + 3, 10)


def test_a_stop_id_or_the_limit_ends_a_request_and_frees_its_row(desk):
  stopped = desk.ask("ab", most=4, stop_ids=(ord("X"),))
  limited = desk.ask("cd", most=2, stop_ids=(ord("X"),))
  desk.admit()
  assert desk.run(stopped, "WX") == 0
  assert desk.run(limited, "UV") == 0
  ends = [one.future.result() for one in (stopped, limited)]
  assert [done.stop for done in ends] == ["stop", "length"]
  assert [done.tokens.tolist() for done in ends] == [
    [ord("W"), ord("X")],
    [ord("U"), ord("V")],
  ]
  assert (desk.queue.running, desk.queue.requests) == ([], {})


@pytest.mark.parametrize("how", ["abort", "cancel"])
def test_tokens_for_a_request_that_has_ended_are_dropped(desk, how):
  one = desk.ask("abcdefgh", most=8)
  desk.admit()
  desk.run(one, feed=4)
  dispatch = dispatch_plan.Dispatch(
    [one],
    [4],
    [0],
    (1, 4),
    1,
    decode_step.empty_plan(1, (1, 4), 1, slots=3),
    0,
  )
  one.in_flight += 1
  one.future.cancel() if how == "cancel" else desk.queue.finish(one, "abort")
  assert desk.complete(dispatch, "X") == 0
  assert (one.num_sampled, one.in_flight) == (0, 0)
  if how == "cancel":
    desk.queue.finish(one, "abort")
  # The 4 that were fed before are cached.
  other = desk.ask("abcdefgh")
  desk.admit()
  assert other.cached_tokens == 4


def test_sessions_that_ended_a_turn_are_expected_for_a_while(desk):
  a, b, _ = (desk.ask(text, session=text) for text in "abc")
  for state in (a, b):
    desk.queue.finish(state, "abort")
  assert desk.queue.num_returning(60.0) == 2
  desk.ask("a again", session="a")
  assert desk.queue.num_returning(60.0) == 1
  assert desk.queue.num_returning(-1.0) == 0


def test_a_lone_request_waits_for_no_session_before_it(desk):
  for text in "abc":
    state = desk.ask(text, session=text)
    assert desk.queue.num_returning(60.0) == 0
    desk.queue.finish(state, "abort")


def test_clearing_forgets_every_request(desk):
  asked = [desk.ask(text) for text in "abcde"]
  desk.admit()
  assert desk.queue.clear() == asked
  assert (desk.queue.running, desk.queue.num_waiting) == ([], 0)


def test_the_queue_forgets_requests_that_ended_while_they_waited():
  loop = asyncio.new_event_loop()
  desk = Desk(queue_of(dataclasses.replace(SHAPES, slots=1)), loop)
  desk.ask("a", request_id="runs")
  desk.admit()
  stays = [desk.ask("a", request_id=f"stays {i}") for i in range(3)]
  for i in range(100):
    desk.queue.finish(desk.ask("a", request_id=f"leaves {i}"), "abort")
  assert len(desk.queue._waiting) <= 2 * len(stays) + 1
  desk.queue.finish(desk.queue.running[0], "abort")
  desk.admit()
  # The order is the same.
  assert desk.queue.running == stays[:1]
  loop.close()
