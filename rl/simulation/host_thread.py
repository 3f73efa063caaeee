"""The one thread of a run's host, on which all but device programs queue.

World: starts, steps -----+
SimulatedTrainer: packing +--> HostThread.work, one after another
SimulatedMesh: results ---+
"""

import asyncio
import dataclasses

from rl.settings import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostWork:
  """Seconds of the thread that runs the event loop.

  Attributes:
    turn_s: of a turn, and of the start of an episode: chat, environment,
      request and answer.
    group_s: of a group before it trains: selection and packing.
  """

  turn_s: float = 0.0
  group_s: float = 0.0

  def validate(self) -> None:
    """Raises ValueError on times that are negative or not finite."""
    names = ("turn_s", "group_s")
    checks.finite_at_least(self, 0, *names, where="cluster.host")


class HostThread:
  """The thread of one run; whatever needs it waits for its turn."""

  def __init__(self, work: HostWork):
    self._work = work
    self._free_s = 0.0
    self.is_shared = work.turn_s > 0

  def free_at(self, now_s: float) -> float:
    """Returns the time from which it has nothing else to do."""
    return max(now_s, self._free_s)

  async def turn(self) -> None:
    """Does the work of a turn."""
    await self._do(self._work.turn_s)

  async def pack(self, groups: int) -> None:
    """Does the work of so many groups that are about to train."""
    await self._do(groups * self._work.group_s)

  async def _do(self, seconds: float) -> None:
    if not seconds:
      return
    now_s = asyncio.get_running_loop().time()
    self._free_s = self.free_at(now_s) + seconds
    await asyncio.sleep(self._free_s - now_s)
