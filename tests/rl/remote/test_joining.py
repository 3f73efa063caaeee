"""The address of a run: for its user alone, and with a way out without it."""

import json
import stat

import pytest

from rl.remote import joining, workers


def test_only_the_user_of_a_run_can_read_its_address(tmp_path):
  (tmp_path / joining.FILE).write_text("that of a run that was killed")
  joining.write(tmp_path, "ws://127.0.0.1:7", "a token")
  mode = stat.S_IMODE((tmp_path / joining.FILE).stat().st_mode)
  assert mode == 0o600
  assert joining.read(tmp_path, True) == ("ws://127.0.0.1:7", "a token")
  joining.remove(tmp_path)
  joining.remove(tmp_path)
  assert not (tmp_path / joining.FILE).exists()


@pytest.mark.parametrize(
  ("name", "is_alive", "why"),
  [
    ("nowhere", False, "does not exist; name the directory of a run"),
    (".", False, "holds no run: no config.json"),
    ("run", False, "takes no engines: no process works on that run, which has"),
    ("run", True, "takes no engines: all that it has are in its own process"),
  ],
)
def test_a_run_without_an_address_is_refused_with_the_reason(
  tmp_path, name, is_alive, why
):
  (tmp_path / "run").mkdir()
  (tmp_path / "run" / "config.json").touch()
  run_dir = tmp_path / name
  with pytest.raises(workers.Refused) as refused:
    joining.read(run_dir, is_alive)
  assert str(refused.value).startswith(f"--join={run_dir} {why}")


@pytest.mark.parametrize(
  ("where", "why"),
  [
    ("{", "is damaged"),
    ("[]", "is damaged"),
    ("{}", "is damaged: 'host'; start the run again"),
    (
      json.dumps({"host": "elsewhere", "address": 7, "token": "x"}),
      "is damaged: 7 must be a string; start",
    ),
    (
      json.dumps(
        {"host": "elsewhere", "address": "ws://127.0.0.1:7", "token": "x"}
      ),
      "it runs on elsewhere and listens there only, so engines join on that",
    ),
  ],
)
def test_an_address_that_is_of_no_use_is_refused(tmp_path, where, why):
  (tmp_path / joining.FILE).write_text(where)
  with pytest.raises(workers.Refused, match=why):
    joining.read(tmp_path, True)


def test_a_run_that_other_hosts_can_reach_is_joined_from_them(tmp_path):
  where = {"host": "elsewhere", "address": "ws://10.0.0.2:7", "token": "x"}
  (tmp_path / joining.FILE).write_text(json.dumps(where))
  assert joining.read(tmp_path, True) == ("ws://10.0.0.2:7", "x")


def test_a_file_that_is_no_directory_has_no_run(tmp_path):
  (tmp_path / "run").write_text("")
  with pytest.raises(workers.Refused, match="Not a directory"):
    joining.read(tmp_path / "run", True)
