"""The processes of one learner, which run the same commands in one order.

  command --> member 0 --+          collectives among them
          --> member 1 --+--> answers of all
              ...

Nothing of jax or XLA ends a program that waits for a process that is gone. So
the first loss, or a deadline that passes, ends all members, and every command
from then on raises `LearnerLost`, which names the member and has its last
words. This process is not a member.
"""

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import json
import pathlib
import weakref
from collections.abc import Sequence
from typing import Any

from rl.backends import contract as backends
from rl.pools import placement
from rl.remote import connection, learner_worker, workers
from rl.runtime import watchdog as watchdog_lib
from rl.settings import overrides
from rl.train import learner

_CONNECT_S = 120.0
_JOIN_S = 120.0
_BLAME_S = 2.0
"""When one process ends, calls to the others fail as well, maybe before."""

_CLOSED = "the learner was closed"


class Gang:
  """One worker in several processes; all methods belong to one event loop.

  Args:
    tasks: of the members.
    log_dir: see `workers.Workers`.
    deadline_s: of a command.
    backend: starts them.

  Raises:
    Unreachable: the backend cannot be reached.

  Attributes:
    tiles: of each member, once it is open; see `LearnerWorker`.
  """

  def __init__(
    self,
    tasks: Sequence[learner_worker.LearnerTask],
    log_dir: pathlib.Path | None,
    *,
    deadline_s: float,
    watchdog: watchdog_lib.Watchdog = watchdog_lib.UNHEARD,
    backend: backends.Backend,
  ):
    self._deadline_s = deadline_s
    self._workers = workers.Workers(log_dir, watchdog, backend, writable=True)
    address = self._workers.weights and self._workers.weights.address
    self._tasks = [dataclasses.replace(x, stream=address) for x in tasks]
    self._members: list[tuple[workers.Worker, connection.Connection]] = []
    self._watching: list[asyncio.Task[None]] = []
    self._opening = asyncio.Lock()
    self._loop: asyncio.AbstractEventLoop | None = None
    self._gone: list[int] = []
    self._first_gone = asyncio.Event()
    self._running: list[str] = []
    self._lost: asyncio.Task[str] | None = None
    self._closed = False
    self._dropped: collections.deque[int] = collections.deque()
    self._numbers = itertools.count()
    self._programs = itertools.count()
    self.tiles: list[Any] = []

  async def open(self) -> None:
    """Starts all members, unless that was done, and joins them.

    Raises:
      LearnerLost: one of them ended, or took too long.
    """
    async with self._opening:
      if self._members:
        return
      self._loop = asyncio.get_running_loop()
      starts = [
        self._workers.start(
          f"learner {i}",
          json.dumps(overrides.to_json(task)),
          environment=workers.environment(),
          hears={},
          deadline_s=_CONNECT_S,
        )
        for i, task in enumerate(self._tasks)
      ]
      started = await asyncio.gather(*starts, return_exceptions=True)
      for one in started:
        if isinstance(one, BaseException):
          await self._workers.close()
          raise learner.LearnerLost(str(one)) from one
        self._members.append(one)
      for i, (_, stream) in enumerate(self._members):
        name = f"learner {i}"
        self._watching.append(
          asyncio.create_task(self._watch(i, stream), name=name)
        )
      offers = await self.command("offer", [()] * len(self._members))
      joins = [(offers[0],)] * len(self._members)
      self.tiles = await self.command("join", joins, deadline_s=_JOIN_S)

  async def _watch(self, number: int, stream: connection.Connection) -> None:
    """Ends all members when one is lost, also while no command runs."""
    await stream.lost.wait()
    self._gone.append(number)
    self._first_gone.set()
    await self._lose(number, "")

  async def command(
    self,
    method: str,
    args: Sequence[tuple],
    *,
    deadline_s: float | None = None,
  ) -> list[Any]:
    """Returns the answers of all members, in their order.

    Args:
      args: of each member.
      deadline_s: another than that of all commands.

    Raises:
      LearnerLost: a member ended, failed, or has not answered in time.
    """
    if self._closed:
      raise learner.LearnerLost(_CLOSED)
    if self._lost is not None:
      raise learner.LearnerLost(await asyncio.shield(self._lost))
    limit_s = deadline_s or self._deadline_s
    count = len(self._dropped)
    dropped = tuple(self._dropped.popleft() for _ in range(count))
    calls = [
      asyncio.create_task(
        stream.call(method, dropped, *own, deadline_s=limit_s)
      )
      for (_, stream), own in zip(self._members, args, strict=True)
    ]
    self._running.append(method)
    try:
      await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
      failed = [i for i, x in enumerate(calls) if x.done() and x.exception()]
      if not failed:
        return [call.result() for call in calls]
      if self._closed:
        raise learner.LearnerLost(_CLOSED)
      why = "; ".join(str(calls[i].exception()) for i in failed)
      raise learner.LearnerLost(await self._lose(failed[0], why))
    finally:
      self._running.remove(method)
      for call in calls:
        call.cancel()
      await asyncio.wait(calls)

  async def _lose(self, number: int, why: str) -> str:
    """Ends all members once; returns why.

    Args:
      number: of the member that failed, unless one has ended.
    """
    if self._lost is None:
      self._lost = asyncio.create_task(self._end(number, why))
    return await asyncio.shield(self._lost)

  async def _end(self, number: int, why: str) -> str:
    running = " and ".join(map(repr, dict.fromkeys(self._running)))
    with contextlib.suppress(TimeoutError):
      async with asyncio.timeout(_BLAME_S):
        await self._first_gone.wait()
    if self._gone:
      number = self._gone[0]
      worker, _ = self._members[number]
      words = await asyncio.to_thread(worker.last_words)
      why = words if worker.ended else f"it does not answer; {words}"
    await self._workers.close()
    during = f"in {running}" if running else "between two commands"
    return f"process {number} of the learner was lost {during}: {why}"

  def hold(self, value: Any) -> int:
    """Returns a new number, which the members may forget when `value` ends."""
    number = next(self._numbers)
    weakref.finalize(value, self._dropped.append, number).atexit = False
    return number

  def build(self, settings: learner.LearnerSettings) -> int:
    """Has every member make training programs; returns their number."""
    told = json.dumps(overrides.to_json(settings))
    self.ask("build", [(told,)] * len(self._tasks))
    return next(self._programs)

  def ask(self, method: str, args: Sequence[tuple]) -> list[Any]:
    """Returns what `command` does, to a thread other than the loop's."""
    if self._loop is None:
      raise RuntimeError("a gang that is not open; call `open` first")
    asked = self.command(method, args)
    return asyncio.run_coroutine_threadsafe(asked, self._loop).result()

  async def close(self) -> None:
    """Ends all members; commands that wait raise LearnerLost."""
    self._closed = True
    for watching in self._watching:
      watching.cancel()
    for _, stream in self._members:
      await stream.close()
    await self._workers.close()


def of_learner(
  place: placement.Placement,
  log_dir: pathlib.Path | None,
  *,
  deadline_s: float,
  watchdog: watchdog_lib.Watchdog = watchdog_lib.UNHEARD,
) -> Gang:
  """Returns the processes of a learner, not started; see `Gang`."""
  count = place.learner_processes
  tasks = [
    learner_worker.LearnerTask(
      mesh=place.learner, process=i, processes=count, platform=place.platform
    )
    for i in range(count)
  ]
  return Gang(
    tasks,
    log_dir,
    deadline_s=deadline_s,
    watchdog=watchdog,
    backend=place.backend,
  )
