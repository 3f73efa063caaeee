"""A reward computed in processes that come and go with the calls.

  ProcessPool -> an idle worker, or a new one -> request, grades
                                            -> idle -> idle_s -> end

A call that is given up ends its process: a reward that computes cannot be
stopped otherwise.
"""

import asyncio
import dataclasses
import math

from envs import base, guarded_process, worker_process
from envs.offload import calls, wire, worker

_MAX_PROCESSES = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessPool(wire.Elsewhere):
  """Computes a reward in processes of this machine, one call in each.

  None runs before the first call. One starts for a call that finds all busy,
  up to `processes`; then calls wait, first come, first served.

  Attributes:
    processes: at once.
    idle_s: after which a process without work ends.
    max_rss_mib: resident memory of one, with all that it starts.
  """

  processes: int = 2
  idle_s: float = 60.0
  max_rss_mib: int = 4096

  def __post_init__(self) -> None:
    super().__post_init__()
    for name in ("processes", "max_rss_mib"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
    if not 0 <= self.idle_s < math.inf:
      raise ValueError(f"idle_s={self.idle_s} must be finite and >= 0")
    worker.packed(self.reward)

  def client(self) -> "_Pool":
    """Returns a pool without a process."""
    return _Pool(self)


class _Pool(calls.Client):
  """The processes of one setting."""

  def __init__(self, setting: ProcessPool):
    super().__init__(setting.hedge, setting.processes)
    self._setting = setting
    self._idle: list[_Worker] = []
    self._all: set[_Worker] = set()
    self._ending: set[asyncio.Task[str]] = set()

  async def open(self) -> None:
    await self.calls.call(lambda: self.send(b""))

  async def send(self, request: bytes) -> list[base.Grade]:
    found = self._awake() or await self._start()
    try:
      answer = await found.ask(request)
    except (asyncio.IncompleteReadError, ConnectionError) as error:
      self._forget(found)
      raise calls.CallError(
        f"during a call a process {await found.process.end()}"
      ) from error
    except BaseException:
      self._bury(found)
      raise
    loop = asyncio.get_running_loop()
    idle_s = self._setting.idle_s
    found.timer = loop.call_later(idle_s, self._retire, found)
    self._idle.append(found)
    return wire.read_grades(answer, "a process of the reward")[0]

  async def close(self) -> None:
    for one in list(self._all):
      if one.timer is not None:
        one.timer.cancel()
      self._bury(one)
    self._idle.clear()
    await asyncio.gather(*self._ending)

  def _awake(self) -> "_Worker | None":
    """Returns an idle process that has not died meanwhile."""
    while self._idle:
      found = self._idle.pop()
      if found.timer is not None:
        found.timer.cancel()
      if not found.process.stdout.at_eof():
        return found
      self._bury(found)
    return None

  async def _start(self) -> "_Worker":
    self.calls.counts.cold_starts += 1
    setting = self._setting
    started = _Worker(
      await guarded_process.GuardedProcess.start_module(
        "envs.offload.worker",
        max_rss_mib=setting.max_rss_mib,
        max_processes=_MAX_PROCESSES,
      )
    )
    self._all.add(started)
    self.calls.counts.workers = len(self._all)
    started.tell(worker.packed(self._setting.reward))
    return started

  def _retire(self, idle: "_Worker") -> None:
    """Ends a process that has had no work for a while."""
    self._idle.remove(idle)
    self._bury(idle)

  def _bury(self, one: "_Worker") -> None:
    """Ends a process, which nobody has to wait for."""
    self._forget(one)
    ending = asyncio.create_task(one.process.end())
    self._ending.add(ending)
    ending.add_done_callback(self._ending.discard)

  def _forget(self, one: "_Worker") -> None:
    self._all.discard(one)
    self.calls.counts.workers = len(self._all)


@dataclasses.dataclass(eq=False)
class _Worker:
  """One process, asked by one call at a time.

  Attributes:
    timer: ends it, while it is idle.
  """

  process: guarded_process.GuardedProcess
  timer: asyncio.TimerHandle | None = None

  def tell(self, content: bytes) -> None:
    self.process.stdin.write(worker_process.framed(content))

  async def ask(self, request: bytes) -> bytes:
    self.tell(request)
    await self.process.stdin.drain()
    try:
      return await worker_process.receive(self.process.stdout)
    except ValueError as error:
      raise calls.CallError(f"a process of the reward: {error}") from error
