"""Describes the machine that a benchmark ran on, in one line."""

import os
import pathlib
import platform

import jax


def describe() -> str:
  """Returns processor, cores, Python, jax and backend."""
  return (
    f"{_processor()}, {os.cpu_count()} cores, Python "
    f"{platform.python_version()}, jax {jax.__version__} on "
    f"{jax.default_backend()}"
  )


def _processor() -> str:
  try:
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
  except OSError:
    return platform.processor() or platform.machine()
  names = (line.split(":", 1)[1].strip() for line in lines if "model name" in
           line)  # fmt: skip
  return next(names, platform.machine())
