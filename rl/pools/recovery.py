"""Lost engines are started again, with the weights of the moment.

  Router._lose -> Restarts.lost: _run, a task for each engine
    wait, ever longer -> close the dead engine, build another -> bring_up:
      ^                  WeightPublisher.place_newest, again where a publish
      |                  came in between -> Router.recover
      +-- failed, or overran start_s; in the end Router.give_up

Meanwhile its sessions move to other engines, and where there are none they
wait: every attempt has a deadline, so they wait no longer than those.
"""

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

from rl.audit import event_log
from rl.engine import contract
from rl.pools import router as router_lib
from rl.pools import weight_publisher
from rl.runtime import watchdog as watchdog_lib
from rl.settings import backoff, checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recovery(backoff.Backoff):
  """Restarts of lost engines.

  `attempts` counts the start of the run itself: 1 leaves a lost engine lost.

  Attributes:
    start_s: deadline of one restart, from the end of the dead engine until it
      serves; programs are compiled again in it. The wait for a place, of up to
      `place_s` of the backend, comes on top.
    steady_s: an engine that has served for so long since it came back has all
      its attempts again.
  """

  attempts: int = 4
  first_wait_s: float = 1.0
  max_wait_s: float = 60.0
  start_s: float = 300.0
  steady_s: float = 1800.0

  def validate(self) -> None:
    """Raises ValueError on numbers that allow no start, or no wait."""
    where = "recovery"
    self.validate_as(where)
    checks.finite_above(self, 0, "start_s", where=where)
    out = "use inf for as many attempts as there are in all"
    checks.above(self, 0, "steady_s", where=where, out=out)


async def bring_up(
  number: int,
  engine: contract.StartableEngine,
  router: router_lib.Router,
  publisher: weight_publisher.WeightPublisher,
) -> None:
  """Starts an engine with the newest weights; the router then uses it.

  After a failure or a cancellation the engine is closed.
  """
  try:
    version, params = await publisher.place_newest(number)
    await engine.start(params, version)
    while version != publisher.version:  # Published meanwhile.
      version, params = await publisher.place_newest(number)
      await engine.update_weights(version, params)
    # Nothing waits between the comparison and this.
    router.recover(number, engine)
  except BaseException:
    await engine.close()
    raise


class Restarts:
  """Starts lost engines of a router again, until `close`.

  All on one event loop, which starts every engine.

  Args:
    build: makes an engine, not started, for the place of this number, on the
      same devices and thread as the one before.
    report: told of every restart.
    place_s: longest wait for a place, which comes on top of `start_s`.

  Attributes:
    restarts: attempts that began.
    given_up: engines that stay lost.
  """

  def __init__(
    self,
    settings: Recovery,
    router: router_lib.Router,
    publisher: weight_publisher.WeightPublisher,
    build: Callable[[int], contract.StartableEngine],
    log: event_log.EventLog,
    *,
    watchdog: watchdog_lib.Watchdog = watchdog_lib.UNHEARD,
    report: Callable[[str], None] = lambda text: None,
    place_s: float = 0.0,
  ):
    self._settings = settings
    self._place_s = place_s
    self._router = router
    self._publisher = publisher
    self._build = build
    self._log = log
    self._watchdog = watchdog
    self._report = report
    self._failures: dict[int, int] = {}
    self._back_s: dict[int, float] = {}
    self._tasks: set[asyncio.Task[None]] = set()
    self.restarts = self.given_up = 0
    router.on_lost = self.lost

  def lost(self, number: int, reason: str) -> None:
    """Begins to start an engine again; `Router` calls it."""
    now_s = asyncio.get_running_loop().time()
    served_s = now_s - self._back_s.pop(number, now_s)
    if served_s >= self._settings.steady_s:
      self._failures[number] = 0
    task = asyncio.create_task(self._run(number, reason), name="restart")
    self._tasks.add(task)
    task.add_done_callback(self._tasks.discard)

  async def _run(self, number: int, reason: str) -> None:
    settings, failures = self._settings, self._failures.get(number, 0)
    while (failures := failures + 1) < settings.attempts:
      self._failures[number] = failures
      wait_s = settings.wait_s(failures)
      self._tell(
        "engine_restarting",
        f"engine {number} has stopped because {reason}; restart {failures} of "
        f"{settings.attempts - 1} in {wait_s:g} s",
        engine=number,
        attempt=failures,
        wait_s=wait_s,
        reason=reason,
      )
      with self._watchdog.track(
        owner=f"engine {number}",
        what=f"restart {failures} of {settings.attempts - 1}",
        deadline_s=wait_s + settings.start_s + self._place_s,
      ):
        await asyncio.sleep(wait_s)
        self.restarts += 1
        reason = await self._try(number)
      if not reason:
        return
    self._give_up(number, failures - 1, reason)
    # Of one that was never started again: its memory and its process.
    await self._router.engines[number].close()

  async def _try(self, number: int) -> str:
    """Starts an engine once; returns why it failed, "" if it serves."""
    start_s, place_s = self._settings.start_s, self._place_s
    deadline = asyncio.timeout(start_s + place_s)
    try:
      async with deadline:
        await self._router.engines[number].close()  # Its memory is needed.
        engine = self._build(number)
        await bring_up(number, engine, self._router, self._publisher)
    except Exception as error:
      if deadline.expired():
        place = f" and place_s={place_s:g} s" if place_s else ""
        return (
          f"its restart took longer than recovery.start_s={start_s:g} s{place}"
        )
      return f"its restart raised {error!r}"
    self._back_s[number] = asyncio.get_running_loop().time()
    self._report(f"engine {number} serves again")
    return ""

  def _give_up(self, number: int, attempts: int, reason: str) -> None:
    self.given_up += 1
    allowed = self._settings.attempts
    reason = f"{reason}; recovery.attempts={allowed} allows no further start"
    self._tell(
      "engine_given_up",
      f"engine {number} stays lost because {reason}",
      engine=number,
      attempts=attempts,
      reason=reason,
    )
    self._router.give_up(number, reason)

  def _tell(self, kind: str, text: str, **fields: Any) -> None:
    self._log.emit(kind, **fields)
    self._report(text)

  def describe(self) -> dict[str, float]:
    """Returns counters since the run began, by the names of metrics."""
    return {
      "engine_restarts": float(self.restarts),
      "engines_given_up": float(self.given_up),
    }

  async def close(self) -> None:
    """Ends all restarts; engines that are half started are closed."""
    self._router.on_lost = None
    for task in self._tasks:
      task.cancel()
    await asyncio.gather(*self._tasks, return_exceptions=True)
