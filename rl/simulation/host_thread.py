"""The one thread of a run's host, which does all but device programs.

World: starts, steps -----> turn: as many at once as there are, step by step
SimulatedTrainer: packing -> pack: nothing else goes on meanwhile
SimulatedMesh: results ----> free_at: they wait for packing

An event loop takes its ready tasks round and round, each as far as its next
wait. So the turns that one dispatch has ended take the thread side by side,
come to their ends together, and the engine finds them all when it next looks.
"""

import asyncio
import collections
import dataclasses

from rl.settings import checks

_ROUNDING_S = 1e-9


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
  """The thread of one run, which all its turns share."""

  def __init__(self, work: HostWork):
    self._work = work
    self.is_shared = work.turn_s > 0
    # A turn ends when the share of each has grown by its seconds. All have the
    # same, so the first to begin is the first to end.
    self._turns: collections.deque[tuple[float, asyncio.Future[None]]] = (
      collections.deque()
    )
    self._share_s = 0.0
    self._since_s = 0.0  # When the share was that; ahead of now while packing.
    self._ended_s = -1.0
    self._timer: asyncio.TimerHandle | None = None

  @property
  def has_turns(self) -> bool:
    """True if turns are under way, or have ended at this moment."""
    now_s = asyncio.get_running_loop().time()
    return bool(self._turns) or now_s == self._ended_s

  def free_at(self, now_s: float) -> float:
    """Returns the time from which nothing is packed."""
    return max(now_s, self._since_s)

  async def turn(self) -> None:
    """Does the work of a turn, beside that of others."""
    if not self.is_shared:
      return
    self._advance()
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    self._turns.append((self._share_s + self._work.turn_s, ended))
    self._arm()
    await ended

  async def pack(self, groups: int) -> None:
    """Does the work of so many groups that are about to train."""
    seconds = groups * self._work.group_s
    if not seconds:
      return
    self._advance()
    self._since_s += seconds
    self._arm()
    await asyncio.sleep(self._since_s - asyncio.get_running_loop().time())

  def _advance(self) -> None:
    """Gives each turn its share of the time until now."""
    now_s = self.free_at(asyncio.get_running_loop().time())
    if self._turns:
      self._share_s += (now_s - self._since_s) / len(self._turns)
    self._since_s = now_s

  def _arm(self) -> None:
    """Sets the timer to the end of the first turn."""
    if self._timer is not None:
      self._timer.cancel()
    if self._turns:
      left_s = (self._turns[0][0] - self._share_s) * len(self._turns)
      loop = asyncio.get_running_loop()
      self._timer = loop.call_at(self._since_s + left_s, self._end)

  def _end(self) -> None:
    """Ends the turns that have had their seconds."""
    self._advance()
    self._ended_s = asyncio.get_running_loop().time()
    while self._turns and self._turns[0][0] < self._share_s + _ROUNDING_S:
      _, ended = self._turns.popleft()
      if not ended.done():  # It was cancelled.
        ended.set_result(None)
    self._arm()
