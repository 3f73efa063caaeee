"""Tests of calls of user code: time, cancellation, nonsense."""

import asyncio
import collections
import pathlib
import subprocess
import sys
import threading

import numpy as np
import pytest

from envs import base, threads
from rl.runtime import isolation, virtual_clock, watchdog
from tests.helpers import machine_speed

pytestmark = pytest.mark.virtual_time

SAID = [base.Message("user", "on")]


async def test_a_deadline_lets_the_late_code_clean_up():
  done, late = [], set()

  async def slow():
    try:
      await asyncio.sleep(60)
    finally:
      # Two waits while it is being cancelled.
      await asyncio.sleep(0)
      await asyncio.sleep(0.5)
      done.append(True)

  with pytest.raises(isolation.Fault, match=r"step took over 2 s"):
    await isolation.guarded(slow, 2.0, "step", late=late)
  assert (len(late), done) == (1, [])
  await asyncio.wait(late)
  assert asyncio.get_running_loop().time() == 2.5
  assert (late, done) == (set(), [True])


@pytest.mark.skipif(not isolation._EAGER, reason="before Python 3.12")
async def test_a_call_that_needs_no_wait_takes_no_turn_of_the_loop():
  order = []

  async def at_once():
    order.append("call")
    return 3

  loop = asyncio.get_running_loop()
  loop.call_soon(order.append, "next turn")
  order.append(await isolation.guarded(at_once, 1.0, "step"))
  await asyncio.sleep(0)
  assert order == ["call", 3, "next turn"]


async def test_a_timeout_inside_of_a_call_ends_the_call_and_not_its_caller():
  async def hasty():
    # It finds the current task before its first wait.
    with pytest.raises(TimeoutError):
      async with asyncio.timeout(1.0):
        await asyncio.sleep(60)
    return 3

  value = await isolation.guarded(hasty, 5.0, "step")
  assert (value, asyncio.get_running_loop().time()) == (3, 1.0)


class Stubborn:
  """Catches each cancellation for a while, and goes on waiting."""

  def __init__(self, times):
    self.caught, self.times, self.ended = 0, times, False

  async def __call__(self):
    while self.caught < self.times:
      try:
        await asyncio.sleep(100)
      except asyncio.CancelledError:
        self.caught += 1
    self.ended = True


async def test_who_catches_its_cancellation_has_a_deadline_all_the_same():
  stubborn, late = Stubborn(9), set()

  with pytest.raises(isolation.Fault, match="step took over 2 s"):
    await isolation.guarded(stubborn, 2.0, "step", late=late)
  assert asyncio.get_running_loop().time() == 2.0
  await asyncio.sleep(1)
  assert len(late) == 1
  # Nor has the end of the loop waited for it, which cancels who is left.
  assert (stubborn.caught, stubborn.ended) == (1, False)


@pytest.mark.process
def test_the_process_ends_although_a_call_catches_whatever_would_end_it():
  code = """
import asyncio
from rl.runtime import isolation

async def step():
  while True:
    try:
      await asyncio.sleep(60)
    except:  # Its own end as well.
      pass

try:
  asyncio.run(isolation.guarded(step, 0.01, "step"))
except isolation.Fault as fault:
  print(fault)
"""
  command = [sys.executable, "-c", code]
  done = subprocess.run(
    command, capture_output=True, text=True, timeout=machine_speed.scaled(120)
  )
  assert (done.returncode, done.stderr) == (0, "")
  assert done.stdout == "step took over 0.01 s\n"


def test_a_detached_task_is_forgotten_by_its_loop():
  async def run():
    task = asyncio.create_task(asyncio.sleep(60))
    isolation.detach_task(task)
    forgotten = task not in asyncio.all_tasks()
    task.cancel()
    await asyncio.wait([task])  # It still runs, and can be waited for.
    return forgotten, task.cancelled()

  assert asyncio.run(run()) == (True, True)


def test_the_internals_are_those_of_every_python_that_setup_allows():
  first, last = isolation.TESTED_PYTHONS
  assert first <= sys.version_info[:2] <= last
  text = (pathlib.Path(__file__).parents[3] / "setup.py").read_text()
  allowed = f">={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}"
  assert f'python_requires="{allowed}"' in text


@pytest.mark.parametrize(
  ("end", "expected"),
  [
    (lambda future: future.set_result(3), 3),
    (lambda future: future.set_exception(OSError("no")), "step raised OSError"),
    (lambda future: future.cancel(), "step raised CancelledError"),
  ],
  ids=["result", "error", "cancelled"],
)
def test_a_plain_future_is_waited_for_without_a_task(end, expected):
  async def run():
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    loop.call_later(2.0, end, future)
    loop.call_later(1.0, lambda: tasks.append(len(asyncio.all_tasks())))
    try:
      return await isolation.guarded(lambda: future, 5.0, "step")
    except isolation.Fault as fault:
      return str(fault)[: len(str(expected))]

  tasks = []
  assert virtual_clock.run(run()) == expected
  assert tasks == [1]


async def test_a_plain_future_that_is_late_is_cancelled():
  future, late = asyncio.get_running_loop().create_future(), set()
  with pytest.raises(isolation.Fault, match=r"step took over 2 s"):
    await isolation.guarded(lambda: future, 2.0, "step", late=late)
  assert (future.cancelled(), late) == (True, set())


async def test_who_is_cancelled_does_not_wait_for_a_call_that_goes_on():
  stubborn, late = Stubborn(2), set()

  call = isolation.guarded(stubborn, 50.0, "step", late=late)
  work = asyncio.create_task(call)
  await asyncio.sleep(1)
  work.cancel()
  await asyncio.wait([work])
  assert (asyncio.get_running_loop().time(), len(late)) == (1.0, 1)
  for left in late:
    left.cancel()
  await asyncio.wait(late)
  assert work.cancelled()
  assert (late, stubborn.ended) == (set(), True)


async def test_an_exit_is_a_fault_and_does_not_end_the_loop():
  async def leave():
    raise SystemExit("quit()")

  with pytest.raises(isolation.Fault, match=r"step raised SystemExit: quit()"):
    await isolation.guarded(leave, 1.0, "step")
  with pytest.raises(isolation.Fault, match="making it raised SystemExit: 3"):
    isolation.contained(lambda: sys.exit(3), "making it")


def test_an_interrupt_of_the_user_is_no_fault():
  async def interrupted():
    raise KeyboardInterrupt

  def interrupt():
    raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    virtual_clock.run(isolation.guarded(interrupted, 1.0, "step"))
  with pytest.raises(KeyboardInterrupt):
    isolation.contained(interrupt, "making it")


def test_a_timeout_of_its_own_is_what_it_raised_and_no_deadline():
  async def impatient():
    async with asyncio.timeout(0.01):
      await asyncio.sleep(60)

  with pytest.raises(isolation.Fault, match="step raised TimeoutError"):
    asyncio.run(isolation.guarded(impatient, 5.0, "step"))


def test_an_error_that_cannot_be_shown_is_named():
  class Mute(Exception):
    def __str__(self):
      raise ValueError

  async def fail():
    raise Mute

  with pytest.raises(isolation.Fault, match=r"^step raised Mute \(test_iso"):
    asyncio.run(isolation.guarded(fail, 1.0, "step"))


def test_numbers_of_numpy_are_rewards_and_any_sequence_holds_messages():
  messages = collections.deque(SAID)
  step = base.Step(messages, np.float32(0.5), np.bool_(True))  # pyright: ignore
  assert isolation.checked_step(step) == base.Step(SAID, 0.5, True)


# float32 ends at 3.4028235e38.
@pytest.mark.parametrize(
  "reward", [3.4e38, -3.4e38, 0, np.int64(3), np.array(2)]
)
def test_a_reward_that_float32_can_hold_is_kept(reward):
  checked = isolation.checked_reward(reward)
  assert (type(checked), checked) == (float, reward)
  assert np.isfinite(np.float32(isolation.checked_reward(reward)))


@pytest.mark.parametrize(
  "reward",
  [3.5e38, -1e39, float("nan"), float("-inf"), 10**5000],
  ids=["over", "under", "nan", "inf", "no float"],
)
def test_a_reward_that_float32_cannot_hold_is_a_fault(reward):
  with pytest.raises(isolation.Fault, match="is not a finite number"):
    isolation.checked_reward(reward)


@pytest.mark.parametrize("reward", [True, False, np.True_, np.False_])
def test_a_comparison_is_a_reward_of_1_or_0(reward):
  checked = isolation.checked_reward(reward)
  assert (type(checked), checked) == (float, 1.0 if reward else 0.0)


@pytest.mark.parametrize(
  ("reward", "kind"), [("1", "str"), (None, "None"), ((1.0, "why"), "tuple")]
)
def test_a_reward_that_is_no_number_is_told_with_its_type(reward, kind):
  with pytest.raises(isolation.Fault, match=f"^reward is {kind}, not a number"):
    isolation.checked_reward(reward)


def test_the_first_call_that_is_late_is_told_with_its_place():
  told, gate = [], threading.Event()
  watch = watchdog.Watchdog(told.append)

  def play_that_hangs():
    gate.wait(machine_speed.scaled(60))

  async def step():
    await threads.call(play_that_hangs)

  async def wait_that_hangs():
    await asyncio.Event().wait()

  async def close():
    await wait_that_hangs()

  async def run():
    for call, what in ((step, "step"), (close, "close"), (step, "step")):
      with pytest.raises(isolation.Fault, match=f"{what} took over"):
        await isolation.guarded(
          call, 0.05, what, watch, "episode 3", " of the environment"
        )

  try:
    asyncio.run(run())
  finally:
    gate.set()
  blocked, waiting = told  # Two kinds, each once.
  assert blocked.startswith(
    "episode 3: step of the environment took over 0.05 s, in:\n"
  )
  in_thread = blocked[blocked.index("thread environment is in:") :]
  assert "in step" in blocked
  assert "in play_that_hangs" in in_thread
  assert "in wait_that_hangs" in waiting.partition("thread ")[0]
