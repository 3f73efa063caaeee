"""A source that delays every step by a long-tailed wait, for tests of load."""

import asyncio
import dataclasses
import math
import random
import zlib
from collections.abc import Sequence
from typing import Any

from envs import base


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delayed(base.Wrapper):
  """Adds a log-normal wait to every step of another source.

  Attributes:
    median_s: median of the waits.
    sigma: standard deviation of the wait's logarithm; at 1, one wait in a
      hundred is longer than 10 medians.
  """

  median_s: float = 0.03
  sigma: float = 1.0

  def __post_init__(self) -> None:
    if not (self.median_s > 0 and self.sigma >= 0):
      raise ValueError(
        f"median_s={self.median_s}, sigma={self.sigma}:"
        " give median_s > 0 and sigma >= 0"
      )

  def __call__(self, task: base.Task) -> "_Slow":
    """Returns the source's environment, slowed down."""
    return _Slow(self, task)

  def wait_s(self, task: base.Task, answers: Sequence[str]) -> float:
    """Returns the wait after the last answer of an episode so far.

    It depends on the task and these answers only: a repeated run waits the
    same, and members of a group differ once their answers do.
    """
    key = "\n".join([str(task.seed), *answers])
    draw = random.Random(zlib.crc32(key.encode())).gauss(0.0, self.sigma)
    return self.median_s * math.exp(draw)


class _Slow:
  """One environment, with its answers so far."""

  def __init__(self, delayed: Delayed, task: base.Task):
    self._delayed = delayed
    self._task = task
    self._environment = delayed.source(task)
    self._answers: list[str] = []

  def __getattr__(self, name: str) -> Any:
    """Returns an attribute of the environment, such as its tools."""
    return getattr(self._environment, name)

  async def start(self) -> Sequence[base.Message]:
    return await self._environment.start()

  async def step(self, answer: base.Message) -> base.Step:
    self._answers.append(answer.content)
    await asyncio.sleep(self._delayed.wait_s(self._task, self._answers))
    return await self._environment.step(answer)

  async def close(self) -> None:
    await self._environment.close()
