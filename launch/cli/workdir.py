"""The directory of a run: claimed by one process, for one config."""

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO

from launch.cli import (
  config_file,
  known_programs,
  run_repair,
  similar_paths,
)
from models import untrusted_files
from models.hf import safetensors_io
from rl import experiment as experiment_lib
from rl.loop import trackers
from rl.rollout import chats
from rl.runtime import checkpoint, disk, log_line
from rl.settings import overrides

CHECKPOINTS = "checkpoints"
WARM_START = "warm_start"
WARM_START_LINES = "warm_start.jsonl"
FAILURE = "failure.txt"
"""The error that ended a run, until the same command goes on."""
_DAMAGED = ".damaged"
_RECORDS = (
  "events.jsonl",
  "spans.jsonl",
  "metrics.jsonl",
  "evaluations.jsonl",
  "logprob_gap.jsonl",
  WARM_START_LINES,
  trackers.TRACKER_ID,
)
_TREES = (
  "events",
  "spans",
  "trajectories",
  "tensorboard",
  trackers.DIRECTORY,
  "skipped",
  WARM_START,
  chats.KEPT,
)
_LOCK = ".lock"
_EARLIER = "config_until_round_"
_OTHERS = (
  "report.html",
  "trace.json",
  "learning_curve.svg",
  ".status",
  FAILURE,
)
_ROWS = {
  "metrics.jsonl": "round",
  "evaluations.jsonl": "round",
  "logprob_gap.jsonl": "round",
  WARM_START_LINES: "step",
}
_MAY_CHANGE = (
  "rounds",
  "max_skipped",
  "progress_timeout_s",
  "log_startup",
  "recovery.",
  "evaluation.",
  "retention.",
  "bounds.",
  "tracker",
  "warm_start.checkpoint_every",
  "engine.slots",
  "placement.",
)
_MAY_CHANGE_BEFORE = ("optimizer.learning_rate", "optimizer.schedule")
"""Until a run has rounds: `flags.load` refuses them where there are none."""


class Moved(OSError):
  """Another directory has the path of a run that goes on."""


def claim(
  path: str | os.PathLike, experiment: experiment_lib.Experiment
) -> TextIO:
  """Writes config.json and returns a lock that is held while it is open.

  A run that never saved a checkpoint starts over: its records are removed.
  What is damaged beside the checkpoints is moved aside, with a warning.
  Records without the config.json of a run are not touched.

  Raises:
    SettingError: the directory cannot be written, as on a full disk, or has a
      path that checkpoints cannot have, another process uses it, it holds
      records of something else, or a run with other settings. Settings that
      change nothing in what was learned, or only rounding (placement, slots
      of the engine), may differ: see `_MAY_CHANGE`; and so may paths of
      files that were moved.
  """
  directory = pathlib.Path(path)
  # Before the lock: nothing is left in a directory that is not ours.
  _check_path(directory)
  _check_ours(directory)
  lock = locked(directory)
  try:
    _take_over(directory, experiment)
  except OSError as error:
    if not disk.is_cause(error, directory):
      raise
    raise overrides.SettingError(disk.failure(error, directory)) from error
  return lock


def _take_over(
  directory: pathlib.Path, experiment: experiment_lib.Experiment
) -> None:
  """Mends or clears a locked directory, and writes its config.json."""
  _check_checkpoints(directory)
  for note in run_repair.mend(
    directory, trees=_TREES, files=(*_RECORDS, *_OTHERS), rows=_ROWS
  ):
    log_line.tell(f"warning: {note}")
  if has_saved(directory):
    _check_same(directory, experiment)
  else:
    _clear(directory)
  chats.keep(experiment.chosen_chat, directory)
  data = config_file.to_json(experiment)
  known_programs.remember(data)
  if has_saved(directory):
    _keep_changed_code(directory, data)
  text = json.dumps(data, indent=2) + "\n"
  run_repair.write(directory / "config.json", text)
  (directory / FAILURE).unlink(missing_ok=True)


@contextlib.contextmanager
def held(path: str | os.PathLike) -> Iterator[Callable[[], None]]:
  """Yields a check that a path still leads to the same directory.

  The lock moves along with a directory, so another run may take its path.

  Raises:
    Moved: it leads to another one; raised by the check, and in the place of any
      error of the body.
    FileNotFoundError: it leads to none; raised by the check.
  """
  number = os.open(path, os.O_RDONLY | os.O_DIRECTORY)

  def check() -> None:
    if not os.path.samestat(os.fstat(number), os.stat(path)):
      raise Moved(
        f"{path} leads to another directory now: that of this run was moved "
        "or removed; to go on, name it where it is now"
      )

  try:
    yield check
  except Exception:
    with contextlib.suppress(FileNotFoundError):
      check()
    raise
  finally:
    os.close(number)


def keep_failure(path: str | os.PathLike, text: str) -> None:
  """Keeps the error that ended a run, until it is claimed again."""
  with contextlib.suppress(OSError):  # It may be the disk that ended the run.
    run_repair.write(pathlib.Path(path) / FAILURE, f"{text.strip()}\n")


def failure(path: str | os.PathLike) -> str:
  """Returns the error that ended the newest start of a run; "" without one."""
  try:
    return untrusted_files.read_text(pathlib.Path(path) / FAILURE).strip()
  except untrusted_files.BadFile:
    return ""


def failure_line(path: str | os.PathLike) -> str:
  """Returns the first line of `failure`."""
  return failure(path).partition("\n")[0]


def read(
  path: str | os.PathLike, *, as_kept: bool = True
) -> experiment_lib.Experiment:
  """Returns the settings of a run directory.

  Args:
    as_kept: see `config_file.read_json`.

  Raises:
    SettingError: no run is there, or its config cannot be read.
  """
  check_exists(path)
  file = pathlib.Path(path) / "config.json"
  return config_file.read_json(file, as_kept=as_kept)


def check_exists(path: str | os.PathLike) -> None:
  """Raises SettingError unless a directory is that of a run."""
  directory = pathlib.Path(path)
  if directory.is_file():
    raise overrides.SettingError(
      f"{directory} is a file; name the directory of a run"
    )
  if not directory.is_dir():
    runs = [file.parent for file in directory.parent.glob("*/config.json")]
    near = similar_paths.advice(directory, runs)
    raise overrides.SettingError(f"{directory} does not exist{near}")
  if not os.path.lexists(directory / "config.json"):
    raise overrides.SettingError(f"{directory} holds no run: no config.json")
  if is_exported(directory):
    raise overrides.SettingError(
      f"{directory} holds an exported checkpoint; name the run it came from"
    )


def is_exported(directory: pathlib.Path) -> bool:
  """Returns whether it is a checkpoint, which has a config.json as well."""
  names = safetensors_io.SINGLE, safetensors_io.INDEX
  return any(os.path.isfile(directory / name) for name in names)


def read_trained(path: str | os.PathLike) -> experiment_lib.Experiment:
  """Returns the settings of a run, to use its checkpoint.

  The directory that it started from may be gone, unless the checkpoint holds
  adapters only.

  Raises:
    SettingError: as `read`.
  """
  experiment = read(path)
  kept = pathlib.Path(path) / chats.KEPT
  if kept.is_dir():
    chat = experiment.chat or chats.Hf()
    chat = dataclasses.replace(chat, directory=str(kept))
    experiment = dataclasses.replace(experiment, chat=chat)
  if experiment.model.lora is not None:
    return experiment
  return dataclasses.replace(
    experiment, initial=None, chat=experiment.chat or chats.Words()
  )


def check_initial(
  path: str | os.PathLike, experiment: experiment_lib.Experiment
) -> None:
  """Checks the initial weights, unless the checkpoints of the run hold them.

  Args:
    path: of the run; "" is none.

  Raises:
    ValueError: as `Experiment.validate_initial`.
  """
  is_saved = bool(path) and has_saved(path)
  if is_saved and experiment.model.lora is None:
    return
  try:
    experiment.validate_initial()
  except ValueError as error:
    if is_saved:
      error.args = (
        f"{error}\nthe adapters of {path} need that model; if it was moved, "
        "train with --config.initial=DIR, and for other commands set initial "
        f"in {path}/config.json",
      )
    raise


def checkpoints(path: str | os.PathLike, of: str = CHECKPOINTS) -> list[str]:
  """Returns the names of a run's checkpoints: whole ones, and damaged ones.

  Leftovers of an interrupted save do not count.

  Args:
    of: CHECKPOINTS or WARM_START.
  """
  return sorted(
    path.name
    for path in (pathlib.Path(path) / of).glob("*")
    if re.fullmatch("[0-9]+", path.name.removesuffix(_DAMAGED))
  )


def saved_rounds(path: str | os.PathLike, of: str = CHECKPOINTS) -> list[int]:
  """Returns the rounds after which a whole checkpoint is kept, in order.

  Args:
    of: CHECKPOINTS, or WARM_START, which has steps.
  """
  return sorted(int(name) for name in checkpoints(path, of) if name.isdigit())


def check_none_damaged(path: str | os.PathLike, of: str = CHECKPOINTS) -> None:
  """Checks that a run without a readable checkpoint has saved none.

  Raises:
    checkpoint.Unsaved: it has: it must not start over unasked.
  """
  names = checkpoints(path, of)
  if names:
    raise checkpoint.Unsaved(
      f"no checkpoint in {path}/{of} can be read; all are damaged: "
      f"{', '.join(names)}. Put a copy of one back, or move that directory "
      "away to start over"
    )


def has_saved(path: str | os.PathLike) -> bool:
  """Returns whether a run has a checkpoint, of its warm start at least."""
  return bool(checkpoints(path) or checkpoints(path, WARM_START))


def locked(directory: pathlib.Path) -> TextIO:
  """Returns the lock of a directory, which is held while it is open.

  Raises:
    SettingError: another process holds it, or it cannot be written.
  """
  lock = _opened(directory / _LOCK)
  try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError:
    lock.close()
    raise overrides.SettingError(
      f"--workdir={directory} is in use by another process; wait for it or "
      "choose another directory"
    ) from None
  return lock


def _opened(path: pathlib.Path) -> TextIO:
  """Opens the lock, which is made unless it exists.

  Raises:
    SettingError: it cannot be written, or something else is in its place.
  """
  if os.path.lexists(path) and not path.is_file():
    raise overrides.SettingError(
      f"--workdir={path.parent}: {path.name} must be a file, which processes "
      "lock; move away what is there, if no process uses the directory"
    )
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("a")
  except OSError as error:
    raise overrides.SettingError(
      f"--workdir={path.parent} cannot be written: {_reason(error)}"
    ) from error


def _reason(error: OSError) -> str:
  """Returns why a directory cannot be made, or a file in it."""
  if isinstance(error, FileExistsError):
    is_there = os.path.exists(error.filename)
    return f"{error.filename} is a {'file' if is_there else 'link to nothing'}"
  return error.strerror or str(error)


def _check_path(directory: pathlib.Path) -> None:
  try:
    str(directory.absolute()).encode()
  except UnicodeEncodeError as error:
    raise overrides.SettingError(
      f"--workdir={str(directory)!r}: its path must be UTF-8, as the files of "
      "a run name it; choose another directory"
    ) from error
  try:
    checkpoint.check_path(directory)
  except ValueError as error:
    raise overrides.SettingError(f"--workdir={directory}: {error}") from error


def _check_ours(directory: pathlib.Path) -> None:
  """Raises on a directory with records of something else than a run."""
  file = directory / "config.json"
  if os.path.lexists(file):
    try:
      data: Any = untrusted_files.read_json(file, config_file.MAX_BYTES)
    except untrusted_files.BadFile:
      data = None
    if not isinstance(data, dict) or "class" not in data:
      raise overrides.SettingError(
        f"--workdir={directory}: its config.json is not that of a run; choose "
        "another directory"
      )
    return
  names = [n for n in (*_RECORDS, *_TREES) if os.path.lexists(directory / n)]
  if names:
    raise overrides.SettingError(
      f"--workdir={directory} holds {', '.join(names)}, but no config.json of "
      "the run that wrote them; choose another directory, or move them away"
    )


def _check_checkpoints(directory: pathlib.Path) -> None:
  """Raises where a file is in their place: no run starts over unasked."""
  for name in (CHECKPOINTS, WARM_START):
    path = directory / name
    if os.path.lexists(path) and not path.is_dir():
      raise overrides.SettingError(
        f"--workdir={directory}: {name} must be a directory; put it back, or "
        "move the file away to start over"
      )


def _clear(directory: pathlib.Path) -> None:
  for name in _RECORDS:
    (directory / name).unlink(missing_ok=True)
  for path in directory.glob(f"{_EARLIER}*.json"):
    path.unlink()
  for name in _TREES:
    shutil.rmtree(directory / name, ignore_errors=True)


def forbidden_changes(
  path: str | os.PathLike, experiment: experiment_lib.Experiment
) -> list[str]:
  """Returns the changes for which a saved run cannot go on; writes nothing.

  Args:
    experiment: one whose dtype is "auto" has that of the run.

  Raises:
    SettingError: as `read`.
  """
  if not has_saved(path):
    return []
  # The code may have changed, as all of the program may; settings may not.
  before = read(path, as_kept=False)
  if (dtype := before.model.compute.dtype) != "auto":
    experiment = experiment.with_auto_dtype(dtype)
  may_change = _MAY_CHANGE + (() if before.rounds else _MAY_CHANGE_BEFORE)
  changes = overrides.difference(before, experiment)
  if before.model.lora is not None:
    may_change += ("initial:",)  # By their checksums the weights are the same.
  lines = [str(change) for change in changes if not _is_move(change)]
  return [line for line in lines if not line.startswith(may_change)]


def _is_move(change: overrides.Difference) -> bool:
  """Tells a path whose file is gone, and is under its name elsewhere."""
  if not (isinstance(change.before, str) and isinstance(change.after, str)):
    return False
  old, new = pathlib.Path(change.before), pathlib.Path(change.after)
  return old.name == new.name and not old.exists() and new.exists()


def _check_same(
  directory: pathlib.Path, experiment: experiment_lib.Experiment
) -> None:
  if changes := forbidden_changes(directory, experiment):
    listing = "\n  ".join(changes)
    raise overrides.SettingError(
      f"--workdir={directory} holds a run with other settings:\n  {listing}\n"
      f"go on with --config={directory}/config.json, or choose another "
      "directory"
    )


def _keep_changed_code(
  directory: pathlib.Path, config: Mapping[str, Any]
) -> None:
  """Keeps the config of earlier rounds where its code was another, and warns.

  Args:
    config: of the rounds to come, as `config_file.to_json` returns it.
  """
  before = untrusted_files.read_object(
    directory / "config.json", config_file.MAX_BYTES
  )
  old, new = (one.get(known_programs.KEPT) or {} for one in (before, config))
  files = {
    pathlib.Path(entry["path"]).name
    for name, entry in {**new, **old}.items()
    if old.get(name, {}).get("lines") != new.get(name, {}).get("lines")
  }
  if not files:
    return
  newest = max(saved_rounds(directory), default=0)
  name = f"{_EARLIER}{newest}.json"
  # The code of a second change has saved nothing since the first.
  if not (directory / name).exists():
    run_repair.write(directory / name, json.dumps(before, indent=2) + "\n")
  log_line.tell(
    f"warning: {', '.join(sorted(files))} changed since round {newest}; the "
    f"code of the rounds before is kept in {name}"
  )


def command() -> str:
  """Returns the command line of this process, as a user would repeat it."""
  module = getattr(sys.modules["__main__"], "__spec__", None)
  program = ["-m", module.name] if module else [sys.argv[0]]
  return shlex.join([_python(), *program, *sys.argv[1:]])


def _python() -> str:
  # Not resolved: a link of a virtual environment is what makes it one.
  python, here = pathlib.Path(sys.executable), pathlib.Path.cwd()
  if python.is_relative_to(here):
    return str(python.relative_to(here))
  return str(python)


def make_writable(path: pathlib.Path, setting: str) -> None:
  """Makes a directory unless it exists, and checks that files can be written.

  Raises:
    SettingError: they cannot.
  """
  try:
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path):
      pass
  except OSError as error:
    raise overrides.SettingError(
      f"{setting} cannot be written: {_reason(error)}"
    ) from error
