"""Engines that join a running run, and engines that leave it.

  join: Router.expect -> recovery.bring_up, as a restart -> follow
  follow: told to leave -> Router.leave: its sessions end or move -> close

An engine that has joined was started elsewhere, so nobody here can start it
again: lost, it has left.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from rl.engine import contract
from rl.pools import placement, recovery, weight_publisher
from rl.pools import router as router_lib
from rl.runtime import watchdog as watchdog_lib


class Membership:
  """Lets engines into a router and out of it, until `close`.

  All on one event loop. `assemble.Parts` calls `follow` for the engines of its
  start; the router tells of those that come back or join, and of losses.

  Args:
    start_s: deadline of a join, until the engine serves.
    on_lost: given the losses of engines that have not joined; see `Router`.
    report: told of all who come and go.

  Attributes:
    joined, left: engines since the run began; one that is lost after it has
      joined has left.
  """

  def __init__(
    self,
    router: router_lib.Router,
    publisher: weight_publisher.WeightPublisher,
    start_s: float,
    on_lost: Callable[[int, str], None],
    *,
    watchdog: watchdog_lib.Watchdog = watchdog_lib.UNHEARD,
    report: Callable[[str], None] = lambda text: None,
  ):
    self._router = router
    self._publisher = publisher
    self._start_s = start_s
    self._on_lost = on_lost
    self._watchdog = watchdog
    self._report = report
    self._guests: set[int] = set()
    self._tasks: set[asyncio.Task[None]] = set()
    self._closed = False
    self._leaving: set[int] = set()
    self.joined = self.left = 0
    router.on_lost, router.on_serving = self._lost, self.follow

  def join(
    self,
    build: Callable[[int], contract.StartableEngine],
    info: placement.EngineInfo,
  ) -> int:
    """Begins to let an engine in; returns its number.

    Args:
      build: makes it, not started, by its number.

    Raises:
      ValueError: it serves another model, or the run ends.
    """
    if self._closed:
      raise ValueError("the run is about to end")
    number = self._router.expect(build, info)
    self._guests.add(number)
    self._spawn(self._join(number, info.pool), "join")
    return number

  async def _join(self, number: int, pool: str) -> None:
    engine: Any = self._router.engines[number]
    deadline = asyncio.timeout(self._start_s)
    try:
      with self._listed(number, "its start", self._start_s):
        async with deadline:
          await recovery.bring_up(number, engine, self._router, self._publisher)
    # Whatever it raises is the end of this engine alone.
    except Exception as error:
      why = repr(error)
      if deadline.expired():
        why = f"it took longer than recovery.start_s={self._start_s:g} s"
      self._guests.discard(number)
      self._router.remove(number)
      self._report(f"engine {number} could not join pool {pool}: {why}")
      return
    self.joined += 1
    version = engine.stats().version
    self._report(
      f"engine {number} has joined pool {pool}, with version {version}"
    )

  def follow(self, number: int) -> None:
    """Lets an engine go once it is told to leave, if it ever can be."""
    engine = self._router.engines[number]
    if isinstance(engine, contract.LeavingEngine):
      self._spawn(self._follow(number, engine), "leave")

  async def _follow(self, number: int, engine: contract.LeavingEngine) -> None:
    try:
      await engine.told_to_leave()
    except contract.EngineClosed:
      return
    await self.leave(number)

  async def leave(self, number: int) -> None:
    """Lets an engine go; returns once it has left, or was lost.

    Returns at once if it is leaving already.
    """
    if number in self._leaving:
      return
    engine = self._router.engines[number]
    self._report(
      f"engine {number} is to leave: it gets no new session while another "
      "engine serves"
    )
    self._leaving.add(number)
    try:
      with self._listed(number, "the end of its sessions", float("inf")):
        if not await self._router.leave(number):
          return
    finally:
      self._leaving.discard(number)
    self._guests.discard(number)
    self.left += 1
    await engine.close()
    self._report(f"engine {number} has left")

  def _lost(self, number: int, reason: str) -> None:
    if number not in self._guests:
      self._on_lost(number, reason)
      return
    self._guests.discard(number)
    self.left += 1
    self._router.give_up(number, reason)
    self._router.remove(number)
    self._report(f"engine {number}, which had joined, has left: {reason}")
    self._spawn(self._router.engines[number].close(), "end")

  def _listed(
    self, number: int, what: str, deadline_s: float
  ) -> watchdog_lib.Listed:
    return self._watchdog.track(
      owner=f"engine {number}", what=what, deadline_s=deadline_s
    )

  def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
    task = asyncio.create_task(work, name=name)
    self._tasks.add(task)
    task.add_done_callback(self._tasks.discard)

  def describe(self) -> dict[str, float]:
    """Returns counters since the run began, by the names of metrics."""
    return {
      "engines_joined": float(self.joined),
      "engines_left": float(self.left),
    }

  async def close(self) -> None:
    """Ends all joins; engines that are half started are closed."""
    self._closed = True
    self._router.on_lost = None
    self._router.on_serving = lambda number: None
    for task in self._tasks:
      task.cancel()
    await asyncio.gather(*self._tasks, return_exceptions=True)
