"""The packages of the project and the imports between them, read from files.

A single file beside packages (`rl.assemble`) counts as one. Only
files are read; nothing of the project is imported.
"""

import ast
import functools
import os
import pathlib
import subprocess
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[2]
TOPS = ("envs", "models", "rl", "configs", "launch", "twinmesh")


@functools.cache
def project_files() -> list[pathlib.Path]:
  """Returns files that are or may be committed; without git, visible ones."""
  listing = subprocess.run(
    ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  if listing.returncode == 0:
    paths = [ROOT / name for name in listing.stdout.split("\0") if name]
    return [path for path in paths if path.is_file()]
  files = []
  for folder, folders, names in os.walk(ROOT):
    made = {"runs", "build", "dist", "site", "__pycache__"}
    folders[:] = [f for f in folders if f[0] != "." and f not in made]
    files += [pathlib.Path(folder, name) for name in names]
  return files


def python_files(*tops: str) -> list[pathlib.Path]:
  """Returns the Python files of some top packages, or of the whole project."""
  files = [path for path in project_files() if path.suffix == ".py"]
  if not tops:
    return files
  return [p for p in files if p.relative_to(ROOT).parts[0] in tops]


@functools.cache
def parsed(path: pathlib.Path) -> ast.Module:
  """Returns the module of a file, which several tests walk through."""
  return ast.parse(path.read_text())


def imported(module: ast.Module) -> Iterator[str]:
  """Yields the dotted names that a module imports, relative ones with dots."""
  for node in ast.walk(module):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      place = "." * node.level + (node.module or "")
      yield from (f"{place}.{alias.name}" for alias in node.names)


def package_of(name: str) -> str | None:
  """Returns the package that a dotted name lies in; None is not ours.

  A file of `envs`, `configs` or `launch` beside packages is of the top
  package; one of `rl` or `models` counts as a package of its own.
  """
  parts = name.split(".")
  if parts[0] not in TOPS:
    return None
  while parts and not ROOT.joinpath(*parts).is_dir():
    is_file = ROOT.joinpath(*parts).with_suffix(".py").is_file()
    if is_file and len(parts) == 2 and parts[0] in ("rl", "models"):
      break
    parts.pop()
  return ".".join(parts)


@functools.cache
def arrows() -> dict[tuple[str, str], tuple[str, ...]]:
  """Returns (package, imported package) -> the files that draw this arrow."""
  drawn: dict[tuple[str, str], set[str]] = {}
  for path in python_files(*TOPS):
    relative = path.relative_to(ROOT)
    if relative.name == "__init__.py":
      continue
    here = package_of(".".join(relative.with_suffix("").parts))
    for name in imported(parsed(path)):
      there = package_of(name)
      if here and there and there != here:
        drawn.setdefault((here, there), set()).add(str(relative))
  return {arrow: tuple(sorted(files)) for arrow, files in drawn.items()}


def importers(package: str) -> set[str]:
  """Returns the packages that import one, or one inside it, directly."""
  inside = f"{package}."
  return {
    here
    for here, there in arrows()
    if f"{there}.".startswith(inside) and not f"{here}.".startswith(inside)
  }
