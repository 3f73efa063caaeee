"""The command line: --config=FILE, --config.a.b=VALUE, and absl's own flags.

  python -m launch.train --config=configs/x.py --config.rollout.group_size=8

A program that takes it is `app.run(main, flags_parser=flags.parse)`, with
`load_from_command_line()` inside `exit_on_setting_error()` in its main.
"""

import contextlib
import difflib
import importlib.util
import json
import pathlib
import re
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from absl import app, logging
from absl import flags as absl_flags

from rl import settings

_CONFIG = absl_flags.DEFINE_string(
  "config",
  None,
  "Settings of the run: a Python file with get_config(), FILE.py:ARGUMENT for"
  " get_config(ARGUMENT), or a JSON file of an earlier run. --config.a.b=VALUE"
  " replaces one setting, and --noconfig.a.b turns one off.",
)
_ROOT = pathlib.Path(__file__).resolve().parents[1]

# absl has no flag whose name is open-ended, so parse() leaves them here.
_overrides: dict[str, str] = {}


def parse(argv: Sequence[str]) -> list[str]:
  """Keeps the overrides for `load_from_command_line`; absl parses the rest.

  `--config.a.b` takes the next argument as its value unless that is a flag
  too, and is true then. Of a setting given twice the later counts.

  Returns:
    The arguments that are no flags, program name first.
  """
  _overrides.clear()
  remaining, rest = [], list(argv)
  while rest:
    argument = rest.pop(0)
    if argument == "--":
      remaining += [argument, *rest]
      break
    if match := re.fullmatch(r"--?noconfig\.([^=]+)", argument):
      path, text = match[1], "false"
    elif match := re.fullmatch(r"(?s)--?config\.([^=]+)(?:=(.*))?", argument):
      path, text = match.groups()
      if text is None:
        # A dash and a digit is a negative number.
        alone = not rest or re.match(r"--?[A-Za-z]|--$", rest[0])
        text = "true" if alone else rest.pop(0)
    else:
      remaining.append(argument)
      continue
    # Popped first: the order is that of the last mention of each.
    _overrides.pop(path, None)
    _overrides[path] = text
  rest = app.parse_flags_with_usage(remaining)
  # Libraries narrate at INFO, absl's default once an app runs.
  if not absl_flags.FLAGS["verbosity"].present:
    logging.set_verbosity(logging.WARNING)
  return rest


def overrides() -> dict[str, str]:
  """Returns the text of every --config.a.b=VALUE of the command line."""
  return dict(_overrides)


def load_from_command_line(
  check: Callable[[Any], None] | None = None,
) -> Any:
  """Returns `load` of --config and the overrides that stood beside it."""
  if _CONFIG.value is None:
    raise settings.SettingError(
      "--config is missing; name a file, as in --config=configs/NAME.py"
    )
  return load(_CONFIG.value, _overrides, check)


def load(
  path: str,
  changes: Mapping[str, str] | None = None,
  check: Callable[[Any], None] | None = None,
) -> Any:
  """Returns the settings of a file; no device is touched.

  Args:
    path: `x.py`, `x.py:argument`, or a `.json` written by `to_json`.
    changes: text by dotted path, {"rollout.group_size": "2"}; in order.
    check: called last, after the tree's own validate() if it has one.

  Raises:
    SettingError: what is wrong with the file or with an override.
    ValueError: of validate() or check.
  """
  file, argument = _split(path)
  if file.suffix == ".json":
    tree = _read_json(file)
  else:
    tree = _get_config(file, argument)
  for key, text in (changes or {}).items():
    tree = settings.override(tree, key, text)
  if hasattr(tree, "validate"):
    tree.validate()
  if check is not None:
    check(tree)
  return tree


def sweep(path: str) -> list[dict[str, str]]:
  """Returns the overrides of each run of the file's sweep(), or no runs."""
  file, _ = _split(path)
  if file.suffix == ".json":
    return []
  module = _import(file)
  if not hasattr(module, "sweep"):
    return []
  with _blame(file):
    return [
      {key: str(value) for key, value in run.items()} for run in module.sweep()
    ]


@contextlib.contextmanager
def exit_on_setting_error() -> Iterator[None]:
  """Ends the process with code 2 and the message alone on a ValueError.

  Wrap only what loads and checks settings: around a run, it would hide where
  an error came from.
  """
  try:
    yield
  except ValueError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)


def _split(path: str) -> tuple[pathlib.Path, str | None]:
  """Returns the file and what follows `.py:`; the file exists."""
  head, separator, argument = path.partition(".py:")
  file = pathlib.Path(f"{head}.py" if separator else path)
  if not file.is_file():
    raise settings.SettingError(_missing(file))
  if file.suffix not in (".py", ".json"):
    raise settings.SettingError(
      f"--config={path}: expected a .py or .json file"
    )
  return file, argument if separator else None


def _missing(file: pathlib.Path) -> str:
  start = f"--config={file}: no such file"
  if not file.parent.is_dir():
    return f"{start}; there is no directory {file.parent}"
  names = [
    x.name
    for x in sorted(file.parent.iterdir())
    if x.suffix in (".py", ".json") and x.name != "__init__.py"
  ]
  near = difflib.get_close_matches(file.name, names) or names[:10]
  if not near:
    return f"{start}; {file.parent} holds no .py or .json file"
  found = " or ".join(str(file.parent / name) for name in near)
  return f"{start}; did you mean {found}?"


def _read_json(file: pathlib.Path) -> Any:
  _put_root_on_path()
  try:
    return settings.from_json(json.loads(file.read_text()))
  except settings.SettingError as error:
    raise settings.SettingError(f"{file}: {error}") from error
  except ValueError as error:
    raise settings.SettingError(f"{file} is not JSON: {error}") from error


def _get_config(file: pathlib.Path, argument: str | None) -> Any:
  module = _import(file)
  get_config = getattr(module, "get_config", None)
  if get_config is None:
    raise settings.SettingError(f"{file}: has no get_config()")
  arguments = [] if argument is None else [argument]
  with _blame(file):
    tree = get_config(*arguments)
  if not settings.is_setting(type(tree)):
    raise settings.SettingError(
      f"{file}: get_config() returned {type(tree).__name__}; expected a frozen"
      " dataclass such as rl.config.Experiment"
    )
  return tree


def _import(file: pathlib.Path) -> types.ModuleType:
  """Runs a file as a module that no import statement can name by chance."""
  _put_root_on_path()
  name = f"_config_{file.stem}"
  spec = importlib.util.spec_from_file_location(name, file.resolve())
  assert spec is not None
  assert spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  # Dataclasses of the file look their module up, and so does JSON.
  sys.modules[name] = module
  with _blame(file):
    spec.loader.exec_module(module)
  return module


def _put_root_on_path() -> None:
  if str(_ROOT) not in sys.path:
    sys.path.append(str(_ROOT))


@contextlib.contextmanager
def _blame(file: pathlib.Path) -> Iterator[None]:
  """Turns an exception of the user's file into its line of that file."""
  try:
    yield
  # Whatever the file does is its author's to correct.
  except Exception as error:
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    place, line = _place(file, error)
    raise settings.SettingError(f"{place}: {reason}{line}") from error


def _place(file: pathlib.Path, error: Exception) -> tuple[str, str]:
  """Returns `file:line` of the last frame in the file, and its source."""
  if isinstance(error, SyntaxError) and error.filename:
    source = (error.text or "").strip()
    return f"{error.filename}:{error.lineno}", f"\n  {source}"
  frames = traceback.extract_tb(error.__traceback__)
  own = [f for f in frames if f.filename == str(file.resolve())]
  if not own:
    return str(file), ""
  return f"{file}:{own[-1].lineno}", f"\n  {own[-1].line}"
