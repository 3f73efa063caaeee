"""launch.status groups waits, and tells of runs that no process works on."""

import json
import socket

from launch import status
from launch.cli import flags, workdir
from launch.run import status_server
from tests.helpers import commands


def test_waits_that_differ_in_numbers_share_a_line():
  episodes = [(f"episode {i}/0/1", "an answer", float(i), 60.0) for i in (2, 7)]
  waits = status.grouped([*episodes, ("learner", "groups 0..3", 3.0, 600.0)])
  assert [(w.owner, w.what, -w.since_s, w.deadline_s) for w in waits] == [
    ("episode 7/0/1 and 1 more", "an answer", 7.0, 60.0),
    ("learner", "groups 0..3", 3.0, 600.0),
  ]


def test_a_blocked_loop_is_shown_with_its_stack(tmp_path):
  engine = "engine 0 (decode): open, 3 sessions, version 2"
  state = {"doing": "warm start 3/40", "pid": 7, "engines": [engine]}
  state |= {"waits": [], "stack": "here\n"}
  lines = list(status.told(tmp_path, 5, state, "", 0.0))
  assert lines == [
    f"{tmp_path}: warm start 3/40, process 7",
    "no round of 5 has ended",
    "newest checkpoint: none",
    engine,
    "",
    "nobody waits",
    "\nthe event loop is blocked in:\nhere",
  ]


def test_a_run_without_a_process_tells_how_far_it_came(tmp_path):
  workdir.claim(tmp_path, flags.load(commands.CONFIG)).close()
  (tmp_path / "metrics.jsonl").write_text(json.dumps({"round": 4}) + "\n")
  (tmp_path / "checkpoints" / "3").mkdir(parents=True)
  done = commands.run("launch.status", tmp_path)
  assert done.returncode == 1
  first, last, saved = done.stdout.splitlines()
  assert first == f"{tmp_path}: no process answers; the same command goes on"
  assert last.startswith("round 4 of 1000 ended ")
  assert saved == "newest checkpoint: round 3"
  first, *_ = status.told(tmp_path, 4, None, "", 0.0)
  assert first == f"{tmp_path}: the run has ended, 4 of 4 rounds"
  workdir.keep_failure(tmp_path, "error: round 4: nan")
  first, error, *_ = status.told(tmp_path, 4, None, "", 0.0)
  assert first == f"{tmp_path}: the run has failed; the same command goes on"
  assert error == "error: round 4: nan"


def test_a_run_without_rounds_is_told_by_its_steps(tmp_path):
  (tmp_path / workdir.WARM_START_LINES).write_text('{"step": 4}\n')
  first, last, saved = status.told(tmp_path, 0, None, "", 0.0)
  assert first == f"{tmp_path}: no process answers; the same command goes on"
  assert last.startswith("step 4 ended ")
  assert saved == "newest checkpoint: none"
  for name in ("3.damaged", "2"):
    (tmp_path / workdir.WARM_START / name).mkdir(parents=True)
  *_, saved = status.told(tmp_path, 0, None, "", 0.0)
  assert saved == "newest checkpoint: step 2 of the warm start"
  (tmp_path / "checkpoints" / "0").mkdir(parents=True)
  first, _, saved = status.told(tmp_path, 0, None, "", 0.0)
  assert first == f"{tmp_path}: the run has ended, 4 steps"
  assert saved == "newest checkpoint: round 0"


def test_a_process_that_was_killed_is_told_as_gone(tmp_path):
  workdir.claim(tmp_path, flags.load(commands.CONFIG)).close()
  with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]
  where = {"host": socket.gethostname(), "pid": 7, "port": port, "key": "00"}
  (tmp_path / status_server.FILE).write_text(json.dumps(where))
  done = commands.run("launch.status", tmp_path)
  assert done.returncode == 1
  assert done.stdout.startswith(
    f"{tmp_path}: its process is gone; the same command goes on\n"
  )


def test_the_settings_of_a_run_are_not_run(tmp_path):
  workdir.claim(tmp_path, flags.load(commands.CONFIG)).close()
  file = tmp_path / "config.json"
  settings = json.loads(file.read_text())
  lines = ["raise SystemExit('it was run')"]
  settings["config_files"] = {"_config_other": {"path": "x", "lines": lines}}
  file.write_text(json.dumps(settings))
  done = commands.run("launch.status", tmp_path)
  assert "no round of 1000 has ended" in done.stdout
  file.write_text('{"rounds": null}')
  assert "put that of the run back" in (
    commands.run("launch.status", tmp_path).stderr
  )


def test_a_run_that_does_not_exist_is_refused(tmp_path):
  done = commands.run("launch.status", tmp_path / "lake")
  assert done.returncode == 2
  assert "does not exist" in done.stderr
  (tmp_path / "lake-hf").mkdir()
  for name in ("config.json", "model.safetensors"):
    (tmp_path / "lake-hf" / name).touch()
  done = commands.run("launch.status", tmp_path / "lake-hf")
  assert "lake-hf holds an exported checkpoint; name the run" in done.stderr
  (tmp_path / "pond").touch()
  done = commands.run("launch.status", tmp_path / "pond")
  assert f"{tmp_path}/pond is a file; name the directory of a run" in (
    done.stderr
  )
  assert "one run" in commands.run("launch.status").stderr
