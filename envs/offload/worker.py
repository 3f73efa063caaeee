"""The program in a process that computes a reward: a request, then grades.

  [modules, sys.path, reward], request, request ...  -> grades, grades ...

Frames are a length of 8 bytes and as many bytes. It ends with its parent, even
amid a grade, as a thread waits for the end of its input. The file is the
program too, so it imports ours once it knows where that is.
"""

import asyncio
import importlib.util
import json
import os
import pickle
import queue
import signal
import sys
import threading
from typing import Any, BinaryIO

HEADER = 8


def frame(content: bytes) -> bytes:
  """Returns the bytes of a frame."""
  return len(content).to_bytes(HEADER, "big") + content


def _read(stream: BinaryIO) -> bytes:
  header = stream.read(HEADER)
  content = stream.read(int.from_bytes(header, "big"))
  if len(header) < HEADER or len(content) < int.from_bytes(header, "big"):
    os.killpg(0, signal.SIGKILL)  # Processes that the reward has started, too.
  return content


def _reward(content: bytes) -> Any:
  """Returns the reward of the first frame."""
  modules, sys.path[:], pickled = pickle.loads(content)
  for name, path in modules:
    _load(name, path)
  return pickle.loads(pickled)


def _load(name: str, path: str) -> None:
  """Runs a file as a module that no import statement finds."""
  # A program must not take itself for the one that was started.
  own = "__mp_main__" if name == "__main__" else name
  spec = importlib.util.spec_from_file_location(own, path)
  assert spec
  assert spec.loader
  module = importlib.util.module_from_spec(spec)
  sys.modules[name] = sys.modules[own] = module
  spec.loader.exec_module(module)


async def _grade(reward: Any, content: bytes) -> bytes:
  from envs.offload import wire

  if not content:  # Asks whether the reward can be loaded.
    return wire.write_grades([], 0)
  _, task, transcripts = wire.read_request(content)
  grades = await reward(task, transcripts)
  return wire.write_grades(grades, len(transcripts))


def _error(error: Exception) -> bytes:
  return json.dumps({"error": f"{type(error).__name__}: {error}"}).encode()


def main() -> None:
  """Computes grades until the input ends."""
  told = os.fdopen(os.dup(1), "wb")
  os.dup2(2, 1)  # A reward may print.
  frames: queue.SimpleQueue[bytes] = queue.SimpleQueue()

  def read() -> None:
    while True:
      frames.put(_read(sys.stdin.buffer))

  threading.Thread(target=read, daemon=True).start()
  first = frames.get()
  with asyncio.Runner() as runner:
    reward = None
    while True:
      request = frames.get()
      try:
        reward = _reward(first) if reward is None else reward
        answer = runner.run(_grade(reward, request))
      except Exception as error:
        answer = _error(error)
      told.write(frame(answer))
      told.flush()


if __name__ == "__main__":
  main()
