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
  assert joining.read(tmp_path) == ("ws://127.0.0.1:7", "a token")
  joining.remove(tmp_path)
  joining.remove(tmp_path)
  with pytest.raises(
    workers.Refused,
    match=r"takes no engines: .*; start it with "
    r"--config\.placement\.decode_processes=1$",
  ):
    joining.read(tmp_path)


@pytest.mark.parametrize(
  ("where", "why"),
  [
    ("{", "is damaged"),
    ("[]", "is damaged"),
    ("{}", "is damaged: 'host'; start the run again"),
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
    joining.read(tmp_path)


def test_a_run_that_other_hosts_can_reach_is_joined_from_them(tmp_path):
  where = {"host": "elsewhere", "address": "ws://10.0.0.2:7", "token": "x"}
  (tmp_path / joining.FILE).write_text(json.dumps(where))
  assert joining.read(tmp_path) == ("ws://10.0.0.2:7", "x")


def test_a_file_that_is_no_directory_has_no_run(tmp_path):
  (tmp_path / "run").write_text("")
  with pytest.raises(workers.Refused, match="Not a directory"):
    joining.read(tmp_path / "run")
