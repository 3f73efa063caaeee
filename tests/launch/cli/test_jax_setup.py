"""The environment wins; freed memory is kept, and many files may be open."""

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

_SECONDS = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
_BYTES = "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"
_PROGRAM = """
import ctypes, resource
import jax
from launch.cli import jax_setup
from rl.pools import placement

_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
jax_setup.prepare(placement.Placement(platform="cpu"))
print(jax.config.jax_persistent_cache_min_compile_time_secs,
      jax.config.jax_persistent_cache_min_entry_size_bytes)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0] - min(hard, 1 << 16))
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
size = 33 << 20

def pages():
  return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def touch():
  block = ctypes.c_void_p(libc.malloc(ctypes.c_size_t(size)))
  ctypes.memset(block, 1, size)
  libc.free(block)

libc.malloc(ctypes.c_size_t(size // 2))  # The heap grows, as for any program.
touch()
before = pages()
for _ in range(4):
  touch()
print(pages() - before)
"""


# Each may be given where another is not: one program says it for all.
@pytest.mark.parametrize(
  ("given", "kept", "keeps_memory"),
  [
    ({_SECONDS: "2.5"}, [2.5, 0.0], True),
    ({_BYTES: "4096", "MALLOC_TOP_PAD_": "0"}, [0.0, 4096.0], False),
  ],
)
def test_the_environment_wins_over_what_is_set(given, kept, keeps_memory):
  clean = {
    name: value
    for name, value in os.environ.items()
    if name not in (_SECONDS, _BYTES) and "MALLOC_" not in name
  }
  result = subprocess.run(
    [sys.executable, "-c", _PROGRAM],
    env=clean | given,
    capture_output=True,
    text=True,
    check=True,
  )
  *cache, left, faults = map(float, result.stdout.split())
  assert cache == kept
  # As many files may be open as the system allows.
  assert left == 0
  if platform.libc_ver()[0] == "glibc":  # Other libraries have no mallopt.
    # Four times 33 MiB: at least 4 x 16 pages even if the kernel's have 2 MiB.
    assert (faults < 4 * 16) == keeps_memory
