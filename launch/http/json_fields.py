"""Reads typed fields of untrusted JSON."""

import json
import math
from collections.abc import Mapping
from typing import Any

_NAMES = {
  bool: "boolean",
  str: "text",
  int: "integer",
  float: "number",
  list: "array",
  dict: "object",
}
_MISSING: Any = object()
_MAX_MESSAGE, _MAX_PARAM = 1000, 200


class BadRequest(ValueError):
  """A request that is refused; clients get it as OpenAI's error object.

  What it repeats of the request is cut.

  Attributes:
    param: the field at fault.
    code: machine-readable reason.
    status: HTTP status.
  """

  def __init__(
    self,
    message: str,
    param: str | None = None,
    code: str | None = None,
    status: int = 400,
  ):
    super().__init__(cut(message, _MAX_MESSAGE))
    self.param = param and cut(param, _MAX_PARAM)
    self.code = code
    self.status = status


def wrong(name: str, what: str, code: str | None = None) -> BadRequest:
  """Returns the refusal of a field, whose name begins the message."""
  return BadRequest(f"{name}{what}", name, code)


def loads(body: bytes) -> dict[str, Any]:
  """Returns a JSON object.

  Raises:
    BadRequest: the body is anything else.
  """
  try:
    # Of bytes Python would read half a surrogate pair, and UTF-16, in which the
    # escapes below are others.
    text = body.decode("utf-8-sig")
    data = json.loads(text, parse_constant=_refuse_constant)
    if b"\\u" in body:
      # JSON can escape half a surrogate pair, which UTF-8 cannot encode.
      json.dumps(data, ensure_ascii=False).encode()
  except (ValueError, RecursionError) as error:
    raise BadRequest(f"the body is not JSON: {error}") from None
  if not isinstance(data, dict):
    raise BadRequest(f"the body is a JSON {kind_of(data)}; send an object")
  return data


def get(
  body: Mapping[str, Any],
  name: str,
  kind: Any,
  default: Any = _MISSING,
  where: str = "",
) -> Any:
  """Returns a field; null counts as missing.

  Args:
    kind: a key of the table above, or a tuple of several.
    default: value of a missing field; without one the field is required.
    where: prefix of the name in errors.

  Raises:
    BadRequest: the field is missing, or of another kind.
  """
  value = body.get(name)
  if value is None:
    if default is _MISSING:
      raise wrong(f"{where}{name}", " is missing")
    return default
  if not fits(value, kind):
    kinds = kind if isinstance(kind, tuple) else (kind,)
    names = " or ".join(_NAMES[k] for k in kinds)
    raise wrong(f"{where}{name}", f"={shown(value)} must be of type {names}")
  return float(value) if kind is float else value


def as_object(data: Any, where: str) -> dict[str, Any]:
  """Returns data that must be a JSON object; else raises BadRequest."""
  if not isinstance(data, dict):
    raise wrong(where, f" is a JSON {kind_of(data)}; send an object")
  return data


def fits(value: Any, kind: Any) -> bool:
  """Returns whether a JSON value is of a kind, or of one of several.

  true is not an integer, 1 is also a number, and infinity is not a number.
  """
  if isinstance(value, bool):
    return kind is bool
  if kind is float:
    whole = isinstance(value, int) and abs(value) < 2**53
    return whole or (isinstance(value, float) and math.isfinite(value))
  return isinstance(value, kind)


def kind_of(value: Any) -> str:
  """Returns the JSON name of a value's kind: "integer", "array" .."""
  if value is None:
    return "null"
  for kind in _NAMES:
    if fits(value, kind):
      return _NAMES[kind]
  return "number"


def shown(value: Any) -> str:
  """Returns a value as JSON, cut to 80 characters."""
  try:
    text = json.dumps(value)
  except RecursionError:
    return f"{kind_of(value)} nested too deeply"
  return cut(text, 80)


def cut(text: str, length: int) -> str:
  """Returns a text of at most so many characters."""
  return text if len(text) <= length else f"{text[: length - 3]}..."


def _refuse_constant(constant: str) -> None:
  raise ValueError(f"{constant} is not a JSON number")
