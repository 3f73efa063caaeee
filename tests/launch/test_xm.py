"""launch.xm: a launch script of XManager, run by it where that is installed."""

import os
import subprocess
import sys

import pytest

from launch.report import log_check
from tests.helpers import commands, processes

SWEPT = """
from configs import guess_number_moe

get_config = guess_number_moe.get_config

def sweep():
  return {runs}
"""
# As XManager imports it: alone, with its directory in the first place.
IMPORTED = """
import sys
swept, empty, here = sys.argv[1:]
sys.path.insert(0, here)
import xm
sys.path.pop(0)
for words in xm.commands(f"{swept}:small", "out"):
  print(*words)
try:
  xm.commands(empty, "out")
except ValueError as error:
  print(error)
import http.client
"""
XMANAGER = os.environ.get("TWINMESH_XMANAGER")


@pytest.fixture(scope="module")
def listed(tmp_path_factory):
  """Lines for a config with an argument, and for one without variations."""
  directory = tmp_path_factory.mktemp("configs")
  runs = [{"seed": 3}, {"seed": 4, "rounds": 2}]
  (directory / "swept.py").write_text(SWEPT.format(runs=runs))
  (directory / "empty.py").write_text(SWEPT.format(runs=[]))
  here = commands.ROOT / "launch"
  done = subprocess.run(
    [sys.executable, "-c", IMPORTED, "swept.py", "empty.py", here],
    cwd=directory,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  return done.stdout.splitlines()


@pytest.mark.process
@pytest.mark.skipif(XMANAGER is not None, reason="XManager is installed")
def test_without_xmanager_it_says_what_to_install():
  command = ["-m", "launch.xm", "--config=FILE", "--workdir=DIR"]
  done = subprocess.run(
    [sys.executable, *command],
    cwd=commands.ROOT,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 2
  assert "launch.xm needs xmanager: pip install 'twinmesh[xm]'" in done.stderr


@pytest.mark.process
def test_each_variation_is_a_command_of_its_own(listed):
  start = "-m launch.train --config=swept.py:small --workdir=out"
  assert listed[:-1] == [
    f"{start}/run_000 --config.seed=3",
    f"{start}/run_001 --config.seed=4 --config.rounds=2",
  ]


@pytest.mark.process
def test_a_config_without_variations_says_so(listed):
  assert listed[-1] == "empty.py has no sweep() that lists runs; add one"


@pytest.mark.slow
@pytest.mark.skipif(XMANAGER is None, reason="without xmanager: `make xm`")
@pytest.mark.parametrize("rounds", ["1", "one"])
def test_xmanager_runs_every_variation(tmp_path, rounds):
  assert XMANAGER is not None
  small = commands.TINY | {"rounds": rounds}
  config = tmp_path / "swept.py"
  runs = [small | {"seed": seed} for seed in (1, 2)]
  config.write_text(SWEPT.format(runs=runs))
  done = subprocess.run(
    [
      *(XMANAGER, "launch", "launch/xm.py", "--", f"--config={config}"),
      *(f"--workdir={tmp_path / 'out'}", "--parallel=2"),
    ],
    cwd=commands.ROOT,
    # It keeps a list of experiments there.
    env={**os.environ, "HOME": str(tmp_path)},
    capture_output=True,
    text=True,
    timeout=processes.DEADLINE_S,
  )
  if rounds == "one":
    assert done.returncode == 1
    assert "--config.rounds=one: expected int" in done.stdout + done.stderr
    assert "a run has failed, and says why above" in done.stderr
    assert f"--workdir={tmp_path / 'out'} --table names it" in done.stderr
    return
  assert done.returncode == 0, done.stdout + done.stderr
  for number in range(2):
    run_dir = tmp_path / "out" / f"run_{number:03d}"
    assert processes.rounds(run_dir) == 1
    assert log_check.of_run(run_dir).violations == []
