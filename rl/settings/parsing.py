"""Reads raw values, command-line text or JSON, as an annotation asks for.

Text is taken apart by Python's own grammar, and nothing is evaluated:

  2,4   (2, 4)   [2, 4]              items
  {"data": 2}   {data: 2}            pairs
  gspo   gspo(clip_low=3e-4)         an object, with fields by name
  'package.module:function'           a function or a class itself
  'any text'                         a string that is not a number or a name
"""

import ast
import contextlib
import dataclasses
import difflib
import enum
import inspect
import pkgutil
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rl.settings import annotations, short_names, suggestions

_MAX_SHOWN = 80


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
  """Words of the command line, not yet read as a type."""

  text: str

  def __repr__(self) -> str:
    return self.text


class _Mismatch(Exception):
  """A raw value that does not fit; the caller knows the key and adds it.

  The text, if any, is the reason.
  """


def read_field(
  hint: Any, raw: Any, where: str, parts: Mapping[str, Any] | None = None
) -> Any:
  """Returns a raw value as the type that its annotation asks for.

  Args:
    raw: a `Text`, or plain data of JSON.
    where: the key, for errors.
    parts: annotations of the parts that may be set instead.

  Raises:
    SettingError: it does not fit; names what does, the nearest first.
  """
  try:
    return _read(hint, raw, where)
  except _Mismatch as error:
    reason = str(error)
  wrong, words = f"{where}={_shown(raw)}", annotations.describe(hint)
  if reason:
    takes = suggestions.fields_of(hint, str(raw))
    raise annotations.SettingError(
      f"{wrong}: {reason}; expected {words}{takes}"
    )
  message = f"{wrong}: expected {words}"
  meant = None
  if isinstance(raw, Text):
    message += suggestions.advice(hint, raw.text, fields=not parts)
    meant = suggestions.near(hint, raw.text)
  if parts and meant is None:
    below = (
      f"{where}.{name} ({annotations.describe(part)})"
      for name, part in parts.items()
    )
    message += ", or set a part of it: " + ", ".join(below)
  raise annotations.SettingError(message)


def check_kinds(tree: Any, path: str) -> None:
  """Checks that fields of an object made in Python hold what they should.

  A default may be of any kind, as in somebody's `limit: int = None`.

  Raises:
    SettingError: one holds something else, such as a class in the place of an
      object, or text that the command line would take.
  """
  try:
    hints = annotations.hints(type(tree))
  except NameError:  # An import of a class of others, for type checkers alone.
    return
  for name, hint in hints.items():
    value = getattr(tree, name)
    if not annotations.is_default(type(tree), name, value):
      _check_kind(hint, value, f"{path}.{name}" if path else name)


def _check_kind(hint: Any, value: Any, where: str) -> None:
  """Checks a value, and the items of a tuple or list; see `check_kinds`."""
  if annotations.takes(hint, value):
    items = value if isinstance(value, tuple | list) else ()
    kinds = annotations.item_hints(hint, len(items)) or ()
    for number, (kind, item) in enumerate(zip(kinds, items, strict=False)):
      _check_kind(kind, item, f"{where}.{number}")
    return
  makers = short_names.choices(hint)
  is_function = inspect.isfunction(value)
  if isinstance(value, type) or (is_function and value in makers.values()):
    word, kind = value.__name__, "function" if is_function else "class"
    out = f"; write {word}(...)"
    if not annotations.is_setting(annotations.made(value)):
      wanted = annotations.describe(hint)
      out = f", and no frozen dataclass; expected {wanted}"
    raise annotations.SettingError(f"{where}={word} is a {kind}{out}")
  shown = value.__name__ if is_function else _shown(value)
  message = f"{where}={shown}: expected {annotations.describe(hint)}"
  maker = isinstance(value, str) and makers.get(value)
  if maker:
    message += f"; in Python write {short_names.in_python(maker)}(...)"
  raise annotations.SettingError(message)


def sets(text: str, path: str) -> bool:
  """Returns whether a text gives a value to the setting at a path below it.

  `adamw(learning_rate=1e-3)` does so at learning_rate, and nowhere else.
  """
  name, _, rest = path.partition(".")
  try:
    shape = _shape(Text(text))
  except _Mismatch:
    return False
  if isinstance(shape, list):
    shape = {str(number): item for number, item in enumerate(shape)}
  if not isinstance(shape, dict) or name not in shape:
    return False
  return not rest or sets(shape[name].text, rest)


def turned_off(hint: Any, where: str) -> bool | None:
  """Returns the value that turns a setting off: False, or None.

  Raises:
    SettingError: it takes neither.
  """
  members = annotations.members(hint)
  if bool in members:
    return False
  if types.NoneType in members:
    return None
  words = annotations.describe(hint)
  raise annotations.SettingError(
    f"{where}: {words} cannot be turned off; give it a value"
  )


def _shown(raw: Any) -> str:
  text = repr(raw)
  return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


def _read(hint: Any, raw: Any, where: str) -> Any:
  """Returns the typed value; `where` is the key for errors further below."""
  name = str(raw).strip().strip("'\"")
  if annotations.takes_names(hint) and annotations.is_name(name):
    return _named(hint, name, where)
  members = annotations.members(hint)
  is_class = str not in members and any(map(annotations.is_object, members))
  if is_class and annotations.is_name(name.partition("(")[0]):
    raise _Mismatch(f"write {name.replace(':', '.', 1)}")
  if len(members) > 1:
    return _read_union(hint, raw, where)
  kind, arguments = annotations.kind(hint), typing.get_args(hint)
  if hint is Any and not isinstance(raw, Text):
    return _read_any(raw, where)
  if kind in annotations.SCALARS:
    return _read_scalar(kind, raw)
  if kind is Literal:
    return _read_choice({str(option): option for option in arguments}, raw)
  if annotations.is_a(kind, enum.Enum):
    by_value = {str(member.value): member for member in kind}
    return _read_choice(by_value | dict(kind.__members__), raw)
  shape = _shape(raw)
  if annotations.is_a(kind, Mapping) and isinstance(shape, dict):
    key_hint, item_hint = arguments or (str, Any)
    return {
      _read(key_hint, Text(k), where): _read(item_hint, v, f"{where}.{k}")
      for k, v in shape.items()
    }
  if annotations.is_a(kind, Sequence):
    if isinstance(raw, Text) and not isinstance(shape, list):
      # A lone `2` is a tuple of one; shape is `2` without quotes, if any.
      shape = [shape if isinstance(shape, Text) else raw]
    return _read_items(hint, shape, where)
  return _read_object(hint, shape, where)


def _read_any(raw: Any, where: str) -> Any:
  """Returns data of JSON for which no annotation says more."""
  match raw:
    case list():
      return _read_items(tuple, raw, where)
    case {"class": _}:
      return _read_object(Any, raw, where)
    case dict():
      return _read(dict, raw, where)
  return raw


def _read_union(hint: Any, raw: Any, where: str) -> Any:
  members, reason = annotations.members(hint), ""
  if any(map(annotations.is_object, members)):
    try:
      shape = _shape(raw)
      # Where text will do, a.b is the name of a file.
      if str not in members or shape != {"class": str(raw).strip()}:
        return _read_object(hint, shape, where)
    except _Mismatch as error:
      reason = str(error)
  for member in members:
    if not annotations.is_object(member):
      with contextlib.suppress(_Mismatch):
        return _read(member, raw, where)
  raise _Mismatch(reason)


def _read_scalar(kind: Any, raw: Any) -> Any:
  if isinstance(raw, Text):
    try:
      return _PARSERS[kind](raw.text)
    except (ValueError, KeyError) as error:
      raise _Mismatch from error
  if kind is float and type(raw) is int:
    return float(raw)
  if type(raw) is not kind:
    raise _Mismatch
  return raw


def _read_choice(options: Mapping[str, Any], raw: Any) -> Any:
  if str(raw) not in options:
    raise _Mismatch
  return options[str(raw)]


def _integer(text: str) -> int:
  with contextlib.suppress(ValueError):
    return int(text)
  if not (number := float(text)).is_integer():
    raise ValueError
  return int(number)


_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_PARSERS = {
  bool: lambda text: _BOOLEANS[text.lower()],
  int: _integer,
  float: float,
  str: str,
  types.NoneType: lambda text: {"none": None}[text.lower()],
}


def _shape(raw: Any) -> Any:
  """Returns text as JSON of the same shape, its leaves still text.

  A call is a dict with its name as "class", as in JSON.
  """
  if not isinstance(raw, Text):
    return raw
  text = raw.text.strip()

  def part(node: ast.expr) -> Text:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
      return Text(node.value)
    return Text(ast.get_source_segment(text, node) or "")

  try:
    node = ast.parse(text, mode="eval").body
  except (SyntaxError, ValueError) as error:
    raise _Mismatch(_unreadable(text, error)) from error
  match node:
    case ast.Tuple(elts=items) | ast.List(elts=items):
      return [part(item) for item in items]
    case ast.Dict(keys=keys, values=values) if all(keys):
      pairs = zip(keys, values, strict=True)
      return {part(k).text: part(v) for k, v in pairs if k}
    case ast.Call(func=maker, args=[], keywords=fields):
      named = {f.arg: part(f.value) for f in fields if f.arg}
      if len(named) == len(fields):
        return {"class": ast.unparse(maker)} | named
    case ast.Attribute():
      return {"class": text}
    case _ if not isinstance(node, ast.Call | ast.Dict):
      return part(node)
  raise _Mismatch("a value lacks its name; write NAME=VALUE, or {NAME: VALUE}")


def _unreadable(text: str, error: Exception) -> str:
  """Returns the reason with the value to put in quotes, if there is one."""
  for name, value in re.findall(r"(\w+)=([^\s,(){}\[\]'\"]+)", text):
    try:
      ast.parse(value, mode="eval")
    except SyntaxError:
      return f"put {value} in quotes: {name}='{value}'"
  reason = error.msg if isinstance(error, SyntaxError) else str(error)
  return (
    f"{reason}; text with other signs needs quotes"
    if text
    else "a value is missing"
  )


def _read_items(hint: Any, items: Any, where: str) -> Any:
  if not isinstance(items, list):
    raise _Mismatch
  hints = annotations.item_hints(hint, len(items))
  if hints is None:
    raise _Mismatch
  pairs = enumerate(zip(hints, items, strict=True))
  values = [_read(child, item, f"{where}.{i}") for i, (child, item) in pairs]
  return values if annotations.kind(hint) is list else tuple(values)


def _read_object(hint: Any, data: Any, where: str) -> Any:
  """Returns the object of {"class": name, field: raw value}, if it fits."""
  if isinstance(data, Text) and data.text in short_names.choices(hint):
    data = {"class": data.text}
  if not isinstance(data, dict) or not isinstance(data.get("class"), str):
    raise _Mismatch
  maker = _resolve(data["class"], hint, where)
  fields = {key: raw for key, raw in data.items() if key != "class"}
  value = _make(maker, fields, where)
  objects = filter(annotations.is_object, annotations.members(hint))
  if not any(annotations.fits(annotations.kind(m), value) for m in objects):
    raise _Mismatch
  return value


def _resolve(name: str, hint: Any, where: str) -> Any:
  """Returns a class of settings, or a function that returns such an object.

  Args:
    name: short, or the path that JSON has.
  """
  if "." not in name:
    found = short_names.choices(hint)
    if name in found:
      return found[name]
    advice = suggestions.advice(hint, name, apart=True)
    raise annotations.SettingError(
      f"{where}: nothing here is called {name}{advice}"
    )
  try:
    maker = pkgutil.resolve_name(name)
  except (ImportError, AttributeError, ValueError) as error:
    advice = suggestions.advice(hint, name, apart=True)
    advice = advice or suggestions.moved(name)
    raise annotations.SettingError(
      f"{where}: cannot import {name}: {error}{advice}"
    ) from error
  if not annotations.is_setting(annotations.made(maker)):
    if annotations.takes_names(hint):
      raise _Mismatch(f"write '{':'.join(name.rsplit('.', 1))}'")
    raise annotations.SettingError(
      f"{where}: {name} must be a frozen dataclass, or a function with one as "
      "its return annotation"
    )
  return maker


def _named(hint: Any, name: str, where: str) -> Any:
  """Returns the function or the class of MODULE:NAME."""
  try:
    found = pkgutil.resolve_name(name)
  except (ImportError, AttributeError, ValueError) as error:
    raise annotations.SettingError(
      f"{where}: cannot import {name}: {error}"
    ) from error
  wants_class = annotations.kind(hint) is type
  if not (isinstance(found, type) if wants_class else callable(found)):
    what = "a class" if wants_class else "a function"
    raise annotations.SettingError(f"{where}: {name} must be {what}")
  return found


def _make(maker: Any, fields: Mapping[str, Any], where: str) -> Any:
  """Calls a class or a function with raw values by name."""
  hints = annotations.parameters(maker)
  for name in fields:
    if name not in hints:
      near = difflib.get_close_matches(name, hints, 1)
      out = f"it has {', '.join(hints) or 'none'}"
      if near:
        out = f"did you mean {near[0]}?"
      raise annotations.SettingError(
        f"{where}.{name}: {short_names.of(maker)} has no such field; " + out
      )
  if missing := [n for n in annotations.required(maker) if n not in fields]:
    raise annotations.SettingError(
      f"{where}: needs {', '.join(missing)}, as in {suggestions.form(maker)}"
    )
  values = {
    name: read_field(hints[name], raw, f"{where}.{name}")
    for name, raw in fields.items()
    if not annotations.is_default(maker, name, raw)
  }
  try:
    return maker(**values)
  except (TypeError, ValueError) as error:
    raise annotations.SettingError(f"{where}: {error}") from error
