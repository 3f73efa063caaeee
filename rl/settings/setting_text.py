"""A value as typed on the command line, taken apart: nothing is evaluated.

2,4   (2, 4)   [2, 4]              items
{"data": 2}   {data: 2}            pairs
losses.Gspo(clip_low=3e-4)         a call, with fields by name
losses.Gspo                        the same, with none
anything else                      itself; in quotes it may hold , and brackets
"""

import ast
import dataclasses
import re
from typing import Any

_CLOSING = {"(": ")", "[": "]", "{": "}"}
_NAME = r"[^\W\d]\w*"
_PATH = re.compile(rf"{_NAME}(\.{_NAME})*")


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
  """Words of the command line, not yet read as anything."""

  text: str

  def __repr__(self) -> str:
    return self.text


def take_apart(text: str) -> Any:
  """Returns a list, a dict or a `Text`, with `Text` in their places.

  A call is a dict with its path as "class", as it is in JSON.

  Raises:
    ValueError: brackets or quotes that do not match, an item or a name that
      is missing.
  """
  text = text.strip()
  items = _split(text, ",")
  if len(items) > 1:
    return _items(items)
  if text[0] in "([" and _end(text, 0) == len(text):
    inside = text[1:-1].strip()
    return _items(_split(inside, ",")) if inside else []
  if text[0] == "{" and _end(text, 0) == len(text):
    return _named(text[1:-1], ":")
  if (path := _PATH.match(text)) is None:
    return _piece(text)
  start = path.end()
  if text[start : start + 1] == "(" and _end(text, start) == len(text):
    fields = _named(text[start + 1 : -1], "=")
    if wrong := [name for name in fields if not name.isidentifier()]:
      raise ValueError(f"{wrong[0]!r} is no name of a field")
    return {"class": path[0]} | fields
  if start == len(text) and "." in text:
    return {"class": text}
  return _piece(text)


def _items(items: list[str]) -> list[Text]:
  # (2,) is one item.
  if len(items) > 1 and not items[-1]:
    items = items[:-1]
  return [_piece(item) for item in items]


def _named(inside: str, separator: str) -> dict[str, Text]:
  if not inside.strip():
    return {}
  pairs = {}
  items = _split(inside, ",")
  for item in items if items[-1] else items[:-1]:
    name, *value = _split(item, separator, most=1)
    if not value:
      raise ValueError(f"{item!r} lacks a name; write NAME{separator}VALUE")
    pairs[_piece(name).text] = _piece(value[0])
  return pairs


def _piece(text: str) -> Text:
  """Returns a part as it stands, or what is between its quotes."""
  if not text:
    raise ValueError("a value is missing")
  if text[0] in "\"'" and _end(text, 0) == len(text):
    return Text(str(ast.literal_eval(text)))
  return Text(text)


def _split(text: str, separator: str, most: int = -1) -> list[str]:
  """Returns the parts between separators outside brackets and quotes."""
  if not text:
    raise ValueError("a value is missing")
  parts, start, i = [], 0, 0
  while i < len(text):
    if text[i] == separator and most:
      parts.append(text[start:i].strip())
      most -= 1
      i = start = i + 1
    # A quote inside a word, as in it's, is a letter.
    elif text[i] in _CLOSING or _opens_quote(text, i):
      i = _end(text, i)
    elif text[i] in _CLOSING.values():
      raise ValueError(f"{text[i]!r} closes nothing")
    else:
      i += 1
  return [*parts, text[start:].strip()]


def _opens_quote(text: str, i: int) -> bool:
  if text[i] not in "\"'":
    return False
  before = text[:i].rstrip()
  return not before or before[-1] in "([{,:="


def _end(text: str, start: int) -> int:
  """Returns the index after what closes the bracket or quote at `start`."""
  if text[start] in "\"'":
    found = re.compile(r"(?s)(['\"])(?:\\.|(?!\1).)*\1").match(text, start)
    if found is None:
      raise ValueError(f"{text[start]} is not closed")
    return found.end()
  closing, i = _CLOSING[text[start]], start + 1
  while i < len(text):
    if text[i] == closing:
      return i + 1
    if text[i] in _CLOSING.values():
      raise ValueError(f"{text[i]!r} does not close {text[start]!r}")
    nested = text[i] in _CLOSING or _opens_quote(text, i)
    i = _end(text, i) if nested else i + 1
  raise ValueError(f"{text[start]!r} is not closed")
