"""Calls in threads that keep neither their order nor the process waiting."""

import gc
import subprocess
import sys
import threading

import pytest

from launch.gateway import daemon_threads
from tests.helpers import commands, machine_speed

LATE_S = machine_speed.scaled(20)
HANGING = """
import threading, time
from launch.gateway import daemon_threads
began = threading.Event()
pool = daemon_threads.DaemonThreads(1, "hanging")
pool.submit(lambda: (began.set(), time.sleep(3600)))
began.wait()
print("over")
"""


def test_calls_are_made_in_order_and_their_errors_arrive():
  pool = daemon_threads.DaemonThreads(1, "one")
  made = []
  calls = [pool.submit(made.append, i) for i in range(5)]
  failing = pool.submit(int, "x")
  with pytest.raises(ValueError, match="invalid literal"):
    failing.result(LATE_S)
  assert [call.result(LATE_S) for call in calls] == [None] * 5
  assert made == [0, 1, 2, 3, 4]


def test_a_call_that_is_cancelled_before_it_begins_is_not_made():
  pool, may, made = (
    daemon_threads.DaemonThreads(1, "one"),
    threading.Event(),
    [],
  )
  first = pool.submit(may.wait, LATE_S)
  second = pool.submit(made.append, 1)
  assert second.cancel()
  may.set()
  assert first.result(LATE_S)
  assert pool.submit(int, "3").result(LATE_S) == 3
  assert not made


def test_threads_end_once_nobody_can_submit():
  pool = daemon_threads.DaemonThreads(2, "two")
  ours = {pool.submit(threading.current_thread).result(LATE_S) for _ in "ab"}
  del pool
  gc.collect()
  for thread in ours:
    thread.join(LATE_S)
    assert not thread.is_alive()


@pytest.mark.process
def test_a_call_that_hangs_does_not_keep_the_process():
  ended = subprocess.run(
    [sys.executable, "-c", HANGING],
    cwd=commands.ROOT,
    capture_output=True,
    text=True,
    timeout=machine_speed.scaled(60),
    check=False,
  )
  assert (ended.returncode, ended.stdout) == (0, "over\n"), ended.stderr
