"""Short names of settings: `gspo` is rl.algorithms.losses.Gspo where a loss is.

A name is the `short_name` of a class, or else the class in snake_case; of a
function it is its own name. It is looked up among what fits the annotation, so
that one word may be a loss in one place and an advantage in another.
"""

import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any

from rl.settings import annotations

CONFIG_FILE = "_config_"
"""Prefix of the modules that are config files."""


def of(part: Any) -> str:
  """Returns the word by which a class, a function or an object is typed."""
  is_maker = isinstance(part, type) or inspect.isfunction(part)
  maker = part if is_maker else type(part)
  own = vars(maker).get("short_name")
  return own or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", maker.__name__).lower()


def in_python(maker: Any) -> str:
  """Returns the name of a class or a function where a config is written."""
  is_own = maker.__module__.startswith(CONFIG_FILE)
  return maker.__qualname__ if is_own else annotations.path(maker)


def choices(hint: Any) -> dict[str, Any]:
  """Returns the classes that fit an annotation, by their short names.

  They are those of the package around the annotated class and of config files
  (these win), as far as they are loaded; and the functions beside a class of
  settings that return one.
  """
  found = {}
  for member in annotations.members(hint):
    own = annotations.kind(member)
    is_class = isinstance(own, type) and own is not object
    if is_class and annotations.is_object(member):
      package = own.__module__.rpartition(".")[0] or own.__module__
      fitting = [cls for cls in classes(package) if _fits(cls, own)]
      for maker in (*fitting, *_functions(own)):
        found[of(maker)] = maker
  return found


def classes(package: str) -> Iterator[type]:
  """Yields the public settings of a package, then those of config files."""
  modules = list(sys.modules.items())
  inside = [m for m in modules if f"{m[0]}.".startswith(f"{package}.")]
  files = [m for m in modules if m[0].startswith(CONFIG_FILE)]
  for name, module in inside + files:
    for value in list(vars(module).values()):
      # A class is imported into other modules too.
      is_own = getattr(value, "__module__", "") == name
      if is_own and annotations.is_setting(value) and value.__name__[0] != "_":
        yield value


def _fits(cls: type, own: type) -> bool:
  if inspect.isabstract(cls) or not _is_below(cls, own):
    return False
  # Many protocols are just a call. Shapes are equal by their words.
  returned, asked = (annotations.made(c.__call__) for c in (cls, own))
  if None in (returned, asked) or str(returned) == str(asked):
    return True
  return _is_below(returned, asked)


def _is_below(cls: Any, own: Any) -> bool:
  """Returns whether a class is another, or has all that a protocol names."""
  if not getattr(own, "_is_protocol", False):
    return annotations.is_a(cls, own)
  fields = getattr(cls, "__dataclass_fields__", {})
  return annotations.public(own) <= {*dir(cls), *fields}


def _functions(own: type) -> Iterator[Any]:
  if annotations.is_setting(own):
    values = vars(sys.modules[own.__module__]).values()
    for value in filter(inspect.isfunction, list(values)):
      is_own = value.__module__ == own.__module__ and value.__name__[0] != "_"
      if is_own and annotations.made(value) is own:
        yield value
