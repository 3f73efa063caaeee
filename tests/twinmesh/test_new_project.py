"""A new project works before a line of it is changed."""

import ast
import os
import pathlib
import subprocess
import sys

import pytest

from twinmesh import new_project, top_packages

SMALL = [
  "--config.rounds=1",
  "--config.warm_start=none",
  "--config.model.num_layers=1",
  "--config.overlap.groups_per_round=8",
  "--config.evaluation.episodes=8",
]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
  directory = tmp_path_factory.mktemp("projects") / "mine"
  new_project.write(directory)
  return directory


def python(directory: pathlib.Path, *arguments: str):
  return subprocess.run(
    [sys.executable, "-m", *arguments],
    cwd=directory,
    env={**os.environ, "PYTHONPATH": str(top_packages.ROOT)},
    capture_output=True,
    text=True,
  )


def test_a_project_has_a_task_a_config_and_tests(project):
  assert sorted(file.name for file in project.iterdir()) == [
    ".gitignore",
    "README.md",
    "config.py",
    "task.py",
    "test_task.py",
  ]
  assert (project / "README.md").read_text().startswith("# mine\n")


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_nothing_is_overwritten(tmp_path, kind):
  taken = tmp_path / "taken"
  if kind == "file":
    taken.touch()
  else:
    taken.mkdir()
    (taken / "mine.py").touch()
  with pytest.raises(new_project.NotNew, match="choose another name"):
    new_project.write(taken)


def test_any_name_of_a_directory_gives_a_config_that_can_be_read(tmp_path):
  new_project.write(tmp_path / 'a"""b\\')
  text = (tmp_path / 'a"""b\\' / "config.py").read_text()
  docstring = ast.get_docstring(ast.parse(text)) or ""
  assert docstring.startswith("The run of a___b_: ")


@pytest.mark.process
def test_the_command_says_what_comes_next(tmp_path):
  done = python(tmp_path, "twinmesh", "new", "my first")
  assert done.returncode == 0, done.stderr
  assert "  cd 'my first'\n  twinmesh try --config=config.py\n" in done.stdout
  again = python(tmp_path, "twinmesh", "new", "my first")
  assert again.returncode == 2
  assert again.stderr.startswith("error: my first holds .gitignore; choose")


@pytest.mark.slow
@pytest.mark.parametrize(
  "command",
  [
    ["pytest", "-q", "-p", "no:cacheprovider"],
    ["twinmesh", "try", "--config=config.py"],
    ["twinmesh", "train", "--config=config.py", "--workdir=run", *SMALL],
    ["ruff", "check", "--isolated", "--select=E,F,I,B", "."],
  ],
  ids=lambda command: command[1],
)
def test_the_files_of_a_project_work(project, command):
  done = python(project, *command)
  assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_run_of_a_project_outlives_its_files(tmp_path):
  new_project.write(tmp_path / "mine")
  train = ["twinmesh", "train", "--config=mine/config.py", "--workdir=run"]
  assert python(tmp_path, *train, *SMALL).returncode == 0
  (tmp_path / "mine/task.py").unlink()
  done = python(tmp_path, "twinmesh", "evaluate", "--run=run", "--episodes=4")
  assert "greater after 1 rounds" in done.stdout, done.stderr
