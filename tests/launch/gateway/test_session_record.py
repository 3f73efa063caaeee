"""The record of sessions: private, and of whole lines."""

import json
import os
import resource
import stat

import pytest

from envs import base
from launch.gateway import session_record
from rl.data import trajectory
from rl.rollout import episode as episode_lib
from rl.settings import annotations


def ended(name):
  task = base.Task(name, 0, "train", 0)
  partial = episode_lib.PartialTrajectory(episode_lib.Episode(task, 0, 0, 0))
  return partial.end(trajectory.Status.TRUNCATED)[0]


def names(path):
  return [json.loads(line)["task_id"] for line in path.read_text().splitlines()]


def test_only_its_user_may_read_a_record(tmp_path):
  path = tmp_path / "sessions.jsonl"
  for name in ("a", "b"):
    record = session_record.SessionRecord(path)
    record.keep([ended(name)])
    record.close()
  assert stat.S_IMODE(path.stat().st_mode) == 0o600
  assert names(path) == ["a", "b"]


def test_a_session_for_which_there_is_no_room_leaves_no_half_line(tmp_path):
  path = tmp_path / "sessions.jsonl"
  record = session_record.SessionRecord(path)
  record.keep([ended("a")])
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 9, hard))
  try:
    with pytest.raises(session_record.Unrecorded, match="stays open: File too"):
      record.keep([ended("b")])
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
  record.keep([ended("c")])
  record.close()
  assert names(path) == ["a", "c"]


def test_a_line_that_a_crash_has_cut_costs_no_other(tmp_path):
  path = tmp_path / "sessions.jsonl"
  path.write_text('{"task_id": "a"}\n{"task')
  for name in ("b", "c"):
    record = session_record.SessionRecord(path)
    record.keep([ended(name)])
    record.close()
  whole, cut, *after = path.read_text().splitlines()
  assert (whole, cut) == ('{"task_id": "a"}', '{"task')
  assert [json.loads(line)["task_id"] for line in after] == ["b", "c"]


def test_a_record_may_be_a_pipe(tmp_path):
  path = tmp_path / "pipe"
  os.mkfifo(path)
  reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
  record = session_record.SessionRecord(path)
  record.keep([ended("a")])
  record.close()
  with open(reading, "rb") as pipe:
    assert json.loads(pipe.read())["task_id"] == "a"


def test_a_record_that_cannot_be_written_is_refused(tmp_path):
  with pytest.raises(annotations.SettingError, match=r"--record=.*Is a dir"):
    session_record.SessionRecord(tmp_path)
