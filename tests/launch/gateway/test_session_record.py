"""The record of sessions: private, and of whole lines."""

import json
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


def test_a_record_that_cannot_be_written_is_refused(tmp_path):
  with pytest.raises(annotations.SettingError, match=r"--record=.*Is a dir"):
    session_record.SessionRecord(tmp_path)
