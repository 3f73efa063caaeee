"""Undoes the changes that starting sglang-jax makes to the process.

It takes over signals (a child's exit status is lost, SIGQUIT kills every
child), the policy of event loops, the root logger, seeds, limits, jax's cache
of compilations and the resource tracker of multiprocessing, and at the exit it
kills child processes.
"""

import asyncio
import atexit
import contextlib
import logging
import os
import random
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from typing import Any

import jax
import numpy as np

_COMPILATION = (
  "jax_compilation_cache_dir",
  "jax_default_matmul_precision",
  "jax_persistent_cache_enable_xla_caches",
  "jax_persistent_cache_min_compile_time_secs",
  "jax_persistent_cache_min_entry_size_bytes",
)
_LIMITS = (resource.RLIMIT_NOFILE, resource.RLIMIT_STACK)
_SIGNALS = (signal.SIGCHLD, signal.SIGQUIT, signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def contained(platform: str) -> Iterator[None]:
  """Undoes the effects of imports and constructors of sglang-jax at its end.

  Args:
    platform: of the devices. JAX_PLATFORMS names it meanwhile, because
      sglang-jax compares the two.

  Raises:
    RuntimeError: called outside the main thread, which alone handles signals.
  """
  if threading.current_thread() is not threading.main_thread():
    raise RuntimeError(
      "sglang-jax handles signals when it starts; start it in the main thread"
    )
  with contextlib.ExitStack() as undo:
    for put_back in _PARTS:
      undo.callback(put_back())
    undo.callback(_attribute(threading, "_register_atexit"))
    undo.callback(_attribute(resource_tracker._resource_tracker, "_fd"))
    undo.callback(_variable("JAX_PLATFORMS"))
    os.environ["JAX_PLATFORMS"] = platform
    yield


def stays_alive(engine: Any) -> None:
  """Keeps the exit of this process from killing its children."""
  atexit.unregister(engine.shutdown)


def close_sockets(owner: Any, kind: type) -> None:
  """Closes the unused sockets of an object.

  Left open, they block the thread that collects them as garbage.

  Args:
    kind: zmq.Socket.
  """
  for value in list(vars(owner).values()):
    if isinstance(value, kind):
      value.context.destroy(linger=0)


def _signals() -> Callable[[], None]:
  before = {number: signal.getsignal(number) for number in _SIGNALS}

  def put_back() -> None:
    for number, handler in before.items():
      signal.signal(number, signal.SIG_DFL if handler is None else handler)

  return put_back


def _event_loops() -> Callable[[], None]:
  policy = asyncio.get_event_loop_policy()
  return lambda: asyncio.set_event_loop_policy(policy)


def _logging() -> Callable[[], None]:
  root = logging.getLogger()
  handlers, level = list(root.handlers), root.level

  def put_back() -> None:
    root.handlers[:] = handlers
    root.setLevel(level)

  return put_back


def _numbers() -> Callable[[], None]:
  ours, numpys = random.getstate(), np.random.get_state()

  def put_back() -> None:
    random.setstate(ours)
    np.random.set_state(numpys)

  return put_back


def _limits() -> Callable[[], None]:
  before = {kind: resource.getrlimit(kind) for kind in _LIMITS}

  def put_back() -> None:
    for kind, limits in before.items():
      resource.setrlimit(kind, limits)

  return put_back


def _compilation() -> Callable[[], None]:
  before = {name: getattr(jax.config, name) for name in _COMPILATION}

  def put_back() -> None:
    for name, value in before.items():
      jax.config.update(name, value)

  return put_back


def _attribute(owner: Any, name: str) -> Callable[[], None]:
  value = getattr(owner, name)
  return lambda: setattr(owner, name, value)


def _variable(name: str) -> Callable[[], None]:
  value = os.environ.get(name)

  def put_back() -> None:
    if value is None:
      os.environ.pop(name, None)
    else:
      os.environ[name] = value

  return put_back


_PARTS = (_signals, _event_loops, _logging, _numbers, _limits, _compilation)
