import asyncio
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time

import pytest

from envs import base, delayed, mixture, workers
from envs.suites import self_play
from launch.cli import config_file
from rl.data import trajectory
from tests.helpers import failing_environments, machine_speed, scripted_chats

pytestmark = pytest.mark.process

ONE = workers.Processes(
  source=failing_environments.Told(), processes=1, sessions=1
)
TWO = dataclasses.replace(ONE, processes=2, sessions=2)
TASK = ONE.task(7, "train")


def say(text):
  return base.Message("assistant", text)


async def begin(source):
  environment = source(TASK)
  await environment.start()
  return environment


async def pid_of(environment):
  step = await environment.step(say("pid"))
  return int(step.messages[0].content)


def is_alive(pid):
  """Returns whether a process runs; one that is only not reaped does not."""
  with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
    return file.read().rpartition(")")[2].split()[0] not in "ZX"
  return False


def test_an_episode_is_the_same_in_a_worker(play):
  agent = iter(["end"] * 2).__next__
  here, there = (
    play(source, TASK, lambda task, messages: agent())
    for source in (ONE.source, ONE)
  )
  assert here == there
  assert there.messages[0].content == "seed 7"


async def test_tools_and_metrics_come_through():
  environment = await begin(ONE)
  step = await environment.step(say("end"))
  await environment.close()
  assert environment.tools == [{"type": "function", "function": {"name": "go"}}]
  assert (step.metrics, step.done) == ({"n": 1}, True)


@pytest.mark.parametrize(
  ("mischief", "fault"),
  [
    ("exit", r"worker \d of told ended with exit code 3"),
    ("crash", r"worker \d of told was ended by SIGSEGV: (.|\n)*_crash"),
    (
      "leak",
      r"was ended by SIGKILL: (.|\n)*resident memory of \d+ MiB is above 600",
    ),
    (
      "fork",
      r"was ended by SIGKILL: (.|\n)*\d+ processes at once are above 8",
    ),
    (
      "fork_apart",
      r"was ended by SIGKILL: (.|\n)*\d+ processes at once are above 8",
    ),
  ],
)
def test_a_worker_that_dies_takes_its_own_episode_alone(mischief, fault):
  source = dataclasses.replace(TWO, max_rss_mib=600, max_processes=8)

  async def run():
    good, bad = await begin(source), await begin(source)
    pid, lost = await pid_of(good), await pid_of(bad)
    with pytest.raises(workers.WorkerError, match=fault):
      await bad.step(say(mischief))
    await bad.close()
    assert await pid_of(good) == pid
    other = await begin(source)
    assert await pid_of(other) not in (pid, lost)
    return pid, lost

  assert not any(map(is_alive, asyncio.run(run())))


async def test_a_worker_that_was_killed_is_sent_nothing_more(caplog):
  source = dataclasses.replace(ONE, sessions=16)
  environments = [await begin(source) for _ in range(16)]
  pid = await pid_of(environments[0])
  os.kill(pid, signal.SIGKILL)
  while is_alive(pid):
    time.sleep(0.01)  # This loop is not to hear of it first.
  steps = [environment.step(say("pid")) for environment in environments]
  for error in await asyncio.gather(*steps, return_exceptions=True):
    assert isinstance(error, workers.WorkerError)
  for environment in environments:
    await environment.close()
  # As asyncio does from the sixth write to a closed pipe on.
  assert "closed by peer" not in caplog.text


def test_the_steps_before_a_death_stay_in_the_trajectory():
  played, text, _ = scripted_chats.play(ONE, say("pid"), say("exit"))
  assert played.status is trajectory.Status.ENV_FAULT
  assert "worker 0 of told ended with exit code 3" in played.fault
  # Both answers were sampled, and the first was rewarded.
  assert [turn.reward for turn in played.turns] == [0.5, 0.0]
  assert [m.content for m in text.messages[1::2]] == ["pid", "exit"]


async def test_an_exception_leaves_the_worker_alone():
  environment = await begin(ONE)
  pid = await pid_of(environment)
  with pytest.raises(
    workers.WorkerError,
    match=r"SystemExit: told to \(failing_environments.py:\d+, in ",
  ):
    await environment.step(say("raise"))
  with pytest.raises(workers.WorkerError, match="AttributeError"):
    await environment.step(say("nothing"))
  assert pid == await pid_of(environment)


@pytest.mark.parametrize(
  ("mischief", "is_same"),
  [("wait", True), ("sleep_in_a_thread", False), ("block", False)],
)
def test_a_call_that_does_not_end_costs_at_most_its_worker(mischief, is_same):
  source = dataclasses.replace(ONE, stall_s=2.0)

  async def run():
    environment = await begin(source)
    pid = await pid_of(environment)
    with pytest.raises(TimeoutError):
      await asyncio.wait_for(environment.step(say(mischief)), 0.1)
    await environment.close()
    return pid, await pid_of(await begin(source))

  before, after = asyncio.run(run())
  assert (before == after) == is_same
  assert not is_alive(before)


async def test_those_above_the_limit_of_sessions_wait_in_order():
  first = await begin(ONE)
  second, third = ONE(TASK), ONE(TASK)
  waiting = [asyncio.create_task(one.admit()) for one in (second, third)]
  await asyncio.wait(waiting, timeout=0.05)
  assert not any(one.done() for one in waiting)
  waiting[0].cancel()
  await first.close()
  await waiting[1]
  await third.start()
  assert await pid_of(third)


def test_a_wait_for_a_session_has_an_end():
  source = dataclasses.replace(ONE, queue_s=1.0)

  async def run():
    await begin(source)
    await source(TASK).admit()

  with pytest.raises(workers.WorkerError, match=r"sessions=1 .* within 1 s"):
    asyncio.run(run())


async def test_a_source_that_fails_to_load_says_so_and_is_tried_again_later():
  source = dataclasses.replace(
    ONE, source=failing_environments.Told(fails_to_load=True)
  )

  times = []
  for _ in range(3):
    environment = source(TASK)
    await environment.admit()
    times.append(time.monotonic())
    with pytest.raises(workers.WorkerError, match="ImportError: no such gam"):
      await environment.start()
    await environment.close()
  first, second, third = times
  # 0.1 s after the first death in succession, 0.2 s after the second.
  assert second - first >= 0.1
  assert third - second >= 0.2


def test_workers_and_their_children_die_with_a_run_that_is_killed():
  program = """
import asyncio
from envs import base, delayed, mixture, workers
from envs.suites import self_play
from tests.helpers import failing_environments
source = workers.Processes(source=failing_environments.Told())
async def run():
  environment = source(source.task(0, "train"))
  await environment.start()
  for what in ("pid", "child", "block"):
    step = await environment.step(base.Message("assistant", what))
    print(step.messages[0].content, flush=True)
asyncio.run(run())
"""
  with subprocess.Popen(
    [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
  ) as process:
    assert process.stdout
    pids = [int(process.stdout.readline()) for _ in range(2)]
    assert all(map(is_alive, pids))
    process.kill()
  end = time.monotonic() + machine_speed.scaled(30)
  while any(map(is_alive, pids)) and time.monotonic() < end:
    time.sleep(0.05)
  assert not any(map(is_alive, pids))


def test_a_source_of_a_config_file_is_found_in_a_worker(tmp_path, play):
  file = tmp_path / "mine.py"
  file.write_text(
    "import dataclasses\n"
    "from tests.helpers import failing_environments\n"
    "@dataclasses.dataclass(frozen=True)\n"
    "class Mine(failing_environments.Told):\n"
    "  name: str = 'mine'\n"
  )
  source = workers.Processes(source=config_file.load(file).Mine())
  source.validate()
  text = play(source, source.task(0, "eval"), lambda *_: "end")
  assert text.step_rewards == [0.5]


@pytest.mark.parametrize(
  ("module", "words"),
  [(__name__, "Local"), ("__main__", "the program that was started")],
)
def test_a_source_that_cannot_be_sent_is_refused(module, words):
  class Local(failing_environments.Told):
    pass

  Local.__module__ = module
  source = dataclasses.replace(ONE, source=Local())
  with pytest.raises(
    ValueError, match=f"told cannot be sent to a worker: .*{words}"
  ):
    source.validate()


@pytest.mark.parametrize("is_part", [False, True])
def test_members_who_meet_in_one_process_are_not_parted(is_part):
  wrapped = delayed.Delayed(source=self_play.TwoPlayer())
  source = dataclasses.replace(ONE, source=wrapped)
  if is_part:
    source = mixture.Mixture((mixture.Part(delayed.Delayed(source=source)),))
  with pytest.raises(ValueError, match=r"tictactoe.* give it an opponent"):
    source.validate()


@pytest.mark.parametrize(
  "fields", [{"processes": 0}, {"sessions": 1}, {"stall_s": float("nan")}]
)
def test_limits_that_cannot_work_are_refused(fields):
  with pytest.raises(ValueError, match=rf"workers {next(iter(fields))}="):
    dataclasses.replace(TWO, **fields)
