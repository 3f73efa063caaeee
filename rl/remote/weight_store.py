"""Weights in shared memory, for other processes of this host.

`weight_stream` sends its slices to other hosts, and takes them from there.

  learner --write--> memory in the form of a file <--read-- engine, its slices

Several processes can fill one file, each with the slices that it has.

The file is laid out as safetensors. It has no name in any directory: readers
open it by way of the process that wrote it, and its memory is free when the
last of them has ended, however that came about.

Source of the layout: Hugging Face's safetensors, README, "Format".
"""

import contextlib
import dataclasses
import itertools
import json
import math
import mmap
import os
import pathlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self

import jax
import numpy as np

from models.hf import safetensors_io

MEMORY = "twinmesh-weights"
"""Name of all such memory, in the lists of the system."""


_num_kept = itertools.count()


class StoredFile:
  """The memory of some tensors; freed when nothing refers to it any more.

  Attributes:
    path: at which other processes of the same user open it.
    nbytes: of the header and all tensors.
  """

  def __init__(self, nbytes: int):
    self._handle = os.memfd_create(MEMORY)
    weakref.finalize(self, os.close, self._handle)
    os.ftruncate(self._handle, nbytes)
    self.nbytes = nbytes
    self.path = f"/proc/{os.getpid()}/fd/{self._handle}"

  def write(self, start: int, data: bytes | memoryview) -> int:
    """Writes some bytes and returns where they end."""
    view = memoryview(data).cast("B")
    while len(view):
      count = os.pwrite(self._handle, view, start)
      start, view = start + count, view[count:]
    return start


class Tensor(NamedTuple):
  """A tensor of a store: its file, its name there, and its form."""

  path: str
  name: str
  shape: tuple[int, ...]
  dtype: str


@dataclasses.dataclass(eq=False)
class StoredTensor:
  """A tensor in the store, in the place of an array; equal to itself only.

  Attributes:
    name: of the tensor, unlike any other of its store.
    array: the array that `WeightStore` has written, while it exists.
  """

  file: StoredFile
  name: str
  shape: tuple[int, ...]
  dtype: np.dtype
  array: weakref.ref[jax.Array] | None = None

  @property
  def nbytes(self) -> int:
    """Bytes of its values."""
    return math.prod(self.shape) * self.dtype.itemsize

  @property
  def address(self) -> Tensor:
    """The address at which another process reads it."""
    return Tensor(self.file.path, self.name, tuple(self.shape), self.dtype.name)


def reserve(
  forms: Sequence[tuple[tuple[int, ...], np.dtype]],
) -> list[StoredTensor]:
  """Returns tensors in one new file, for `StoreWriter` to fill.

  Args:
    forms: shape and dtype of each.
  """
  tensors, _ = _reserved({str(i): form for i, form in enumerate(forms)})
  return tensors


def keep(arrays: Sequence[np.ndarray]) -> list[StoredTensor]:
  """Returns tensors in one new file with these values."""
  # A reader that comes too late finds other memory at the path of a free one.
  return _stored({f"kept {next(_num_kept)}": array for array in arrays})


def _stored(values: Mapping[str, np.ndarray]) -> list[StoredTensor]:
  """Returns tensors in one new file with these values."""
  tensors, end = _reserved(
    {name: (value.shape, value.dtype) for name, value in values.items()}
  )
  for tensor, value in zip(tensors, values.values(), strict=True):
    data = value.reshape(-1).view(np.uint8).data
    end = tensor.file.write(end, data)
  return tensors


def _reserved(
  forms: Mapping[str, tuple[tuple[int, ...], np.dtype]],
) -> tuple[list[StoredTensor], int]:
  """Returns tensors in one new file, and where the first of them begins."""
  header = safetensors_io.header(forms)
  sizes = [safetensors_io.num_bytes(*form) for form in forms.values()]
  file = StoredFile(len(header) + sum(sizes))
  start = file.write(0, header)
  return [StoredTensor(file, x, *form) for x, form in forms.items()], start


class WeightStore:
  """The tensors of one process, for the engines of others on its host.

  `weight_transfer.MeshTransfer` calls `write` on a thread of its own. What
  several engines need is written once.
  """

  def __init__(self):
    self._names = itertools.count()
    # By the identity of the array, which another may have later.
    self._written = weakref.WeakValueDictionary[int, StoredTensor]()

  def write(self, tree: Any) -> Any:
    """Returns a tree of stored tensors with the values of these arrays."""
    arrays, structure = jax.tree.flatten(tree)
    stored = [self._found(array) for array in arrays]
    fresh = [i for i, tensor in enumerate(stored) if tensor is None]
    if fresh:
      values = [safetensors_io.on_host(arrays[i]) for i in fresh]
      tensors = _stored({str(next(self._names)): value for value in values})
      for i, tensor in zip(fresh, tensors, strict=True):
        tensor.array = weakref.ref(arrays[i])
        stored[i] = self._written[id(arrays[i])] = tensor
    return structure.unflatten(stored)

  def _found(self, array: jax.Array) -> StoredTensor | None:
    """Returns the tensor of an array that was written before."""
    tensor = self._written.get(id(array))
    if tensor is None or tensor.array is None or tensor.array() is not array:
      return None
    return tensor


class DamagedFile(ValueError):
  """A file of the store is not what was announced."""


class _MappedFile:
  """The tensors of a file that another process has made; a context."""

  _mode, _access = "rb", mmap.ACCESS_READ

  def __init__(self, path: str):
    """Opens a file.

    Raises:
      DamagedFile: it is gone, cut short or no such file.
    """
    self._path = path
    try:
      with pathlib.Path(path).open(self._mode) as file:
        self._memory = mmap.mmap(file.fileno(), 0, access=self._access)
    except (OSError, ValueError) as error:
      raise DamagedFile(f"{path} cannot be opened: {error}") from error
    try:
      self._start = 8 + int.from_bytes(self._memory[:8], "little")
      self._header = json.loads(self._memory[8 : self._start])
      if self._start > len(self._memory) or not isinstance(self._header, dict):
        raise ValueError("it is cut short, or no mapping")
    except (ValueError, OverflowError) as error:
      raise DamagedFile(f"{path} has no header: {error}") from error

  def whole(
    self, name: str, shape: Sequence[int], dtype: np.dtype
  ) -> np.ndarray:
    """Returns a tensor in the memory of the file.

    Raises:
      DamagedFile: the tensor is missing, another one, or cut short.
    """
    entry = self._header.get(name)
    if entry is None:
      raise DamagedFile(f"{self._path} holds no tensor {name}")
    found = tuple(entry["shape"]), safetensors_io.CODES.get(entry["dtype"])
    if found != (tuple(shape), dtype):
      raise DamagedFile(
        f"{self._path} holds {found} as tensor {name}, not {(shape, dtype)}"
      )
    start, end = entry["data_offsets"]
    count = math.prod(shape)
    if self._start + end > len(self._memory) or end - start != (
      count * dtype.itemsize
    ):
      raise DamagedFile(f"{self._path} is cut short in tensor {name}")
    whole = np.frombuffer(self._memory, dtype, count, self._start + start)
    return whole.reshape(tuple(shape))

  def close(self) -> None:
    """Closes the file."""
    self._memory.close()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()


class StoreReader(_MappedFile):
  """Reads slices of the tensors of another process; a context, or `close` it.

  Attributes:
    bytes_read: of all slices so far.
  """

  bytes_read = 0

  def read(
    self,
    name: str,
    shape: Sequence[int],
    dtype: np.dtype,
    index: tuple[slice, ...],
  ) -> np.ndarray:
    """Returns a slice of a tensor, in memory of its own.

    Raises:
      DamagedFile: the tensor is missing, another one, or cut short.
    """
    # A copy: jax on a CPU would otherwise use the writer's memory.
    piece = self.whole(name, shape, dtype)[index].copy()
    self.bytes_read += piece.nbytes
    return piece


class StoreWriter(_MappedFile):
  """Writes slices of the tensors of a file that `reserve` has made."""

  _mode, _access = "r+b", mmap.ACCESS_WRITE

  def write(self, name: str, array: jax.Array) -> None:
    """Writes those slices of an array that this process is to write.

    Raises:
      DamagedFile: the tensor is missing, another one, or cut short.
    """
    whole = self.whole(name, array.shape, array.dtype)
    for index, values in own_slices(array):
      whole[index] = values


def own_slices(
  array: jax.Array,
) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
  """Yields the slices of an array that this process is to write."""
  for shard in array.addressable_shards:
    if shard.replica_id == 0:
      yield shard.index, jax.device_get(shard.data)


class Reader(Protocol):
  """Reads slices of the tensors of a file; see `StoreReader`."""

  bytes_read: int

  def read(
    self,
    name: str,
    shape: Sequence[int],
    dtype: np.dtype,
    index: tuple[slice, ...],
  ) -> np.ndarray:
    """Returns a slice of a tensor, in memory of its own."""
    ...

  def __enter__(self) -> "Reader": ...

  def __exit__(self, *_: object) -> None: ...


def placed(
  reader: Reader, tensor: Tensor, place: jax.sharding.Sharding
) -> jax.Array:
  """Returns the array of a tensor, of which devices get what they keep."""
  dtype = np.dtype(tensor.dtype)

  def read(index: tuple[slice, ...] | None) -> np.ndarray:
    return reader.read(tensor.name, tensor.shape, dtype, index or ())

  with jax.transfer_guard("allow"):
    return jax.make_array_from_callback(tuple(tensor.shape), place, read)


class Readers(contextlib.ExitStack):
  """The open files of several tensors, by their paths; a context.

  Args:
    opened: opens a file by its path.
  """

  def __init__(self, opened: Callable[[str], Reader] = StoreReader):
    super().__init__()
    self._opened = opened
    self._open: dict[str, Reader] = {}

  def of(self, tensor: Tensor) -> Reader:
    """Returns the file of a tensor."""
    if tensor.path not in self._open:
      reader = self.enter_context(self._opened(tensor.path))
      self._open[tensor.path] = reader
    return self._open[tensor.path]

  @property
  def bytes_read(self) -> int:
    """Bytes of all slices so far."""
    return sum(reader.bytes_read for reader in self._open.values())
