"""The top packages of Twinmesh, whose names others use as well.

`rl`, `models` or `envs` beside a script, or of another distribution, would be
imported in place of ours, and an error would name a module that nobody misses.
"""

import importlib.util
import pathlib
from collections.abc import Iterable

ROOT = pathlib.Path(__file__).resolve().parents[1]
NAMES = ("configs", "envs", "launch", "models", "rl")


class Shadowed(ImportError):
  """A top package that is not ours."""


def check(root: pathlib.Path = ROOT, names: Iterable[str] = NAMES) -> None:
  """Checks that each top package would be imported from one directory.

  Args:
    root: the directory that holds them.

  Raises:
    Shadowed: names those that are found elsewhere, and where.
  """
  found = {name: _place(name) for name in names}
  others = {k: v for k, v in found.items() if v != (root / k).resolve()}
  if not others:
    return
  listing = " and ".join(
    f"the package {name} is {'missing' if place is None else place}"
    for name, place in others.items()
  )
  raise Shadowed(
    f"{listing}, where Twinmesh needs that of {root}; rename the other one, "
    "or start elsewhere, as the current directory and PYTHONPATH come first. "
    "If a distribution that was installed later has overwritten it, install "
    "Twinmesh into an environment of its own"
  )


def _place(name: str) -> pathlib.Path | None:
  """Returns the directory or file of a package; None without one."""
  spec = importlib.util.find_spec(name)
  if spec is None:
    return None
  # A package without __init__.py has places and no origin.
  places = spec.submodule_search_locations
  place = next(iter(places), None) if places is not None else spec.origin
  return None if place is None else pathlib.Path(place).resolve()
