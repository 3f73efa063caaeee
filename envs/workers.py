"""Environments in processes of their own, which may crash, leak or hang.

  Processes --task--> _Session --admit--> _Pool --> _Worker == a process
                        start, step, close ----------> ask ==> environment

A worker that dies takes the episodes with it that it plays at that moment, and
nothing else: these end with ENV_FAULT and what they have sampled so far.
Another process takes its place: at once if an episode had ended in order there,
and later after each death in succession.
"""

import asyncio
import collections
import dataclasses
import itertools
import json
import pickle
import sys
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from envs import base, guarded_process, worker_process

_FIRST_DELAY_S, _MAX_DELAY_S = 0.1, 30.0


class WorkerError(RuntimeError):
  """An environment in a worker raised, or its worker has died."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Processes(base.Wrapper):
  """Plays the environments of another source in worker processes.

  Tasks, demonstrations and lists of words are still made in the process of the
  run. Workers import what defines the source, so a config file in which it
  stands as well; JAX has no accelerator there. They start when they are needed
  and end with the run, even if that is killed.

  Wrap a part of a `mixture.Mixture`, not the mixture. Linux only.

  Attributes:
    processes: workers at once.
    sessions: episodes at once, spread over the workers; more wait. Those of one
      worker end with it, so equal numbers keep all episodes apart.
    max_rss_mib: resident memory of a worker with all that it has started.
    max_processes: a worker, and all that it has started.
    stall_s: a worker in which nothing moves for so long is killed.
    queue_s: longest wait for a session to become free.
  """

  processes: int = 2
  sessions: int = 16
  max_rss_mib: int = 4096
  max_processes: int = 64
  stall_s: float = 60.0
  queue_s: float = 3600.0

  def __post_init__(self) -> None:
    lowest = {
      "processes": 1,
      "sessions": self.processes,
      "max_rss_mib": 64,
      "max_processes": 1,
      "stall_s": 1,
      "queue_s": 1,
    }
    for name, bound in lowest.items():
      value = getattr(self, name)
      if not bound <= value <= 2**31:  # Also false for nan and infinity.
        raise ValueError(f"workers {name}={value}: use {bound} to {2**31}")

  def validate(self) -> None:
    """Raises ValueError where there are no workers, or not for this source."""
    if sys.platform != "linux":
      raise ValueError(
        f"workers run on Linux, not on {sys.platform}; use the source itself"
      )
    if any(base.members_together(one) > 1 for one in base.parts(self.source)):
      raise ValueError(
        f"members of {self.name} play each other, for which they must meet in "
        "one process, and workers would part them; use the source itself, or "
        "give it an opponent"
      )
    worker_process.PickledSetting.of(self.source, f"source {self.name}")

  def __call__(self, task: base.Task) -> "_Session":
    """Returns an environment whose `start` is played in a worker."""
    return _Session(self, task)


class _Session:
  """One environment in a worker."""

  def __init__(self, settings: Processes, task: base.Task):
    self._settings = settings
    self._task = task
    self._worker: _Worker | None = None
    self._number = 0
    self.tools: Sequence[Mapping[str, Any]] = ()

  async def admit(self) -> None:
    """Waits until a worker has room for it."""
    pool = _pool(self._settings)
    self._worker, self._number = await pool.admit(), next(_numbers)

  async def start(self) -> Sequence[base.Message]:
    if self._worker is None:
      await self.admit()
    messages, self.tools = await self._ask(
      "start", dataclasses.asdict(self._task)
    )
    return [worker_process.to_message(message) for message in messages]

  async def step(self, answer: base.Message) -> base.Step:
    messages, reward, done, metrics = await self._ask(
      "step", dataclasses.asdict(answer)
    )
    said = [worker_process.to_message(message) for message in messages]
    return base.Step(said, reward, done, metrics)

  async def close(self) -> None:
    worker, self._worker = self._worker, None
    if worker is not None:
      # A caller in a hurry must not leave its place occupied.
      await asyncio.shield(_keep(worker.close(self._number)))

  async def _ask(self, what: str, value: Any) -> Any:
    if self._worker is None:
      raise WorkerError("this episode is over")
    return await self._worker.ask(self._number, what, value)


class _Pool:
  """The workers of a source on one event loop, and those who wait for one."""

  def __init__(self, settings: Processes):
    self._settings = settings
    self._source = worker_process.PickledSetting.of(
      settings.source, f"source {settings.name}"
    )
    self._workers: list[_Worker | None] = [None] * settings.processes
    self._deaths = [0] * settings.processes  # In succession.
    self._not_before_s = [0.0] * settings.processes
    self._waiting: collections.deque[asyncio.Future[_Worker]] = (
      collections.deque()
    )

  async def admit(self) -> "_Worker":
    """Returns a worker with a place that is taken.

    Raises:
      WorkerError: none became free in time.
    """
    place: asyncio.Future[_Worker] = asyncio.get_running_loop().create_future()
    self._waiting.append(place)
    self._serve()
    try:
      async with asyncio.timeout(self._settings.queue_s):
        return await place
    except BaseException as error:
      if place.done() and not place.cancelled():
        self.release(place.result())
      if not isinstance(error, TimeoutError):
        raise
      raise WorkerError(
        f"none of sessions={self._settings.sessions} became free within "
        f"{self._settings.queue_s:g} s; raise sessions or queue_s"
      ) from None

  def release(self, worker: "_Worker") -> None:
    """Gives a place back."""
    worker.sessions -= 1
    if worker.is_retired and not worker.sessions:
      worker.end("it was left with a call that does not end")
    self._serve()

  def ended(self, worker: "_Worker") -> None:
    """Forgets a worker; the next of its number waits after repeated deaths."""
    loop, number = asyncio.get_running_loop(), worker.number
    self._workers[number] = None
    self._deaths[number] = 0 if worker.has_played else self._deaths[number] + 1
    if deaths := self._deaths[number]:
      delay_s = min(_FIRST_DELAY_S * 2 ** (deaths - 1), _MAX_DELAY_S)
      self._not_before_s[number] = loop.time() + delay_s
      loop.call_later(delay_s + 0.01, self._serve)
    self._serve()

  def _serve(self) -> None:
    """Gives places to those who wait, the first first."""
    while self._waiting:
      if self._waiting[0].done():  # Cancelled.
        self._waiting.popleft()
      elif (worker := self._roomy()) is not None:
        worker.sessions += 1
        self._waiting.popleft().set_result(worker)
      else:
        return

  def _roomy(self) -> "_Worker | None":
    """Returns the worker with the fewest sessions, a new one if possible."""
    settings, now_s = self._settings, asyncio.get_running_loop().time()
    alive = [worker for worker in self._workers if worker is not None]
    if sum(worker.sessions for worker in alive) >= settings.sessions:
      return None
    for number, worker in enumerate(self._workers):
      if worker is None and now_s >= self._not_before_s[number]:
        worker = _Worker(settings, self._source, number, self)
        self._workers[number] = worker
        return worker
    most = -(-settings.sessions // settings.processes)
    found = [worker for worker in alive if worker.takes(most)]
    return min(found, key=lambda worker: worker.sessions, default=None)


class _Worker:
  """One process of a pool, from its start to its death.

  Attributes:
    sessions: places taken.
    has_played: an episode has ended in order here.
    is_retired: takes no more episodes, and ends after those that it has.
  """

  def __init__(
    self,
    settings: Processes,
    source: worker_process.PickledSetting,
    number: int,
    pool: _Pool,
  ):
    self.number = number
    self.sessions = 0
    self.has_played = False
    self.is_retired = False
    self._settings = settings
    self._pool = pool
    self._calls: dict[int, asyncio.Future[Any]] = {}
    self._unanswered: set[int] = set()  # Sessions with a cancelled call.
    self._stdin: asyncio.StreamWriter | None = None
    # Written once there is a process.
    self._outbox = [worker_process.framed(pickle.dumps(source))]
    self._reason = ""
    self._death = ""
    self._end = asyncio.Event()
    self._life = _keep(self._live())

  def takes(self, most: int) -> bool:
    """Returns whether it has room for a session more."""
    is_sound = not (self.is_retired or self._unanswered or self._reason)
    return is_sound and self.sessions < most

  def end(self, reason: str) -> None:
    """Ends the process, whatever it does."""
    self._reason = self._reason or reason
    self._end.set()

  async def ask(self, session: int, what: str, value: Any) -> Any:
    """Returns the answer to a request.

    Raises:
      WorkerError: the environment raised, or the worker is dead.
    """
    if self._death:
      raise WorkerError(self._death)
    index = next(_numbers)
    request = worker_process.frame([index, session, what, value])
    self._calls[index] = asyncio.get_running_loop().create_future()
    self._send(request)
    try:
      error, result = await self._calls[index]
    except asyncio.CancelledError:
      self._unanswered.add(session)
      raise
    finally:
      self._calls.pop(index, None)
    if error:
      raise WorkerError(error)
    return result

  async def close(self, session: int) -> None:
    """Closes an environment and gives its place back."""
    try:
      async with asyncio.timeout(self._settings.stall_s):
        self.is_retired |= not await self.ask(session, "close", None)
      self.has_played |= session not in self._unanswered
    except TimeoutError:
      self.end(f"it answered nothing for {self._settings.stall_s:g} s")
    except WorkerError:
      pass  # Its calls have said so.
    finally:
      self._unanswered.discard(session)
      self._pool.release(self)

  def _send(self, data: bytes) -> None:
    self._outbox.append(data)
    # It is closing once a write has failed.
    if self._stdin is not None and not self._stdin.is_closing():
      for one in self._outbox:
        self._stdin.write(one)
      self._outbox.clear()

  async def _live(self) -> None:
    how = "has ended with the run"
    try:
      process = await self._start()
      try:
        await self._serve(process)
      finally:
        how = await process.end()
    except OSError as error:
      how = f"cannot start: {error}"
    finally:
      self._die(how)

  async def _start(self) -> guarded_process.GuardedProcess:
    return await guarded_process.GuardedProcess.start_module(
      "envs.worker_process",
      max_rss_mib=self._settings.max_rss_mib,
      max_processes=self._settings.max_processes,
    )

  async def _serve(self, process: guarded_process.GuardedProcess) -> None:
    """Passes requests and answers on until the process is to end, or has."""
    tasks = (
      asyncio.create_task(self._receive(process.stdout)),
      asyncio.create_task(self._end.wait()),
    )
    self._stdin = process.stdin
    self._send(b"")
    try:
      await asyncio.wait(tasks, return_when="FIRST_COMPLETED")
    finally:
      for task in tasks:
        task.cancel()
      await asyncio.wait(tasks)

  async def _receive(self, stdout: asyncio.StreamReader) -> None:
    try:
      while True:
        answer = json.loads(await worker_process.receive(stdout))
        index, error, result = answer
        if (call := self._calls.get(index)) is not None and not call.done():
          call.set_result((error, result))
    except asyncio.IncompleteReadError:
      pass  # It is dead.
    except ValueError as error:
      self._reason = f"it sent nonsense: {error}"

  def _die(self, how: str) -> None:
    if self._reason:
      how = f"was ended, as {self._reason}; it {how}"
    name = f"worker {self.number} of {self._settings.source.name}"
    self._death = f"{name} {how}"
    for call in self._calls.values():
      if not call.done():
        call.set_exception(WorkerError(self._death))
    self._pool.ended(self)


_numbers = itertools.count(1)
_tasks: set[asyncio.Task[Any]] = set()
_POOLS: weakref.WeakKeyDictionary[
  asyncio.AbstractEventLoop, dict[Processes, _Pool]
] = weakref.WeakKeyDictionary()


def _pool(settings: Processes) -> _Pool:
  """Returns the pool of a source on the running event loop."""
  pools = _POOLS.setdefault(asyncio.get_running_loop(), {})
  if settings not in pools:
    pools[settings] = _Pool(settings)
  return pools[settings]


def _keep(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
  """Starts a task that lives until it ends, or the event loop does."""
  task = asyncio.create_task(work)
  _tasks.add(task)
  task.add_done_callback(_tasks.discard)
  return task
