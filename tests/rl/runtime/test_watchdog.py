"""Tests of the watchdog: deadlines, the table of waits, a blocked loop."""

import asyncio
import concurrent.futures
import math
import re
import signal
import threading
import time

import pytest

from rl.runtime import mesh_thread, trace, virtual_clock, watchdog
from tests.helpers import machine_speed


async def _return(value: int) -> int:
  return value


def _wait(watch, awaitable, deadline_s=5.0, owner="learner", what="groups"):
  return watch.wait(awaitable, owner=owner, what=what, deadline_s=deadline_s)


def _named(owner: str, what: str, since_s: float) -> watchdog.Wait:
  return watchdog.Wait(owner=owner, what=what, since_s=since_s, deadline_s=60.0)


def test_the_table_lists_the_longest_wait_first():
  waits = [_named("rollout 3", "slot", 99.5), _named("learner", "groups", 58.0)]
  # At 100 s they have waited 0.5 s and 42 s.
  assert watchdog.table(waits, 100.0).splitlines() == [
    "owner      what    waited  deadline",
    "learner    groups  42.0 s    60.0 s",
    "rollout 3  slot     0.5 s    60.0 s",
  ]


def test_a_wait_without_a_deadline_has_none_in_the_table():
  wait = watchdog.Wait(
    owner="an episode", what="a slot", since_s=1.0, deadline_s=math.inf
  )
  assert watchdog.table([wait], 3.0).splitlines() == [
    "owner       what    waited  deadline",
    "an episode  a slot   2.0 s         -",
  ]


def test_the_table_without_waits_says_so():
  assert watchdog.table([], 0.0) == "nobody waits"


def test_a_wait_in_time_returns_the_result_and_leaves_no_trace():
  watch = watchdog.Watchdog()
  assert asyncio.run(_wait(watch, _return(7))) == 7
  assert watch.dump() == "nobody waits"


async def test_a_stall_names_owner_what_and_everyone_who_waits(monkeypatch):
  # Threads that other tests have left may be busy.
  monkeypatch.setattr(watchdog, "busy_threads", lambda: "")
  reports = []
  watch = watchdog.Watchdog(reports.append)

  other = asyncio.create_task(
    _wait(watch, asyncio.sleep(9), owner="publisher", what="engine 1")
  )
  with pytest.raises(watchdog.Stalled) as stalled:
    await _wait(watch, asyncio.sleep(9), 0.2, what="groups 12..19")
  other.cancel()
  await asyncio.wait([other])
  text = str(stalled.value)
  assert re.fullmatch(
    r"learner waited 0\.\d s for groups 12\.\.19 \(deadline 0\.2 s\);"
    r" waiting now:\n"
    r"owner      what           waited  deadline\n"
    r"learner    groups 12\.\.19   0\.\d s     0\.2 s\n"
    r"publisher  engine 1        0\.\d s     5\.0 s",
    text,
  )
  assert reports == [text]
  assert watch.dump() == "nobody waits"


async def _steps(watch, seconds, *, renew_on_heartbeat):
  """Work in steps of so many seconds, under a deadline of 2 s."""

  async def work():
    for step_s in seconds:
      await asyncio.sleep(step_s)
      watch.heartbeat()
    return len(seconds)

  return await watch.wait(
    work(),
    owner="run",
    what="all",
    deadline_s=2.0,
    renew_on_heartbeat=renew_on_heartbeat,
  )


def _in_virtual_time(work, *args, **fields):
  """Returns the result and the seconds that it took."""

  async def main():
    clock = asyncio.get_running_loop().time
    watch = watchdog.Watchdog(clock=clock)
    try:
      return await work(watch, *args, **fields), clock()
    except watchdog.Stalled as stalled:
      return str(stalled), clock()

  return virtual_clock.run(main())


def test_the_deadline_of_a_wait_renew_on_heartbeat_is_that_of_one_step():
  # 4 steps of 1.5 s take 6 s, but none takes 2 s.
  seconds = [1.5] * 4
  done = _in_virtual_time(_steps, seconds, renew_on_heartbeat=True)
  assert done == (4, pytest.approx(6.0))
  text, at = _in_virtual_time(_steps, [1.5, 1.5, 9.0], renew_on_heartbeat=True)
  assert text.startswith("run waited 2.0 s for all (deadline 2.0 s)")
  assert at == pytest.approx(5.0)


def test_a_wait_that_is_not_renew_on_heartbeat_has_one_deadline():
  text, at = _in_virtual_time(_steps, [1.5] * 4, renew_on_heartbeat=False)
  assert text.startswith("run waited 2.0 s")
  assert at == pytest.approx(2.0)


def test_the_table_of_a_stall_shows_what_hung_before_it_is_cancelled():
  async def work(watch) -> str:
    async def hang():
      with watch.track(owner="episode 3", what="an answer", deadline_s=9.0):
        await asyncio.sleep(60.0)

    await _wait(watch, hang(), 2.0)
    return "it ended"

  text, _ = _in_virtual_time(work)
  assert "episode 3  an answer   2.0 s     9.0 s" in text.splitlines()


def test_seconds_are_those_of_the_clock_that_was_given():
  now = [100.0]
  watch = watchdog.Watchdog(clock=lambda: now[0])
  with watch.track(owner="episode 3", what="a step", deadline_s=60.0):
    now[0] = 142.0
    table = watch.dump().splitlines()
  assert table[1] == "episode 3  a step  42.0 s    60.0 s"


async def test_the_awaitable_of_a_stalled_wait_is_cancelled():
  task = asyncio.create_task(asyncio.sleep(9))
  with pytest.raises(watchdog.Stalled):
    await _wait(watchdog.Watchdog(), task, 0.01)
  assert task.cancelled()


@pytest.mark.parametrize("error", [ValueError, TimeoutError])
def test_an_exception_of_the_awaitable_passes_unchanged(error):
  async def fail():
    raise error("own")

  watch = watchdog.Watchdog(pytest.fail)
  with pytest.raises(error, match="own") as raised:
    asyncio.run(_wait(watch, fail()))
  assert not isinstance(raised.value, watchdog.Stalled)


async def test_cancelling_a_waiter_is_a_cancellation_and_no_stall():
  watch = watchdog.Watchdog(pytest.fail)

  task = asyncio.create_task(_wait(watch, asyncio.sleep(9)))
  await asyncio.sleep(0)
  assert "learner" in watch.dump()
  task.cancel()
  with pytest.raises(asyncio.CancelledError):
    await task
  assert watch.dump() == "nobody waits"


@pytest.mark.parametrize(
  ("outer_s", "inner_s", "stalled"),
  [(0.05, 5.0, "outer waited"), (5.0, 0.05, "inner waited")],
)
def test_of_nested_waits_the_one_that_overruns_is_named(
  outer_s, inner_s, stalled
):
  watch = watchdog.Watchdog()
  inner = _wait(watch, asyncio.sleep(9), inner_s, owner="inner")
  with pytest.raises(watchdog.Stalled, match=f"^{stalled}"):
    asyncio.run(_wait(watch, inner, outer_s, owner="outer"))
  assert watch.dump() == "nobody waits"


async def test_a_signal_handler_can_dump():
  watch = watchdog.Watchdog()
  dumps = []

  previous = signal.signal(
    signal.SIGUSR1, lambda *_: dumps.append(watch.dump())
  )
  try:
    waiting = asyncio.create_task(_wait(watch, asyncio.sleep(0.05)))
    await asyncio.sleep(0)
    signal.raise_signal(signal.SIGUSR1)
    await waiting
  finally:
    signal.signal(signal.SIGUSR1, previous)
  assert "groups" in dumps[0]


async def test_a_blocked_loop_is_reported_once_with_its_stack():
  reports = []
  watch = watchdog.Watchdog(reports.append)

  def compute_on_the_loop():
    time.sleep(0.7)

  with watch.guard(loop_lag_s=0.2):
    waiting = asyncio.create_task(_wait(watch, asyncio.sleep(0.8)))
    await asyncio.sleep(0)
    compute_on_the_loop()
    await waiting
  # Asked for a beat at 0.2 s, none by 0.4 and 0.6 s, free again at 0.7 s.
  assert len(reports) == 1
  assert reports[0].startswith("the event loop is blocked for more than 0.2 s")
  assert "compute_on_the_loop" in reports[0]
  assert "learner  groups" in reports[0]


async def test_a_loop_that_stays_blocked_is_ended():
  ended = threading.Event()
  watch = watchdog.Watchdog()

  with watch.guard(loop_lag_s=0.1, end_s=0.3, end=ended.set):
    # Blocks the loop: nothing but the guard's thread can end this.
    assert ended.wait(machine_speed.scaled(60))


async def test_a_loop_that_is_free_in_time_is_not_ended():
  watch = watchdog.Watchdog()

  with watch.guard(loop_lag_s=0.1, end_s=60, end=pytest.fail):
    time.sleep(0.3)
    await asyncio.sleep(0.3)


@pytest.fixture
def gate():
  """Holds hung threads until the end of a test."""
  opened = threading.Event()
  yield opened
  opened.set()


def stall(start, watch):
  """Returns the words of a wait that what `start` begins does not end."""

  async def run():
    work = start()
    with pytest.raises(watchdog.Stalled) as stalled:
      await _wait(watch, work, 0.2)
    return str(stalled.value)

  return asyncio.run(run())


def test_a_stall_tells_where_a_hung_program_of_a_mesh_is(gate):
  thread = mesh_thread.MeshThread("decode", trace.Trace(None))

  def kernel_that_hangs():
    gate.wait(machine_speed.scaled(60))

  told = stall(
    lambda: thread.run("decode", kernel_that_hangs), watchdog.Watchdog()
  )
  gate.set()
  thread.close()
  assert "thread decode is in:" in told
  assert "kernel_that_hangs" in told
  assert "learner waited" in told.splitlines()[0]


def test_a_stall_tells_where_a_call_in_a_pool_is_and_of_no_idle_thread(gate):
  idle = mesh_thread.MeshThread("learner", trace.Trace(None))
  pool = concurrent.futures.ThreadPoolExecutor(2, "environment")
  pool.submit(int).result()  # One thread of it has nothing to do.

  def step_that_hangs():
    gate.wait(machine_speed.scaled(60))

  told = stall(
    lambda: asyncio.get_running_loop().run_in_executor(pool, step_that_hangs),
    watchdog.Watchdog(),
  )
  gate.set()
  pool.shutdown()
  idle.close()
  assert re.search(r"thread environment_\d is in:", told)
  assert "step_that_hangs" in told
  assert "thread learner" not in told


def test_threads_that_hang_in_one_place_are_told_once(gate):
  threads = [
    threading.Thread(target=gate.wait, name="twin", args=(60,))
    for _ in range(3)
  ]
  for thread in threads:
    thread.start()
  told = ""
  deadline_s = time.monotonic() + machine_speed.scaled(20)
  while "3 threads twin" not in told and time.monotonic() < deadline_s:
    told = watchdog.busy_threads()  # They may have just begun.
  gate.set()
  assert "3 threads twin are in:\n" in told
  assert told.count(" twin ") == 1


def test_a_blocked_loop_tells_where_the_thread_is_that_blocks_it(gate):
  reports, told = [], threading.Event()

  def report(text):
    reports.append(text)
    told.set()

  watch = watchdog.Watchdog(report)

  def write_that_hangs():
    gate.wait(machine_speed.scaled(60))

  async def run():
    writer = threading.Thread(target=write_that_hangs, name="writer")
    writer.start()
    with (
      watch.guard(loop_lag_s=0.1),
      watch.track(owner="the run", what="the checkpoint", deadline_s=60.0),
    ):
      assert told.wait(machine_speed.scaled(60))  # Blocks the loop.
    gate.set()
    writer.join()

  asyncio.run(run())
  loop, _, rest = reports[0].partition("waiting meanwhile")
  # Other tests may have left threads that are told as well.
  waits, *threads = rest.split("thread ")
  assert "told.wait" in loop
  assert "the run  the checkpoint" in waits
  (writer,) = (text for text in threads if text.startswith("writer is in:"))
  assert "write_that_hangs" in writer
  assert "MainThread" not in rest  # The loop is told once.


async def test_a_loop_that_only_awaits_is_not_reported():
  watch = watchdog.Watchdog(pytest.fail)

  with watch.guard(loop_lag_s=0.2):
    await asyncio.sleep(0.7)
