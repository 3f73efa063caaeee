"""Bounds of one request, by the bytes of its body."""

import json

import pytest

from launch.http import json_fields, limits
from models.chat import byte_chat, word_chat

BOUNDS = limits.RequestLimits(
  body_bytes=1000, values=10, characters=100, length=20
)


def nested(depth):
  return '{"a":' + "[" * (depth - 1) + "]" * (depth - 1) + "}"


@pytest.mark.parametrize(
  "body",
  [
    "{}",
    '{"a": "[[[[[[[[[[[,,,,,,,,,,,,,{{{{{{{"}',
    '{"a": "\\"[,\\"[,\\\\", "b": ["\\\\\\""]}',
    # An object, an array, 7 commas, and a comma.
    '{"a": [1, 2, 3, 4, 5, 6, 7, 8], "b": 1}',
  ],
)
def test_a_body_within_the_bounds_is_read(body):
  assert BOUNDS.loads(body.encode()) == json.loads(body)


@pytest.mark.parametrize(
  ("body", "words"),
  [
    ('{"a": [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]}', "over 10 values"),
    ("{" + ",".join(f'"{i}":1' for i in range(11)) + "}", "over 10 values"),
    ('"\\"' * 1000, "over 10 values"),
    ('"' * 1001, "over 10 values"),
    ('{"a": "', "not JSON"),
    ('{"a": "\\', "not JSON"),
    ("]]]]", "not JSON"),
    ("[]", "JSON array"),
  ],
)
def test_other_bodies_are_refused(body, words):
  with pytest.raises(json_fields.BadRequest, match=words):
    BOUNDS.loads(body.encode())


def test_nesting_is_bounded_but_not_in_texts():
  bounds = limits.of_chat(word_chat.WordChat(("go",)), 1000)
  assert bounds.loads(nested(limits.MAX_DEPTH).encode())
  assert bounds.loads(json.dumps({"a": "[" * 1000}).encode())
  with pytest.raises(json_fields.BadRequest, match="nested 65 deep; 64 is"):
    bounds.loads(nested(limits.MAX_DEPTH + 1).encode())


def test_a_text_that_cannot_fit_is_refused():
  # "<agent>" is the longest of the ids, and a space follows it: 100 times 8.
  bounds = limits.of_chat(word_chat.WordChat(("go", "on")), 100)
  bounds.check_characters(800, "prompt")
  with pytest.raises(json_fields.BadRequest, match=r"have 800 .* 801; shorten"):
    bounds.check_characters(801, "prompt")


@pytest.mark.parametrize(("length", "kib"), [(512, 160), (1 << 20, 16384)])
def test_the_bytes_of_a_body_follow_from_the_length_of_the_context(length, kib):
  bounds = limits.of_chat(byte_chat.ByteChat(), length)
  assert bounds.body_bytes == kib << 10


@pytest.mark.parametrize(
  "body", [b'{"\xed\xa0\x80": 1}', '{"\\ud800": 1}'.encode("utf-16-le")]
)
def test_half_a_surrogate_pair_is_refused_however_it_is_sent(body):
  # Python's JSON would read the bytes, and a reply could not repeat them.
  with pytest.raises(json_fields.BadRequest, match="not JSON"):
    json_fields.loads(body)
