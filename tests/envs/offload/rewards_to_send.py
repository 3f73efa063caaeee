"""Rewards that are sent to processes, by name; some are hard to bear."""

import asyncio
import dataclasses
import os
import subprocess
import sys
from typing import Any

from envs import base


@dataclasses.dataclass(frozen=True)
class Told:
  """Does what the answer says: a number is the grade."""

  stateless = True

  async def __call__(self, task, transcripts) -> Any:
    if transcripts[0].messages[-1].content == "bare":
      return base.Grade(1.0, {})
    return [self._grade(t.messages[-1].content) for t in transcripts]

  def _grade(self, text) -> Any:
    print("a reward may print")
    match text.split():
      case ["exit", code]:
        os._exit(int(code))
      case ["raise"]:
        raise OSError("no such file")
      case ["hang"]:
        while True:
          pass
      case ["child"]:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"])
        os._exit(0)
      case ["none"]:
        return None
      case ["pid"]:
        return base.Grade(os.getpid(), {})
    return base.Grade(float(text), {"told": float(text)})


@dataclasses.dataclass(frozen=True)
class Slow:
  """1 after some seconds."""

  seconds: float = 1.0
  stateless = True

  async def __call__(self, task, transcripts):
    await asyncio.sleep(self.seconds)
    return [base.Grade.single("slow", 1) for _ in transcripts]
