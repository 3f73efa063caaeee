"""Starts of environments, tried again where their source allows it.

  Starts.run: [ _gate -> start ]* -> what it returned
                ^         |
                |         +--> failed: wait, ever longer; in the end a Fault
                +--- the breaker of its source is open: one trial at a time

A source that has an attribute `restarts = True` says that an environment whose
start failed may be built and started afresh. Where many such starts in a row
have failed the source itself is down: its breaker opens, and single starts try
it at ever longer intervals. All that wait for a trial share its outcome, so a
source that is down costs faults, which are data, and not a storm of calls.
"""

import asyncio
import collections
import dataclasses
import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

from envs import base
from rl.runtime import isolation
from rl.runtime import watchdog as watchdog_lib
from rl.settings import backoff, checks

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Starting(backoff.Backoff):
  """Retries of starts that fail, of sources that allow them.

  The deadline of one is `step_s`.

  Attributes:
    breaker: failed starts in a row, of one source, that open its breaker.
  """

  first_wait_s: float = 1.0
  breaker: int = 8

  def validate(self) -> None:
    """Raises ValueError on numbers that allow no start, or no wait."""
    where = "rollout.starting"
    self.validate_as(where)
    checks.at_least(self, 1, "breaker", where=where)


@dataclasses.dataclass(slots=True)
class Breaker:
  """Counts the starts of one source that failed, and says when to try. Pure.

    closed --`most` in a row--> open --trial succeeds--> closed
                                  ^ | trial fails, later
                                  +-+

  Attributes:
    failures: in a row, of starts that began while it was closed and of trials.
    trials: those that failed since it opened.
    until_s: time of the next trial; None while it is closed.
    fault: the last one.
  """

  failures: int = 0
  trials: int = 0
  until_s: float | None = None
  fault: str = ""

  def succeed(self) -> None:
    """Closes it: a start has succeeded, so the source is up."""
    self.failures, self.trials, self.until_s = 0, 0, None

  def fail(
    self, fault: str, now_s: float, settings: Starting, *, is_trial: bool
  ) -> None:
    """Counts a start that has failed.

    Those that began before it opened say nothing new.
    """
    if self.until_s is not None and not is_trial:
      return
    self.failures, self.fault = self.failures + 1, fault
    self.trials += is_trial
    if self.failures >= settings.breaker:
      self.until_s = now_s + settings.wait_s(self.trials + 1)


class Starts:
  """Starts environments; called from one event loop.

  Attributes:
    retries: starts that were not the first of their episode.
    faults: episodes whose attempts were exhausted, or that were refused.
    refused: starts that were given up because another trial had failed.
    breakers: by name of the source.
  """

  def __init__(
    self,
    settings: Starting | None = None,
    watchdog: watchdog_lib.Watchdog = watchdog_lib.UNHEARD,
  ):
    self._settings = settings or Starting()
    self._watchdog = watchdog
    self._told: set[str] = set()
    self._trying: collections.defaultdict[str, asyncio.Lock] = (
      collections.defaultdict(asyncio.Lock)
    )
    self.retries = self.faults = self.refused = 0
    self.breakers: collections.defaultdict[str, Breaker] = (
      collections.defaultdict(Breaker)
    )

  async def run(
    self,
    source: base.Source,
    task: base.Task,
    start: Callable[[], Awaitable[_T]],
    owner: str = "",
  ) -> _T:
    """Returns what `start` does, which builds and starts a fresh environment.

    Args:
      owner: the episode, for the watchdog.

    Raises:
      isolation.Fault: it failed, as often as the settings allow.
    """
    if not base.restarts(source, task.source):
      return await start()
    settings, attempt = self._settings, 0
    while True:
      attempt += 1
      try:
        return await self._gate(task.source, start, owner)
      except isolation.Fault as fault:
        if isinstance(fault, _Refused) or attempt == settings.attempts:
          self.faults += 1
          text = f", after {attempt} attempts" if attempt > 1 else ""
          raise isolation.Fault(f"{fault}{text}") from fault
      self.retries += 1
      with self._listed(owner, "another start of its environment"):
        await asyncio.sleep(settings.wait_s(attempt))

  async def _gate(
    self, name: str, start: Callable[[], Awaitable[_T]], owner: str
  ) -> _T:
    """Starts at once, or as the one trial of a source that is down."""
    breaker, lock = self.breakers[name], self._trying[name]
    if breaker.until_s is not None:
      trials, time = breaker.trials, asyncio.get_running_loop().time
      with self._listed(owner, f"{name}, whose starts fail"):
        await lock.acquire()
      try:
        if breaker.until_s is not None and breaker.trials > trials:
          self.refused += 1
          raise _Refused(
            f"not started: {breaker.failures} starts of {name} in a row have "
            f"failed, the last with: {breaker.fault}"
          )
        if breaker.until_s is not None:
          with self._listed(owner, f"{name}, whose starts fail"):
            await asyncio.sleep(breaker.until_s - time())
          return await self._try(breaker, start, is_trial=True)
      finally:
        lock.release()
    return await self._try(breaker, start, is_trial=False)

  async def _try(
    self,
    breaker: Breaker,
    start: Callable[[], Awaitable[_T]],
    *,
    is_trial: bool,
  ) -> _T:
    try:
      found = await start()
    except isolation.Fault as fault:
      now_s = asyncio.get_running_loop().time()
      breaker.fail(str(fault), now_s, self._settings, is_trial=is_trial)
      raise
    breaker.succeed()
    return found

  def _listed(self, owner: str, what: str) -> watchdog_lib.Listed:
    """Lists a wait, which ends by itself."""
    return self._watchdog.track(owner=owner, what=what, deadline_s=math.inf)

  def forget(self) -> None:
    """Takes all sources for up; no start may be going on."""
    self.breakers.clear()
    self._told.clear()

  def describe(self) -> dict[str, float]:
    """Returns counters since the run began, and the breakers open now."""
    is_open = [one.until_s is not None for one in self.breakers.values()]
    return {
      "retries": float(self.retries),
      "faults": float(self.faults),
      "refused": float(self.refused),
      "breakers_open": float(sum(is_open)),
    }

  def warnings(self) -> list[str]:
    """Returns one line for each breaker that has opened since the last call."""
    now = {n: b for n, b in self.breakers.items() if b.until_s is not None}
    new = now.keys() - self._told
    self._told = set(now)
    return [
      f"the last {now[name].failures} starts of {name} have failed, the last "
      f"with: {now[name].fault}; it is tried one start at a time"
      for name in sorted(new)
    ]


class _Refused(isolation.Fault):
  """A start that was not tried."""
