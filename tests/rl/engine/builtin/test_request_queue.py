"""Who waits, who runs and what each holds, without a device."""

import asyncio
import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from models import config as model_config
from rl.data import trajectory
from rl.engine import contract
from rl.engine.builtin import decode_step, dispatch_plan, request_queue
from rl.engine.builtin import settings as engine_settings

CONFIG = model_config.tiny(vocab_size=8, max_length=32)
SETTINGS = engine_settings.EngineSettings(
  slots=3,
  page_size=4,
  least_copied=1,
  steps_per_dispatch=4,
  bias_slots=2,
)


def ids(text):
  return np.array([ord(letter) for letter in text], np.int32)


@dataclasses.dataclass
class Desk:
  """A batch, and dispatches that do what they are told at once."""

  batch: request_queue.Batch
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
    return self.batch.accept(request, self.loop.create_future())

  def admit(self, **kwargs):
    """The conversations that run now, in the order of their admission."""
    self.batch.admit(**kwargs)
    self.batch.check()
    return ["".join(map(chr, one.request.tokens)) for one in self.batch.running]

  def fly(self, one, sampled="", *, feed=None, version=0, stepped=None):
    """Feeds `feed` ids, or all; then these tokens come. Returns who goes on."""
    new = one.pending if feed is None else feed
    assert self.batch.make_room(one, one.fed + new + len(sampled), [])
    flight = dispatch_plan.Flight(
      [one],
      [new],
      [0],
      (1, new),
      1,
      decode_step.empty_plan(1, (1, new), 1, slots=3),
      trajectory.PolicyVersion(version),
    )
    one.fed += new + max(len(sampled) - 1, 0)
    one.grown += len(sampled)
    one.flights += 1
    return self.land(flight, sampled)

  def land(self, flight, sampled):
    count = len(sampled)
    going_on = self.batch.absorb(
      flight,
      decode_step.Sampled(
        tokens=jnp.array([[*map(ord, sampled), 0]], jnp.int32),
        logprobs=jnp.full((1, count + 1), -0.5, jnp.float32),
        counts=jnp.array([count], jnp.int32),
      ),
    )
    self.batch.check()
    return going_on


@pytest.fixture
def desk():
  loop = asyncio.new_event_loop()
  yield Desk(request_queue.Batch(CONFIG, SETTINGS), loop)
  loop.close()


@pytest.fixture
def tight():
  """With pages for 8 + 1 * 4 positions only."""
  settings = dataclasses.replace(SETTINGS, pages=9)
  loop = asyncio.new_event_loop()
  yield Desk(request_queue.Batch(CONFIG, settings), loop)
  loop.close()


def test_the_lowest_priority_is_served_first_and_then_who_came_first(desk):
  for text, priority in (("a", 2), ("b", 1), ("c", 1), ("d", 0), ("e", 1)):
    desk.ask(text, priority=(priority,))
  assert desk.admit() == ["d", "b", "c"]
  assert (len(desk.batch.running), desk.batch.num_waiting) == (3, 2)
  desk.batch.finish(desk.batch.running[0], "abort")
  assert desk.admit() == ["b", "c", "e"]


def test_a_name_in_flight_is_taken_and_free_afterwards(desk):
  one = desk.ask("a", request_id="name")
  with pytest.raises(ValueError, match="request name is already in flight"):
    desk.ask("b", request_id="name")
  desk.batch.finish(one, "abort")
  desk.ask("b", request_id="name")
  # The first still stands in the queue, and is passed over.
  assert desk.admit() == ["b"]


def test_a_group_waits_until_its_prompt_is_known(desk):
  group = [desk.ask("abcdefghij", most=most) for most in (8, 7, 6)]
  assert desk.admit() == ["abcdefghij"]
  # After a chunk of 4 the others would still have to feed the next 4.
  desk.fly(group[0], feed=4)
  assert len(desk.admit()) == 1
  # Behind 8 there is no whole page to wait for: they feed "ij" themselves.
  desk.fly(group[0], feed=4)
  assert len(desk.admit()) == 3
  assert [one.cached_tokens for one in group] == [0, 8, 8]
  # In the same two pages.
  leases = [one.lease for one in group]
  assert len({tuple(lease.pages[:2]) for lease in leases if lease}) == 1


def test_a_prompt_of_whole_pages_is_waited_for_to_its_end(desk):
  first, second = desk.ask("abcdefgh"), desk.ask("abcdefghij")
  assert desk.admit() == ["abcdefgh"]
  desk.fly(first, feed=4)
  assert desk.admit() == ["abcdefgh"]
  desk.fly(first, "X")
  assert desk.admit() == ["abcdefgh", "abcdefghij"]
  assert second.cached_tokens == 8


def test_a_prompt_of_one_whole_page_is_waited_for(desk):
  first, second = desk.ask("abcd"), desk.ask("abcdefgh")
  assert desk.admit() == ["abcd"]
  desk.fly(first, "X")
  assert desk.admit() == ["abcd", "abcdefgh"]
  assert second.cached_tokens == 4


@pytest.mark.parametrize("other", ["abcX", "Xbcdefgh", "abc"])
def test_who_has_no_page_in_common_does_not_wait(desk, other):
  desk.ask("abcdefgh")
  desk.ask(other)
  assert desk.admit() == ["abcdefgh", other]


def test_who_waits_for_one_that_is_aborted_takes_its_place(desk):
  first, second = desk.ask("abcdefgh"), desk.ask("abcdefgh")
  desk.admit()
  desk.fly(first, feed=4)
  desk.batch.finish(first, "abort")
  assert desk.admit() == ["abcdefgh"]
  assert second.cached_tokens == 4


def bias(value):
  return np.full(8, value, np.float32)


def test_equal_biases_share_a_row_and_others_wait_for_one(desk):
  a, b, c = (desk.ask(text, bias=bias(1)) for text in "abc")
  assert desk.admit() == ["a", "b", "c"]
  assert a.bias == b.bias == c.bias > 0
  for one in (b, c):
    desk.batch.finish(one, "abort")
  desk.ask("d", bias=bias(2))
  third = desk.ask("e", bias=bias(3))
  desk.ask("f", bias=bias(2))
  desk.ask("g")
  # Both rows are taken: who has no bias goes past those that wait for one.
  assert desk.admit() == ["a", "d", "g"]
  copies, uploads = desk.batch.take_errands()
  assert copies == []
  assert [value[0] for _, value in uploads] == [1, 2]
  assert desk.batch.take_errands() == ([], [])
  row = a.bias
  desk.batch.finish(a, "abort")
  assert desk.admit() == ["d", "g", "e"]
  assert third.bias == row


def test_a_bias_that_comes_back_is_still_there(desk):
  for value in (1, 2, 1):
    one = desk.ask("a", bias=bias(value))
    desk.admit()
    desk.batch.finish(one, "abort")
  assert len(desk.batch.take_errands()[1]) == 2
  # A third one takes a row of one of them.
  one = desk.ask("a", bias=bias(3))
  desk.admit()
  assert [(one.bias, 3.0)] == [
    (row, value[0]) for row, value in desk.batch.take_errands()[1]
  ]


def test_who_finds_no_pages_waits_and_keeps_its_turn(tight):
  # 6 of 9 pages; the next needs 4 and one for the first; the last only 1.
  long = tight.ask("a" * 23)
  assert tight.admit() == ["a" * 23]
  tight.fly(long)
  tight.ask("b" * 12)
  tight.ask("c")
  assert len(tight.admit()) == 1
  tight.batch.finish(long, "abort")
  assert tight.admit() == ["b" * 12, "c"]


def test_pages_come_from_the_last_in_order_that_may_lose_them(tight):
  first, second, third = (tight.ask(letter * 8, most=24) for letter in "abc")
  tight.admit()
  for one in (first, second, third):
    tight.fly(one)
  third.flights = 1
  # 9 pages: 2 each, 3 are free. 6 pages for the first: the second loses its.
  assert tight.batch.make_room(first, 24, [])
  assert (second.lease, tight.batch.preemptions) == (None, 1)
  # 7: nobody is left that may lose some.
  assert not tight.batch.make_room(first, 32, [])
  third.flights = 0
  assert not tight.batch.make_room(first, 32, [third])
  assert not tight.batch.make_room(third, 32, [])
  assert tight.batch.make_room(first, 32, [])
  assert tight.batch.preemptions == 2
  tight.batch.check()


def test_a_preempted_request_goes_on_where_it_was(tight):
  one = tight.ask("abcdefgh", most=8)
  tight.admit()
  tight.fly(one, "XYZ")
  tight.batch.preempt(one)
  assert (one.begun, one.slot, one.lease) == (True, -1, None)
  tight.ask("z")
  # By its old turn; all but the last id, which was never fed, is known.
  assert tight.admit() == ["abcdefgh", "z"]
  assert one.lease is not None
  assert (one.lease.cached, one.pending, one.left) == (10, 1, 5)
  assert one.cached_tokens == 0
  tight.fly(one, "UVW12")
  assert "".join(map(chr, one.future.result().tokens)) == "XYZUVW12"


def test_while_old_weights_drain_only_who_has_run_goes_on(desk):
  one = desk.ask("a")
  desk.admit()
  desk.batch.preempt(one)
  new = desk.ask("b", priority=())
  assert desk.batch.has_begun
  assert desk.admit(again_only=True) == ["a"]
  desk.batch.finish(one, "abort")
  assert not desk.batch.has_begun
  assert desk.admit(again_only=True) == []
  assert desk.admit() == ["b"]
  desk.batch.finish(new, "abort")


def test_after_new_weights_all_begin_again_and_share_their_prompt(desk):
  group = [desk.ask("abcdefgh", most=most) for most in (8, 7)]
  desk.admit()
  desk.fly(group[0], "X")
  desk.admit()
  desk.fly(group[1], "XY")
  desk.batch.restart()
  pages = desk.batch.paging
  assert (pages.num_free, pages.num_idle) == (pages.num_pages, 0)
  assert desk.batch.preemptions == 0
  assert len(desk.admit()) == 1
  desk.fly(group[0], "Y", version=1)
  assert len(desk.admit()) == 2
  assert [one.lease and one.lease.cached for one in group] == [9, 9]
  desk.fly(group[1], "ZUVWS", version=1)
  done = group[1].future.result()
  assert done.versions.tolist() == [0, 0, 1, 1, 1, 1, 1]
  # Its keys and values are all of the new weights.
  assert done.oldest_kv == 1


def test_after_new_weights_one_of_a_group_has_room_for_all_it_may_become(tight):
  first, second = (tight.ask("abcdefghijkl", most=20) for _ in range(2))
  tight.admit()
  tight.fly(first, "X")
  tight.admit()
  tight.fly(second, "Y")
  tight.batch.restart()
  for one in (first, second):
    tight.admit()
    tight.fly(one, "Z", version=1)
  tight.batch.finish(first, "abort")
  # 8 of 9 pages: none is held twice, as would be after each had fed its own.
  assert tight.batch.make_room(second, 32, [])


def test_what_is_kept_tells_the_oldest_it_was_computed_with(desk):
  one = desk.ask("abcdefgh", most=4)
  desk.admit()
  desk.fly(one, "XY", version=3)
  desk.fly(one, "Z", version=5)
  desk.batch.finish(one, "abort")
  done = one.future.result()
  assert (done.versions.tolist(), done.oldest_kv) == ([3, 3, 5], 3)
  # Nothing sampled, nothing to tell.
  other = desk.ask("abcdefghi")
  desk.admit()
  desk.batch.finish(other, "abort")
  assert other.future.result().oldest_kv == -1


def test_the_counts_are_of_context_and_of_what_was_sampled(desk):
  one = desk.ask("abcdefgh", most=8)
  desk.admit()
  desk.fly(one, feed=5)
  assert desk.fly(one, "XY") == 1
  # "Y" is fed as well, but it is no context.
  desk.fly(one, "Z")
  counts = desk.batch.counts
  assert (counts["prefilled"], counts["sampled"]) == (8, 3)
  desk.batch.finish(one, "stop")
  again = desk.ask("abcdefghXYZ12")
  desk.admit()
  desk.fly(again, "Q")
  # "Z", which was never fed, and "12".
  assert (counts["prefilled"], counts["cached"]) == (8 + 3, 10)


def test_a_stop_id_or_the_limit_ends_a_request_and_frees_its_row(desk):
  stopped = desk.ask("ab", most=4, stop_ids=(ord("X"),))
  limited = desk.ask("cd", most=2, stop_ids=(ord("X"),))
  desk.admit()
  assert desk.fly(stopped, "WX") == 0
  assert desk.fly(limited, "UV") == 0
  ends = [one.future.result() for one in (stopped, limited)]
  assert [done.stop for done in ends] == ["stop", "length"]
  assert [done.tokens.tolist() for done in ends] == [
    [ord("W"), ord("X")],
    [ord("U"), ord("V")],
  ]
  assert (desk.batch.running, desk.batch.requests) == ([], {})


@pytest.mark.parametrize("how", ["abort", "cancel"])
def test_what_lands_for_a_request_that_ended_is_nobodys(desk, how):
  one = desk.ask("abcdefgh", most=8)
  desk.admit()
  desk.fly(one, feed=4)
  flight = dispatch_plan.Flight(
    [one],
    [4],
    [0],
    (1, 4),
    1,
    decode_step.empty_plan(1, (1, 4), 1, slots=3),
    trajectory.PolicyVersion(0),
  )
  one.flights += 1
  one.future.cancel() if how == "cancel" else desk.batch.finish(one, "abort")
  assert desk.land(flight, "X") == 0
  assert (one.num_sampled, one.flights) == (0, 0)
  if how == "cancel":
    desk.batch.finish(one, "abort")
  # The 4 that had landed before are known.
  other = desk.ask("abcdefgh")
  desk.admit()
  assert other.cached_tokens == 4


def test_sessions_that_ended_a_turn_are_expected_for_a_while(desk):
  for text in ("a", "b"):
    desk.batch.finish(desk.ask(text, session=text), "abort")
  assert desk.batch.expected(60.0) == 2
  desk.ask("a again", session="a")
  assert desk.batch.expected(60.0) == 1
  assert desk.batch.expected(-1.0) == 0


def test_clearing_leaves_nobody(desk):
  asked = [desk.ask(text) for text in "abcde"]
  desk.admit()
  assert desk.batch.clear() == asked
  assert (desk.batch.running, desk.batch.num_waiting) == ([], 0)
