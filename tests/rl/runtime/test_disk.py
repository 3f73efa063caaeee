import errno
import shutil

import pytest

from rl.runtime import disk


def failed(number, path=None):
  return OSError(number, "No way", path)


@pytest.mark.parametrize(
  ("number", "expected"),
  [(errno.ENOSPC, True), (errno.EROFS, True), (errno.ECONNRESET, False)],
)
def test_a_disk_is_blamed_for_its_own_errors_only(tmp_path, number, expected):
  assert disk.is_cause(failed(number), tmp_path) is expected


def test_any_error_is_the_disks_when_the_directory_is_gone(tmp_path):
  gone = tmp_path / "run"
  assert disk.is_cause(failed(errno.ENOENT), gone)
  assert disk.failure(failed(errno.ENOENT, str(gone / "a")), gone) == (
    f"{gone}/a cannot be written: No way; {gone} is gone"
  )


def test_a_failure_tells_how_much_room_is_left(tmp_path):
  words = disk.failure(failed(errno.ENOSPC), tmp_path)
  assert words.startswith(f"{tmp_path} cannot be written: No way; ")
  assert words.endswith(" MB are free there")


def test_what_cannot_fit_is_refused_before_it_is_written(tmp_path):
  free = shutil.disk_usage(tmp_path).free
  disk.check_room(tmp_path, 1)
  with pytest.raises(OSError, match=r"no space left for [\d,.]+ MB") as raised:
    disk.check_room(tmp_path, 2 * free + 10**9)
  assert raised.value.errno == errno.ENOSPC
