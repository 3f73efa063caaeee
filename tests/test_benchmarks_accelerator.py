"""The measurements of an accelerator, at a small size on the CPU."""

import json
import os
import subprocess
import sys

import pytest

from tests.helpers import packages

ROWS = {
  "start",
  "one_device",
  "train",
  "experts",
  "attention",
  "pages",
  "decode",
  "prefill",
  "publish",
}


@pytest.mark.slow
def test_one_command_measures_every_row_against_the_devices_own_rates():
  done = subprocess.run(
    [
      *(sys.executable, "-m", "benchmarks.accelerator"),
      *("--tiny", "--repeats=1"),
    ],
    cwd=packages.ROOT,
    env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  found = json.loads(done.stdout.splitlines()[-1])
  assert found["matmul_flops_s"] > 0
  assert found["copy_bytes_s"] > 0
  assert {row["name"] for row in found["rows"]} == ROWS
  for row in found["rows"]:
    assert "error" not in row, row
    assert row["value"] >= 0


@pytest.mark.slow
def test_tilings_of_every_kernel_are_compared():
  done = subprocess.run(
    [
      *(sys.executable, "-m", "benchmarks.kernel_tilings"),
      *("--tiny", "--repeats=1"),
    ],
    cwd=packages.ROOT,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  rows = json.loads(done.stdout.splitlines()[-1])["rows"]
  kinds = {row["case"].split(",")[0] for row in rows}
  assert kinds == {"pages", "product", "outer"}
  assert all(row["rate"] > 0 for row in rows), rows
