"""Tests of calls of foreign code: time, cancellation, nonsense."""

import asyncio
import collections

import numpy as np
import pytest

from envs import base
from rl import foreign

SAID = [base.Message("user", "on")]


def test_a_deadline_lets_the_late_code_clean_up():
  done = []

  async def late():
    try:
      await asyncio.sleep(60)
    finally:
      # Two waits while it is being cancelled.
      await asyncio.sleep(0)
      await asyncio.sleep(0.01)
      done.append(True)

  with pytest.raises(foreign.Fault, match=r"step took over 0\.02 s"):
    asyncio.run(foreign.guarded(late, 0.02, "step"))
  assert done == [True]


def test_a_timeout_of_its_own_is_what_it_raised_and_no_deadline():
  async def impatient():
    async with asyncio.timeout(0.01):
      await asyncio.sleep(60)

  with pytest.raises(foreign.Fault, match="step raised TimeoutError"):
    asyncio.run(foreign.guarded(impatient, 5.0, "step"))


def test_a_real_cancellation_passes_through():
  async def run():
    work = asyncio.create_task(
      foreign.guarded(lambda: asyncio.sleep(60), 5.0, "step")
    )
    await asyncio.sleep(0.01)
    work.cancel()
    await asyncio.wait([work])
    return work.cancelled()

  assert asyncio.run(run())


def test_an_error_that_cannot_be_shown_is_named():
  class Mute(Exception):
    def __str__(self):
      raise ValueError

  async def fail():
    raise Mute

  with pytest.raises(foreign.Fault, match=r"^step raised Mute$"):
    asyncio.run(foreign.guarded(fail, 1.0, "step"))


def test_numbers_of_numpy_are_rewards_and_any_sequence_holds_messages():
  messages = collections.deque(SAID)
  step = base.Step(messages, np.float32(0.5), np.bool_(True))  # pyright: ignore
  assert foreign.checked_step(step) == base.Step(SAID, 0.5, True)


# float32 ends at 3.4028235e38.
@pytest.mark.parametrize("reward", [3.4e38, -3.4e38, 0, np.int64(3)])
def test_a_reward_that_float32_can_hold_is_kept(reward):
  assert foreign.checked_reward(reward) == reward
  assert np.isfinite(np.float32(foreign.checked_reward(reward)))


@pytest.mark.parametrize(
  "reward",
  [3.5e38, -1e39, float("nan"), float("-inf"), 10**5000, True, "1"],
  ids=["over", "under", "nan", "inf", "no float", "bool", "text"],
)
def test_a_reward_that_float32_cannot_hold_is_a_fault(reward):
  with pytest.raises(foreign.Fault, match="is not a finite number"):
    foreign.checked_reward(reward)
