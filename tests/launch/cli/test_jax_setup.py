"""Settings of the process environment are left alone."""

import os
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
  result = subprocess.run(
    [sys.executable, "-c", _PROGRAM],
    env=clean | given,
    capture_output=True,
    text=True,
    check=True,
  )
  assert [float(x) for x in result.stdout.split()] == expected
