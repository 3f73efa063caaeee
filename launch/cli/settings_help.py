"""All settings of a tree with type, value and meaning: --config.help.

The meaning is that of `Attributes:` in the docstring of the class that has the
setting, or of the classes above it.
"""

import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

from rl.settings import annotations, overrides, short_names

_WIDTH = 80


class SettingEntry(NamedTuple):
  """One setting.

  Attributes:
    path: as on the command line, without --config.
    kind: its type in words.
    value: as it is typed; of an object the word for its class.
    others: words for further objects that it may be.
    meaning: "" where the class does not tell it.
  """

  path: str
  kind: str
  value: str
  others: tuple[str, ...]
  meaning: str


def entries(tree: Any, above: str = "") -> Iterator[SettingEntry]:
  """Yields all settings of a tree; parts come before what is in them."""
  if not overrides.is_setting(type(tree)):
    return
  told = meanings(type(tree))
  for name, hint in annotations.hints(type(tree)).items():
    value, path = getattr(tree, name), f"{above}{name}"
    word = _word(value)
    others = tuple(k for k in sorted(short_names.choices(hint)) if k != word)
    kind = annotations.describe(hint)
    yield SettingEntry(path, kind, word, others, told.get(name, ""))
    yield from entries(value, f"{path}.")


def text(tree: Any, part: str = "") -> str:
  """Returns the settings as text.

  Args:
    part: path of the part that is shown, with all in it; "" is all.

  Raises:
    SettingError: there is no such part.
  """
  shown = [
    one
    for one in entries(tree)
    if not part or f"{one.path}.".startswith(f"{part}.")
  ]
  if not shown:
    names = ", ".join(x.path for x in entries(tree) if "." not in x.path)
    raise overrides.SettingError(
      f"--config.help={part}: no such part; there are {names}"
    )
  return "\n".join(line for one in shown for line in _lines(one))


def meanings(cls: type) -> dict[str, str]:
  """Returns the meaning of each field, as docstrings tell it."""
  found: dict[str, str] = {}
  for base in reversed(cls.__mro__):
    found |= _attributes(inspect.cleandoc(base.__doc__ or ""))
  return found


def _attributes(doc: str) -> dict[str, str]:
  """Returns the entries below "Attributes:", by name."""
  _, _, below = f"\n{doc}".partition("\nAttributes:\n")
  section = re.split(r"\n(?=\S)", below)[0]
  found = {}
  for entry in re.split(r"^  (?=\S)", section, flags=re.MULTILINE)[1:]:
    names, _, meaning = entry.partition(":")
    for name in names.split(","):
      found[name.strip()] = " ".join(meaning.split())
  return found


def _word(value: Any) -> str:
  if value is None or isinstance(value, bool):
    return str(value).lower()
  is_part = overrides.is_setting(type(value)) or inspect.isfunction(value)
  return short_names.of(value) if is_part else str(value)


def _lines(one: SettingEntry) -> Iterator[str]:
  yield f"--config.{one.path}={one.value}  ({one.kind})"
  others = f"Or {', '.join(one.others)}." if one.others else ""
  for words in (one.meaning, others):
    yield from textwrap.wrap(
      words,
      _WIDTH,
      initial_indent="    ",
      subsequent_indent="    ",
      break_long_words=False,
      break_on_hyphens=False,
    )
