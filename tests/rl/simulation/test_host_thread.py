"""The thread of a simulated host, which its turns share."""

import asyncio
import functools

import pytest

from rl.runtime import virtual_clock
from rl.simulation import host_thread

pytestmark = pytest.mark.virtual_time


def ends(work, *calls):
  """Returns when each of these ends, all begun at once."""

  async def main():
    thread = host_thread.HostThread(work)

    async def one(call):
      await call(thread)
      return asyncio.get_running_loop().time()

    return await asyncio.gather(*map(one, calls))

  return virtual_clock.run(main())


WORK = host_thread.HostWork(turn_s=1.0, group_s=0.5)


async def turn(thread, after_s=0.0):
  await asyncio.sleep(after_s)
  await thread.turn()


async def pack(thread, after_s=0.0):
  await asyncio.sleep(after_s)
  await thread.pack(4)


def test_turns_that_begin_together_end_together():
  assert ends(WORK, turn, turn, turn) == pytest.approx([3.0] * 3)


def test_a_later_turn_takes_its_share():
  found = ends(WORK, turn, functools.partial(turn, after_s=0.5))
  # Alone for 0.5 s, the first needs 0.5 s more, twice as long beside another;
  # that has then had 0.5 s.
  assert found == pytest.approx([1.5, 2.0])


def test_nothing_goes_on_while_groups_are_packed():
  found = ends(WORK, turn, functools.partial(pack, after_s=0.25), pack)
  # From 0 s on 4 x 0.5 s for each pack, one after the other, and then the turn.
  assert found == pytest.approx([5.0, 4.0, 2.0])


async def test_a_turn_that_was_cancelled_still_takes_its_share():
  thread = host_thread.HostThread(WORK)
  first = asyncio.create_task(thread.turn())
  second = asyncio.create_task(thread.turn())
  await asyncio.sleep(0.5)
  first.cancel()
  await second
  assert asyncio.get_running_loop().time() == pytest.approx(2.0)


def test_a_host_without_work_takes_no_time():
  work = host_thread.HostWork()
  assert ends(work, lambda thread: thread.turn()) == [0.0]


def test_seconds_must_not_be_negative():
  with pytest.raises(ValueError, match=r"cluster.host.turn_s=-1"):
    host_thread.HostWork(turn_s=-1.0).validate()
