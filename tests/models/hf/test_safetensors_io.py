"""Files of tensors: slices, headers, and files that are damaged."""

import json
import os

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from models.hf import safetensors_io

SINGLE, INDEX = safetensors_io.SINGLE, safetensors_io.INDEX
ONE, TWO = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))


def write(path, **tensors):
  safetensors.numpy.save_file(tensors, path)


@pytest.fixture
def single(tmp_path):
  """One file with the numbers 0 to 11 in three types."""
  whole = np.arange(12).reshape(3, 4)
  write(
    tmp_path / SINGLE,
    wide=whole.astype(np.float32),
    half=whole.astype(ml_dtypes.bfloat16),
    quantised=whole.astype(np.int8),
  )
  return tmp_path


@pytest.fixture
def several(tmp_path):
  """Two files; a and b are in the first one, c is in the second."""
  ones = np.ones(2, np.float32)
  write(tmp_path / ONE, a=ones, b=ones)
  write(tmp_path / TWO, c=ones)
  place(tmp_path, {"a": ONE, "b": ONE, "c": TWO})
  return tmp_path


def place(directory, weight_map):
  text = json.dumps({"metadata": {}, "weight_map": weight_map})
  (directory / INDEX).write_text(text)


def twice(header):
  text = header + b"," + header[1:] + b"}"
  return len(text).to_bytes(8, "little") + text + bytes(4)


def problems(directory):
  with safetensors_io.TensorFiles(directory) as files:
    return files.problems


def test_slices_are_read_and_counted(single):
  with safetensors_io.TensorFiles(single) as files:
    assert not files.problems
    # Opening reads no tensor.
    assert files.bytes_read == 0
    wide = files.read("wide", (slice(1, 3), slice(0, 2)))
    assert wide.tolist() == [[4, 5], [8, 9]]
    half = files.read("half", (slice(0, 1), slice(3, 4)))
    assert (half.dtype, half.tolist()) == (ml_dtypes.bfloat16, [[3]])
    # 4 floats of 4 bytes and one of 2.
    assert files.bytes_read == 18
    assert files.read("wide").shape == (3, 4)


def test_headers_say_what_is_there(single):
  with safetensors_io.TensorFiles(single) as files:
    assert files.tensors["wide"] == (SINGLE, (3, 4), np.float32, "F32")
    assert files.tensors["half"].dtype == ml_dtypes.bfloat16
    assert files.tensors["quantised"].dtype is None
    assert files.tensors["quantised"].code == "I8"


def test_a_header_and_the_data_after_it_are_a_file(tmp_path):
  a = np.arange(3, dtype=ml_dtypes.bfloat16)
  b = np.arange(4, dtype=np.float32).reshape(2, 2)
  header = safetensors_io.header(
    {"a": (a.shape, a.dtype), "b": (b.shape, b.dtype)}
  )
  # The data starts at a multiple of 8 bytes.
  assert len(header) % 8 == 0
  path = tmp_path / SINGLE
  path.write_bytes(header + a.tobytes() + b.tobytes())
  read = safetensors.numpy.load_file(path)
  assert read["a"].tobytes() == a.tobytes()
  assert np.array_equal(read["b"], b)


def test_files_of_an_index_are_one(several):
  with safetensors_io.TensorFiles(several) as files:
    assert not files.problems
    assert {name: x.file for name, x in files.tensors.items()} == {
      "a": ONE,
      "b": ONE,
      "c": TWO,
    }
    assert files.read("c").tolist() == [1, 1]


def test_a_single_file_goes_before_an_index_as_in_transformers(several):
  write(several / SINGLE, d=np.zeros(1, np.float32))
  with safetensors_io.TensorFiles(several) as files:
    assert list(files.tensors) == ["d"]


@pytest.mark.parametrize(
  "change",
  [
    lambda data: b"",
    lambda data: b"\x93NUMPY" * 50,
    lambda data: data[:12],
    lambda data: data[:-4],
    lambda data: data + b"more",
    lambda data: data[:8] + b"!" + data[9:],
  ],
  ids=["empty", "foreign", "cut header", "cut data", "longer", "header"],
)
def test_a_damaged_file_is_named_with_its_size(single, change):
  file = single / SINGLE
  data = change(file.read_bytes())
  file.write_bytes(data)
  (problem,) = problems(single)
  start = f"{SINGLE} ({len(data)} bytes) is damaged or cut short: "
  assert problem.startswith(start)
  assert problem.endswith("; download or copy it again")


def test_a_file_that_is_not_there_is_named_and_its_tensors_known(several):
  (several / ONE).unlink()
  with safetensors_io.TensorFiles(several) as files:
    assert files.problems == [f"{ONE} does not exist"]
    assert files.unread == {"a", "b"}
    assert set(files.tensors) == {"c"}


def test_an_index_that_contradicts_the_files_is_told_both_ways(several):
  place(several, {"a": ONE, "b": TWO, "c": TWO})
  assert problems(several) == [
    f"{ONE} holds b, which {INDEX} does not place there",
    f"{INDEX} promises b in {TWO}, which lacks it",
  ]


def test_a_file_that_is_missing_from_the_index_is_named(several):
  place(several, {"a": ONE, "b": ONE})
  assert problems(several) == [f"{TWO} is missing from {INDEX}"]


def test_a_name_that_no_file_can_have_is_a_problem(several):
  place(several, {"a": ONE, "b": ONE, "c": "x" * 300})
  with safetensors_io.TensorFiles(several) as files:
    (problem,) = [text for text in files.problems if "x" * 300 in text]
    assert files.unread == {"c"}
  assert "cannot be read: File name too long" in problem


@pytest.mark.parametrize(
  ("text", "reason"),
  [
    ("{", f"{INDEX} is not valid JSON: Expecting property"),
    ("[]", "must hold an object, not list"),
    ('{"a":' * 100_000, "nested deeper than 64 levels"),
    ('{"weight_map": {}}', f"{INDEX} has no weight_map"),
    (
      '{"weight_map": {"x": "../y"}}',
      "x lies in '../y', which must be the name of a file",
    ),
    (
      '{"weight_map": {"x": 3}}',
      "x lies in 3, which must be the name of a file",
    ),
  ],
)
def test_an_index_that_is_none_is_told(several, text, reason):
  (several / INDEX).write_text(text)
  (problem,) = problems(several)
  assert reason in problem


@pytest.mark.parametrize(
  ("data", "reason"),
  [
    # The package itself reads headers of up to 100 MB.
    (
      (40 << 20).to_bytes(8, "little") + b" " * (40 << 20),
      "41,943,040 bytes are more than the 33,554,432",
    ),
    (
      twice(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'),
      "'a' is there twice",
    ),
  ],
  ids=["large", "a tensor twice"],
)
def test_a_header_that_the_package_reads_may_be_refused(tmp_path, data, reason):
  (tmp_path / SINGLE).write_bytes(data)
  (problem,) = problems(tmp_path)
  assert reason in problem


def test_a_pipe_is_not_waited_for(several):
  (several / ONE).unlink()
  os.mkfifo(several / ONE)
  assert any("is a pipe" in problem for problem in problems(several))


def test_a_directory_without_files_says_what_it_lacks(tmp_path):
  assert problems(tmp_path) == [f"it holds no {SINGLE} and no {INDEX}"]
  assert problems(tmp_path / "none") == ["the directory does not exist"]


def test_names_are_listed_in_the_order_of_layers_and_counted():
  names = [f"layers.{i}.x" for i in (10, 2, 1)]
  assert safetensors_io.listing(names) == "layers.1.x, layers.2.x, layers.10.x"
  assert safetensors_io.listing(names, 2) == "layers.1.x, layers.2.x and 1 more"
