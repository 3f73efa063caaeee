"""The tensors of a directory of safetensors files, read slice by slice.

Opening reads headers only and raises nothing: what is wrong is collected in
`problems`, so that all of it can be told at once.

Source of the format: Hugging Face's safetensors, README, "Format".
"""

import contextlib
import fcntl
import glob
import json
import math
import os
import pathlib
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from jax.experimental import multihost_utils

from models import untrusted_files

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_DTYPES = {
  "F64": np.dtype(np.float64),
  "F32": np.dtype(np.float32),
  "F16": np.dtype(np.float16),
  "BF16": np.dtype(jnp.bfloat16),
}
CODES = {
  "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
  "I8": np.dtype(np.int8),
  "I32": np.dtype(np.int32),
} | _DTYPES
"""Every dtype that `header` can name; others than floats are never loaded."""
# 100,000 tensors need some 15 MB, and no model has so many.
_MAX_HEADER_BYTES = 32 * untrusted_files.MIB
_MAX_INDEX_BYTES = 32 * untrusted_files.MIB
_MAX_FILES = 10_000
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")


class Stored(NamedTuple):
  """A tensor as the header describes it.

  Attributes:
    dtype: None for one that is not a float, which cannot be read.
    code: the dtype in the format's own words, "BF16".
  """

  file: str
  shape: tuple[int, ...]
  dtype: np.dtype | None
  code: str


class TensorFiles:
  """Open files of one directory; a context, or `close` it.

  Attributes:
    directory: of the files.
    tensors: by name; of files that can be read.
    unread: tensors that the index promises in a file that cannot be read.
    problems: what is wrong with the files, a sentence each.
    bytes_read: of all slices so far.
  """

  def __init__(
    self,
    directory: str | os.PathLike[str],
    single: str = SINGLE,
    index: str | None = INDEX,
  ):
    """Opens every file of the directory, or of its index.

    Args:
      single: one file that holds everything; it goes before an index.
      index: JSON whose `weight_map` says which file holds which tensor.
    """
    self.directory = pathlib.Path(directory)
    self._stack = contextlib.ExitStack()
    self._handles: dict[str, Any] = {}
    self.tensors: dict[str, Stored] = {}
    self.unread: set[str] = set()
    self.problems: list[str] = []
    self.bytes_read = 0
    if (self.directory / single).exists():
      self._open(single)
    elif index and (self.directory / index).exists():
      self._open_indexed(index)
    elif not self.directory.is_dir():
      self.problems.append("the directory does not exist")
    else:
      needed = " and no ".join(filter(None, (single, index)))
      self.problems.append(f"it holds no {needed}")

  def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
    """Returns a slice of a tensor, in memory of its own.

    Args:
      index: contiguous slices, one an axis; none reads all.
    """
    file = self.tensors[name].file
    piece = self._handles[file].get_slice(name)[index]
    self.bytes_read += piece.nbytes
    return piece

  def close(self) -> None:
    """Closes the files; safe to call again."""
    self._handles.clear()
    self._stack.close()

  def __enter__(self) -> "TensorFiles":
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def _open(self, file: str) -> list[str]:
    """Opens a file and returns the names of its tensors; none if it cannot."""
    path = self.directory / file
    try:
      if not path.exists():
        self.problems.append(f"{file} does not exist")
        return []
    except OSError:  # Reading it says why.
      pass
    try:
      text = _header_text(path)
      handle = safetensors.safe_open(path, framework="numpy")
      self._stack.enter_context(handle)
      names = list(handle.keys())
      # The package takes the last of two tensors of one name.
      untrusted_files.parse_json(text, f"the header of {path}")
    except untrusted_files.BadFile as error:
      self.problems.append(str(error))
      return []
    except (safetensors.SafetensorError, OSError) as error:
      size = path.stat().st_size if path.is_file() else 0
      self.problems.append(
        f"{file} ({size:,} bytes) is damaged or cut short: {error}; "
        "download or copy it again"
      )
      return []
    self._handles[file] = handle
    for name in names:
      lazy = handle.get_slice(name)
      code = lazy.get_dtype()
      self.tensors[name] = Stored(
        file, tuple(lazy.get_shape()), _DTYPES.get(code), code
      )
    return names

  def _open_indexed(self, index: str) -> None:
    try:
      weight_map = _weight_map(self.directory / index)
    except ValueError as error:
      self.problems.append(str(error))
      return
    promised: dict[str, set[str]] = {}
    for name, file in weight_map.items():
      promised.setdefault(file, set()).add(name)
    for file, names in sorted(promised.items()):
      found = set(self._open(file))
      if file not in self._handles:
        self.unread |= names
        continue
      if lacking := names - found:
        self.unread |= lacking
        self.problems.append(
          f"{index} promises {listing(lacking)} in {file}, which lacks "
          f"{'it' if len(lacking) == 1 else 'them'}"
        )
      if surplus := found - names:
        self.problems.append(
          f"{file} holds {listing(surplus)}, which {index} does not place there"
        )
    for path in sorted(self.directory.iterdir()):
      if _SHARD.fullmatch(path.name) and path.name not in promised:
        self.problems.append(f"{path.name} is missing from {index}")


def listing(names: set[str] | list[str], most: int = 10) -> str:
  """Returns names in order, the first ones and how many more there are."""
  ordered = sorted(names, key=_natural)
  text = ", ".join(ordered[:most])
  return text + f" and {len(ordered) - most} more" * (len(ordered) > most)


@contextlib.contextmanager
def whole_directory(target: pathlib.Path) -> Iterator[pathlib.Path]:
  """Gives a directory to fill, which appears under its name when it is whole.

  Of several processes that fill it at once the first one gives it its content,
  and the others fail.

  Raises:
    ValueError: it cannot be written; nothing is left of it.
  """
  partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
  try:
    _remove_leftovers(target)
    partial.mkdir(parents=True)
    with _locked(partial):
      yield partial
      partial.rename(target)
  except OSError as error:
    raise ValueError(
      f"{target} cannot be written: {error}; choose another directory"
    ) from error
  finally:
    shutil.rmtree(partial, ignore_errors=True)


def _remove_leftovers(target: pathlib.Path) -> None:
  """Removes what killed processes have left of a directory."""
  pattern = f".{glob.escape(target.name)}.*.partial"
  for left in target.parent.glob(pattern):
    with contextlib.suppress(OSError), _locked(left) as is_mine:
      if is_mine:
        shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def _locked(directory: pathlib.Path) -> Iterator[bool]:
  """Locks a directory if no other process has; yields whether it could."""
  descriptor = os.open(directory, os.O_RDONLY)
  try:
    is_mine = True
    try:
      fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # Or a file system without locks: another may have it.
      is_mine = False
    yield is_mine
  finally:
    os.close(descriptor)


def on_host(array: jax.Array) -> np.ndarray:
  """Returns a whole array in order of its axes; each of several hosts calls."""
  if array.is_fully_addressable:
    return np.asarray(jax.device_get(array), order="C")  # Scalars as well.
  return multihost_utils.process_allgather(array, tiled=True)


def num_bytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
  """Returns the size of a tensor in a file."""
  return math.prod(shape) * dtype.itemsize


def header(
  tensors: Mapping[str, tuple[tuple[int, ...], np.dtype]],
) -> bytes:
  """Returns what stands before the data of a file, which follows in order.

  Args:
    tensors: shape and dtype by name.
  """
  codes = {dtype: code for code, dtype in CODES.items()}
  # transformers refuses a file that does not name its framework.
  fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
  start = 0
  for name, (shape, dtype) in tensors.items():
    end = start + num_bytes(shape, dtype)
    fields[name] = {
      "dtype": codes[dtype],
      "shape": shape,
      "data_offsets": (start, end),
    }
    start = end
  text = json.dumps(fields, separators=(",", ":")).encode()
  # Padded, so that the data is aligned.
  text += b" " * (-len(text) % 8)
  return len(text).to_bytes(8, "little") + text


def _weight_map(path: pathlib.Path) -> dict[str, str]:
  data = untrusted_files.read_object(path, _MAX_INDEX_BYTES)
  weight_map = data.get("weight_map")
  if not isinstance(weight_map, dict) or not weight_map:
    raise ValueError(f"{path} has no weight_map")
  for name, file in weight_map.items():
    if not isinstance(file, str) or pathlib.PurePath(file).name != file:
      raise ValueError(
        f"{path}: {name} lies in {file!r}, which must be the name of a file"
      )
  files = len(set(weight_map.values()))
  if files > _MAX_FILES:
    raise ValueError(
      f"{path} names {files:,} files, more than {_MAX_FILES:,}; download it "
      "again"
    )
  return weight_map


def _header_text(path: pathlib.Path) -> bytes:
  """Returns the header of a file, or what there is of it.

  Raises:
    BadFile: it is too large, or the file is a pipe.
  """
  length = untrusted_files.read_bytes(path, 8, count=8)
  # In a file that is cut short, the package says so.
  count = min(int.from_bytes(length, "little"), path.stat().st_size)
  return untrusted_files.read_bytes(path, _MAX_HEADER_BYTES, count, start=8)


def _natural(name: str) -> list[tuple[int, str]]:
  """Sorts layer 2 before layer 10."""
  return [
    (int(part), "") if part.isdecimal() else (-1, part)
    for part in re.split(r"(\d+)", name)
  ]
