"""A reward in processes: they come, go, die and are counted."""

import asyncio
import os
import subprocess
import sys
import textwrap
import time

import pytest

from envs import base
from envs.offload import calls, process_pool
from envs.rewards import rewards
from launch.cli import flags
from tests.envs.offload import rewards_to_send
from tests.helpers import machine_speed

pytestmark = pytest.mark.process

TASK = base.Task("told/train/0", 0, "train", 0)


def said(text):
  return base.Transcript([base.Message("assistant", text)], [])


def run(scenario, **settings):
  """Returns what a scenario makes of a pool, which is closed after it."""
  pool = process_pool.ProcessPool(reward=rewards_to_send.Told(), **settings)

  async def whole():
    try:
      return await scenario(pool)
    finally:
      await pool.close()

  return asyncio.run(whole())


async def value(pool, text):
  (grade,) = await pool(TASK, [said(text)])
  return grade.value


async def until(condition):
  async with asyncio.timeout(machine_speed.scaled(30)):
    while not condition():
      await asyncio.sleep(0.01)


def is_alive(pid):
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return False
  return True


def test_processes_come_with_calls_and_go_without_and_come_again():
  async def scenario(pool):
    assert pool.counts() == {}
    burst = [value(pool, str(i)) for i in range(8)]
    assert await asyncio.gather(*burst) == [0, 1, 2, 3, 4, 5, 6, 7]
    most = pool.counts()["workers"]
    await until(lambda: pool.counts()["workers"] == 0)
    await value(pool, "1")
    return most, pool.counts()

  # Longer than one of them may be idle while the other still starts.
  idle_s = machine_speed.scaled(1.0)
  most, counts = run(scenario, processes=2, idle_s=idle_s)
  assert (most, counts["workers"]) == (2, 1)
  assert counts["offloaded_calls"] == 9
  assert counts["cold_starts"] == 3


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("exit 3", "during a call a process ended with exit code 3: a reward may"),
    ("raise", r"OSError: no such file \(.+\.py:\d+, in _grade\)"),
    ("none", "reward returned NoneType in place of a Grade"),
    ("bare", r"reward returned Grade\(.*\), not a list of one Grade"),
  ],
)
def test_a_failure_ends_its_own_call_alone(text, message):
  async def scenario(pool):
    failing = asyncio.create_task(value(pool, text))
    assert await value(pool, "0.5") == 0.5
    with pytest.raises(calls.CallError, match=message):
      await failing
    assert await value(pool, "0.25") == 0.25

  run(scenario)


def test_a_call_that_is_given_up_ends_its_process():
  async def scenario(pool):
    pid = await value(pool, "pid")
    with pytest.raises(TimeoutError):
      await asyncio.wait_for(value(pool, "hang"), 0.3)
    await until(lambda: not is_alive(pid))
    assert await value(pool, "1") == 1
    return pool.counts()

  assert run(scenario, processes=1)["cold_starts"] == 2


def test_a_process_that_dies_idle_is_replaced():
  async def scenario(pool):
    pid = int(await value(pool, "pid"))
    os.kill(pid, 9)
    await until(lambda: not is_alive(pid))
    await asyncio.sleep(0.1)
    assert await value(pool, "1") == 1

  run(scenario)


def test_no_process_outlives_its_parent_even_amid_a_grade(tmp_path):
  program = tmp_path / "program.py"
  program.write_text(
    textwrap.dedent("""
    import asyncio
    from envs import base
    from envs.offload import process_pool
    from tests.envs.offload import rewards_to_send
    from tests.envs.offload.test_process_pool import TASK, value

    async def main():
      told = rewards_to_send.Told()
      pool = process_pool.ProcessPool(reward=told, processes=1)
      print(int(await value(pool, "pid")), flush=True)
      await value(pool, "hang")

    asyncio.run(main())
    """)
  )
  with subprocess.Popen(
    [sys.executable, program],
    stdout=subprocess.PIPE,
    text=True,
    env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
  ) as parent:
    assert parent.stdout
    pid = int(parent.stdout.readline())
    time.sleep(0.2)  # The worker is computing by then, or soon.
    parent.kill()
  deadline = time.monotonic() + machine_speed.scaled(30)
  while is_alive(pid):
    assert time.monotonic() < deadline
    time.sleep(0.02)


def test_a_reward_of_a_config_file_is_sent_with_it(tmp_path):
  config = tmp_path / "mine.py"
  config.write_text(
    textwrap.dedent("""
    import dataclasses
    from envs import base

    @dataclasses.dataclass(frozen=True)
    class Mine:
      stateless = True

      async def __call__(self, task, transcripts):
        return [base.Grade.single("mine", 0.5) for _ in transcripts]

    def get_config():
      return Mine()
    """)
  )
  pool = process_pool.ProcessPool(reward=flags.load(str(config)))
  config.unlink()

  async def scenario():
    try:
      await pool.open()
      return await value(pool, "")
    finally:
      await pool.close()

  assert asyncio.run(scenario()) == 0.5


def test_a_reward_that_cannot_be_sent_is_refused_at_once():
  class Local(rewards_to_send.Told):
    pass

  with pytest.raises(ValueError, match="Local cannot be sent to a worker"):
    process_pool.ProcessPool(reward=Local())


def test_a_reward_with_state_is_refused():
  class Stateful(rewards.Outcome):
    stateless = False

  with pytest.raises(ValueError, match="Stateful is not stateless"):
    process_pool.ProcessPool(reward=Stateful())
