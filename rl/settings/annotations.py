"""Type annotations of settings: their members, fields and names in words."""

import contextlib
import dataclasses
import enum
import inspect
import numbers
import pkgutil
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

SCALARS = (bool, int, float, str, types.NoneType)
_NUMBERS = {int: numbers.Integral, float: numbers.Real}
_MANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class SettingError(ValueError):
  """A setting that does not exist or a value that does not fit it."""


def is_setting(cls: Any) -> bool:
  """Returns whether a class may be part of the tree: a frozen dataclass."""
  params = getattr(cls, "__dataclass_params__", None)
  return isinstance(cls, type) and params is not None and params.frozen


def hints(cls: Any) -> dict[str, Any]:
  """Returns the annotation of each field of `__init__`, by its name."""
  found = typing.get_type_hints(cls)
  return {f.name: found[f.name] for f in dataclasses.fields(cls) if f.init}


def made(maker: Any) -> Any:
  """Returns a class itself, or the return annotation of a function."""
  if isinstance(maker, type):
    return maker
  try:
    return typing.get_type_hints(maker).get("return")
  except (TypeError, NameError):
    return None


def path(maker: Any) -> str:
  """Returns where a class or a function is defined, as JSON names it."""
  return f"{maker.__module__}.{maker.__qualname__}"


def parameters(maker: Any) -> dict[str, Any]:
  """Returns the annotations of the parameters of a class or a function.

  A function with `**overrides` also takes the fields of the class it returns.
  """
  if isinstance(maker, type):
    return hints(maker)
  found = typing.get_type_hints(maker)
  own = inspect.signature(maker).parameters.values()
  given = {p.name: found[p.name] for p in own if p.kind not in _MANY}
  if any(p.kind is p.VAR_KEYWORD for p in own):
    given = hints(made(maker)) | given
  return given


def required(maker: Any) -> list[str]:
  """Returns the parameters of a class or a function without a default."""
  if isinstance(maker, type):
    missing = dataclasses.MISSING
    return [
      f.name
      for f in dataclasses.fields(maker)
      if f.init and f.default is missing and f.default_factory is missing
    ]
  own = inspect.signature(maker).parameters.values()
  return [p.name for p in own if p.default is p.empty and p.kind not in _MANY]


def takes_names(hint: Any) -> bool:
  """Returns whether a function or a class itself may be the value."""
  return any(kind(member) in (Callable, type) for member in members(hint))


def is_name(text: str) -> bool:
  """Returns whether a text is MODULE:NAME, as a function is typed."""
  return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", text) is not None


def name(value: Any) -> str | None:
  """Returns MODULE:NAME of a function or a class; None of other objects.

  Raises:
    SettingError: it has none, as a lambda or a method of an object.
  """
  if not (isinstance(value, type) or inspect.isroutine(value)):
    return None
  text = f"{value.__module__}:{value.__qualname__}"
  found = None
  with contextlib.suppress(ImportError, AttributeError, ValueError):
    found = pkgutil.resolve_name(text)
  if found != value:
    raise SettingError(
      f"{text} cannot be found by its name; define it with def or class at the "
      "top of a file, so that the run can be read again"
    )
  return text


def kind(hint: Any) -> Any:
  """Returns the class behind `Mapping[str, int]` or a NewType."""
  hint = getattr(hint, "__supertype__", hint)
  return typing.get_origin(hint) or hint


def is_a(cls: Any, base: Any) -> bool:
  """Returns whether it is a class, and another or a subclass of it."""
  return isinstance(cls, type) and issubclass(cls, base)


def members(hint: Any) -> list[Any]:
  """Returns the members of a union; str, which takes any text, is last."""
  if kind(hint) in (typing.Union, types.UnionType):
    return sorted(typing.get_args(hint), key=lambda member: member is str)
  return [hint]


def is_object(member: Any) -> bool:
  """Returns whether values are objects, not numbers, words or tuples."""
  own = kind(member)
  if own in SCALARS or own is Literal or is_a(own, enum.Enum):
    return False
  return not (is_a(own, Mapping) or is_a(own, Sequence))


def item_hints(hint: Any, length: int) -> list[Any] | None:
  """Returns the annotation of each item of a tuple, list or Sequence.

  None when a tuple of so many items does not fit.
  """
  for member in members(hint):
    arguments = typing.get_args(member)
    if is_a(kind(member), Sequence) and arguments:
      fixed = kind(member) is tuple and arguments[-1] is not Ellipsis
      if fixed and len(arguments) != length:
        return None
      return list(arguments) if fixed else [arguments[0]] * length
  return [Any] * length


def fits(own: Any, value: Any) -> bool:
  """Returns whether an object is of a class, or has all a protocol names."""
  # A Protocol that is not runtime_checkable refuses isinstance().
  if getattr(own, "_is_protocol", False):
    return public(own) <= {*dir(value)}
  return own is Any or is_a(type(value), own)


def is_default(maker: Any, field: str, value: Any) -> bool:
  """Returns whether a value is a field's default, of any annotation."""
  default = getattr(maker, field, ...)
  return type(default) is type(value) and default == value


def takes(hint: Any, value: Any) -> bool:
  """Returns whether a value is of a kind that an annotation asks for.

  Items are for `item_hints`, and names of a protocol that an object lacks for
  the owner of the setting: it says why they are needed.
  """
  return any(_takes(member, value) for member in members(hint))


def _takes(member: Any, value: Any) -> bool:
  own = kind(member)
  if own is Literal:
    return value in typing.get_args(member)
  if own is Callable or is_a(own, type):
    return callable(value)
  if is_a(own, Sequence) and isinstance(value, Sequence):
    return isinstance(value, str) == (own is str)
  if is_a(own, Mapping):  # A TypedDict, too, which refuses isinstance().
    return isinstance(value, Mapping)
  if getattr(own, "_is_protocol", False):
    is_class = isinstance(value, type)
    return is_setting(type(value)) or (not is_class and fits(own, value))
  # Of Any, a class since Python 3.11, and of type variables nothing is known.
  is_known = isinstance(own, type) and own is not Any
  return not is_known or isinstance(value, _NUMBERS.get(own, own))


def public(protocol: Any) -> set[str]:
  """Returns the names that an object must have to fit a protocol."""
  names = [*dir(protocol), *typing.get_type_hints(protocol)]
  return {n for n in names if n == "__call__" or not n.startswith("_")}


def describe(hint: Any) -> str:
  """Returns an annotation in the words of the command line."""
  own = kind(hint)
  if len(parts := members(hint)) > 1:
    return " | ".join(map(describe, parts))
  if own is types.NoneType:
    return "none"
  if own is Literal:
    return " | ".join(map(str, typing.get_args(hint)))
  if is_a(own, enum.Enum):
    return " | ".join(own.__members__)
  if isinstance(hint, type) and not typing.get_args(hint):
    return getattr(hint, "short_name", hint.__name__)
  text = re.sub(r"(\w+\.)+(?=\w)", "", str(hint))
  return f"{text} as 'MODULE:NAME'" if takes_names(hint) else text
