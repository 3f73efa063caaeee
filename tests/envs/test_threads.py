import asyncio
import subprocess
import sys
import threading
import time

import pytest

from envs import threads
from tests.helpers import machine_speed

# Threads that hang in these tests are daemons: they end with the process.
FOREVER = threading.Event()


def open_gate():
  gate = threading.Event()
  gate.set()
  return gate


async def hang_until_cancelled(pool: threads.ThreadPool):
  with pytest.raises(asyncio.TimeoutError):
    await asyncio.wait_for(pool.call(FOREVER.wait), 0.3)


def test_a_call_returns_the_result_of_a_daemon_thread():
  def divide(a, b):
    return divmod(a, b), threading.current_thread()

  result, thread = asyncio.run(threads.call(divide, 17, 5))
  assert result == (3, 2)
  assert thread is not threading.main_thread()
  assert thread.daemon


@pytest.mark.parametrize("error", [KeyError("x"), StopIteration(1)])
def test_an_exception_reaches_the_caller(error):
  async def raised():
    def fail():
      raise error

    try:
      await threads.call(fail)
    except RuntimeError as e:  # how a coroutine raises StopIteration
      return e.__cause__
    except KeyError as e:
      return e

  assert asyncio.run(raised()) is error


@pytest.mark.parametrize(
  "error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()]
)
def test_what_would_end_the_loop_becomes_a_runtime_error(error):
  def fail():
    raise error

  with pytest.raises(RuntimeError, match=type(error).__name__):
    asyncio.run(threads.call(fail))


async def test_hung_calls_are_abandoned_and_do_not_starve_the_others():
  pool = threads.ThreadPool(size=2, max_size=2)

  await asyncio.gather(*(hang_until_cancelled(pool) for _ in range(2)))
  assert pool.abandoned() == 2
  found = await asyncio.wait_for(pool.call(pow, 2, 5), machine_speed.scaled(5))
  assert found == 32


async def test_a_call_that_waits_gets_the_place_of_an_abandoned_one():
  pool = threads.ThreadPool(size=1, max_size=1)

  hung = asyncio.create_task(hang_until_cancelled(pool))
  await asyncio.sleep(0)
  result = await asyncio.wait_for(pool.call(pow, 2, 5), machine_speed.scaled(5))
  await hung
  assert result == 32


async def test_the_pool_grows_while_every_thread_is_busy():
  pool = threads.ThreadPool(size=2, max_size=3)

  hung = [asyncio.create_task(pool.call(FOREVER.wait)) for _ in range(2)]
  await asyncio.sleep(0)
  result = await asyncio.wait_for(pool.call(pow, 2, 5), machine_speed.scaled(5))
  for task in hung:
    task.cancel()
  await asyncio.gather(*hung, return_exceptions=True)
  assert result == 32


async def test_a_call_cancelled_before_it_starts_never_runs():
  pool = threads.ThreadPool(size=1, max_size=1)
  release = threading.Event()
  ran = []

  first = asyncio.create_task(pool.call(release.wait))
  second = asyncio.create_task(pool.call(ran.append, "second"))
  await asyncio.sleep(0.05)
  second.cancel()
  await asyncio.gather(second, return_exceptions=True)
  release.set()
  await first
  await pool.call(ran.append, "third")
  assert ran == ["third"]
  assert pool.abandoned() == 0


async def test_an_abandoned_thread_that_wakes_up_takes_no_more_calls():
  pool = threads.ThreadPool(size=1, max_size=1)
  release = threading.Event()
  seen = []

  def work():
    seen.append(threading.current_thread())
    release.wait()

  with pytest.raises(asyncio.TimeoutError):
    await asyncio.wait_for(pool.call(work), 0.05)
  release.set()
  await asyncio.to_thread(seen[0].join, 5)
  assert await pool.call(threading.current_thread) is not seen[0]
  assert not seen[0].is_alive()


def test_one_pool_serves_several_event_loops_at_once():
  pool = threads.ThreadPool(size=2)
  sums = []

  def loop():
    async def run():
      squares = await asyncio.gather(
        *(pool.call(pow, i, 2) for i in range(100))
      )
      sums.append(sum(squares))

    asyncio.run(run())

  loops = [threading.Thread(target=loop) for _ in range(4)]
  for thread in loops:
    thread.start()
  for thread in loops:
    thread.join()
  # 99 * 100 * 199 / 6
  assert sums == [328350] * 4


@pytest.mark.process
def test_a_process_with_a_hung_thread_exits_promptly():
  program = (
    "import asyncio, time\n"
    "from envs import threads\n"
    "async def main():\n"
    "  try:\n"
    "    await asyncio.wait_for(threads.call(time.sleep, 1000), 0.05)\n"
    "  except asyncio.TimeoutError:\n"
    "    print('abandoned', threads.abandoned())\n"
    "asyncio.run(main())\n"
  )
  start = time.monotonic()
  done = subprocess.run(
    [sys.executable, "-c", program],
    capture_output=True,
    text=True,
    timeout=machine_speed.scaled(60),
    check=True,
  )
  assert done.stdout == "abandoned 1\n"
  assert done.stderr == ""
  assert time.monotonic() - start < 30  # far below the 1000 s of the sleep


def gated(gate):
  """Returns its thread once the gate is open."""
  gate.wait()
  return threading.current_thread()


async def time_short_calls(pool, opened):
  """Has the pool know `gated` as short, whatever else the machine does."""
  for _ in range(100):
    await pool.call(gated, opened)


async def test_short_calls_of_one_moment_share_a_thread():
  pool, gate, opened = threads.ThreadPool(), threading.Event(), open_gate()

  await time_short_calls(pool, opened)
  gates = [gate, opened, opened, opened]
  calls = [asyncio.create_task(pool.call(gated, g)) for g in gates]
  await asyncio.sleep(0)  # All have joined.
  gate.set()
  assert len(set(await asyncio.gather(*calls))) == 1


@pytest.mark.parametrize("cancels", [False, True])
async def test_the_rest_of_a_batch_goes_on_when_one_of_its_calls_hangs(cancels):
  pool, opened = threads.ThreadPool(size=1, max_size=2), open_gate()

  await time_short_calls(pool, opened)
  gates = [opened, FOREVER, opened, opened]
  calls = [asyncio.create_task(pool.call(gated, g)) for g in gates]
  hung = calls.pop(1)
  await asyncio.sleep(0)
  if cancels:
    await asyncio.sleep(0.02)
    hung.cancel()
  await asyncio.wait_for(asyncio.gather(*calls), machine_speed.scaled(5))
  hung.cancel()
  await asyncio.gather(hung, return_exceptions=True)
  assert pool.abandoned() == 1
