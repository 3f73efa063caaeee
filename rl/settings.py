"""Settings of a run: overrides by dotted path, JSON, and their errors.

The settings are a tree of frozen dataclasses. A polymorphic part is the
object itself, so its class is written out where it has to be text:

  --config.rollout.group_size=8
  --config.loss=rl.losses.ClippedSurrogate(clip_high=0.3)
  --config.engine=sglang            a class that has this as its short_name
  {"class": "rl.losses.ClippedSurrogate", "clip_low": 0.2, "clip_high": 0.3}
"""

import ast
import contextlib
import dataclasses
import difflib
import enum
import pkgutil
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

_Tree = TypeVar("_Tree")


class SettingError(ValueError):
  """A setting that does not exist or a value that does not fit it."""


def override(tree: _Tree, path: str, text: str) -> _Tree:
  """Returns the tree with one setting replaced.

  Args:
    tree: a frozen dataclass; it is not changed.
    path: dotted; items of a tuple of dataclasses are numbered from 0.
    text: as typed on the command line: `8`, `none`, `2,4`, `{"data": 2}`. A
      part that is an object is replaced by `package.module.Class(field=1)`;
      the arguments are read like overrides, nothing is evaluated.

  Raises:
    SettingError: names the key, what was expected, and the nearest key.
  """
  names, nodes = path.split("."), [typing.cast(Any, tree)]
  hint: Any = type(tree)
  for depth, name in enumerate(names):
    children = _children(nodes[-1], hint)
    if name not in children:
      above = ".".join(names[:depth])
      raise SettingError(_no_such(tree, path, above, hint, nodes[-1]))
    hint, node = children[name]
    nodes.append(node)
  where = f"--config.{path}"
  value = _read_field(hint, _Text(text), where, old=nodes.pop())
  try:
    for name, node in zip(reversed(names), reversed(nodes), strict=True):
      value = _replace(node, name, value)
  except ValueError as error:
    raise SettingError(f"{where}={text}: {error}") from error
  return typing.cast(_Tree, value)


def leaves(tree: Any) -> dict[str, tuple[str, Any]]:
  """Returns the type, in words, and the value of every setting by its path."""
  return {
    path: (_describe(hint), value)
    for path, hint, value in _walk(tree, type(tree))
    if not _children(value, hint)
  }


def difference(before: Any, after: Any, path: str = "") -> list[str]:
  """Returns a line `rollout.group_size: 8 -> 16` for each unequal setting."""
  old, new = _children(before, Any), _children(after, Any)
  if type(before) is type(after) and old and old.keys() == new.keys():
    start = path and f"{path}."
    pairs = [(start + name, old[name][1], new[name][1]) for name in old]
    return [line for key, a, b in pairs for line in difference(a, b, key)]
  return [f"{path or 'config'}: {before!r} -> {after!r}"] * (before != after)


def to_json(tree: Any) -> dict[str, Any]:
  """Returns plain JSON data from which `from_json` makes an equal tree.

  Raises:
    SettingError: a value that is no setting, such as a plain function.
  """
  return _plain(tree, "config")


def from_json(data: Any) -> Any:
  """Inverse of `to_json`; fields that are missing take their defaults.

  Raises:
    SettingError: names the path, what was expected, and the nearest field.
  """
  return _read_field(object, data, "config")


def is_setting(cls: Any) -> bool:
  """Whether a class may be part of the tree: a frozen dataclass."""
  params = getattr(cls, "__dataclass_params__", None)
  return isinstance(cls, type) and params is not None and params.frozen


def _hints(cls: Any) -> dict[str, Any]:
  hints = typing.get_type_hints(cls)
  return {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init}


def _children(node: Any, hint: Any) -> dict[str, tuple[Any, Any]]:
  """Returns (annotation, value) of what lies below; nothing below a leaf."""
  if is_setting(type(node)):
    hints = _hints(type(node))
    return {name: (hints[name], getattr(node, name)) for name in hints}
  if isinstance(node, tuple) and any(is_setting(type(x)) for x in node):
    hints = _item_hints(hint, len(node))
    return {str(i): (hints[i], item) for i, item in enumerate(node)}
  return {}


def _walk(node: Any, hint: Any, path: str = "") -> Iterator[tuple]:
  """Yields (path, annotation, value) of everything below a node."""
  for name, (child_hint, child) in _children(node, hint).items():
    yield path + name, child_hint, child
    yield from _walk(child, child_hint, f"{path}{name}.")


def _replace(node: Any, name: str, value: Any) -> Any:
  if isinstance(node, tuple):
    return tuple(value if str(i) == name else x for i, x in enumerate(node))
  return dataclasses.replace(node, **{name: value})


def _no_such(tree: Any, path: str, above: str, hint: Any, node: Any) -> str:
  """Returns why `path` leads nowhere below `above`, the part that exists."""
  start = f"--config.{path}: "
  if node is None:
    return start + (
      f"--config.{above} is none, so nothing below it can be set; make it"
      f" an object in the file or with --config.{above}=CLASS(...)"
    )
  if not (children := _children(node, hint)):
    return start + f"--config.{above} is one value ({_describe(hint)})"

  def likeness(other: str) -> float:
    # A right name in a wrong place counts as much as the reverse.
    pairs = [(path, other), (path.split(".")[-1], other.split(".")[-1])]
    return sum(difflib.SequenceMatcher(None, *p).ratio() for p in pairs)

  known = {p: _describe(h) for p, h, _ in _walk(tree, type(tree))}
  best = max(known, key=likeness)
  if likeness(best) < 1.2:
    return f"{start}no such setting; there are {', '.join(children)}"
  near = f"--config.{best} ({known[best]})"
  return f"{start}no such setting; did you mean {near}?"


def _plain(value: Any, where: str) -> Any:
  if value is None or type(value) in (bool, int, float, str):
    return value
  if isinstance(value, enum.Enum):
    return value.name
  if is_setting(cls := type(value)):
    fields = {
      name: _plain(child, f"{where}.{name}")
      for name, (_, child) in _children(value, cls).items()
    }
    return {"class": f"{cls.__module__}.{cls.__qualname__}"} | fields
  if isinstance(value, tuple | list):
    return [_plain(item, f"{where}.{i}") for i, item in enumerate(value)]
  if isinstance(value, Mapping):
    return {
      str(_plain(key, where)): _plain(item, f"{where}.{key}")
      for key, item in value.items()
    }
  raise SettingError(
    f"{where}: {value!r} is no setting; use a number, a string, an enum, a"
    " tuple, a mapping or a frozen dataclass"
  )


@dataclasses.dataclass(frozen=True, slots=True)
class _Text:
  """Words of the command line, not yet read; other raw values are JSON."""

  text: str

  def __repr__(self) -> str:
    return self.text


class _Mismatch(Exception):
  """A raw value does not fit; whoever knows the key words the error."""


def _read_field(hint: Any, raw: Any, where: str, old: Any = None) -> Any:
  try:
    return _read(hint, raw, where)
  except _Mismatch:
    message = f"{where}={raw!r:.80}: expected {_describe(hint)}"
  if below := _children(old, hint):
    parts = (f"{where}.{name} ({_describe(below[name][0])})" for name in below)
    message += ", or set a part of it: " + ", ".join(parts)
  raise SettingError(message)


def _read(hint: Any, raw: Any, where: str) -> Any:
  """Returns the typed value; `where` is the key for errors further below."""
  kind = _kind(hint)
  arguments = typing.get_args(hint)
  if len(members := _members(hint)) > 1:
    for member in members:
      with contextlib.suppress(_Mismatch):
        return _read(member, raw, where)
    raise _Mismatch
  if kind in (bool, int, float, str, types.NoneType):
    return _read_scalar(kind, raw)
  if kind is Literal:
    return _read_choice({str(option): option for option in arguments}, raw)
  if _is(kind, enum.Enum):
    by_value = {str(member.value): member for member in kind}
    return _read_choice(by_value | dict(kind.__members__), raw)
  shape = _shape(raw, where)
  if _is(kind, Mapping) and isinstance(shape, dict):
    key_hint, item_hint = arguments or (Any, Any)
    return {
      _read(key_hint, _Text(k), where): _read(item_hint, v, f"{where}.{k}")
      for k, v in shape.items()
    }
  if _is(kind, Sequence):
    if isinstance(raw, _Text) and not isinstance(shape, list):
      # A lone `2` is a tuple of one; shape is `2` without quotes, if any.
      shape = [shape if isinstance(shape, _Text) else raw]
    return _read_items(hint, shape, where)
  return _read_object(kind, shape, where)


def _read_scalar(kind: Any, raw: Any) -> Any:
  if isinstance(raw, _Text):
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


def _shape(raw: Any, where: str) -> Any:
  """Returns text as JSON of the same shape, its leaves still text."""
  if not isinstance(raw, _Text):
    return raw
  text = raw.text.strip()
  try:
    node = ast.parse(text, mode="eval").body
  except (SyntaxError, ValueError) as error:
    raise _Mismatch from error

  def piece(part: Any) -> _Text:
    if isinstance(part, ast.Constant) and isinstance(part.value, str):
      return _Text(part.value)
    return _Text(ast.get_source_segment(text, part) or "")

  match node:
    case ast.Tuple(elts=items) | ast.List(elts=items):
      return [piece(item) for item in items]
    case ast.Dict(keys=keys, values=values) if all(keys):
      pairs = zip(keys, values, strict=True)
      return {piece(k).text: piece(v) for k, v in pairs}
    case ast.Attribute():
      return {"class": text}
    case ast.Call(func=ast.Attribute() as path, args=[], keywords=named):
      # The name of `**x` is None, which is no field and so an error later.
      fields = {str(k.arg): piece(k.value) for k in named}
      return {"class": ast.unparse(path)} | fields
    case ast.Call():
      raise SettingError(f"{where}={text}: write package.Class(field=value)")
  return piece(node)


def _read_items(hint: Any, items: Any, where: str) -> Any:
  if not isinstance(items, list):
    raise _Mismatch
  pairs = enumerate(zip(_item_hints(hint, len(items)), items, strict=True))
  values = [_read(child, item, f"{where}.{i}") for i, (child, item) in pairs]
  return values if _kind(hint) is list else tuple(values)


def _read_object(kind: Any, data: Any, where: str) -> Any:
  """Builds {"class": path, field: raw value} and checks that it fits."""
  if isinstance(data, _Text) and data.text == getattr(kind, "short_name", 0):
    return kind()
  if not isinstance(data, dict) or not isinstance(data.get("class"), str):
    raise _Mismatch
  path = data["class"]
  try:
    cls = pkgutil.resolve_name(path)
  except (ImportError, AttributeError, ValueError) as error:
    raise SettingError(f"{where}: cannot import {path}: {error}") from error
  if not is_setting(cls):
    raise SettingError(f"{where}: {path} is no frozen dataclass")
  hints = _hints(cls)
  values = {}
  for name in [key for key in data if key != "class"]:
    if name not in hints:
      near = difflib.get_close_matches(name, hints, 1) or list(hints)
      raise SettingError(
        f"{where}.{name}: {path} has no such field; did you mean"
        f" {' or '.join(near)}?"
      )
    values[name] = _read_field(hints[name], data[name], f"{where}.{name}")
  try:
    value = cls(**values)
  except (TypeError, ValueError) as error:
    raise SettingError(f"{where}: {error}") from error
  if not _fits(kind, value):
    raise _Mismatch
  return value


def _fits(kind: Any, value: Any) -> bool:
  # A Protocol that is not runtime_checkable refuses isinstance().
  if getattr(kind, "_is_protocol", False):
    names = [*dir(kind), *typing.get_type_hints(kind)]
    public = {n for n in names if n == "__call__" or not n.startswith("_")}
    return public <= {*dir(value)}
  return kind is Any or _is(type(value), kind)


def _kind(hint: Any) -> Any:
  """Returns the class behind `Mapping[str, int]` or a NewType."""
  hint = getattr(hint, "__supertype__", hint)
  return typing.get_origin(hint) or hint


def _is(kind: Any, base: Any) -> bool:
  return isinstance(kind, type) and issubclass(kind, base)


def _members(hint: Any) -> list[Any]:
  """Returns the members of a union; str, which takes any text, is last."""
  if _kind(hint) in (typing.Union, types.UnionType):
    return sorted(typing.get_args(hint), key=lambda member: member is str)
  return [hint]


def _item_hints(hint: Any, length: int) -> list[Any]:
  """Returns the annotation of each item of a tuple, list or Sequence."""
  for member in _members(hint):
    arguments = typing.get_args(member)
    if _is(_kind(member), Sequence) and arguments:
      fixed = _kind(member) is tuple and arguments[-1] is not Ellipsis
      if fixed and len(arguments) != length:
        raise _Mismatch
      return list(arguments) if fixed else [arguments[0]] * length
  return [Any] * length


def _describe(hint: Any) -> str:
  """Returns an annotation in the words of the command line."""
  kind = _kind(hint)
  if len(members := _members(hint)) > 1:
    return " | ".join(map(_describe, members))
  if kind is types.NoneType:
    return "none"
  if kind is Literal:
    return " | ".join(map(str, typing.get_args(hint)))
  if _is(kind, enum.Enum):
    return " | ".join(kind.__members__)
  if isinstance(hint, type) and not typing.get_args(hint):
    return getattr(hint, "short_name", hint.__name__)
  return re.sub(r"(\w+\.)+(?=\w)", "", str(hint))
