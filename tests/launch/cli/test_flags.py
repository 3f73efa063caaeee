"""The command line of a run, in this process and in a real one."""

import json
import os
import pathlib
import re
import subprocess
import sys
import threading

import pytest
from absl import flags as absl_flags
from absl.testing import flagsaver

from launch.cli import flags, parent
from rl.settings import overrides
from tests.helpers import machine_speed

ROOT = pathlib.Path(flags.__file__).parents[2]

CONFIG = """
import dataclasses

@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollout:
  group_size: int = 8
  greedy: bool = False
  offset: int = 0
  limit: int | None = 7

@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  rollout: Rollout = Rollout()
  name: str = "a"

  def validate(self):
    if self.rollout.group_size < 2:
      raise ValueError(
        f"group_size={self.rollout.group_size} must be at least 2"
      )

def get_config(name="a"):
  return Run(name=name)

def sweep():
  for size in (2, 4):
    yield {"rollout.group_size": size, "rollout.greedy": True}
"""

MAIN = """
import sys
from absl import app
from absl import flags as absl_flags
from launch.cli import flags

WORKDIR = absl_flags.DEFINE_string("workdir", None, "Where to write.")

def main(argv):
  with flags.exit_on_setting_error():
    tree = flags.load_from_command_line()
  print(tree.rollout, WORKDIR.value, argv[1:])
  assert "jax" not in sys.modules

app.run(main, flags_parser=flags.parse)
"""


@pytest.fixture
def config(tmp_path):
  file = tmp_path / "small.py"
  file.write_text(CONFIG)
  return str(file)


@pytest.mark.process
def test_a_program_takes_settings_in_every_form(tmp_path, config):
  main = tmp_path / "main.py"
  main.write_text(MAIN)
  arguments = [
    f"--config={config}",
    "--config.rollout.group_size=3",
    "--config.rollout.greedy",
    "--workdir=out",
    "--config.rollout.offset",
    "-1",
    "left",
    "-config.rollout.group_size=4",
    # Flags of absl itself are left to it.
    "--x=1",
    "--undefok=x",
  ]
  done = subprocess.run(
    [sys.executable, str(main), *arguments],
    env={"PYTHONPATH": str(ROOT)},
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  # The later group size counts, and -1 is a value although it has a dash.
  assert done.stdout == (
    "Rollout(group_size=4, greedy=True, offset=-1, limit=7) out ['left']\n"
  )


@pytest.mark.parametrize(
  ("arguments", "message", "code"),
  [
    (
      ["--config.rollout.gruop_size=3"],
      "error: --config.rollout.gruop_size: no such setting;"
      " did you mean --config.rollout.group_size (int)?\n",
      "TM-S01",
    ),
    (
      ["--config.rollout.group_size=1"],
      "error: group_size=1 must be at least 2\n",
      "TM-S04",
    ),
    (
      ["--noconfig.name"],
      "error: --noconfig.name: str cannot be turned off; give it a value\n",
      "TM-S02",
    ),
    (
      ["--config="],
      "error: --config is missing; name a file,"
      " as in --config=configs/NAME.py\n",
      "TM-C02",
    ),
  ],
)
def test_wrong_setting_ends_with_code_2_and_a_message(
  config, capsys, arguments, message, code
):
  with flagsaver.flagsaver():
    flags.parse(["program", f"--config={config}", *arguments])
    with pytest.raises(SystemExit) as end, flags.exit_on_setting_error():
      flags.load_from_command_line()
  message += f"more: twinmesh explain {code}\n"
  assert (end.value.code, *capsys.readouterr()) == (2, "", message)


def test_an_unknown_flag_ends_with_the_nearest(config, capsys):
  with flagsaver.flagsaver(), pytest.raises(SystemExit) as end:
    flags.parse(["program", f"--config={config}", "--verbosty=1"])
  assert end.value.code == 2
  assert "Did you mean: verbosity" in capsys.readouterr().err


@pytest.mark.parametrize("given", ["--config", "--config.a", "--noconfig.a"])
def test_a_program_without_a_config_ignores_no_settings(given, capsys):
  argv = ["program", given if given.startswith("--no") else f"{given}=1"]
  with flagsaver.flagsaver():
    with pytest.raises(SystemExit) as end:
      flags.parse_without_settings(argv)
    assert end.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: {given}")
    assert "this command takes no settings; leave it out\n" in message
    # One that reads those of a run may change them.
    if given == "--config":
      with pytest.raises(overrides.SettingError, match="--run=DIR, which has"):
        flags.overrides_of_run()
    else:
      assert list(flags.overrides_of_run()) == ["a"]


SIZE = "--config.rollout.group_size"
ROLLOUT = "--config.rollout=rollout"


@pytest.mark.parametrize(
  ("arguments", "size", "offset"),
  [
    ([f"{SIZE}=3", f"{SIZE}=4"], 4, 0),
    # An object comes before what lies in it, wherever it stands.
    ([f"{SIZE}=3", f"{ROLLOUT}(offset=1)"], 3, 1),
    ([f"{ROLLOUT}(offset=1)", f"{SIZE}=3"], 3, 1),
    # Of an object given twice the later counts.
    ([f"{ROLLOUT}(offset=2)", f"{SIZE}=3", f"{ROLLOUT}(offset=1)"], 3, 1),
  ],
)
def test_an_object_does_not_undo_what_is_set_in_it(
  config, arguments, size, offset
):
  with flagsaver.flagsaver():
    flags.parse(["program", f"--config={config}", *arguments])
    tree = flags.load_from_command_line()
  assert (tree.rollout.group_size, tree.rollout.offset) == (size, offset)


@pytest.mark.parametrize(
  ("arguments", "name", "greedy", "left"),
  [
    (["--config.name", "b", "c"], "b", False, ["c"]),
    (["--config.name=x=1\ny"], "x=1\ny", False, []),
    (["--config.name="], "", False, []),
    (["--config.rollout.greedy", "--config.name=b"], "b", True, []),
    (
      ["--config.rollout.greedy", "--", "--config.name=b"],
      "a",
      True,
      ["--config.name=b"],
    ),
    (
      ["--config.rollout.greedy", "--noconfig.rollout.greedy", "c"],
      "a",
      False,
      ["c"],
    ),
  ],
)
def test_value_may_stand_apart_or_be_left_out(
  config, arguments, name, greedy, left
):
  with flagsaver.flagsaver():
    rest = flags.parse(["program", f"--config={config}", *arguments])
    tree = flags.load_from_command_line()
  assert (tree.name, tree.rollout.greedy) == (name, greedy)
  assert rest == ["program", *left]


def test_a_setting_is_turned_off_by_false_or_none(config):
  off = ["--noconfig.rollout.greedy", "--noconfig.rollout.limit"]
  with flagsaver.flagsaver():
    flags.parse(["program", f"--config={config}", *off])
    tree = flags.load_from_command_line()
    given = flags.overrides()
  assert (tree.rollout.greedy, tree.rollout.limit) == (False, None)
  # As a sweep hands them on.
  assert flags.arguments({**given, "name": "b"}) == [*off, "--config.name=b"]


def test_notebook_loads_with_overrides_and_an_argument(config):
  tree = flags.load(f"{config}:b", {"rollout.group_size": "2"})
  assert (tree.name, tree.rollout.group_size) == ("b", 2)


def test_an_argument_that_get_config_does_not_take_is_refused():
  message = "py:foo: its get_config() takes no argument; leave out :foo"
  with pytest.raises(overrides.SettingError, match=re.escape(message)):
    flags.load("configs/next_letter.py:foo")


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (
      ["a.py", "b"],
      "unexpected arguments: a.py b; did you mean --config=a.py?",
    ),
    (["--config=a.py", "b.py"], "unexpected arguments: b.py"),
    (["runs/a"], "unexpected arguments: runs/a; did you mean --run=runs/a?"),
  ],
)
def test_an_argument_without_its_flag_is_told_it(
  arguments, message, monkeypatch
):
  values = absl_flags.FlagValues()
  for name in ("config", "run"):
    absl_flags.DEFINE_string(name, None, "", flag_values=values)
  monkeypatch.setattr(absl_flags, "FLAGS", values)
  with pytest.raises(overrides.SettingError, match=f"^{re.escape(message)}$"):
    flags.refuse_arguments(values(["program", *arguments]))


def test_json_of_a_run_is_loaded_with_overrides(config, tmp_path):
  tree = flags.load(config, {"name": "b"})
  file = tmp_path / "config.json"
  file.write_text(json.dumps(overrides.to_json(tree)))
  assert flags.load(str(file)) == tree
  assert flags.load(str(file), {"name": "c"}).name == "c"


def test_check_sees_the_overridden_tree_after_validate(config):
  seen = []
  tree = flags.load(config, {"name": "b"}, seen.append)
  assert seen == [tree]
  with pytest.raises(ValueError, match="group_size=1 must be at least 2"):
    flags.load(config, {"rollout.group_size": "1"}, seen.append)
  assert seen == [tree]


@pytest.mark.parametrize(
  ("given", "instead", "value"),
  [
    ("optimizer.learning_rate", "warm_start.optimizer.learning_rate", "0.1"),
    ("algorithm.epochs", "warm_start.epochs", "2"),
  ],
)
def test_settings_of_updates_are_refused_where_there_are_no_rounds(
  given, instead, value
):
  path = "configs/sft_chats.py"
  assert flags.load(path, {instead: value})
  assert flags.load(path, {given: value, "rounds": "1"}).rounds == 1
  told = f"{given}={value} has no effect.*use --config.{instead}$"
  with pytest.raises(overrides.SettingError, match=told):
    flags.load(path, {given: value})


def test_configs_of_the_package_are_found_from_anywhere(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert flags.load("configs/next_letter.py").environment.name == "next_letter"
  with pytest.raises(overrides.SettingError, match=r"mean .*next_letter\.py"):
    flags.load("configs/next_leter.py")


def test_own_configs_come_before_those_of_the_package(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "configs").mkdir()
  (tmp_path / "configs/counter.py").write_text(CONFIG)
  assert flags.load("configs/counter.py").name == "a"
  assert flags.load("configs/next_letter.py").environment.name == "next_letter"


LOADS = """
from launch.cli import flags
load = lambda text: flags.load("configs/next_letter.py", {"environment": text})
print(load("frozen_lake(size=4)").environment.size)
"""


@pytest.mark.process
def test_environments_that_no_module_has_imported_have_short_names():
  done = subprocess.run(
    [sys.executable, "-c", LOADS],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.stdout == "4\n", done.stderr


def test_sweep_yields_overrides_that_load_takes(config, tmp_path):
  runs = flags.sweep(config)
  assert runs == [
    {"rollout.group_size": "2", "rollout.greedy": "True"},
    {"rollout.group_size": "4", "rollout.greedy": "True"},
  ]
  sizes = [flags.load(config, run).rollout.group_size for run in runs]
  assert sizes == [2, 4]
  (tmp_path / "plain.py").write_text("x = 1")
  assert flags.sweep(str(tmp_path / "plain.py")) == []


def test_a_sweep_names_its_settings(tmp_path):
  path = tmp_path / "numbered.py"
  path.write_text("def sweep():\n  return [{'seed': 1}, {1: 2}]\n")
  with pytest.raises(overrides.SettingError, match="lists 1 as a setting; na"):
    flags.sweep(str(path))


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("x = 1\ny = z", "FILE:2: NameError: name 'z' is not defined\n  y = z"),
    (
      "import json\n\ndef get_config():\n  return json.loads('x')",
      "FILE:4: JSONDecodeError: Expecting value: line 1 column 1 (char 0)"
      "\n  return json.loads('x')",
    ),
    ("x = 1\ny = (", "FILE:2: SyntaxError: '(' was never closed"),
    ("import nope", "FILE:1: ModuleNotFoundError: No module named 'nope'"),
    ("x = 1", "FILE: has no get_config()"),
    (
      "def get_config():\n  return {}",
      "FILE: get_config() returned dict; expected a frozen dataclass",
    ),
    (
      "def get_config(a):\n  return a",
      "FILE: TypeError: get_config() missing 1 required positional argument",
    ),
  ],
)
def test_broken_file_names_its_own_line(tmp_path, text, message):
  file = tmp_path / "broken.py"
  file.write_text(text)
  with pytest.raises(overrides.SettingError) as error:
    flags.load(str(file))
  assert str(error.value).startswith(message.replace("FILE", str(file)))


@pytest.mark.parametrize(
  ("name", "message"),
  [
    ("smal.py", "smal.py: no such file; did you mean DIR/small.py?"),
    ("zzzzzz", "zzzzzz: no such file; there is DIR/small.py"),
    ("no/small.py", "small.py: no such file; there is no directory DIR/no"),
    ("notes.txt", "notes.txt: expected a .py or .json file"),
    ("run", "run is a directory; did you mean DIR/run/config.json?"),
  ],
)
def test_wrong_path_names_what_is_there(config, tmp_path, name, message):
  assert pathlib.Path(config).parent == tmp_path
  (tmp_path / "notes.txt").touch()
  (tmp_path / "run").mkdir()
  (tmp_path / "run" / "config.json").touch()
  with pytest.raises(overrides.SettingError) as error:
    flags.load(str(tmp_path / name))
  assert str(error.value).endswith(message.replace("DIR", str(tmp_path)))


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("{", "FILE is not valid JSON: Expecting property name"),
    ("[]", "FILE: config=[]: expected object"),
    ('{"class": "nope.Run"}', "FILE: config: cannot import nope.Run"),
  ],
)
def test_broken_json_names_the_file(tmp_path, text, message):
  file = tmp_path / "config.json"
  file.write_text(text)
  with pytest.raises(overrides.SettingError) as error:
    flags.load(str(file))
  assert str(error.value).startswith(message.replace("FILE", str(file)))


def test_a_name_that_is_too_long_is_an_error_of_the_user(tmp_path, capsys):
  path = tmp_path / ("a" * 300)
  with pytest.raises(SystemExit) as end, flags.exit_on_setting_error():
    path.stat()
  said = capsys.readouterr().err
  assert said.startswith(f"error: {path}: File name too long; shorten it\n")
  assert end.value.code == 2


def test_other_errors_are_not_hidden():
  with pytest.raises(KeyError), flags.exit_on_setting_error():
    raise KeyError("a bug")


PRINTS = """
from launch.cli import flags
import sys

def program():
  print("x" * SIZE)
  sys.exit(1)

flags.command(program)(["program"])
"""


@pytest.mark.process
@pytest.mark.parametrize("size", [1, 1 << 20], ids=["at the end", "at once"])
def test_a_reader_that_is_gone_ends_a_command_quietly(size):
  read, write = os.pipe()
  os.close(read)
  script = PRINTS.replace("SIZE", str(size))
  with os.fdopen(write, "wb") as gone:
    done = subprocess.run(
      [sys.executable, "-c", script],
      stdout=gone,
      stderr=subprocess.PIPE,
      cwd=ROOT,
      check=False,
    )
  # As of a program that SIGPIPE, 13, ended.
  assert (done.returncode, done.stderr) == (128 + 13, b"")


def test_a_command_may_have_no_standard_streams(monkeypatch):
  names = ("stdin", "stdout", "stderr")
  for name in names:
    monkeypatch.setattr(sys, name, None)
  ended = threading.Event()

  def program():
    print(sys.stdin.read(), flush=True)
    print("a warning", file=sys.stderr, flush=True)
    parent.watch(ended.set)

  flags.command(program)(["program"])
  assert ended.wait(machine_speed.scaled(10))
  for name in names:
    getattr(sys, name).close()


def test_other_broken_pipes_are_not_hidden(capsys):
  def program():
    raise BrokenPipeError("of a worker")

  with pytest.raises(BrokenPipeError, match="of a worker"):
    flags.command(program)(["program"])
