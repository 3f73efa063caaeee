"""The first signal calls `stop`, the second ends the process."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from launch.run import signals
from tests.helpers import machine_speed


@pytest.fixture(autouse=True)
def handlers():
  """Leaves the handlers of this process as they were."""
  numbers = (signal.SIGINT, signal.SIGTERM)
  before = [signal.getsignal(number) for number in numbers]
  yield
  for number, handler in zip(numbers, before, strict=True):
    signal.signal(number, handler)


async def send(number):
  os.kill(os.getpid(), number)
  await asyncio.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_the_first_signal_asks_to_stop(number):
  told = []

  installed = signals.Signals(lambda: told.append("stop"), told.append)
  assert installed.number == 0
  await send(number)
  assert installed.number == number
  assert told == [
    "stop",
    "stopping at the next safe point; again to end at once",
  ]


@pytest.mark.parametrize("when", ["inside", "behind"])
async def test_it_calls_what_is_in_charge_when_it_comes(when):
  called = []

  installed = signals.Signals(
    lambda: called.append("behind"), lambda text: None
  )
  with installed.calling(lambda: called.append("inside")):
    if when == "inside":
      await send(signal.SIGTERM)
  if when == "behind":
    await send(signal.SIGTERM)
  assert called == [when]


async def test_code_that_does_not_await_can_be_interrupted():
  installed = signals.Signals(lambda: None, lambda text: None)
  installed.interrupt()
  with pytest.raises(KeyboardInterrupt):
    os.kill(os.getpid(), signal.SIGTERM)
  assert installed.number == signal.SIGTERM


@pytest.mark.process
@pytest.mark.parametrize(
  ("wait", "told"),
  [("await asyncio.sleep(0.05)", "asked\n"), ("time.sleep(0.05)", "")],
  ids=["waits", "is blocked"],
)
def test_the_second_signal_ends_the_process(wait, told):
  program = f"""
import asyncio, os, signal, time
from launch.run import signals

async def run():
  signals.Signals(lambda: print("asked", flush=True), lambda text: None)
  for _ in range(2):
    os.kill(os.getpid(), signal.SIGTERM)
    {wait}
  print("still here")

asyncio.run(run())
"""
  ended = subprocess.run(
    [sys.executable, "-c", program],
    capture_output=True,
    text=True,
    timeout=machine_speed.scaled(60),
    check=False,
  )
  assert ended.returncode == -signal.SIGTERM, ended.stderr
  assert ended.stdout == told
