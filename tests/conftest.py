"""Set before jax is imported, also for the processes that tests start.

Eight CPU devices, because that is what shardings are tested on; a compilation
cache that outlives the run, because most of a test's time is XLA; and machine
code as it comes, because a program runs only a few times here and to optimise
it took longer than all the rest. XLA's own passes run as ever.
"""

import gc
import os
import pathlib

import pytest

_DEVICES = "--xla_force_host_platform_device_count"

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
  os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}=8".strip()
  )
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

_caches = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
os.environ.setdefault(
  "JAX_COMPILATION_CACHE_DIR", str(pathlib.Path(_caches, "twinmesh", "xla"))
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


@pytest.fixture(scope="module", autouse=True)
def _programs():
  """Lets go of a file's programs at its end.

  Each maps memory, and a process may have 65,530 such maps: XLA dies of more.
  """
  yield
  import jax

  jax.clear_caches()
  gc.collect()
