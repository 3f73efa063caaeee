"""The command line: --config=FILE, --config.a.b=VALUE, and absl's own flags.

  python -m launch.train --config=configs/x.py --config.rollout.group_size=8

A program that takes it is `app.run(main, flags_parser=flags.parse)`, with
`load_from_command_line()` inside `exit_on_setting_error()` in its main, which
is a `command`.
"""

import contextlib
import errno
import functools
import importlib
import inspect
import json
import pathlib
import pkgutil
import re
import select
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from absl import flags as absl_flags
from absl import logging

import envs
from launch.cli import (
  command_help,
  config_file,
  output,
  settings_help,
  similar_paths,
)
from rl.backends import contract as backends
from rl.runtime import log_line
from rl.settings import overrides as overrides_lib
from rl.settings import parsing
from twinmesh import error_codes

_CONFIG = absl_flags.DEFINE_string(
  "config",
  None,
  "Settings of the run: a Python file with get_config(), FILE.py:ARGUMENT for"
  " get_config(ARGUMENT), or the config.json of a run. --config.a.b=VALUE"
  " changes a setting, and --noconfig.a.b turns one off (false or none)."
  " --config.a=NAME replaces a whole part, before any --config.a.b=VALUE,"
  " whatever their order. --config.help and --config.help=a list all settings.",
)
_PRINT_CONFIG = absl_flags.DEFINE_bool(
  "print_config",
  False,
  "Prints all settings as JSON, which --config=FILE.json takes, and ends.",
)
_HELP = "help"
# A class of the user's has refused a value of its own.
_REFUSED = "TM-S04"

# absl has no flag whose name is open-ended, so parse() leaves them here.
_overrides: dict[str, str | None] = {}


def command(program: Callable[[], None]) -> Callable[[Sequence[str]], None]:
  """Returns the `main` of a program that takes flags only.

  Ctrl-C ends it, and so does a reader of its output that has seen enough, as in
  `... | head`, unless within `output.dropping`: with the exit code that a shell
  shows of such a signal. Standard streams may be closed.
  """

  @functools.wraps(program)
  def main(argv: Sequence[str]) -> None:
    with exit_on_setting_error():
      refuse_arguments(argv)
    with exit_on_interrupt():
      program()

  return main


@contextlib.contextmanager
def exit_on_interrupt() -> Iterator[None]:
  """Ends the process on Ctrl-C, and when nobody reads its output; `command`."""
  output.open_missing()
  try:
    try:
      yield
    finally:
      sys.stdout.flush()
  except KeyboardInterrupt:
    log_line.tell("interrupted")
    sys.exit(128 + signal.SIGINT)
  except BrokenPipeError:
    if not _has_lost_its_reader():
      raise
    sys.exit(128 + signal.SIGPIPE)


def refuse_arguments(argv: Sequence[str]) -> None:
  """Raises SettingError on arguments that are not flags."""
  if len(argv) > 1:
    message = f"unexpected arguments: {' '.join(argv[1:])}"
    flag = "config" if argv[1].endswith((".py", ".json")) else "run"
    if flag in absl_flags.FLAGS and not absl_flags.FLAGS[flag].present:
      message += f"; did you mean --{flag}={argv[1]}?"
    raise overrides_lib.SettingError(message)


def _has_lost_its_reader() -> bool:
  """Returns whether nobody reads stdout; what is left of it is then dropped."""
  try:
    place = sys.stdout.fileno()
  except OSError:  # It is no file.
    return False
  stdout = select.poll()
  stdout.register(place, 0)
  if not stdout.poll(0):
    return False
  # The interpreter flushes once more when it ends.
  output.drop(sys.stdout)
  return True


def parse(argv: Sequence[str]) -> list[str]:
  """Keeps the overrides for `load_from_command_line`; absl parses the rest.

  `--config.a.b` takes the next argument as its value unless that is a flag
  too, and is true then. Of a setting given twice the later counts.

  Returns:
    The arguments that are not flags, program name first.
  """
  _overrides.clear()
  remaining, rest = [], list(argv)
  while rest:
    argument = rest.pop(0)
    if argument == "--":
      remaining += [argument, *rest]
      break
    if match := re.fullmatch(r"--?noconfig\.([^=]+)", argument):
      path, text = match[1], None
    elif match := re.fullmatch(r"(?s)--?config\.([^=]+)(?:=(.*))?", argument):
      path, text = match.groups()
      if text is None:
        # A dash and a digit is a negative number.
        alone = not rest or re.match(r"--?[A-Za-z]|--$", rest[0])
        text = "true" if alone else rest.pop(0)
    else:
      remaining.append(argument)
      continue
    _overrides[path] = text
  with exit_on_interrupt():
    rest = command_help.parse(remaining)
  # Libraries narrate at INFO, absl's default once an app runs.
  if not absl_flags.FLAGS["verbosity"].present:
    logging.set_verbosity(logging.WARNING)
  return rest


def parse_without_settings(argv: Sequence[str]) -> list[str]:
  """Returns as `parse`, for a program that takes no settings.

  One that is given ends the process with code 2.
  """
  rest = parse(argv)
  given = arguments(_overrides)
  given += ["--config"] if _CONFIG.present else []
  if given:
    message = f"{given[0]}: this command takes no settings; leave it out"
    error_codes.fail(message, command_help.WRONG_FLAG)
  return rest


def overrides() -> dict[str, str | None]:
  """Returns the overrides by path; None is --noconfig.a.b."""
  return dict(_overrides)


def overrides_of_run() -> dict[str, str | None]:
  """Returns the overrides, for a program that reads the settings of a run.

  Raises:
    SettingError: a --config is given as well.
  """
  if _CONFIG.present:
    raise overrides_lib.SettingError(
      "--config: name a run with --run=DIR, which has its settings; "
      "--config.engine.slots=8 and the like change them"
    )
  return overrides()


def override(path: str, text: str, flag: str) -> None:
  """Adds an override for which there is a flag of its own.

  Raises:
    SettingError: it is given as --config.path, too.
  """
  if path in _overrides:
    given = overrides_lib.argument(path, _overrides[path])
    raise overrides_lib.SettingError(
      f"{given} and --{flag}={text} are the same setting; leave one out"
    )
  _overrides[path] = text


def arguments(changes: Mapping[str, str | None]) -> list[str]:
  """Returns the arguments that give a program these overrides."""
  return [overrides_lib.argument(path, text) for path, text in changes.items()]


def load_from_command_line(
  check: Callable[[Any], None] | None = None,
) -> Any:
  """Returns `load` of --config and the overrides beside it.

  With --config.help or --print_config it prints the settings and ends.
  """
  if not _CONFIG.value:
    raise overrides_lib.SettingError(
      "--config is missing; name a file, as in --config=configs/NAME.py"
    )
  changes = dict(_overrides)
  part = changes.pop(_HELP, "")
  tree = load(_CONFIG.value, changes, check)
  if part:
    _import_environments()
    print(settings_help.text(tree, "" if part == "true" else part))
  elif _PRINT_CONFIG.value:
    print(json.dumps(config_file.to_json(tree), indent=2))
  else:
    return tree
  sys.exit()


def load(
  path: str,
  changes: Mapping[str, str | None] | None = None,
  check: Callable[[Any], None] | None = None,
) -> Any:
  """Returns the settings of a file; no device is touched.

  Args:
    path: `x.py`, `x.py:argument`, or a `.json` written by `to_json`.
    changes: text by dotted path, {"rollout.group_size": "2"}; None turns a
      setting off. See `overrides.apply` for their order.
    check: called last, after the tree's own validate() if it has one.

  Raises:
    SettingError: what is wrong with the file or with an override.
    ValueError: of validate() or check.
  """
  file, argument = split(path)
  if file.suffix == ".json":
    tree = config_file.read_json(file)
  else:
    tree = _get_config(file, argument)
  tree = apply(tree, changes or {})
  if hasattr(tree, "validate"):
    tree.validate()
  if check is not None:
    check(tree)
  if getattr(tree, "rounds", None) == 0:
    _check_updates(changes or {})
  return tree


def _check_updates(changes: Mapping[str, str | None]) -> None:
  """Raises SettingError for settings of updates that are never made."""
  for path, text in changes.items():
    name = path.removeprefix("algorithm.")
    if name == "epochs" or path.partition(".")[0] == "optimizer":
      given = overrides_lib.argument(path, text)
      raise overrides_lib.SettingError(
        f"{given} has no effect with rounds=0, where only the warm start takes "
        f"steps; use --config.warm_start.{name}"
      )


def apply(tree: Any, changes: Mapping[str, str | None]) -> Any:
  """Returns settings with overrides, in which environments have short names.

  Raises:
    SettingError: what is wrong with an override.
  """
  with contextlib.suppress(overrides_lib.SettingError):
    return overrides_lib.apply(tree, changes)
  # It may name an environment that nothing has imported so far.
  _import_environments()
  return overrides_lib.apply(tree, changes)


def read_alone(kind: type, name: str) -> Any:
  """Returns the setting that a flag gives in place of a --config.

  Args:
    kind: of the setting, such as `envs.base.Reward`.
    name: of the flag.

  Raises:
    SettingError: what is wrong with it.
  """
  text = str(absl_flags.FLAGS[name].value)
  if _CONFIG.value or _overrides:
    raise overrides_lib.SettingError(
      f"--{name} stands for itself; with a --config use "
      f"--config.{name}='{text}'"
    )
  _import_environments()
  return parsing.read_field(kind, parsing.Text(text), f"--{name}")


def _import_environments() -> None:
  """Imports all environments: short names are those of loaded modules."""
  for module in pkgutil.walk_packages(envs.__path__, "envs."):
    importlib.import_module(module.name)


def read_backend(text: str) -> backends.Backend:
  """Returns the backend that a flag names, with its packages.

  Raises:
    ValueError: there is none of the name, or it cannot work.
  """
  kind: Any = backends.Backend
  read = parsing.read_field(kind, parsing.Text(text), "--backend")
  read.validate()
  read.validate_installed()
  return read


def instance_of(cls: type, example: str) -> Callable[[Any], None]:
  """Returns a check that refuses settings of another class."""

  def check(tree: Any) -> None:
    if not isinstance(tree, cls):
      raise overrides_lib.SettingError(
        f"--config must give an {cls.__module__}.{cls.__name__}, not "
        f"{type(tree).__name__}; use a file such as {example}"
      )

  return check


def sweep(path: str) -> list[dict[str, str]]:
  """Returns the overrides of each run of the file's sweep(), or no runs.

  Raises:
    SettingError: the file fails, or it lists something else than settings.
  """
  file, _ = split(path)
  if file.suffix == ".json":
    return []
  module = config_file.load(file)
  if not hasattr(module, "sweep"):
    return []
  with config_file.blame(file):
    runs = [
      {key: str(value) for key, value in run.items()} for run in module.sweep()
    ]
  for key in (key for run in runs for key in run):
    _check_name(file, key)
  return runs


def _check_name(file: pathlib.Path, key: Any) -> None:
  if not isinstance(key, str):
    raise overrides_lib.SettingError(
      f"{file}: sweep() lists {key!r} as a setting; name one, as in "
      '{"optimizer.learning_rate": 1e-3}'
    )


@contextlib.contextmanager
def exit_on_setting_error() -> Iterator[None]:
  """Ends the process with code 2 and no traceback on a ValueError.

  Also on a path that is too long for any disk. Wrap only what loads and checks
  settings: around a run, it would hide where an error came from.
  """
  try:
    yield
  except ValueError as error:
    error_codes.fail(error, error_codes.code_of(error, _REFUSED))
  except OSError as error:
    if error.errno != errno.ENAMETOOLONG:
      raise
    error_codes.fail(
      f"{error.filename}: {error.strerror}; shorten it", "TM-C05"
    )


def split(path: str) -> tuple[pathlib.Path, str | None]:
  """Returns the file and what follows `.py:`; the file exists."""
  head, separator, argument = path.partition(".py:")
  file = pathlib.Path(f"{head}.py" if separator else path)
  if file.parts[:1] == ("configs",):
    file = _or_shipped(file)
  if not file.is_file():
    raise overrides_lib.SettingError(_missing(file))
  if file.suffix not in (".py", ".json"):
    raise overrides_lib.SettingError(
      f"--config={path}: expected a .py or .json file"
    )
  return file, argument if separator else None


def _or_shipped(file: pathlib.Path) -> pathlib.Path:
  """Returns a file below configs/, or the one that comes with the package."""
  shipped = config_file.ROOT / file
  is_elsewhere = shipped.is_file() or not file.parent.is_dir()
  return shipped if is_elsewhere and not file.is_file() else file


def _missing(file: pathlib.Path) -> str:
  if (kept := file / "config.json").is_file():
    return f"--config={file} is a directory; did you mean {kept}?"
  start = f"--config={file}: no such file"
  if not file.parent.is_dir():
    return f"{start}; there is no directory {file.parent}"
  others = [
    path
    for path in file.parent.iterdir()
    if path.suffix in (".py", ".json") and path.name != "__init__.py"
  ]
  if not others:
    return f"{start}; {file.parent} holds no .py or .json file"
  return f"{start}{similar_paths.advice(file, others)}"


def _get_config(file: pathlib.Path, argument: str | None) -> Any:
  module = config_file.load(file)
  get_config = getattr(module, "get_config", None)
  if get_config is None:
    raise overrides_lib.SettingError(f"{file}: has no get_config()")
  arguments = [] if argument is None else [argument]
  with config_file.blame(file):
    takes = inspect.signature(get_config).parameters
  if arguments and not takes:
    raise overrides_lib.SettingError(
      f"{file}:{argument}: its get_config() takes no argument; leave out "
      f":{argument}"
    )
  with config_file.blame(file):
    tree = get_config(*arguments)
  if not overrides_lib.is_setting(type(tree)):
    raise overrides_lib.SettingError(
      f"{file}: get_config() returned {type(tree).__name__}; expected a frozen"
      " dataclass such as rl.experiment.Experiment"
    )
  return tree
