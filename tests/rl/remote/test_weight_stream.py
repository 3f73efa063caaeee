"""Weights between hosts: slices over TCP, and who gets none."""

import os
import time

import jax
import numpy as np
import pytest

from rl.remote import weight_store, weight_stream
from tests.rl.remote import test_weight_store

pytestmark = pytest.mark.process  # It is a server.


@pytest.fixture(scope="module")
def stream():
  made = weight_stream.WeightStream("127.0.0.1")
  yield made.address
  made.close()


def stored(value):
  return weight_store.WeightStore().write({"x": jax.device_put(value)})["x"]


def read(address, tensor, index=(), **changes):
  told = {
    "path": tensor.file.path,
    "shape": tensor.shape,
    "dtype": tensor.dtype,
  } | changes
  with weight_stream.StreamReader(address, told["path"]) as reader:
    piece = reader.read(tensor.name, told["shape"], told["dtype"], index)
    return piece, reader.bytes_read


@pytest.mark.parametrize("dtype", test_weight_store.DTYPES)
@pytest.mark.parametrize(
  ("index", "size"),
  [
    ((slice(2, 4), slice(0, 3)), 6),
    ((slice(None), slice(1, 2)), 6),
    ((slice(3, 6),), 12),
    ((), 24),
  ],
)
def test_slices_are_read_to_the_bit_and_no_more_than_they(
  stream, dtype, index, size
):
  whole = test_weight_store.values(dtype)
  piece, count = read(stream, stored(whole), index)
  assert piece.dtype == whole.dtype
  assert piece.tobytes() == whole[index].tobytes()
  assert count == size * np.dtype(dtype).itemsize


def test_a_number_is_a_tensor_too(stream):
  piece, _ = read(stream, stored(np.float32(2.5)))
  assert (piece.shape, float(piece)) == ((), 2.5)


def test_devices_get_what_they_keep_of_it(stream):
  tensor = stored(test_weight_store.values("float32", shape=(8, 4)))
  mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
  place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
  with weight_stream.StreamReader(stream, tensor.file.path) as reader:
    array = weight_store.placed(reader, tensor.address, place)
  assert reader.bytes_read == tensor.nbytes
  expected = test_weight_store.values("float32", shape=(8, 4))
  np.testing.assert_array_equal(jax.device_get(array), expected)


@pytest.fixture(scope="module")
def writable():
  made = weight_stream.WeightStream("127.0.0.1", writable=True)
  yield made.address
  made.close()


def write(address, tensor, array):
  with weight_stream.StreamWriter(address, tensor.file.path) as writer:
    writer.write(tensor.name, array)


@pytest.mark.parametrize("dtype", test_weight_store.DTYPES)
@pytest.mark.parametrize("spec", [("x", "y"), ("x",), (None, "y"), ()])
def test_slices_are_written_to_the_bit_where_they_belong(writable, dtype, spec):
  whole = test_weight_store.values(dtype, shape=(8, 4))
  mesh = jax.make_mesh((2, 2), ("x", "y"), devices=jax.devices()[:4])
  place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
  (tensor,) = weight_store.reserve([(whole.shape, whole.dtype)])
  write(writable, tensor, jax.device_put(whole, place))
  with weight_store.StoreReader(tensor.file.path) as reader:
    found = reader.read(tensor.name, whole.shape, whole.dtype, ())
  assert found.tobytes() == whole.tobytes()


def test_a_number_can_be_written(writable):
  (tensor,) = weight_store.reserve([((), np.dtype("float32"))])
  write(writable, tensor, jax.device_put(np.float32(2.5)))
  piece, _ = read(writable, tensor)
  assert float(piece) == 2.5


def test_engines_cannot_write(stream):
  tensor = stored(np.zeros(3, np.float32))
  with pytest.raises(weight_store.DamagedFile, match="not to be written"):
    write(stream, tensor, jax.device_put(np.ones(3, np.float32)))
  piece, _ = read(stream, tensor)
  assert piece.tolist() == [0, 0, 0]


def test_another_tensor_is_not_written(writable):
  (tensor,) = weight_store.reserve([((3,), np.dtype("float32"))])
  with pytest.raises(weight_store.DamagedFile, match="as tensor 0, not"):
    write(writable, tensor, jax.device_put(np.ones(4, np.float32)))


def test_nobody_without_the_token_gets_any(stream):
  tensor = stored(test_weight_store.values("float32"))
  wrong = weight_stream.StreamAddress(
    host=stream.host, port=stream.port, token="0" * 64
  )
  with pytest.raises(weight_store.DamagedFile, match="unknown token"):
    read(wrong, tensor)


def test_nothing_but_weights_can_be_asked_for(stream, tmp_path):
  tensor = stored(test_weight_store.values("float32"))
  secret = tmp_path / "secret"
  secret.write_text("x" * 100)
  with secret.open() as file:
    for path in (
      str(secret),
      f"/proc/{os.getpid()}/fd/{file.fileno()}",
      f"/proc/self/fd/{file.fileno()}",
      f"/proc/{os.getpid()}/fd/9999",
      f"/proc/{os.getpid()}/fd/../environ",
    ):
      with pytest.raises(
        weight_store.DamagedFile, match="no memory of weights"
      ):
        read(stream, tensor, path=path)


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    ({"shape": (4, 6)}, "as tensor 0, not"),
    ({"dtype": np.dtype("int32")}, "as tensor 0, not"),
  ],
)
def test_another_tensor_is_named_and_the_next_reader_is_served(
  stream, changes, words
):
  tensor = stored(test_weight_store.values("float32"))
  with pytest.raises(weight_store.DamagedFile, match=words):
    read(stream, tensor, **changes)
  piece, _ = read(stream, tensor)
  assert piece.shape == (6, 4)


def test_a_reader_may_pause_between_two_slices(stream, monkeypatch):
  monkeypatch.setattr(weight_stream, "_SILENCE_S", 0.1)
  tensor = stored(np.arange(4.0))
  with weight_stream.StreamReader(stream, tensor.file.path) as reader:
    for _ in range(2):
      piece = reader.read(tensor.name, tensor.shape, tensor.dtype, ())
      assert piece.tolist() == [0.0, 1.0, 2.0, 3.0]
      time.sleep(0.5)


def test_a_stream_that_has_ended_is_no_stream():
  made = weight_stream.WeightStream("127.0.0.1")
  tensor = stored(test_weight_store.values("float32"))
  made.close()
  with pytest.raises(OSError, match="refused"):
    read(made.address, tensor)
