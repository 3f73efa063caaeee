"""A package that no extra has brought is named with its extra."""

import os
import pathlib
import subprocess
import sys

import pytest

from twinmesh import extras, top_packages

SETUP = pathlib.Path(top_packages.ROOT, "setup.py").read_text()


@pytest.mark.parametrize("package", sorted(extras.EXTRAS))
def test_an_extra_brings_its_package(package):
  # Read, not run: setuptools is no part of the environment.
  assert f'"{extras.EXTRAS[package]}": ' in SETUP
  assert package.replace("_", "-") in SETUP


def test_other_errors_have_no_extra():
  assert extras.way_out(ModuleNotFoundError(name="mine")) == ""
  assert extras.way_out(ImportError(name="uvicorn")) == ""
  assert extras.way_out(None) == ""


@pytest.mark.process
@pytest.mark.parametrize(
  "command", [["launch.serve"], ["twinmesh", "serve"]], ids=["module", "name"]
)
def test_a_command_without_its_extra_ends_with_one_line(tmp_path, command):
  # A finder before all others stands in for an environment without uvicorn.
  (tmp_path / "sitecustomize.py").write_text(
    "import sys\n"
    "class Without:\n"
    "  def find_spec(self, name, path=None, target=None):\n"
    "    if name.split('.')[0] == 'uvicorn':\n"
    "      raise ModuleNotFoundError(name=name)\n"
    "sys.meta_path.insert(0, Without())\n"
  )
  paths = [str(tmp_path), str(top_packages.ROOT)]
  ended = subprocess.run(
    [sys.executable, "-m", *command, "--help"],
    cwd=tmp_path,
    env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    capture_output=True,
    text=True,
  )
  assert ended.returncode == 1
  assert ended.stderr == (
    "error: this needs the package uvicorn: pip install 'twinmesh[serve]'\n"
    "more: twinmesh explain TM-X01\n"
  )
