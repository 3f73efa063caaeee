"""Modules beside a config file run, and are kept, as the file itself."""

import json
import pathlib
import shutil
import sys

import pytest

from launch.cli import config_file, flags, known_programs, modules_beside
from rl.settings import overrides

CONFIG = """
import dataclasses

import beside_task

def get_config():
  return Run(task=beside_task.Task(size=3))

@dataclasses.dataclass(frozen=True)
class Run:
  task: beside_task.Task
"""
TASK = """
import dataclasses

from beside_parts import sizes

@dataclasses.dataclass(frozen=True)
class Task:
  size: int = sizes.SMALLEST
"""


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
  """Forgets after each test, as another process would not know them."""
  monkeypatch.setattr(sys, "path", [*sys.path])
  monkeypatch.setattr(modules_beside, "_looked", [])
  yield
  forget()


def forget():
  for name in [*sys.modules]:
    if name.startswith(("beside_", "_config_run")):
      del sys.modules[name]


def project(folder: pathlib.Path, smallest: int = 1) -> pathlib.Path:
  (folder / "beside_parts").mkdir(parents=True)
  (folder / "beside_parts/sizes.py").write_text(f"SMALLEST = {smallest}\n")
  (folder / "beside_task.py").write_text(TASK)
  (folder / "run.py").write_text(CONFIG)
  return folder / "run.py"


def keep(tree, folder: pathlib.Path) -> pathlib.Path:
  data = config_file.to_json(tree)
  known_programs.remember(data)
  file = folder / "config.json"
  file.write_text(json.dumps(data))
  return file


def test_what_a_config_imports_from_beside_it_is_kept(tmp_path):
  file = project(tmp_path / "mine")
  kept = json.loads(keep(flags.load(str(file)), tmp_path).read_text())
  # The class of a setting lies in one of them, and that imports another.
  assert sorted(kept["config_files"]) == [
    "_config_run",
    "beside_parts.sizes",
    "beside_task",
  ]
  entry = kept["config_files"]["beside_task"]
  assert entry == {
    "path": str(file.with_name("beside_task.py").resolve()),
    "lines": TASK.splitlines(),
  }


def test_what_is_kept_is_enough_when_the_files_are_gone(tmp_path):
  file = project(tmp_path / "mine", smallest=7)
  tree = flags.load(str(file))
  kept = keep(tree, tmp_path)
  data = config_file.to_json(tree)
  shutil.rmtree(file.parent)
  forget()
  again = config_file.read_json(kept)
  assert again.task.size == 3
  assert type(again.task)().size == 7
  # It can be kept once more, as a run that goes on does.
  assert config_file.to_json(again) == data


def test_later_edits_do_not_change_what_a_run_was(tmp_path):
  file = project(tmp_path / "mine")
  kept = keep(flags.load(str(file)), tmp_path)
  (tmp_path / "mine/beside_parts/sizes.py").write_text("SMALLEST = 900\n")
  assert type(flags.load(str(file)).task)().size == 900
  assert type(config_file.read_json(kept).task)().size == 1


def test_a_run_that_goes_on_may_have_new_code_beside_it(tmp_path):
  file = project(tmp_path / "mine")
  kept = keep(flags.load(str(file)), tmp_path)
  (tmp_path / "mine/beside_parts/sizes.py").write_text("SMALLEST = 900\n")
  new = flags.load(str(file))
  assert config_file.read_json(kept, as_kept=False) == new


def test_each_config_has_the_modules_beside_it(tmp_path):
  first = flags.load(str(project(tmp_path / "a", smallest=1)))
  second = flags.load(str(project(tmp_path / "b", smallest=20)))
  assert (type(first.task)().size, type(second.task)().size) == (1, 20)
  again = flags.load(str(tmp_path / "a/run.py"))
  assert type(again.task)().size == 1


def test_a_module_that_did_not_change_runs_once(tmp_path):
  file = project(tmp_path / "mine")
  assert type(flags.load(str(file)).task) is type(flags.load(str(file)).task)


def test_a_library_of_the_same_name_is_never_replaced(tmp_path):
  (tmp_path / "json.py").write_text("dumps = None\n")
  (tmp_path / "run.py").write_text(
    "import dataclasses, json\n"
    "@dataclasses.dataclass(frozen=True)\n"
    "class Run:\n  x: str = json.dumps({})\n"
    "def get_config():\n  return Run()\n"
  )
  tree = flags.load(str(tmp_path / "run.py"))
  assert tree.x == "{}"
  assert [*config_file.to_json(tree)["config_files"]] == ["_config_run"]


@pytest.mark.parametrize("name", ["json", "rl.mine"])
def test_a_kept_module_cannot_take_the_place_of_another(tmp_path, name):
  entry = {"path": "/x/json.py", "lines": ["x = 1"]}
  data = {"class": "x.Y", "config_files": {name: entry}}
  known_programs.remember(data)
  (tmp_path / "config.json").write_text(json.dumps(data))
  with pytest.raises(overrides.SettingError, match=f"a module {name}, which"):
    config_file.read_json(tmp_path / "config.json")


def test_a_kept_module_that_fails_names_its_line(tmp_path):
  file = project(tmp_path / "mine")
  kept = keep(flags.load(str(file)), tmp_path)
  data = json.loads(kept.read_text())
  data["config_files"]["beside_parts.sizes"]["lines"] = ["", "SMALLEST = x"]
  known_programs.remember(data)
  kept.write_text(json.dumps(data))
  forget()
  with pytest.raises(overrides.SettingError) as error:
    config_file.read_json(kept)
  assert "sizes.py:2: NameError: name 'x' is not defined" in str(error.value)
