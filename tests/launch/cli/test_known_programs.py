"""Programs in the settings of others, which do not run without asking."""

import json

import pytest
from absl import flags as absl_flags

from launch.cli import config_file, known_programs, workdir
from rl.settings import overrides
from rl.train import skipped_updates
from tests.helpers import commands, packages

CODE = ["raise SystemExit('it ran')", "# of somebody"]


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
  """A user who has trained nothing."""
  monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
  return tmp_path / "state" / "twinmesh" / "known_programs"


def keeping(lines):
  kept = {"_config_evil": {"path": "evil.py", "lines": lines}}
  return {"class": "_config_evil.Run", "config_files": kept}


def written(tmp_path, data):
  file = tmp_path / "config.json"
  file.write_text(json.dumps(data))
  return file


def test_code_of_others_does_not_run(tmp_path):
  file = written(tmp_path, keeping(CODE))
  for read in (config_file.read_json, lambda x: workdir.read(x.parent)):
    with pytest.raises(overrides.SettingError) as error:
      read(file)
    message = str(error.value)
    assert message.startswith(
      f"{file}: it would run the code of evil.py, which"
    )
    assert message.endswith("and add --trust_config to run it")


@pytest.mark.parametrize(
  "command",
  [
    ("launch.train", "--config={}/config.json"),
    ("launch.evaluate", "--run={}"),
    ("launch.serve", "--run={}", "--port=0"),
    ("launch.export", "--run={}", "--directory={}/out"),
    ("launch.replay", "{}/skipped/round_000001_update_0"),
  ],
  ids=lambda command: command[0],
)
def test_commands_do_not_run_code_of_others(tmp_path, command):
  written(tmp_path, keeping(CODE))
  update = tmp_path / "skipped" / "round_000001_update_0"
  update.mkdir(parents=True)
  (update / skipped_updates.BATCHES).touch()
  (tmp_path / "checkpoints" / "3").mkdir(parents=True)
  done = commands.run(*(one.format(tmp_path) for one in command))
  assert done.returncode == 2, done.stderr
  assert "it would run the code of evil.py" in done.stderr


def test_code_that_is_trusted_runs(tmp_path, monkeypatch):
  file = written(tmp_path, keeping(CODE))
  trusted = absl_flags.FLAGS["trust_config"]
  monkeypatch.setattr(trusted, "value", True)
  with pytest.raises(SystemExit, match="it ran"):
    config_file.read_json(file)


def test_code_of_an_own_run_is_known(state):
  known_programs.remember(keeping(CODE))
  known_programs.check(keeping(CODE))
  # It is kept once, and knows no other.
  known_programs.remember(keeping(CODE))
  assert len(state.read_text().splitlines()) == 1
  with pytest.raises(overrides.SettingError, match=r"evil\.py"):
    known_programs.check(keeping([*CODE, "more"]))


def test_code_of_the_checkout_is_known():
  path = packages.ROOT / "configs" / "next_letter.py"
  lines = path.read_text().splitlines()
  known_programs.check(keeping(lines))
  with pytest.raises(overrides.SettingError, match=r"evil\.py"):
    known_programs.check(keeping([*lines, ""]))


@pytest.mark.parametrize(
  "settings",
  [
    {"environment": {"agent": {"command": ["sh", "-c", "rm"]}}},
    {"pools": [{"python": "rm"}]},
    {"placement": {"decode_python": "rm"}},
  ],
)
def test_a_command_is_a_program(settings):
  with pytest.raises(overrides.SettingError, match=r"would run .*=.*rm"):
    known_programs.check(settings)
  known_programs.remember(settings)
  known_programs.check(settings)


def test_settings_without_programs_need_nothing(state):
  data = {"a": [{"command": None, "python": ""}], "config_files": {}}
  known_programs.check(data)
  known_programs.remember(data)
  assert not state.exists()


@pytest.mark.parametrize("content", [b"\xff\xfe", None])
def test_a_state_that_cannot_be_read_knows_nothing(state, content):
  state.parent.mkdir(parents=True)
  state.mkdir() if content is None else state.write_bytes(content)
  known_programs.remember(keeping(CODE))
  if content is None:
    with pytest.raises(overrides.SettingError):
      known_programs.check(keeping(CODE))
