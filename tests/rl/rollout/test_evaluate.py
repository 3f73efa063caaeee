"""Evaluations: how long they may take, and what they count."""

import asyncio
from typing import Any

import pytest

from envs import base
from rl.rollout import evaluate
from rl.runtime import virtual_clock
from rl.runtime import watchdog as watchdog_lib
from rl.testing import fakes
from tests.helpers import players_under_test as players

pytestmark = pytest.mark.virtual_time


async def _evaluated(answer_s, deadline_s):
  """Evaluates 6 episodes of one turn under a deadline in steps."""
  clock = asyncio.get_running_loop().time
  watchdog = watchdog_lib.Watchdog(clock=clock)
  playing = players.player(
    fakes.Counting(turns=1),
    players.engine(delay_s=lambda priority: answer_s(priority[0])),
    watchdog=watchdog,
  )
  outcome, _ = await watchdog.wait(
    evaluate.evaluate(
      playing, episodes=6, temperature=1.0, success=1.0, seed=0
    ),
    owner="the run",
    what="the evaluation",
    deadline_s=deadline_s,
    renew_on_heartbeat=True,
  )
  return outcome, clock(), playing.log.events


def test_an_evaluation_may_take_long_as_long_as_its_episodes_end():
  # Episode i ends after i + 1 s: 6 s in all, at most 1 s without an end.
  outcome, seconds, log = virtual_clock.run(_evaluated(lambda i: i + 1.0, 1.5))
  assert (outcome.episodes, outcome.success, outcome.faults) == (6, 1.0, 0)
  assert seconds == pytest.approx(6.0, abs=0.1)
  assert log == []


async def test_an_evaluation_of_faults_alone_names_the_most_frequent():
  playing = players.player(fakes.Counting(fault="start"), players.engine())
  outcome, _ = await evaluate.evaluate(
    playing, episodes=3, temperature=1.0, success=1.0, seed=0
  )
  assert (outcome.episodes, outcome.faults) == (0, 3)
  assert outcome.fault == "env_fault: start raised OSError: no such game"


def test_an_evaluation_without_answers_stalls():
  # Episodes 0 to 2 have ended after 3 s; the next never does.
  answers = _evaluated(lambda i: i + 1.0 if i < 3 else 1e6, 2.0)
  with pytest.raises(watchdog_lib.Stalled) as stalled:
    virtual_clock.run(answers)
  text = str(stalled.value)
  assert text.startswith("the run waited 2.0 s for the evaluation")
  assert "episode eval/3/0/0  an answer of the engine" in text
  assert "episode eval/2/0/0" not in text


async def test_a_cancelled_evaluation_waits_for_what_its_episodes_end():
  ended = []

  class Program(fakes.Counting):
    def __call__(self, task) -> Any:
      return Started()

  class Started:
    async def start(self):
      return [base.Message("user", "go")]

    async def step(self, answer):
      try:
        await asyncio.Event().wait()
      finally:
        await asyncio.sleep(0.1)
        ended.append("step")

    async def close(self):
      ended.append("close")

  playing = players.player(Program(), players.engine())
  task = asyncio.create_task(
    evaluate.evaluate(playing, episodes=3, temperature=1.0, success=1.0, seed=0)
  )
  await asyncio.sleep(0.1)
  task.cancel()
  await asyncio.wait([task])
  assert (task.cancelled(), list(ended)) == (True, 3 * ["step"] + 3 * ["close"])


@pytest.mark.parametrize(
  ("successes", "trials", "low", "high"),
  [
    # z^2 = 3.8416. 8 of 10: center .8 + .19208, margin 1.96 sqrt(.016 +
    # .009604) = .313624, over 1.38416: (.490157, .943319).
    (8, 10, 0.490157, 0.943319),
    # 0 of 10: .19208 -+ .19208 over 1.38416.
    (0, 10, 0.0, 0.277540),
    # 10 of 10: the mirror image.
    (10, 10, 0.722460, 1.0),
    # Half of 100: symmetric about .5.
    (50, 100, 0.403830, 0.596170),
    (0, 0, 0.0, 1.0),
  ],
)
def test_wilson_intervals_are_the_published_ones(successes, trials, low, high):
  expected = pytest.approx((low, high), abs=1e-6)
  assert evaluate.wilson(successes, trials) == expected
