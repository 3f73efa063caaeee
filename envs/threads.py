"""Calls blocking environments in threads that can be abandoned.

  call(fn) -> queue -> a daemon thread runs fn -> deliver() wakes the caller

Threads cannot be killed. A hung one is abandoned here and replaced; as a daemon
it does not delay the exit. concurrent.futures is not used because it joins its
threads at exit, so one hung environment would keep the process alive.
"""

import asyncio
import contextlib
import dataclasses
import enum
import functools
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar, TypeVarTuple, Unpack

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")

# After this wait all threads are assumed busy, maybe hung.
_PATIENCE_S = 0.1
_LOGICAL_S = 0.01


class _State(enum.Enum):
  WAITING = enum.auto()
  RUNNING = enum.auto()
  OVER = enum.auto()


def _keeper(loop: asyncio.AbstractEventLoop) -> Callable[..., object]:
  """Returns a function that hands a callback to the loop, from any thread.

  A loop with a logical clock is promised it, to keep the order of its events.
  """
  promise = getattr(loop, "promise", None)
  if promise is None:
    return loop.call_soon_threadsafe
  return promise(loop.time() + _LOGICAL_S)


def _nothing() -> None:
  """Is handed to the loop where nobody waits for a result."""


@dataclasses.dataclass(slots=True, eq=False)
class _Job:
  fn: Callable[[], Any]
  keep: Callable[..., object]
  future: asyncio.Future[tuple[Any, Exception | None]]
  state: _State = _State.WAITING

  def deliver(self, value: Any, error: Exception | None) -> None:
    """Wakes the caller unless it was cancelled; runs on its event loop."""
    # A pair, not set_exception: futures refuse StopIteration.
    if not self.future.done():
      self.future.set_result((value, error))


class ThreadPool:
  """Daemon threads that run one call each; usable from any event loop."""

  def __init__(self, *, size: int = 4, max_size: int = 32):
    """Starts no thread yet.

    Args:
      size: threads started by the first call.
      max_size: to which the pool grows when calls block for long; abandoned
        threads do not count.
    """
    self._size = size
    self._max_size = max_size
    self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
    self._lock = threading.Lock()  # of the two counts and of every job's state
    self._num_threads = 0
    self._num_abandoned = 0

  async def call(self, fn: Callable[[Unpack[_Ts]], _T], *args: *_Ts) -> _T:
    """Returns `fn(*args)`, run in one of the threads.

    If the caller is cancelled, a waiting call never runs; a running one is
    abandoned with its thread, and its result is discarded.

    Raises:
      Exception: what `fn` raises.
      RuntimeError: `fn` raised something that is not an Exception, such as
        SystemExit, which must end neither the thread nor the event loop.
    """
    loop = asyncio.get_running_loop()
    call = functools.partial(fn, *args)
    job = _Job(call, _keeper(loop), loop.create_future())
    if self._num_threads < self._size:
      self._fill()
    self._jobs.put(job)
    timer = loop.call_later(_PATIENCE_S, self._relieve, job)
    try:
      value, error = await job.future
    except asyncio.CancelledError:
      self._abandon(job)
      raise
    finally:
      timer.cancel()
    if error is not None:
      raise error
    return value

  def abandoned(self) -> int:
    """Returns the number of abandoned calls so far."""
    return self._num_abandoned

  def _fill(self) -> None:
    with self._lock:
      while self._num_threads < self._size:
        self._start_thread()

  def _relieve(self, job: _Job) -> None:
    with self._lock:
      if job.state is _State.WAITING and self._num_threads < self._max_size:
        self._start_thread()

  def _abandon(self, job: _Job) -> None:
    with self._lock:
      if job.state is _State.RUNNING:
        self._num_abandoned += 1
        self._num_threads -= 1
        self._start_thread()
      job.state = _State.OVER
    job.keep(_nothing)  # The thread will not, and a clock may wait for it.

  def _start_thread(self) -> None:
    self._num_threads += 1
    threading.Thread(target=self._work, daemon=True, name="environment").start()

  def _work(self) -> None:
    # No local variable holds a job: an idle thread keeps no environment alive.
    while self._run(self._jobs.get()):
      pass

  def _run(self, job: _Job) -> bool:
    """Runs a job; returns whether the thread still belongs to the pool."""
    if not self._move(job, _State.WAITING, _State.RUNNING):
      return True
    value, error = None, None
    try:
      value = job.fn()
    except Exception as e:
      error = e
    except BaseException as e:
      error = RuntimeError(f"a blocking call raised {e!r}")
    if not self._move(job, _State.RUNNING, _State.OVER):
      return False
    with contextlib.suppress(RuntimeError):  # the event loop was closed
      job.keep(job.deliver, value, error)
    return True

  def _move(self, job: _Job, source: _State, target: _State) -> bool:
    with self._lock:
      if job.state is not source:
        return False
      job.state = target
      return True


_DEFAULT = ThreadPool()
call = _DEFAULT.call
abandoned = _DEFAULT.abandoned
