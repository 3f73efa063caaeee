"""A source whose environments do what they are told, mostly harm."""

import asyncio
import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from envs import base, threads

_FORKING_S = 5.0


@dataclasses.dataclass(frozen=True)
class Told:
  """Each answer names a method of the environment that is played then."""

  fails_to_load: bool = False
  name: str = "told"

  def __setstate__(self, state):
    """Fails in a worker, if it is to."""
    if state["fails_to_load"]:
      raise ImportError("no such game")
    self.__dict__.update(state)

  def task(self, index: int, split: base.Split) -> base.Task:
    """Returns a task."""
    return base.Task(f"{self.name}/{split}/{index}", index, split, index)

  def __call__(self, task: base.Task) -> "_Told":
    """Returns a fresh environment."""
    return _Told(task)


class _Told:
  def __init__(self, task: base.Task):
    self._task = task
    self._kept = []
    self.tools = [{"type": "function", "function": {"name": "go"}}]

  async def start(self) -> Sequence[base.Message]:
    return [base.Message("user", f"seed {self._task.seed}")]

  async def step(self, answer: base.Message) -> base.Step:
    said = await getattr(self, f"_{answer.content}")()
    call = base.ToolCall("go", "{}")
    message = base.Message("user", str(said), (call,), reasoning="\u4e2d")
    # Numbers of numpy are no JSON.
    reward: Any = np.float32(0.5)
    done: Any = np.bool_(answer.content == "end")
    return base.Step([message], reward, done, {"n": 1})

  async def close(self) -> None:
    pass

  async def _pid(self):
    print("an environment may print")
    return os.getpid()

  async def _end(self):
    return ""

  async def _raise(self):
    raise SystemExit("told to")

  async def _exit(self):
    os._exit(3)

  async def _crash(self):
    os.kill(os.getpid(), signal.SIGSEGV)

  async def _leak(self):
    while True:
      self._kept.append(bytearray(1 << 20))

  async def _fork(self):
    # Bounded, in case that nothing else is.
    end = time.monotonic() + _FORKING_S
    while time.monotonic() < end:
      os.fork()

  async def _fork_apart(self):
    end = time.monotonic() + _FORKING_S
    while time.monotonic() < end:
      if not os.fork():
        os.setsid()  # No signal to a group reaches all of them.

  async def _sleep_in_a_thread(self):
    await threads.call(time.sleep, 60)

  async def _block(self):
    time.sleep(60)

  async def _wait(self):
    await asyncio.sleep(60)

  async def _child(self):
    return subprocess.Popen(["sleep", "60"], start_new_session=True).pid
