"""Packages of others in the place of ours are named."""

import os
import pathlib
import subprocess
import sys

import pytest

from twinmesh import top_packages


def test_the_packages_are_those_of_one_directory():
  top_packages.check()


def test_a_package_elsewhere_is_named_with_its_place(tmp_path, monkeypatch):
  (tmp_path / "one_of_others").mkdir()
  monkeypatch.syspath_prepend(tmp_path)
  place = f"the package one_of_others is {tmp_path.resolve()}/one_of_others,"
  with pytest.raises(top_packages.Shadowed, match=place):
    top_packages.check(names=["rl", "one_of_others"])


def test_a_package_that_is_missing_is_named(tmp_path):
  with pytest.raises(top_packages.Shadowed, match="nowhere_at_all is missing"):
    top_packages.check(names=["nowhere_at_all"])


@pytest.mark.process
@pytest.mark.parametrize("module", ["launch.train", "twinmesh"])
@pytest.mark.parametrize("form", ["models.py", "models/__init__.py"])
def test_a_command_names_the_package_that_shadows_ours(tmp_path, module, form):
  file = tmp_path / form
  file.parent.mkdir(exist_ok=True)
  file.touch()
  ended = subprocess.run(
    [sys.executable, "-m", module, "train", "--help"],
    cwd=tmp_path,
    env={**os.environ, "PYTHONPATH": str(top_packages.ROOT)},
    capture_output=True,
    text=True,
  )
  place = pathlib.Path(tmp_path, form.partition("/")[0]).resolve()
  assert ended.returncode == 1
  assert f"the package models is {place}, where" in ended.stderr
