"""Files of others that must not hang, fill the memory or end in a traceback."""

import os

import pytest

from models import untrusted_files

DEEPEST = "[" * 65 + "]" * 65
"""64 lists in a list."""


def test_a_file_is_read_up_to_its_bound(tmp_path):
  path = tmp_path / "x.json"
  path.write_text('{"a": [1, 2.5, null]}')
  assert untrusted_files.read_object(path, 21) == {"a": [1, 2.5, None]}
  with pytest.raises(untrusted_files.BadFile, match=r"21 bytes .* the 20 that"):
    untrusted_files.read_object(path, 20)
  assert untrusted_files.read_bytes(path, 3, count=3, start=2) == b'a":'
  # A part may be cut short by the end.
  assert untrusted_files.read_bytes(path, 9, count=9, start=20) == b"}"


@pytest.mark.parametrize(
  ("text", "message"),
  [
    (b"", r"is not valid JSON: Expecting value.*; copy it again"),
    (b"{", "is not valid JSON"),
    (b"[]", "must hold an object, not list"),
    (b"null", "must hold an object, not NoneType"),
    (b'{"a": "\xff"}', r"is not UTF-8: byte 0xff at 7"),
    (b'{"a": 1, "b": 2, "a": 1}', "'a' is there twice"),
    (b'{"b": {"a": 1, "a": 2}}', "'a' is there twice"),
    (b'{"a": %s}' % (b"9" * 5000), "is not valid JSON: Exceeds the limit"),
    (f'{{"a": {DEEPEST}}}'.encode(), "nested deeper than 64 levels"),
    (b'{"a":' * 100_000, "nested deeper than 64 levels"),
    (b"[" * 100_000, "nested deeper than 64 levels"),
  ],
)
def test_a_file_that_is_no_object_is_refused_by_name(tmp_path, text, message):
  path = tmp_path / "x.json"
  path.write_bytes(text)
  with pytest.raises(untrusted_files.BadFile, match=message) as error:
    untrusted_files.read_object(path)
  assert str(path) in str(error.value)


def test_the_deepest_file_is_still_read():
  assert untrusted_files.parse_json(DEEPEST, "it")
  # Scalars take no level of their own.
  assert untrusted_files.parse_json(DEEPEST.replace("[]", "[1]"), "it")


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (os.mkfifo, "is a pipe; put a file there"),
    (os.mkdir, "is a directory"),
    (lambda path: os.symlink("/dev/zero", path), "is not a regular file"),
    (lambda path: os.symlink(path, path), "cannot be read: Too many levels"),
    (lambda path: None, "cannot be read: No such file or directory"),
  ],
  ids=["pipe", "directory", "device", "circle", "nothing"],
)
def test_what_is_no_regular_file_is_refused_at_once(tmp_path, make, message):
  make(tmp_path / "x.json")
  with pytest.raises(untrusted_files.BadFile, match=message):
    untrusted_files.read_json(tmp_path / "x.json")
