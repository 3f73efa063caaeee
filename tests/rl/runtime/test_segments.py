"""Files of lines in segments: all that was written is read, in its order."""

import gzip
import threading
from unittest import mock

import pytest

from rl.runtime import segments


def compressed():
  """Waits until the threads that compress have ended."""
  for thread in threading.enumerate():
    if thread.name == "segments":
      thread.join()


def written(path, count, max_bytes=8):
  """Returns a file after so many numbers, of 2 bytes each up to 9."""
  file = segments.SegmentedFile(path, max_bytes)
  for number in range(count):
    file.append([str(number)])
  compressed()
  return file


def read(path, **options):
  return [int(line) for line in segments.lines(path, **options)]


def names(path):
  return [file.name for file in segments.closed(path)]


def test_a_long_file_is_compressed_and_begun_anew(tmp_path):
  # 2 bytes a line, so that 4 lines reach the 8 bytes of a segment.
  path = tmp_path / "lines.jsonl"
  written(path, 10)
  assert names(path) == ["000001.jsonl.gz", "000002.jsonl.gz"]
  assert path.read_text() == "8\n9\n"
  first = segments.closed(path)[0]
  assert gzip.decompress(first.read_bytes()) == b"0\n1\n2\n3\n"
  assert read(path) == list(range(10))
  assert read(path, newest=1) == list(range(4, 10))
  assert read(path, newest=0) == [8, 9]
  sizes = [file.stat().st_size for file in segments.closed(path)]
  assert segments.num_bytes(path) == 4 + sum(sizes)


def test_a_file_below_the_bound_has_no_segments(tmp_path):
  path = tmp_path / "lines.jsonl"
  written(path, 3)
  assert not segments.closed(path)
  assert read(path) == [0, 1, 2]
  assert segments.exists(path)
  assert not segments.exists(tmp_path / "others.jsonl")
  with pytest.raises(FileNotFoundError):
    read(tmp_path / "others.jsonl")


def test_a_restart_goes_on_behind_the_segments_and_compresses_the_last(
  tmp_path,
):
  path = tmp_path / "lines.jsonl"
  written(path, 4)
  (packed,) = segments.closed(path)
  # As a kill leaves it that came before the segment was compressed.
  (tmp_path / "lines" / "000001.jsonl").write_bytes(
    gzip.decompress(packed.read_bytes())
  )
  packed.unlink()
  (tmp_path / "lines" / "000001.jsonl.gz.partial").write_bytes(b"half")
  assert read(path) == [0, 1, 2, 3]
  file = written(path, 0)
  assert names(path) == ["000001.jsonl.gz"]
  assert len(list((tmp_path / "lines").iterdir())) == 1
  for number in range(4, 9):
    file.append([str(number)])
  compressed()
  assert names(path) == ["000001.jsonl.gz", "000002.jsonl.gz"]
  assert read(path) == list(range(9))


def test_a_kill_leaves_every_line_in_one_place(tmp_path):
  path = tmp_path / "lines.jsonl"
  written(path, 4)
  # The copy is whole and the segment still there; the file not begun anew.
  (tmp_path / "lines" / "000001.jsonl").write_text("0\n1\n2\n3\n")
  path.unlink()
  assert read(path) == [0, 1, 2, 3]
  written(path, 0).append(["4"])
  assert read(path) == [0, 1, 2, 3, 4]


def test_a_reader_beside_the_writer_sees_whole_lines_from_the_first_on(
  tmp_path,
):
  path = tmp_path / "lines.jsonl"
  file = segments.SegmentedFile(path, 500)

  def write():
    for number in range(2000):
      file.append([str(number)])

  writer = threading.Thread(target=write)
  writer.start()
  most = 0
  while writer.is_alive():
    seen = read(path)
    assert seen == list(range(len(seen)))
    assert len(seen) >= most
    most = len(seen)
  assert read(path) == list(range(2000))
  compressed()
  assert read(path) == list(range(2000))


def test_where_no_segment_can_be_closed_the_file_grows_on(tmp_path):
  path = tmp_path / "lines.jsonl"
  (tmp_path / "lines").write_text("a file in the place of the folder")
  written(path, 20)
  assert read(path) == list(range(20))
  (tmp_path / "lines").unlink()
  written(path, 1)
  assert names(path) == ["000001.jsonl.gz"]
  assert read(path) == [*range(20), 0]


def test_a_missing_segment_is_told(tmp_path):
  path = tmp_path / "lines.jsonl"
  written(path, 12)
  (tmp_path / "lines" / "000002.jsonl.gz").unlink()
  with pytest.raises(
    segments.Damaged,
    match=r"lines/000002.jsonl.gz is missing, but 000003.jsonl.gz is there",
  ):
    read(path)
  assert read(path, newest=1) == [8, 9, 10, 11]


@pytest.mark.parametrize("kept", [0, 5, 15, -9, -1])
def test_a_segment_that_is_cut_short_is_told(tmp_path, kept):
  path = tmp_path / "lines.jsonl"
  written(path, 4)
  (packed,) = segments.closed(path)
  packed.write_bytes(packed.read_bytes()[:kept])
  with pytest.raises(
    segments.Damaged, match=r"lines/000001.jsonl.gz (cannot be read|is empty)"
  ):
    read(path)


def test_a_segment_with_another_byte_is_told(tmp_path):
  path = tmp_path / "lines.jsonl"
  written(path, 4)
  (packed,) = segments.closed(path)
  data = bytearray(packed.read_bytes())
  data[-5] ^= 1  # Of the checksum.
  packed.write_bytes(data)
  with pytest.raises(segments.Damaged, match="cannot be read"):
    read(path)


def test_who_may_not_list_segments_may_not_write_them(tmp_path, monkeypatch):
  (tmp_path / "lines").mkdir()
  error = PermissionError(13, "Permission denied")
  monkeypatch.setattr("os.listdir", mock.Mock(side_effect=error))
  with pytest.raises(PermissionError, match="lines cannot be read") as found:
    segments.SegmentedFile(tmp_path / "lines.jsonl")
  assert found.value.errno == 13
