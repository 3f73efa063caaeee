"""Virtual time: asyncio as it is, but nobody waits for it."""

import asyncio
import time

import pytest

from rl.runtime import virtual_clock


def now():
  return asyncio.get_running_loop().time()


def test_time_begins_at_0_and_jumps_to_the_next_timer():
  async def main():
    began = now()
    await asyncio.sleep(3600.0)
    return began, now()

  real = time.monotonic()
  assert virtual_clock.run(main()) == (0.0, pytest.approx(3600.0, abs=1e-6))
  assert time.monotonic() - real < 60.0


def test_a_loop_that_runs_already_is_not_in_the_way():
  async def main():
    await asyncio.sleep(3600.0)
    return now()

  async def cell():
    return virtual_clock.run(main())

  assert asyncio.run(cell()) == pytest.approx(3600.0, abs=1e-6)


def test_timers_fire_in_the_order_of_their_times():
  order = []

  async def main():
    loop = asyncio.get_running_loop()
    for delay in (3.0, 1.0, 2.0):
      loop.call_later(delay, order.append, delay)
    await asyncio.sleep(5.0)

  virtual_clock.run(main())
  assert order == [1.0, 2.0, 3.0]


def test_what_is_ready_runs_before_time_passes():
  async def main():
    times = []

    async def step():
      for _ in range(100):
        await asyncio.sleep(0)
      times.append(now())

    async with asyncio.TaskGroup() as tasks:
      tasks.create_task(asyncio.sleep(1e-3))
      tasks.create_task(step())
    return times

  assert virtual_clock.run(main()) == [0.0]


def test_deadlines_that_were_cancelled_leave_the_order_of_the_rest():
  fired = []

  async def main():
    loop = asyncio.get_running_loop()
    # Each a second apart: due at 1000, 1001, ... and at 10, 11, ...
    for number in range(300):
      late = loop.call_later(1000.0, fired.append, loop.time())
      loop.call_later(10.0, fired.append, loop.time())
      if number % 100:
        late.cancel()
      await asyncio.sleep(1.0)
    await asyncio.sleep(2000.0)

  virtual_clock.run(main())
  # Of every second all short ones, then the late ones of 0, 100 and 200 s.
  assert fired == pytest.approx([*range(300), 0, 100, 200])


def test_a_callback_that_fails_is_reported_and_the_loop_goes_on():
  reported = []

  async def main():
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda loop, what: reported.append(what))
    loop.call_soon(int, "nonsense")
    await asyncio.sleep(1.0)
    return now()

  assert virtual_clock.run(main()) == pytest.approx(1.0)
  (what,) = reported
  assert isinstance(what["exception"], ValueError)
  assert "int" in what["message"]


def test_a_timeout_passes_in_virtual_time():
  async def main():
    with pytest.raises(TimeoutError):
      async with asyncio.timeout(1000.0):
        await asyncio.sleep(1001.0)
    return now()

  assert virtual_clock.run(main()) == pytest.approx(1000.0, abs=1e-6)


def test_events_queues_and_gathered_tasks_work():
  async def main():
    queue: asyncio.Queue[float] = asyncio.Queue()
    gone = asyncio.Event()

    async def produce(after):
      await asyncio.sleep(after)
      await queue.put(now())
      await gone.wait()
      return after

    both = asyncio.gather(produce(2.0), produce(1.0))
    got = [await queue.get(), await queue.get()]
    gone.set()
    return got, await both

  got, results = virtual_clock.run(main())
  assert got == pytest.approx([1.0, 2.0], abs=1e-6)
  assert results == [2.0, 1.0]


def test_a_deadlock_is_an_error_that_names_who_waits():
  async def hold(event):
    await event.wait()

  async def main():
    async with asyncio.TaskGroup() as tasks:
      tasks.create_task(hold(asyncio.Event()), name="the one that holds")
      await asyncio.sleep(1.0)

  with pytest.raises(virtual_clock.Deadlock, match=r"holds: .*hold, line"):
    virtual_clock.run(main())


def test_timers_that_are_always_due_at_once_end_the_loop(monkeypatch):
  monkeypatch.setattr(virtual_clock, "_MAX_AT_ONCE", 100)

  async def main():
    loop = asyncio.get_running_loop()

    def again():
      loop.call_at(loop.time(), again)

    again()
    await asyncio.sleep(1.0)

  words = r"^100 timers followed one another at 0 s(?s:.*)main, line"
  with pytest.raises(virtual_clock.Deadlock, match=words):
    virtual_clock.run(main())


def test_a_long_list_of_waiting_tasks_is_cut():
  async def main():
    waits = [asyncio.Event().wait() for _ in range(20)]
    await asyncio.gather(*waits)

  # 20 events and the one that gathers them; 8 are named.
  with pytest.raises(
    virtual_clock.Deadlock, match=r"^21 tasks(?s:.*)and 13 more$"
  ):
    virtual_clock.run(main())


def test_an_exception_comes_out_and_others_are_cancelled():
  cancelled = []

  async def patient():
    try:
      await asyncio.sleep(1e9)
    except asyncio.CancelledError:
      cancelled.append(now())
      raise

  async def main():
    async with asyncio.TaskGroup() as tasks:
      tasks.create_task(patient())
      await asyncio.sleep(5.0)
      raise KeyError("wrong")

  with pytest.raises(ExceptionGroup):
    virtual_clock.run(main())
  assert cancelled == pytest.approx([5.0], abs=1e-6)


def test_timers_of_years_and_of_microseconds_go_together():
  async def main():
    await asyncio.sleep(1e8)  # Three years.
    times = []
    for _ in range(3):
      before = now()
      await asyncio.sleep(1e-5)
      times.append(now() - before)
    return times

  # A float64 at 1e8 has steps of 1.5e-8.
  assert virtual_clock.run(main()) == pytest.approx([1e-5] * 3, abs=2e-7)


def test_two_runs_do_not_share_a_clock():
  async def main():
    await asyncio.sleep(7.0)
    return now()

  assert virtual_clock.run(main()) == virtual_clock.run(main())
