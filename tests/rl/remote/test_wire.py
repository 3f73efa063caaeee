"""Bytes of values: what passes, and what is refused."""

import dataclasses
import pickle

import ml_dtypes
import msgpack
import numpy as np
import pytest

from rl.engine import contract
from rl.remote import wire


def test_plain_values_come_back_with_tuples_for_lists():
  value = {
    "n": np.int64(5),
    "a": (1, 2.5, None, True, b"x", "ä"),
    "c": [[], {}],
    "big": 2**63,
  }
  expected = value | {"n": 5, "c": ((), {})}
  assert wire.unpack(wire.pack(value)) == expected


@pytest.mark.parametrize(
  "array",
  [
    np.arange(6, dtype=np.int32).reshape(2, 3),
    np.array(1.5, np.float64),
    np.zeros((0, 3), np.float32),
    np.array([1, -2.5, np.nan, np.inf], ml_dtypes.bfloat16),
    np.array([True, False]),
    np.arange(8, dtype=np.uint8)[::2],
  ],
  ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_arrays_come_back_to_the_bit_and_may_be_written_to(array):
  found = wire.unpack(wire.pack({"x": array}))["x"]
  assert (found.dtype, found.shape) == (array.dtype, array.shape)
  assert found.tobytes() == array.tobytes()
  found[...] = 0


def test_requests_and_completions_come_back_field_by_field():
  request = contract.DecodeRequest(
    request_id="r",
    session="s",
    tokens=np.array([1, 2], np.int32),
    max_tokens=3,
    stop_ids=(7, 8),
    bias=np.array([0, -np.inf], np.float32),
    priority=(1, 2),
  )
  top = contract.TopLogprobs(
    ids=np.array([[3]], np.int32), logprobs=np.array([[-0.5]], np.float32)
  )
  completion = contract.Completion(
    tokens=np.array([3], np.int32),
    logprobs=np.array([-0.5], np.float32),
    versions=np.array([4], np.int32),
    stop="stop",
    cached_tokens=5,
    decode_s=0.25,
    top=top,
  )
  for value in (request, completion):
    found = wire.unpack(wire.pack(value))
    assert type(found) is type(value)
    for field in dataclasses.fields(value):
      was, now = (getattr(x, field.name) for x in (value, found))
      if field.name == "top" and was is not None:
        np.testing.assert_array_equal(now.ids, was.ids)
      else:
        np.testing.assert_array_equal(now, was)


@pytest.mark.parametrize(
  "value",
  [object(), {1, 2}, print, np.array([object()]), 2**70, 1j],
  ids=["object", "set", "function", "objects", "big", "complex"],
)
def test_nothing_else_is_sent(value):
  with pytest.raises(wire.Malformed, match="cannot be sent"):
    wire.pack([value])


def _record(name, fields):
  return msgpack.packb(msgpack.ExtType(2, wire.pack((name, fields))))


@pytest.mark.parametrize(
  "data",
  [
    b"",
    b"\xc1",
    wire.pack((1, 2))[:-1],
    wire.pack(1) + b"more",
    pickle.dumps({"a": 1}),
    msgpack.packb(msgpack.ExtType(9, b"")),
    _record("Popen", {"args": ("true",)}),
    _record("Delta", {"surprise": 1}),
    msgpack.packb(msgpack.ExtType(1, wire.pack(("object", (1,), b"12345678")))),
    msgpack.packb(msgpack.ExtType(1, wire.pack(("int32", (9,), b"1234")))),
  ],
  ids=lambda data: repr(data[:12]),
)
def test_bytes_that_are_no_value_are_refused(data):
  with pytest.raises(wire.Malformed):
    wire.unpack(data)


def test_random_bytes_are_values_or_refused():
  rng = np.random.default_rng(0)
  whole = wire.pack({"x": np.arange(9), "y": ("text", 3)})
  refused = 0
  for _ in range(2000):
    data = bytearray(whole)
    for place in rng.integers(0, len(data), 3):
      data[place] = rng.integers(256)
    try:
      wire.unpack(bytes(data))
    except wire.Malformed:
      refused += 1
  assert refused > 100
