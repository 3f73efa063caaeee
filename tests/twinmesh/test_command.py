"""The command `twinmesh` runs the modules of its table."""

import importlib.util
import os
import subprocess
import sys

import pytest

from twinmesh import command, top_packages


@pytest.fixture
def twinmesh(tmp_path):
  """Returns a function that runs the command outside of the checkout."""

  def run(*arguments):
    return subprocess.run(
      [sys.executable, "-m", "twinmesh", *arguments],
      cwd=tmp_path,
      env={**os.environ, "PYTHONPATH": str(top_packages.ROOT)},
      capture_output=True,
      text=True,
    )

  return run


@pytest.mark.parametrize("name", sorted(command.COMMANDS))
def test_every_command_is_a_module(name):
  module, _ = command.COMMANDS[name]
  assert importlib.util.find_spec(module) is not None


@pytest.mark.process
def test_without_a_command_all_are_listed(twinmesh):
  listed = twinmesh()
  assert listed.returncode == 0
  for name, (_, summary) in command.COMMANDS.items():
    assert f"  {name} " in listed.stdout
    assert summary in listed.stdout
  assert twinmesh("--help").stdout == listed.stdout


@pytest.mark.process
@pytest.mark.parametrize("arguments", ["--help", "explain", "host --help"])
def test_a_reader_that_is_gone_ends_a_list_quietly(arguments):
  read, write = os.pipe()
  os.close(read)
  with os.fdopen(write, "wb") as gone:
    done = subprocess.run(
      [sys.executable, "-m", "twinmesh", *arguments.split()],
      env={**os.environ, "PYTHONPATH": str(top_packages.ROOT)},
      stdout=gone,
      stderr=subprocess.PIPE,
    )
  assert done.stderr == b""


@pytest.mark.process
def test_a_command_has_the_flags_and_errors_of_its_module(twinmesh):
  wrong = twinmesh("plan", "--config=missing.py")
  assert wrong.returncode == 2
  assert wrong.stderr.startswith("error: --config=missing.py: no such file")


@pytest.mark.process
@pytest.mark.parametrize(
  ("name", "way_out"),
  [("trian", "did you mean train?"), ("x", "twinmesh --help lists all")],
)
def test_an_unknown_command_gets_a_way_out(twinmesh, name, way_out):
  wrong = twinmesh(name)
  assert wrong.returncode == 2
  assert wrong.stderr == (
    f"error: there is no command {name}; {way_out}\n"
    "more: twinmesh explain TM-C04\n"
  )


@pytest.mark.process
def test_versions_are_told_with_the_place(twinmesh):
  told = twinmesh("--version").stdout
  assert told.startswith("twinmesh ")
  assert str(top_packages.ROOT) in told
