"""Platform, memory, garbage, files and compilation cache of a command."""

import contextlib
import ctypes
import gc
import os
import pathlib
import resource

import jax

from rl.pools import placement

_COUNT = "--xla_force_host_platform_device_count"
_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
# More would slow down programs that close all that they might have open.
_OPEN_FILES = 1 << 16
_KEEP_ALL = (
  "jax_persistent_cache_min_compile_time_secs",
  "jax_persistent_cache_min_entry_size_bytes",
)
_MALLOC = {
  # Parameters of glibc's mallopt by the name of its variable.
  "MALLOC_TRIM_THRESHOLD_": (-1, 512 << 20),
  "MALLOC_TOP_PAD_": (-2, 64 << 20),
  "MALLOC_MMAP_THRESHOLD_": (-3, 32 << 20),
}


def prepare(wanted: placement.Placement) -> None:
  """Makes jax offer the devices of a placement and keep compiled programs.

  On the CPU it gets as many virtual devices as the meshes need, unless
  XLA_FLAGS already says how many. Does nothing to a backend that is up.
  """
  given = os.environ.get("XLA_FLAGS", "")
  if _COUNT not in given:
    os.environ["XLA_FLAGS"] = f"{given} {_COUNT}={wanted.num_devices}".strip()
  # Of a GPU jax would take three quarters, and leave the rest to nobody.
  os.environ.setdefault(_FRACTION, "0.95")
  if wanted.own_platform is not None:
    jax.config.update("jax_platforms", wanted.own_platform)
  _keep_memory()
  _search_less_garbage()
  _open_more_files()
  keep_compiled()


def keep_compiled() -> None:
  """Shares compiled programs between runs.

  JAX_COMPILATION_CACHE_DIR and JAX_PERSISTENT_CACHE_* of the environment win.
  """
  if jax.config.jax_compilation_cache_dir is None:
    cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    directory = pathlib.Path(cache) / "twinmesh" / "xla"
    jax.config.update("jax_compilation_cache_dir", str(directory))
  for name in _KEEP_ALL:
    if name.upper() not in os.environ:
      jax.config.update(name, 0)


def _keep_memory() -> None:
  """Keeps memory that programs on the CPU free, for those that come next.

  XLA allocates what a program needs at each call. Beyond some 32 MB glibc gets
  it from the kernel, page by page, and gives it back after the call: a sixth of
  the time of a training step. Variables MALLOC_* of the environment win.
  """
  mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
  for name, (parameter, value) in _MALLOC.items():
    if mallopt is not None and name not in os.environ:
      mallopt(parameter, value)


def _search_less_garbage() -> None:
  """Has Python look for cycles less often, and never in what exists by now.

  Tracing and play make millions of objects, few of them in cycles: searching as
  often as by default took a twentieth of the event loop's time.
  """
  gc.freeze()
  gc.set_threshold(10_000)


def _open_more_files() -> None:
  """Takes more open files than the usual 1024, where the system allows them.

  A client of a server has one, and an agent or environment in a process of its
  own some.
  """
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  most = min(hard, _OPEN_FILES) if hard >= 0 else _OPEN_FILES
  if 0 <= soft < most:  # A negative one is none.
    with contextlib.suppress(OSError, ValueError):  # macOS allows fewer.
      resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
