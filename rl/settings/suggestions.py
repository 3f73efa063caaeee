"""Suggestions for a setting: values that fit, as command-line text.

cispo   pass_at_k(k=4)   teacher(model=tiny(), directory=NAME)   recompute
"""

import difflib
import enum
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rl.settings import annotations, short_names

_EXAMPLES = {bool: "true", int: "4", float: "1.0", str: "NAME"}


def form(maker: Any, depth: int = 3) -> str:
  """Returns how an object is typed: its short name, and the fields it needs.

  Args:
    depth: of objects in each other; deeper ones are "...".
  """
  own, needed = annotations.parameters(maker), annotations.required(maker)
  fields = ", ".join(f"{n}={_example(own[n], depth - 1)}" for n in needed)
  return short_names.of(maker) + (f"({fields})" if fields else "")


def forms(hint: Any) -> list[str]:
  """Returns every object that fits, as it is typed."""
  return list(map(form, short_names.choices(hint).values()))


def near(hint: Any, word: str) -> str | None:
  """Returns the value probably meant by a word that does not fit, or None.

  Args:
    word: as typed, such as `cispoo`, `losses.Cispo()` or a class path of an
      earlier version.
  """
  words = {choice.lower(): choice for choice in _choices(hint)}
  for name, maker in short_names.choices(hint).items():
    words[name] = words[maker.__name__.lower()] = form(maker)
    if word.partition("(")[0].endswith(f".{maker.__name__}"):
      return f"{form(maker)} ({annotations.path(maker)})"
  last = word.partition("(")[0].rpartition(".")[2].strip().lower()
  found = difflib.get_close_matches(last, words, len(words) or 1)

  def likeness(other: str) -> tuple[float, float]:
    # gpro shares three letters in order with gspo and grpo, and four with grpo.
    match = difflib.SequenceMatcher(None, other, last)
    return match.ratio(), match.quick_ratio()

  return words[max(found, key=likeness)] if found else None


def moved(path: str) -> str:
  """Returns "; did you mean ..?" with the class of that name elsewhere."""
  package, name = path.partition(".")[0], path.rpartition(".")[2]
  found = short_names.classes(package)
  paths = sorted({annotations.path(c) for c in found if c.__name__ == name})
  return f"; did you mean {' or '.join(paths)}?" if paths else ""


def advice(
  hint: Any, word: str, *, fields: bool = False, apart: bool = False
) -> str:
  """Returns what to add to an error: "; did you mean ..?" or ", such as ..".

  Nothing when no object and no word fits.

  Args:
    word: as typed.
    fields: adds those of the only class that fits.
    apart: "; there are .." in place of ", such as ..", which needs a noun.
  """
  known = annotations.describe(hint).split(" | ")
  listed = ", ".join(text for text in forms(hint) if text not in known)
  if (meant := near(hint, word)) is not None:
    return f"; did you mean {meant}?" + (listed and f" There are {listed}")
  if not listed:
    return ""
  makers = list(short_names.choices(hint).values())
  told = (
    f"; it takes {_fields(makers[0])}" if fields and len(makers) == 1 else ""
  )
  return f"{'; there are' if apart else ', such as'} {listed}{told}"


def fields_of(hint: Any, text: str) -> str:
  """Returns "; NAME takes .." of an object as typed, or nothing."""
  name = text.partition("(")[0].strip()
  maker = short_names.choices(hint).get(name)
  fields = "" if maker is None else _fields(maker)
  return fields and f"; {name} takes {fields}"


def _fields(maker: Any) -> str:
  described = {
    name: annotations.describe(hint)
    for name, hint in annotations.parameters(maker).items()
  }
  return ", ".join(f"{name} ({words})" for name, words in described.items())


def _choices(hint: Any) -> list[str]:
  """Returns the words of a Literal or an enum."""
  words = []
  for member in annotations.members(hint):
    own = annotations.kind(member)
    if own is Literal or annotations.is_a(own, enum.Enum):
      words += annotations.describe(member).split(" | ")
  return words


def _example(hint: Any, depth: int) -> str:
  """Returns a value of a hint as it may be typed, or "..."."""
  if annotations.takes_names(hint):
    return "'MODULE:NAME'"
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
  if words := _choices(first):
    return words[0]
  makers = list(short_names.choices(first).values()) if depth else []
  if not makers:
    return "..."
  return form(min(makers, key=lambda m: len(annotations.required(m))), depth)
