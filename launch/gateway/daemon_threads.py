"""Threads for calls that may hang, which do not hold up a process's end."""

import functools
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent import futures
from typing import Any, ParamSpec, TypeVar

_T = TypeVar("_T")
_P = ParamSpec("_P")
_Call = tuple[futures.Future[Any], Callable[[], Any]]


class DaemonThreads(futures.Executor):
  """Makes calls in a few threads, in the order in which they came.

  The pools of concurrent.futures join their threads at exit, so one call that
  hangs would keep the process alive; those of `envs.threads` replace the thread
  of a call that nobody waits for, so that clients who leave could have any
  number run at once. One event loop submits.
  """

  def __init__(self, number: int, name: str):
    self._number = number
    self._name = name
    self._num_started = 0
    self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
    weakref.finalize(self, _end, self._calls, number).atexit = False

  def submit(
    self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs
  ) -> futures.Future[_T]:
    """Returns the future of a call, which may be cancelled until it begins."""
    future: futures.Future[_T] = futures.Future()
    self._calls.put((future, functools.partial(fn, *args, **kwargs)))
    if self._num_started < self._number:
      name = f"{self._name}-{self._num_started}"
      self._num_started += 1
      threading.Thread(
        target=_work, args=(self._calls,), name=name, daemon=True
      ).start()
    return future


def _work(calls: queue.SimpleQueue[_Call | None]) -> None:
  while (call := calls.get()) is not None:
    _make(*call)
    del call  # It would keep arguments and result alive until the next one.


def _make(future: futures.Future[Any], function: Callable[[], Any]) -> None:
  if not future.set_running_or_notify_cancel():
    return
  try:
    result = function()
  except BaseException as error:
    future.set_exception(error)
  else:
    future.set_result(result)


def _end(calls: queue.SimpleQueue[_Call | None], number: int) -> None:
  for _ in range(number):
    calls.put(None)
