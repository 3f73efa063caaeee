"""Shared checks of settings, and the words in which they refuse.

Each takes an object and the names of its fields, and raises ValueError with
the setting, its value, the bound and the way out:

  checks.at_least(self, 1, "slots", "page_size", where="engine")
  engine.slots=0 must be at least 1

None passes: it turns an optional setting off.

  where: what the object is called in a message; its short name by default.
  out: the way out, where the bound alone does not tell it.
"""

import difflib
import math
import typing
from collections.abc import Callable, Collection
from typing import Any

from rl.settings import short_names


def at_least(
  part: object, least: float, *names: str, where: str = "", out: str = ""
) -> None:
  """Checks numbers against a lower bound; inf passes."""
  words = f"at least {least:g}"
  _check(part, names, lambda x: x >= least, words, where, out)


def above(
  part: object, bound: float, *names: str, where: str = "", out: str = ""
) -> None:
  """Checks numbers against a bound that they must exceed; inf passes."""
  _check(part, names, lambda x: x > bound, f"above {bound:g}", where, out)


def finite_at_least(
  part: object, least: float, *names: str, where: str = "", out: str = ""
) -> None:
  """Checks finite numbers against a lower bound."""
  words = f"a finite number of at least {least:g}"
  _check(part, names, lambda x: least <= x < math.inf, words, where, out)


def finite_above(
  part: object, bound: float, *names: str, where: str = "", out: str = ""
) -> None:
  """Checks finite numbers against a bound that they must exceed."""
  words = f"a finite number above {bound:g}"
  _check(part, names, lambda x: bound < x < math.inf, words, where, out)


def finite(part: object, *names: str, where: str = "", out: str = "") -> None:
  """Checks numbers of either sign."""
  _check(part, names, math.isfinite, "a finite number", where, out)


def in_unit(part: object, *names: str, where: str = "", out: str = "") -> None:
  """Checks shares and probabilities."""
  _check(part, names, lambda x: 0 <= x <= 1, "in [0, 1]", where, out)


def one_of(
  part: object, known: Any, *names: str, where: str = "", out: str = ""
) -> None:
  """Checks words against a Literal, or a collection of them."""
  values = tuple(typing.get_args(known) or known)
  words = " or ".join(map(str, values))
  _check(part, names, values.__contains__, words, where, out)


def check_seconds(where: str, value: float) -> None:
  """Raises ValueError on a time that is below 0, or never ends."""
  if not 0 <= value < math.inf:
    raise ValueError(f"{where}={value} is below 0, or never ends")


def nearest(name: str, known: Collection[str]) -> str:
  """Returns "; did you mean X?", or nothing when no known name is near."""
  near = difflib.get_close_matches(name, sorted(known), 1)
  return f"; did you mean {near[0]}?" if near else ""


def _check(
  part: object,
  names: Collection[str],
  fits: Callable[[Any], bool],
  words: str,
  where: str,
  out: str,
) -> None:
  for name in names:
    value = getattr(part, name)
    if value is not None and not fits(value):
      setting = f"{where or short_names.of(part)}.{name}={value}"
      raise ValueError(f"{setting} must be {words}" + (out and f"; {out}"))
