"""Modules beside a config file: imported from there, and kept with the run.

`import task` in runs/mine.py finds runs/task.py, unless the name is that of an
installed package or lies in the current directory. `look_beside` lets it,
`mark` notes the lines that ran, and within `finding` they are imported again,
whatever has become of the file since.
"""

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import linecache
import pathlib
import sys
import types
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

from rl.settings import overrides, short_names
from twinmesh import top_packages

LINES = "__config_lines__"
_BESIDE = "__config_directory__"
_CHECKOUT = {"benchmarks", "notebooks", "scripts", "tests", "twinmesh"}
_OURS = {*top_packages.NAMES, *_CHECKOUT}
_looked: list[str] = []
"""Directories that are on the path for their config files, newest first."""

KeptLines = tuple[str, list[str]]
"""Path of a module, and its lines."""


def look_beside(directory: pathlib.Path) -> None:
  """Lets what runs next import modules of a directory, last of all places.

  Modules of the same names, of other config files or of other lines, are
  forgotten.
  """
  own = [module for _, module in _beside(str(directory))]
  is_stale = any(
    not _file(m).is_file() or _read(_file(m)) != getattr(m, LINES) for m in own
  )
  gone = set[str]()
  for name, module in [*sys.modules.items()]:
    at = getattr(module, _BESIDE, None)
    is_other = at not in (None, str(directory)) and _exists(directory, name)
    if is_other or (is_stale and at == str(directory)):
      gone.add(_first(name))
  _forget(gone)
  for place in filter(sys.path.__contains__, _looked):
    sys.path.remove(place)
  if str(directory) in _looked:
    _looked.remove(str(directory))
  if str(directory) not in sys.path:
    _looked.insert(0, str(directory))
  sys.path += _looked
  importlib.invalidate_caches()


def mark(directory: pathlib.Path) -> dict[str, KeptLines]:
  """Notes the lines of modules of a directory; returns all, by name."""
  # Of thousands of modules few are named like a file here; paths cost more.
  here = {path.stem for path in directory.glob("*")}
  for name, module in [*sys.modules.items()]:
    if _first(name) not in here or hasattr(module, _BESIDE):
      continue
    if _lies_beside(name, module, directory):
      setattr(module, LINES, _read(_file(module)))
      setattr(module, _BESIDE, str(directory))
  return {
    name: (str(_file(module)), getattr(module, LINES))
    for name, module in sorted(_beside(str(directory)))
  }


def directory_of(name: str) -> pathlib.Path | None:
  """Returns the directory of the config file that a module lies beside."""
  at = getattr(sys.modules.get(name), _BESIDE, None)
  return None if at is None else pathlib.Path(at)


def forget_others(kept: Mapping[str, KeptLines]) -> bool:
  """Forgets modules of these names, all of them if one has other lines.

  Returns:
    Whether they were forgotten.
  """
  is_other = any(
    getattr(sys.modules.get(name), LINES, None) != lines
    for name, (_, lines) in kept.items()
  )
  if is_other:
    named = {name: sys.modules.get(name) for name in kept}
    _forget({_first(k) for k, m in named.items() if hasattr(m, _BESIDE)})
  return is_other


@contextlib.contextmanager
def finding(
  file: pathlib.Path, kept: Mapping[str, KeptLines]
) -> Iterator[None]:
  """Lets what runs within import kept modules, before all others.

  Args:
    file: that keeps them, for tracebacks.

  Raises:
    SettingError: a name is that of another module.
  """
  for name in kept:
    module = sys.modules.get(name)
    is_marked = module is None or hasattr(module, _BESIDE)
    if _first(name) in _OURS or not is_marked:
      raise overrides.SettingError(
        f"it keeps a module {name}, which is that of another file here; rename "
        "the one beside the config"
      )
  finder = _Finder(file, kept)
  sys.meta_path.insert(0, finder)
  try:
    yield
  finally:
    sys.meta_path.remove(finder)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
  """Finds kept modules by name; `finding` puts it before all others."""

  def __init__(self, file: pathlib.Path, kept: Mapping[str, KeptLines]):
    self._file = file
    self._kept = kept

  def find_spec(
    self,
    fullname: str,
    path: Sequence[str] | None,
    target: types.ModuleType | None = None,
  ) -> importlib.machinery.ModuleSpec | None:
    """Returns the spec of a kept module, or of a package around one."""
    del path, target
    if fullname in self._kept:
      at = pathlib.Path(self._kept[fullname][0])
      return importlib.machinery.ModuleSpec(
        fullname, self, origin=str(at), is_package=at.stem == "__init__"
      )
    if any(name.startswith(f"{fullname}.") for name in self._kept):
      return importlib.machinery.ModuleSpec(fullname, None, is_package=True)
    return None

  def exec_module(self, module: types.ModuleType) -> None:
    """Runs the kept lines."""
    path, lines = self._kept[module.__name__]
    module.__file__ = path
    setattr(module, LINES, lines)
    setattr(module, _BESIDE, str(_top(module.__name__, pathlib.Path(path))))
    source = remember_lines(path, lines, self._file)
    exec(compile_lines(lines, source), vars(module))


def remember_lines(path: str, lines: Sequence[str], file: pathlib.Path) -> str:
  """Lets tracebacks show kept lines; returns the name of their code."""
  source = f"{path} as kept in {file}"
  numbered = [f"{line}\n" for line in lines]
  linecache.cache[source] = (len(lines), None, numbered, source)
  return source


def compile_lines(lines: Sequence[str], source: str) -> types.CodeType:
  """Returns the code of a module.

  Args:
    source: its name in a traceback.
  """
  return compile("\n".join([*lines, ""]), source, "exec", dont_inherit=True)


def _beside(directory: str) -> list[tuple[str, Any]]:
  """Returns the marked modules of a directory."""
  found = [*sys.modules.items()]
  return [x for x in found if getattr(x[1], _BESIDE, None) == directory]


def _lies_beside(name: str, module: Any, directory: pathlib.Path) -> bool:
  file = getattr(module, "__file__", None)
  if not file or pathlib.Path(file).suffix != ".py":
    return False
  if name.startswith(short_names.CONFIG_FILE) or name == "__main__":
    return False
  # Below it there may be a whole environment.
  return _first(name) not in _OURS and _top(name, _file(module)) == directory


def _top(name: str, file: pathlib.Path) -> pathlib.Path | None:
  """Returns the directory from which a module is imported by this name."""
  parts = name.split(".")
  place = file.parent if file.stem == "__init__" else file.with_suffix("")
  if place.parts[-len(parts) :] != tuple(parts):
    return None
  return place.parents[len(parts) - 1]


def _forget(tops: Container[str]) -> None:
  """Forgets packages with all that is in them."""
  for name in [*sys.modules]:
    if _first(name) in tops:
      del sys.modules[name]


def _first(name: str) -> str:
  return name.partition(".")[0]


def _exists(directory: pathlib.Path, name: str) -> bool:
  top = directory / _first(name)
  return top.is_dir() or top.with_suffix(".py").is_file()


def _file(module: Any) -> pathlib.Path:
  return pathlib.Path(module.__file__).resolve()


def _read(file: pathlib.Path) -> list[str]:
  return importlib.util.decode_source(file.read_bytes()).splitlines()
