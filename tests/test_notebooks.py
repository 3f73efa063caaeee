"""Every notebook runs from top to bottom as a script."""

import os
import pathlib
import subprocess
import sys

import pytest

from tests.helpers import machine_speed

pytestmark = pytest.mark.process

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path):
  environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
  result = subprocess.run(
    [sys.executable, str(path)],
    cwd=ROOT,
    env=environment,
    capture_output=True,
    text=True,
    timeout=machine_speed.scaled(240),
    stdin=subprocess.DEVNULL,
    check=False,
  )
  assert result.returncode == 0, result.stderr
  if path.stem == "first_steps":
    assert "served version: 1" in result.stdout
    assert "sampled by version [1, 1]" in result.stdout
