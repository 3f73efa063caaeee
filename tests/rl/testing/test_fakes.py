"""The fake environments and rewards follow their settings."""

import asyncio

import pytest

from envs import base
from rl.runtime import virtual_clock
from rl.testing import fakes

pytestmark = pytest.mark.virtual_time

YES = base.Message("assistant", "yes")
NO = base.Message("assistant", "no")


def now():
  return asyncio.get_running_loop().time()


async def play(environment, answers=(YES, YES)):
  """Returns the steps, and when the episode was over."""
  await environment.start()
  steps = [await environment.step(answer) for answer in answers]
  return steps, now()


def test_the_reward_is_the_share_of_answers_that_were_yes():
  source = fakes.Counting(turns=4)
  task = source.task(3, "train")
  steps, _ = virtual_clock.run(play(source(task), (YES, NO, YES, YES)))
  assert [step.reward for step in steps] == [0.25, 0, 0.25, 0.25]
  assert [step.done for step in steps] == [False] * 3 + [True]


async def test_one_member_of_each_group_can_be_slow():
  source = fakes.Counting(
    delay_s=lambda index, step: 1.0 + step,
    lag_s=lambda index, member: 10.0 * (member == 2 and index == 1),
  )

  tasks = [source.task(index, "train") for index in (0, 1)]
  plays = [play(source(task)) for task in tasks for _ in range(3)]
  # Two steps of 1 s and 2 s; those of the third member of task 1 take 11, 12.
  assert [end for _, end in await asyncio.gather(*plays)] == [3, 3, 3, 3, 3, 23]


def test_the_number_of_a_member_is_no_part_of_the_source():
  source, same = fakes.Counting(), fakes.Counting()
  source(source.task(0, "train"))
  assert source.built == {"counting/train/0": 1}
  assert source == same
  assert hash(source) == hash(same)


@pytest.mark.parametrize(
  ("fault", "method"),
  [
    ("start", "start"),
    ("step", "step"),
    ("close", "close"),
    ("hang_start", "start"),
    ("hang", "step"),
    ("hang_close", "close"),
  ],
)
async def test_a_fault_breaks_one_method_of_the_chosen_members(fault, method):
  source = fakes.Counting(
    fault=fault,
    faulty=lambda index: index > 0,
    member=lambda member: member == 1,
  )

  async def broken(environment):
    calls = {
      "start": environment.start,
      "step": lambda: environment.step(YES),
      "close": environment.close,
    }
    failed = {}
    for name, call in calls.items():
      try:
        async with asyncio.timeout(5):
          await call()
      except (OSError, TimeoutError) as error:
        failed[name] = isinstance(error, TimeoutError)
    return failed

  wrong = {method: fault.startswith("hang")}
  tasks = [source.task(index, "train") for index in (0, 0, 1, 1, 1)]
  found = [await broken(source(task)) for task in tasks]
  assert found == [{}, {}, {}, wrong, {}]


def test_a_judge_sums_what_the_environment_gave_late_or_not_at_all():
  judge = fakes.Judge(
    delay_s=lambda index, call: 2.0 + call,
    fails=lambda index, call: (index, call) == (1, 0),
  )
  said = base.Transcript([YES], [0.25, 0.5])

  async def scenario():
    story = []
    for index in (0, 1, 1):
      task = fakes.Counting().task(index, "train")
      try:
        grades = await judge(task, [said])
        story.append((grades[0].value, now()))
      except ConnectionError:
        story.append((None, now()))
    return story

  # The calls of a task take 2 s, 3 s, ...
  assert virtual_clock.run(scenario()) == [
    (0.75, 2.0),
    (None, 4.0),
    (0.75, 7.0),
  ]
  assert judge.calls == {"counting/train/0": 1, "counting/train/1": 2}
