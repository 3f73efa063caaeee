"""Platform, device count and compilation cache, set before jax starts."""

import os
import pathlib

import jax

from rl.pools import placement

_COUNT = "--xla_force_host_platform_device_count"
_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_KEEP_ALL = (
  "jax_persistent_cache_min_compile_time_secs",
  "jax_persistent_cache_min_entry_size_bytes",
)


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
  if wanted.platform is not None:
    jax.config.update("jax_platforms", wanted.platform)
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
