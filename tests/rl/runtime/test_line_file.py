import contextlib
import errno
import resource

import pytest

from rl.runtime import line_file


@contextlib.contextmanager
def files_up_to(num_bytes):
  """Lets no file grow beyond a size: a write up to there is cut short."""
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_lines_follow_each_other_and_are_on_disk_at_once(tmp_path):
  path = tmp_path / "lines"
  file = line_file.LineFile(path)
  file.append(["one", "zwei: ü"])
  file.append([])
  file.append(["three"])
  assert path.read_text("utf-8") == "one\nzwei: ü\nthree\n"


@pytest.mark.parametrize("before", ["", "one\n", "one\ntw"])
def test_a_line_that_a_crash_has_cut_is_ended(tmp_path, before):
  path = tmp_path / "lines"
  path.write_text(before)
  line_file.LineFile(path).append(["three"])
  assert path.read_text().splitlines() == [*before.splitlines(), "three"]


def test_what_does_not_fit_leaves_the_file_as_it_was(tmp_path):
  path = tmp_path / "lines"
  file = line_file.LineFile(path)
  file.append(["one"])
  # "one\n" has 4 bytes: of "second\n" there is room for 3.
  with files_up_to(7), pytest.raises(OSError, match="File too large"):
    file.append(["second"])
  assert path.read_text() == "one\n"
  file.append(["second"])
  assert path.read_text() == "one\nsecond\n"


def test_no_line_is_written_that_the_check_refuses(tmp_path):
  path = tmp_path / "lines"
  file = line_file.LineFile(path)

  def refuse():
    raise OSError("of another run")

  file.check = refuse
  with pytest.raises(OSError, match="of another run"):
    file.append(["one"])
  assert path.read_text() == ""


def test_the_first_error_is_told_once_and_nothing_is_tried_after_it(tmp_path):
  path = tmp_path / "lines"
  file, told = line_file.LineFile(path), []
  file.on_unwritable = told.append
  assert file.try_append(["one"])
  with files_up_to(0):
    assert not file.try_append(["two"])
  assert not file.try_append(["three"])
  assert [error.errno for error in told] == [errno.EFBIG]
  assert path.read_text() == "one\n"


def test_without_a_listener_the_error_is_raised(tmp_path):
  file = line_file.LineFile(tmp_path / "lines")
  with files_up_to(0), pytest.raises(OSError, match="File too large"):
    file.try_append(["one"])


def test_a_directory_that_is_gone_is_an_error(tmp_path):
  (tmp_path / "run").mkdir()
  file = line_file.LineFile(tmp_path / "run" / "lines")
  (tmp_path / "run").rename(tmp_path / "elsewhere")
  with pytest.raises(FileNotFoundError):
    file.append(["one"])
