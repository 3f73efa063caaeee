"""Shared checks of settings, and the words in which they refuse.

Each takes an object and the names of its fields, and raises ValueError with
the setting, its value, the bound and the way out:

  checks.at_least(self, 1, "slots", "page_size", where="engine")
  engine.slots=0 must be at least 1

None passes: it turns an optional setting off.

  where: what the object is called in a message; its short name by default,
    which `validate` replaces by its path, and "" at the root of the settings.
  out: the way out, where the bound alone does not tell it.
"""

import dataclasses
import difflib
import importlib.util
import math
import operator
import re
import subprocess
import typing
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

from rl.settings import parsing, short_names

_MAX_TRIED = 1 << 16
_PYTHON_S = 60.0
_PRINT_MISSING = """
import importlib.util, sys
print(*(x for x in sys.argv[1:] if importlib.util.find_spec(x) is None))
"""


def validate(tree: Any, path: str = "") -> None:
  """Calls every `validate` in a tree of dataclasses once, inner parts first.

  Args:
    path: of the tree in the settings, which errors then begin with.
  """
  validate_parts(tree, path)
  if not hasattr(tree, "validate"):
    return
  try:
    tree.validate()
  except ValueError as error:
    # The part itself knows its short name, and not its place. A file may have
    # that name too, as pairs.jsonl.
    name, _, rest = str(error).partition(".")
    is_setting = hasattr(tree, re.split(r"\W", rest, maxsplit=1)[0])
    if path and name == short_names.of(tree) and is_setting:
      error.args = (f"{path}.{rest}",)
    raise


def validate_parts(tree: Any, path: str = "") -> None:
  """Calls every `validate` below an object: its own checks may rely on them.

  The kinds of its values come first, as every check relies on these.
  """
  parsing.check_kinds(tree, path)
  for field in dataclasses.fields(tree):
    part = getattr(tree, field.name)
    # A class itself may be a setting, and is then no part.
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
      validate(part, f"{path}.{field.name}" if path else field.name)


def validate_installed(tree: Any) -> None:
  """Calls every `validate_installed` in a tree of settings."""
  if isinstance(tree, type):
    return
  if isinstance(tree, tuple):
    for part in tree:
      validate_installed(part)
  elif dataclasses.is_dataclass(tree):
    for field in dataclasses.fields(tree):
      validate_installed(getattr(tree, field.name))
  check = getattr(tree, "validate_installed", None)
  if check is not None:
    check()


def fields(*bounds: tuple[Any, ...]) -> Any:
  """Returns a method `validate` that makes checks with these arguments.

  validate = checks.fields((checks.in_unit, "low"), (checks.at_least, 1, "cap"))
  """

  def validate(self: Any) -> None:
    """Raises ValueError on a setting outside its bounds."""
    for check, *arguments in bounds:
      check(self, *arguments)

  return validate


def at_least(part: object, least: float, *names: str, **words: str) -> None:
  """Checks numbers against a lower bound; inf passes."""
  _check(part, names, lambda x: x >= least, f"at least {least}", **words)


def all_at_least(part: object, least: float, *names: str, **words: str) -> None:
  """Checks one or more numbers each, against a lower bound."""
  bound = f"numbers of at least {least}"
  _check(part, names, lambda x: bool(x) and min(x) >= least, bound, **words)


def above(part: object, bound: float, *names: str, **words: str) -> None:
  """Checks numbers against a bound that they must exceed; inf passes."""
  _check(part, names, lambda x: x > bound, f"above {bound}", **words)


def finite_at_least(
  part: object, least: float, *names: str, **words: str
) -> None:
  """Checks finite numbers against a lower bound."""
  bound = f"a finite number of at least {least}"
  _check(part, names, lambda x: least <= x < math.inf, bound, **words)


def finite_above(part: object, bound: float, *names: str, **words: str) -> None:
  """Checks finite numbers against a bound that they must exceed."""
  text = f"a finite number above {bound}"
  _check(part, names, lambda x: bound < x < math.inf, text, **words)


def finite(part: object, *names: str, **words: str) -> None:
  """Checks numbers of either sign."""
  _check(part, names, math.isfinite, "a finite number", **words)


def in_unit(part: object, *names: str, **words: str) -> None:
  """Checks shares and probabilities."""
  _check(part, names, lambda x: 0 <= x <= 1, "in [0, 1]", **words)


def below(part: object, bound: float, *names: str, **words: str) -> None:
  """Checks decay rates and the like: from 0, and never the bound."""
  _check(part, names, lambda x: 0 <= x < bound, f"in [0, {bound})", **words)


def within(
  part: object, least: float, most: float, *names: str, **words: str
) -> None:
  """Checks numbers against two bounds that they may reach."""
  text = f"in [{least}, {most}]"
  _check(part, names, lambda x: least <= x <= most, text, **words)


def not_nan(part: object, *names: str, **words: str) -> None:
  """Checks numbers that may be infinite."""
  _check(part, names, lambda x: not math.isnan(x), "a number", **words)


def divides(part: object, whole: int, what: str, name: str) -> None:
  """Checks that a count divides `whole`, which is `what` in the message."""
  if whole % (count := getattr(part, name)):
    top = min(count, whole)
    # The next smaller divisor of a huge number may be far away.
    tried = range(top, max(top - _MAX_TRIED, 0), -1)
    fits = (number for number in tried if whole % number == 0)
    use = next(fits, math.gcd(count, whole))
    out = f"does not divide {what}; use {use}"
    raise ValueError(f"{short_names.of(part)}.{name}={count} {out}")


def one_of(part: object, known: Any, *names: str, **words: str) -> None:
  """Checks values against a Literal, or a collection."""
  values = tuple(typing.get_args(known) or known)
  text = " or ".join(map(str, values))
  _check(part, names, values.__contains__, text, **words)


def enough(
  setting: str, value: float, least: float, bound: str, out: str
) -> None:
  """Checks a number against what other settings ask, `bound` in words."""
  if not value >= least:
    text = f"{value:g}" if isinstance(value, float) else value
    raise ValueError(f"{setting}={text} is below {bound}; {out}")


def unique(setting: str, names: Sequence[str]) -> None:
  """Checks that there are names, and that no two are the same."""
  if not names or len(set(names)) < len(names):
    raise ValueError(f"{setting}: {names} are not one or more names")


def known_name(setting: str, name: str, names: Collection[str]) -> None:
  """Checks a name, and suggests one near it."""
  if name not in names:
    use = f"use {', '.join(names)}{nearest(name, names)}"
    raise ValueError(f"{setting}={name} is unknown; {use}")


def refuse(
  part: object,
  *names: str,
  why: str,
  out: str = "",
  where: str | None = None,
) -> NoReturn:
  """Refuses settings that do not go together, each with its value.

  overlap.consume=ready with max_staleness=2: WHY; OUT
  """
  values = map(_shown, (operator.attrgetter(name)(part) for name in names))
  pairs = [f"{n}={text}" for n, text in zip(names, values, strict=True)]
  why += out and f"; {out}"
  raise ValueError(f"{_prefix(part, where)}{' with '.join(pairs)}: {why}")


def installed(
  setting: str, extra: str, *modules: str, python: str | None = None
) -> None:
  """Checks that modules can be imported.

  Args:
    setting: that needs them, with its value.
    extra: of this project that installs them.
    python: the program that is to import them; None is this process.

  Raises:
    ValueError: some cannot be, or the program does not run.
  """
  if python is None:
    missing = [x for x in modules if importlib.util.find_spec(x) is None]
  else:
    missing = _missing_from(python, modules)
  if missing:
    into = f"{python} -m pip install" if python else "pip install"
    raise ValueError(
      f"{setting} needs {' and '.join(missing)}: {into} 'twinmesh[{extra}]'"
    )


def _missing_from(python: str, modules: Sequence[str]) -> list[str]:
  """Returns those of some modules that another Python does not find."""
  command = [python, "-c", _PRINT_MISSING, *modules]
  try:
    done = subprocess.run(
      command, capture_output=True, text=True, timeout=_PYTHON_S, check=True
    )
  except (OSError, subprocess.SubprocessError) as error:
    raise ValueError(f"{python} does not run as a Python: {error}") from error
  return done.stdout.split()


def _shown(value: Any) -> Any:
  """Returns a value as it is typed on the command line."""
  if isinstance(value, bool | None):
    return str(value).lower()
  return short_names.of(value) if dataclasses.is_dataclass(value) else value


def _prefix(part: object, where: str | None) -> str:
  prefix = short_names.of(part) if where is None else where
  return prefix and f"{prefix}."


def nearest(name: str, known: Collection[str]) -> str:
  """Returns "; did you mean X?", or nothing when no known name is near."""
  near = difflib.get_close_matches(name, sorted(known), 1)
  return f"; did you mean {near[0]}?" if near else ""


def _check(
  part: object,
  names: Collection[str],
  fits: Callable[[Any], bool],
  bound: str,
  where: str | None = None,
  out: str = "",
) -> None:
  for name in names:
    value = getattr(part, name)
    if value is not None and not fits(value):
      setting = f"{_prefix(part, where)}{name}={value}"
      raise ValueError(f"{setting} must be {bound}" + (out and f"; {out}"))
