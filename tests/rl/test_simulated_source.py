"""The simulated world: tasks, environments, answers and rewards by number."""

import asyncio
import dataclasses

import numpy as np
import pytest

from envs import base
from rl import (
  distributions,
  engine,
  episode,
  prompts,
  simulated_source,
  virtual,
  workload,
)

MATH = workload.Workload(
  name="math",
  share=3.0,
  prompt_tokens=distributions.Constant(50.0),
  answer_tokens=distributions.LogNormal(mean=100.0, sigma=0.5),
)
GAME = workload.Workload(
  name="game",
  turns=distributions.Constant(2.0),
  reply_tokens=distributions.Constant(7.0),
  answer_tokens=distributions.Constant(9.0),
  start_s=distributions.Constant(5.0),
  step_s=distributions.Constant(2.0),
  reward_s=distributions.Constant(1.0),
)


@pytest.fixture
def world():
  return simulated_source.World((MATH, GAME), 0)


def request(world, task, name, turn=0):
  observed = virtual.run(world(task).start())
  return engine.DecodeRequest(
    request_id=f"train/{name}/{turn}",
    session=f"train/{name}",
    tokens=world.open(observed),
    max_tokens=1000,
  )


@pytest.mark.parametrize("contract", [base.Source, prompts.Mixed, episode.Chat])
def test_it_is_a_source_a_mixture_and_a_chat(world, contract):
  assert isinstance(world, contract)


def test_it_has_the_sources_and_shares_of_its_workloads(world):
  assert [source.name for source in world.sources] == ["math", "game"]
  assert world.weights == (3.0, 1.0)
  assert isinstance(simulated_source.Reward(world), base.Reward)


def test_an_episode_takes_its_turns_and_their_seconds(world):
  async def play():
    environment = world(world.sources[1].task(4, "train"))
    first = await environment.start()
    step = await environment.step(base.Message("assistant", ""))
    last = await environment.step(base.Message("assistant", ""))
    await environment.close()
    return first, step, last, asyncio.get_running_loop().time()

  first, step, last, seconds = virtual.run(play())
  assert seconds == pytest.approx(5.0 + 2 * 2.0)
  assert len(world.open(first)) == 100  # What a workload has by default.
  assert len(world.append(step.messages)) == 7
  assert (step.done, last.done, list(last.messages)) == (False, True, [])


def test_a_context_tells_the_engine_which_task_it_is_of(world):
  lengths = [
    world.answer_tokens(
      request(world, world.sources[1].task(i, "train"), "0/0/0")
    )
    for i in range(3)
  ]
  assert lengths == [9, 9, 9]
  tasks = [world.sources[0].task(i, "train") for i in (3, 3, 4)]
  same = [world.answer_tokens(request(world, task, "0/0/0")) for task in tasks]
  assert same[0] == same[1] != same[2]


@pytest.mark.parametrize("name", ["0/0/1", "0/1/0"], ids=["member", "attempt"])
def test_members_and_attempts_answer_differently(world, name):
  task = world.sources[0].task(3, "train")
  first = world.answer_tokens(request(world, task, "0/0/0"))
  assert world.answer_tokens(request(world, task, name)) != first
  assert world.answer_tokens(request(world, task, "0/0/0", turn=1)) != first


def test_a_reward_takes_its_seconds_and_is_0_or_1(world):
  async def grade():
    task = world.sources[1].task(0, "train")
    reward = simulated_source.Reward(world)
    grades = [
      (await reward(task, [base.Transcript([], [])]))[0].value
      for _ in range(40)
    ]
    return grades, asyncio.get_running_loop().time()

  grades, seconds = virtual.run(grade())
  assert set(grades) == {0.0, 1.0}
  assert seconds == pytest.approx(40.0)


@pytest.mark.parametrize("call", ["start", "step", "reward"])
def test_a_fault_is_an_exception(call):
  broken = dataclasses.replace(workload.Workload(), **{f"{call}_fault": 1.0})
  world = simulated_source.World((broken,), 0)

  async def ask():
    task = world.task(0, "train")
    environment = world(task)
    if call == "reward":
      await world.grade(task, [base.Transcript([], [])])
    elif call == "step":
      await environment.step(base.Message("assistant", ""))
    else:
      await environment.start()

  with pytest.raises(OSError, match="simulated"):
    virtual.run(ask())


def test_the_chat_is_of_zeros_behind_the_name_of_the_task(world):
  ids = world.open([base.Message("user", "5 17 1")])
  np.testing.assert_array_equal(ids, [17, 1, 0, 0, 0])
  assert len(world.open([])) == 0
  assert world.decode(ids.tolist()) == ""
