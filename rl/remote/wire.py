"""Values as bytes: msgpack, with arrays and the data of requests.

  value --pack--> bytes --unpack--> value

Only numbers, texts, bytes, sequences, mappings, arrays of numbers and the
classes of `_KNOWN` pass. Nothing that arrives can name code: this is why there
is no pickle. Sequences come back as tuples.
"""

import dataclasses
from typing import Any

import ml_dtypes
import msgpack
import numpy as np

from rl.engine import contract

_ARRAY, _RECORD = 1, 2
_KNOWN = {
  cls.__name__: cls
  for cls in (
    contract.Completion,
    contract.DecodeRequest,
    contract.Delta,
    contract.EngineStats,
    contract.TopLogprobs,
  )
}
_NUMBERS = {
  np.dtype(kind).name: np.dtype(kind)
  for kind in (
    *(bool, np.float16, np.float32, np.float64, ml_dtypes.bfloat16),
    *(np.int8, np.int16, np.int32, np.int64),
    *(np.uint8, np.uint16, np.uint32, np.uint64),
  )
}


class Malformed(ValueError):
  """Bytes that hold no value, or a value that cannot be sent."""


def pack(value: Any) -> bytes:
  """Returns a value as bytes.

  Raises:
    Malformed: it holds something that may not pass.
  """
  try:
    packer = msgpack.Packer(default=_extended, strict_types=True)
    return packer.pack(value)
  except (TypeError, ValueError, OverflowError) as error:
    raise Malformed(f"it cannot be sent: {error}") from error


def unpack(data: bytes) -> Any:
  """Returns the value of some bytes, whose arrays may be written to.

  Raises:
    Malformed: `pack` has not made them.
  """
  try:
    return msgpack.unpackb(data, ext_hook=_restored, use_list=False)
  except Malformed:
    raise
  # msgpack's own errors have no common class.
  except Exception as error:
    raise Malformed(f"it cannot be read: {error}") from error


def _extended(value: Any) -> Any:
  """Returns what stands for a value that msgpack does not know."""
  if isinstance(value, tuple | list):
    return list(value)
  if isinstance(value, np.ndarray | np.generic):
    if (name := value.dtype.name) not in _NUMBERS:
      raise TypeError(f"an array of {name}")
    if isinstance(value, np.generic):
      return value.item()
    return msgpack.ExtType(_ARRAY, pack((name, value.shape, value.tobytes())))
  if (name := type(value).__name__) in _KNOWN and type(value) is _KNOWN[name]:
    fields = {
      field.name: getattr(value, field.name)
      for field in dataclasses.fields(value)
    }
    return msgpack.ExtType(_RECORD, pack((name, fields)))
  if isinstance(value, int | float | str):  # Of a class of its own.
    return next(
      kind(value) for kind in (int, float, str) if isinstance(value, kind)
    )
  raise TypeError(f"a {type(value).__name__}")


def _restored(code: int, data: bytes) -> Any:
  if code == _ARRAY:
    name, shape, content = unpack(data)
    flat = np.frombuffer(content, _NUMBERS[name])
    return flat.reshape(shape).copy()
  if code == _RECORD:
    name, fields = unpack(data)
    return _KNOWN[name](**fields)
  raise Malformed(f"it cannot be read: unknown extension {code}")
