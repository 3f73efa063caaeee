"""Undoes the changes that starting sglang-jax makes to the process.

It takes over signals (a child's exit status is lost, SIGQUIT kills every
child), the policy of event loops, the root logger, seeds, limits, jax's cache
of compilations and the resource tracker of multiprocessing, and at the exit it
kills child processes.
"""

import asyncio
import contextlib
import logging
import os
import random
import resource
import signal
import threading
from collections.abc import Iterator
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
_PLATFORMS = "JAX_PLATFORMS"
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
  root, tracker = logging.getLogger(), resource_tracker._resource_tracker
  with contextlib.ExitStack() as undo:
    for number in _SIGNALS:
      handler = signal.getsignal(number)
      undo.callback(signal.signal, number, handler or signal.SIG_DFL)
    policy = asyncio.get_event_loop_policy()
    undo.callback(asyncio.set_event_loop_policy, policy)
    undo.callback(setattr, root, "handlers", [*root.handlers])
    undo.callback(root.setLevel, root.level)
    undo.callback(random.setstate, random.getstate())
    undo.callback(np.random.set_state, np.random.get_state())
    for kind in _LIMITS:
      undo.callback(resource.setrlimit, kind, resource.getrlimit(kind))
    for name in _COMPILATION:
      undo.callback(jax.config.update, name, getattr(jax.config, name))
    for owner, name in ((threading, "_register_atexit"), (tracker, "_fd")):
      undo.callback(setattr, owner, name, getattr(owner, name))
    if (platforms := os.environ.get(_PLATFORMS)) is None:
      undo.callback(os.environ.pop, _PLATFORMS, None)
    else:
      undo.callback(os.environ.__setitem__, _PLATFORMS, platforms)
    os.environ[_PLATFORMS] = platform
    yield


def close_sockets(owner: Any, kind: type) -> None:
  """Closes the unused sockets of an object.

  Left open, they block the thread that collects them as garbage.

  Args:
    kind: zmq.Socket.
  """
  for value in list(vars(owner).values()):
    if isinstance(value, kind):
      value.context.destroy(linger=0)
