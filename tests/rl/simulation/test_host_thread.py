"""The thread of a simulated host, on which everything queues."""

import asyncio

import pytest

from rl.runtime import virtual_clock
from rl.simulation import host_thread


def ends(work, *calls):
  """Returns when each of these ends, all begun at once."""

  async def main():
    thread = host_thread.HostThread(work)

    async def one(call):
      await call(thread)
      return asyncio.get_running_loop().time()

    return await asyncio.gather(*map(one, calls))

  return virtual_clock.run(main())


def test_work_is_done_one_after_another():
  found = ends(
    host_thread.HostWork(turn_s=1.0, group_s=0.5),
    lambda thread: thread.turn(),
    lambda thread: thread.pack(4),
    lambda thread: thread.turn(),
  )
  # 1 s, then 4 x 0.5 s, then 1 s.
  assert found == pytest.approx([1.0, 3.0, 4.0])


def test_a_host_without_work_takes_no_time():
  work = host_thread.HostWork()
  assert ends(work, lambda thread: thread.turn()) == [0.0]


def test_seconds_must_not_be_negative():
  with pytest.raises(ValueError, match=r"cluster.host.turn_s=-1"):
    host_thread.HostWork(turn_s=-1.0).validate()
