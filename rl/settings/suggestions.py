"""What can stand at a place of the settings, in the form that can be typed.

rl.algorithms.losses.Cispo()   rl.algorithms.advantages.PassAtK(k=4)   dapo
recompute
"""

import difflib
import enum
import inspect
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from rl.settings import annotations

_EXAMPLES = {bool: "true", int: "4", float: "0.1", str: "NAME"}
CONFIG_FILE = "_config_"
"""How the names of modules begin that are config files."""


def form(maker: Any, depth: int = 3) -> str:
  """Returns how an object is typed: a path, with the fields that it needs.

  Args:
    depth: of objects in each other; what lies deeper is "...".
  """
  own, needed = annotations.parameters(maker), annotations.required(maker)
  fields = ", ".join(f"{n}={_example(own[n], depth - 1)}" for n in needed)
  return f"{maker.__module__}.{maker.__qualname__}({fields})"


def forms(hint: Any, word: str = "") -> list[str]:
  """Returns every object that fits as it is typed, the nearest first.

  Args:
    word: what they are near to, such as `cispo` or
    `rl.algorithms.losses.Cispoo()`.
  """
  names = {form(maker): maker.__name__.lower() for maker in _makers(hint)}

  def likeness(text: str) -> float:
    return difflib.SequenceMatcher(None, names[text], _last(word)).ratio()

  return sorted(names, key=likeness, reverse=True)


def near(hint: Any, word: str) -> str | None:
  """Returns what may have been meant by a word that does not fit, or None."""
  options = {maker.__name__.lower(): form(maker) for maker in _makers(hint)}
  for member in annotations.members(hint):
    if (name := _short(member)) is not None:
      maker = annotations.kind(member)
      text = form(maker) if annotations.required(maker) else name
      options |= {name: text, maker.__name__.lower(): text}
    options |= {choice.lower(): choice for choice in _choices(member)}
  found = difflib.get_close_matches(_last(word), options, 1)
  return options[found[0]] if found else None


def advice(hint: Any, word: str, *, fields: bool = False) -> str:
  """Returns what to add to an error: "; did you mean ..?" or ", such as ..".

  Nothing when no object and no word fits.

  Args:
    word: what was typed.
    fields: tells those of the only class that fits.
  """
  listed = forms(hint, word)
  if (meant := near(hint, word)) is not None:
    others = [text for text in listed if text != meant]
    rest = f" There are also {', '.join(others)}" if others else ""
    return f"; did you mean {meant}?{rest}"
  if not listed:
    return ""
  makers = list(_makers(hint)) if fields else []
  told = f"; it takes {_fields(makers[0])}" if len(makers) == 1 else ""
  return f", such as {', '.join(listed)}{told}"


def _fields(maker: Any) -> str:
  described = {
    name: annotations.describe(hint)
    for name, hint in annotations.parameters(maker).items()
  }
  return ", ".join(f"{name} ({words})" for name, words in described.items())


def _last(word: str) -> str:
  """Returns the class that a word names, in lower case."""
  return word.partition("(")[0].rpartition(".")[2].strip().lower()


def _short(member: Any) -> str | None:
  is_object = annotations.is_object(member)
  return getattr(member, "short_name", None) if is_object else None


def _choices(member: Any) -> list[str]:
  """Returns the words of a Literal or an enum."""
  own = annotations.kind(member)
  if own is Literal or annotations.is_a(own, enum.Enum):
    return annotations.describe(member).split(" | ")
  return []


def _makers(hint: Any) -> Iterator[Any]:
  """Yields the classes that fit, and functions that return one.

  Those with a short name, by which they are typed, are left out.
  """
  for member in annotations.members(hint):
    own = annotations.kind(member)
    if annotations.is_object(member) and isinstance(own, type):
      found = [] if _short(member) else [*_classes(own), *_functions(own)]
      yield from (maker for maker in found if not _short(maker))


def _classes(own: type) -> Iterator[type]:
  """Yields the settings that fit a class, of its package and config files.

  Only modules that are loaded are looked at.
  """
  package = own.__module__.partition(".")[0]
  for name, module in list(sys.modules.items()):
    if name.partition(".")[0] == package or name.startswith(CONFIG_FILE):
      for value in list(vars(module).values()):
        # A class is imported into others too.
        if getattr(value, "__module__", "") == name and _stands_for(value, own):
          yield value


def _stands_for(value: Any, own: type) -> bool:
  if not annotations.is_setting(value) or inspect.isabstract(value):
    return False
  if value.__name__.startswith("_"):
    return False
  names = {*dir(value), *annotations.hints(value)}
  if not _is_below(value, own, names):
    return False
  mine, asked = (annotations.made(cls.__call__) for cls in (value, own))
  # Many protocols are no more than a call. Shapes are equal by their words.
  known = None not in (mine, asked) and str(mine) != str(asked)
  return not known or _is_below(mine, asked, {*dir(mine)})


def _is_below(value: Any, own: Any, names: set[str]) -> bool:
  """Whether a class, with instances of such names, is or fits another."""
  if getattr(own, "_is_protocol", False):
    return annotations.public(own) <= names
  return annotations.is_a(value, own)


def _functions(own: type) -> Iterator[Any]:
  """Yields the functions beside a class of settings that return one."""
  if not annotations.is_setting(own):
    return
  for name, value in list(vars(sys.modules[own.__module__]).items()):
    is_own = inspect.isfunction(value) and value.__module__ == own.__module__
    if is_own and name[0] != "_" and annotations.made(value) is own:
      yield value


def _example(hint: Any, depth: int) -> str:
  """Returns a value of a hint as it may be typed, or "..."."""
  first = annotations.members(hint)[0]
  own = annotations.kind(first)
  if own in _EXAMPLES:
    return _EXAMPLES[own]
  if annotations.is_a(own, Sequence):
    items = typing.get_args(first)
    each = [_example(item, depth) for item in items if item is not Ellipsis]
    return f"({', '.join(each)},)" if each else "..."
  if annotations.is_a(own, Mapping):
    return "{}"
  if choices := _choices(first):
    return choices[0]
  makers = list(_makers(first)) if depth else []
  if not makers:
    return "..."
  return form(min(makers, key=lambda m: len(annotations.required(m))), depth)
