"""Weights in shared memory: slices, lifetime, and files that are damaged."""

import gc
import math
import os
import pathlib
import struct

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors

from rl.remote import weight_store

DTYPES = ["float32", "bfloat16", "float8_e4m3fn", "int8", "float16"]


def values(dtype, seed=0, shape=(6, 4)):
  rng = np.random.default_rng(seed)
  return (10 * rng.normal(size=shape)).astype(np.dtype(dtype))


def handles() -> int:
  """Returns how many files of a store this process has open."""
  count = 0
  for entry in pathlib.Path("/proc/self/fd").iterdir():
    try:
      count += "twinmesh-weights" in os.readlink(entry)
    except FileNotFoundError:  # That of the listing itself.
      continue
  return count


def read(tensor, index=(), **changes):
  fields = {"shape": tensor.shape, "dtype": tensor.dtype} | changes
  with weight_store.StoreReader(tensor.file.path) as reader:
    piece = reader.read(tensor.name, fields["shape"], fields["dtype"], index)
    return piece, reader.bytes_read


@pytest.mark.parametrize("dtype", DTYPES)
def test_slices_are_read_to_the_bit_and_no_more_than_they(dtype):
  whole = values(dtype)
  tensor = weight_store.WeightStore().write({"x": jax.device_put(whole)})["x"]
  assert tensor.nbytes == whole.nbytes
  piece, size = read(tensor, (slice(2, 4), slice(0, 3)))
  assert piece.tobytes() == whole[2:4, :3].tobytes()
  assert size == 6 * np.dtype(dtype).itemsize


def test_the_layout_is_that_of_safetensors():
  arrays = {"a": values("float32"), "b": values("bfloat16", shape=(3,))}
  stored = weight_store.WeightStore().write(
    jax.tree.map(jax.device_put, arrays)
  )
  with safetensors.safe_open(stored["a"].file.path, framework="numpy") as file:
    for name, array in arrays.items():
      found = file.get_tensor(stored[name].name)
      assert found.tobytes() == array.tobytes()


def test_what_several_engines_need_is_written_once():
  store = weight_store.WeightStore()
  arrays = [jax.device_put(values("float32", seed)) for seed in range(3)]
  before = handles()
  first = store.write(arrays)
  again = store.write(arrays[1:])
  assert again[0] is first[1]
  assert again[1] is first[2]
  assert handles() == before + 1


def test_memory_is_free_when_nothing_refers_to_it_any_more():
  store, before, kept = weight_store.WeightStore(), handles(), []
  for seed in range(20):  # Twenty versions, of which one is kept.
    kept = store.write([jax.device_put(values("float32", seed))])
    gc.collect()
    assert handles() == before + 1
  path = kept[0].file.path
  del kept
  gc.collect()
  assert handles() == before
  with pytest.raises(weight_store.DamagedFile, match="cannot be opened"):
    weight_store.StoreReader(path)


def test_an_array_that_is_gone_is_not_taken_for_another_of_its_address():
  store = weight_store.WeightStore()
  for seed in range(50):
    whole = values("float32", seed)
    piece, _ = read(store.write([jax.device_put(whole)])[0])
    np.testing.assert_array_equal(piece, whole)


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    ({"shape": (4, 6)}, "holds .* as tensor 0, not"),
    ({"dtype": np.dtype(ml_dtypes.bfloat16)}, "holds .* as tensor 0, not"),
  ],
)
def test_another_form_than_announced_is_refused(changes, words):
  (tensor,) = weight_store.WeightStore().write(
    [jax.device_put(np.ones((6, 4)))]
  )
  with pytest.raises(weight_store.DamagedFile, match=words):
    read(tensor, **changes)
  tensor.name = "7"
  with pytest.raises(weight_store.DamagedFile, match="holds no tensor 7"):
    read(tensor)


@pytest.mark.parametrize(
  ("data", "words"),
  [
    (b"", "cannot be opened"),
    (b"1234", "no header"),
    (struct.pack("<Q", 2**63) + b"{}", "no header"),
    (struct.pack("<Q", 4) + b"null" + bytes(8), "no header"),
    (struct.pack("<Q", 9) + b"{'a': 1}x", "no header"),
  ],
  ids=["empty", "short", "long header", "null", "not json"],
)
def test_files_that_are_damaged_are_named(tmp_path, data, words):
  file = tmp_path / "weights"
  file.write_bytes(data)
  with pytest.raises(weight_store.DamagedFile, match=words):
    weight_store.StoreReader(str(file))


def test_a_file_that_was_cut_short_names_the_tensor(tmp_path):
  (tensor,) = weight_store.WeightStore().write(
    [jax.device_put(np.ones((6, 4)))]
  )
  file = tmp_path / "weights"
  file.write_bytes(pathlib.Path(tensor.file.path).read_bytes()[:-1])
  with (
    weight_store.StoreReader(str(file)) as reader,
    pytest.raises(weight_store.DamagedFile, match="is cut short in tensor 0"),
  ):
    reader.read(tensor.name, tensor.shape, tensor.dtype, ())


@pytest.mark.compiled
def test_whoever_reads_too_late_gets_nothing_of_another():
  first = weight_store.keep([np.full(4, 1.0, np.float32)])[0].address
  second = weight_store.keep([np.full(4, 2.0, np.float32)])[0].address
  # Its file may have the path of the one before, and never the name.
  assert first.name != second.name


def test_a_reserved_file_is_filled_with_every_slice_once():
  mesh = jax.make_mesh((2, 2), ("a", "b"))
  values = {
    (4, 6): jax.P("a", "b"),
    (6, 4): jax.P(None, "b"),
    (): jax.P(),
  }
  arrays = [
    jax.device_put(
      np.arange(math.prod(shape), dtype=np.float32).reshape(shape) + 1,
      jax.sharding.NamedSharding(mesh, spec),
    )
    for shape, spec in values.items()
  ]
  stored = weight_store.reserve([(x.shape, x.dtype) for x in arrays])
  with weight_store.StoreWriter(stored[0].file.path) as writer:
    for tensor, array in zip(stored, arrays, strict=True):
      writer.write(tensor.name, array)
    with pytest.raises(weight_store.DamagedFile, match="holds no tensor 7"):
      writer.write("7", arrays[0])
  with weight_store.Readers() as readers:
    for tensor, array in zip(stored, arrays, strict=True):
      place = jax.sharding.NamedSharding(mesh, jax.P())
      found = weight_store.placed(
        readers.of(tensor.address), tensor.address, place
      )
      np.testing.assert_array_equal(found, array)
