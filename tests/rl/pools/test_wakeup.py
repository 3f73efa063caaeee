"""Tests of signals."""

import asyncio

from rl.pools import wakeup
from rl.runtime import virtual_clock


def test_a_signal_wakes_all_who_wait_and_nobody_who_comes_later():
  async def run():
    signal = wakeup.Signal()
    signal.fire()  # Nobody waits yet.
    waiters = [asyncio.create_task(signal.wait()) for _ in range(3)]
    await asyncio.sleep(1)
    assert not any(one.done() for one in waiters)
    signal.fire()
    later = asyncio.create_task(signal.wait())
    await asyncio.sleep(1)
    done = [one.done() for one in (*waiters, later)]
    signal.fire()
    await later
    return done

  assert virtual_clock.run(run()) == [True, True, True, False]
