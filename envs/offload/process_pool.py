"""A reward computed in processes that come and go with the calls.

  ProcessPool -> an idle worker, or a new one -> request, grades
                                            -> idle -> idle_s -> end

A call that is given up ends its process: a reward that computes cannot be
stopped otherwise.
"""

import asyncio
import contextlib
import dataclasses
import importlib.util
import math
import os
import pickle
import signal
import sys
from typing import Any

from envs import base
from envs.offload import calls, wire, worker

_MAX_ANSWER = 16 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessPool(wire.Elsewhere):
  """Computes a reward in processes of this machine, one call in each.

  None runs before the first call. One starts for a call that finds all busy,
  up to `processes`; then calls wait, first come, first served.

  Attributes:
    processes: at once.
    idle_s: after which a process without work ends.
  """

  processes: int = 2
  idle_s: float = 60.0

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.processes < 1:
      raise ValueError(f"processes={self.processes} must be at least 1")
    if not 0 <= self.idle_s < math.inf:
      raise ValueError(f"idle_s={self.idle_s} must be finite and >= 0")
    _packed(self.reward)

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

  async def open(self) -> None:
    await self.calls.call(lambda: self.send(b""))

  async def send(self, request: bytes) -> list[base.Grade]:
    found = self._awake() or await self._start()
    try:
      answer = await found.ask(request)
    except BaseException:
      await self._end(found)
      raise
    loop = asyncio.get_running_loop()
    idle_s = self._setting.idle_s
    found.timer = loop.call_later(idle_s, self._retire, found)
    self._idle.append(found)
    return wire.read_grades(answer, "a process of the reward")[0]

  async def close(self) -> None:
    for one in list(self._all):
      await self._end(one)

  def _awake(self) -> "_Worker | None":
    """Returns an idle process that has not died meanwhile."""
    while self._idle:
      found = self._idle.pop()
      if found.timer is not None:
        found.timer.cancel()
      if found.process.returncode is None:
        return found
      self._forget(found)
    return None

  async def _start(self) -> "_Worker":
    self.calls.counts.cold_starts += 1
    started = _Worker(
      await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", worker.__file__),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the run, which ends this.
        limit=_MAX_ANSWER,
      )
    )
    self._all.add(started)
    self.calls.counts.workers = len(self._all)
    started.tell(_packed(self._setting.reward))
    return started

  def _retire(self, idle: "_Worker") -> None:
    """Ends a process that has had no work for a while."""
    self._idle.remove(idle)
    idle.kill()  # asyncio's own watcher waits for its end.
    self._forget(idle)

  async def _end(self, one: "_Worker") -> None:
    if one in self._idle:
      self._idle.remove(one)
    if one.timer is not None:
      one.timer.cancel()
    one.kill()
    self._forget(one)
    await one.process.wait()

  def _forget(self, one: "_Worker") -> None:
    self._all.discard(one)
    self.calls.counts.workers = len(self._all)


@dataclasses.dataclass(eq=False)
class _Worker:
  """One process, asked by one call at a time.

  Attributes:
    timer: ends it, while it is idle.
  """

  process: asyncio.subprocess.Process
  timer: asyncio.TimerHandle | None = None

  def tell(self, content: bytes) -> None:
    assert self.process.stdin
    self.process.stdin.write(worker.frame(content))

  async def ask(self, request: bytes) -> bytes:
    stdin, stdout = self.process.stdin, self.process.stdout
    assert stdin
    assert stdout
    try:
      self.tell(request)
      await stdin.drain()
      header = await stdout.readexactly(worker.HEADER)
      length = int.from_bytes(header, "big")
      if length > _MAX_ANSWER:
        raise calls.CallError(
          f"a process of the reward answered {length} bytes; the most that "
          f"are read are {_MAX_ANSWER}"
        )
      return await stdout.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError) as error:
      raise calls.CallError(
        "a process of the reward ended with status "
        f"{await self.process.wait()} during a call"
      ) from error

  def kill(self) -> None:
    """Kills it, with all that it has started."""
    if self.process.returncode is None:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(self.process.pid, signal.SIGKILL)


def _packed(reward: base.Reward) -> bytes:
  """Returns a reward as the first frame of a worker.

  Raises:
    ValueError: it cannot be sent to another process.
  """
  try:
    pickled = pickle.dumps(reward)
  except Exception as error:
    raise ValueError(
      f"reward {type(reward).__name__} cannot be sent to another process: "
      f"{error}; define its class at the top of a file, with plain fields"
    ) from error
  names = sorted({type(part).__module__ for part in base.parts(reward)})
  files = {name: _file(name) for name in names if not _is_found(name)}
  if missing := [name for name, file in files.items() if file is None]:
    raise ValueError(
      f"reward {type(reward).__name__} cannot be sent to another process: "
      f"{missing[0]} is no file; define its class at the top of one"
    )
  return pickle.dumps([list(files.items()), sys.path, pickled])


def _is_found(name: str) -> bool:
  """Returns whether another process finds a module by its name."""
  if name == "__main__":
    return False
  try:
    return importlib.util.find_spec(name) is not None
  except (ImportError, ValueError):
    return False


def _file(name: str) -> Any:
  """Returns the file of a module that is not found by name, as a config is."""
  return getattr(sys.modules[name], "__file__", None)
