"""A growing file is read once, whatever happens to it."""

import json
import os

import pytest

from launch.view import followed_rows


def line(number, **fields):
  return json.dumps({"round": number, **fields}) + "\n"


@pytest.fixture
def path(tmp_path):
  return tmp_path / "metrics.jsonl"


def test_rows_are_added_as_the_file_grows(path):
  rows = followed_rows.FollowedRows(path)
  assert rows.look() == {}
  path.write_text(line(1, x=0.5))
  assert rows.look() == {1: {"round": 1, "x": 0.5}}
  with path.open("a") as file:
    file.write(line(2))
  assert list(rows.look()) == [1, 2]
  assert rows.changes == 2
  rows.look()
  assert rows.changes == 2


def test_a_line_without_its_end_waits_for_it(path):
  rows = followed_rows.FollowedRows(path)
  whole = line(1)
  path.write_text(whole[:5])
  assert rows.look() == {}
  with path.open("a") as file:
    file.write(whole[5:])
  assert list(rows.look()) == [1]


def test_a_file_that_a_resume_replaced_is_read_anew(path):
  rows = followed_rows.FollowedRows(path)
  path.write_text(line(1) + line(2) + line(3, x=1))
  rows.look()
  other = path.with_suffix(".tmp")
  other.write_text(line(1) + line(2) + line(3, x=2))
  os.replace(other, path)
  assert rows.look()[3] == {"round": 3, "x": 2}


def test_a_file_that_was_cut_or_removed_is_forgotten(path):
  rows = followed_rows.FollowedRows(path)
  path.write_text(line(1) + line(2))
  rows.look()
  path.write_text(line(1))
  assert list(rows.look()) == [1]
  path.unlink()
  assert rows.look() == {}


def test_what_is_no_row_is_left_out(path):
  bad = [b"null", b"[]", b"3", b'{"round": "1"}', b"\xff", b"[" * 99_999, b"{"]
  path.write_bytes(b"\n".join([*bad, line(7, x=float("nan")).encode()]))
  rows = followed_rows.FollowedRows(path)
  assert rows.look() == {7: {"round": 7, "x": None}}


@pytest.mark.parametrize("number", ["9" * 400, "-1e999"])
def test_a_number_beyond_a_float_is_none(path, number):
  path.write_text(f'{{"round": 7, "x": {number}}}\n')
  rows = followed_rows.FollowedRows(path)
  assert rows.look() == {7: {"round": 7, "x": None}}


def test_a_pipe_in_the_place_of_a_file_holds_nobody_up(path):
  os.mkfifo(path)
  assert followed_rows.FollowedRows(path).look() == {}


def test_a_line_without_bounds_is_given_up(path, monkeypatch):
  monkeypatch.setattr(followed_rows, "_BLOCK", 1 << 10)
  monkeypatch.setattr(followed_rows, "_MAX_LINE_BYTES", 1 << 12)
  path.write_text("9" * (1 << 14) + "\n" + line(1))
  assert list(followed_rows.FollowedRows(path).look()) == [1]
