"""The simulated world: tasks, environments, answers and rewards by number."""

import asyncio
import dataclasses

import numpy as np
import pytest

from envs import base
from rl.engine import contract as contract_lib
from rl.rollout import episode, prompts
from rl.runtime import virtual_clock
from rl.simulation import distributions, workload
from rl.simulation import engine as simulated_engine
from rl.simulation import world as world_lib

pytestmark = pytest.mark.virtual_time

MATH = workload.Workload(
  name="math",
  share=3.0,
  prompt_tokens=distributions.Fixed(50.0),
  answer_tokens=distributions.LogNormal(mean=100.0, sigma=0.5),
)
GAME = workload.Workload(
  name="game",
  turns=distributions.Fixed(2.0),
  reply_tokens=distributions.Fixed(7.0),
  answer_tokens=distributions.Fixed(9.0),
  start_s=distributions.Fixed(5.0),
  step_s=distributions.Fixed(2.0),
  reward_s=distributions.Fixed(1.0),
)


@pytest.fixture
def world():
  return world_lib.World((MATH, GAME), 0)


def opening(world, task):
  """Returns the first message of a play that begins now."""
  (message,) = virtual_clock.run(world(task).start())
  return message


def request(world, message, turn=0, name="0/0/0"):
  return contract_lib.DecodeRequest(
    request_id=f"train/{name}/{turn}",
    session=f"train/{name}",
    tokens=world.open([message]),
    max_tokens=1000,
  )


def answer(world, task, turn=0):
  """Returns how long an answer in a play that begins now is."""
  return world.answer_tokens(request(world, opening(world, task), turn))


@pytest.mark.parametrize("contract", [base.Source, prompts.Mixed, episode.Chat])
def test_it_is_a_source_a_mixture_and_a_chat(world, contract):
  assert isinstance(world, contract)


def test_it_has_the_sources_and_shares_of_its_workloads(world):
  assert [source.name for source in world.sources] == ["math", "game"]
  assert world.weights == (3.0, 1.0)
  assert isinstance(world_lib.SimulatedReward(world), base.Reward)


async def test_an_episode_takes_its_turns_and_their_seconds(world):
  environment = world(world.sources[1].task(4, "train"))
  first = await environment.start()
  step = await environment.step(base.Message("assistant", ""))
  last = await environment.step(base.Message("assistant", ""))
  await environment.close()
  seconds = asyncio.get_running_loop().time()
  assert seconds == pytest.approx(5.0 + 2 * 2.0)
  assert len(world.open(first)) == 100  # What a workload has by default.
  assert len(world.append(step.messages)) == 7
  assert (step.done, last.done, list(last.messages)) == (False, True, [])


def test_a_context_tells_the_engine_which_task_it_is_of(world):
  games = [world.sources[1].task(i, "train") for i in range(3)]
  assert [answer(world, task) for task in games] == [9, 9, 9]
  third, fourth = (world.sources[0].task(i, "train") for i in (3, 4))
  length = answer(world, third)
  assert answer(world_lib.World((MATH, GAME), 0), third) == length
  assert answer(world, fourth) != length


def test_plays_and_turns_of_a_task_answer_differently(world):
  task = world.sources[0].task(3, "train")
  lengths = [answer(world, task) for _ in range(4)]
  assert len(set(lengths)) > 2
  again = world_lib.World((MATH, GAME), 0)
  assert [answer(again, task, turn=1) for _ in range(4)] != lengths


def test_an_answer_belongs_to_its_play_whoever_asks_for_it(world):
  message = opening(world, world.sources[0].task(3, "train"))
  lengths = {
    world.answer_tokens(request(world, message, name=name))
    for name in ("0/0/0", "0/0/5", "7/1/0")
  }
  assert len(lengths) == 1


async def test_a_reward_takes_its_seconds_and_is_0_or_1(world):
  task = world.sources[1].task(0, "train")
  plays = [base.Transcript([opening(world, task)], []) for _ in range(40)]
  reward = world_lib.SimulatedReward(world)
  grades = [(await reward(task, [play]))[0].value for play in plays]
  seconds = asyncio.get_running_loop().time()
  assert set(grades) == {0.0, 1.0}
  assert seconds == pytest.approx(40.0)


def test_a_play_is_graded_alike_whatever_the_order():
  shaky = workload.Workload(
    reward_s=distributions.LogNormal(mean=1.0, sigma=1.0), reward_fault=0.5
  )

  async def grade(world, play):
    start = asyncio.get_running_loop().time()
    try:
      (said,) = await world.grade(world.task(0, "train"), [play])
    except OSError:
      said = None
    return asyncio.get_running_loop().time() - start, said

  async def grade_all(order):
    world = world_lib.World((shaky,), 0)
    task = world.task(0, "train")
    plays = [
      base.Transcript(await world(task).start(), []) for _ in range(len(order))
    ]
    # In the order that is given; those that failed once more.
    found = {(play, 0): await grade(world, plays[play]) for play in order}
    failed = [play for play in order if found[play, 0][1] is None]
    return found | {
      (play, 1): await grade(world, plays[play]) for play in failed
    }

  first = virtual_clock.run(grade_all(range(8)))
  other = virtual_clock.run(grade_all([5, 3, 7, 1, 6, 0, 4, 2]))
  for where, (seconds, said) in first.items():
    assert other[where] == (pytest.approx(seconds), said)
  # What failed may be graded when it is called again.
  assert any(
    first[play, 0][1] is None and first[play, 1][1] is not None
    for play in range(8)
  )


def test_equal_numbers_take_the_memory_of_one():
  # A version has 4 bytes, however many tokens it sampled.
  versions = simulated_engine.constant(7, 1 << 40, np.int32)
  assert versions[-1] == 7
  assert simulated_engine.constant(7, 3, np.int32).tolist() == [7, 7, 7]
  with pytest.raises(ValueError, match="read-only"):
    versions[0] = 8


async def test_a_play_that_was_graded_is_forgotten():
  world = world_lib.World((workload.Workload(),), 0)

  task = world.task(0, "train")
  transcript = base.Transcript(await world(task).start(), [])
  await world.grade(task, [transcript])
  with pytest.raises(KeyError):
    await world.grade(task, [transcript])


@pytest.mark.parametrize("call", ["start", "step", "reward"])
def test_a_fault_is_an_exception(call):
  broken = dataclasses.replace(workload.Workload(), **{f"{call}_fault": 1.0})
  world = world_lib.World((broken,), 0)

  async def ask():
    task = world.task(0, "train")
    environment = world(task)
    if call == "reward":
      messages = await environment.start()
      await world.grade(task, [base.Transcript(messages, [])])
    elif call == "step":
      await environment.step(base.Message("assistant", ""))
    else:
      await environment.start()

  with pytest.raises(OSError, match="simulated"):
    virtual_clock.run(ask())


def test_a_conversation_counts_up_from_its_play_and_goes_on_in_zeros(world):
  first = base.Message("user", "5 17")
  ids = world.open([first])
  np.testing.assert_array_equal(ids, [17, 18, 19, 20, 21])
  assert len(world.open([base.Message("user", "300000 17")])) == 300_000
  np.testing.assert_array_equal(world.open([first]), ids)
  more = world.append([base.Message("user", "3"), base.Message("user", "2")])
  np.testing.assert_array_equal(more, np.zeros(5))
  assert len(world.append([])) == 0
  assert world.decode(ids.tolist()) == ""
