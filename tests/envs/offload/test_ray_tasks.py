"""A reward in tasks of Ray, where Ray is installed."""

import asyncio

import pytest

from envs import base
from envs.offload import calls, ray_tasks
from envs.rewards import rewards
from tests.envs.offload import rewards_to_send
from tests.envs.offload.test_process_pool import said, value

pytestmark = [pytest.mark.process, pytest.mark.slow]


@pytest.fixture
def ray():
  """Skips where there is no Ray."""
  return pytest.importorskip("ray")


def test_tasks_grade_fail_and_are_given_up(ray):
  reward = ray_tasks.RayTasks(reward=rewards_to_send.Told(), max_tasks=2)

  async def scenario():
    try:
      await reward.open()
      values = await asyncio.gather(*(value(reward, str(i)) for i in range(4)))
      for text, message in (("raise", "OSError: no such"), ("exit 3", "died")):
        with pytest.raises(calls.CallError, match=message):
          await value(reward, text)
      with pytest.raises(TimeoutError):
        await asyncio.wait_for(value(reward, "hang"), 1.0)
      return [*values, await value(reward, "0.5")], reward.counts()
    finally:
      await reward.close()

  values, counts = asyncio.run(scenario())
  assert values == [0, 1, 2, 3, 0.5]
  assert counts["offloaded_calls"] == 9
  assert not ray.is_initialized()


def test_grades_are_those_of_the_event_loop(ray):
  plain = rewards.Weighted(
    (
      rewards.Criterion("exact", rewards.ExactMatch(), 0.1),
      rewards.Criterion("outcome", rewards.Outcome(), 0.2),
    )
  )
  task = base.Task("t/train/0", 0, "train", 0, answer="4")
  group = [
    base.Transcript(said("4").messages, [0.1, 0.2]),
    base.Transcript(said("5").messages, [1.0]),
  ]
  remote = ray_tasks.RayTasks(reward=plain)

  async def scenario():
    try:
      return await remote(task, group)
    finally:
      await remote.close()

  assert asyncio.run(scenario()) == asyncio.run(plain(task, group))


def test_without_ray_the_extra_is_named(monkeypatch):
  monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
  with pytest.raises(ValueError, match=r"pip install 'twinmesh\[ray\]'"):
    ray_tasks.RayTasks(reward=rewards.Outcome())
