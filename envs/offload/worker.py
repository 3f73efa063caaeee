"""The program in a process that computes a reward: a request, then grades.

  [packed reward], request, request ...  -> grades, grades ...

Frames are those of `envs.worker_process`. It ends with its parent, even amid a
grade, as a thread waits for the end of its input.
"""

import asyncio
import contextlib
import functools
import json
import os
import pickle
import queue
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from envs import base, worker_process
from envs.offload import wire


def packed(reward: base.Reward) -> bytes:
  """Returns a reward as `compute` takes it.

  Raises:
    ValueError: it cannot be sent to another process.
  """
  name = f"reward {type(reward).__name__}"
  return pickle.dumps(worker_process.PickledSetting.of(reward, name))


def compute(
  reward: bytes,
  request: bytes,
  run: Callable[[Coroutine[Any, Any, bytes]], bytes] = asyncio.run,
) -> bytes:
  """Returns the grades of a request, or its error, as JSON.

  Args:
    reward: from `packed`.
    request: see `wire`; empty asks whether the reward can be loaded.
    run: an event loop.
  """
  try:
    return run(_grade(_load(reward), request))
  except Exception as error:
    return json.dumps({"error": base.reason(error)}).encode()


@functools.cache
def _load(reward: bytes) -> Any:
  return pickle.loads(reward).load()


async def _grade(reward: base.Reward, request: bytes) -> bytes:
  if not request:
    return wire.write_grades([], 0)
  _, task, transcripts = wire.read_request(request)
  grades = await reward(task, transcripts)
  return wire.write_grades(grades, len(transcripts))


def main() -> None:
  """Computes grades until the input ends."""
  told = os.fdopen(os.dup(1), "wb")
  os.dup2(2, 1)  # A reward may print.
  frames: queue.SimpleQueue[bytes] = queue.SimpleQueue()

  def read() -> None:
    with contextlib.suppress(EOFError):
      while True:
        frames.put(worker_process.read(sys.stdin.buffer))
    os.kill(os.getpid(), signal.SIGKILL)  # Its guard ends what it has started.

  threading.Thread(target=read, daemon=True).start()
  reward = frames.get()
  with asyncio.Runner() as runner:
    while True:
      told.write(
        worker_process.framed(compute(reward, frames.get(), runner.run))
      )
      told.flush()
