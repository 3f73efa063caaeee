"""Calls blocking environments in threads that can be abandoned.

  call(fn) -> batch -> queue -> a daemon thread runs its calls, one by one
    ^                                       |
    +------- one wake-up of the loop -------+

Most calls take microseconds, less than it takes to wake a thread and the loop.
So those that are known to be short join the batch that was begun last: its
thread makes them one after the other, and wakes the loop once. A call that
takes long, or has never been timed, is a batch of its own.

Threads cannot be killed. A hung one is abandoned here and replaced, and the
rest of its batch goes to another; as a daemon it does not delay the exit.
concurrent.futures is not used because it joins its threads at exit, so one hung
environment would keep the process alive.
"""

import asyncio
import collections
import contextlib
import dataclasses
import enum
import functools
import math
import queue
import threading
import time
import types
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, TypeVarTuple, Unpack

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")

# After this wait all threads are assumed busy, maybe hung.
_PATIENCE_S = 0.1
# A batch is expected to take no longer: its calls wait for each other.
_BATCH_S = 0.01
# The weight of a new call in the mean duration of its function.
_NEWEST = 0.1
_LOGICAL_S = 0.01


class _State(enum.Enum):
  WAITING = enum.auto()
  RUNNING = enum.auto()
  OVER = enum.auto()


@dataclasses.dataclass(slots=True, eq=False)
class _Cost:
  """The mean duration of a function; infinite before its first call."""

  seconds: float = math.inf

  def add(self, seconds: float) -> None:
    old = self.seconds
    new = seconds if old == math.inf else old + _NEWEST * (seconds - old)
    self.seconds = new


def _nothing() -> None:
  """Is handed to the loop where nobody waits for a result."""


@dataclasses.dataclass(slots=True, eq=False)
class _Job:
  """One call.

  Attributes:
    keep: hands its result to a loop with a logical clock, which was promised
      it, to keep the order of events; None on another loop.
  """

  fn: Callable[[], Any]
  cost: _Cost
  keep: Callable[..., object] | None
  future: asyncio.Future[tuple[Any, Exception | None]]
  state: _State = _State.WAITING

  def deliver(self, value: Any, error: Exception | None) -> None:
    """Wakes the caller unless it was cancelled; runs on its event loop."""
    # A pair, not set_exception: futures refuse StopIteration.
    if not self.future.done():
      self.future.set_result((value, error))


@dataclasses.dataclass(slots=True, eq=False)
class _Batch:
  """Calls that one thread makes one after the other.

  Attributes:
    seconds: that they are expected to take.
    jobs: that have not begun; deques may be used by several threads at once.
    done: results that the loop has not been given.
    has_begun: a thread has taken it.
    is_open: more calls may join.
    pending: calls whose callers wait.
    timer: of `ThreadPool._relieve`, while there are some.
  """

  loop: asyncio.AbstractEventLoop
  seconds: float = 0.0
  jobs: collections.deque[_Job] = dataclasses.field(
    default_factory=collections.deque
  )
  done: collections.deque[tuple[_Job, Any, Exception | None]] = (
    dataclasses.field(default_factory=collections.deque)
  )
  has_begun: bool = False
  is_open: bool = True
  pending: int = 0
  timer: asyncio.TimerHandle | None = None

  def deliver(self) -> None:
    """Has the loop take the results so far; called by any thread."""
    done = []
    with contextlib.suppress(IndexError):
      while True:
        done.append(self.done.popleft())
    with contextlib.suppress(RuntimeError):  # the event loop was closed
      if done and done[0][0].keep is None:
        self.loop.call_soon_threadsafe(_deliver, done)
        return
      for job, *result in done:
        job.keep(job.deliver, *result)


def _deliver(done: list[tuple[_Job, Any, Exception | None]]) -> None:
  for job, *result in done:
    job.deliver(*result)


class ThreadPool:
  """Daemon threads for blocking calls; usable from any event loop."""

  def __init__(self, *, size: int = 4, max_size: int = 32):
    """Starts no thread yet.

    Args:
      size: threads started by the first call.
      max_size: to which the pool grows when calls block for long; abandoned
        threads do not count.
    """
    self._size = size
    self._max_size = max_size
    self._batches: queue.SimpleQueue[_Batch] = queue.SimpleQueue()
    # The batch of each loop that was begun last.
    self._newest: dict[asyncio.AbstractEventLoop, _Batch] = {}
    self._costs: weakref.WeakKeyDictionary[Any, _Cost] = (
      weakref.WeakKeyDictionary()
    )
    # Of the two counts, of every job's state, and of joining a batch.
    self._lock = threading.Lock()
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
    promise = getattr(loop, "promise", None)
    job = _Job(
      functools.partial(fn, *args),
      self._cost(fn),
      promise and promise(loop.time() + _LOGICAL_S),
      loop.create_future(),
    )
    if self._num_threads < self._size:
      self._fill()
    batch = self._join(job, loop)
    try:
      value, error = await job.future
    except asyncio.CancelledError:
      self._abandon(job, batch)
      raise
    finally:
      self._leave(batch)
    if error is not None:
      raise error
    return value

  def abandoned(self) -> int:
    """Returns the number of abandoned calls so far."""
    return self._num_abandoned

  def _cost(self, fn: Callable[..., Any]) -> _Cost:
    """Returns the mean of a function or method; of others nothing is known."""
    function = getattr(fn, "__func__", fn)
    if not isinstance(function, types.FunctionType):
      return _Cost()
    return self._costs.setdefault(function, _Cost())

  def _join(self, job: _Job, loop: asyncio.AbstractEventLoop) -> _Batch:
    """Returns the batch that runs a job."""
    seconds, batch = job.cost.seconds, self._newest.get(loop)
    with self._lock:
      joins = batch is not None and batch.is_open
      if batch is None or not joins or batch.seconds + seconds > _BATCH_S:
        joins, batch = False, _Batch(loop)
      batch.jobs.append(job)
      batch.seconds += seconds
    if not joins:
      self._batches.put(batch)
      if seconds < _BATCH_S:
        self._newest[loop] = batch
    batch.pending += 1
    if batch.timer is None:
      batch.timer = loop.call_later(_PATIENCE_S, self._relieve, batch)
    return batch

  def _leave(self, batch: _Batch) -> None:
    """Counts a call that is over; the last one ends the batch."""
    batch.pending -= 1
    if batch.pending or batch.timer is None:
      return
    batch.timer.cancel()
    batch.timer = None
    if self._newest.get(batch.loop) is batch:
      del self._newest[batch.loop]

  def _fill(self) -> None:
    with self._lock:
      while self._num_threads < self._size:
        self._start_thread()

  def _relieve(self, batch: _Batch) -> None:
    """Finds a thread for calls that still wait."""
    batch.deliver()
    if batch.jobs:
      with self._lock:
        if self._num_threads < self._max_size:
          self._start_thread()
      if batch.has_begun:
        self._batches.put(batch)
    batch.timer = batch.loop.call_later(_PATIENCE_S, self._relieve, batch)

  def _abandon(self, job: _Job, batch: _Batch) -> None:
    with self._lock:
      if job.state is _State.RUNNING:
        self._num_abandoned += 1
        self._num_threads -= 1
        self._start_thread()
        self._batches.put(batch)  # The next one goes on with the rest.
      job.state = _State.OVER
    batch.deliver()
    if job.keep is not None:
      job.keep(_nothing)  # The thread will not, and a clock may wait for it.

  def _start_thread(self) -> None:
    self._num_threads += 1
    threading.Thread(target=self._work, daemon=True, name="environment").start()

  def _work(self) -> None:
    # No local variable holds a batch: an idle thread keeps no environment
    # alive.
    while self._run(self._batches.get()):
      pass

  def _run(self, batch: _Batch) -> bool:
    """Runs a batch; returns whether the thread still belongs to the pool."""
    batch.has_begun = True
    late_s = time.monotonic() + _BATCH_S
    while (job := self._next(batch)) is not None:
      if not self._run_job(job, batch):
        return False
      if time.monotonic() > late_s:
        batch.deliver()
    batch.deliver()
    return True

  def _next(self, batch: _Batch) -> _Job | None:
    """Takes the next job of a batch, or closes it."""
    with self._lock:
      if batch.jobs:
        return batch.jobs.popleft()
      batch.is_open = False
      return None

  def _run_job(self, job: _Job, batch: _Batch) -> bool:
    """Runs a call; returns whether the thread still belongs to the pool."""
    if not self._move(job, _State.WAITING, _State.RUNNING):
      return True
    start_s = time.monotonic()
    value, error = None, None
    try:
      value = job.fn()
    except Exception as e:
      error = e
    except BaseException as e:
      error = RuntimeError(f"a blocking call raised {e!r}")
    job.cost.add(time.monotonic() - start_s)
    if not self._move(job, _State.RUNNING, _State.OVER):
      return False
    batch.done.append((job, value, error))
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
