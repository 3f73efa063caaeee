"""Fields of JSON that a stranger sent: of the right kind, or refused."""

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


class Refused(ValueError):
  """A request that cannot be answered, in OpenAI's form of an error.

  Attributes:
    param: the field at fault.
    code: a word for programs.
    status: of HTTP.
  """

  def __init__(
    self,
    message: str,
    param: str | None = None,
    code: str | None = None,
    status: int = 400,
  ):
    super().__init__(message)
    self.param = param
    self.code = code
    self.status = status


def loads(body: bytes) -> dict[str, Any]:
  """Returns a JSON object.

  Raises:
    Refused: it is none.
  """
  try:
    data = json.loads(body, parse_constant=_no_number)
    if b"\\u" in body:
      # Halves of surrogate pairs are escapes in JSON and no text at all here.
      json.dumps(data, ensure_ascii=False).encode()
  except (ValueError, RecursionError) as error:
    raise Refused(f"the body is not JSON: {error}") from None
  if not isinstance(data, dict):
    raise Refused(f"the body is a JSON {kind_of(data)}; send an object")
  return data


def get(
  body: Mapping[str, Any],
  name: str,
  kind: Any,
  default: Any = _MISSING,
  where: str = "",
) -> Any:
  """Returns a field; null counts as left out.

  Args:
    kind: a key of the table above, or several.
    default: of a field that is left out; without one it must be there.
    where: stands before the name in errors.

  Raises:
    Refused: it is missing, or of another kind.
  """
  value = body.get(name)
  if value is None:
    if default is _MISSING:
      raise Refused(f"{where}{name} is missing", f"{where}{name}")
    return default
  if not fits(value, kind):
    kinds = kind if isinstance(kind, tuple) else (kind,)
    names = " or ".join(_NAMES[k] for k in kinds)
    raise Refused(
      f"{where}{name}={shown(value)} is no {names}", f"{where}{name}"
    )
  return float(value) if kind is float else value


def fits(value: Any, kind: Any) -> bool:
  """Whether JSON is of a kind or of one of some.

  true is no integer, 1 is a number too, and an infinite one is none.
  """
  if isinstance(value, bool):
    return kind is bool
  if kind is float:
    whole = isinstance(value, int) and abs(value) < 2**53
    return whole or (isinstance(value, float) and math.isfinite(value))
  return isinstance(value, kind)


def kind_of(value: Any) -> str:
  """Returns what JSON calls a value: "integer", "array" .."""
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
    return f"a {kind_of(value)} of too many levels"
  return text if len(text) <= 80 else f"{text[:77]}..."


def _no_number(constant: str) -> None:
  raise ValueError(f"{constant} is no number of JSON")
