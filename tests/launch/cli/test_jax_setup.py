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
import jax
from launch.cli import jax_setup
jax_setup.keep_compiled()
print(jax.config.jax_persistent_cache_min_compile_time_secs,
      jax.config.jax_persistent_cache_min_entry_size_bytes)
"""


def printed(program, environment) -> list[float]:
  """Returns the numbers that a program prints."""
  result = subprocess.run(
    [sys.executable, "-c", program],
    env=environment,
    capture_output=True,
    text=True,
    check=True,
  )
  return [float(x) for x in result.stdout.split()]


@pytest.mark.parametrize(
  ("given", "expected"),
  [
    ({}, [0.0, 0.0]),
    ({_SECONDS: "2.5"}, [2.5, 0.0]),
    ({_BYTES: "4096"}, [0.0, 4096.0]),
  ],
)
def test_the_environment_wins_over_what_is_kept(given, expected):
  clean = {k: v for k, v in os.environ.items() if k not in (_SECONDS, _BYTES)}
  assert printed(_PROGRAM, clean | given) == expected


_FAULTS = """
import ctypes, resource
from launch.cli import jax_setup
from rl.pools import placement

jax_setup.prepare(placement.Placement(platform="cpu"))
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


@pytest.mark.skipif(
  platform.libc_ver()[0] != "glibc", reason="other libraries have no mallopt"
)
@pytest.mark.parametrize(
  ("given", "is_kept"), [({}, True), ({"MALLOC_TOP_PAD_": "0"}, False)]
)
def test_memory_that_a_program_frees_is_kept_for_the_next(given, is_kept):
  clean = {k: v for k, v in os.environ.items() if "MALLOC_" not in k}
  (faults,) = printed(_FAULTS, clean | given)
  # Four times 33 MiB: at least 4 x 16 pages even if the kernel's have 2 MiB.
  assert (faults < 4 * 16) == is_kept


_FILES = """
import resource
from launch.cli import jax_setup
from rl.pools import placement

_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
jax_setup.prepare(placement.Placement(platform="cpu"))
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0] - min(hard, 1 << 16))
"""


def test_as_many_files_may_be_open_as_the_system_allows():
  assert printed(_FILES, os.environ) == [0]
