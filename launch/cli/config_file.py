"""Config files: loaded as modules, and kept with the settings that need them.

A file may define a loss or an environment of its own. config.json then names
a class of it, so it keeps the file as well:

  {"class": .., "algorithm": {"loss": {"class": "_config_mine.Spo"}},
   "config_files": {"_config_mine": {"path": "mine.py", "lines": [..]}}}

The modules beside the file that it has imported are kept the same way.
`read_json` runs what is kept, whatever has become of the file since, if
`known_programs` knows it: like any program, it should come from somebody you
trust.
"""

import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import pathlib
import re
import sys
import traceback
import types
from collections.abc import Iterator, Mapping
from typing import Any

from launch.cli import known_programs, modules_beside
from models import untrusted_files
from rl.settings import overrides, short_names

_KEPT = known_programs.KEPT
MAX_BYTES = 16 * untrusted_files.MIB
_LINES = modules_beside.LINES
ROOT = pathlib.Path(__file__).resolve().parents[2]


def load(file: pathlib.Path) -> types.ModuleType:
  """Runs a file as a module, under a name that no import statement uses.

  The later of two files of one name takes the place of the earlier.

  Raises:
    SettingError: the file fails, with its line.
  """
  with blame(file):
    text = importlib.util.decode_source(file.read_bytes())
  name = short_names.CONFIG_FILE + re.sub(r"\W", "_", file.stem)
  path = file.resolve()
  modules_beside.look_beside(path.parent)
  with blame(file):
    module = _run(name, str(path), text.splitlines(), str(path))
  modules_beside.mark(path.parent)
  return module


def to_json(tree: Any) -> dict[str, Any]:
  """Returns plain JSON data, with the config files that define its classes.

  Raises:
    SettingError: a value that cannot be a setting, or a class that cannot be
      found again: inside a function, or of a file that was loaded once more.
  """
  kept = {}
  for cls in _classes(tree):
    directory = modules_beside.directory_of(cls.__module__)
    if cls.__module__.startswith(short_names.CONFIG_FILE):
      module = _module_of(cls)
      directory = pathlib.Path(str(module.__file__)).parent
      kept[module.__name__] = (module.__file__, getattr(module, _LINES))
    if directory is not None:
      kept |= modules_beside.mark(directory)
  entries = {k: {"path": path, "lines": x} for k, (path, x) in kept.items()}
  return overrides.to_json(tree) | ({_KEPT: entries} if entries else {})


def read_json(file: pathlib.Path, *, as_kept: bool = True) -> Any:
  """Returns the settings of a JSON file, with the classes that it keeps.

  Args:
    as_kept: if false, a config file of the same name that this process has
      loaded is taken for the one that is kept.

  Raises:
    SettingError: it cannot be read, is another file, does not fit the current
      settings, or would run what `known_programs.check` does not know.
  """
  put_root_on_path()
  try:
    data = untrusted_files.read_json(file, MAX_BYTES)
    kept = data.get(_KEPT, {}) if isinstance(data, dict) else {}
    checked = _checked(kept)
    if isinstance(data, dict):
      known_programs.check(data)
      data.pop(_KEPT, None)
    if not as_kept:
      checked = {k: v for k, v in checked.items() if k not in sys.modules}
    _restore_all(file, checked)
    return _of_this_version(data)
  except overrides.SettingError as error:
    raise overrides.SettingError(f"{file}: {error}") from error
  except untrusted_files.BadFile as error:
    raise overrides.SettingError(str(error)) from error


def _of_this_version(data: Any) -> Any:
  try:
    return overrides.from_json(data)
  except overrides.SettingError as error:
    raise overrides.SettingError(
      f"{error} (If an older version saved this run, it cannot be loaded, as "
      "settings and parameters had other names: start a new run, or use that "
      "version.)"
    ) from error


def put_root_on_path() -> None:
  """Lets configs import the project, wherever the program was started."""
  if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))


@contextlib.contextmanager
def blame(file: pathlib.Path, source: str | None = None) -> Iterator[None]:
  """Turns an exception of the user's file into an error that names the line.

  Args:
    source: the name of its code in a traceback; None is its path.
  """
  try:
    yield
  # Any fault of the file is for its author to correct.
  except Exception as error:
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    place, line = _place(file, source or str(file.resolve()), error)
    raise overrides.SettingError(f"{place}: {reason}{line}") from error


def _place(
  file: pathlib.Path, source: str, error: Exception
) -> tuple[str, str]:
  """Returns `file:line` of the last frame in the file, and its source."""
  if isinstance(error, SyntaxError) and error.filename:
    text = (error.text or "").strip()
    return f"{error.filename}:{error.lineno}", f"\n  {text}"
  frames = traceback.extract_tb(error.__traceback__)
  own = [f for f in frames if f.filename == source]
  if not own:
    return str(file), ""
  return f"{file}:{own[-1].lineno}", f"\n  {own[-1].line}"


def _run(
  name: str, path: str, lines: list[str], source: str
) -> types.ModuleType:
  """Runs the lines as a module with `path` as its file.

  Args:
    source: the name of the lines in a traceback.
  """
  put_root_on_path()
  module = types.ModuleType(name)
  module.__file__ = path
  setattr(module, _LINES, lines)
  code = modules_beside.compile_lines(lines, source)
  # Dataclasses of the file look their module up, and so does JSON.
  sys.modules[name] = module
  exec(code, vars(module))
  return module


def _checked(kept: Any) -> dict[str, tuple[str, list[str]]]:
  """Returns path and lines of each module kept in JSON."""
  try:
    return {
      name: (str(entry["path"]), [str(line) for line in entry["lines"]])
      for name, entry in kept.items()
    }
  except (AttributeError, KeyError, TypeError):
    raise overrides.SettingError(
      f"{_KEPT}: expected path and lines of each file; put the config.json of "
      "the run back"
    ) from None


def _restore_all(
  file: pathlib.Path, kept: Mapping[str, modules_beside.KeptLines]
) -> None:
  """Runs kept config files, after the modules that lay beside them."""
  files = {k for k in kept if k.startswith(short_names.CONFIG_FILE)}
  beside = {name: kept[name] for name in kept.keys() - files}
  if modules_beside.forget_others(beside):
    for name in files:
      sys.modules.pop(name, None)
  with modules_beside.finding(file, beside):
    for name in sorted(beside):
      path, lines = beside[name]
      source = modules_beside.remember_lines(path, lines, file)
      with blame(pathlib.Path(path), source):
        importlib.import_module(name)
    for name in sorted(files):
      _restore(file, name, *kept[name])


def _restore(
  file: pathlib.Path, name: str, path: str, lines: list[str]
) -> None:
  """Runs a kept config file as the module that its classes name."""
  if getattr(sys.modules.get(name), _LINES, None) == lines:
    return
  # Tracebacks show these lines, whatever the file holds by now.
  source = modules_beside.remember_lines(path, lines, file)
  with blame(pathlib.Path(path), source):
    _run(name, path, lines, source)


def _module_of(cls: Any) -> types.ModuleType:
  """Returns the config file that defines a class.

  Raises:
    SettingError: it cannot be found.
  """
  module: Any = sys.modules[cls.__module__]
  if "<" in cls.__qualname__:  # <locals> or <lambda>
    raise overrides.SettingError(
      f"{module.__file__}: {cls.__qualname__} has no name at the top of the "
      "file; define it there with def or class, so that the run can be read "
      "again"
    )
  found = module
  for part in cls.__qualname__.split("."):
    found = getattr(found, part, None)
  if found is not cls:
    raise overrides.SettingError(
      f"{module.__file__} was loaded again after these settings, which hold its"
      f" {cls.__name__}; load them again as well"
    )
  return module


def _classes(node: Any) -> Iterator[Any]:
  """Yields the class of every object in a tree of settings, and functions."""
  if isinstance(node, type) or inspect.isfunction(node):
    yield node
  elif overrides.is_setting(type(node)):
    yield type(node)
    for field in dataclasses.fields(node):
      yield from _classes(getattr(node, field.name))
  elif isinstance(node, tuple | list):
    for item in node:
      yield from _classes(item)
  elif isinstance(node, Mapping):
    for item in node.values():
      yield from _classes(item)
