"""The logical clock: events in one order, however long threads take."""

import asyncio
import contextlib
import random
import threading
import time

import pytest

from envs import threads
from rl.runtime import logical_clock, mesh_thread, trace


def run(main):
  with asyncio.Runner(loop_factory=logical_clock.LogicalEventLoop) as runner:
    return runner.run(main)


def now():
  return asyncio.get_running_loop().time()


async def worked(seconds, logical_s):
  """Returns when a thread of its own has worked for so many real seconds."""
  loop = asyncio.get_running_loop()
  done = loop.create_future()
  keep, due_s = logical_clock.promise(loop, logical_s)

  def work():
    time.sleep(seconds)
    with contextlib.suppress(RuntimeError):  # The loop has ended.
      keep(deliver)

  def deliver():
    if not done.done():
      done.set_result(None)

  threading.Thread(target=work).start()
  await done
  assert now() == due_s


def test_results_arrive_in_the_order_that_was_promised():
  async def scenario():
    order = []

    async def one(name, seconds, logical_s):
      await worked(seconds, logical_s)
      order.append((name, now()))

    await asyncio.gather(
      one("slow", 0.05, 1.0), one("quick", 0.0, 2.0), one("third", 0.02, 3.0)
    )
    return order

  assert run(scenario()) == [("slow", 1.0), ("quick", 2.0), ("third", 3.0)]


@pytest.mark.parametrize("others", [0, 3, 20])
def test_timers_of_one_time_come_in_the_order_in_which_they_were_made(others):
  async def scenario():
    loop, order = asyncio.get_running_loop(), []
    for i in range(others):  # A heap alone would let them decide.
      loop.call_later(0.5 + i % 3, order.count, None)
    for i in range(10):
      loop.call_later(1.0, order.append, i)
    await asyncio.sleep(5.0)
    return order

  assert run(scenario()) == list(range(10))


def test_a_program_takes_as_long_in_a_run_that_must_compile_it():
  async def scenario(name):
    thread = mesh_thread.MeshThread("decode", trace.Trace(None))
    try:
      await thread.run(name, lambda: None)
      return now()
    finally:
      thread.close()

  assert run(scenario("warm up")) == run(scenario("decode"))


def test_timers_pass_in_no_time_and_never_overtake_a_promise():
  async def scenario():
    order = []

    async def sleep(seconds):
      await asyncio.sleep(seconds)
      order.append(seconds)

    async def work():
      await worked(0.05, 500.0)
      order.append("work")

    await asyncio.gather(sleep(1000.0), sleep(499.0), work())
    return order, now()

  begun = time.monotonic()
  assert run(scenario()) == ([499.0, "work", 1000.0], 1000.0)
  assert time.monotonic() - begun < 100.0


def test_a_deadline_on_this_clock_comes_before_work_that_is_due_later():
  async def scenario():
    with pytest.raises(TimeoutError):
      await asyncio.wait_for(worked(0.0, 10.0), 2.0)
    return now()

  assert run(scenario()) == 2.0


def test_two_runs_see_the_same_events_however_long_each_step_takes():
  def blocking(draws):
    time.sleep(draws.random() / 200)

  async def scenario(seed):
    draws, log = random.Random(seed), []
    meshes = [mesh_thread.MeshThread(x, trace.Trace(None)) for x in "ab"]

    async def play(number):
      for step in range(5):
        await threads.call(blocking, draws)
        log.append(("env", number, step, now()))
        await meshes[number % 2].run("decode", blocking, draws)
        log.append(("mesh", number, step, now()))
        await asyncio.sleep(0.001 * (number % 3))

    await asyncio.gather(*(play(number) for number in range(12)))
    for mesh in meshes:
      mesh.close()
    return log

  first, second = run(scenario(0)), run(scenario(1))
  assert len(first) == 120
  assert first == second


def test_programs_of_one_mesh_are_due_one_after_the_other():
  async def scenario():
    mesh = mesh_thread.MeshThread("a", trace.Trace(None))
    times = []

    async def one():
      await mesh.run("decode", lambda: None)
      times.append(now())

    await asyncio.gather(one(), one(), one())
    mesh.close()
    return times

  assert run(scenario()) == pytest.approx([0.01, 0.02, 0.03])


def test_a_call_that_nobody_waits_for_any_more_holds_up_nothing():
  released = threading.Event()

  async def scenario():
    waiting = asyncio.create_task(threads.call(released.wait))
    await asyncio.sleep(0.0)
    waiting.cancel()
    await asyncio.sleep(1.0)
    return now()

  try:
    assert run(scenario()) == 1.0
  finally:
    released.set()


def test_an_exception_arrives_like_a_result():
  async def scenario():
    mesh = mesh_thread.MeshThread("a", trace.Trace(None))
    try:
      with pytest.raises(ZeroDivisionError):
        await mesh.run("decode", lambda: 1 / 0)
    finally:
      mesh.close()

  run(scenario())


@pytest.mark.parametrize(
  "connect",
  [
    lambda: asyncio.open_connection("localhost", 1),
    lambda: asyncio.create_subprocess_exec("true"),
    lambda: asyncio.to_thread(time.sleep, 0.0),
  ],
  ids=["connection", "process", "executor"],
)
def test_what_answers_at_any_time_is_refused(connect):
  async def scenario():
    with pytest.raises(logical_clock.NotRepeatable, match="repeatable=false"):
      await connect()

  run(scenario())


async def test_on_another_loop_results_arrive_as_they_come():
  loop = asyncio.get_running_loop()
  keep, due_s = logical_clock.promise(loop, 5.0)
  assert keep == loop.call_soon_threadsafe
  assert due_s == 0.0
